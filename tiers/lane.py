"""One secondary tier as the core sees it."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable

from .admission import Admission
from .base import NamespaceId, SecondaryTier, TierFilter
from .blocks import Block
from .catalog import Catalog, CatalogEntry, EntryState
from .history import MissReason
from .policies import POLICIES
from .questions import Name, Questions
from .requests import Request
from .stats import TierStats

__all__ = ["Lane", "Presence"]


class Presence(enum.Enum):
    """What a tier, or all of them together, say of a block."""

    HELD = enum.auto()
    """It can be loaded."""
    ABSENT = enum.auto()
    EXCLUDED = enum.auto()
    """It is there, and the tier was left out."""
    UNKNOWN = enum.auto()
    """The tier has to be asked."""
    STALLED = enum.auto()
    """It is there, and the tier does not answer."""


class Lane:
    """A tier's catalog, its queue, its counters."""

    def __init__(
        self,
        index: int,
        tier: SecondaryTier,
        max_queued_bytes: int,
        policy: str,
        left: Callable[[NamespaceId, bytes, MissReason], None],
        admission: Callable[[], Admission] | None = None,
    ) -> None:
        self.index = index
        """Position in the lookup order; the CPU tier is 0."""
        self.tier = tier
        self.catalog = Catalog(tier.capacity_bytes, POLICIES[policy], left)
        self.max_queued_bytes = max_queued_bytes
        self.queue: deque[Block] = deque()
        """Blocks that wait to be stored; each is pinned, and has its entry in the catalog."""
        self.doomed: list[CatalogEntry] = []
        """Evicted entries that the tier still has to remove, before the next store."""
        self.storing = False
        self.owed: dict[tuple[NamespaceId, bytes], list[Request]] = {}
        """Blocks on their way that requests insist on."""
        self.queued_bytes = 0
        """Size of what waits or is being stored."""
        self.jobs = 0
        self.stalled = False
        """Whether the tier does not come back from its jobs: nothing is asked of it then."""
        self.questions = Questions()
        """What a shared tier was asked."""
        self.misses = 0
        """Keys that were asked of it and not found in it."""
        self.admission = admission() if admission else None
        """What chooses the blocks that it takes in; None where it takes all."""
        self.declined = 0
        """Uses of blocks that were not taken in for that reason."""
        self.dropped = 0
        """Blocks whose cascade was dropped: the queue or the tier was full."""
        self.damaged = 0
        """Blocks that the tier lost because they were damaged."""

    def admits(self, block: Block, user: Hashable) -> bool:
        """Returns whether the tier takes in a block that a request has used, and counts it if not."""
        admitted = self.admission is None or self.admission.admits(block.name, user)
        self.declined += not admitted
        return admitted

    def matches(self, tiers: TierFilter) -> bool:
        """Returns whether a filter leaves this tier out."""
        tier = self.tier
        return tier.name in tiers.names or tier.medium in tiers.media or (tiers.remote and not tier.local)

    def presence(self, namespace: NamespaceId, key: bytes, excluded: Collection[int]) -> Presence:
        """Returns whether the tier can load a block. What it has to be asked is noted (`questions`)."""
        held = self.catalog.held(namespace, key) is not None
        if self.index in excluded:
            return Presence.EXCLUDED if held else Presence.ABSENT
        if self.stalled:
            return Presence.STALLED if held else Presence.ABSENT
        if not held and self.tier.shared and self.catalog.get(namespace, key) is None:
            there = self.questions.knows((namespace, key))
            if there is None:
                return Presence.UNKNOWN
            held = there
        return Presence.HELD if held else Presence.ABSENT

    def entry_of(self, block: Block) -> CatalogEntry:
        """Returns the entry of a block; for one that only the shared tier itself knows of, one outside of the catalog."""
        entry = self.catalog.get(block.namespace, block.key)
        return entry or CatalogEntry(block.namespace, block.key, block.nbytes, EntryState.HELD)

    def take_doomed(self) -> list[Name]:
        """Returns what the tier still has to remove; it is the caller's from here on."""
        names = [entry.name for entry in self.doomed]
        self.doomed = []
        for name in names:
            self.questions.forget(name)
        return names

    def use(self, blocks: Iterable[Block], user: Hashable) -> None:
        """Takes note that a request used these blocks, as far as they are here, given head first."""
        entries = (self.catalog.get(block.namespace, block.key) for block in blocks)
        self.catalog.use([entry for entry in entries if entry is not None], user)

    def stats(self, hits: int) -> TierStats:
        """Returns the figures of this moment; the hits are counted by who looks up."""
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
            declined=self.declined,
            queued_bytes=self.queued_bytes,
            jobs=self.jobs,
            healthy=self.tier.trouble is None,
            trouble=self.tier.trouble or "",
        )
