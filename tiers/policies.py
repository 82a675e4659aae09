"""Eviction policies: in which order a tier parts with what it holds.

A policy orders items and nothing else; whether an item may go (it may be pinned) is the caller's question.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, Protocol, TypeVar

__all__ = ["LRU", "POLICIES", "EvictionPolicy"]

T = TypeVar("T", bound=Hashable)


class EvictionPolicy(Protocol[T]):
    """An order of eviction over distinct items."""

    def insert(self, item: T) -> None:
        """Takes in an item that is new."""

    def touch(self, item: T) -> None:
        """Takes note that an item was used."""

    def remove(self, item: T) -> None:
        """Forgets an item."""

    def victims(self) -> Iterator[T]:
        """Yields the items, the one to go first first. Nothing else may be called while iterating."""
        ...

    def __len__(self) -> int:
        """Number of items."""
        ...


class LRU(Generic[T]):
    """Least recently used first (B4.9)."""

    def __init__(self) -> None:
        self._order: OrderedDict[T, None] = OrderedDict()

    def insert(self, item: T) -> None:
        """Puts it last in line."""
        self._order[item] = None

    def touch(self, item: T) -> None:
        """Puts it last in line again."""
        self._order.move_to_end(item)

    def remove(self, item: T) -> None:
        """Takes it out of the line."""
        del self._order[item]

    def victims(self) -> Iterator[T]:
        """Yields from the head of the line."""
        return iter(self._order)

    def __len__(self) -> int:
        return len(self._order)


POLICIES: dict[str, Callable[[], EvictionPolicy]] = {"lru": LRU}  # type: ignore[type-arg]
"""The policies that a tier can be configured with."""
