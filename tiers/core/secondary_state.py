"""State of one secondary tier in the core: catalog, write-back queue, counters."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from itertools import groupby
from operator import attrgetter

from ..eviction.admission import Admission
from ..eviction.queues import EvictionQueues
from ..secondary_tier import NamespaceId, SecondaryTier, TierFilter
from ..stats.eviction_history import EvictionHistory
from ..stats.snapshots import TierStats
from .block import Block
from .catalog import Catalog, CatalogEntry, EntryState, UsedElsewhere
from .event_log import EventLog
from .presence_cache import Name, Presence, PresenceCache
from .requests import Request

__all__ = ["SecondaryTierState"]

GATHER_SECONDS = 2.0
"""Limit of the time that a queue waits for more blocks (see `SecondaryTier.gather_bytes`)."""


class SecondaryTierState:
    def __init__(
        self,
        *,
        index: int,
        tier: SecondaryTier,
        queues: EvictionQueues[CatalogEntry],
        max_queued_bytes: int,
        history: EvictionHistory,
        new_admission: Callable[[], Admission] | None,
        events: EventLog | None = None,
    ) -> None:
        self.index = index
        """Position in the lookup order; the CPU tier is 0."""
        self.tier = tier
        self.catalog = Catalog(tier.capacity_bytes, queues, history)
        if events is not None and not (tier.shared or tier.on_demand):
            self.catalog.events = events.add_tier(index, self.catalog)
        self.max_queued_bytes = max_queued_bytes
        self.write_back_queue: deque[Block] = deque()
        """Blocks waiting to be stored. Each is pinned and has a catalog entry."""
        self.pending_removals: list[CatalogEntry] = []
        """Evicted entries that the tier must remove before the next store. A shared tier keeps
        the blocks, because other servers may use them."""
        self.stores = 0
        """Number of running stores."""
        self.pending_stores: dict[tuple[NamespaceId, bytes], dict[Request, None]] = {}
        """Per block that is queued or being stored: the REQUEST_LEVEL requests that wait for it."""
        self.queued_bytes = 0
        """Bytes of the write-back queue and of running stores."""
        self.waiting_bytes = 0
        """Bytes of the write-back queue."""
        self.gathers_until = 0.0
        """Time at which the queue no longer waits for more blocks."""
        self.is_urgent = False
        """Whether no block in the queue may wait for more blocks."""
        self.jobs = 0
        self.stalled = False
        """Whether a job of the tier takes too long. A stalled tier gets no new jobs."""
        self.presence_cache = PresenceCache()
        self.misses = 0
        self.admission = new_admission() if new_admission else None
        """Admission filter; None admits every block."""
        self.declined = 0
        self.dropped = 0
        self.evicted_in_vain_bytes = 0
        """Bytes evicted because the tier had no space, since it last stored a block."""
        self.damaged = 0
        self.stored_bytes = 0
        self.loaded_bytes = 0

    def admits(self, block: Block, user: Hashable) -> bool:
        """Returns whether the admission filter admits a block for this use; counts rejections."""
        admitted = self.admission is None or self.admission.admits(block.name, user)
        self.declined += not admitted
        return admitted

    def enqueue(self, block: Block) -> None:
        """Adds a pinned block to the write-back queue."""
        if not self.write_back_queue:
            self.gathers_until = self.catalog.queues.now + GATHER_SECONDS
        self.write_back_queue.append(block)
        self.queued_bytes += block.nbytes
        self.waiting_bytes += block.nbytes

    def dequeue(self, batch: Iterable[Block]) -> None:
        """Removes the first blocks from the write-back queue."""
        for block in batch:
            self.write_back_queue.popleft()
            self.waiting_bytes -= block.nbytes
        self.is_urgent &= bool(self.write_back_queue)

    def is_gathering(self) -> bool:
        """Returns whether the queue waits for more blocks before the next store."""
        return (
            self.waiting_bytes < min(self.tier.gather_bytes, self.max_queued_bytes // 2)
            and not self.pending_stores
            and not self.is_urgent
            and self.catalog.queues.now < self.gathers_until
        )

    def matches(self, tiers: TierFilter) -> bool:
        tier = self.tier
        return tier.name in tiers.names or tier.medium in tiers.media or (tiers.remote and not tier.local)

    def presence(self, namespace: NamespaceId, key: bytes, excluded: Collection[int]) -> Presence:
        """Returns whether the tier can load a block; queues a query if that is unknown.

        The catalog of a shared tier is no proof, because the store can drop the block at any time.
        """
        entry = self.catalog.held(namespace, key)
        held = entry is not None
        if self.index in excluded:
            return Presence.EXCLUDED if held else Presence.ABSENT
        if self.tier.on_demand:
            return Presence.HELD if not self.stalled and (namespace, key) in self.presence_cache else Presence.ABSENT
        # Do not start a second load while an earlier one runs.
        if self.stalled or (entry is not None and entry.loads):
            return Presence.STALLED if held else Presence.ABSENT
        if self.tier.shared and (held or self.catalog.get(namespace, key) is None):
            there = self.presence_cache.get((namespace, key))
            if there is None:
                return Presence.UNKNOWN
            held = there
        return Presence.HELD if held else Presence.ABSENT

    def keys_among(self, namespace: NamespaceId, keys: Sequence[bytes]) -> set[bytes]:
        """Returns those of the keys for which `presence` may return something else than ABSENT."""
        if self.tier.on_demand:
            return {key for key in keys if (namespace, key) in self.presence_cache}
        return self.catalog.keys_among(namespace, keys)

    def record_answers(self, names: Sequence[Name], answers: Sequence[bool], now: float) -> None:
        """Records a shared tier's answers; [] if it has not answered.

        Blocks that it has lost may be stored again.
        """
        self.presence_cache.record_answers(names, answers, now)
        for name in names if answers else ():
            entry = self.catalog.held(*name)
            if entry is not None and not entry.loads and self.presence_cache.get(name) is False:
                self.catalog.evict([entry])

    def entry_of(self, block: Block) -> CatalogEntry:
        """Returns a block's catalog entry, or a temporary one for a block of another process."""
        entry = self.catalog.get(block.namespace, block.key)
        if entry is None:
            queue = self.catalog.queues.queue_for(block.namespace)
            entry = CatalogEntry(block.namespace, block.key, block.nbytes, EntryState.HELD, queue)
        return entry

    def take_pending_removals(self) -> list[Name]:
        names = [entry.name for entry in self.pending_removals]
        self.pending_removals = []
        for name in names:
            self.presence_cache.forget(name)
        return names

    def use(self, blocks: Iterable[Block], user: Hashable) -> None:
        """Records a request's use of blocks, head first. Skips blocks that the tier lacks.

        Retains each block until its `retain_until`.
        """
        for retain_until, together in groupby(blocks, attrgetter("retain_until")):
            entries = (self.catalog.get(block.namespace, block.key) for block in together)
            self.catalog.use([entry for entry in entries if entry is not None], user, retain_until)

    def retain(self, blocks: Iterable[Block]) -> None:
        """Retains each block until its `retain_until`. Skips blocks that the tier lacks."""
        for retain_until, together in groupby(blocks, attrgetter("retain_until")):
            if retain_until > self.catalog.queues.now:
                entries = (self.catalog.get(block.namespace, block.key) for block in together)
                self.catalog.queues.retain([entry for entry in entries if entry is not None], retain_until)

    def tick(self, now: float, used_in_cpu: UsedElsewhere) -> None:
        """Advances the time; some expired blocks become pending removals."""
        self.presence_cache.tick(now)
        self.pending_removals += self.catalog.tick(now, used_in_cpu)

    def stats(self, hits: int) -> TierStats:
        return TierStats(
            name=self.tier.name,
            type=self.tier.type,
            capacity_bytes=self.catalog.capacity_bytes,
            available_bytes=self.catalog.capacity_bytes,
            used_bytes=self.catalog.used_bytes,
            blocks=len(self.catalog),
            hits=hits,
            misses=self.misses,
            evictions=self.catalog.evictions,
            dropped=self.dropped,
            damaged=self.damaged,
            expired=self.catalog.queues.expired,
            not_retained=self.catalog.queues.not_retained,
            shares=self.catalog.queues.stats(),
            declined=self.declined,
            queued_bytes=self.queued_bytes,
            jobs=self.jobs + bool(self.write_back_queue),
            stored_bytes=self.stored_bytes,
            loaded_bytes=self.loaded_bytes,
            healthy=self.tier.last_error is None,
            last_error=self.tier.last_error or "",
            shared=self.tier.shared,
        )
