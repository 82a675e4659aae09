"""Holds: counts, eviction order, and their limits towards other parts of the core."""

import pytest
from core_rig import GRANTED, HIT, MISS, PENDING, keys, ready_blocks
from harness.operations import run_to_end
from hold_rig import D2P, P2D, PRIVATE, HoldRig
from simulation import ModelTier

from kvtier.tiers.core import handoffs, waiters
from kvtier.tiers.core.call_specs import LookupSpec, StoreSpec
from kvtier.tiers.core.commands import HoldChanged, LoadFromTier, LookupInTier
from kvtier.tiers.core.holds import Hold
from kvtier.tiers.core.manager import TierManager
from kvtier.tiers.core.settings import TierSettings
from kvtier.tiers.errors import HoldExpired, HoldNotFound, InvalidKey
from kvtier.tiers.secondary_tier import NamespaceId, Outcome
from kvtier.tiers.stats.snapshots import HandoffStats
from kvtier.tiers.types import HandoffDirection, NamespaceSpec, PublishStatus

OTHER = NamespaceSpec(NamespaceId(b"o" * 32), world_size=1, part_bytes=(4096,))


def ended(stats: HandoffStats) -> int:
    """Returns the numbers of holds, by their end."""
    return stats.open + stats.released + stats.expired + stats.dropped


def test_every_hold_ends_in_one_way() -> None:
    """B2.19: published = open + released + expired + dropped, each by its direction."""
    rig = HoldRig()
    rig.store(keys(0))
    for number, direction in enumerate([P2D, P2D, P2D, D2P, D2P]):
        rig.publish(keys(0), f"r{number}", direction=direction)
    rig.publish(keys(0), "r0", direction=D2P, now=1.0)
    assert rig.core.release_hold(rig.name("r1"), 2.0)
    assert (rig.stats().released, rig.stats().dropped, rig.stats(D2P).dropped) == (1, 1, 0)
    rig.core.renew_hold(rig.name("r4"), 29.0, 100.0)
    rig.core.tick(30.0)
    rig.core.reset(rig.open("elsewhere", OTHER))
    assert [rig.stats(direction).open for direction in HandoffDirection] == [0, 2], "r0, published anew, and r4"
    rig.core.reset(rig.session)
    for direction, published in ((P2D, 3), (D2P, 3)):
        assert rig.stats(direction).published == published == ended(rig.stats(direction))
    assert (rig.stats(D2P).expired, rig.stats(D2P).dropped) == (1, 2)


def test_granted_claims_are_counted_with_their_hold() -> None:
    rig = HoldRig()
    rig.store(keys(0))
    hold = rig.publish(keys(0))
    rig.claim()
    rig.claim(first=[7])
    rig.claim()
    assert (hold.claims, rig.stats().claimed, hold.nbytes) == (2, 2, 4096)


def test_a_claim_is_a_use() -> None:
    """B4.9: the last claim of a block is its last use."""
    rig = HoldRig()
    rig.store(keys(0))
    hold = rig.publish(keys(0))
    rig.store(keys(1))
    before = hold.items[0].last_use
    rig.claim()
    assert hold.items[0].last_use > before


def test_a_publication_is_a_use() -> None:
    """The TTL of 20 s counts from the publication, not from the store."""
    rig = HoldRig()
    rig.core = TierManager(64 << 10, 64 << 10, (), settings=TierSettings(ttl={"cpu": 20.0}, held_part=1.0))
    rig.core.add_memory(0, 64 << 10)
    rig.session = rig.open("engine")
    rig.store(keys(0, 1))
    rig.core.tick(15.0)
    rig.publish(keys(0), duration=3.0, now=15.0)
    for now in (18.0, 22.0, 30.0):
        rig.core.tick(now)
    assert [block.key for block in ready_blocks(rig.core)] == keys(0)
    rig.core.tick(40.0)
    assert ready_blocks(rig.core) == []


def test_held_blocks_are_not_in_the_eviction_queue() -> None:
    """B4.9: a search for room skips them; after the last hold they are the newest in the queue."""
    rig = HoldRig()
    rig.store(keys(*range(16)))
    rig.publish(keys(*range(14)), "a")
    rig.publish(keys(*range(2)), "b")
    (queue,) = rig.core._cpu_tier.queues.all()
    assert [block.key for block in queue.policy.victims()] == [*keys(15), *keys(14)]
    assert rig.core.release_hold(rig.name("a"), 1.0)
    assert rig.store(keys(100, 101, 102)) == GRANTED * 3
    assert rig.look_up(keys(14, 15, 13), prefix=False) == MISS * 3
    assert rig.core.release_hold(rig.name("b"), 2.0)
    assert rig.store(keys(*range(200, 216))) == GRANTED * 16


def test_a_block_of_a_failed_promotion_is_not_in_the_eviction_queue() -> None:
    """It belongs to the tier until the job ends, and then it is gone."""
    rig = HoldRig(ModelTier("near", 1 << 20))
    rig.store_in_all_tiers(keys(0))
    rig.core.reset(rig.session)
    rig.publish(keys(0, 1))
    (load,) = [command for command in rig.core.take_commands() if isinstance(command, LoadFromTier)]
    rig.core.tier_stalled(1, stalled=True)
    queues = rig.core._cpu_tier.queues
    assert [block for queue in queues.all() for block in queue.policy.victims()] == []
    assert rig.core.release_hold(rig.name(), 1.0)
    rig.core.job_finished(load.job_id, [Outcome.FAILED])
    assert [block for queue in queues.all() for block in queue.policy.victims()] == []
    assert not queues._protected
    assert rig.core.stats().tiers[0].used_bytes == 0


def test_a_declined_hold_does_not_count_as_a_use() -> None:
    """B4.9: its blocks keep their places in the eviction queue."""
    rig = HoldRig(part=0)
    rig.store(keys(0))
    rig.store(keys(*range(1, 16)))
    assert rig.publish(keys(0)) is PublishStatus.NO_ROOM
    rig.store(keys(100))
    assert rig.look_up(keys(0)) == MISS


def test_held_and_retained_blocks_become_evictable_after_both() -> None:
    """In either order of their ends."""
    for hold_ends, retention_ends in ((10.0, 20.0), (20.0, 10.0)):
        rig = HoldRig()
        rig.publish(keys(0), duration=hold_ends)
        answer = run_to_end(
            rig.core.prepare_store(rig.session, keys(0), StoreSpec(lease_seconds=60, retain_for=retention_ends), now=0)
        )
        run_to_end(rig.core.complete_store(rig.session, answer.store_id))
        (queue,) = rig.core._cpu_tier.queues.all()
        for now, victims in ((9.0, 0), (15.0, 0), (25.0, 1)):
            rig.core.tick(now)
            assert len(list(queue.policy.victims())) == victims


def test_the_record_of_expired_holds_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """It explains misses; a hold that is published again is removed from it."""
    monkeypatch.setattr("kvtier.tiers.core.handoffs._REMEMBERED", 2)
    rig = HoldRig()
    rig.store(keys(0))
    for number in range(3):
        rig.publish(keys(0), f"r{number}")
    rig.core.tick(30.0)
    with pytest.raises(HoldNotFound):
        rig.claim("r0", now=30.0)
    for name in ("r1", "r2"):
        with pytest.raises(HoldExpired):
            rig.claim(name, now=30.0)
    rig.publish(keys(0), "r1", now=30.0)
    assert rig.claim("r1", now=30.0).statuses == HIT


def test_ended_holds_of_a_tenant_do_not_replace_those_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a claim of another tenant would wait for a hold that cannot come."""
    monkeypatch.setattr("kvtier.tiers.core.handoffs._REMEMBERED", 4)
    rig = HoldRig()
    rig.publish(keys(0), "own")
    rig.core.release_hold((rig.session.namespace.id, "engine", "own"), 0.0)
    other = rig.open("engine", OTHER)
    for number in range(8):
        rig.publish(keys(0), f"r{number}", session=other)
        rig.core.release_hold((OTHER.id, "engine", f"r{number}"), 0.0)
    assert not rig.core.may_come((rig.session.namespace.id, "engine", "own"))
    assert [rig.core.may_come((OTHER.id, "engine", f"r{number}")) for number in (4, 5)] == [True, False]


def test_a_refused_publication_leaves_no_block() -> None:
    """Also no empty ones for its valid keys."""
    rig = HoldRig()
    with pytest.raises(InvalidKey):
        rig.publish([*keys(1), *keys(0, group=7)])
    assert rig.core.stats().tiers[0].blocks == 0
    assert rig.core.stats().held_bytes == 0


def test_a_hold_may_be_empty() -> None:
    """It has a name and ends like any other; its claim grants no blocks."""
    rig = HoldRig(part=0)
    assert isinstance(rig.publish([]), Hold)
    assert (rig.claim().statuses, rig.claim().lease) == (b"", None)
    assert rig.stats().claimed == 0


def test_a_repeated_block_is_held_once() -> None:
    """Its store, loss and release count for both positions."""
    rig = HoldRig(ModelTier("near", 1 << 20))
    hold = rig.publish(keys(0, 0, 1, 1))
    assert (hold.pending, rig.core.stats().held_bytes) == (4, 2 * 4096)
    rig.store(keys(0))
    assert (hold.pending, rig.claim().statuses) == (2, HIT * 2 + PENDING * 2)
    rig.core.close_session(rig.session.id)
    assert (hold.pending, rig.claim().statuses) == (0, HIT * 2 + MISS * 2)
    assert rig.core.release_hold(rig.name(), 1.0)
    assert (rig.core.stats().held_bytes, rig.core.stats().tiers[0].blocks) == (0, 1)


def test_expired_holds_end_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """No call finds them. Until their slice they keep their pins."""
    monkeypatch.setattr(handoffs, "_SLICE", 2)
    rig = HoldRig()
    rig.store(keys(0))
    for number in range(5):
        rig.publish(keys(0), f"r{number}", duration=30)
    rig.core.take_commands()
    rig.core.tick(30)
    assert rig.core.holds() == []
    with pytest.raises(HoldExpired):
        rig.claim("r4", now=10)
    assert not rig.core.renew_hold(rig.name("r4"), now=10)
    assert not rig.core.release_hold(rig.name("r4"), 10)
    left, told = [len(rig.core._handoffs)], []
    while left[-1]:
        told += [command.name for command in rig.core.take_commands() if isinstance(command, HoldChanged)]
        rig.core.work()
        left.append(len(rig.core._handoffs))
    assert left == [3, 1, 0]
    told += [command.name for command in rig.core.take_commands() if isinstance(command, HoldChanged)]
    assert told[-1] == rig.name("r4")
    assert (rig.stats().expired, rig.core.stats().held_bytes) == (5, 0)
    with pytest.raises(HoldExpired):
        rig.claim("r4", now=31)


@pytest.mark.parametrize("end", ["released", "replaced", "reset"])
def test_an_expired_hold_stays_expired_before_its_slice(monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    monkeypatch.setattr(handoffs, "_SLICE", 1)
    rig = HoldRig()
    rig.publish(keys(0), "first")
    rig.publish(keys(1), "second")
    rig.core.tick(30)
    if end == "released":
        rig.core.release_hold(rig.name("second"), 30)
    elif end == "replaced":
        assert isinstance(rig.publish(keys(1), "second", now=30), Hold)
    else:
        rig.core.reset(rig.session)
    rig.core.work()
    assert (rig.stats().expired, rig.stats().released, rig.stats().dropped) == (2, 0, 0)
    assert [hold.name[2] for hold in rig.core.holds()] == ["second"] * (end == "replaced")


def test_blocks_of_orphaned_holds_are_given_up_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if a hold ends between two slices."""
    monkeypatch.setattr(waiters, "SETTLE_SLICE", 4)
    rig = HoldRig()
    holds = [rig.publish(keys(*range(3)), name) for name in "abc"]
    rig.core.close_session(rig.session.id)
    pending = [[hold.pending for hold in holds]]
    rig.core.release_hold(rig.name("b"), 1.0)
    for _ in range(2):
        rig.core.work()
        pending.append([hold.pending for hold in holds])
    assert pending == [[1, 3, 3], [0, 3, 2], [0, 3, 0]]
    assert not rig.core._handoffs._table._waiters._by_block
    while rig.core.has_work():
        rig.core.work()
    assert rig.core.stats().tiers[0].blocks == 0


def test_the_end_of_an_engine_does_not_affect_other_holds() -> None:
    """Holds of other engines, and of an equal id in another namespace, keep waiting."""
    rig = HoldRig()
    mine, theirs = rig.publish(keys(0)), rig.publish(keys(1), "s", session=rig.reader)
    rig.core.close_session(rig.reader.id)
    namesake = rig.core.open_session(b"namesake", "engine", None, OTHER)
    rig.core.close_session(namesake.id)
    assert (mine.pending, theirs.pending) == (1, 0)
    assert not mine.orphaned


def test_claims_keep_waiting_while_a_block_is_being_stored() -> None:
    """The publisher has ended, and another engine is storing one of the blocks."""
    rig = HoldRig()
    store = run_to_end(rig.core.prepare_store(rig.reader, keys(0), StoreSpec(lease_seconds=60), now=0)).store_id
    rig.publish(keys(0, 1))
    rig.core.take_commands()
    rig.core.close_session(rig.session.id)
    assert HoldChanged(rig.name()) not in rig.core.take_commands()
    run_to_end(rig.core.complete_store(rig.reader, store))
    assert HoldChanged(rig.name()) in rig.core.take_commands()


def test_blocks_that_arrive_after_a_hold_ended() -> None:
    """Ordinary blocks are kept; a block that only the hold named is dropped."""
    rig = HoldRig()
    rig.publish([*keys(0), PRIVATE])
    store = run_to_end(
        rig.core.prepare_store(rig.session, [*keys(0), PRIVATE], StoreSpec(lease_seconds=60), now=0)
    ).store_id
    assert rig.core.release_hold(rig.name(), 1.0)
    rig.core.take_commands()
    run_to_end(rig.core.complete_store(rig.session, store))
    assert rig.core.take_commands() == []
    assert rig.look_up([*keys(0), PRIVATE], prefix=False) == HIT + MISS
    assert rig.core.stats().tiers[0].blocks == 1


def test_a_pending_reset_delays_promotions() -> None:
    """B3.19: until old leases end there are no promotions; a new hold waits for its stores."""
    rig = HoldRig(ModelTier("near", 1 << 20))
    rig.store_in_all_tiers(keys(0, 1))
    lease = run_to_end(rig.core.lookup(rig.reader, keys(0), LookupSpec(lease_seconds=60), now=0)).lease
    assert lease is not None
    assert rig.core.reset(rig.session) == 1
    rig.publish(keys(0, 1))
    assert not [command for command in rig.core.take_commands() if isinstance(command, LoadFromTier)]
    assert rig.claim().statuses == PENDING * 2
    rig.store(keys(0, 1))
    assert rig.claim().statuses == HIT * 2
    assert rig.core.resetting(rig.session) == 1, "the reader still has its old block"


def test_a_hold_without_room_promotes_nothing() -> None:
    """Held blocks fill the CPU tier: the rest of the hold waits for a store."""
    rig = HoldRig(ModelTier("near", 1 << 20))
    rig.store_in_all_tiers(keys(0, 1))
    rig.core.reset(rig.session)
    rig.store_in_all_tiers(keys(*range(100, 115)))
    assert isinstance(rig.publish(keys(*range(100, 115)), "full"), Hold)
    assert isinstance(rig.publish(keys(0), "one"), Hold)
    assert rig.publish(keys(1), "two") is PublishStatus.NO_ROOM
    (load,) = [command for command in rig.core.take_commands() if isinstance(command, LoadFromTier)]
    assert [block.key for block in load.blocks] == keys(0)


def test_a_hold_promotes_what_a_tier_is_known_to_have() -> None:
    """An earlier tier that has not answered does not prevent it, because a hold is fetched once."""
    shared, near = ModelTier("far", 1 << 20), ModelTier("near", 1 << 20)
    shared.share(gather_bytes=0)
    rig = HoldRig(shared, near)
    rig.store_in_all_tiers(keys(0))
    rig.core.reset(rig.session)
    rig.core.tick(11)
    rig.publish(keys(0))
    (load,) = [command for command in rig.core.take_commands() if isinstance(command, LoadFromTier)]
    assert load.tier == 2


def test_partial_blocks_are_never_passed_to_tiers() -> None:
    """B2.6: neither to a shared tier, nor to one that admits blocks at their second use."""
    shared = ModelTier("far", 1 << 20)
    shared.shared = True
    rig = HoldRig(shared)
    rig.publish([*keys(0), PRIVATE])
    asked = [
        key for command in rig.core.take_commands() if isinstance(command, LookupInTier) for _, key in command.keys
    ]
    assert asked == keys(0)
    settings = TierSettings(admission={"near": "second_use"}, held_part=1.0)
    core = TierManager(64 << 10, 64 << 10, (ModelTier("near", 1 << 20),), settings=settings)
    core.add_memory(0, 64 << 10)
    session = core.open_session(b"s", "engine", None, NamespaceSpec(NamespaceId(b"n" * 32), 1, (4096,)))
    answer = run_to_end(core.prepare_store(session, [*keys(0), PRIVATE], StoreSpec(lease_seconds=60), now=0))
    assert answer.statuses == GRANTED * 2
    run_to_end(core.complete_store(session, answer.store_id))
    for request in ("a", "b", "c"):
        lease = run_to_end(
            core.lookup(
                session, [*keys(0), PRIVATE], LookupSpec(prefix=False, request_id=request, lease_seconds=60), now=0
            )
        ).lease
        core.release(session, lease.id)
    assert run_to_end(core.flush(session.namespace.id, [PRIVATE])) == b"\x03"
    stored = [block.key for command in core.take_commands() for block in getattr(command, "blocks", ())]
    assert stored == keys(0)
