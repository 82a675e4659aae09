"""What lookups find: leases that SGLang may load from, and prefixes of hybrid models.

SGLang first asks on one thread how many pages of a prefix exist, agrees with the other ranks on a
number, and then loads on another thread all or some of them, in batches. It does not say that it
will not load: the lease of such a lookup expires.

In a hybrid model a pool can need only the last pages of a prefix. A Mamba state is the state after
the last page; a sliding window is the last pages. A pool has them at the ends of some earlier
requests only. So the longest prefix is not always the right one, and ranks must agree on a length
that all of them can restore.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ... import Lease

__all__ = ["LEASE_SECONDS", "FoundPages", "LeasedPages", "Window", "restorable_prefixes"]

LEASE_SECONDS = 30.0
_USE_SECONDS = 20.0
"""A lease that is older is not used, because it could expire while pages are copied."""

SEARCH_PAGES = 64
"""Pages per search. Each page that is found is pinned and loaded from lower tiers."""


@dataclass(frozen=True, slots=True)
class LeasedPages:
    """Items of a lease. `last`: no item is left, so release the lease after the load."""

    lease: Lease
    items: Sequence[int]
    last: bool


@dataclass(slots=True)
class _Found:
    lease: Lease
    places: dict[bytes, int]
    until: float


class FoundPages:
    """Pages that lookups found and that were not loaded yet. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: list[_Found] = []

    def add(self, lease: Lease, places: Mapping[bytes, int]) -> None:
        """Records the hits of a lookup: the item of the lease, by key."""
        now = time.monotonic()
        with self._lock:
            self._found = [found for found in self._found if found.until > now]
            self._found.append(_Found(lease, dict(places), now + _USE_SECONDS))

    def take(self, keys: Sequence[bytes]) -> LeasedPages | None:
        """Returns a lease that has all keys, oldest first. Each lookup gives a key only once."""
        now = time.monotonic()
        with self._lock:
            for found in self._found:
                if found.until <= now or found.lease.session.ended or not all(key in found.places for key in keys):
                    continue
                items = [found.places.pop(key) for key in keys]
                if not found.places:
                    self._found.remove(found)
                return LeasedPages(found.lease, items, last=not found.places)
        return None


@dataclass
class Window:
    """A pool that needs the last `pages` pages. `ask(first, end)` looks up these pages."""

    pages: int
    ask: Callable[[int, int], Sequence[bool]]
    has: dict[int, bool] = field(default_factory=dict)

    def look(self, first: int, end: int) -> None:
        """Looks up the pages from `first` on that are not known yet."""
        end = min(end, min(self.has, default=end))
        if first < end:
            self.has.update(zip(range(first, end), self.ask(first, end), strict=True))

    def restores(self, length: int) -> bool:
        return all(self.has.get(page, False) for page in range(max(0, length - self.pages), length))


def restorable_prefixes(pages: int, windows: Sequence[Window]) -> list[int]:
    """Returns lengths of prefixes, in pages and ascending, that all windows have. At most `pages`.

    Without windows these are all lengths. With windows the search goes backwards, and ends at the
    first pages in which it finds a length.
    """
    if not windows:
        return list(range(1, pages + 1))
    end = pages
    while end > 0:
        first = max(0, end - SEARCH_PAGES)
        for window in windows:
            window.look(max(0, first + 1 - window.pages), end)
        found = [length for length in range(first + 1, end + 1) if all(window.restores(length) for window in windows)]
        if found:
            return found
        end = first
    return []
