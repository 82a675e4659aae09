"""Interface of a key-value store on another host, as `RemoteTier` uses it, and its errors.

One `ObjectStore` is a client of the store. Each worker thread has its own, so that a large transfer
of one thread does not delay the calls of others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ..base import TierError

__all__ = ["ObjectStore", "StoreRefusedError", "StoreUnavailableError"]


class StoreUnavailableError(TierError):
    """The store did not answer before the deadline, or the connection failed."""


class StoreRefusedError(TierError):
    """The store answered with an error, for example because the user lacks a permission."""


class ObjectStore(Protocol):
    """Client of a store. One thread uses it; `close` may be called on another.

    Each call ends within the deadline that the store was opened with. All calls except `close`
    raise `StoreUnavailableError` and `StoreRefusedError`.
    """

    def exists(self, names: Sequence[bytes]) -> list[bool]:
        """Returns for each name whether the store has a value."""
        ...

    def get(self, names: Sequence[bytes], buffers: Sequence[memoryview]) -> list[memoryview | None]:
        """Returns the values, None for a missing one.

        There is one buffer per name. A value that fits into its buffer is a view of the buffer.
        """
        ...

    def put(self, values: Sequence[tuple[bytes, memoryview]], ttl_seconds: float) -> list[bool]:
        """Writes values under names that have none; keeps values that exist.

        Returns for each name whether the store has a value now. If not, the store has no memory
        for the value, and its settings forbid it to evict.
        """
        ...

    def renew(self, names: Sequence[bytes], ttl_seconds: float) -> None:
        """Starts the time to live of values again; ignores missing ones."""
        ...

    def delete_if_equal(self, name: bytes, value: memoryview) -> None:
        """Deletes a value unless it has changed, in one atomic step."""
        ...

    def ping(self) -> None:
        """Checks that the store answers."""
        ...

    def close(self) -> None:
        """Closes the connection."""
        ...
