"""Catalog of one secondary tier: the blocks in the tier, and the choice of victims."""

from __future__ import annotations

import enum
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter
from typing import Any

from ..eviction.queues import EvictionQueue, EvictionQueues
from ..eviction.quotas import TenantShare, pick_victims
from ..secondary_tier import Entry, NamespaceId
from ..stats.eviction_history import EvictionHistory
from ..types import MissReason
from .block_index import KEPT_EMPTY
from .event_log import TierEvents

__all__ = ["Catalog", "CatalogEntry", "EntryState"]

RUN = 16
"""A restart loses the chains of the requests. After a restart, the catalog treats this many blocks
in store order as one chain."""

VICTIM_BUFFER = 256
"""Limit of victims that are taken from a policy at once and buffered."""

RETIRED_SCAN = 1024
"""Limit of retired entries that are examined for one block, to keep the event loop free."""

_TURNS = 1024
"""The shares are compared again after 1/1024 of the capacity has been evicted."""

UsedElsewhere = Callable[[NamespaceId, bytes], float | None]
"""Returns the last use of a block in the CPU tier, in seconds; None if it lacks the block."""


class EntryState(enum.Enum):
    STORING = enum.auto()
    HELD = enum.auto()
    LOST = enum.auto()
    """Removed from the catalog because the block is damaged. A load of the block may still run."""


class CatalogEntry:
    """A block that a secondary tier holds or is about to store."""

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
        self.retained = False
        self.loads = 0
        """Running loads. An entry that is being loaded is not evicted."""
        self.busy = state is not EntryState.HELD
        """Whether a store or load of the block runs. If so, the share counts the block as busy."""
        self.used_at = used_at
        """Last use in this tier, in seconds, at most a tick too early. The block may have been
        used in the CPU tier since then."""

    @property
    def name(self) -> tuple[NamespaceId, bytes]:
        return self.namespace, self.key

    @property
    def allocated_bytes(self) -> int:
        return self.nbytes


@dataclass(slots=True)
class _Turn:
    """The queue that yields victims for one share until the shares are compared again."""

    taker: TenantShare
    queue: EvictionQueue[CatalogEntry]
    left: float
    """Bytes that may be evicted before the shares are compared again."""


class Catalog:
    """The blocks of one secondary tier, within its capacity.

    An entry is added when the store of the block is queued. This reserves the space, and prevents a
    second store of the block.
    """

    def __init__(self, capacity_bytes: int, queues: EvictionQueues[CatalogEntry], history: EvictionHistory) -> None:
        self.capacity_bytes = capacity_bytes
        self.events: TierEvents | None = None
        """Recorder of events; None for a shared tier, which has no events."""
        self.used_bytes = 0
        self.evictions = 0
        self.queues = queues
        self._history = history
        self._entries: dict[NamespaceId, dict[bytes, CatalogEntry]] = defaultdict(dict)
        self._count = 0
        self._sweep_at = KEPT_EMPTY
        self._queue_of: dict[NamespaceId, EvictionQueue[CatalogEntry]] = {}
        """Cache of `queues.queue_for`. `tick` clears it together with the empty namespaces."""
        self._turn: _Turn | None = None
        self._retired: dict[NamespaceId, list[CatalogEntry]] = {}
        """Entries of retired namespaces, next victim last. Some may be in use or dropped."""

    def __len__(self) -> int:
        return self._count

    def counts(self) -> Iterator[tuple[NamespaceId, int]]:
        return ((namespace, len(entries)) for namespace, entries in self._entries.items() if entries)

    def recover(self, entries: Iterable[Entry]) -> list[CatalogEntry]:
        """Adds the blocks of an earlier run, oldest first.

        Returns the blocks that do not fit any more, which the caller must remove from the tier.
        """
        held, queue_for = EntryState.HELD, self.queues.queue_for
        recovered = [
            self._add(each.namespace, each.key, each.nbytes, held, queue_for(each.namespace)) for each in entries
        ]
        pending_removals = self.evict(entry for entry in recovered if self._exceeds(entry, entry.nbytes))
        gone = set(pending_removals)
        kept = [entry for entry in recovered if entry not in gone]
        pending_removals += self.evict(entry for entry in kept if self._exceeds(entry, 1))
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
        entries = self._entries.get(namespace)
        return entries.get(key) if entries else None

    def keys_among(self, namespace: NamespaceId, keys: Collection[bytes]) -> set[bytes]:
        """Returns those of the keys that have an entry."""
        entries = self._entries.get(namespace)
        return {key for key in keys if key in entries} if entries else set()

    def held(self, namespace: NamespaceId, key: bytes) -> CatalogEntry | None:
        entry = self.get(namespace, key)
        return entry if entry and entry.state is EntryState.HELD else None

    def use(self, entries: Sequence[CatalogEntry], request: Hashable, retain_until: float = 0.0) -> None:
        """Records that a request used these entries, head first (see `EvictionQueues.use`)."""
        now = self.queues.now  # one object for all entries of this tick
        for entry in entries:
            entry.used_at = now
        self.queues.use(entries, request, retain_until)

    def finish(self, request: Hashable) -> None:
        self.queues.finish(request)

    def begin_store(self, namespace: NamespaceId, key: bytes, nbytes: int) -> list[CatalogEntry] | None:
        """Adds an entry in state STORING, and evicts other entries to make room.

        Returns the victims, which the tier must remove, or None if there is no room. Entries that
        are being stored or loaded are not evicted. The caller must call `use` afterwards.
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

    def stored(self, entry: CatalogEntry) -> None:
        """Changes an entry from STORING to HELD, because the tier has stored the block."""
        entry.state = EntryState.HELD
        self.recount((entry,))
        if self.events is not None and self.events.is_on:
            self.events.stored(entry.namespace, entry.key)

    def recount(self, entries: Iterable[CatalogEntry], loads: int = 0) -> None:
        """Updates the busy bytes of the shares after a change of the entries' states.

        First adds `loads` to the running loads of each entry. Entries that the catalog lacks change
        no share.
        """
        for entry in entries:
            entry.loads = running = entry.loads + loads
            busy = running > 0 or entry.state is not EntryState.HELD
            if busy != entry.busy and self.get(entry.namespace, entry.key) is entry:
                entry.busy = busy
                if not entry.retained:
                    entry.queue.share.busy += entry.nbytes if busy else -entry.nbytes

    def retire(self, namespace: NamespaceId) -> None:
        """Makes the current entries of a namespace the first victims. Takes 10 ms per million."""
        if entries := self._entries.get(namespace):
            self._retired[namespace] = list(entries.values())

    def make_room(self, namespace: NamespaceId, nbytes: int) -> list[CatalogEntry]:
        """Evicts about `nbytes`, if possible, for a namespace; returns the evicted entries."""
        return self.evict(self._pick(self.queues.shares.of(namespace), nbytes))

    def all_of(self, namespace: NamespaceId) -> Collection[CatalogEntry]:
        return self._entries[namespace].values()

    def copy_of(self, namespace: NamespaceId) -> dict[bytes, CatalogEntry]:
        return self._entries[namespace].copy()

    def has(self, namespace: NamespaceId, key: bytes) -> bool:
        return self.held(namespace, key) is not None

    def is_evictable(self, entry: CatalogEntry, *, retained: bool) -> bool:
        return entry.state is EntryState.HELD and not entry.loads and (retained or not entry.retained)

    def evict(self, entries: Iterable[CatalogEntry]) -> list[CatalogEntry]:
        """Evicts entries one by one as the iterator yields them; returns the evicted entries."""
        evicted = []
        for entry in entries:
            self._remove(entry, MissReason.EVICTED)
            evicted.append(entry)
        self.evictions += len(evicted)
        return evicted

    def drop(self, entry: CatalogEntry) -> None:
        del self._entries[entry.namespace][entry.key]
        self.queues.remove(entry)
        self.used_bytes -= entry.nbytes
        entry.queue.share.used -= entry.nbytes
        # `queues.remove` has ended the retention, so the bytes of a busy entry count as busy again.
        entry.queue.share.busy -= entry.nbytes if entry.busy else 0
        self._count -= 1
        if self.events is not None and self.events.is_on and entry.state is EntryState.HELD:
            self.events.removed(entry.namespace, entry.key)

    def tick(self, now: float, used_elsewhere: UsedElsewhere) -> list[CatalogEntry]:
        """Advances the time and drops a limited number of expired entries.

        Returns the dropped entries, which the caller must remove from the tier.
        """
        self._forget_empty()
        expired = []
        for entry in self.queues.tick(now):
            used_at = used_elsewhere(entry.namespace, entry.key)
            if not self._is_evictable(entry):
                self.queues.postpone(entry)
            elif used_at is not None and self.queues.ttl is not None and used_at + self.queues.ttl > self.queues.now:
                self.queues.postpone(entry, used_at)
            else:
                expired.append(entry)
        for entry in expired:
            self._remove(entry, MissReason.EXPIRED)
        self.queues.expired += len(expired)
        return expired

    def _forget_empty(self) -> None:
        """Removes the namespaces without entries if there may be many."""
        if len(self._entries) > self._sweep_at or len(self._queue_of) > self._sweep_at:
            for namespace in [each for each, entries in self._entries.items() if not entries]:
                del self._entries[namespace]
            self._queue_of.clear()
            self._sweep_at = 2 * len(self._entries) + KEPT_EMPTY

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
        """Returns the entries to evict before a share adds `nbytes`; None if there are too few."""
        needed = self.used_bytes + nbytes - self.capacity_bytes
        over = share.over_limit(nbytes) if share.limit is not None else 0
        if needed <= 0 and not over:
            return []
        if self._retired and (retired := self._retired_victims(share, max(needed, over), alone=over > 0)):
            return retired
        if not over and (victims := self._victims_in_turn(share, needed)):
            return victims
        needed = max(needed, over)
        # Search only if enough bytes are evictable. The tier may be full of pending stores.
        enough = self._max_evictable(share, alone=over > 0) >= needed
        victims = self._pick(share, needed, alone=over > 0) if enough else []
        if sum(map(_nbytes, victims)) < needed:
            for queue in self.queues.all():
                queue.victim_buffer.clear()  # it lacks the victims that are not evicted now
            return None
        if not over:
            alone = len(self.queues.shares) == 1
            self._turn = _Turn(share, victims[-1].queue, math.inf if alone else self.capacity_bytes // _TURNS)
        return victims

    def _victims_in_turn(self, share: TenantShare, needed: int) -> list[CatalogEntry] | None:
        """Returns victims from the buffer of the current `_Turn`; None if there are too few."""
        turn = self._turn
        if turn is None or turn.taker is not share or turn.left < needed:
            return None
        victims = []
        ahead, freed = turn.queue.victim_buffer, 0
        while ahead and freed < needed:
            entry = ahead.popleft()
            if self._is_evictable(entry):
                victims.append(entry)
                freed += entry.nbytes
        if freed < needed or (turn.queue.share is not share and turn.queue.share.excess < freed):
            ahead.extendleft(reversed(victims))
            return None
        turn.left -= freed
        return victims

    def _retired_victims(self, share: TenantShare, nbytes: int, *, alone: bool) -> list[CatalogEntry]:
        """Returns retired entries that free `nbytes` for a share; no entries if too few are found.

        Other shares keep their quotas; with `alone` they keep all entries. Entries that this method
        examines but does not return are ordinary entries again.
        """
        victims: list[CatalogEntry] = []
        freed, left = 0, RETIRED_SCAN
        spare = {each: 0 if alone else each.excess for each in self.queues.shares} | {share: self.used_bytes}
        for namespace, entries in list(self._retired.items()):
            owner = self.queues.shares.of(namespace)
            while entries and freed < nbytes and left and spare[owner] >= entries[-1].nbytes:
                left -= 1
                entry = entries.pop()
                if self._is_evictable(entry):
                    victims.append(entry)
                    freed += entry.nbytes
                    spare[owner] -= entry.nbytes
            if not entries:
                del self._retired[namespace]
        return victims if freed >= nbytes else []

    def _max_evictable(self, share: TenantShare, *, alone: bool) -> int:
        if alone:
            return share.evictable
        others = (min(each.excess, each.evictable) for each in self.queues.shares if each is not share)
        return share.evictable + sum(nbytes for nbytes in others if nbytes > 0)

    def _pick(self, share: TenantShare, nbytes: int, *, alone: bool = False) -> list[CatalogEntry]:
        """Returns victims that free `nbytes` for a share; with `alone` only from that share."""
        queues = [
            (queue.share, self._candidates(queue))
            for queue in self.queues.all()
            if queue.share is share or (not alone and queue.share.excess > 0)
        ]
        return pick_victims(share, nbytes, queues, _nbytes)

    def _candidates(self, queue: EvictionQueue[CatalogEntry]) -> Iterator[CatalogEntry]:
        """Yields evictable entries, next victim first.

        An entry leaves the buffer when the caller asks for the next one. So the last entry, which
        the caller may have rejected, stays in the buffer.
        """
        if not queue.share.evictable:  # avoids a walk over all pending stores
            queue.victim_buffer.clear()
            return
        passed: set[CatalogEntry] = set()
        while True:
            while queue.victim_buffer:
                entry = queue.victim_buffer[0]
                if self._is_evictable(entry):
                    yield entry
                    passed.add(entry)
                queue.victim_buffer.popleft()
            fresh = (entry for entry in queue.policy.victims() if entry not in passed and self._is_evictable(entry))
            queue.victim_buffer.extend(islice(fresh, VICTIM_BUFFER))
            if not queue.victim_buffer:
                return

    def _is_evictable(self, entry: CatalogEntry) -> bool:
        return (
            entry.state is EntryState.HELD
            and not entry.loads
            and not entry.retained
            and self.get(entry.namespace, entry.key) is entry
        )

    def _exceeds(self, entry: CatalogEntry, excess: int) -> bool:
        """Whether to evict an entry after a restart with a smaller capacity, quota or limit.

        True if the tier is too full and the share exceeds its quota by `excess` bytes, or if the
        share exceeds its limit.
        """
        share = entry.queue.share
        return (self.used_bytes > self.capacity_bytes and share.excess >= excess) or share.over_limit(0) > 0

    def _remove(self, entry: CatalogEntry, reason: MissReason) -> None:
        self.drop(entry)
        self._history.record(entry.namespace, entry.key, reason)


_nbytes = attrgetter("nbytes")
