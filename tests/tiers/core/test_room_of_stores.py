"""Room for stores: what stores in flight pin, and which blocks a store evicts."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest
from core_rig import GRANTED, NO_ROOM, PRESENT, Rig, keys, ready_blocks
from harness.operations import Steps, run_to_end
from simulation import EXTENT

from kvtier.tiers.core.call_specs import LookupSpec, StoreSpec
from kvtier.tiers.core.holds import Hold
from kvtier.tiers.core.manager import TierManager
from kvtier.tiers.core.settings import TierSettings
from kvtier.tiers.eviction.quotas import Tenant
from kvtier.tiers.secondary_tier import NamespaceId
from kvtier.tiers.types import EngineSession, HandoffDirection, NamespaceSpec, PublishStatus, StoreAnswer

SLOTS = EXTENT // 4096
ALICE, BOB = b"A" * 16, b"B" * 16


class Site:
    """A core of one extent, and two tenants."""

    def __init__(self, *tenants: Tenant, part: float = 0.75) -> None:
        self.core = TierManager(EXTENT, EXTENT, [], settings=TierSettings(leased_part=part, tenants=tenants))
        self.core.add_memory(0, EXTENT)
        self.alice, self.bob = self.open(ALICE), self.open(BOB)

    def open(self, tenant: bytes, name: str = "e") -> EngineSession:
        spec = NamespaceSpec(NamespaceId(tenant + b"n" * 16), world_size=1, part_bytes=(4096, 16384))
        return self.core.open_session(tenant + name.encode(), name, None, spec)

    def prepare(self, session: EngineSession, start: int, count: int) -> StoreAnswer:
        names = keys(*range(start, start + count))
        return run_to_end(self.core.prepare_store(session, names, StoreSpec(lease_seconds=600), now=0))

    def store(self, session: EngineSession, start: int, count: int) -> None:
        answer = self.prepare(session, start, count)
        assert answer.store_id is not None
        run_to_end(self.core.complete_store(session, answer.store_id))

    def fill(self) -> None:
        """Stores blocks of one tenant in all slots, in two stores, because one may not pin all."""
        self.store(self.alice, 0, SLOTS // 2)
        self.store(self.alice, SLOTS // 2, SLOTS // 2)

    def lease(self, session: EngineSession, start: int, count: int) -> int:
        """Returns the number of blocks that the lease pins."""
        names = keys(*range(start, start + count))
        lookup = self.core.lookup(session, names, LookupSpec(lease_seconds=600, prefix=False), now=0)
        lease = run_to_end(lookup).lease
        return lease.hits if lease is not None else 0

    def publish(self, session: EngineSession, start: int, count: int, request_id: str = "r") -> bool:
        """Returns whether the blocks are held."""
        names, direction = keys(*range(start, start + count)), HandoffDirection.PREFILL_TO_DECODE
        result = run_to_end(
            self.core.publish(
                session, request_id, names, range(count), num_tokens=16, direction=direction, duration=60, now=0
            )
        )
        assert isinstance(result, Hold) or result is PublishStatus.NO_ROOM
        return isinstance(result, Hold)

    def claim_and_release(self, session: EngineSession, request_id: str) -> None:
        """Leases the blocks of a hold, and ends the hold."""
        name = (*session.engine, request_id)
        run_to_end(self.core.claim(session, name, first_positions=(), request_id="", lease_seconds=600, now=0))
        self.core.release_hold(name, 0)
        self.core.work()

    def abandon(self, session: EngineSession) -> None:
        self.core.close_session(session.id)
        self.core.work()


def refused(answer: StoreAnswer) -> int:
    return answer.statuses.count(NO_ROOM)


@pytest.mark.parametrize("pieces", [1, 2, SLOTS])
def test_open_stores_of_a_tenant_pin_a_part(pieces: int) -> None:
    """The rest is refused, and another tenant finds room, whether the stores are few or many."""
    site = Site()
    size = SLOTS // pieces
    answers = [site.prepare(site.alice, start, size) for start in range(0, SLOTS, size)]
    assert sum(map(refused, answers)) == SLOTS // 4
    assert refused(site.prepare(site.bob, 0, SLOTS // 8)) == 0


def test_a_completed_store_gives_its_room_back() -> None:
    """Its blocks can be evicted: the tenant stores more than the memory without a refusal."""
    site = Site()
    for turn in range(8):
        site.store(site.alice, 1000 + turn * SLOTS, SLOTS // 2)
    assert not site.core._stores.table.granted_bytes


def test_the_quota_of_another_tenant_stays_free_of_open_stores() -> None:
    """A tenant with a quota stores within it, although another one uses all free space."""
    site = Site(Tenant("bob", BOB, {"cpu": EXTENT // 2}))
    answer = site.prepare(site.alice, 0, SLOTS)
    assert refused(answer) == SLOTS - int(0.75 * SLOTS / 2)
    assert refused(site.prepare(site.bob, 0, SLOTS // 2)) == 0


def test_a_small_quota_is_no_limit_of_a_store() -> None:
    """A tenant may use free space beyond its quota."""
    site = Site(Tenant("alice", ALICE, {"cpu": EXTENT // 8}))
    assert refused(site.prepare(site.alice, 0, SLOTS // 2)) == 0


def test_leases_and_open_stores_count_together() -> None:
    """Leases at their bound leave room for stores of the tenant, and both for another tenant."""
    site = Site()
    site.store(site.alice, 0, 12)
    lease = run_to_end(site.core.lookup(site.alice, keys(*range(SLOTS)), LookupSpec(lease_seconds=600), now=0)).lease
    assert lease is not None
    assert lease.hits == 12
    assert refused(site.prepare(site.alice, 500, 4)) == 2
    assert refused(site.prepare(site.bob, 0, 2)) == 0


def test_open_stores_leave_no_lease_beyond_the_part() -> None:
    """The other order: open stores, then leases on the blocks that are left."""
    site = Site()
    site.store(site.alice, 0, 4)
    site.prepare(site.alice, 500, 12)
    lease = run_to_end(site.core.lookup(site.alice, keys(*range(4)), LookupSpec(lease_seconds=600), now=0)).lease
    assert lease is not None
    assert lease.hits == 2
    assert refused(site.prepare(site.bob, 0, 2)) == 0


@pytest.mark.parametrize("order", list(itertools.permutations(["lease", "hold", "prepare"])))
def test_leases_holds_and_open_stores_count_together(order: Sequence[str]) -> None:
    """Each at its bound, in any order: they leave an eighth of the memory for another tenant."""
    site = Site()
    site.fill()
    calls = {
        "lease": lambda: site.lease(site.alice, 0, SLOTS),
        "hold": lambda: [site.publish(site.alice, SLOTS - 1 - number, 1, str(number)) for number in range(4)],
        "prepare": lambda: site.prepare(site.alice, 500, SLOTS // 8),
    }
    for call in order:
        calls[call]()
    assert refused(site.prepare(site.bob, 0, SLOTS // 8)) == 0


def test_holds_leave_less_for_leases() -> None:
    """The other order: holds at their bound, then leases on other blocks."""
    site = Site()
    site.fill()
    assert site.publish(site.alice, 0, SLOTS // 4)
    assert site.lease(site.alice, SLOTS // 4, SLOTS) == int(0.875 * SLOTS) - SLOTS // 4
    assert refused(site.prepare(site.bob, 0, SLOTS // 8)) == 0


def test_claims_of_ended_holds_pin_a_part() -> None:
    """The leases of claims stay when their holds end; then further publications are refused."""
    site, published = Site(), 0
    site.fill()
    for number in range(8):
        start = number * (SLOTS // 8)
        if site.publish(site.alice, start, SLOTS // 8, str(number)):
            site.claim_and_release(site.alice, str(number))
            published += 1
    assert published == 7
    assert refused(site.prepare(site.bob, 0, SLOTS // 8)) == 0


def test_prefetches_in_slices_pin_no_present_block() -> None:
    """A tenant repeats prefetches of all of its blocks, so that one is always at its last slice."""
    site = Site()
    site.fill()
    names = keys(*range(SLOTS + 1))
    prefetch = Steps(site.core.prefetch(site.alice, names, LookupSpec(), now=0, slice_keys=SLOTS))
    assert prefetch.step()
    assert prefetch.step()  # at its last key
    assert refused(site.prepare(site.bob, 0, SLOTS // 2)) == 0


def test_stores_in_slices_leave_room_for_another_tenant() -> None:
    """A tenant repeats stores of all of its blocks, so that one is always at its last slice."""
    site = Site()
    site.fill()
    names = keys(*range(SLOTS + 1))
    store = Steps(site.core.prepare_store(site.alice, names, StoreSpec(lease_seconds=600), now=0, slice_keys=SLOTS))
    assert store.step()
    assert store.step()  # at its last key
    assert refused(site.prepare(site.bob, 0, SLOTS // 8)) == 0


def test_a_block_counts_once_if_it_is_leased_and_held() -> None:
    """An engine that leases its prompt can publish it: that pins no further byte."""
    site = Site()
    site.store(site.alice, 0, 12)
    assert site.lease(site.alice, 0, 12) == 12
    assert site.publish(site.alice, 0, SLOTS // 4)
    assert refused(site.prepare(site.alice, 500, 2)) == 0
    for lease in site.core.leases():
        site.core.release(site.alice, lease.id)
    site.core.release_hold((*site.alice.engine, "r"), 0)
    site.core.work()
    assert not site.core._lookups.pin_budget.held
    assert site.lease(site.alice, 0, 12) == 12


def test_present_blocks_need_no_room() -> None:
    """A tenant at its bound stores the same keys again: they are present, not refused."""
    site = Site()
    site.store(site.alice, 0, 4)
    site.prepare(site.alice, 500, SLOTS)
    assert site.prepare(site.alice, 0, 4).statuses == PRESENT * 4


@pytest.mark.parametrize("is_mapped", [False, True])
def test_stores_in_quarantine_count_until_their_slots_are_free(*, is_mapped: bool) -> None:
    """Sessions that begin stores and end: new sessions of the tenant pin no more than its part."""
    site, mapped = Site(), []
    for number in range(4):
        session = site.open(ALICE, f"s{number}")
        if is_mapped:
            site.core.writer_attached(session.id, number)
            mapped.append((session, number))
        site.prepare(session, number * SLOTS, SLOTS // 4)
        site.abandon(session)
    assert refused(site.prepare(site.bob, 0, SLOTS // 4)) == 0
    site.core.tick(601.0)
    for session, number in mapped:
        site.core.writer_gone(session.id, number)
    assert refused(site.prepare(site.alice, 0, SLOTS // 2)) == 0


def test_a_store_finds_an_extent_behind_many_blocks_of_pinned_ones() -> None:
    """A size without blocks gets the idle extent behind extents with a leased block."""
    in_extent, extents = 128, 4
    rig = Rig(extents=extents, extent_bytes=in_extent * 4096, eviction={"cpu": "lru"})
    names = keys(*range(in_extent * extents))
    for start in range(0, len(names), in_extent):
        assert rig.store(names[start : start + in_extent]) == GRANTED * in_extent
    for start in range(0, in_extent * (extents - 1), in_extent):
        run_to_end(rig.core.lookup(rig.session, names[start : start + 1], LookupSpec(lease_seconds=60), now=0))
    assert rig.store(keys(1, group=1)) == GRANTED


@pytest.mark.parametrize("seed", range(8))
def test_a_store_is_refused_only_if_nothing_can_be_evicted(seed: int) -> None:
    """Two sizes, random leases: a refusal means that each extent has a pinned block."""
    rng, rig, refusals = random.Random(seed), Rig(extents=6, eviction={"cpu": "lru"}), 0
    sizes = {0: 4096, 1: 16384}
    for _ in range(200):
        group = rng.choice((0, 0, 1))
        names = keys(*rng.sample(range(200), rng.randint(1, 12)), group=group)
        if rng.random() < 0.4:
            run_to_end(rig.core.lookup(rig.session, names, LookupSpec(prefix=False, lease_seconds=60), now=0))
        elif rng.random() < 0.03:
            for lease in rig.core.leases()[: rng.randint(0, 8)]:
                rig.core.release(rig.session, lease.id)
        elif NO_ROOM[0] in rig.store(names):
            refusals += 1
            others = [block for block in ready_blocks(rig.core) if block.key not in names and not block.pins]
            assert all(block.queue.size_class != sizes[group] for block in others)
            memory, owners = rig.core._cpu_tier.memory, rig.core._cpu_tier._owners
            for extent in memory.extents_after(None, 0):
                found = [owners[slot] for slot in memory.in_use(extent)]
                assert any(block.pins or block.key in names for block in found)
    assert refusals
