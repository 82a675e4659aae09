"""Ends of jobs and stores: what waits for their blocks is told in slices of bounded cost."""

import pytest
from core_rig import SPEC, Rig, keys
from harness.operations import run_to_end
from simulation import EXTENT, ModelTier

from kvtier.tiers.core import endings, waiters
from kvtier.tiers.core.call_specs import LookupSpec, StoreSpec
from kvtier.tiers.core.commands import LeaseSettled
from kvtier.tiers.core.leases import BlockLease
from kvtier.tiers.core.operations import Operation
from kvtier.tiers.secondary_tier import OffloadPolicy, RequestInfo, Vote
from kvtier.tiers.types import MissReason, StoreId


class RequestTier(ModelTier):
    def on_new_request(self, request: RequestInfo) -> Vote:
        return Vote(OffloadPolicy.REQUEST_LEVEL, "rule 0")


@pytest.fixture(autouse=True)
def _small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiters, "SETTLE_SLICE", 3)


def prepare(rig: Rig, *numbers: int, request_id: str = "") -> StoreId:
    session = rig.session if request_id else rig.open("writer")
    spec = StoreSpec(request_id=request_id, lease_seconds=600)
    answer = run_to_end(rig.core.prepare_store(session, keys(*numbers), spec, now=0))
    return answer.store_id or StoreId(0)


def look_up(rig: Rig, *numbers: int) -> BlockLease:
    found = run_to_end(rig.core.lookup(rig.session, keys(*numbers), LookupSpec(lease_seconds=60), now=0)).lease
    assert found is not None
    return found


def told(rig: Rig) -> list[int]:
    return [command.lease_id for command in rig.core.take_commands() if isinstance(command, LeaseSettled)]


@pytest.mark.parametrize("failed", [False, True])
def test_leases_are_settled_in_slices(*, failed: bool) -> None:
    """Also the items of one lease: a lookup can name a pending block 65,536 times."""
    rig = Rig()
    store_id = prepare(rig, 0)
    leases = [look_up(rig, 0, 0, 0), look_up(rig, 0)]
    rig.core.take_commands()
    run_to_end(rig.core.complete_store(rig.open("writer"), store_id, [0] if failed else []))
    pending, settled = [[lease.pending for lease in leases]], [told(rig)]
    while rig.core.has_work():
        rig.core.work()
        pending.append([lease.pending for lease in leases])
        settled.append(told(rig))
    assert (pending[:2], settled[:2]) == ([[1, 1], [0, 0]], [[], [lease.id for lease in leases]])
    assert not any(settled[2:])
    stats = rig.core.stats()
    assert (stats.tiers[0].hits, stats.lookup_misses) == ((0, 4) if failed else (4, 0))
    assert [lease.hits for lease in leases] == ([0, 0] if failed else [3, 1])
    assert not rig.core._lookups.leases.waiters._by_block


def test_a_block_that_is_stored_again_between_slices_is_still_awaited() -> None:
    """The leases that no slice has reached wait for the new store."""
    rig = Rig()
    first = prepare(rig, 0)
    leases = [look_up(rig, 0, 0), look_up(rig, 0)]
    session = rig.open("writer")
    run_to_end(rig.core.complete_store(session, first, [0]))
    second = prepare(rig, 0)
    while rig.core.has_work():
        rig.core.work()
    assert [lease.pending for lease in leases] == [0, 1]
    run_to_end(rig.core.complete_store(session, second))
    assert [lease.hits for lease in leases] == [0, 1]


def test_closed_leases_take_a_part_of_a_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are not settled, and 6,000 of them can wait for 256 blocks."""
    monkeypatch.setattr(endings, "SLICE", 1)
    rig = Rig()
    store_id = prepare(rig, 0)
    for _ in range(7):
        look_up(rig, 0)
    rig.core.close_session(rig.session.id)
    rig.core.take_commands()
    [block] = rig.core._cpu_tier._index
    settling = rig.core._completions._settle([block], [])
    block.writers = 0
    assert len(list(settling)) == 2, "six closed leases, three per slice"
    block.writers = 1
    run_to_end(rig.core.complete_store(rig.open("writer"), store_id))


def test_the_tenants_take_turns() -> None:
    """Else one that ends many stores in turn would delay what waits for the stores of another."""
    work, done = Rig().core._sliced_work, [0, 0]

    def operation(tenant: int, slices: int) -> Operation[None]:
        for _ in range(slices):
            done[tenant] += 1
            yield None

    for _ in range(100):
        work.perform_later(operation(0, 3), b"one")
    work.perform_later(operation(1, 3), b"other")
    for _ in range(6):
        work.work(0.0)
    assert done == [3, 3]


def test_a_request_whose_block_is_evicted_between_slices_gets_it_stored() -> None:
    """The CPU tier keeps the block until every request that waited for it has been told."""
    rig = Rig(RequestTier("near", 1 << 20), eviction={"cpu": "lru"})
    store_id = prepare(rig, 0)
    for number in range(3):
        rig.core.begin_request(rig.session, RequestInfo(f"r{number}", SPEC.id))
        prepare(rig, 0, request_id=f"r{number}")
    run_to_end(rig.core.complete_store(rig.open("writer"), store_id))
    rig.finish_jobs()
    for number in range(100, 100 + 4 * EXTENT // 4096):
        rig.store(keys(number))
        rig.finish_jobs()
    while rig.core.has_work():
        rig.core.work()
    while rig.finish_jobs():
        pass
    requests = [rig.core.finish_request(rig.session, f"r{number}") for number in range(3)]
    assert [each.incomplete for each in requests] == [0, 0, 0]
    assert not any(block.pins for block in rig.core._cpu_tier._index)


@pytest.mark.parametrize("counted", [True, False])
def test_a_lease_that_ends_between_slices_counts_its_hits_once(*, counted: bool) -> None:
    """Its lookup has ended, or is still running: then it answers that no key is a hit."""
    rig = Rig()
    store_id = prepare(rig, 0)
    names = keys(*[0] * 4)
    lookup = rig.core.lookup(rig.session, names, LookupSpec(lease_seconds=60), now=0, slice_keys=2)
    if counted:
        run_to_end(lookup)
    else:
        next(lookup), lookup.send(0)
    run_to_end(rig.core.complete_store(rig.open("writer"), store_id))
    rig.core.close_session(rig.session.id)
    while rig.core.has_work():
        rig.core.work()
    if not counted:
        run_to_end(lookup)
    stats = rig.core.stats()
    assert (stats.tiers[0].hits, stats.lookup_misses) == ((4, 0) if counted else (0, 4))


def test_a_block_that_fails_after_its_lease_was_closed_is_no_hit_of_a_running_lookup() -> None:
    rig = Rig()
    store_id = prepare(rig, 0)
    lookup = rig.core.lookup(
        rig.session, keys(0, 1, 2), LookupSpec(prefix=False, lease_seconds=60), now=0, slice_keys=1
    )
    next(lookup), lookup.send(0)
    rig.core.tick(60)
    run_to_end(rig.core.complete_store(rig.open("writer"), store_id, [0]))
    run_to_end(lookup, 60)
    while rig.core.has_work():
        rig.core.work()
    stats = rig.core.stats()
    assert (stats.tiers[0].hits, stats.lookup_misses) == (0, 3)
    assert stats.misses_by_reason[MissReason.PENDING] == 3


@pytest.mark.parametrize("failed", [False, True])
def test_blocks_are_stored_for_waiting_requests_in_slices(*, failed: bool) -> None:
    rig = Rig(RequestTier("near", 1 << 20))
    store_id = prepare(rig, 0)
    for number in range(3):
        rig.core.begin_request(rig.session, RequestInfo(f"r{number}", SPEC.id))
        prepare(rig, 0, request_id=f"r{number}")
    [block] = rig.core._cpu_tier._index
    waiting = [len(rig.core._requests.waiters.of(block))]
    run_to_end(rig.core.complete_store(rig.open("writer"), store_id, [0] if failed else []))
    while rig.core.has_work():
        waiting.append(len(rig.core._requests.waiters.of(block)))
        rig.core.work()
    assert waiting == [3, 2, 1, 0]
    requests = [rig.core.finish_request(rig.session, f"r{number}") for number in range(3)]
    assert [(each.incomplete, each.pending_stores) for each in requests] == [(1, 0) if failed else (0, 1)] * 3
