"""Who makes room for whom: in the CPU tier and in the tiers below, through the core."""

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulation import EXTENT, ModelTier
from tenants import PAGE, ROOMY, Rig, keys, spec, tenant

from kvtier.tiers.core.block import Block
from kvtier.tiers.core.catalog import Catalog, CatalogEntry, EntryState
from kvtier.tiers.core.settings import CPU_TIER
from kvtier.tiers.eviction import LRU
from kvtier.tiers.eviction.queues import EvictionQueues
from kvtier.tiers.eviction.quotas import Quotas, Tenant, TenantShare
from kvtier.tiers.stats.eviction_history import EvictionHistory
from kvtier.tiers.types import EngineSession, StoreStatus


def test_a_flood_does_not_cost_others_what_is_within_their_quota() -> None:
    """Ten times the region; the other tenant's blocks are all still there."""
    rig = Rig(tenant("alice", quota=2 * EXTENT))
    rig.store("alice", range(32))
    rig.store("bob", range(640))
    assert rig.visible("alice") == set(keys(range(32)))
    assert len(rig.visible("bob")) == 32


def test_the_same_holds_in_the_tiers_below() -> None:
    """With a quota of their own there."""
    disk = ModelTier("disk", 64 * PAGE)
    rig = Rig(tenant("alice", quota=32 * PAGE, tier="disk"), tiers=[disk])
    rig.store("alice", range(32))
    rig.store("bob", range(640))
    assert (rig.below("alice"), len(rig.below("bob"))) == (set(keys(range(32))), 32)
    assert {key for namespace, key in disk.blocks if namespace == spec("alice").id} == set(keys(range(32)))


def test_what_is_free_is_anybodys() -> None:
    """A quota is no border: one that nobody uses is not kept empty."""
    rig = Rig(tenant("alice", quota=3 * EXTENT))
    rig.store("bob", range(64))
    assert len(rig.visible("bob")) == 64


def test_a_quota_is_given_back_when_it_is_wanted() -> None:
    """Whoever is above its own makes room for who is below, at once."""
    rig = Rig(tenant("alice", quota=2 * EXTENT))
    rig.store("bob", range(64))
    rig.store("alice", range(32))
    assert (len(rig.visible("alice")), len(rig.visible("bob"))) == (32, 32)
    rig.store("alice", range(32, 64))
    assert (len(rig.visible("alice")), len(rig.visible("bob"))) == (48, 16), "both are above by as much"


def test_a_quota_is_given_back_across_size_classes() -> None:
    """A tenant with other block sizes gets whole extents of those who are above."""
    rig = Rig(tenant("alice", quota=2 * EXTENT))
    rig.store("bob", range(64))
    rig.store("alice", range(10), group=1)
    assert rig.visible("alice") == set(keys(range(10), group=1))
    assert len(rig.visible("bob")) == 32


def test_who_is_within_its_quota_need_not_wait_for_others_to_be_idle() -> None:
    """Between tenants age decides nothing: what was used a moment ago goes, if it is above its tenant's quota."""
    rig = Rig(tenant("alice", quota=2 * EXTENT))
    rig.store("alice", range(5), group=1)
    rig.store("bob", range(48))
    rig.store("alice", range(5, 10), group=1)
    assert rig.visible("alice") == set(keys(range(10), group=1))


def test_extents_with_protected_blocks_stay() -> None:
    """Another size class cannot have them, be its wish ever so recent."""
    rig = Rig(tenant("alice", quota=2 * EXTENT))
    for start in range(0, 32, 8):
        rig.store("alice", range(start, start + 8))
        rig.store("bob", range(start, start + 8))
    rig.store("bob", range(40), group=1)
    assert rig.visible("alice") == set(keys(range(32)))


def test_nobody_is_held_beyond_its_limit() -> None:
    """Though there is room: it pays for more with its own."""
    disk = ModelTier("disk", ROOMY)
    name = "alice"
    both = Tenant(name, b"aaaa", {}, {CPU_TIER: EXTENT, "disk": 2 * EXTENT})
    rig = Rig(both, tiers=[disk])
    rig.store(name, range(100))
    assert len(rig.visible(name)) == 16
    assert len(rig.below(name)) == 32
    rig.store(name, range(3), group=1)
    assert rig.share(name).used <= EXTENT
    assert set(keys(range(3), group=1)) <= rig.visible(name), "blocks of another size make room as well"


def test_reading_back_makes_room_at_the_readers_cost() -> None:
    """A promotion is a use of the CPU tier like any other."""
    rig = Rig(tenant("alice", quota=2 * EXTENT), tiers=[ModelTier("disk", ROOMY)])
    rig.store("bob", range(64))
    rig.store("alice", range(32))
    lease = rig.core.lookup(rig.session(spec("bob")), keys(range(64)), prefix=False, request_id="", expires_at=1e9)
    rig.work()
    assert lease is not None
    assert len(rig.visible("alice")) == 32


def test_whose_a_block_is_is_known_before_its_tenant_comes() -> None:
    """After a restart the flood comes first: what alice has below is still hers."""
    disk = ModelTier("disk", 64 * PAGE)
    alice = tenant("alice", quota=32 * PAGE, tier="disk")
    Rig(alice, tiers=[disk]).store("alice", range(32))
    again = Rig(alice, tiers=[disk])
    again.store("bob", range(640))
    assert again.below("alice") == set(keys(range(32)))


def test_a_smaller_tier_parts_first_with_what_is_above_a_quota() -> None:
    """The size was lowered between two lives."""
    disk = ModelTier("disk", 64 * PAGE)
    alice = tenant("alice", quota=16 * PAGE, tier="disk")
    before = Rig(alice, tiers=[disk])
    before.store("alice", range(16))
    before.store("bob", range(48))
    disk.capacity_bytes = 32 * PAGE
    after = Rig(alice, tiers=[disk])
    assert (after.below("alice"), len(after.below("bob"))) == (set(keys(range(16))), 16)


def test_a_full_disk_is_not_made_good_at_the_cost_of_a_quota() -> None:
    """NO_SPACE though there should be some: those make room who want it, or are above their quota."""
    rig = Rig(tenant("alice", quota=32 * PAGE, tier="disk"), tiers=[ModelTier("disk", 64 * PAGE)])
    rig.store("alice", range(32))
    rig.store("bob", range(8))
    catalog = rig.core._transfers.secondaries[0].catalog
    gone = catalog.make_room(spec("carol").id, 64 * PAGE)
    assert {entry.namespace for entry in gone} == {spec("bob").id}


def test_a_turn_ends_where_a_quota_begins() -> None:
    """In a large tier shares are not compared for each block; that costs nobody what is within its quota."""
    tenants = [tenant("alice", quota=2000, tier="disk"), tenant("bob", quota=2096, tier="disk")]
    catalog = Catalog(4096, EvictionQueues(Quotas("disk", 4096, tenants), LRU), EvictionHistory())
    alice, bob = spec("alice").id, spec("bob").id
    for number, name in enumerate([alice] * 2003 + [bob] * 2093):
        catalog.begin_store(name, b"%d" % number, 1)
        entry = catalog.get(name, b"%d" % number)
        assert entry is not None
        entry.state = EntryState.HELD
        catalog.recount(entry)
        catalog.use([entry], number)
    for number in range(10):
        catalog.begin_store(bob, b"more %d" % number, 1)
    assert [len(catalog._entries[name]) for name in (alice, bob)] == [2000, 2096]


def test_parts_of_several_ranks_count_as_they_are() -> None:
    """A block of a tensor-parallel engine takes a slot per rank."""
    rig = Rig(tenant("alice", quota=2 * EXTENT))
    wide = spec("alice", world_size=2)
    session = rig.session(wide)
    answer = rig.core.prepare_store(session, keys(range(4)), request_id="", expires_at=1e9)
    assert answer.store_id is not None
    assert rig.share("alice").used == 4 * PAGE
    rig.core.complete_store(session, answer.store_id, failed=[0])
    assert rig.share("alice").used == 3 * PAGE


def test_slots_in_quarantine_count_for_whom_they_were_granted_to() -> None:
    """A tenant whose processes fall does not get more than it may have."""
    rig = Rig(tenant("alice", limit=EXTENT))
    session = rig.session(spec("alice"))
    rig.core.writer_attached(session.id, 7)
    rig.core.prepare_store(session, keys(range(16)), request_id="", expires_at=1e9)
    rig.core.close_session(session.id)
    rig.sessions.clear()
    assert rig.core.prepare_store(
        rig.session(spec("alice")), keys(range(16, 20)), request_id="", expires_at=1e9
    ).statuses == bytes([StoreStatus.NO_ROOM] * 4)
    rig.core.writer_gone(session.id, 7)
    assert rig.share("alice").used == 0


def test_without_tenants_there_is_one_line_per_size_class() -> None:
    """Who configures no quota pays nothing for them."""
    rig = Rig(tiers=[ModelTier("disk", ROOMY)])
    for name in ("alice", "bob", "carol"):
        rig.store(name, range(8))
    assert len(rig.core._cpu_tier.queues.all()) == 1
    assert len(rig.core._transfers.secondaries[0].catalog.queues.all()) == 1


def test_a_victim_is_found_without_looking_at_protected_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Be there ever so many of them."""
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
def test_what_one_tenant_does_never_brings_another_below_its_quota(
    acts: list[tuple[str, str, int, int, int]], quotas: tuple[int, int], pages: int
) -> None:
    """Random floods of four tenants, two of them with a quota, in both tiers; nothing but own use costs what is within it."""
    alice, bob = (min(quota, pages // 2) * PAGE for quota in quotas)
    tenants = [
        Tenant("alice", b"aaaa", {CPU_TIER: alice, "disk": alice}),
        Tenant("bob", b"bbbb", {CPU_TIER: bob, "disk": bob}, {CPU_TIER: max(bob, 40 * PAGE)}),
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
                    or _excess(rig.core._transfers.secondaries[0].catalog.queues.shares, name) >= 0
                )
        _check_counts(rig)


def _act(rig: Rig, held: list[tuple[EngineSession, int]], who: str, what: str, names: list[bytes]) -> None:
    session = rig.session(spec(who))
    if what == "store":
        answer = rig.core.prepare_store(session, names, request_id="", expires_at=1e9)
        if answer.store_id is not None:
            rig.core.complete_store(session, answer.store_id)
    elif what == "release":
        while held:
            owner, lease_id = held.pop()
            rig.core.release(owner, lease_id)
    else:
        lease = rig.core.lookup(session, names, prefix=False, request_id="", expires_at=1e9).lease
        if lease is not None:
            held.append((session, lease.id))
            if what == "look":
                rig.core.release(*held.pop())
    rig.work()


def _excess(shares: Iterable[TenantShare], name: str) -> int:
    return next(share.excess for share in shares if share.name == name)


def _check_counts(rig: Rig) -> None:
    """Shares add up to what is used, and nobody is above its limit."""
    cpu_tier, catalog = rig.core._cpu_tier, rig.core._transfers.secondaries[0].catalog
    assert sum(share.used for share in cpu_tier.queues.shares) == cpu_tier.memory.used_bytes()
    assert sum(share.used for share in catalog.queues.shares) == catalog.used_bytes <= catalog.capacity_bytes
    items: list[Block | CatalogEntry] = [*cpu_tier._index]
    items += [entry for held in catalog._entries.values() for entry in held.values()]
    for share in [*cpu_tier.queues.shares, *catalog.queues.shares]:
        assert share.used == sum(item.allocated_bytes for item in items if item.queue.share is share)
        assert share.limit is None or share.used <= share.limit
