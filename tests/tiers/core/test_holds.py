"""What holds leave behind, what they count, and what they have nothing to do with."""

import pytest
from core_rig import GRANTED, HIT, MISS, PENDING, keys
from hold_rig import D2P, P2D, PRIVATE, HoldRig
from simulation import ModelTier

from kvtier.tiers.base import NamespaceId, Outcome
from kvtier.tiers.core.commands import HoldChanged, LoadFromTier, LookupInTier
from kvtier.tiers.core.holds import Hold
from kvtier.tiers.core.manager import TierManager
from kvtier.tiers.core.settings import TierSettings
from kvtier.tiers.errors import HoldExpired, HoldNotFound, InvalidKey
from kvtier.tiers.stats.snapshots import HandoffStats
from kvtier.tiers.types import HandoffDirection, NamespaceSpec, PublishStatus

OTHER = NamespaceSpec(NamespaceId(b"o" * 16), world_size=1, part_bytes=(4096,))


def ended(stats: HandoffStats) -> int:
    """Returns how many holds there were, by what became of them."""
    return stats.open + stats.released + stats.expired + stats.dropped


def test_every_hold_ends_in_one_way() -> None:
    """B2.19: published = open + released + expired + dropped, each in the direction that it was published in."""
    rig = HoldRig()
    rig.store(keys(0))
    for number, direction in enumerate([P2D, P2D, P2D, D2P, D2P]):
        rig.publish(keys(0), f"r{number}", direction=direction)
    rig.publish(keys(0), "r0", direction=D2P, now=1.0)
    assert rig.core.handoffs.release(rig.name("r1"), 2.0)
    assert (rig.stats().released, rig.stats().dropped, rig.stats(D2P).dropped) == (1, 1, 0)
    rig.core.handoffs.renew(rig.name("r4"), 29.0, 100.0)
    rig.core.tick(30.0)
    rig.core.reset(rig.open("elsewhere", OTHER))
    assert [rig.stats(direction).open for direction in HandoffDirection] == [0, 2], "r0, published anew, and r4"
    rig.core.reset(rig.session)
    for direction, published in ((P2D, 3), (D2P, 3)):
        assert rig.stats(direction).published == published == ended(rig.stats(direction))
    assert (rig.stats(D2P).expired, rig.stats(D2P).dropped) == (1, 2)


def test_claims_are_counted_with_their_hold() -> None:
    """Those that were granted something."""
    rig = HoldRig()
    rig.store(keys(0))
    hold = rig.publish(keys(0))
    assert isinstance(hold, Hold)
    rig.claim()
    rig.claim(first=[7])
    rig.claim()
    assert (hold.claims, rig.stats().claimed, hold.nbytes) == (2, 2, 4096)


def test_a_claim_is_a_use() -> None:
    """B4.9: a block was used last when it was claimed last."""
    rig = HoldRig()
    rig.store(keys(0))
    hold = rig.publish(keys(0))
    assert isinstance(hold, Hold)
    assert hold.items[0] is not None
    rig.store(keys(1))
    before = hold.items[0].last_use
    rig.claim()
    assert hold.items[0].last_use > before


def test_a_publication_is_a_use() -> None:
    """What nobody uses for 20 s goes: 20 s after it was published, not after it was stored."""
    rig = HoldRig()
    rig.core = TierManager(64 << 10, 64 << 10, (), settings=TierSettings(ttl={"cpu": 20.0}, held_part=1.0))
    rig.core.add_memory(0, 64 << 10)
    rig.session = rig.open("engine")
    rig.store(keys(0, 1))
    rig.core.tick(15.0)
    rig.publish(keys(0), duration=3.0, now=15.0)
    for now in (18.0, 22.0, 30.0):
        rig.core.tick(now)
    assert [block.key for block in rig.core._cpu_tier.ready_blocks()] == keys(0)
    rig.core.tick(40.0)
    assert rig.core._cpu_tier.ready_blocks() == []


def test_what_is_held_stands_in_nobodys_way() -> None:
    """B4.9: who looks for room does not walk over what is held for minutes; with the last hold it is in line again, as the last."""
    rig = HoldRig()
    rig.store(keys(*range(16)))
    rig.publish(keys(*range(14)), "a")
    rig.publish(keys(*range(2)), "b")
    (queue,) = rig.core._cpu_tier.queues.all()
    assert [block.key for block in queue.policy.victims()] == [*keys(15), *keys(14)]
    assert rig.core.handoffs.release(rig.name("a"), 1.0)
    assert rig.store(keys(100, 101, 102)) == GRANTED * 3
    assert rig.look_up(keys(14, 15, 13), prefix=False) == MISS * 3
    assert rig.core.handoffs.release(rig.name("b"), 2.0)
    assert rig.store(keys(*range(200, 216))) == GRANTED * 16


def test_what_a_tier_did_not_bring_back_is_in_no_line() -> None:
    """It is the tier's until its job has ended, and then it is gone: nobody may find it there."""
    rig = HoldRig(ModelTier("near", 1 << 20))
    rig.store(keys(0))
    rig.finish_jobs()
    rig.core.reset(rig.session)
    rig.publish(keys(0, 1))
    (load,) = [command for command in rig.core.take_commands() if isinstance(command, LoadFromTier)]
    rig.core.tier_stalled(1, stalled=True)
    queues = rig.core._cpu_tier.queues
    assert [block for queue in queues.all() for block in queue.policy.victims()] == []
    assert rig.core.handoffs.release(rig.name(), 1.0)
    rig.core.job_finished(load.job_id, [Outcome.FAILED])
    assert [block for queue in queues.all() for block in queue.policy.victims()] == []
    assert not queues._protected
    assert rig.core.stats().tiers[0].used_bytes == 0


def test_what_is_declined_keeps_its_place_in_line() -> None:
    """B4.9: it was no use of it."""
    rig = HoldRig(part=0)
    rig.store(keys(0))
    rig.store(keys(*range(1, 16)))
    assert rig.publish(keys(0)) is PublishStatus.NO_ROOM
    rig.store(keys(100))
    assert rig.look_up(keys(0)) == MISS


def test_what_is_held_and_retained_is_in_line_when_both_are_over() -> None:
    """In whichever order they end."""
    for hold_ends, retention_ends in ((10.0, 20.0), (20.0, 10.0)):
        rig = HoldRig()
        rig.publish(keys(0), duration=hold_ends)
        answer = rig.core.prepare_store(rig.session, keys(0), request_id="", expires_at=60, retain_until=retention_ends)
        assert answer.store_id is not None
        rig.core.complete_store(rig.session, answer.store_id)
        (queue,) = rig.core._cpu_tier.queues.all()
        for now, victims in ((9.0, 0), (15.0, 0), (25.0, 1)):
            rig.core.tick(now)
            assert len(list(queue.policy.victims())) == victims


def test_so_many_expired_holds_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason of a miss is worth some memory, and no more; one that is published again is not over."""
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


def test_a_refused_publication_leaves_no_block_behind() -> None:
    """Not even the empty ones of its sound keys."""
    rig = HoldRig()
    with pytest.raises(InvalidKey):
        rig.publish([*keys(1), *keys(0, group=7)])
    assert rig.core.stats().tiers[0].blocks == 0
    assert rig.core.stats().held_bytes == 0


def test_a_hold_may_be_of_nothing() -> None:
    """It has a name and ends like any other; its claim is granted nothing."""
    rig = HoldRig(part=0)
    assert isinstance(rig.publish([]), Hold)
    assert (rig.claim().statuses, rig.claim().lease) == (b"", None)
    assert rig.stats().claimed == 0


def test_a_block_that_is_named_twice_is_held_once() -> None:
    """And comes, is lost and is let go for both."""
    rig = HoldRig(ModelTier("near", 1 << 20))
    hold = rig.publish(keys(0, 0, 1, 1))
    assert isinstance(hold, Hold)
    assert (hold.awaited, rig.core.stats().held_bytes) == (4, 2 * 4096)
    rig.store(keys(0))
    assert (hold.awaited, rig.claim().statuses) == (2, HIT * 2 + PENDING * 2)
    rig.core.close_session(rig.session.id)
    assert (hold.awaited, rig.claim().statuses) == (0, HIT * 2 + MISS * 2)
    assert rig.core.handoffs.release(rig.name(), 1.0)
    assert (rig.core.stats().held_bytes, rig.core.stats().tiers[0].blocks) == (0, 1)


def test_an_engine_that_goes_takes_nothing_from_others() -> None:
    """Neither another engine's holds, nor those of one of the same id in another namespace: they go on waiting."""
    rig = HoldRig()
    mine, theirs = rig.publish(keys(0)), rig.publish(keys(1), "s", session=rig.reader)
    assert isinstance(mine, Hold)
    assert isinstance(theirs, Hold)
    rig.core.close_session(rig.reader.id)
    namesake = rig.core.open_session(b"namesake", "engine", None, OTHER)
    rig.core.close_session(namesake.id)
    assert (mine.awaited, theirs.awaited) == (1, 0)
    assert not mine.orphaned


def test_nobody_is_woken_for_what_is_awaited_still() -> None:
    """The engine is gone, and somebody else is writing one of the blocks."""
    rig = HoldRig()
    store = rig.core.prepare_store(rig.reader, keys(0), request_id="", expires_at=60).store_id
    assert store is not None
    rig.publish(keys(0, 1))
    rig.core.take_commands()
    rig.core.close_session(rig.session.id)
    assert HoldChanged(rig.name()) not in rig.core.take_commands()
    rig.core.complete_store(rig.reader, store)
    assert HoldChanged(rig.name()) in rig.core.take_commands()


def test_a_hold_that_ends_is_not_waited_for_any_more() -> None:
    """Its blocks come later, for whoever wants them; what only it named is not kept then."""
    rig = HoldRig()
    rig.publish([*keys(0), PRIVATE])
    store = rig.core.prepare_store(rig.session, [*keys(0), PRIVATE], request_id="", expires_at=60).store_id
    assert store is not None
    assert rig.core.handoffs.release(rig.name(), 1.0)
    rig.core.take_commands()
    rig.core.complete_store(rig.session, store)
    assert rig.core.take_commands() == []
    assert rig.look_up([*keys(0), PRIVATE], prefix=False) == HIT + MISS
    assert rig.core.stats().tiers[0].blocks == 1


def test_nothing_is_brought_up_while_a_reset_waits() -> None:
    """B3.19: promotions are held until nobody has anything of before; what is published then waits for its stores."""
    rig = HoldRig(ModelTier("near", 1 << 20))
    rig.store(keys(0, 1))
    rig.finish_jobs()
    lease = rig.core.lookup(rig.reader, keys(0), prefix=True, request_id="", expires_at=60).lease
    assert lease is not None
    assert rig.core.reset(rig.session) == 1
    rig.publish(keys(0, 1))
    assert not [command for command in rig.core.take_commands() if isinstance(command, LoadFromTier)]
    assert rig.claim().statuses == PENDING * 2
    rig.store(keys(0, 1))
    assert rig.claim().statuses == HIT * 2
    assert rig.core.resetting(rig.session) == 1, "the reader still has its block of before"


def test_what_finds_no_room_is_not_brought_up() -> None:
    """What is held pins the CPU tier: the rest of the hold waits for somebody to store it."""
    rig = HoldRig(ModelTier("near", 1 << 20))
    rig.store(keys(0, 1))
    rig.finish_jobs()
    rig.core.reset(rig.session)
    rig.store(keys(*range(100, 115)))
    rig.finish_jobs()
    assert isinstance(rig.publish(keys(*range(100, 115)), "full"), Hold)
    assert isinstance(rig.publish(keys(0), "one"), Hold)
    assert rig.publish(keys(1), "two") is PublishStatus.NO_ROOM
    (load,) = [command for command in rig.core.take_commands() if isinstance(command, LoadFromTier)]
    assert [block.key for block in load.blocks] == keys(0)


def test_no_tier_hears_of_what_only_a_hold_names() -> None:
    """B2.6: neither one that is asked what it has, nor one that takes in what is used again."""
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
    session = core.open_session(b"s", "engine", None, NamespaceSpec(NamespaceId(b"n" * 16), 1, (4096,)))
    answer = core.prepare_store(session, [*keys(0), PRIVATE], request_id="", expires_at=60)
    assert answer.statuses == GRANTED * 2
    assert answer.store_id is not None
    core.complete_store(session, answer.store_id)
    for request in ("a", "b", "c"):
        lease = core.lookup(session, [*keys(0), PRIVATE], prefix=False, request_id=request, expires_at=60).lease
        assert lease is not None
        core.release(session, lease.id)
    assert core.durability.flush(session.namespace.id, [PRIVATE]) == b"\x03"
    stored = [block.key for command in core.take_commands() for block in getattr(command, "blocks", ())]
    assert stored == keys(0)
