"""How much of each store has come, so that a stream that broke is continued and not begun anew."""

from __future__ import annotations

from collections.abc import Callable, Collection

__all__ = ["Arrivals"]

_SWEEP_ENTRIES = 256


class Arrivals:
    """Per store, where the bytes end that came without a gap. Lives on the event loop."""

    def __init__(self, stores: Callable[[], Collection[int]]) -> None:
        """`stores` returns the stores in flight."""
        self._stores = stores
        self._ends: dict[int, int] = {}

    def add(self, store_id: int, start: int, end: int) -> None:
        """Takes note of bytes in the slots of a store."""
        known = self._ends.get(store_id, 0)
        if start <= known < end:
            self._ends[store_id] = end
            if len(self._ends) >= _SWEEP_ENTRIES:
                alive = self._stores()
                self._ends = {number: end for number, end in self._ends.items() if number in alive}

    def of(self, store_id: int) -> int:
        """Returns how many bytes there are from the first one on."""
        return self._ends.get(store_id, 0)
