"""Interface of eviction policies: the order in which items are evicted.

A policy only orders items. The caller checks whether an item may be evicted (it may be pinned). A
policy is told which items a request used, in chain order, and which uses belong to one request.
There is no clock: policies count uses.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

__all__ = ["EvictionPolicy", "Item", "T"]


class Item(Hashable, Protocol):
    """An item that a policy orders. Compared by identity."""

    policy_node: Any
    """State of the policy for this item; None before it is added and after it is removed."""

    @property
    def name(self) -> Hashable:
        """Identifies the item across evictions; ghosts are stored under it."""
        ...


T = TypeVar("T", bound=Item)


class EvictionPolicy(Protocol[T]):
    """An eviction order over distinct items. Called by the core, one call at a time; never raises.

    Memory is bounded by the number of items: there are at most four times as many ghosts (names of
    evicted items), or about a thousand if there are few items.
    """

    def use(self, items: Sequence[T], request: Hashable = None) -> None:
        """Records that a request used these items, and adds new ones.

        Args:
            items: distinct, head first. They follow the request's earlier items in the chain;
                repeated items are ignored.
            request: the request; None if unknown, which counts as a request of its own.
        """

    def finish(self, request: Hashable) -> None:
        """Ends a request: its name may be reused."""

    def remove(self, item: T) -> None:
        """Removes an item, possibly leaving a ghost; ignores unknown items."""

    def victims(self) -> Iterator[T]:
        """Yields every item in eviction order. No other method may be called while iterating.

        A new item may come first: then the policy does not consider it worth keeping.
        """
        ...

    def oldest(self) -> T | None:
        """Returns an item with the earliest last use, or None if there are no items."""
        ...

    def __len__(self) -> int: ...
