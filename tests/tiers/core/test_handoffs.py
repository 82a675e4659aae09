"""Holds in the core, event by event: pinned blocks, durations and limits."""

import pytest
from core_rig import GRANTED, HIT, MISS, NO_ROOM, PENDING, SPEC, keys
from harness.operations import run_to_end
from hold_rig import D2P, NO_STATUS, P2D, PRIVATE, HoldRig
from simulation import EXTENT, ModelTier

from kvtier.tiers.core.call_specs import StoreSpec
from kvtier.tiers.core.commands import HoldChanged, LoadFromTier, StoreInTier
from kvtier.tiers.core.handoffs import EXPIRY_MARGIN_SECONDS
from kvtier.tiers.core.holds import Hold
from kvtier.tiers.core.leases import LEASE_COST, PENDING_COST
from kvtier.tiers.core.manager import TierManager
from kvtier.tiers.core.settings import TierSettings
from kvtier.tiers.errors import HoldExpired, HoldNotFound, InvalidItem, InvalidKey, LimitExceeded, NotReady
from kvtier.tiers.eviction.quotas import Tenant
from kvtier.tiers.secondary_tier import NamespaceId, Outcome
from kvtier.tiers.stats.snapshots import HandoffStats
from kvtier.tiers.types import NamespaceSpec, PublishStatus


def test_held_blocks_stay_and_a_claim_leases_them() -> None:
    """B2.17: a flood evicts none of them; a claim adds a pin for the reader's own duration."""
    rig = HoldRig()
    rig.store(keys(0, 1, 2))
    rig.publish(keys(0, 1, 2))
    rig.flood()
    claim = rig.claim()
    assert (claim.statuses, claim.hold.num_tokens, claim.hold.direction) == (HIT * 3, 48, P2D)
    assert rig.core.release_hold(rig.name(), 1.0)
    rig.flood()
    assert claim.lease.statuses() == HIT * 3, "the reader keeps its lease after the release"
    rig.core.release(rig.reader, claim.lease.id)
    rig.flood()
    assert rig.look_up(keys(0, 1, 2)) == MISS * 3


def test_held_blocks_are_ordinary_cached_blocks() -> None:
    """Lookups find them, stores find them PRESENT, and after the hold they stay."""
    rig = HoldRig()
    rig.store(keys(0, 1))
    rig.publish(keys(0, 1))
    assert rig.look_up(keys(0, 1)) == HIT * 2
    assert rig.core.stats().tiers[0].used_bytes == 2 * 4096
    rig.core.release_hold(rig.name(), 1.0)
    assert rig.look_up(keys(0, 1)) == HIT * 2


def test_a_hold_expires_and_its_claim_says_so() -> None:
    """B2.19: its blocks may be evicted; the reader learns if it expired or was never published."""
    rig = HoldRig()
    rig.store(keys(0))
    rig.publish(keys(0), duration=30)
    rig.core.tick(29.9)
    assert len(rig.core.holds()) == 1
    rig.core.tick(30.0)
    assert len(rig.core.holds()) == 0
    with pytest.raises(HoldExpired):
        rig.claim(now=30)
    with pytest.raises(HoldNotFound):
        rig.claim("another", now=30)
    rig.flood()
    assert rig.look_up(keys(0)) == MISS
    assert (rig.stats().expired, rig.stats().held_seconds, rig.stats().open) == (1, 30.0, 0)


def test_a_hold_about_to_expire_is_not_read() -> None:
    """B2.19: a claim needs a margin of 5 s, independent of the reaper."""
    assert EXPIRY_MARGIN_SECONDS == 5.0
    rig = HoldRig()
    rig.store(keys(0))
    rig.publish(keys(0), duration=30)
    assert rig.claim(now=24.9).statuses == HIT
    for now in (25.0, 31.0):
        with pytest.raises(HoldExpired):
            rig.claim(now=now)


def test_the_reaper_checks_all_holds() -> None:
    """B2.19: renewing the first hold does not keep later ones alive."""
    rig = HoldRig()
    rig.store(keys(0, 1, 2))
    for number in range(3):
        rig.publish(keys(number), f"r{number}")
    rig.core.renew_hold(rig.name("r0"), 25.0)
    rig.core.tick(31.0)
    assert [hold.name[2] for hold in rig.core.holds()] == ["r0"]


def test_a_heartbeat_extends_by_two_thirds() -> None:
    """B2.1: new expiry = max(old, now + two thirds of the duration).

    An expired hold stays expired.
    """
    rig = HoldRig()
    hold = rig.publish(keys(0), duration=30)
    for now, expires_at in ((0.0, 30.0), (5.0, 30.0), (10.0, 30.0), (15.0, 35.0), (34.9, 54.9)):
        assert rig.core.renew_hold(rig.name(), now)
        assert hold.expires_at == pytest.approx(expires_at)
    assert rig.core.renew_hold(rig.name(), 40.0, 480.0)
    assert hold.expires_at == 520.0
    assert not rig.core.renew_hold(rig.name(), 520.0)
    assert not rig.core.renew_hold(rig.name("never published"), 0.0)


def test_a_hold_outlives_its_publisher() -> None:
    """Stored blocks can be claimed after the engine's last session has ended."""
    rig = HoldRig()
    rig.store(keys(0, 1))
    rig.publish(keys(0, 1))
    rig.core.close_session(rig.session.id)
    assert rig.claim().statuses == HIT * 2


def test_a_hold_may_be_published_before_its_blocks_are_stored() -> None:
    """Before or during their stores; waiting claims are told when the last block is stored."""
    rig = HoldRig()
    rig.store(keys(0))
    store = run_to_end(rig.core.prepare_store(rig.session, keys(1), StoreSpec(lease_seconds=60), now=0))
    hold = rig.publish(keys(0, 1, 2))
    assert (hold.pending, rig.claim().statuses) == (2, HIT + PENDING * 2)
    rig.core.take_commands()
    run_to_end(rig.core.complete_store(rig.session, store.store_id))
    assert HoldChanged(rig.name()) not in rig.core.take_commands(), "not all of it"
    assert rig.store(keys(2)) == GRANTED
    assert HoldChanged(rig.name()) in rig.core.take_commands()
    assert (hold.pending, rig.claim().statuses) == (0, HIT * 3)


def test_claims_are_told_of_the_first_blocks() -> None:
    """A reader may load them while the other engine still computes; each is told once."""
    rig = HoldRig()
    hold = rig.publish(keys(0, 1, 2, 3))
    assert [rig.core.is_settled(hold, blocks) for blocks in (0, 2, 1, 3)] == [False] * 4
    told = []
    for number in range(4):
        rig.core.take_commands()
        rig.store(keys(number))
        told.append(HoldChanged(rig.name()) in rig.core.take_commands())
        assert rig.claim().settled == number + 1
        assert rig.core.is_settled(hold, number + 1)
    assert told == [True, False, False, True], "nothing waits for the second and third block"
    assert rig.core.is_settled(hold, 0)
    assert rig.core.is_settled(hold, 5), "there are no more blocks"


def test_the_end_of_the_publisher_settles_blocks() -> None:
    """A claim that waits for some of them learns that none will come."""
    rig = HoldRig()
    store = rig.core.open_session(b"other", "other", None, SPEC)
    run_to_end(rig.core.prepare_store(store, keys(0), StoreSpec(lease_seconds=60), now=0))
    hold = rig.publish(keys(0, 1, 2))
    assert not rig.core.is_settled(hold, 2)
    rig.core.take_commands()
    rig.core.close_session(rig.session.id)
    assert hold.pending == 1, "another engine still stores one of them"
    assert HoldChanged(rig.name()) in rig.core.take_commands()
    assert (rig.claim().statuses, rig.claim().settled) == (PENDING + MISS * 2, 2)


def test_missing_blocks_of_an_ended_publisher_are_misses() -> None:
    """Its stores end with its sessions, and claims stop waiting."""
    rig = HoldRig()
    rig.store(keys(0))
    worker = rig.core.open_session(b"worker", "engine", None, SPEC)
    run_to_end(rig.core.prepare_store(worker, keys(1), StoreSpec(lease_seconds=60), now=0))
    hold = rig.publish(keys(0, 1, 2))
    rig.core.close_session(rig.session.id)
    assert hold.pending == 2, "one worker is still connected"
    rig.core.take_commands()
    rig.core.close_session(worker.id)
    assert HoldChanged(rig.name()) in rig.core.take_commands()
    assert (hold.pending, rig.claim().statuses) == (0, HIT + MISS * 2)


def test_stores_of_other_engines_may_complete_a_hold() -> None:
    """The publisher has ended; if such a store fails, its block is a miss at once."""
    rig = HoldRig()
    good = run_to_end(rig.core.prepare_store(rig.reader, keys(0), StoreSpec(lease_seconds=60), now=0)).store_id
    bad = run_to_end(rig.core.prepare_store(rig.reader, keys(1), StoreSpec(lease_seconds=60), now=0)).store_id
    rig.publish(keys(0, 1))
    rig.core.close_session(rig.session.id)
    assert rig.claim().statuses == PENDING * 2
    run_to_end(rig.core.complete_store(rig.reader, good))
    run_to_end(rig.core.complete_store(rig.reader, bad, failed=[0]))
    assert rig.claim().statuses == HIT + MISS


def test_a_failed_store_of_a_hold_may_be_repeated() -> None:
    """While the publisher is connected the hold waits for its next store."""
    rig = HoldRig()
    rig.publish(keys(0))
    store = run_to_end(rig.core.prepare_store(rig.session, keys(0), StoreSpec(lease_seconds=60), now=0))
    run_to_end(rig.core.complete_store(rig.session, store.store_id, failed=[0]))
    assert rig.claim().statuses == PENDING
    rig.store(keys(0))
    assert rig.claim().statuses == HIT


def test_the_hold_waits_for_every_rank() -> None:
    """A block is ready when every rank's part is stored; the hold also waits between two ranks."""
    spec = NamespaceSpec(NamespaceId(b"2" * 32), world_size=2, part_bytes=(4096,))
    rig = HoldRig(spec=spec)
    rig.publish(keys(0))
    rig.store(keys(0))
    assert rig.claim().statuses == PENDING
    other = rig.core.open_session(b"rank 1", "engine", 1, spec)
    store = run_to_end(rig.core.prepare_store(other, keys(0), StoreSpec(lease_seconds=60), now=0))
    run_to_end(rig.core.complete_store(other, store.store_id))
    assert rig.claim().statuses == HIT


def test_blocks_in_a_secondary_tier_are_promoted_for_a_hold() -> None:
    """The hold then keeps them in memory; a block whose load fails may be stored again."""
    rig = HoldRig(ModelTier("near", 1 << 20))
    rig.store_in_all_tiers(keys(0, 1))
    rig.core.reset(rig.session)
    rig.publish(keys(0, 1))
    (load,) = [command for command in rig.core.take_commands() if isinstance(command, LoadFromTier)]
    assert rig.claim().statuses == PENDING * 2
    rig.core.job_finished(load.job_id, [Outcome.DONE, Outcome.FAILED])
    assert rig.claim().statuses == HIT + PENDING
    rig.store(keys(1))
    assert rig.claim().statuses == HIT * 2


def test_a_claim_leases_only_wanted_blocks() -> None:
    """From a position on, per group; a group without a position is wanted as a whole."""
    rig = HoldRig(extents=4)
    names = [*keys(0, 1, 2), *keys(0, group=1)]
    rig.store(names)
    run_to_end(
        rig.core.publish(rig.session, "r", names, [0, 1, 2, 5], num_tokens=48, direction=P2D, duration=30, now=0)
    )
    assert rig.claim(first=[2]).statuses == NO_STATUS * 2 + HIT * 2
    assert rig.claim(first=[0, 6]).statuses == HIT * 3 + NO_STATUS
    nothing = rig.claim(first=[9, 9])
    assert (nothing.lease, nothing.statuses) == (None, NO_STATUS * 4)
    assert (rig.stats().claimed, rig.stats().claimed_bytes) == (2, 4096 + 16384 + 3 * 4096)


def test_a_block_without_a_content_hash_ends_with_its_hold() -> None:
    """B2.6: a partial last block has a name of the request; no secondary tier stores it."""
    rig = HoldRig(ModelTier("near", 1 << 20))
    rig.store([*keys(0), PRIVATE])
    assert [len(job.blocks) for job in rig.core.take_commands() if isinstance(job, StoreInTier)] == [1]
    assert run_to_end(rig.core.flush(rig.session.namespace.id, [PRIVATE])) == b"\x03", "volatile, and it stays so"
    rig.core.store_skipped()
    assert not [job for job in rig.core.take_commands() if isinstance(job, StoreInTier)]
    rig.publish([*keys(0), PRIVATE])
    claim = rig.claim()
    assert claim.statuses == HIT * 2
    rig.core.release_hold(rig.name(), 1.0)
    assert claim.lease.statuses() == HIT * 2, "a reader may finish"
    rig.core.release(rig.reader, claim.lease.id)
    assert rig.look_up([PRIVATE]) == MISS
    assert rig.core.stats().tiers[0].used_bytes == 4096


def test_a_partial_block_of_a_declined_hold_is_dropped() -> None:
    """No engine can ask for it."""
    rig = HoldRig(part=0)
    rig.store([PRIVATE])
    assert rig.publish([PRIVATE]) is PublishStatus.NO_ROOM
    assert rig.core.stats().tiers[0].used_bytes == 0


def test_held_bytes_have_a_limit() -> None:
    """A declined hold is counted and pins nothing; blocks that two holds share count once."""
    rig = HoldRig(part=0.5)
    rig.store(keys(*range(12)))
    assert isinstance(rig.publish(keys(*range(8)), "a"), Hold)
    assert isinstance(rig.publish(keys(*range(4)), "b"), Hold), "it needs no further bytes"
    assert rig.core.stats().held_bytes == EXTENT // 2
    assert rig.publish(keys(8), "c") is PublishStatus.NO_ROOM
    assert rig.stats().declined == 1
    rig.core.release_hold(rig.name("a"), 1.0)
    assert rig.core.stats().held_bytes == EXTENT // 4
    assert isinstance(rig.publish(keys(8), "c"), Hold)
    rig.core.release_hold(rig.name("b"), 1.0)
    rig.core.release_hold(rig.name("c"), 1.0)
    assert rig.core.stats().held_bytes == 0
    rig.flood()
    assert rig.look_up(keys(*range(12)), prefix=False) == MISS * 12


def test_held_bytes_of_a_tenant_count_against_its_quota() -> None:
    """They do not reduce what other tenants may hold."""
    settings = TierSettings(held_part=0.5, tenants=[Tenant("alice", b"A" * 16, {"cpu": 8 * 4096})])
    core = TierManager(EXTENT, EXTENT, (), settings=settings)
    core.add_memory(0, EXTENT)

    def held(name: bytes, count: int) -> bool:
        spec = NamespaceSpec(NamespaceId(name * 32), world_size=1, part_bytes=(4096,))
        session = core.open_session(name, "engine", None, spec)
        names = keys(*range(count))
        publication = core.publish(
            session, f"{count}", names, range(count), num_tokens=1, direction=D2P, duration=30, now=0
        )
        return isinstance(run_to_end(publication), Hold)

    assert held(b"A", 4)
    assert not held(b"A", 5)
    assert held(b"B", 4)
    assert not held(b"C", 1), "tenants without a quota share one limit"


def test_holds_of_a_tenant_have_a_limit() -> None:
    """A further hold is declined; one of the same name replaces the earlier one."""
    rig = HoldRig(most=2)
    rig.publish(keys(0), "a")
    rig.publish(keys(1), "b")
    assert rig.publish(keys(2), "c") is PublishStatus.TOO_MANY
    assert isinstance(rig.publish(keys(2), "b", now=3.0), Hold)
    assert [hold.name[2] for hold in rig.core.holds()] == ["a", "b"]
    assert rig.stats() == HandoffStats(open=2, published=3, declined=1, dropped=1, held_seconds=3.0)


def test_keys_of_holds_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each hold of a long shared prefix needs memory of its own."""
    monkeypatch.setattr("kvtier.tiers.core.handoffs.MAX_HELD_ITEMS", 4 * (1 + PENDING_COST))
    rig = HoldRig()
    rig.publish(keys(0, 1), "a")
    rig.publish(keys(0, 1), "b")
    assert rig.publish(keys(0), "c") is PublishStatus.TOO_MANY
    first, second = rig.core.holds()
    assert all(one is other for one, other in zip(first.keys, second.keys, strict=True))
    rig.core.release_hold(rig.name("a"), 1.0)
    assert isinstance(rig.publish(keys(0), "c"), Hold)


def test_a_repeated_publication_keeps_its_blocks() -> None:
    """A block that only holds name is dropped with the last hold that names it."""
    rig = HoldRig()
    rig.store([*keys(0), PRIVATE])
    rig.publish([*keys(0), PRIVATE])
    rig.publish([*keys(0), PRIVATE])
    assert rig.claim().statuses == HIT * 2
    rig.core.close_session(rig.reader.id)
    rig.publish(keys(0))
    assert rig.look_up([PRIVATE]) == MISS


def test_a_reset_ends_the_holds_of_its_namespace() -> None:
    """B4.13: no claim gets blocks from before it, and none waits for the expiry of an old hold."""
    rig = HoldRig()
    other = NamespaceSpec(NamespaceId(b"o" * 32), world_size=1, part_bytes=(4096,))
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
    assert rig.claim().statuses == HIT, "a later hold is served"


def test_a_hanging_tier_ends_the_wait_of_a_hold() -> None:
    """Its running loads are misses of the hold, and the publisher may store the blocks again."""
    rig = HoldRig(ModelTier("near", 1 << 20))
    rig.store_in_all_tiers(keys(0))
    rig.core.reset(rig.session)
    rig.publish(keys(0))
    rig.core.take_commands()
    rig.core.tier_stalled(1, stalled=True)
    assert HoldChanged(rig.name()) in rig.core.take_commands()
    assert rig.claim().statuses == MISS
    assert rig.store(keys(0)) == GRANTED


def test_waiting_claims_are_told_of_publication_and_end() -> None:
    """An early claim waits for the hold; one that waits for blocks learns that none will come."""
    rig = HoldRig()
    rig.publish(keys(0))
    assert rig.core.take_commands() == [HoldChanged(rig.name())]
    rig.core.release_hold(rig.name(), 1.0)
    assert rig.core.take_commands() == [HoldChanged(rig.name())]
    assert not rig.core.release_hold(rig.name(), 1.0)
    assert rig.core.take_commands() == []


def test_holds_of_two_namespaces_never_meet() -> None:
    """An equal engine and request of another namespace is another hold."""
    rig = HoldRig()
    other = NamespaceSpec(NamespaceId(b"o" * 32), world_size=1, part_bytes=(4096,))
    rig.publish(keys(0), session=rig.open("engine", other))
    with pytest.raises(HoldNotFound):
        rig.claim()


def test_an_invalid_publication_changes_nothing() -> None:
    """An unknown group or a missing position is refused, and the previous hold stays."""
    rig = HoldRig()
    rig.publish(keys(0))
    with pytest.raises(InvalidKey):
        rig.publish([*keys(1), *keys(0, group=7)])
    with pytest.raises(InvalidItem):
        rig.core.publish(rig.session, "r", keys(1), [], num_tokens=16, direction=P2D, duration=30, now=0)
    assert [hold.keys for hold in rig.core.holds()] == [keys(0)]
    assert rig.look_up(keys(1)) == MISS


def test_leases_of_claims_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """They count like those of lookups."""
    monkeypatch.setattr("kvtier.tiers.core.lookups.MAX_LEASED_ITEMS", 3 + LEASE_COST)
    rig = HoldRig()
    rig.store(keys(0, 1))
    rig.publish(keys(0, 1))
    rig.claim()
    with pytest.raises(LimitExceeded):
        rig.claim()


def test_a_claim_counts_only_the_blocks_that_it_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decode engine that pulls during the prefill makes a claim for each few blocks of a hold."""
    monkeypatch.setattr("kvtier.tiers.core.leases.LEASE_COST", 1)
    monkeypatch.setattr("kvtier.tiers.core.lookups.MAX_LEASED_ITEMS", 8 * 2 + 7)
    rig = HoldRig()
    names = keys(*range(8))
    rig.publish(names)
    for part in range(8):
        rig.store(names[part : part + 1])
        claim = rig.claim(first=[part])
        assert claim.lease is not None
        assert claim.lease.statuses() == MISS * part + HIT + MISS * (7 - part)
        assert len(claim.lease.slots([part], 0)) == 1
        with pytest.raises(NotReady):
            claim.lease.slots([(part + 1) % 8], 0)
    with pytest.raises(LimitExceeded):
        rig.claim()


def test_holds_may_use_up_the_cpu_tier() -> None:
    """B4.9: stores report NO_ROOM until the hold ends."""
    rig = HoldRig()
    rig.store(keys(*range(16)))
    rig.publish(keys(*range(16)))
    assert rig.store(keys(100)) == NO_ROOM
    rig.core.tick(30.0)
    assert rig.store(keys(100)) == GRANTED
