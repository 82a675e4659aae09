"""Reads private state of the core. Only this module, `books` and `damage` do."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from functools import partial
from inspect import getgeneratorlocals
from itertools import chain
from typing import Any
from unittest import mock

from kvtier.tiers.core import room_queue
from kvtier.tiers.core.block import Block
from kvtier.tiers.core.catalog import CatalogEntry, EntryState
from kvtier.tiers.core.commands import Waiter
from kvtier.tiers.core.conversations import Conversation, ConversationTable
from kvtier.tiers.core.in_flight_stores import Store
from kvtier.tiers.core.leases import BlockLease
from kvtier.tiers.core.manager import TierManager
from kvtier.tiers.core.operations import Operation
from kvtier.tiers.core.prefetches import PrefetchBudget
from kvtier.tiers.core.requests import Request
from kvtier.tiers.core.room_queue import _Line
from kvtier.tiers.core.secondary_state import GATHER_SECONDS, SecondaryTierState
from kvtier.tiers.core.sliced_work import _Entry
from kvtier.tiers.core.slot_records import SlotRecords
from kvtier.tiers.core.tier_jobs import JobKind
from kvtier.tiers.eviction.queues import EvictionQueues
from kvtier.tiers.eviction.quotas import TenantShare
from kvtier.tiers.secondary_tier import NamespaceId
from kvtier.tiers.types import EngineSession, NamespaceSpec, tenant_of

from .model import EXTENT, Name

GRACE_SECONDS = 2.0
"""Time for pins in retiring extents, so short that runs have many."""

SLICED = ("cpu_tier", "sliced_work", "bulk_eviction", "conversation_actions", "retiring_extents")
"""Modules whose slices have three items."""

CONVERSATION_LIMITS = {"KEYS": 24, "TENANT_KEYS": 40, "ALL_KEYS": 60, "TENANT_CONVERSATIONS": 3, "ALL_CONVERSATIONS": 6}
"""Limits of the conversation table, so low that it forgets conversations."""


class CoreView:
    """A view of the core after an event, shared by all invariants."""

    def __init__(self, core: TierManager) -> None:
        self.stats = core.stats()
        self.pending_hits = pending_hits(core)
        """Per source, items that will count as hits: the lease is closed, or the block ready."""
        self.unsettled = unsettled(core)
        """Blocks that are no longer pending, and that slices have not settled yet."""
        self.blocks = blocks(core)
        self.ready = [block for block in self.blocks if block.ready and not block.invalidated]
        self.pinned = {block for block in self.blocks if block.pins}
        self.retiring = retiring(core)
        """Per retiring extent the slots in use."""
        self.retirements = retirements(core)
        """When each extent that retires, or has retired a short time ago, began to."""
        self.classes = classes(core)
        """Size class of each extent."""
        self.is_ending_pins = core._retiring_pins.runs
        """Whether the core still searches for pins in retiring extents."""
        self.extents = {block: {slot // EXTENT for slot in block.slots if slot is not None} for block in self.blocks}
        """Numbers of the extents in which each block has slots."""
        self.entries = [entries(secondary) for secondary in secondaries(core)]
        """Per secondary tier: the blocks that it holds or is storing, according to the core."""
        self.held: list[set[Name]] = [
            {entry.name for entry in here if entry.state is EntryState.HELD} for here in self.entries
        ]
        """Per secondary tier: the blocks that can be loaded."""
        self.promises = [
            promises(secondary, here) for secondary, here in zip(secondaries(core), self.entries, strict=True)
        ]
        """Per secondary tier: the blocks that it may not evict yet, and until when."""


@contextlib.contextmanager
def small_jobs(nbytes: int) -> Iterator[None]:
    """Limits jobs to `nbytes`, slices to three items and event logs to 16, to split all work."""
    limits = {"tier_jobs.JOB_BYTES": nbytes, "event_log.RUN_KEYS": 3, "event_log.MAX_KEYS": 16}
    limits |= {f"{module}.SLICE": 3 for module in SLICED}
    limits |= {
        "endings.SLICE": 1,
        "endings.REQUEST_SLICE": 1,
        "handoffs._SLICE": 1,
        "waiters.SETTLE_SLICE": 2,
        "room_queue.MAX_WAITERS": 3,
        "slot_records.MAX_NAMESPACES": 4,
    }
    limits |= {"retiring_extents.GRACE_SECONDS": GRACE_SECONDS, "retiring_pins.SLICE": 80}
    limits |= {f"conversations.MAX_{name}": limit for name, limit in CONVERSATION_LIMITS.items()}
    with contextlib.ExitStack() as patches:
        for name, limit in limits.items():
            patches.enter_context(mock.patch(f"kvtier.tiers.core.{name}", limit))
        yield


def blocks(core: TierManager) -> list[Block]:
    """Returns every block of the CPU tier, also empty ones and those that a reset removed."""
    return [*core._cpu_tier._index, *invalidated(core)]


def pending_hits(core: TierManager) -> Counter[int]:
    """Returns how many awaited items are of closed leases or ready blocks, by source."""
    table, found = core._lookups.leases, Counter[int]()
    for lease in (*table, *table._closed):
        for block, items in lease.awaited.items() if lease.counted else ():
            if block.ready or table.is_closed(lease):
                found.update(lease.sources[item] for item in items)
    return found


def unsettled(core: TierManager) -> set[Block]:
    """Returns the blocks of the operations that settle blocks in slices."""
    return {block for each in settling(core) for block in state_of(each, "blocks")}


def settling(core: TierManager) -> list[Operation[Any]]:
    running = chain.from_iterable(core._sliced_work._operations.values())
    return [each for each in running if getattr(each, "__name__", "") == "_settle"]


def late_requests(core: TierManager) -> dict[Block, list[Request]]:
    """Returns the requests that still wait for blocks that are not pending."""
    waiters = core._requests.waiters
    return {block: waiters.of(block) for block in waiters._by_block if not block.pending}


def leased_bytes(core: TierManager) -> Counter[bytes]:
    """Returns the bytes of the blocks that leases pin, by the tag of their tenant."""
    return core._lookups.leases.leased_bytes


def only_held_bytes(core: TierManager) -> Counter[bytes]:
    """Returns the bytes of the held blocks without a lease, by the tag of their tenant."""
    return core._lookups.pin_budget.held


def kept(core: TierManager) -> Counter[Block]:
    """Returns per block how many stores keep it between slices, and 1 more if holds pin it."""
    open_stores = [*stores(core).values(), *abandoned(core)]
    return Counter(chain(core._handoffs._pins._counts, chain.from_iterable(store.others for store in open_stores)))


def unpins(core: TierManager) -> list[_Entry]:
    """Returns the entries of both unpin queues."""
    return [*core._sliced_work.unpins.entries(), *core._sliced_work.hold_unpins.entries()]


def ended_hold_pins(core: TierManager) -> list[Block]:
    """Returns the blocks that ended and expired holds still pin, once per pin."""
    ended = core._sliced_work.hold_unpins.entries()
    expired = chain.from_iterable(hold.items for hold in core._handoffs._table if hold.is_over)
    return [block for block in expired if block is not None] + [
        block for entry in ended for block in entry.blocks[: entry.left] if block is not None
    ]


def abandoned(core: TierManager) -> list[Store]:
    """Returns the stores of lost clients whose blocks are not released yet."""
    released = [entry.remove.args[0] for entry in unpins(core) if isinstance(entry.remove, partial)]
    return [*released, *core._stores.table._closed.values()]


def released_blocks(core: TierManager, store_id: int, blocks: list[Block]) -> list[Block]:
    """Returns the blocks of an abandoned store that the core has released: the last ones."""
    left = next((len(store.blocks) for store in abandoned(core) if store.id == store_id), 0)
    return blocks[left:]


def granted_bytes(core: TierManager) -> tuple[Counter[bytes], Counter[bytes]]:
    """Returns the bytes of the slots of stores by tenant: as counted, and as they are."""
    table, found = core._stores.table, Counter[bytes]()
    for store in table:
        found[tenant_of(store.owner.engine[0])] += sum(block.queue.size_class for block in store.blocks)
    for store in abandoned(core):
        found[tenant_of(store.owner.engine[0])] += sum(block.queue.size_class for block in store.blocks)
    for entry in table._quarantine.values():
        found[tenant_of(entry.engine[0])] += core._cpu_tier.memory.slot_bytes_of(entry.offsets)
    return table.granted_bytes, +found


def prefetched(core: TierManager) -> tuple[set[Block], PrefetchBudget]:
    """Returns the blocks that prefetches are loading, and the limit of their bytes."""
    budget = core._lookups.prefetches
    return budget._loading, budget


def invalidated(core: TierManager) -> list[Block]:
    """Returns the blocks that a reset has removed from the index and that still exist."""
    indexes = core._cpu_tier._index
    found = [block for namespace in indexes._invalidated for block in unswept(core, namespace)]
    found += chain.from_iterable([*indexes._reset.values(), *indexes._unlinked.values()])
    return sorted(found, key=lambda block: (block.namespace, block.key))


def conversations(core: TierManager) -> tuple[list[Conversation], ConversationTable]:
    """Returns the conversations that the core knows, and their table."""
    return list(core._conversations.table), core._conversations.table


def conversation_of(core: TierManager, session: EngineSession, request_id: str) -> Conversation | None:
    """Returns the conversation that a begun request named."""
    return core._requests.conversation_of(session, request_id)


def recorded_users(table: ConversationTable) -> Counter[Name]:
    """Returns per block how many conversations use it, as the core counts them."""
    return Counter({(namespace, key): n for namespace, users in table._users.items() for key, n in users.items()})


def next_victims(core: TierManager) -> list[set[Block]]:
    """Returns the demoted blocks of each eviction queue."""
    return [set(queue.demoted) for queue in core._cpu_tier.queues.all()]


def unswept(core: TierManager, namespace: bytes) -> list[Block]:
    """Returns the blocks of a namespace that a reset has invalidated and not yet visited."""
    indexes = core._cpu_tier._index._invalidated.get(NamespaceId(namespace), ())
    return [block for index in indexes for block in index.blocks.values()]


def block(core: TierManager, namespace: NamespaceId, key: bytes) -> Block | None:
    """Returns one block of the CPU tier, in any state."""
    return core._cpu_tier._index.get(namespace, key)


def promoting(core: TierManager) -> set[Block]:
    """Returns the blocks that a tier is loading, or will load."""
    return {block for block in core._cpu_tier._index if block.promoting}


def clock(core: TierManager) -> int:
    """Returns the logical time of the last use of blocks."""
    return core._cpu_tier._clock


def used_since(core: TierManager, session: EngineSession, keys: Iterable[bytes], then: int) -> list[Block]:
    """Returns the blocks with these keys that were used after a logical time."""
    blocks = (block(core, session.namespace.id, key) for key in dict.fromkeys(keys))
    return [each for each in blocks if each is not None and each.last_use > then]


def allocated_bytes(core: TierManager, spec: NamespaceSpec, key: bytes) -> int:
    """Returns the size of all slots of a block."""
    return core._cpu_tier.memory.slot_bytes_for(spec.part_bytes_of(key), spec.world_size) * spec.world_size


def lines(core: TierManager) -> dict[TenantShare, _Line]:
    """Returns the lookups that wait for room, by the tenant share that they need it of."""
    return core._lookups.room._lines


def line_of(core: TierManager, namespace: NamespaceId) -> _Line | None:
    """Returns the lookups that wait for room with one of this namespace; None without any."""
    return lines(core).get(core._cpu_tier.queues.shares.of(namespace))


def queued(line: _Line) -> list[Waiter]:
    """Returns the lookups of a line."""
    return [waiter for sessions in line.tenants.values() for waiters in sessions.values() for waiter in waiters]


def head_of(core: TierManager, namespace: NamespaceId) -> Waiter | None:
    """Returns the lookup whose turn it is to take room; None if none waits."""
    line = line_of(core, namespace)
    return line.head if line is not None else None


def waiting_of(core: TierManager, namespace: NamespaceId) -> set[Waiter | None]:
    """Returns the lookups of a namespace's tenant that wait for room."""
    line = line_of(core, namespace)
    sessions = line.tenants.get(tenant_of(namespace), {}) if line is not None else {}
    return {waiter for waiters in sessions.values() for waiter in waiters}


def is_full_of_waiters(core: TierManager, namespace: NamespaceId) -> bool:
    """Returns whether the tenant of a namespace has as many waiting lookups as it may."""
    return core._lookups.room._per_tenant[tenant_of(namespace)] >= room_queue.MAX_WAITERS


def state_of(operation: Operation[Any], name: str) -> Any:
    """Returns a variable of an operation that has not ended."""
    return getgeneratorlocals(operation)[name]


def slots_in_use(core: TierManager) -> set[int]:
    """Returns the slots that the allocator has granted."""
    memory = core._cpu_tier.memory
    return set().union(*map(memory.in_use, memory._extents.values()))


def former_slots(core: TierManager) -> tuple[dict[int, set[int]], set[int]]:
    """Returns the slots of an earlier server's clients: by tag, and those of unknown clients."""
    writers = core._former_writers
    return {tag: set(slots) for tag, slots in writers._slots.items() if slots}, set(writers._torn)


def slot_bytes_of(core: TierManager, slots: Iterable[int]) -> int:
    return core._cpu_tier.memory.slot_bytes_of(slots)


def records_of(core: TierManager) -> SlotRecords:
    assert core._records is not None
    return core._records


def retiring(core: TierManager) -> dict[int, set[int]]:
    """Returns the slots in use of each retiring extent, by its number."""
    memory = core._cpu_tier.memory
    return {number: memory.in_use(extent) for number, extent in memory._extents.items() if extent.next_class}


def leaving(core: TierManager) -> set[Block]:
    """Returns the blocks of a retiring extent that the core will evict in a later slice."""
    return set(core._cpu_tier.retiring._left)


def retirements(core: TierManager) -> dict[int, float]:
    """Returns when extents began to retire, by their number; also of those that have retired."""
    return {extent.offset // EXTENT: each.begun_at for extent, each in core._cpu_tier.retiring._all.items()}


def taker(core: TierManager, number: int) -> TenantShare:
    """Returns the share of the tenant for which an extent began to retire."""
    [tenant] = [
        each.tenant for extent, each in core._cpu_tier.retiring._all.items() if extent.offset == number * EXTENT
    ]
    return core._cpu_tier.queues.shares.of(NamespaceId(tenant))


def classes(core: TierManager) -> dict[int, int]:
    """Returns the size class of each extent, by its number."""
    return {number: extent.slot_bytes for number, extent in core._cpu_tier.memory._extents.items()}


def quarantined(core: TierManager) -> list[int]:
    """Returns the slots that wait for the end of a writer."""
    return [slot for entry in core._stores.table._quarantine.values() for slot in entry.offsets]


def lifting(core: TierManager) -> list[tuple[NamespaceId, int, int]]:
    """Returns namespace, part bytes and slot bytes of each quarantine that a slice will lift.

    Its writers have ended.
    """
    table, size_of = core._stores.table, core._cpu_tier.memory.slot_bytes_of
    entries = [each for each in table._quarantine.values() if each.writers]
    entries = [each for each in entries if each.writers.isdisjoint(table._by_writer)]
    return [(each.engine[0], each.nbytes, size_of(each.offsets)) for each in entries]


def waiting_leases(core: TierManager) -> set[int]:
    table = core._lookups.leases
    return {lease.id for lease in (*table, *table._closed) if lease.awaited}


def leases(core: TierManager) -> dict[int, BlockLease]:
    return core._lookups.leases._leases  # type: ignore[return-value]


def stores(core: TierManager) -> dict[int, Store]:
    return core._stores.table._stores  # type: ignore[return-value]


def job_ids(core: TierManager) -> set[int]:
    """Returns the jobs that have not ended, including queries."""
    return {*core._tier_jobs._jobs, *core._tier_jobs.residency._queries}


def open_questions(secondary: SecondaryTierState) -> set[Name]:
    """Returns the unanswered queries of a tier."""
    return set(secondary.presence_cache._asked)


def request(core: TierManager, engine: str, request_id: str) -> Request | None:
    """Returns the state of a request. As in a call that names it, ends one of an ended session."""
    return core._requests.get(engine, request_id)


def request_names(core: TierManager) -> set[tuple[str, str]]:
    """Returns the tracked requests, as (engine, id)."""
    return set(core._requests._requests)


def secondaries(core: TierManager) -> list[SecondaryTierState]:
    """Returns the core's view of the secondary tiers."""
    return core._tier_jobs.secondaries


def entries(secondary: SecondaryTierState) -> list[CatalogEntry]:
    """Returns the blocks that a tier holds or is storing, according to the core."""
    return [entry for held in secondary.catalog._entries.values() for entry in held.values()]


def evictable(secondary: SecondaryTierState) -> Counter[str]:
    """Returns the evictable bytes of each share, as the core counts them."""
    return Counter({share.name: share.evictable for share in secondary.catalog.queues.shares if share.evictable})


def is_evictable(secondary: SecondaryTierState, here: list[CatalogEntry]) -> Counter[str]:
    """Returns the evictable bytes of each share, summed over the entries."""
    count: Counter[str] = Counter()
    for entry in here:
        if secondary.catalog._is_evictable(entry):
            count[entry.queue.share.name] += entry.nbytes
    return count


def queues_of_cpu(core: TierManager) -> EvictionQueues[Block]:
    """Returns the eviction queues of the CPU tier."""
    return core._cpu_tier.queues


def promises(secondary: SecondaryTierState, here: list[CatalogEntry]) -> dict[Name, float]:
    """Returns the blocks that a tier may not evict yet, and until when."""
    when = secondary.catalog.queues._retained.when
    return {entry.name: when(entry) for entry in here if entry.retained and entry.state is EntryState.HELD}


def slot_count(block: Block) -> int:
    return len(block.slots) - block.slots.count(None)


def is_storing(secondary: SecondaryTierState, name: Name) -> bool:
    """Returns whether a block is queued for a tier or being stored in it."""
    entry = secondary.catalog.get(*name)
    return entry is not None and entry.state is EntryState.STORING and not secondary.stalled


def is_gathering(core: TierManager) -> bool:
    """Returns whether the queue of any tier waits for more blocks."""
    return any(each.write_back_queue for each in secondaries(core))


def may_gather(secondary: SecondaryTierState, now: float) -> bool:
    """Returns whether a queue may wait for more blocks: it is short, new, and not waited for."""
    queued = sum(block.nbytes for block in secondary.write_back_queue)
    return (
        queued < min(secondary.tier.gather_bytes, secondary.max_queued_bytes // 2)
        and not secondary.pending_removals
        and not any(secondary.catalog.get(*name) for name in secondary.pending_stores)
        and now < secondary.gathers_until <= now + GATHER_SECONDS
    )


def on_the_way(core: TierManager, secondary: SecondaryTierState) -> list[Block]:
    """Returns the blocks that are queued for a tier or being stored in it."""
    jobs = (job for job in core._tier_jobs._jobs.values() if job.secondary is secondary and job.kind is JobKind.STORE)
    return [*secondary.write_back_queue, *chain.from_iterable(job.blocks for job in jobs)]


def pins(core: TierManager, publishing: Iterable[Block]) -> Counter[Block]:
    """Returns the pins of leases, stores, publications, holds, jobs and queues per block."""
    pinning = [*leases(core).values(), *core._lookups.leases._closed]
    held = Counter[Block](chain.from_iterable(lease.items for lease in pinning))  # type: ignore[arg-type]
    del held[None]  # type: ignore[arg-type]
    held.update(chain.from_iterable(store.blocks for store in stores(core).values()))
    held.update(chain.from_iterable(store.others for store in stores(core).values()))
    held.update(chain.from_iterable(store.others for store in abandoned(core)))
    held.update(chain.from_iterable(store.blocks for store in core._stores.table._closed.values()))
    held.update(chain.from_iterable(job.blocks for job in core._tier_jobs._jobs.values()))
    held.update(chain.from_iterable(state_of(each, "kept") for each in settling(core)))
    held.update(chain.from_iterable(secondary.write_back_queue for secondary in core._tier_jobs.secondaries))
    for entry in unpins(core):
        held.update(filter(None, entry.blocks[: entry.left]))
    return held + hold_pins(core, publishing)


def hold_pins(core: TierManager, publishing: Iterable[Block]) -> Counter[Block]:
    """Returns the pins of holds and publications per block."""
    held = Counter(block for hold in core._handoffs._table for block in hold.items if block is not None)
    held.update(publishing)
    return held


def queues(
    core: TierManager, core_view: CoreView, aside: Collection[Block], unsure: Collection[Block]
) -> Iterator[tuple[str, list[object], list[object]]]:
    """Yields each eviction queue by name, with its items and those that it should have.

    `aside`: the blocks of holds, which are in no queue. `unsure`: blocks that are left out, because
    they are in no queue if another hold had them before.
    """
    for queue in core._cpu_tier.queues.all():
        blocks = [b for b in core_view.blocks if b.queue is queue and _is_listed(b) and b not in unsure]
        should = [b for b in blocks if not (b.retained or b in aside)]
        line: list[object] = [b for b in queue.victims() if b not in unsure]
        yield f"cpu/{queue.size_class}/{queue.share.name}", line, list(should)
    for secondary, here in zip(secondaries(core), core_view.entries, strict=True):
        held = [entry for entry in here if not entry.retained]
        for queue in secondary.catalog.queues.all():
            should_be = [entry for entry in held if entry.queue is queue]
            yield f"{secondary.tier.name}/{queue.share.name}", list(queue.victims()), should_be


def _is_listed(block: Block) -> bool:
    """Returns whether the block was used and an index has it, also one removed by a reset."""
    return block.namespace_index.blocks.get(block.key) is block and block.last_use > 0


def leftovers(core: TierManager) -> dict[str, object]:
    """Returns the state that should be empty without clients and jobs, and is not."""
    found: dict[str, object] = {
        "leases": core._lookups.leases._leases,
        "closed leases": core._lookups.leases._closed,
        "leases by session": core._lookups.leases._by_session,
        "leases by request": core._lookups.leases._by_request,
        "leased items": core._lookups.leases._items,
        "bytes of stores": core._stores.table.granted_bytes,
        "waiting leases": core._lookups.leases.waiters._by_block,
        "leased bytes": core._lookups.leases.leased_bytes,
        "only held bytes": core._lookups.pin_budget.held,
        "lookups that wait for room": core._lookups.room._lines,
        "number of lookups that wait for room": core._lookups.room._per_tenant,
        "publications": core._handoffs._publications,
        "holds": core._handoffs._table._holds,
        "blocks that holds wait for": core._handoffs._table._waiters._by_block,
        "blocks to unpin": unpins(core),
        "items of tenants": core._lookups.leases._tenant_items,
        "leases by grant": core._lookups.leases.by_grant,
        "stores": core._stores.table._stores,
        "closed stores": core._stores.table._closed,
        "stores by grant": core._stores.table.by_grant,
        "stores of tenants": core._stores.table._per_tenant,
        "open requests": core._requests._open,
        "awaited blocks": core._requests._awaited,
        "quarantine": core._stores.table._quarantine,
        "writers in quarantine": core._stores.table._by_writer,
        "sessions": core._sessions,
        "ended sessions": core._endings.sessions,
        "requests": core._requests._requests,
        "parked blocks": core._requests.waiters._by_block,
        "jobs": core._tier_jobs._jobs,
        "questions": core._tier_jobs.residency._queries,
        "blocks of a reset": core._cpu_tier._index._reset,
        "pinned blocks in no index": core._cpu_tier._index._unlinked,
        "indexes of a reset": core._cpu_tier._index._invalidated,
        "holds by tenant": core._handoffs._table._per_tenant,
        "held items": core._handoffs._table._items,
        "waiting holds": core._handoffs._table._waiters._by_block,
        "pins of holds": core._handoffs._pins._counts,
        "blocks set aside": core._cpu_tier.queues._protected,
        "held bytes": core._handoffs.held_bytes,
        "wanted extents": core._cpu_tier.retiring.has_work,
        "overdue pins": core._retiring_pins.runs,
    }
    for secondary in secondaries(core):
        found[f"{secondary.tier.name}: queue"] = secondary.write_back_queue
        found[f"{secondary.tier.name}: pending removals"] = secondary.pending_removals
        found[f"{secondary.tier.name}: pending stores"] = secondary.pending_stores
        found[f"{secondary.tier.name}: queued bytes"] = secondary.queued_bytes
        found[f"{secondary.tier.name}: stores"] = secondary.stores
        found[f"{secondary.tier.name}: jobs"] = secondary.jobs
        found[f"{secondary.tier.name}: open questions"] = secondary.presence_cache._asked
    return {name: left for name, left in found.items() if left}
