"""Counts and indexes of the core that repeat other state, with what they should be."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from kvtier.tiers.core.block import Block
from kvtier.tiers.core.leases import LEASE_COST, PENDING_COST
from kvtier.tiers.core.manager import TierManager
from kvtier.tiers.secondary_tier import NamespaceId
from kvtier.tiers.types import tenant_of

from .inspect import CoreView, unsettled

__all__ = ["books"]


def books(core: TierManager, core_view: CoreView) -> Iterator[tuple[str, Any, Any]]:
    """Yields a name, the value that the core keeps, and the value recomputed from other state."""
    yield from _leases(core)
    yield from _stores(core)
    yield from _requests(core)
    yield from _holds(core)
    yield from _room(core)
    yield from _slots(core, core_view)


def _awaited(
    items: Sequence[Block | None], kept: dict[Block, list[int]], late: Collection[Block]
) -> dict[Block, list[int]]:
    """Returns the awaited items by block: not ready ones, and those that no slice has settled."""
    found: dict[Block, list[int]] = {}
    for item, block in enumerate(items):
        if block is not None and (not block.ready or (block in late and item in kept.get(block, ()))):
            found.setdefault(block, []).append(item)
    return found


def _leases(core: TierManager) -> Iterator[tuple[str, Any, Any]]:
    table, late = core._lookups.leases, unsettled(core)
    items, tenant_items = Counter[bytes](), Counter[bytes]()
    by_session: dict[Any, set[Any]] = {}
    by_request: dict[Any, set[Any]] = {}
    waiting: dict[Any, dict[Any, None]] = {}
    for lease in (*table, *table._closed):
        is_late = late if table.is_open(lease) else lease.awaited.keys()
        awaited = _awaited(lease.items, lease.awaited, is_late)
        pending = sum(map(len, awaited.values()))
        yield f"pending items of lease {lease.id}", lease.pending, pending
        yield f"hits of lease {lease.id}", lease.hits, len(lease.items) - lease.items.count(None)
        for block in awaited:
            waiting.setdefault(block, {})[lease] = None
        yield f"awaited blocks of lease {lease.id}", lease.awaited, awaited
        owner = lease.owner
        items[owner.session_id] += LEASE_COST + len(lease.items)
        tenant_items[tenant_of(owner.engine[0])] += LEASE_COST + len(lease.items) + PENDING_COST * pending
        by_session.setdefault(owner.session_id, set()).add(lease)
        by_request.setdefault((owner.engine, owner.request_id), set()).add(lease)
    yield "items of sessions", table._items, items
    yield "items of tenants", table._tenant_items, tenant_items
    yield "leases by session", {key: set(leases) for key, leases in table._by_session.items()}, by_session
    yield "leases by request", {key: set(leases) for key, leases in table._by_request.items()}, by_request
    yield "leases by grant", table.by_grant, {each.owner.grant: each for each in table if each.owner.grant_id}
    yield "leases that wait", table.waiters._by_block, waiting


def _stores(core: TierManager) -> Iterator[tuple[str, Any, Any]]:
    table = core._stores.table
    stores = (*table, *table._closed.values())
    owners = [(store.id, store.owner.engine, store.owner.grant) for store in stores]
    owners += [(store_id, entry.engine, entry.grant) for store_id, entry in table._quarantine.items()]
    yield "stores of tenants", table._per_tenant, Counter(tenant_of(engine[0]) for _, engine, _ in owners)
    writers: dict[int, set[Any]] = {}
    for store_id, entry in table._quarantine.items():
        for writer in entry.writers & table._by_writer.keys():
            writers.setdefault(writer, set()).add(store_id)
    yield "stores by writer", {writer: set(stores) for writer, stores in table._by_writer.items()}, writers
    yield "stores by grant", table.by_grant, {grant: store_id for store_id, _, grant in owners if grant[1]}


def _requests(core: TierManager) -> Iterator[tuple[str, Any, Any]]:
    table = core._requests
    awaited, waits = Counter[str](), dict[Any, set[Any]]()
    for block, requests in table.waiters._by_block.items():
        for request in requests:
            awaited[request.session.tenant] += 1
            waits.setdefault(request, set()).add(block)
    yield "awaited blocks", table._awaited, awaited
    known = {*table._requests.values(), *waits}
    yield "waiting requests", {each: each.waiting for each in known if each.waiting}, waits
    begun: dict[Any, set[str]] = {}
    for request in table._requests.values():
        if not request.finished:
            begun.setdefault(request.session.id, set()).add(request.id)
    ending = (request.session for request in table._requests.values() if request.session.ended)
    kept = {each.id: set(each.requests) for each in (*core._sessions.values(), *ending) if each.requests}
    yield "requests of sessions", kept, begun
    still = Counter(request.session.tenant for request in known if not request.ended)
    yield "open requests", still - table._open, Counter()  # replaced ones may wait for stores


def _holds(core: TierManager) -> Iterator[tuple[str, Any, Any]]:
    table, late = core._handoffs._table, unsettled(core)
    tenants, items, names = Counter[str](), Counter[str](), Counter[Any]()
    waiting: dict[Any, dict[Any, None]] = {}
    for hold in table:
        awaited = _awaited(hold.items[: len(hold.items) - hold.unprepared], hold.awaited, late)
        for block in awaited:
            waiting.setdefault(block, {})[hold] = None
        yield f"awaited items of {hold.name}", hold.awaited, awaited
        yield f"pending items of {hold.name}", hold.pending, sum(map(len, awaited.values()))
        tenants[hold.tenant] += 1
        items[hold.tenant] += len(hold.keys) + PENDING_COST * hold.pending
        names[tenant_of(hold.name[0]), *hold.name[1:]] += 1
    yield "holds that wait for blocks", table._waiters._by_block, waiting
    yield "holds of tenants", table._per_tenant, tenants
    yield "items of holds", table._items, items
    yield "holds by name", table._per_name, names


def _room(core: TierManager) -> Iterator[tuple[str, Any, Any]]:
    room = core._lookups.room
    tenants = Counter[bytes]()
    for line in room._lines.values():
        waiters = set[Any]()
        for tenant, sessions in line.tenants.items():
            for own in sessions.values():
                tenants[tenant] += len(own)
                waiters.update(own)
        yield "the head of a line waits", line.head in waiters, True
        yield "heads that gave up wait", line.in_vain - waiters, set()
    yield "waiting lookups of tenants", room._per_tenant, tenants


def _slots(core: TierManager, core_view: CoreView) -> Iterator[tuple[str, Any, Any]]:
    cpu_tier = core._cpu_tier
    memory, owners, used = cpu_tier.memory, dict[int, Any](), Counter[str]()
    for block in core_view.blocks:
        slots = [slot for slot in block.slots if slot is not None]
        owners |= dict.fromkeys(slots, block)
        used[block.queue.share.name] += block.queue.size_class * len(slots)
    for offset, share in cpu_tier._detached.items():
        used[share.name] += memory.extent_at(offset).slot_bytes
    yield "owners of slots", cpu_tier._owners, owners
    retiring = cpu_tier.retiring._all.values()
    shares = cpu_tier.queues.shares
    wanted_by = [shares.of(NamespaceId(each.tenant)).pool for each in retiring]
    yield "pools of retiring extents", [each.extent.pool for each in retiring], wanted_by
    pools = {slot: block.queue.share.pool for slot, block in owners.items()}
    yield "pools of slots", {slot: memory.extent_at(slot).pool for slot in owners}, pools
    yield "used bytes", +Counter({share.name: share.used for share in cpu_tier.queues.shares}), +used
    with_room: dict[tuple[int, int], set[Any]] = {}
    for extent in memory._extents.values():
        yield f"slots of {extent.offset}", extent.used + len(extent.free), len(memory.slots_of(extent))
        if extent.free and not extent.next_class:
            with_room.setdefault((extent.pool, extent.slot_bytes), set()).add(extent)
    yield "extents with room", {each: set(extents) for each, extents in memory._with_room.items()}, with_room
    for pool, free in enumerate(memory._unclaimed):
        unclaimed = [each for each in memory._extents.values() if not each.slot_bytes and each.pool == pool]
        yield f"unclaimed extents of pool {pool}", (set(free), len(free)), (set(unclaimed), len(unclaimed))
