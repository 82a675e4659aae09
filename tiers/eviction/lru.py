"""Least recently used, by chains."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from itertools import groupby
from typing import Generic

from .open_requests import OpenRequests
from .policy import T

__all__ = ["LRU"]


class _Chain(Generic[T]):
    """What one request used, head first, less what later requests used as well."""

    __slots__ = ("items",)

    def __init__(self) -> None:
        self.items: dict[T, None] = {}


class LRU(Generic[T]):
    """The chain of the least recent request goes first, tail before head (B4.9)."""

    def __init__(self) -> None:
        self._chain_of: dict[T, _Chain[T]] = {}
        self._chains: OrderedDict[_Chain[T], None] = OrderedDict()
        self._requests = OpenRequests[_Chain[T]](_Chain)

    def use(self, items: Sequence[T], request: Hashable = None) -> None:
        """Puts the request's chain last in line."""
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
        """Forgets the request's name."""
        self._requests.finish(request)

    def remove(self, item: T) -> None:
        """Takes it out of the line."""
        chain = self._chain_of.pop(item, None)
        if chain is not None:
            items = chain.items
            del items[item]
            if not items:
                del self._chains[chain]

    def victims(self) -> Iterator[T]:
        """Yields from the head of the line."""
        for chain in self._chains:
            yield from reversed(chain.items)

    def oldest(self) -> T | None:
        """Returns the tail of the chain at the head of the line."""
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
