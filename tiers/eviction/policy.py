"""The contract of an eviction policy: in which order a tier parts with what it holds.

A policy orders items and nothing else; whether an item may go (it may be pinned) is the caller's question. What it is told is
what the core knows: which items a request used, in the order of their chain, and which uses belong to one request.
There is no clock: policies count uses.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

__all__ = ["EvictionPolicy", "Item", "T"]


class Item(Hashable, Protocol):
    """What a policy orders. Equal to itself only."""

    policy_node: Any
    """What the policy that orders it keeps with it; None before it comes, and when it has gone."""

    @property
    def name(self) -> Hashable:
        """What stays the same when the item goes and comes again; ghosts are kept under it."""
        ...


T = TypeVar("T", bound=Item)


class EvictionPolicy(Protocol[T]):
    """An order of eviction over distinct items. Called by the core only, one call at a time; raises nothing.

    Memory is bounded by the number of items: ghosts (names of items that went) are at most four times as many, and
    a thousand or so where there are few items.
    """

    def use(self, items: Sequence[T], request: Hashable = None) -> None:
        """Takes note that a request used these, and takes in those that are new.

        Args:
            items: distinct, head first. They follow in the chain what the same request used before; those that it used
                before may be among them, and say nothing new.
            request: who used them; None where that is not known, which makes it a request of its own.
        """

    def finish(self, request: Hashable) -> None:
        """Takes note that a request is over: its name may come again for another one."""

    def remove(self, item: T) -> None:
        """Forgets an item, but for a ghost; one that is not known is fine."""

    def victims(self) -> Iterator[T]:
        """Yields every item, the one to go first first. Nothing else may be called while iterating.

        An item that was just taken in may be the first: that is how a policy says that it is not worth keeping.
        """
        ...

    def oldest(self) -> T | None:
        """Returns an item whose last use lies the furthest back, or None if there are no items."""
        ...

    def __len__(self) -> int:
        """Number of items."""
        ...
