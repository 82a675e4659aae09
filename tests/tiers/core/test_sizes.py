"""Sizes that clients choose (parts, groups, ranks) and counts per tenant take bounded memory."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any

import pytest
from core_rig import Rig, keys
from harness.operations import run_to_end

from kvtier.tiers.core import cpu_tier as cpu_tier_module
from kvtier.tiers.core.call_specs import LookupSpec, StoreSpec
from kvtier.tiers.core.leases import LEASE_COST, PENDING_COST
from kvtier.tiers.errors import InvalidNamespace, LimitExceeded
from kvtier.tiers.eviction.queues import KEPT_QUEUES
from kvtier.tiers.secondary_tier import NamespaceId, RequestInfo
from kvtier.tiers.types import (
    MAX_GROUPS,
    MAX_PART_SIZES,
    MAX_WORLD_SIZE,
    SLOT_ALIGNMENT,
    HandoffDirection,
    NamespaceSpec,
)

PAGE = SLOT_ALIGNMENT
SIZES = 16
NAMESPACES = 4 * KEPT_QUEUES // SIZES


def spec(number: int, *part_bytes: int, world_size: int = 1) -> NamespaceSpec:
    return NamespaceSpec(NamespaceId(b"%024d" % number), world_size, part_bytes or (PAGE,))


def key_of(group: int, number: int = 0) -> bytes:
    return b"%032d" % number + group.to_bytes(4, "big")


def use_sizes(rig: Rig, number: int) -> None:
    """Stores a block of each of `SIZES` new part sizes, and then resets the namespace."""
    namespace = spec(number, *(PAGE * (1 + number * SIZES + size) for size in range(SIZES)))
    session = rig.core.open_session(b"%d" % number, f"engine {number}", None, namespace)
    wanted = [key_of(group) for group in range(SIZES)]
    answer = run_to_end(rig.core.prepare_store(session, wanted, StoreSpec(lease_seconds=60), now=0))
    assert answer.store_id is not None
    run_to_end(rig.core.complete_store(session, answer.store_id))
    rig.core.reset(session)
    rig.core.close_session(session.id)


def count_finishes(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    counts: Counter[str] = Counter()
    for policy in {type(queue.policy) for queue in rig.core._cpu_tier.queues.all()}:
        finish = policy.finish

        def counted(self: Any, request: Hashable, finish: Any = finish) -> None:
            counts["finish"] += 1
            finish(self, request)

        monkeypatch.setattr(policy, "finish", counted)
    return counts


def large_rig() -> Rig:
    return Rig(extents=2 * SIZES, extent_bytes=2 * NAMESPACES * SIZES * PAGE)


def test_queues_of_part_sizes_without_blocks_are_dropped() -> None:
    rig = large_rig()
    cpu_tier = rig.core._cpu_tier
    cpu_tier.queues._sweep_at = 2 * KEPT_QUEUES  # as after a time with as many blocks
    for number in range(KEPT_QUEUES + 1):
        cpu_tier.queues.queue_for(rig.session.namespace.id, (number + 1) * PAGE)
    rig.core.tick(1)
    assert not cpu_tier.queues.all()
    assert not cpu_tier.queues._of_class


def test_queues_are_dropped_also_between_ticks() -> None:
    rig = large_rig()
    for number in range(NAMESPACES):
        use_sizes(rig, number)
    assert len(rig.core._cpu_tier.queues.all()) <= 2 * KEPT_QUEUES
    assert not rig.core._cpu_tier.memory._with_room


def test_the_end_of_a_request_costs_what_it_has_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of many sizes are in the tier, but the request has used none of them."""
    rig = large_rig()
    session = rig.open("many sizes", spec(1, *(PAGE * size for size in range(1, SIZES + 1))))
    answer = run_to_end(
        rig.core.prepare_store(session, [key_of(group) for group in range(SIZES)], StoreSpec(lease_seconds=60), now=0)
    )
    assert answer.store_id is not None
    run_to_end(rig.core.complete_store(session, answer.store_id))
    rig.store(keys(1))
    run_to_end(rig.core.lookup(rig.session, keys(1), LookupSpec(request_id="request", lease_seconds=60), now=0))
    finishes = count_finishes(rig, monkeypatch)
    rig.core.finish_request(rig.session, "request")
    assert finishes["finish"] == 1


def test_a_block_returns_to_the_order_when_its_queue_was_dropped() -> None:
    """While a block is retained it is in no queue, so that its queue may be dropped."""
    rig = Rig(extents=4)
    queues = rig.core._cpu_tier.queues
    answer = run_to_end(rig.core.prepare_store(rig.session, keys(1), StoreSpec(lease_seconds=60, retain_for=5), now=0))
    assert answer.store_id is not None
    run_to_end(rig.core.complete_store(rig.session, answer.store_id))
    queues._drop_empty()
    rig.core._cpu_tier._queue_of.clear()
    assert not queues.all()
    rig.store(keys(2))  # creates a new queue of the same class
    rig.core.tick(10)
    (queue,) = queues.all()
    assert {block.key for block in queue.victims()} == set(keys(1, 2))
    assert {block.queue for block in queue.victims()} == {queue}


def test_requests_whose_queues_are_known_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.tiers.eviction.queues.MAX_REQUESTS", 4)
    rig = Rig()
    rig.store(keys(1))
    for number in range(16):
        run_to_end(rig.core.lookup(rig.session, keys(1), LookupSpec(request_id=f"{number}", lease_seconds=60), now=0))
    assert len(rig.core._cpu_tier.queues._used_by) == 4


def test_a_namespace_has_few_groups_and_ranks() -> None:
    spec(1, *([PAGE] * MAX_GROUPS), world_size=MAX_WORLD_SIZE)
    with pytest.raises(InvalidNamespace):
        spec(1, *([PAGE] * (MAX_GROUPS + 1)))
    with pytest.raises(InvalidNamespace):
        spec(1, world_size=MAX_WORLD_SIZE + 1)


def test_a_kept_namespace_is_small() -> None:
    """A conversation keeps its namespace: 8,192 of the largest ones take less than 64 MiB."""
    decoded = [int(str(1 << 20 | group % MAX_PART_SIZES)) for group in range(MAX_GROUPS)]
    kept = spec(1, *decoded, world_size=MAX_WORLD_SIZE)
    other = spec(2, *decoded, world_size=MAX_WORLD_SIZE)
    assert kept.no_slots is other.no_slots
    own = sys.getsizeof(kept.part_bytes) + sum(
        map(sys.getsizeof, {id(each): each for each in kept.part_bytes}.values())
    )
    assert 8192 * own < 64 << 20


@pytest.mark.parametrize("world_size", [1, 64, 65, MAX_WORLD_SIZE])
def test_the_offsets_of_a_block_are_small_beside_its_slots(world_size: int) -> None:
    """One rank of many stores one byte: the list of offsets takes at most an eighth of its slot."""
    rig = Rig(extents=4)
    session = rig.core.open_session(b"wide", "wide", 0, spec(1, 1, world_size=world_size))
    answer = run_to_end(rig.core.prepare_store(session, [key_of(0)], StoreSpec(lease_seconds=60), now=0))
    assert answer.store_id is not None
    (block,) = rig.core.store(session, answer.store_id).blocks
    assert sys.getsizeof(block.slots) - sys.getsizeof(()) <= block.queue.share.used / 8


def test_promotions_fill_all_parts_in_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each new offset of a block must not copy the list of all its offsets."""
    rig = Rig(extents=4, extent_bytes=64 * PAGE)
    cpu_tier, namespace = rig.core._cpu_tier, spec(1, world_size=64)
    blocks = cpu_tier.find_or_add(namespace, [key_of(0, 1), key_of(0, 2)])
    monkeypatch.setattr(cpu_tier_module, "put_slots", lambda *_: pytest.fail("one offset at a time"))
    cpu_tier.use(blocks, None)
    cpu_tier.reserve(blocks)
    offsets = [slot for block in blocks for slot in block.slots]
    assert None not in offsets
    assert len(set(offsets)) == 128
    assert all(cpu_tier._owners[slot] is block for block in blocks for slot in block.slots if slot is not None)


def test_size_classes_without_blocks_take_no_spare_room() -> None:
    rig = large_rig()
    cpu_tier = rig.core._cpu_tier
    cpu_tier._spare.under_pressure.update((0, PAGE * size) for size in range(2, 1000))
    rig.core.tick(1)
    assert not cpu_tier._spare.under_pressure


def test_leases_of_a_tenant_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Further sessions give a tenant no further leases; another tenant has its own limit."""
    monkeypatch.setattr("kvtier.tiers.core.lookups.MAX_TENANT_LEASED_ITEMS", 2 * (1 + LEASE_COST))
    rig = Rig()
    mine = [rig.core.open_session(b"m%d" % each, f"engine {each}", None, spec(1)) for each in range(3)]
    namespace = NamespaceSpec(NamespaceId(b"another tenant".ljust(24)), 1, (PAGE,))
    other = rig.core.open_session(b"other", "other", None, namespace)
    for session in (mine[0], other):
        answer = run_to_end(rig.core.prepare_store(session, [key_of(0)], StoreSpec(lease_seconds=60), now=0))
        assert answer.store_id is not None
        run_to_end(rig.core.complete_store(session, answer.store_id))
    leases = [look_up(rig, session).lease for session in mine[:2]]
    with pytest.raises(LimitExceeded, match="tenant"):
        look_up(rig, mine[2])
    assert look_up(rig, other).lease is not None
    assert leases[0] is not None
    rig.core.release(mine[0], leases[0].id)
    assert look_up(rig, mine[2]).lease is not None
    for session in (*mine, other):
        rig.core.close_session(session.id)
    assert not rig.core._lookups.leases._tenant_items


def test_pending_items_of_a_tenant_cost_more() -> None:
    rig = Rig()
    writer = rig.open("writer")
    answer = run_to_end(rig.core.prepare_store(writer, keys(1, 2), StoreSpec(lease_seconds=60), now=0))
    look = run_to_end(rig.core.lookup(rig.session, keys(1, 2), LookupSpec(lease_seconds=60), now=0))
    leases = rig.core._lookups.leases
    assert leases.items_of(rig.session)[1] == LEASE_COST + 2 * (1 + PENDING_COST)
    assert answer.store_id is not None
    run_to_end(rig.core.complete_store(writer, answer.store_id, failed=[1]))
    assert leases.items_of(rig.session)[1] == LEASE_COST + 2
    assert look.lease is not None
    rig.core.release(rig.session, look.lease.id)
    assert leases.items_of(rig.session)[1] == 0


def look_up(rig: Rig, session: Any) -> Any:
    return run_to_end(rig.core.lookup(session, [key_of(0)], LookupSpec(lease_seconds=60), now=0))


def waiting_requests(rig: Rig, wanted: Sequence[bytes], count: int) -> list[Any]:
    """Begins requests that wait for blocks which another engine writes, and finishes them."""
    table, requests = rig.core._requests, []
    writer = rig.open("writer")
    assert run_to_end(rig.core.prepare_store(writer, wanted, StoreSpec(lease_seconds=60), now=0)).store_id is not None
    blocks = rig.core._cpu_tier.find_or_add(writer.namespace, wanted)
    for number in range(count):
        request = table.negotiate(rig.session, RequestInfo(f"{number}", rig.session.namespace.id))
        for block in blocks:
            table.wait_for(request, block)
        requests.append(request)
    return requests


def test_finished_requests_that_wait_count_for_the_tenant(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that waits for the store of another engine is kept after its end."""
    monkeypatch.setattr("kvtier.tiers.core.requests.MAX_REQUESTS", 4)
    rig = Rig()
    for request in waiting_requests(rig, keys(1), 4):
        rig.core._requests.finish(request)
    with pytest.raises(LimitExceeded):
        rig.core.begin_request(rig.session, RequestInfo("more", rig.session.namespace.id))


def test_blocks_that_requests_wait_for_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.tiers.core.requests.MAX_AWAITED", 3)
    rig = Rig()
    requests = waiting_requests(rig, keys(1, 2), 2)
    table = rig.core._requests
    assert sum(len(request.waiting) for request in requests) == 3
    assert requests[1].incomplete == 1
    for request in requests:
        table.finish(request, abandon=True)
    assert not table.waiters._by_block
    assert not table._awaited
    assert not table._open


def test_blocks_that_one_request_waits_for_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.tiers.core.requests.MAX_AWAITED_BY_REQUEST", 1)
    requests = waiting_requests(Rig(), keys(1, 2), 2)
    assert [(len(request.waiting), request.incomplete) for request in requests] == [(1, 1), (1, 1)]


def test_stores_of_a_tenant_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each tick examines all stores; those in quarantine count too, until the client is gone."""
    monkeypatch.setattr("kvtier.tiers.core.in_flight_stores.MAX_STORES", 2)
    rig = Rig()
    for number in range(2):
        assert (
            run_to_end(rig.core.prepare_store(rig.session, keys(number), StoreSpec(lease_seconds=5), now=0)).store_id
            is not None
        )
    with pytest.raises(LimitExceeded):
        run_to_end(rig.core.prepare_store(rig.session, keys(3), StoreSpec(lease_seconds=5), now=0))
    rig.core.tick(6)
    while rig.core._sliced_work.unpins:
        rig.core.work()
    with pytest.raises(LimitExceeded):
        run_to_end(rig.core.prepare_store(rig.session, keys(3), StoreSpec(lease_seconds=5), now=0))
    for writer in list(rig.session.writers):
        rig.core.writer_gone(rig.session.id, writer)
    assert rig.store(keys(3))
    assert not rig.core._stores.table._per_tenant


def test_pending_items_of_holds_cost_more() -> None:
    """Each takes 200 bytes until its block is ready or the hold has ended."""
    rig = Rig()
    table = rig.core._handoffs._table
    writer = rig.open("writer")
    answer = run_to_end(rig.core.prepare_store(writer, keys(1, 2), StoreSpec(lease_seconds=60), now=0))
    for name, wanted in {"pending": keys(1, 2), "removed": keys(2)}.items():
        sizes = {"num_tokens": 16, "duration": 60.0, "now": 0.0}
        direction = HandoffDirection.PREFILL_TO_DECODE
        run_to_end(rig.core.publish(rig.session, name, wanted, range(len(wanted)), direction=direction, **sizes))
    assert table.items_of("") == 3 * (1 + PENDING_COST)
    assert answer.store_id is not None
    run_to_end(rig.core.complete_store(writer, answer.store_id, failed=[1]))
    assert table.items_of("") == 3 + 2 * PENDING_COST
    first, second = table
    table.remove(first)
    assert table.items_of("") == 1 + PENDING_COST
    table.remove(second)
    assert table.items_of("") == 0


def test_part_sizes_of_a_namespace_are_bounded() -> None:
    """Each size has its own eviction queue, which a search for room may have to visit."""
    NamespaceSpec(NamespaceId(bytes(32)), 1, tuple(range(1, MAX_PART_SIZES + 1)))
    with pytest.raises(InvalidNamespace, match="sizes at most"):
        NamespaceSpec(NamespaceId(bytes(32)), 1, tuple(range(1, MAX_PART_SIZES + 2)))
