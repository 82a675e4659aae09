"""Adaptive replacement cache (Megiddo and Modha, FAST 2003)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from typing import ClassVar, Generic

from .open_requests import LastRequest
from .policy import T

__all__ = ["ARC"]


class ARC(Generic[T]):
    """Two LRU lists: T1 for items used once, T2 for items used more often.

    The lists have ghosts (names of evicted items, B1 and B2), which adapt the target size of T1.
    The policy does not know the capacity of the tier. As the paper's capacity it uses the current
    number of items, because victims are needed only when the tier is full.
    """

    declines: ClassVar[bool] = False

    def __init__(self) -> None:
        self._recent: OrderedDict[T, int] = OrderedDict()
        self._frequent: OrderedDict[T, int] = OrderedDict()
        self._recent_ghosts: OrderedDict[Hashable, None] = OrderedDict()
        self._frequent_ghosts: OrderedDict[Hashable, None] = OrderedDict()
        self._target = 0.0
        """Target size of the first list (the paper's p)."""
        self._requests = LastRequest[T]()
        self._clock = 0

    def use(self, items: Sequence[T], request: Hashable = None, now: float = 0.0) -> None:
        for item in reversed(self._requests.fresh(items, request)):
            self._clock += 1
            if item in self._recent:
                del self._recent[item]
                self._frequent[item] = self._clock
            elif item in self._frequent:
                self._frequent[item] = self._clock
                self._frequent.move_to_end(item)
            else:
                self._admit(item)

    def finish(self, request: Hashable) -> None:
        self._requests.finish(request)

    def remove(self, item: T) -> None:
        for lru_list, ghosts in ((self._recent, self._recent_ghosts), (self._frequent, self._frequent_ghosts)):
            if lru_list.pop(item, None) is not None:
                ghosts[item.name] = None
        self._requests.forget(item)

    def victims(self) -> Iterator[T]:
        """Yields from T1 while it is longer than its target, then T2, then the rest of T1."""
        recent, frequent = iter(self._recent), iter(self._frequent)
        for left in range(len(self._recent), -1, -1):
            if left <= self._target or left == 0:
                yield from frequent
            if left:
                yield next(recent)

    def oldest(self) -> T | None:
        heads = [
            (lru_list[head], head)
            for lru_list in (self._recent, self._frequent)
            for head in [next(iter(lru_list), None)]
            if head
        ]
        return min(heads, key=lambda pair: pair[0])[1] if heads else None

    def __len__(self) -> int:
        return len(self._recent) + len(self._frequent)

    def _admit(self, item: T) -> None:
        name = item.name
        recent, frequent = len(self._recent_ghosts), len(self._frequent_ghosts)
        if name in self._recent_ghosts:
            self._target = min(self._target + max(1.0, frequent / recent), len(self))
            del self._recent_ghosts[name]
            self._frequent[item] = self._clock
        elif name in self._frequent_ghosts:
            self._target = max(self._target - max(1.0, recent / frequent), 0.0)
            del self._frequent_ghosts[name]
            self._frequent[item] = self._clock
        else:
            self._recent[item] = self._clock
        capacity = len(self)
        while self._recent_ghosts and len(self._recent_ghosts) + len(self._recent) > capacity:
            self._recent_ghosts.popitem(last=False)
        while len(self._frequent_ghosts) > capacity:
            self._frequent_ghosts.popitem(last=False)
