"""Adaptive replacement cache (Megiddo and Modha, FAST 2003)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from typing import Generic

from .open_requests import LastRequest
from .policy import T

__all__ = ["ARC"]


class ARC(Generic[T]):
    """Two lines, for what was used once and for what was used again; ghosts of both move the border between them.

    The paper's capacity is the number of items here: it is asked for a victim only where the tier is full.
    """

    def __init__(self) -> None:
        self._once: OrderedDict[T, int] = OrderedDict()
        self._again: OrderedDict[T, int] = OrderedDict()
        self._ghosts_once: OrderedDict[Hashable, None] = OrderedDict()
        self._ghosts_again: OrderedDict[Hashable, None] = OrderedDict()
        self._target = 0.0
        """How many items the first line should have (the paper's p)."""
        self._requests = LastRequest[T]()
        self._clock = 0

    def use(self, items: Sequence[T], request: Hashable = None) -> None:
        """Moves items to the line for what was used again, or takes them into the first; tail first."""
        for item in reversed(self._requests.fresh(items, request)):
            self._clock += 1
            if item in self._once:
                del self._once[item]
                self._again[item] = self._clock
            elif item in self._again:
                self._again[item] = self._clock
                self._again.move_to_end(item)
            else:
                self._admit(item)

    def finish(self, request: Hashable) -> None:
        """Forgets the request's name."""
        self._requests.finish(request)

    def remove(self, item: T) -> None:
        """Leaves a ghost in its line."""
        for line, ghosts in ((self._once, self._ghosts_once), (self._again, self._ghosts_again)):
            if line.pop(item, None) is not None:
                ghosts[item.name] = None
        self._requests.forget(item)

    def victims(self) -> Iterator[T]:
        """Yields the head of the first line while that is longer than its target, else that of the second."""
        once, again = iter(self._once), iter(self._again)
        for left in range(len(self._once), -1, -1):
            if left <= self._target or left == 0:
                yield from again
            if left:
                yield next(once)

    def oldest(self) -> T | None:
        """Returns the head of one of the lines."""
        heads = [(line[head], head) for line in (self._once, self._again) for head in [next(iter(line), None)] if head]
        return min(heads, key=lambda pair: pair[0])[1] if heads else None

    def __len__(self) -> int:
        return len(self._once) + len(self._again)

    def _admit(self, item: T) -> None:
        name = item.name
        once, again = len(self._ghosts_once), len(self._ghosts_again)
        if name in self._ghosts_once:
            self._target = min(self._target + max(1.0, again / once), len(self))
            del self._ghosts_once[name]
            self._again[item] = self._clock
        elif name in self._ghosts_again:
            self._target = max(self._target - max(1.0, once / again), 0.0)
            del self._ghosts_again[name]
            self._again[item] = self._clock
        else:
            self._once[item] = self._clock
        capacity = len(self)
        while self._ghosts_once and len(self._ghosts_once) + len(self._once) > capacity:
            self._ghosts_once.popitem(last=False)
        while len(self._ghosts_again) > capacity:
            self._ghosts_again.popitem(last=False)
