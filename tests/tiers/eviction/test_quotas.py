"""Quotas and limits of tenants in the CPU tier and in secondary tiers, through the core."""

from collections.abc import Iterable

import pytest
from harness.operations import run_to_end
from hypothesis import given
from hypothesis import strategies as st
from simulation import EXTENT, ModelTier
from tenants import PAGE, ROOMY, Rig, keys, spec, tenant

from kvtier.tiers.core.block import Block
from kvtier.tiers.core.call_specs import LookupSpec, StoreSpec
from kvtier.tiers.core.catalog import Catalog, CatalogEntry, EntryState
from kvtier.tiers.core.settings import CPU_TIER
from kvtier.tiers.eviction import LRU
from kvtier.tiers.eviction.queues import EvictionQueues
from kvtier.tiers.eviction.quotas import Quotas, Tenant, TenantShare
from kvtier.tiers.stats.eviction_history import EvictionHistory
from kvtier.tiers.types import EngineSession, StoreStatus


def test_a_flood_evicts_no_blocks_within_a_quota() -> None:
    """After ten times the region, the other tenant's blocks are all cached."""
    rig = Rig(tenant("alice", quota=2 * EXTENT))
    rig.store("alice", range(32))
    rig.store("bob", range(640))
    assert rig.visible("alice") == set(keys(range(32)))
    assert len(rig.visible("bob")) == 32


def test_quotas_hold_in_secondary_tiers() -> None:
    """Each tier has its own quota."""
    disk = ModelTier("disk", 64 * PAGE)
    rig = Rig(tenant("alice", quota=32 * PAGE, tier="disk"), tiers=[disk])
    rig.store("alice", range(32))
    rig.store("bob", range(640))
    assert (rig.below("alice"), len(rig.below("bob"))) == (set(keys(range(32))), 32)
    assert {key for namespace, key in disk.blocks if namespace == spec("alice").id} == set(keys(range(32)))


def test_free_quota_is_used_by_others() -> None:
    """An unused quota is not kept empty."""
    rig = Rig(tenant("alice", quota=3 * EXTENT))
    rig.store("bob", range(64))
    assert len(rig.visible("bob")) == 64


def test_a_quota_is_returned_on_demand() -> None:
    """Tenants above their quota make room at once for those below."""
    rig = Rig(tenant("alice", quota=2 * EXTENT))
    rig.store("bob", range(64))
    rig.store("alice", range(32))
    assert (len(rig.visible("alice")), len(rig.visible("bob"))) == (32, 32)
    rig.store("alice", range(32, 64))
    assert (len(rig.visible("alice")), len(rig.visible("bob"))) == (48, 16), (
        "both exceed their quota by the same amount"
    )


def test_a_quota_is_returned_across_size_classes() -> None:
    """A tenant with other block sizes gets whole extents of tenants above their quota."""
    rig = Rig(tenant("alice", quota=2 * EXTENT))
    rig.store("bob", range(64))
    rig.store("alice", range(10), group=1)
    assert rig.visible("alice") == set(keys(range(10), group=1))
    assert len(rig.visible("bob")) == 32


def test_quotas_precede_recency_between_tenants() -> None:
    """A block used a moment ago goes if it exceeds its tenant's quota."""
    rig = Rig(tenant("alice", quota=2 * EXTENT))
    rig.store("alice", range(5), group=1)
    rig.store("bob", range(48))
    rig.store("alice", range(5, 10), group=1)
    assert rig.visible("alice") == set(keys(range(10), group=1))


def test_extents_with_protected_blocks_stay() -> None:
    """Another size class does not get them, even for a newer request."""
    rig = Rig(tenant("alice", quota=2 * EXTENT))
    for start in range(0, 32, 8):
        rig.store("alice", range(start, start + 8))
        rig.store("bob", range(start, start + 8))
    rig.store("bob", range(40), group=1)
    assert rig.visible("alice") == set(keys(range(32)))


@pytest.mark.parametrize("unpinned", ["release", "partial store", "failed store", "retention"])
def test_a_tenant_without_evictable_blocks_is_searched_once(monkeypatch: pytest.MonkeyPatch, unpinned: str) -> None:
    """A store finds no room until a block is evictable again. Only then the next store searches."""
    rig = Rig(tenant("alice", limit=EXTENT))
    alice = spec("alice")
    session, tier = rig.session(alice), rig.core._cpu_tier
    rig.store("alice", range(8), retain_for=5.0 if unpinned == "retention" else 0.0)
    lease = run_to_end(rig.core.lookup(session, keys(range(8)), LookupSpec(lease_seconds=1e9), now=0)).lease
    pending = run_to_end(
        rig.core.prepare_store(session, keys(range(8, 16)), StoreSpec(lease_seconds=1e9), now=0)
    ).store_id
    assert lease is not None
    assert pending is not None
    if unpinned == "retention":
        rig.core.release(session, lease.id)
    searches, search = [], tier._reclaimer.own_victims

    def own_victims(share: TenantShare, slot_bytes: int, nbytes: int) -> list[Block]:
        searches.append(share)
        return search(share, slot_bytes, nbytes)

    monkeypatch.setattr(tier._reclaimer, "own_victims", own_victims)
    no_room = bytes([StoreStatus.NO_ROOM])
    for number in range(100, 120):
        assert (
            run_to_end(rig.core.prepare_store(session, keys([number]), StoreSpec(lease_seconds=1e9), now=0)).statuses
            == no_room
        )
    assert len(searches) == 1
    if unpinned == "release":
        rig.core.release(session, lease.id)
    elif unpinned == "retention":
        rig.core.tick(6.0)
    else:
        run_to_end(rig.core.complete_store(session, pending, range(8) if unpinned == "failed store" else ()))
    answer = run_to_end(rig.core.prepare_store(session, keys(range(200, 204)), StoreSpec(lease_seconds=1e9), now=0))
    assert answer.statuses == bytes([StoreStatus.GRANTED]) * 4


@pytest.mark.parametrize("group", [0, 1])
def test_a_tenant_at_its_limit_leaves_older_blocks_of_others(group: int) -> None:
    """It evicts its own in each tier, also if a block of another size needs room."""
    both = Tenant("alice", b"a" * 16, {}, {CPU_TIER: EXTENT, "disk": 2 * EXTENT})
    rig = Rig(both, tiers=[ModelTier("disk", ROOMY)], extents=8)
    rig.store("bob", range(48))  # more than the limit of the other tenant
    rig.store("alice", range(32))
    rig.store("alice", range(100, 103), group=group)
    fresh = set(keys(range(100, 103), group=group))
    for others, own in ((rig.visible("bob"), rig.visible("alice")), (rig.below("bob"), rig.below("alice"))):
        assert others == set(keys(range(48)))
        assert fresh <= own
    assert rig.share("alice").used <= EXTENT


def test_a_tenant_at_its_limit_evicts_its_own_blocks() -> None:
    """Also if the tier has free space."""
    disk = ModelTier("disk", ROOMY)
    name = "alice"
    both = Tenant(name, b"a" * 16, {}, {CPU_TIER: EXTENT, "disk": 2 * EXTENT})
    rig = Rig(both, tiers=[disk])
    rig.store(name, range(100))
    assert len(rig.visible(name)) == 16
    assert len(rig.below(name)) == 32
    rig.store(name, range(3), group=1)
    assert rig.share(name).used <= EXTENT
    assert set(keys(range(3), group=1)) <= rig.visible(name), "blocks of another size make room, too"


def test_a_promotion_uses_the_readers_quota() -> None:
    """A promotion is a use of the CPU tier like any other."""
    rig = Rig(tenant("alice", quota=2 * EXTENT), tiers=[ModelTier("disk", ROOMY)])
    rig.store("bob", range(64))
    rig.store("alice", range(32))
    lease = run_to_end(
        rig.core.lookup(rig.session(spec("bob")), keys(range(64)), LookupSpec(prefix=False, lease_seconds=1e9), now=0)
    )
    rig.work()
    assert lease is not None
    assert len(rig.visible("alice")) == 32


def test_shares_are_known_after_a_restart() -> None:
    """A flood follows the restart before alice connects: her blocks in a secondary tier stay."""
    disk = ModelTier("disk", 64 * PAGE)
    alice = tenant("alice", quota=32 * PAGE, tier="disk")
    Rig(alice, tiers=[disk]).store("alice", range(32))
    again = Rig(alice, tiers=[disk])
    again.store("bob", range(640))
    assert again.below("alice") == set(keys(range(32)))


def test_a_smaller_tier_evicts_blocks_above_a_quota_first() -> None:
    """The size was lowered at a restart."""
    disk = ModelTier("disk", 64 * PAGE)
    alice = tenant("alice", quota=16 * PAGE, tier="disk")
    before = Rig(alice, tiers=[disk])
    before.store("alice", range(16))
    before.store("bob", range(48))
    disk.capacity_bytes = 32 * PAGE
    after = Rig(alice, tiers=[disk])
    assert (after.below("alice"), len(after.below("bob"))) == (set(keys(range(16))), 16)


def test_a_full_disk_does_not_reduce_a_quota() -> None:
    """At NO_SPACE within the capacity, requesters and tenants above their quota make room."""
    rig = Rig(tenant("alice", quota=32 * PAGE, tier="disk"), tiers=[ModelTier("disk", 64 * PAGE)])
    rig.store("alice", range(32))
    rig.store("bob", range(8))
    catalog = rig.core._tier_jobs.secondaries[0].catalog
    gone = catalog.make_room(spec("carol").id, 64 * PAGE)
    assert {entry.namespace for entry in gone} == {spec("bob").id}


def test_a_run_of_victims_ends_at_a_quota() -> None:
    """A large tier does not compare shares per block, and still respects quotas."""
    tenants = [tenant("alice", quota=2000, tier="disk"), tenant("bob", quota=2096, tier="disk")]
    catalog = Catalog(4096, EvictionQueues(Quotas("disk", 4096, tenants), LRU), EvictionHistory())
    alice, bob = spec("alice").id, spec("bob").id
    for number, name in enumerate([alice] * 2003 + [bob] * 2093):
        catalog.begin_store(name, b"%d" % number, 1)
        entry = catalog.get(name, b"%d" % number)
        entry.state = EntryState.HELD
        catalog.recount([entry])
        catalog.use([entry], number)
    for number in range(10):
        catalog.begin_store(bob, b"more %d" % number, 1)
    assert [len(catalog._entries[name]) for name in (alice, bob)] == [2000, 2096]


def test_each_rank_counts_a_slot() -> None:
    """A block of a tensor-parallel engine uses a slot per rank."""
    rig = Rig(tenant("alice", quota=2 * EXTENT))
    wide = spec("alice", world_size=2)
    session = rig.session(wide)
    answer = run_to_end(rig.core.prepare_store(session, keys(range(4)), StoreSpec(lease_seconds=1e9), now=0))
    assert rig.share("alice").used == 4 * PAGE
    run_to_end(rig.core.complete_store(session, answer.store_id, failed=[0]))
    assert rig.share("alice").used == 3 * PAGE


def test_slots_in_quarantine_count_for_their_tenant() -> None:
    """A tenant whose processes die does not get more than its limit."""
    rig = Rig(tenant("alice", limit=EXTENT))
    session = rig.session(spec("alice"))
    rig.core.writer_attached(session.id, 7)
    run_to_end(rig.core.prepare_store(session, keys(range(16)), StoreSpec(lease_seconds=1e9), now=0))
    rig.core.close_session(session.id)
    rig.sessions.clear()
    assert run_to_end(
        rig.core.prepare_store(rig.session(spec("alice")), keys(range(16, 20)), StoreSpec(lease_seconds=1e9), now=0)
    ).statuses == bytes([StoreStatus.NO_ROOM] * 4)
    rig.core.writer_gone(session.id, 7)
    assert rig.share("alice").used == 0


def test_without_tenants_there_is_one_queue_per_size_class() -> None:
    """Without quotas there is no extra cost."""
    rig = Rig(tiers=[ModelTier("disk", ROOMY)])
    for name in ("alice", "bob", "carol"):
        rig.store(name, range(8))
    assert len(rig.core._cpu_tier.queues.all()) == 1
    assert len(rig.core._tier_jobs.secondaries[0].catalog.queues.all()) == 1


def test_a_search_for_victims_skips_protected_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their number does not matter."""
    rig = Rig(tenant("alice", quota=3 * EXTENT))
    rig.store("alice", range(48))
    rig.store("bob", range(16))
    queue = rig.core._cpu_tier.queues.queue_for(spec("alice").id, PAGE)
    monkeypatch.setattr(queue.policy, "victims", lambda: pytest.fail("looked at protected blocks"))
    rig.store("bob", range(16, 64))


ACTS = st.tuples(
    st.sampled_from(["alice", "bob", "carol", "dora"]),
    st.sampled_from(["store", "store", "look", "hold", "release"]),
    st.integers(0, 60),
    st.integers(1, 40),
    st.integers(0, 1),
)


@given(
    st.lists(ACTS, min_size=1, max_size=60),
    st.tuples(*[st.integers(0, 80)] * 2),
    st.sampled_from([64, 96]),
)
def test_random_floods_never_break_a_quota(
    acts: list[tuple[str, str, int, int, int]], quotas: tuple[int, int], pages: int
) -> None:
    """Four tenants, two with a quota, in both tiers; only a tenant's own use evicts its quota."""
    alice, bob = (min(quota, pages // 2) * PAGE for quota in quotas)
    tenants = [
        Tenant("alice", b"a" * 16, {CPU_TIER: alice, "disk": alice}),
        Tenant("bob", b"b" * 16, {CPU_TIER: bob, "disk": bob}, {CPU_TIER: max(bob, 40 * PAGE)}),
    ]
    rig = Rig(*tenants, tiers=[ModelTier("disk", pages * PAGE)], extents=pages // 16)
    held: list[tuple[EngineSession, int]] = []
    for who, what, start, count, group in acts:
        before = {name: (rig.visible(name), rig.below(name)) for name in ("alice", "bob")}
        _act(rig, held, who, what, keys(range(start, start + count), group=group))
        for name, (cpu, disk) in before.items():
            if name != who:
                assert cpu <= rig.visible(name) or _excess(rig.core._cpu_tier.queues.shares, name) >= 0
                assert (
                    disk <= rig.below(name)
                    or _excess(rig.core._tier_jobs.secondaries[0].catalog.queues.shares, name) >= 0
                )
        _check_counts(rig)


def _act(rig: Rig, held: list[tuple[EngineSession, int]], who: str, what: str, names: list[bytes]) -> None:
    session = rig.session(spec(who))
    if what == "store":
        answer = run_to_end(rig.core.prepare_store(session, names, StoreSpec(lease_seconds=1e9), now=0))
        if answer.store_id is not None:
            run_to_end(rig.core.complete_store(session, answer.store_id))
    elif what == "release":
        while held:
            owner, lease_id = held.pop()
            rig.core.release(owner, lease_id)
    else:
        lease = run_to_end(rig.core.lookup(session, names, LookupSpec(prefix=False, lease_seconds=1e9), now=0)).lease
        if lease is not None:
            held.append((session, lease.id))
            if what == "look":
                rig.core.release(*held.pop())
    rig.work()


def _excess(shares: Iterable[TenantShare], name: str) -> int:
    return next(share.excess for share in shares if share.name == name)


def _check_counts(rig: Rig) -> None:
    """Shares add up to the used bytes, and no tenant exceeds its limit."""
    cpu_tier, catalog = rig.core._cpu_tier, rig.core._tier_jobs.secondaries[0].catalog
    assert sum(share.used for share in cpu_tier.queues.shares) == cpu_tier.memory.used_bytes()
    assert sum(share.used for share in catalog.queues.shares) == catalog.used_bytes <= catalog.capacity_bytes
    items: list[Block | CatalogEntry] = [*cpu_tier._index]
    items += [entry for held in catalog._entries.values() for entry in held.values()]
    for share in [*cpu_tier.queues.shares, *catalog.queues.shares]:
        assert share.used == sum(item.allocated_bytes for item in items if item.queue.share is share)
        assert share.limit is None or share.used <= share.limit
