"""Publications in slices: a hold in slices is equal to one in one piece, and leaves nothing."""

import pytest
from core_rig import HIT, PENDING, keys
from harness.operations import Steps, run_to_end
from hold_rig import P2D, HoldRig
from simulation import ModelTier

from kvtier.tiers.core.call_specs import LookupSpec
from kvtier.tiers.core.commands import HoldChanged
from kvtier.tiers.core.holds import _UNPIN_COST, Hold
from kvtier.tiers.types import PublishStatus

NAMES = keys(*range(12))


def new_rig() -> HoldRig:
    """Blocks 0 to 3 are ready, 4 to 7 only in the tier below, the others unknown."""
    rig = HoldRig(ModelTier("near", 1 << 20), extents=2)
    rig.store_in_all_tiers(keys(*range(4, 8)))
    rig.core.reset(rig.session)
    rig.store_in_all_tiers(keys(*range(4)))
    rig.core.take_commands()
    return rig


def begin(rig: HoldRig, names: list[bytes] = NAMES, most: int = 3) -> Steps[Hold | PublishStatus]:
    publication = rig.core.publish(
        rig.session,
        "r",
        names,
        range(len(names)),
        num_tokens=192,
        direction=P2D,
        duration=30.0,
        now=0.0,
        slice_keys=most,
    )
    return Steps(publication, "publication")


def step(publication: Steps[Hold | PublishStatus], times: int) -> bool:
    """Takes the first turn, and publishes some slices."""
    return [publication.step() for _ in range(times + 1)][-1]


def nothing_is_held(rig: HoldRig) -> bool:
    handoffs = rig.core._handoffs
    pinned = [block for block in rig.core._cpu_tier._index if block.pins and not block.pending]
    return not (len(handoffs) or handoffs.held_bytes or handoffs._pins._counts or pinned)


def test_slices_publish_the_same_hold() -> None:
    """A hold has the same items, awaited blocks and commands if it is published in slices."""
    whole, sliced = new_rig(), new_rig()
    expected = whole.publish(NAMES)
    publication = begin(sliced)
    assert step(publication, 4)
    assert HoldChanged(sliced.name()) in sliced.core.take_commands(), "claims learn of the open hold"
    assert [publication.step() for _ in range(3)] == [True] * 3
    assert HoldChanged(sliced.name()) not in sliced.core.take_commands(), "claims of all blocks still wait"
    assert not publication.step()
    hold = publication.answer
    assert isinstance(hold, Hold)
    assert isinstance(expected, Hold)
    assert (hold.pending, hold.record) == (8, hold.record)
    assert (hold.pending, hold.keys, hold.expires_at) == (expected.pending, expected.keys, expected.expires_at)
    assert [block and block.key for block in hold.items] == [block and block.key for block in expected.items]
    assert sliced.core._handoffs.held_bytes == whole.core._handoffs.held_bytes
    assert sliced.core.take_commands()[-1] == HoldChanged(sliced.name())
    sliced.flood()
    assert sliced.claim().statuses == HIT * 4 + PENDING * 8
    assert sliced.core.release_hold(sliced.name(), 1.0)


def test_a_claim_of_the_first_blocks_does_not_wait_for_all_slices() -> None:
    """Two of the four ready blocks are in the first slice, which prepares the hold."""
    rig = new_rig()
    publication = begin(rig, most=2)
    told = []
    while publication.step():
        hold = rig.core.find_hold(rig.name(), 0.0)
        is_told = HoldChanged(rig.name()) in rig.core.take_commands()
        if hold is not None:
            told.append((is_told, rig.core.is_settled(hold, 2)))
    assert told == [(True, False), (True, True), *[(False, True)] * 4]


@pytest.mark.parametrize("slices", range(8))
def test_an_abandoned_publication_leaves_nothing(slices: int) -> None:
    """The engine's session ends before, or after, the hold is open."""
    rig = new_rig()
    publication = begin(rig)
    assert step(publication, slices)
    rig.core.close_session(rig.session.id)
    publication.operation.close()
    rig.finish_jobs()
    assert nothing_is_held(rig)
    assert not rig.core._handoffs._publications


def test_a_refused_publication_leaves_nothing() -> None:
    rig = HoldRig(part=0.5)
    assert begin(rig).finish() is PublishStatus.NO_ROOM
    assert nothing_is_held(rig)


def test_a_reset_restarts_the_pins_of_a_publication() -> None:
    """The hold has no block of before the reset (B3.19)."""
    rig = new_rig()
    publication = begin(rig)
    step(publication, 2)
    old = list(publication.state.blocks)
    rig.core.reset(rig.session)
    hold = publication.finish()
    assert isinstance(hold, Hold)
    assert set(old).isdisjoint(hold.items)
    assert len(hold.items) == len(NAMES)


def test_a_hold_released_during_its_preparation_stays_released() -> None:
    rig = new_rig()
    publication = begin(rig)
    step(publication, 5)
    assert rig.core.release_hold(rig.name(), 1.0)
    assert not publication.step()
    rig.finish_jobs()
    assert nothing_is_held(rig)


def test_the_pins_of_a_long_hold_end_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other events run between two slices."""
    monkeypatch.setattr("kvtier.tiers.core.sliced_work.SLICE", 5 * _UNPIN_COST)
    rig = new_rig()
    rig.publish(NAMES)
    rig.finish_jobs()
    assert rig.core.release_hold(rig.name(), 1.0)
    assert len(rig.core._handoffs._pins._counts) == 7
    rig.core.work()
    rig.core.work()
    assert nothing_is_held(rig)


@pytest.mark.parametrize("ended", ["released", "replaced"])
def test_pins_of_ended_holds_refuse_no_publication(monkeypatch: pytest.MonkeyPatch, ended: str) -> None:
    """The publication waits until the pins of the ended hold are removed."""
    monkeypatch.setattr("kvtier.tiers.core.sliced_work.SLICE", 2 * _UNPIN_COST)
    rig = HoldRig(part=0.8)
    [budget] = set(rig.core._handoffs._pins._budgets.values())
    count = budget.bound // 4096 * 2 // 3
    rig.publish(keys(*range(count)))
    if ended == "released":
        assert rig.core.release_hold(rig.name(), 1.0)
    hold = rig.publish(keys(*range(100, 100 + count)))
    assert isinstance(hold, Hold)
    assert budget.used <= budget.bound
    assert rig.publish(keys(*range(200, 200 + 2 * count)), "large") is PublishStatus.NO_ROOM
    assert rig.core.release_hold(rig.name(), 2.0)
    while rig.core._handoffs._unpins:
        rig.core.work()
    assert nothing_is_held(rig)


def test_a_publication_waits_only_for_the_pins_of_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for those of leases of any client, although these have ended later."""
    rig = HoldRig(part=0.8)
    rig.store_in_all_tiers(keys(200))
    asked = rig.core.lookup(rig.reader, keys(200) * 2000, LookupSpec(lease_seconds=60), now=0)
    lease = run_to_end(asked).lease
    assert lease is not None
    [budget] = set(rig.core._handoffs._pins._budgets.values())
    count = budget.bound // 4096 * 2 // 3
    rig.publish(keys(*range(count)))
    monkeypatch.setattr("kvtier.tiers.core.sliced_work.SLICE", 2 * _UNPIN_COST)
    assert rig.core.release_hold(rig.name(), 1.0)
    rig.core.release(rig.reader, lease.id)
    publication, steps = begin(rig, keys(*range(100, 100 + count)), count), 0
    while publication.step():
        steps += 1
    assert isinstance(publication.answer, Hold)
    assert steps <= count // 2, "each step removes two pins of the hold"


def test_a_reset_restarts_a_publication_that_waits_for_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.tiers.core.sliced_work.SLICE", 1 * _UNPIN_COST)
    rig = HoldRig(part=0.8)
    [budget] = set(rig.core._handoffs._pins._budgets.values())
    count = budget.bound // 4096 - 6
    rig.publish(keys(*range(100, 100 + count)), "earlier")
    assert rig.core.release_hold(rig.name("earlier"), 1.0)
    publication = begin(rig)
    step(publication, 4)
    assert (len(publication.state.blocks), publication.state.result) == (len(NAMES), None)
    old = list(publication.state.blocks)
    rig.core.reset(rig.session)
    hold = publication.finish()
    assert isinstance(hold, Hold)
    assert set(old).isdisjoint(hold.items)


def test_a_stall_between_two_slices_ends_the_wait_for_its_blocks() -> None:
    """The hold gives up the blocks of a stalled promotion. No eviction queue gets them again."""
    rig = new_rig()
    run_to_end(rig.core.lookup(rig.session, keys(*range(4, 8)), LookupSpec(lease_seconds=60), now=0))
    publication = begin(rig)
    step(publication, 2)
    rig.core.tier_stalled(1, stalled=True)
    hold = publication.finish()
    assert isinstance(hold, Hold)
    assert hold.items[4:6] == [None, None]
    assert hold.pending == 6
    tier = rig.core._cpu_tier
    assert all(tier.contains(block) for block in tier.queues._protected)
    assert rig.core.release_hold(rig.name(), 1.0)
    assert all(tier.contains(block) for queue in tier.queues.all() for block in queue.policy.victims())
    rig.core.tier_stalled(1, stalled=False)
    rig.finish_jobs()
    assert nothing_is_held(rig)


def test_a_claim_waits_for_blocks_that_are_not_prepared_yet() -> None:
    """Blocks 0 to 3 are ready. A claim that waits for five is not answered before the fifth."""
    rig = new_rig()
    publication = begin(rig)
    while publication.step():
        hold = publication.state.result
        if isinstance(hold, Hold):
            assert not rig.core.is_settled(hold, 5)
            assert not rig.core.is_settled(hold, 0)
    hold = publication.answer
    assert isinstance(hold, Hold)
    assert rig.core.is_settled(hold, 4)
    assert not rig.core.is_settled(hold, 5)


def test_an_abandoned_hold_counts_as_released() -> None:
    """Each published hold is open or counts as ended."""
    rig = new_rig()
    publication = begin(rig)
    step(publication, 5)
    publication.operation.close()
    stats = rig.stats()
    assert (stats.published, stats.open, stats.released) == (1, 0, 1)


def test_an_abandoned_publication_leaves_a_later_hold_of_its_name() -> None:
    """The engine publishes the request again while the first call prepares its hold."""
    rig = new_rig()
    first = begin(rig)
    step(first, 5)
    assert isinstance(rig.publish(NAMES), Hold)
    first.operation.close()
    assert rig.claim().statuses[:4] == HIT * 4
    stats = rig.stats()
    assert (stats.published, stats.open, stats.dropped, stats.released) == (2, 1, 1, 0)


def test_the_engine_ends_while_its_second_hold_of_the_blocks_is_prepared() -> None:
    """Both holds give up the blocks that no client writes, also those that are prepared later."""
    rig = new_rig()
    first = rig.publish(NAMES, "first")
    second = begin(rig)
    step(second, 5)
    hold = second.state.result
    assert isinstance(first, Hold)
    assert hold.unprepared
    rig.core.close_session(rig.session.id)
    rig.finish_jobs()
    assert second.finish() is hold
    for each in (first, hold):
        assert [item for item, block in enumerate(each.items) if block is None] == [8, 9, 10, 11]
        assert each.unsettled == 0


def test_a_publication_without_room_pins_few_blocks() -> None:
    """It is refused when the budget is full, and not only when all of its blocks are pinned."""
    rig = HoldRig(extents=2)
    publication = begin(rig, keys(*range(10_000)))
    while publication.step():
        assert len(publication.state.blocks) < 1_000
    assert publication.answer is PublishStatus.NO_ROOM
    while rig.core._handoffs._unpins:
        rig.core.work()
    assert nothing_is_held(rig)
