"""Eviction on demand: what somebody who runs the server wants gone, and how much of that went.

What is pinned, being stored or being loaded never goes, and what a request has had retained only where that is asked for.
A tier is walked namespace by namespace, in slices: other events have their turn between two of them. Where only so many
bytes are wanted, a first walk finds out from which time of last use on that is too much; so the least recently used go
first, to the second (to the minute where they were not used for an hour), without sorting a million blocks.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..base import NamespaceId
from ..types import TENANT_TAG_BYTES
from .catalog import CatalogEntry, UsedElsewhere
from .secondary import SecondaryTierState

__all__ = ["SLICE", "EvictionProgress", "EvictionRequest", "EvictionSource", "EvictionTask", "SecondaryTierSource"]

SLICE = 512
"""Blocks that are looked at in one go: about a millisecond."""

_FINE_SECONDS = 3600
_COARSE_SECONDS = 60


@dataclass(frozen=True, slots=True)
class EvictionRequest:
    """What is to go: all that meets every condition.

    Attributes:
        tiers: positions of the tiers in the lookup order; the CPU tier is 0.
        namespace: of this namespace only.
        tenant_tag: of the namespaces of this tenant only.
        unused_since: in seconds of the core's clock; what was used later stays.
        max_bytes: as few as make up so many, in each tier; None for all.
        retained: whether what requests have had retained goes as well.
        dry_run: whether it is only counted.
    """

    tiers: Collection[int]
    namespace: NamespaceId | None = None
    tenant_tag: bytes | None = None
    unused_since: float | None = None
    max_bytes: int | None = None
    retained: bool = False
    dry_run: bool = False

    def names(self, namespace: NamespaceId) -> bool:
        """Returns whether blocks of a namespace are meant."""
        if self.namespace is not None and namespace != self.namespace:
            return False
        return self.tenant_tag is None or namespace[:TENANT_TAG_BYTES] == self.tenant_tag


class EvictionSource(Protocol):
    """What a tier holds, to be parted with."""

    def counts(self) -> Iterable[tuple[NamespaceId, int]]:
        """Yields the namespaces that it has blocks of, and how many."""
        ...

    def all_of(self, namespace: NamespaceId, /) -> Collection[Any]:
        """Returns what it has of a namespace."""
        ...

    def is_there(self, item: Any, /) -> bool:
        """Returns whether it still has an item that it has had."""
        ...

    def may_go(self, item: Any, /, *, retained: bool) -> bool:
        """Returns whether an item is neither pinned nor in the middle of a job, nor, unless `retained`, retained."""
        ...

    def last_used(self, item: Any, /) -> float:
        """Returns when an item was used the last time, in seconds."""
        ...

    def nbytes_of(self, item: Any, /) -> int:
        """Returns what would be free without it."""
        ...

    def evict(self, items: Sequence[Any], /) -> None:
        """Evicts items that are there and may go."""
        ...


class SecondaryTierSource:
    """What a tier below the CPU tier holds. The CPU tier parts with its blocks itself (`PrimaryTier`)."""

    def __init__(
        self, secondary: SecondaryTierState, used_in_cpu: UsedElsewhere, advance: Callable[[SecondaryTierState], None]
    ) -> None:
        """`advance` has the tier remove what has gone from the catalog."""
        self._lane = secondary
        self._catalog = secondary.catalog
        self._used_in_cpu = used_in_cpu
        self._advance = advance

    def counts(self) -> Iterable[tuple[NamespaceId, int]]:
        """Yields the namespaces that it has blocks of, and how many."""
        return self._catalog.counts()

    def all_of(self, namespace: NamespaceId) -> Collection[CatalogEntry]:
        """Returns what it has of a namespace."""
        return self._catalog.all_of(namespace)

    def is_there(self, item: CatalogEntry) -> bool:
        """Returns whether an entry is still in the catalog."""
        return self._catalog.get(item.namespace, item.key) is item

    def may_go(self, item: CatalogEntry, *, retained: bool) -> bool:
        """Returns whether an entry is in no job, nor, unless `retained`, retained."""
        return self._catalog.may_go(item, retained=retained)

    def last_used(self, item: CatalogEntry) -> float:
        """Returns when a block was used the last time, here or in the CPU tier: what that one has is not asked of others."""
        return max(item.used_at, self._used_in_cpu(item.namespace, item.key) or 0.0)

    def nbytes_of(self, item: CatalogEntry) -> int:
        """Returns the size of a block."""
        return item.nbytes

    def evict(self, items: Sequence[CatalogEntry]) -> None:
        """Evicts entries, and has the tier remove them."""
        self._lane.pending_removals += self._catalog.evict(items)
        self._advance(self._lane)


@dataclass(slots=True)
class EvictionProgress:
    """How far the clearing of one tier has come.

    Attributes:
        tier: position in the lookup order.
        total: blocks to look at, about.
        looked_at: those of them that have been.
        blocks: evicted so far, or to be counted only.
        nbytes: their size.
        kept_blocks: blocks that are meant and cannot go: pinned, in the middle of a job, or retained.
        kept_nbytes: their size.
    """

    tier: int
    total: int = 0
    looked_at: int = 0
    blocks: int = 0
    nbytes: int = 0
    kept_blocks: int = 0
    kept_nbytes: int = 0


class EvictionTask:
    """One eviction on demand, slice after slice."""

    def __init__(self, wanted: EvictionRequest, sources: Sequence[EvictionSource], now: float) -> None:
        """`stocks` are those of all tiers, in lookup order; `now` is the time in seconds."""
        self.done = False
        """Whether there is nothing left to do."""
        self.error: Exception | None = None
        """What a slice raised, which was the last one then."""
        self.tiers = [EvictionProgress(tier) for tier in sorted(wanted.tiers)]
        """What has come of it so far, per tier."""
        self._wanted = wanted
        self._now = now
        self._steps = self._run(sources)

    def work(self) -> bool:
        """Does a slice; returns whether there is more. One that raises is the last."""
        if not self.done:
            try:
                self.done = next(self._steps, None) is None
            except Exception as error:
                self.done, self.error = True, error
                raise
        return not self.done

    def cancel(self) -> None:
        """Leaves it at what has been done."""
        self.done = True
        self._steps.close()

    def _run(self, sources: Sequence[EvictionSource]) -> Generator[bool, None, None]:
        for cleared in self.tiers:
            source = sources[cleared.tier]
            counts = {namespace: count for namespace, count in source.counts() if self._wanted.names(namespace)}
            namespaces, there = list(counts), sum(counts.values())
            cleared.total = there if self._wanted.max_bytes is None else 2 * there
            if self._wanted.max_bytes is None:
                yield from self._clear(source, namespaces, cleared)
                continue
            ages: dict[int, int] = defaultdict(int)
            for slice_ in _slices(source, namespaces):
                for item in slice_:
                    if self._is_meant(source, item) and source.may_go(item, retained=self._wanted.retained):
                        ages[self._age(source, item)] += source.nbytes_of(item)
                cleared.looked_at += len(slice_)
                yield True
            oldest, left = _cut(ages, self._wanted.max_bytes)
            yield from self._clear(source, namespaces, cleared, oldest, left, self._wanted.max_bytes)

    def _clear(
        self,
        source: EvictionSource,
        namespaces: Sequence[NamespaceId],
        cleared: EvictionProgress,
        age: int = -1,
        left: int = 0,
        most: float = math.inf,
    ) -> Iterator[bool]:
        """Parts with all that is meant and older than `age`, and with `left` bytes of what is of that age.

        When `most` bytes have gone, all else stays: since the first walk there may have come more that is so old.
        """
        for slice_ in _slices(source, namespaces):
            going, nbytes_going = [], 0
            for item in slice_:
                if not self._is_meant(source, item):
                    continue
                nbytes = source.nbytes_of(item)
                if not source.may_go(item, retained=self._wanted.retained):
                    cleared.kept_blocks += 1
                    cleared.kept_nbytes += nbytes
                    continue
                items_age = self._age(source, item)
                if items_age < age or (items_age == age and left <= 0) or cleared.nbytes + nbytes_going >= most:
                    continue
                left -= nbytes if items_age == age else 0
                going.append(item)
                nbytes_going += nbytes
            if going and not self._wanted.dry_run:
                source.evict(going)
            cleared.blocks += len(going)
            cleared.nbytes += nbytes_going
            cleared.looked_at += len(slice_)
            yield True

    def _is_meant(self, source: EvictionSource, item: Any) -> bool:
        since = self._wanted.unused_since
        return source.is_there(item) and (since is None or source.last_used(item) <= since)

    def _age(self, source: EvictionSource, item: Any) -> int:
        """Returns for how long an item was not used, rounded down; what is used meanwhile is of age 0."""
        age = max(0, int(self._now - source.last_used(item)))
        return age if age < _FINE_SECONDS else age // _COARSE_SECONDS * _COARSE_SECONDS


def _slices(source: EvictionSource, namespaces: Iterable[NamespaceId]) -> Iterator[list[Any]]:
    """Yields all items, the last first: so policies find them soonest. A list of a million pointers takes ten milliseconds."""
    for namespace in namespaces:
        items = list(source.all_of(namespace))
        while items:
            slice_ = items[: -SLICE - 1 : -1]
            del items[-SLICE:]
            yield slice_


def _cut(ages: dict[int, int], wanted: int) -> tuple[int, int]:
    """Returns the age of which only some have to go for so many bytes, and how many bytes of that age."""
    for age in sorted(ages, reverse=True):
        if wanted <= ages[age]:
            return age, wanted
        wanted -= ages[age]
    return -1, 0
