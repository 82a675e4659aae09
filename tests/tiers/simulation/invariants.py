"""The invariants that are checked after every step, by name, against the ledger."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import chain

from kvtier.tiers.types import tenant_of

from . import inspect as inside
from .books import books
from .guarantees import check_conversations, check_quotas, check_retained, check_ttl
from .held import check_held, check_private
from .model import Invariant, Violation, label
from .retirements import check_retiring
from .rooms import check_room
from .world import World

__all__ = ["check", "check_core", "check_settled"]


def _slots(world: World) -> None:
    """A slot has one owner while a process may write to it; every granted slot is accounted for."""
    owned = [(slot, block.part_bytes) for block in world.core_view.blocks for slot in block.slots if slot is not None]
    quarantined = inside.quarantined(world.core)
    taken = {slot for slot, _ in owned}.union(quarantined)
    if len(owned) + len(quarantined) != len(taken):
        raise Violation(Invariant.SLOTS, "a slot with two owners")
    if inside.slots_in_use(world.core) != taken:
        raise Violation(Invariant.SLOTS, "a slot that leaked, or is used though free")
    written = world.ledger.written_slots()
    if len(written) != len(set(written)):
        raise Violation(Invariant.SLOTS, "two may write to one slot")
    read = (slot for block in world.ledger.shown() if block.ready for slot in block.slots)
    if not set(written).isdisjoint(read):
        raise Violation(Invariant.SLOTS, "a slot that is read is given to a writer")
    end = 0
    for slot, nbytes in sorted(owned):
        if slot < end or slot + nbytes > world.backed_bytes:
            raise Violation(Invariant.SLOTS, f"slot {slot} overlaps another one or lies outside of the memory")
        end = slot + nbytes


def _pins(world: World) -> None:
    """Leased blocks stay in place; pins equal those of leases, stores, jobs and queues."""
    pinned = {}
    for block in world.ledger.shown():
        before = world.ledger.pinned_at.get(block)
        if before is not None and (before != tuple(block.slots) or not block.ready):
            raise Violation(Invariant.PINS, f"{block.key!r} was evicted under a lease")
        if block.ready:
            pinned[block] = tuple(block.slots)
    world.ledger.pinned_at = pinned
    for job in world.ledger.jobs.values():
        if job.slots != [tuple(block.slots) for block in job.command.blocks]:
            raise Violation(Invariant.PINS, "a block was moved under a job")
    pins = inside.pins(world.core, world.publishing())
    for block in world.core_view.blocks:
        if block.pins != pins.pop(block, 0):
            raise Violation(Invariant.PINS, f"{block.key!r}: pins do not add up")
    if pins:
        raise Violation(Invariant.PINS, f"evicted though pinned: {[block.key for block in pins]}")


def _leased(world: World) -> None:
    """Leases, holds and stores of a tenant pin the bytes of their blocks and slots."""
    leased, only_held, kept = Counter[bytes](), Counter[bytes](), inside.kept(world.core)
    for block in world.core_view.blocks:
        if not 0 <= block.leases <= block.pins:
            raise Violation(Invariant.LEASED, f"{block.key!r}: {block.leases} leases with {block.pins} pins")
        if block.held != kept[block]:
            raise Violation(Invariant.LEASED, f"{block.key!r}: held {block.held} times instead of {kept[block]}")
        if block.leases:
            leased[tenant_of(block.namespace)] += block.allocated_bytes
        elif block.held:
            only_held[tenant_of(block.namespace)] += block.allocated_bytes
    if only_held != inside.only_held_bytes(world.core):
        raise Violation(Invariant.LEASED, "the bytes of held blocks do not add up")
    if leased != inside.leased_bytes(world.core):
        raise Violation(Invariant.LEASED, "the bytes that leases pin do not add up")
    granted, found = inside.granted_bytes(world.core)
    if granted != found:
        raise Violation(Invariant.LEASED, "the bytes of the slots of stores do not add up")


def _books(world: World) -> None:
    """Counts and indexes that the core keeps equal what they are derived from.

    A wrong one stays wrong, so that a check in each fourth step finds it.
    """
    if world.steps % 4:
        return
    for name, kept, found in books(world.core, world.core_view):
        if kept != found:
            raise Violation(Invariant.BOOKS, f"{name}: {kept} is kept, {found} is right")


def _owners(world: World) -> None:
    """Open leases and stores are exactly those granted and not ended, with open sessions."""
    ledger = world.ledger
    leases, stores = inside.leases(world.core), inside.stores(world.core)
    if leases.keys() != ledger.leases.keys():
        odd = sorted(leases.keys() ^ ledger.leases.keys())
        raise Violation(Invariant.OWNERS, f"leases {odd} differ between the core and the ledger")
    in_flight = {record.id: record for record in ledger.in_flight()}
    if stores.keys() != in_flight.keys():
        odd = sorted(stores.keys() ^ in_flight.keys())
        raise Violation(Invariant.OWNERS, f"stores {odd} differ between the core and the ledger")
    for number, record in (*ledger.leases.items(), *in_flight.items()):
        held = leases[number] if number in leases and record is ledger.leases.get(number) else stores[number]
        if held.owner.session_id != record.client.session.id or held.expires_at != record.expires_at:  # type: ignore[attr-defined]
            raise Violation(Invariant.OWNERS, f"{number} has another owner or expiry than was granted")


def _jobs(world: World) -> None:
    """The core waits for exactly the running jobs; a queue waits only behind a job of its tier."""
    running = world.ledger.jobs.keys() | world.ledger.queries.keys()
    if inside.job_ids(world.core) != running:
        raise Violation(Invariant.JOBS, f"running {sorted(running)}, known {sorted(inside.job_ids(world.core))}")
    prefetched, budget = inside.prefetched(world.core)
    loading = {block for job in world.ledger.jobs.values() if job.is_load for block in job.command.blocks}
    if not prefetched <= loading:
        raise Violation(Invariant.JOBS, "a prefetch counts a block that no job loads")
    if sum(block.allocated_bytes for block in prefetched) != budget.loading_bytes:
        raise Violation(Invariant.JOBS, "the bytes that prefetches load do not add up")
    if budget.loading_bytes > budget.limit_bytes:
        raise Violation(Invariant.JOBS, f"prefetches load {budget.loading_bytes} bytes, more than their limit")
    per_tier = Counter(job.command.tier for job in world.ledger.jobs.values())
    for secondary in inside.secondaries(world.core):
        tier = world.core_view.stats.tiers[secondary.index]
        jobs = per_tier[secondary.index] + bool(secondary.write_back_queue)
        if tier.jobs != jobs:
            raise Violation(Invariant.JOBS, f"{tier.name} says that {tier.jobs} jobs run or wait, not {jobs}")
        asked = {name for job in world.ledger.queries.values() if job.tier == secondary.index for name in job.keys}
        if inside.open_questions(secondary) != asked:
            raise Violation(Invariant.JOBS, f"{secondary.tier.name} did not get a query of the core")
        if secondary.waiting_bytes != sum(block.nbytes for block in secondary.write_back_queue):
            raise Violation(Invariant.JOBS, f"the bytes that wait for {secondary.tier.name} do not add up")
        gets_on = secondary.index not in world.environment.stalled
        if (
            gets_on
            and (secondary.write_back_queue or secondary.pending_removals)
            and not world.ledger.running(secondary.index, loads=False)
            and not inside.may_gather(secondary, world.environment.latest)
        ):
            raise Violation(Invariant.JOBS, f"work for {secondary.tier.name} waits without a running job")


def _capacity(world: World) -> None:
    """No tier exceeds its capacity, and its counts add up."""
    stats = world.core_view.stats
    for tier in stats.tiers:
        if not 0 <= tier.used_bytes <= tier.available_bytes <= tier.capacity_bytes:
            raise Violation(Invariant.CAPACITY, f"{tier}")
    if stats.tiers[0].available_bytes != world.backed_bytes:
        raise Violation(Invariant.CAPACITY, "used and free memory do not add up")
    for secondary, entries in zip(inside.secondaries(world.core), world.core_view.entries, strict=True):
        if sum(entry.nbytes for entry in entries) != secondary.catalog.used_bytes:
            raise Violation(Invariant.CAPACITY, f"{secondary.tier.name}: sizes do not add up to what is used")
        if inside.evictable(secondary) != inside.is_evictable(secondary, entries):
            raise Violation(Invariant.CAPACITY, f"{secondary.tier.name}: what may go does not add up")
        if secondary.queued_bytes != sum(block.nbytes for block in inside.on_the_way(world.core, secondary)):
            raise Violation(Invariant.CAPACITY, f"{secondary.tier.name}: queued bytes do not add up")


def _finish(world: World) -> None:
    """Each tier sees each request's begin and end once; the end comes when no event can follow."""
    book = world.ledger.requests
    for tier in world.tiers:
        if Counter(tier.begun) != book.begun:
            raise Violation(Invariant.FINISH, f"{tier.name} was asked about {tier.begun}")
        if tier.finished != world.tiers[0].finished:
            raise Violation(Invariant.FINISH, f"{tier.name} saw other ends than {world.tiers[0].name}")
    wrong = book.settle(Counter(world.tiers[0].finished) if world.tiers else None)
    if wrong:
        raise Violation(Invariant.FINISH, wrong)
    if inside.request_names(world.core) != book.current.keys():
        raise Violation(Invariant.FINISH, f"remembered: {sorted(inside.request_names(world.core))}")


def _owed(world: World) -> None:
    """A request is incomplete if and only if a request-level tier lacks one of its blocks."""
    for record in world.ledger.requests.accounts():
        if record.known is not None and bool(record.missing) != bool(record.known.incomplete):
            raise Violation(Invariant.OWED, f"{record.id!r} lacks {record.missing}, says {record.known.incomplete}")


def _bytes(world: World) -> None:
    """Every visible block has the bytes that were stored for its key."""
    memory = world.memory
    for block in world.core_view.blocks:
        if block.ready:
            for rank, slot in enumerate(block.slots):
                if slot is None or memory.get(slot) != label(block.namespace, block.key, rank):
                    raise Violation(
                        Invariant.BYTES, f"{block.key!r} is visible, its slot holds {memory.get(slot or 0)}"
                    )


def _counts(world: World) -> None:
    """Each key of a lookup counts once: as a hit of one tier, or as a miss."""
    stats, ledger = world.core_view.stats, world.ledger
    hits, misses = [tier.hits for tier in stats.tiers], stats.lookup_misses
    if sum(hits) + misses != stats.lookup_keys or sum(stats.misses_by_reason.values()) != misses:
        raise Violation(Invariant.COUNTS, f"{hits} hits and {misses} misses of {stats.lookup_keys}")
    hits = [count + world.core_view.pending_hits[tier] for tier, count in enumerate(hits)]
    if hits != ledger.hits or misses != ledger.misses or min(tier.misses for tier in stats.tiers) < 0:
        raise Violation(Invariant.COUNTS, f"{hits} + {misses} are counted, {ledger.hits} + {ledger.misses} answered")


def _waiters(world: World) -> None:
    """A waiting lease is told when a block is ready or gone.

    Until then a store or load is running.
    """
    for record in world.ledger.leases.values():
        if not record.waiting:
            continue
        pending = [block for block in record.lease.items if block is not None and not block.ready]
        late = world.core_view.unsettled.intersection(record.lease.awaited)
        if any(not block.pending and block not in late for block in pending):
            raise Violation(Invariant.WAITERS, f"lease {record.lease.id} waits for blocks without a running job")
        if bool(record.lease.pending) != bool(late.union(pending)):
            raise Violation(Invariant.WAITERS, f"lease {record.lease.id} counts {record.lease.pending} pending blocks")
        if not pending and not late and record.lease.id not in world.settled:
            raise Violation(Invariant.WAITERS, f"lease {record.lease.id} has settled, and was not told")
        record.waiting = bool(pending)
    waiting = inside.waiting_leases(world.core)
    ended = world.waiting_leases - waiting - world.settled
    if ended:
        raise Violation(Invariant.WAITERS, f"leases {sorted(ended)} no longer wait for blocks, and were not told")
    world.waiting_leases = waiting


def _line(world: World) -> None:
    """An eviction queue has exactly the evictable blocks."""
    holds = world.ledger.holds.open.values()
    aside = {block for record in holds for block in record.hold.items[: record.prepared] if block is not None}
    unsure = {block for record in holds for block in record.hold.items[record.prepared :] if block is not None}
    unsure.update(world.publishing(), inside.ended_hold_pins(world.core))
    for name, line, kept in inside.queues(world.core, world.core_view, aside, unsure.difference(aside)):
        if len(line) != len(kept) or set(line) != set(kept):
            raise Violation(Invariant.LINE, f"{name}: {len(line)} in the queue, {len(kept)} are evictable")


def _leaks(world: World) -> None:
    """No unneeded state is kept: blocks without slots and pins, quarantines without writers."""
    for block in world.core_view.blocks:
        if not block.pins and block.slots.count(None) == len(block.slots):
            raise Violation(Invariant.LEAKS, f"{block.key!r}: an empty block stays")
    ended = [record for record in world.ledger.stores.values() if record.quarantine is not None]
    released = chain.from_iterable(inside.released_blocks(world.core, record.id, record.blocks) for record in ended)
    waiting = sum(block.part_bytes for block in released)
    waiting += sum(nbytes for _, nbytes, _ in inside.lifting(world.core))
    if world.core_view.stats.quarantined_bytes != waiting:
        raise Violation(
            Invariant.LEAKS, f"{world.core_view.stats.quarantined_bytes} bytes in quarantine, not {waiting}"
        )


def _events(world: World) -> None:
    """A reader of the event log knows which blocks each tier has."""
    for what, occurred in world.event_readers.check(world.core_view).items():
        world.saw(what, occurred)


CHECKS: dict[Invariant, Callable[[World], None]] = {
    Invariant.PINS: _pins,
    Invariant.LEASED: _leased,
    Invariant.SLOTS: _slots,
    Invariant.OWNERS: _owners,
    Invariant.BOOKS: _books,
    Invariant.JOBS: _jobs,
    Invariant.CAPACITY: _capacity,
    Invariant.BYTES: _bytes,
    Invariant.FINISH: _finish,
    Invariant.OWED: _owed,
    Invariant.COUNTS: _counts,
    Invariant.WAITERS: _waiters,
    Invariant.LINE: _line,
    Invariant.HELD: check_held,
    Invariant.PRIVATE: check_private,
    Invariant.EVENTS: _events,
    Invariant.CONVERSATIONS: check_conversations,
    Invariant.LEAKS: _leaks,
    Invariant.ROOM: check_room,
    Invariant.RETIRING: check_retiring,
    Invariant.QUOTAS: check_quotas,
    Invariant.RETAINED: check_retained,
    Invariant.TTL: check_ttl,
}


def check(world: World) -> None:
    """Raises `Violation` if an invariant does not hold."""
    for invariant, check_one in CHECKS.items():
        if world.only in (None, invariant):
            check_one(world)


def check_core(world: World) -> None:
    """Checks the invariants of a core without sessions, which has only blocks."""
    for check_one in (_pins, _leased, _slots, _owners, _books, _capacity, _bytes, _line, _leaks):
        check_one(world)


def check_settled(world: World) -> None:
    """Checks the state after all clients have left and all jobs have ended."""
    check(world)
    unfinished = [record.id for record in world.ledger.requests.open if not record.finished]
    world.must(Invariant.FINISH, not unfinished, f"requests of ended sessions are not finished: {unfinished}")
    left = inside.leftovers(world.core)
    world.must(Invariant.LEAKS, not left, f"left over: {left}")
    for entries, tier in zip(world.core_view.entries, world.tiers, strict=True):
        unknown = () if tier.shared else tier.blocks.keys() - {entry.name for entry in entries}
        world.must(Invariant.LEAKS, not unknown, f"{tier.name} holds {len(unknown)} blocks that are not accounted for")
