"""Interface of a key-value store on another host, as `RemoteTier` uses it, and its errors.

A store has one or more nodes. One `ObjectStore` is a client of one node. Each worker thread has its
own, so that a large transfer of one thread does not delay the calls of others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ..secondary_tier import Outcome, TierError

__all__ = [
    "UNREADABLE_BYTES",
    "NotAskedError",
    "ObjectStore",
    "OneNode",
    "StoreRefusedError",
    "StoreUnavailableError",
    "Topology",
]

UNREADABLE_BYTES = 1 << 62
"""Size of a value that a client cannot receive, for example because it is no string."""


class StoreUnavailableError(TierError):
    """The store did not answer before the deadline, or the connection failed."""


class NotAskedError(StoreUnavailableError):
    """The store was not asked, because its circuit breaker is open."""


class StoreRefusedError(TierError):
    """The store answered with an error, for example because the user lacks a permission."""


class ObjectStore(Protocol):
    """Client of a node. One thread uses it; `close` may be called on another.

    Each call ends within the deadline that the store was opened with. All calls except `close`
    raise `StoreUnavailableError` and `StoreRefusedError`. A value is a sequence of pieces, so that
    it is sent from and received into the memory of a block.
    """

    def exists(self, names: Sequence[bytes]) -> list[bool]:
        """Returns for each name whether the store has a value."""
        ...

    def get(
        self, names: Sequence[bytes], values: Sequence[Sequence[memoryview]], ttl_seconds: float
    ) -> Iterable[int | None]:
        """Fills the pieces of values in order, and starts their time to live again.

        Yields the sizes of the stored values, None for a missing one, `UNREADABLE_BYTES` for one
        that the client cannot receive. If a value is larger than its
        pieces, their content is undefined. A value can be used as soon as its size is yielded,
        while the store sends the next ones. The caller takes all sizes before the next call.
        """
        ...

    def put(
        self, names: Sequence[bytes], value_of: Callable[[int], Sequence[bytes | memoryview]], ttl_seconds: float
    ) -> list[Outcome]:
        """Writes values under names that have none; keeps values that exist.

        `value_of(number)` returns the value for `names[number]`. It is called while the store
        receives earlier values, and again if the call is repeated on a new connection.

        The outcome is DONE if the store has a value now. It is NO_SPACE if the store has no memory
        for the value, and its settings forbid it to evict.
        """
        ...

    def renew(self, names: Sequence[bytes], ttl_seconds: float) -> list[bool]:
        """Starts the time to live of values again; returns as `exists`."""
        ...

    def delete_if_equal(self, name: bytes, value: Sequence[bytes | memoryview]) -> None:
        """Deletes a value unless it has changed, in one atomic step."""
        ...

    def ping(self) -> None:
        """Checks that the node answers."""
        ...

    def close(self) -> None:
        """Closes the connection."""
        ...


class Topology(Protocol):
    """Nodes of a store, by their addresses. Thread-safe."""

    def nodes(self) -> list[str]:
        """Returns all nodes that have values. Raises `StoreUnavailableError` and others."""
        ...

    def nodes_of(self, names: Sequence[bytes]) -> list[str | None]:
        """Returns the node of each name, None if no node is responsible. Raises as `nodes`."""
        ...

    def connect(self, node: str) -> ObjectStore:
        """Returns a new client of a node. Raises as `nodes`."""
        ...

    def failed(self, node: str) -> None:
        """Reports that a node does not answer. The nodes may have changed."""
        ...


@dataclass(frozen=True, slots=True)
class OneNode:
    """`Topology` of a store with one address."""

    address: str
    open_client: Callable[[], ObjectStore]

    def nodes(self) -> list[str]:
        return [self.address]

    def nodes_of(self, names: Sequence[bytes]) -> list[str | None]:
        return [self.address] * len(names)

    def connect(self, node: str) -> ObjectStore:
        return self.open_client()

    def failed(self, node: str) -> None:
        pass
