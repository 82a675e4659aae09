"""Items by when their time is over, as coarse as it may be: moving one on costs two dictionary operations."""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable, Iterable
from itertools import islice
from typing import Generic, TypeVar

__all__ = ["Timetable"]

H = TypeVar("H", bound=Hashable)


class Timetable(Generic[H]):
    """Each item once. Times are in seconds of the core's clock, and come up to `width` seconds late, never early.

    Memory is bounded by the number of items, and of widths between the earliest and the latest time.
    """

    def __init__(self, width: float = 1.0) -> None:
        self._width = width
        self._slot_of: dict[H, int] = {}
        self._slots: dict[int, dict[H, None]] = {}
        self._order: list[int] = []
        """A heap of the keys of `_slots`."""

    def __len__(self) -> int:
        return len(self._slot_of)

    def __contains__(self, item: H) -> bool:
        return item in self._slot_of

    def put(self, items: Iterable[H], when: float) -> None:
        """Sets the time of items, whether they had one or not. Those with one time come in the order in which they came."""
        number = math.ceil(when / self._width)
        slot = self._slots.get(number)
        if slot is None:
            slot = self._slots[number] = {}
            heapq.heappush(self._order, number)
        for item in items:
            known = self._slot_of.get(item)
            if known == number:
                continue
            if known is not None:
                del self._slots[known][item]
            self._slot_of[item] = number
            slot[item] = None

    def when(self, item: H) -> float:
        """Returns when an item's time is over; it must have one."""
        return self._slot_of[item] * self._width

    def discard(self, item: H) -> None:
        """Forgets an item; one that is not known is fine."""
        number = self._slot_of.pop(item, None)
        if number is not None:
            del self._slots[number][item]

    def has_due(self, now: float) -> bool:
        """Returns whether there may be items whose time is over."""
        return bool(self._order) and self._order[0] * self._width <= now

    def take(self, now: float, most: int) -> list[H]:
        """Returns and forgets items whose time is over, the earliest first; at most so many."""
        taken: list[H] = []
        while len(taken) < most and self.has_due(now):
            slot = self._slots[self._order[0]]
            due = list(islice(slot, most - len(taken)))
            for item in due:
                del slot[item], self._slot_of[item]
            taken += due
            if not slot:
                del self._slots[heapq.heappop(self._order)]
        return taken
