"""Bulk eviction: removes blocks by an operator's conditions, with progress.

A bulk eviction keeps blocks that are pinned or in a job. It also keeps retained blocks, unless the
operator requests their eviction. It examines a tier in slices, one namespace after another.

With `max_bytes`, the least recently used blocks are evicted. To avoid sorting, a first pass counts
the bytes of the blocks of each age, and computes an age limit. The second pass evicts all blocks
that are older than the limit, and blocks of exactly this age until `max_bytes` are evicted.
Ages are in seconds; beyond an hour, in minutes.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..secondary_tier import NamespaceId
from ..types import TENANT_TAG_BYTES
from .catalog import CatalogEntry, UsedElsewhere
from .operations import Operation
from .secondary_state import SecondaryTierState

__all__ = ["SLICE", "Eviction", "EvictionProgress", "EvictionRequest", "EvictionSource", "SecondaryTierSource"]

SLICE = 512
"""Blocks per slice: about 1 ms."""

_FINE_SECONDS = 3600
_COARSE_SECONDS = 60


@dataclass(frozen=True, slots=True)
class EvictionRequest:
    """Conditions of an eviction. A block must meet all of them.

    Attributes:
        tiers: positions of the tiers in the lookup order; the CPU tier is 0.
        namespace: evict only from this namespace.
        tenant_tag: evict only from the namespaces of this tenant.
        unused_since: evict only blocks not used after this time, in seconds of the core's clock.
        max_bytes: how many bytes to evict per tier at most; None for no limit.
        retained: whether to evict retained blocks too.
        dry_run: count blocks instead of evicting them.
    """

    tiers: Collection[int]
    namespace: NamespaceId | None = None
    tenant_tag: bytes | None = None
    unused_since: float | None = None
    max_bytes: int | None = None
    retained: bool = False
    dry_run: bool = False

    def includes(self, namespace: NamespaceId) -> bool:
        if self.namespace is not None and namespace != self.namespace:
            return False
        return self.tenant_tag is None or namespace[:TENANT_TAG_BYTES] == self.tenant_tag


class EvictionSource(Protocol):
    def counts(self) -> Iterable[tuple[NamespaceId, int]]: ...

    def all_of(self, namespace: NamespaceId, /) -> Collection[Any]: ...

    def contains(self, item: Any, /) -> bool: ...

    def is_evictable(self, item: Any, /, *, retained: bool) -> bool:
        """Returns whether an item is unpinned, in no job and, unless `retained`, not retained."""
        ...

    def last_used(self, item: Any, /) -> float: ...

    def nbytes_of(self, item: Any, /) -> int:
        """Returns the bytes that an eviction of the item would free."""
        ...

    def evict(self, items: Sequence[Any], /) -> None: ...


class SecondaryTierSource:
    """`EvictionSource` of a secondary tier. `CpuTier` implements the protocol directly."""

    def __init__(
        self, secondary: SecondaryTierState, used_in_cpu: UsedElsewhere, advance: Callable[[SecondaryTierState], None]
    ) -> None:
        """`advance` sends the tier's pending removals, unless the tier is storing or stalled."""
        self._secondary = secondary
        self._catalog = secondary.catalog
        self._used_in_cpu = used_in_cpu
        self._advance = advance

    def counts(self) -> Iterable[tuple[NamespaceId, int]]:
        return self._catalog.counts()

    def all_of(self, namespace: NamespaceId) -> Collection[CatalogEntry]:
        return self._catalog.all_of(namespace)

    def entry(self, namespace: NamespaceId, key: bytes) -> CatalogEntry | None:
        return self._catalog.get(namespace, key)

    def contains(self, item: CatalogEntry) -> bool:
        return self._catalog.get(item.namespace, item.key) is item

    def is_evictable(self, item: CatalogEntry, *, retained: bool) -> bool:
        return self._catalog.is_evictable(item, retained=retained)

    def last_used(self, item: CatalogEntry) -> float:
        """Returns the last use in this tier or in the CPU tier, in seconds."""
        return max(item.used_at, self._used_in_cpu(item.namespace, item.key) or 0.0)

    def nbytes_of(self, item: CatalogEntry) -> int:
        return item.nbytes

    def evict(self, items: Sequence[CatalogEntry]) -> None:
        self._secondary.pending_removals += self._catalog.evict(items)
        self._advance(self._secondary)


@dataclass(slots=True)
class EvictionProgress:
    """Progress of an eviction in one tier.

    Attributes:
        total: approximate number of blocks to examine.
        looked_at: blocks examined so far.
        blocks: blocks evicted so far, or counted in a dry run.
        kept_blocks: matching blocks that cannot be evicted: pinned, in a job, or retained.
    """

    tier: int
    total: int = 0
    looked_at: int = 0
    blocks: int = 0
    nbytes: int = 0
    kept_blocks: int = 0
    kept_nbytes: int = 0


class Eviction:
    """An eviction, and its progress per tier."""

    def __init__(self, request: EvictionRequest, sources: Sequence[EvictionSource], now: float) -> None:
        """`sources`: all tiers in lookup order; `now`: in seconds."""
        self.tiers = [EvictionProgress(tier) for tier in sorted(request.tiers)]
        self._request = request
        self._now = now
        self._sources = sources

    def run(self) -> Operation[None]:
        """Evicts the blocks. If the operation ends early, evicted blocks are not restored."""
        for progress in self.tiers:
            source = self._sources[progress.tier]
            counts = {namespace: count for namespace, count in source.counts() if self._request.includes(namespace)}
            namespaces, there = list(counts), sum(counts.values())
            progress.total = there if self._request.max_bytes is None else 2 * there
            if self._request.max_bytes is None:
                yield from self._evict_matching(source, namespaces, progress)
                continue
            ages: dict[int, int] = defaultdict(int)
            for slice_ in _slices(source, namespaces):
                for item in slice_:
                    if self._matches(source, item) and source.is_evictable(item, retained=self._request.retained):
                        ages[self._age(source, item)] += source.nbytes_of(item)
                progress.looked_at += len(slice_)
                yield None
            oldest, left = _age_limit(ages, self._request.max_bytes)
            yield from self._evict_matching(source, namespaces, progress, oldest, left, self._request.max_bytes)

    def _evict_matching(
        self,
        source: EvictionSource,
        namespaces: Sequence[NamespaceId],
        progress: EvictionProgress,
        age: int = -1,
        left: int = 0,
        most: float = math.inf,
    ) -> Operation[None]:
        """Evicts matching blocks that are older than `age`, and `left` bytes of blocks of this age.

        Stops when `most` bytes are evicted. More blocks may match now than in the first pass.
        """
        for slice_ in _slices(source, namespaces):
            going, nbytes_going = [], 0
            for item in slice_:
                if not self._matches(source, item):
                    continue
                nbytes = source.nbytes_of(item)
                if not source.is_evictable(item, retained=self._request.retained):
                    progress.kept_blocks += 1
                    progress.kept_nbytes += nbytes
                    continue
                items_age = self._age(source, item)
                if items_age < age or (items_age == age and left <= 0) or progress.nbytes + nbytes_going >= most:
                    continue
                left -= nbytes if items_age == age else 0
                going.append(item)
                nbytes_going += nbytes
            if going and not self._request.dry_run:
                source.evict(going)
            progress.blocks += len(going)
            progress.nbytes += nbytes_going
            progress.looked_at += len(slice_)
            yield None

    def _matches(self, source: EvictionSource, item: Any) -> bool:
        since = self._request.unused_since
        return source.contains(item) and (since is None or source.last_used(item) <= since)

    def _age(self, source: EvictionSource, item: Any) -> int:
        """Returns the time between the last use and the start of the task, rounded down, or 0."""
        age = max(0, int(self._now - source.last_used(item)))
        return age if age < _FINE_SECONDS else age // _COARSE_SECONDS * _COARSE_SECONDS


def _slices(source: EvictionSource, namespaces: Iterable[NamespaceId]) -> Iterator[list[Any]]:
    """Yields all items in slices, newest first, because policies remove the newest items fastest.

    The list of items is copied first, which takes 10 ms per million items.
    """
    for namespace in namespaces:
        items = list(source.all_of(namespace))
        while items:
            slice_ = items[: -SLICE - 1 : -1]
            del items[-SLICE:]
            yield slice_


def _age_limit(ages: dict[int, int], wanted: int) -> tuple[int, int]:
    """Returns the lowest age of blocks to evict, and how many bytes of this age to evict."""
    for age in sorted(ages, reverse=True):
        if wanted <= ages[age]:
            return age, wanted
        wanted -= ages[age]
    return -1, 0
