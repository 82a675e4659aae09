"""LRU eviction policy: orders whole request chains by their last use."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from itertools import chain, groupby
from typing import ClassVar, Generic

from .open_requests import OpenRequests
from .policy import T

__all__ = ["LRU"]


class _Chain(Generic[T]):
    """Blocks of one request, head first, except blocks that a later request used."""

    __slots__ = ("items",)

    def __init__(self) -> None:
        self.items: dict[T, None] = {}


class LRU(Generic[T]):
    """Evicts the chain of the least recent request first, tail before head (B4.9)."""

    declines: ClassVar[bool] = False

    def __init__(self) -> None:
        self._chain_of: dict[T, _Chain[T]] = {}
        self._chains: OrderedDict[_Chain[T], None] = OrderedDict()
        self._requests = OpenRequests[_Chain[T]](_Chain)

    def use(self, items: Sequence[T], request: Hashable = None, now: float = 0.0) -> None:
        chain = self._requests.of(request)
        for known, group in groupby(items, self._chain_of.get):
            if known is chain:
                continue
            taken = list(group)
            if known is not None:
                self._leave(known, taken)
            chain.items.update(dict.fromkeys(taken))
            self._chain_of.update(dict.fromkeys(taken, chain))
        if chain.items:
            self._chains[chain] = None
            self._chains.move_to_end(chain)

    def finish(self, request: Hashable) -> None:
        self._requests.finish(request)

    def remove(self, item: T) -> None:
        chain = self._chain_of.pop(item, None)
        if chain is not None:
            items = chain.items
            del items[item]
            if not items:
                del self._chains[chain]

    def victims(self) -> Iterator[T]:
        return chain.from_iterable(reversed(each.items) for each in self._chains)

    def oldest(self) -> T | None:
        return next(self.victims(), None)

    def __len__(self) -> int:
        return len(self._chain_of)

    def _leave(self, chain: _Chain[T], items: list[T]) -> None:
        if len(items) == len(chain.items):
            chain.items.clear()
        for item in items if chain.items else ():
            del chain.items[item]
        if not chain.items:
            del self._chains[chain]
