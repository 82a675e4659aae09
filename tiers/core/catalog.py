"""What the core knows of a secondary tier: which blocks are there, and which go next."""

from __future__ import annotations

import enum
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter
from typing import Any

from ..base import Entry, NamespaceId
from ..eviction.queues import EvictionQueue, EvictionQueues
from ..eviction.quotas import TenantShare, pick_victims
from ..stats.eviction_history import EvictionHistory
from ..types import MissReason

__all__ = ["Catalog", "CatalogEntry", "EntryState"]


RUN = 16
"""So many blocks, in the order in which a tier stored them, are taken for a piece of a chain after a restart."""

VICTIM_BUFFER = 256
"""So many victims are looked for at a time."""

_TURNS = 1024
"""So many times, while a whole tier is replaced, it is looked up which share is to make room."""

UsedElsewhere = Callable[[NamespaceId, bytes], float | None]
"""Returns when a block was used in the CPU tier the last time, in seconds; None where it is not there."""


class EntryState(enum.Enum):
    """How far a block has come in a secondary tier."""

    STORING = enum.auto()
    HELD = enum.auto()
    LOST = enum.auto()
    """Out of the catalog, for the tier found it damaged; a load of it may still run."""


class CatalogEntry:
    """One block that a secondary tier holds, or is about to hold."""

    __slots__ = ("busy", "key", "loads", "namespace", "nbytes", "policy_node", "queue", "retained", "state", "used_at")

    def __init__(
        self,
        namespace: NamespaceId,
        key: bytes,
        nbytes: int,
        state: EntryState,
        queue: EvictionQueue[CatalogEntry],
        used_at: float = 0.0,
    ) -> None:
        self.namespace = namespace
        self.key = key
        self.nbytes = nbytes
        self.state = state
        self.queue = queue
        self.policy_node: Any = None
        """What that line's eviction policy keeps with it."""
        self.retained = False
        """Whether it may not be evicted for a while."""
        self.loads = 0
        """Loads that run; an entry that is being loaded is not evicted."""
        self.busy = state is not EntryState.HELD
        """Whether its store or a load of it runs, as its share counts it (`Catalog.recount`)."""
        self.used_at = used_at
        """When it was used here the last time, in seconds and a tick too early at most; in the CPU tier perhaps later."""

    @property
    def name(self) -> tuple[NamespaceId, bytes]:
        """What the block is known by when it has gone and comes again."""
        return self.namespace, self.key

    @property
    def allocated_bytes(self) -> int:
        """The bytes of the tier that it takes."""
        return self.nbytes


@dataclass(slots=True)
class _Turn:
    """Whose turn it is to make room: shares are compared so often that nobody is ahead by more than a turn."""

    taker: TenantShare
    queue: EvictionQueue[CatalogEntry]
    left: float
    """Bytes that may go before shares are compared again."""


class Catalog:
    """The blocks of one secondary tier, never more than its capacity.

    An entry exists from the moment when its store is submitted, so that the room is taken and no block is stored twice.
    """

    def __init__(self, capacity_bytes: int, queues: EvictionQueues[CatalogEntry], history: EvictionHistory) -> None:
        """`left` is told of every block that had to go, and why."""
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self.evictions = 0
        self.queues = queues
        self._history = history
        self._entries: dict[NamespaceId, dict[bytes, CatalogEntry]] = defaultdict(dict)
        self._count = 0
        self._queue_of: dict[NamespaceId, EvictionQueue[CatalogEntry]] = {}
        self._turn: _Turn | None = None

    def __len__(self) -> int:
        return self._count

    def counts(self) -> Iterator[tuple[NamespaceId, int]]:
        """Yields the namespaces that have entries, and how many."""
        return ((namespace, len(entries)) for namespace, entries in self._entries.items() if entries)

    def recover(self, entries: Iterable[Entry]) -> list[CatalogEntry]:
        """Takes in what the tier kept from an earlier life, oldest first; returns what no longer fits."""
        held, queue_for = EntryState.HELD, self.queues.queue_for
        recovered = [
            self._add(each.namespace, each.key, each.nbytes, held, queue_for(each.namespace)) for each in entries
        ]
        pending_removals = self.evict(entry for entry in recovered if self._is_too_much(entry, entry.nbytes))
        gone = set(pending_removals)
        kept = [entry for entry in recovered if entry not in gone]
        pending_removals += self.evict(entry for entry in kept if self._is_too_much(entry, 1))
        runs: dict[EvictionQueue[CatalogEntry], list[CatalogEntry]] = defaultdict(list)
        for entry in kept:
            if self.get(entry.namespace, entry.key) is not entry:
                continue
            run = runs[entry.queue]
            run.append(entry)
            if len(run) == RUN:
                self.queues.use(run, None)
                run.clear()
        for run in runs.values():
            self.queues.use(run, None)
        return pending_removals

    def get(self, namespace: NamespaceId, key: bytes) -> CatalogEntry | None:
        """Returns the entry of a block, whatever its state."""
        entries = self._entries.get(namespace)
        return entries.get(key) if entries else None

    def held(self, namespace: NamespaceId, key: bytes) -> CatalogEntry | None:
        """Returns the entry of a block that can be loaded."""
        entry = self.get(namespace, key)
        return entry if entry and entry.state is EntryState.HELD else None

    def use(self, entries: Sequence[CatalogEntry], request: Hashable, retain_until: float = 0.0) -> None:
        """Takes note that a request used these, given head first (see `EvictionQueues.use`)."""
        now = self.queues.now  # one object for all that is used in this tick
        for entry in entries:
            entry.used_at = now
        self.queues.use(entries, request, retain_until)

    def finish(self, request: Hashable) -> None:
        """Takes note that a request is over."""
        self.queues.finish(request)

    def begin_store(self, namespace: NamespaceId, key: bytes, nbytes: int) -> list[CatalogEntry] | None:
        """Adds an entry in state STORING and returns what must be removed for it, or None if there is no room.

        Entries that are being stored or loaded are not evicted. The caller says who uses the entry (`use`).
        """
        queue = self._queue_of.get(namespace)
        if queue is None:
            queue = self._queue_of[namespace] = self.queues.queue_for(namespace)
        victims = self._victims(queue.share, nbytes)
        if victims is None:
            return None
        self.evict(victims)
        self._add(namespace, key, nbytes, EntryState.STORING, queue)
        return victims

    def recount(self, entry: CatalogEntry) -> None:
        """Takes note that an entry's state or loads have changed; one that is not in the catalog (any more) is fine."""
        busy = entry.state is not EntryState.HELD or entry.loads > 0
        if busy != entry.busy and self.get(entry.namespace, entry.key) is entry:
            entry.busy = busy
            if not entry.retained:
                entry.queue.share.busy += entry.nbytes if busy else -entry.nbytes

    def make_room(self, namespace: NamespaceId, nbytes: int) -> list[CatalogEntry]:
        """Evicts so many bytes for a namespace, as far as that can be had now; returns what must be removed."""
        return self.evict(self._choose(self.queues.shares.of(namespace), nbytes))

    def all_of(self, namespace: NamespaceId) -> Collection[CatalogEntry]:
        """Returns the entries of a namespace, whatever their state."""
        return self._entries[namespace].values()

    def may_go(self, entry: CatalogEntry, *, retained: bool) -> bool:
        """Returns whether an entry is neither being stored nor loaded, nor, unless `retained`, retained."""
        return entry.state is EntryState.HELD and not entry.loads and (retained or not entry.retained)

    def evict(self, entries: Iterable[CatalogEntry]) -> list[CatalogEntry]:
        """Evicts entries that are there and may go, one after another as they are found; returns what must be removed."""
        evicted = []
        for entry in entries:
            self._leave(entry, MissReason.EVICTED)
            evicted.append(entry)
        self.evictions += len(evicted)
        return evicted

    def drop(self, entry: CatalogEntry) -> None:
        """Forgets an entry."""
        del self._entries[entry.namespace][entry.key]
        self.queues.remove(entry)
        self.used_bytes -= entry.nbytes
        entry.queue.share.used -= entry.nbytes
        entry.queue.share.busy -= entry.nbytes if entry.busy else 0  # it is not retained any more
        self._count -= 1

    def tick(self, now: float, used_elsewhere: UsedElsewhere) -> list[CatalogEntry]:
        """Lets time pass; returns what must be removed, because it was not used for as long as the tier's `ttl`."""
        expired = []
        for entry in self.queues.tick(now):
            used_at = used_elsewhere(entry.namespace, entry.key)
            if not self._may_go(entry):
                self.queues.postpone(entry)
            elif used_at is not None and self.queues.ttl is not None and used_at + self.queues.ttl > self.queues.now:
                self.queues.postpone(entry, used_at)
            else:
                expired.append(entry)
        for entry in expired:
            self._leave(entry, MissReason.EXPIRED)
        self.queues.expired += len(expired)
        return expired

    def _add(
        self, namespace: NamespaceId, key: bytes, nbytes: int, state: EntryState, queue: EvictionQueue[CatalogEntry]
    ) -> CatalogEntry:
        entry = self._entries[namespace][key] = CatalogEntry(namespace, key, nbytes, state, queue, self.queues.now)
        self.used_bytes += nbytes
        queue.share.used += nbytes
        queue.share.busy += nbytes if entry.busy else 0
        self._count += 1
        return entry

    def _victims(self, share: TenantShare, nbytes: int) -> list[CatalogEntry] | None:
        """Returns what has to go for so many bytes of a share, or None if that cannot be had now."""
        needed = self.used_bytes + nbytes - self.capacity_bytes
        over = share.over_limit(nbytes) if share.limit is not None else 0
        if needed <= 0 and not over:
            return []
        if not over and (victims := self._in_turn(share, needed)):
            return victims
        needed = max(needed, over)
        # A tier may be full of what is on its way to it: not every block that it refuses is worth a walk over all of that.
        enough = self._most(share, alone=over > 0) >= needed
        victims = self._choose(share, needed, alone=over > 0) if enough else []
        if sum(map(_nbytes, victims)) < needed:
            for queue in self.queues.all():
                queue.victim_buffer.clear()  # they were not taken after all
            return None
        if not over:
            alone = len(self.queues.shares) == 1
            self._turn = _Turn(share, victims[-1].queue, math.inf if alone else self.capacity_bytes // _TURNS)
        return victims

    def _in_turn(self, share: TenantShare, needed: int) -> list[CatalogEntry] | None:
        """Returns what goes where it is known whose turn it is, and who is next there; or None."""
        turn = self._turn
        if turn is None or turn.taker is not share or turn.left < needed:
            return None
        victims = []
        ahead, freed = turn.queue.victim_buffer, 0
        while ahead and freed < needed:
            entry = ahead.popleft()
            if self._may_go(entry):
                victims.append(entry)
                freed += entry.nbytes
        if freed < needed or (turn.queue.share is not share and turn.queue.share.excess < freed):
            ahead.extendleft(reversed(victims))
            return None
        turn.left -= freed
        return victims

    def _most(self, share: TenantShare, *, alone: bool) -> int:
        """Returns how many bytes can be had for a share at most."""
        if alone:
            return share.evictable
        others = (min(each.excess, each.evictable) for each in self.queues.shares if each is not share)
        return share.evictable + sum(nbytes for nbytes in others if nbytes > 0)

    def _choose(self, share: TenantShare, nbytes: int, *, alone: bool = False) -> list[CatalogEntry]:
        """Returns who makes room for so many bytes of a share; `alone` says that it is at its limit and pays itself."""
        queues = [
            (queue.share, self._candidates(queue))
            for queue in self.queues.all()
            if queue.share is share or (not alone and queue.share.excess > 0)
        ]
        return pick_victims(share, nbytes, queues, _nbytes)

    def _candidates(self, queue: EvictionQueue[CatalogEntry]) -> Iterator[CatalogEntry]:
        """Yields what may go; the one that was yielded last is still the next, should it not be taken."""
        if not queue.share.evictable:  # else whoever looks walks over all that is on its way, to find nothing
            queue.victim_buffer.clear()
            return
        passed: set[CatalogEntry] = set()
        while True:
            while queue.victim_buffer:
                entry = queue.victim_buffer[0]
                if self._may_go(entry):
                    yield entry
                    passed.add(entry)
                queue.victim_buffer.popleft()
            fresh = (entry for entry in queue.policy.victims() if entry not in passed and self._may_go(entry))
            queue.victim_buffer.extend(islice(fresh, VICTIM_BUFFER))
            if not queue.victim_buffer:
                return

    def _may_go(self, entry: CatalogEntry) -> bool:
        return (
            entry.state is EntryState.HELD
            and not entry.loads
            and not entry.retained
            and self.get(entry.namespace, entry.key) is entry
        )

    def _is_too_much(self, entry: CatalogEntry, excess: int) -> bool:
        """Whether an entry no longer fits, of a share that is above its quota by so much at least."""
        share = entry.queue.share
        return (self.used_bytes > self.capacity_bytes and share.excess >= excess) or share.over_limit(0) > 0

    def _leave(self, entry: CatalogEntry, reason: MissReason) -> None:
        """The one place where a block goes because the tier parts with it."""
        self.drop(entry)
        self._history.record(entry.namespace, entry.key, reason)


_nbytes = attrgetter("nbytes")
