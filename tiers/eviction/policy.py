"""Interface of eviction policies, which decide the order in which items are evicted.

A policy only orders items. The caller checks whether an item can be evicted, for example whether it
is pinned. The caller reports each use with the request, the time, and the items in chain order.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Any, ClassVar, Protocol, TypeVar

__all__ = ["EvictionPolicy", "Item", "T"]


class Item(Hashable, Protocol):
    """An item that a policy orders. Compared by identity."""

    policy_node: Any
    """State of the policy for this item; None before it is added and after it is removed."""

    @property
    def name(self) -> Hashable:
        """Identifies the item across evictions. The policy keeps the name as a ghost."""
        ...


T = TypeVar("T", bound=Item)


class EvictionPolicy(Protocol[T]):
    """Eviction order of distinct items. Called by the core, one call at a time; never raises.

    A policy stores at most four ghosts (names of evicted items) per item, or about a thousand
    ghosts if there are few items.
    """

    declines: ClassVar[bool]
    """Whether the caller does not store a new item that would be evicted first. If False, the
    caller stores every new item."""

    def use(self, items: Sequence[T], request: Hashable = None, now: float = 0.0) -> None:
        """Records that a request used these items, and adds new ones.

        Args:
            items: distinct, head first; in the chain they follow the request's earlier items.
                Repeated items are ignored.
            request: the request. If unknown (None), each call counts as a separate request.
            now: time in seconds. If all calls pass the same time, the policy counts uses instead.
        """

    def finish(self, request: Hashable) -> None:
        """Ends a request. After this call, another request may have the same id."""

    def remove(self, item: T) -> None:
        """Removes an item, possibly leaving a ghost; ignores unknown items."""

    def victims(self) -> Iterator[T]:
        """Yields every item in eviction order. No other method may be called while iterating.

        A new item may be the first victim, if the policy expects no reuse of it.
        """
        ...

    def oldest(self) -> T | None:
        """Returns an item with the earliest last use, or None if there are no items."""
        ...

    def __len__(self) -> int: ...
