"""Holds in the core, event by event: what is pinned for another engine, for how long, and how much of it."""

import pytest
from core_rig import GRANTED, HIT, MISS, NO_ROOM, PENDING, SPEC, keys
from hold_rig import D2P, NO_STATUS, P2D, PRIVATE, HoldRig
from simulation import EXTENT, ModelTier

from kvtier.tiers.base import NamespaceId, Outcome
from kvtier.tiers.core.commands import HoldChanged, LoadFromTier, StoreInTier
from kvtier.tiers.core.handoffs import EXPIRY_MARGIN_SECONDS
from kvtier.tiers.core.holds import Hold
from kvtier.tiers.core.manager import TierManager
from kvtier.tiers.core.settings import TierSettings
from kvtier.tiers.errors import HoldExpired, HoldNotFound, InvalidItem, InvalidKey, LimitExceeded
from kvtier.tiers.eviction.quotas import Tenant
from kvtier.tiers.stats.snapshots import HandoffStats
from kvtier.tiers.types import NamespaceSpec, PublishStatus


def test_what_is_held_stays_and_is_leased_to_who_claims_it() -> None:
    """B2.17: a flood evicts nothing of a hold; a claim pins it once more, for the reader's own time."""
    rig = HoldRig()
    rig.store(keys(0, 1, 2))
    rig.publish(keys(0, 1, 2))
    rig.flood()
    claim = rig.claim()
    assert (claim.statuses, claim.hold.num_tokens, claim.hold.direction) == (HIT * 3, 48, P2D)
    assert claim.lease is not None
    assert rig.core.handoffs.release(rig.name(), 1.0)
    rig.flood()
    assert claim.lease.statuses() == HIT * 3, "released, and yet the reader has its lease"
    rig.core.release(rig.reader, claim.lease.id)
    rig.flood()
    assert rig.look_up(keys(0, 1, 2)) == MISS * 3


def test_blocks_of_a_hold_are_the_caches_own() -> None:
    """Shared with everybody, never stored twice: a lookup finds them, a store finds them present, and after the hold they stay."""
    rig = HoldRig()
    rig.store(keys(0, 1))
    rig.publish(keys(0, 1))
    assert rig.look_up(keys(0, 1)) == HIT * 2
    assert rig.core.stats().tiers[0].used_bytes == 2 * 4096
    rig.core.handoffs.release(rig.name(), 1.0)
    assert rig.look_up(keys(0, 1)) == HIT * 2


def test_a_hold_ends_with_its_time_and_a_claim_says_so() -> None:
    """B2.19: expired, its blocks may go; the reader is told why, and who asks for what never was is told that."""
    rig = HoldRig()
    rig.store(keys(0))
    rig.publish(keys(0), duration=30)
    rig.core.tick(29.9)
    assert len(rig.core.handoffs) == 1
    rig.core.tick(30.0)
    assert len(rig.core.handoffs) == 0
    with pytest.raises(HoldExpired):
        rig.claim(now=30)
    with pytest.raises(HoldNotFound):
        rig.claim("another", now=30)
    rig.flood()
    assert rig.look_up(keys(0)) == MISS
    assert (rig.stats().expired, rig.stats().held_seconds, rig.stats().open) == (1, 30.0, 0)


def test_a_hold_that_is_nearly_over_is_not_read() -> None:
    """B2.19: the reader keeps a margin of 5 s, whether or not the reaper has come by."""
    assert EXPIRY_MARGIN_SECONDS == 5.0
    rig = HoldRig()
    rig.store(keys(0))
    rig.publish(keys(0), duration=30)
    assert rig.claim(now=24.9).statuses == HIT
    for now in (25.0, 31.0):
        with pytest.raises(HoldExpired):
            rig.claim(now=now)


def test_the_reaper_looks_at_all_holds() -> None:
    """B2.19: the first one, renewed, does not keep those behind it alive."""
    rig = HoldRig()
    rig.store(keys(0, 1, 2))
    for number in range(3):
        rig.publish(keys(number), f"r{number}")
    rig.core.handoffs.renew(rig.name("r0"), 25.0)
    rig.core.tick(31.0)
    assert [hold.name[2] for hold in rig.core.handoffs.all()] == ["r0"]


def test_a_heartbeat_adds_two_thirds_and_never_shortens() -> None:
    """B2.1: new expiry = max(old, now + two thirds of the duration); what is over is not brought back."""
    rig = HoldRig()
    hold = rig.publish(keys(0), duration=30)
    assert isinstance(hold, Hold)
    for now, expires_at in ((0.0, 30.0), (5.0, 30.0), (10.0, 30.0), (15.0, 35.0), (34.9, 54.9)):
        assert rig.core.handoffs.renew(rig.name(), now)
        assert hold.expires_at == pytest.approx(expires_at)
    assert rig.core.handoffs.renew(rig.name(), 40.0, 480.0)
    assert hold.expires_at == 520.0
    assert not rig.core.handoffs.renew(rig.name(), 520.0)
    assert not rig.core.handoffs.renew(rig.name("never published"), 0.0)


def test_a_hold_outlives_its_publisher() -> None:
    """The bytes are the server's: when the engine's last session has ended, what had arrived is still claimed."""
    rig = HoldRig()
    rig.store(keys(0, 1))
    rig.publish(keys(0, 1))
    rig.core.close_session(rig.session.id)
    assert rig.claim().statuses == HIT * 2


def test_blocks_may_be_on_their_way_when_a_hold_is_published() -> None:
    """Before their store has begun, or in the middle of it; when the last has come, who waits is told."""
    rig = HoldRig()
    rig.store(keys(0))
    store = rig.core.prepare_store(rig.session, keys(1), request_id="", expires_at=60)
    hold = rig.publish(keys(0, 1, 2))
    assert isinstance(hold, Hold)
    assert (hold.awaited, rig.claim().statuses) == (2, HIT + PENDING * 2)
    assert store.store_id is not None
    rig.core.take_commands()
    rig.core.complete_store(rig.session, store.store_id)
    assert HoldChanged(rig.name()) not in rig.core.take_commands(), "not all of it"
    assert rig.store(keys(2)) == GRANTED
    assert HoldChanged(rig.name()) in rig.core.take_commands()
    assert (hold.awaited, rig.claim().statuses) == (0, HIT * 3)


def test_what_a_dead_publisher_had_not_brought_is_a_miss() -> None:
    """Its stores fall with its sessions; nobody waits for the rest of the hold."""
    rig = HoldRig()
    rig.store(keys(0))
    worker = rig.core.open_session(b"worker", "engine", None, SPEC)
    rig.core.prepare_store(worker, keys(1), request_id="", expires_at=60)
    hold = rig.publish(keys(0, 1, 2))
    assert isinstance(hold, Hold)
    rig.core.close_session(rig.session.id)
    assert hold.awaited == 2, "a worker of it lives"
    rig.core.take_commands()
    rig.core.close_session(worker.id)
    assert HoldChanged(rig.name()) in rig.core.take_commands()
    assert (hold.awaited, rig.claim().statuses) == (0, HIT + MISS * 2)


def test_what_others_are_writing_may_still_come_when_the_publisher_is_dead() -> None:
    """And is a miss at once when they fail."""
    rig = HoldRig()
    good = rig.core.prepare_store(rig.reader, keys(0), request_id="", expires_at=60).store_id
    bad = rig.core.prepare_store(rig.reader, keys(1), request_id="", expires_at=60).store_id
    assert good is not None
    assert bad is not None
    rig.publish(keys(0, 1))
    rig.core.close_session(rig.session.id)
    assert rig.claim().statuses == PENDING * 2
    rig.core.complete_store(rig.reader, good)
    rig.core.complete_store(rig.reader, bad, failed=[0])
    assert rig.claim().statuses == HIT + MISS


def test_a_store_that_fails_may_be_made_good() -> None:
    """The publisher is there, and offers what failed again: the hold goes on waiting."""
    rig = HoldRig()
    rig.publish(keys(0))
    store = rig.core.prepare_store(rig.session, keys(0), request_id="", expires_at=60)
    assert store.store_id is not None
    rig.core.complete_store(rig.session, store.store_id, failed=[0])
    assert rig.claim().statuses == PENDING
    rig.store(keys(0))
    assert rig.claim().statuses == HIT


def test_ranks_that_store_one_after_the_other() -> None:
    """A block is there when every rank's part is; between two of them it is nobody's, and the hold waits on."""
    spec = NamespaceSpec(NamespaceId(b"2" * 16), world_size=2, part_bytes=(4096,))
    rig = HoldRig(spec=spec)
    rig.publish(keys(0))
    rig.store(keys(0))
    assert rig.claim().statuses == PENDING
    other = rig.core.open_session(b"rank 1", "engine", 1, spec)
    store = rig.core.prepare_store(other, keys(0), request_id="", expires_at=60)
    assert store.store_id is not None
    rig.core.complete_store(other, store.store_id)
    assert rig.claim().statuses == HIT


def test_what_only_a_tier_below_has_is_brought_up() -> None:
    """A hold keeps it in memory then; a load that fails leaves it to be stored again."""
    rig = HoldRig(ModelTier("near", 1 << 20))
    rig.store(keys(0, 1))
    rig.finish_jobs()
    rig.core.reset(rig.session)
    rig.publish(keys(0, 1))
    (load,) = [command for command in rig.core.take_commands() if isinstance(command, LoadFromTier)]
    assert rig.claim().statuses == PENDING * 2
    rig.core.job_finished(load.job_id, [Outcome.DONE, Outcome.FAILED])
    assert rig.claim().statuses == HIT + PENDING
    rig.store(keys(1))
    assert rig.claim().statuses == HIT * 2


def test_a_reader_takes_only_what_it_lacks() -> None:
    """From a position on, per group; a group that is not mentioned is wanted as a whole."""
    rig = HoldRig(extents=4)
    names = [*keys(0, 1, 2), *keys(0, group=1)]
    rig.store(names)
    rig.core.handoffs.publish(rig.session, "r", names, [0, 1, 2, 5], num_tokens=48, direction=P2D, duration=30, now=0)
    assert rig.claim(first=[2]).statuses == NO_STATUS * 2 + HIT * 2
    assert rig.claim(first=[0, 6]).statuses == HIT * 3 + NO_STATUS
    nothing = rig.claim(first=[9, 9])
    assert (nothing.lease, nothing.statuses) == (None, NO_STATUS * 4)
    assert (rig.stats().claimed, rig.stats().claimed_bytes) == (2, 4096 + 16384 + 3 * 4096)


def test_a_block_without_a_content_hash_goes_with_its_hold() -> None:
    """B2.6: a partial last block is named by the request; no tier below gets it, and nothing of it stays."""
    rig = HoldRig(ModelTier("near", 1 << 20))
    rig.store([*keys(0), PRIVATE])
    assert [len(job.blocks) for job in rig.core.take_commands() if isinstance(job, StoreInTier)] == [1]
    assert rig.core.durability.flush(rig.session.namespace.id, [PRIVATE]) == b"\x03", "volatile, and it stays so"
    rig.core.durability.store_skipped()
    assert not [job for job in rig.core.take_commands() if isinstance(job, StoreInTier)]
    rig.publish([*keys(0), PRIVATE])
    claim = rig.claim()
    assert claim.statuses == HIT * 2
    assert claim.lease is not None
    rig.core.handoffs.release(rig.name(), 1.0)
    assert claim.lease.statuses() == HIT * 2, "whoever reads it may finish"
    rig.core.release(rig.reader, claim.lease.id)
    assert rig.look_up([PRIVATE]) == MISS
    assert rig.core.stats().tiers[0].used_bytes == 4096


def test_such_a_block_goes_as_well_when_nothing_is_held() -> None:
    """Declined: nobody will ever ask for it."""
    rig = HoldRig(part=0)
    rig.store([PRIVATE])
    assert rig.publish([PRIVATE]) is PublishStatus.NO_ROOM
    assert rig.core.stats().tiers[0].used_bytes == 0


def test_no_more_is_held_than_may_be() -> None:
    """Declined and counted, nothing is pinned for it; what two holds share counts once, and comes free with the second."""
    rig = HoldRig(part=0.5)
    rig.store(keys(*range(12)))
    assert isinstance(rig.publish(keys(*range(8)), "a"), Hold)
    assert isinstance(rig.publish(keys(*range(4)), "b"), Hold), "it takes nothing more"
    assert rig.core.stats().held_bytes == EXTENT // 2
    assert rig.publish(keys(8), "c") is PublishStatus.NO_ROOM
    assert rig.stats().declined == 1
    rig.core.handoffs.release(rig.name("a"), 1.0)
    assert rig.core.stats().held_bytes == EXTENT // 4
    assert isinstance(rig.publish(keys(8), "c"), Hold)
    rig.core.handoffs.release(rig.name("b"), 1.0)
    rig.core.handoffs.release(rig.name("c"), 1.0)
    assert rig.core.stats().held_bytes == 0
    rig.flood()
    assert rig.look_up(keys(*range(12)), prefix=False) == MISS * 12


def test_a_tenant_with_a_quota_holds_a_part_of_its_own() -> None:
    """And takes nothing from what the others may hold."""
    settings = TierSettings(held_part=0.5, tenants=[Tenant("alice", b"AAAA", {"cpu": 8 * 4096})])
    core = TierManager(EXTENT, EXTENT, (), settings=settings)
    core.add_memory(0, EXTENT)

    def held(name: bytes, count: int) -> bool:
        spec = NamespaceSpec(NamespaceId(name * 16), world_size=1, part_bytes=(4096,))
        session = core.open_session(name, "engine", None, spec)
        names = keys(*range(count))
        found = core.handoffs.publish(
            session, f"{count}", names, range(count), num_tokens=1, direction=D2P, duration=30, now=0
        )
        return isinstance(found, Hold)

    assert held(b"A", 4)
    assert not held(b"A", 5)
    assert held(b"B", 4)
    assert not held(b"C", 1), "those without a quota share what may be held"


def test_a_tenant_has_so_many_holds() -> None:
    """One more is declined; one of the same name takes the place of the other."""
    rig = HoldRig(most=2)
    rig.publish(keys(0), "a")
    rig.publish(keys(1), "b")
    assert rig.publish(keys(2), "c") is PublishStatus.TOO_MANY
    hold = rig.publish(keys(2), "b", now=3.0)
    assert isinstance(hold, Hold)
    assert [hold.name[2] for hold in rig.core.handoffs.all()] == ["a", "b"]
    assert rig.stats() == HandoffStats(open=2, published=3, declined=1, dropped=1, held_seconds=3.0)


def test_holds_share_what_they_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long prefix that many hold costs memory for each of them all the same: so that is bounded as well."""
    monkeypatch.setattr("kvtier.tiers.core.handoffs.MAX_HELD_ITEMS", 4)
    rig = HoldRig()
    rig.publish(keys(0, 1), "a")
    rig.publish(keys(0, 1), "b")
    assert rig.publish(keys(0), "c") is PublishStatus.TOO_MANY
    first, second = rig.core.handoffs.all()
    assert all(one is other for one, other in zip(first.keys, second.keys, strict=True))
    rig.core.handoffs.release(rig.name("a"), 1.0)
    assert isinstance(rig.publish(keys(0), "c"), Hold)


def test_what_is_published_again_keeps_what_it_had() -> None:
    """A block that only the hold names goes with the last hold of that name; a new one without it lets it go."""
    rig = HoldRig()
    rig.store([*keys(0), PRIVATE])
    rig.publish([*keys(0), PRIVATE])
    rig.publish([*keys(0), PRIVATE])
    assert rig.claim().statuses == HIT * 2
    rig.core.close_session(rig.reader.id)
    rig.publish(keys(0))
    assert rig.look_up([PRIVATE]) == MISS


def test_a_reset_ends_the_holds_of_its_namespace() -> None:
    """B4.13: nothing of before it is served, and nobody waits eight minutes for a hold to end."""
    rig = HoldRig()
    other = NamespaceSpec(NamespaceId(b"o" * 16), world_size=1, part_bytes=(4096,))
    elsewhere = rig.open("elsewhere", other)
    rig.publish(keys(0), session=elsewhere)
    rig.store(keys(0, 1))
    rig.publish([*keys(0, 1), PRIVATE])
    assert rig.core.reset(rig.session) == 0
    with pytest.raises(HoldNotFound):
        rig.claim()
    assert (rig.stats().dropped, rig.stats().open) == (1, 1)
    rig.store(keys(0))
    rig.publish(keys(0))
    assert rig.claim().statuses == HIT, "what is published after it is"


def test_a_tier_that_does_not_come_back_ends_the_wait() -> None:
    """What it was bringing up is a miss of the hold, and the publisher may store it anew for others."""
    rig = HoldRig(ModelTier("near", 1 << 20))
    rig.store(keys(0))
    rig.finish_jobs()
    rig.core.reset(rig.session)
    rig.publish(keys(0))
    rig.core.take_commands()
    rig.core.tier_stalled(1, stalled=True)
    assert HoldChanged(rig.name()) in rig.core.take_commands()
    assert rig.claim().statuses == MISS
    assert rig.store(keys(0)) == GRANTED


def test_who_waits_is_told_of_publication_and_end() -> None:
    """A claim that came first waits for the hold; one that waits for blocks learns that there will be none."""
    rig = HoldRig()
    rig.publish(keys(0))
    assert rig.core.take_commands() == [HoldChanged(rig.name())]
    rig.core.handoffs.release(rig.name(), 1.0)
    assert rig.core.take_commands() == [HoldChanged(rig.name())]
    assert not rig.core.handoffs.release(rig.name(), 1.0)
    assert rig.core.take_commands() == []


def test_holds_of_two_namespaces_never_meet() -> None:
    """The same engine and request of another namespace is another hold."""
    rig = HoldRig()
    other = NamespaceSpec(NamespaceId(b"o" * 16), world_size=1, part_bytes=(4096,))
    rig.publish(keys(0), session=rig.open("engine", other))
    with pytest.raises(HoldNotFound):
        rig.claim()


def test_a_publication_that_makes_no_sense_changes_nothing() -> None:
    """A key of a group that there is not, a position too few: the hold of before stays."""
    rig = HoldRig()
    rig.publish(keys(0))
    with pytest.raises(InvalidKey):
        rig.publish([*keys(1), *keys(0, group=7)])
    with pytest.raises(InvalidItem):
        rig.core.handoffs.publish(rig.session, "r", keys(1), [], num_tokens=16, direction=P2D, duration=30, now=0)
    assert [hold.keys for hold in rig.core.handoffs.all()] == [keys(0)]
    assert rig.look_up(keys(1)) == MISS


def test_a_session_cannot_claim_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The leases that claims grant count like those of lookups."""
    monkeypatch.setattr("kvtier.tiers.core.handoffs.MAX_LEASED_ITEMS", 3)
    rig = HoldRig()
    rig.store(keys(0, 1))
    rig.publish(keys(0, 1))
    rig.claim()
    with pytest.raises(LimitExceeded):
        rig.claim()


def test_where_a_hold_pins_everything_there_is_no_room() -> None:
    """B4.9: said, not taken; the room is there again with the end of the hold."""
    rig = HoldRig()
    rig.store(keys(*range(16)))
    rig.publish(keys(*range(16)))
    assert rig.store(keys(100)) == NO_ROOM
    rig.core.tick(30.0)
    assert rig.store(keys(100)) == GRANTED
