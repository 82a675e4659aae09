"""An object store in memory, shared by several tiers of one process. For tests only."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from kvtier.tiers.remote.object_store import StoreUnavailableError
from kvtier.tiers.secondary_tier import Outcome

__all__ = ["MemoryStore", "StoreClient"]


class MemoryStore:
    """The values of one store, and its faults."""

    def __init__(self, capacity_bytes: int = 1 << 30) -> None:
        self.values: dict[bytes, bytes] = {}
        self.ttl_seconds: dict[bytes, float] = {}
        """Time to live at the last store or renewal."""
        self.capacity_bytes = capacity_bytes
        self.written_bytes = 0
        self.answers = threading.Event()
        """Cleared while the store is hanging: calls end at their deadline."""
        self.answers.set()
        self.is_up = True
        """If False, connections are refused."""
        self.calls = 0
        self.lock = threading.Lock()

    def client(self, deadline_seconds: float = 0.25) -> StoreClient:
        """Connects. Raises StoreUnavailableError."""
        if not self.is_up:
            raise StoreUnavailableError("connection refused")
        return StoreClient(self, deadline_seconds)


class StoreClient:
    """`ObjectStore` of one thread."""

    def __init__(self, store: MemoryStore, deadline_seconds: float) -> None:
        self._store = store
        self._deadline_seconds = deadline_seconds

    def exists(self, names: Sequence[bytes]) -> list[bool]:
        self._reach()
        assert all(names), "a user needs permission for each name"
        return [name in self._store.values for name in names]

    def get(
        self, names: Sequence[bytes], values: Sequence[Sequence[memoryview]], ttl_seconds: float
    ) -> list[int | None]:
        self._reach()
        sizes: list[int | None] = []
        for name, pieces in zip(names, values, strict=True):
            rest = self._store.values.get(name)
            sizes.append(None if rest is None else len(rest))
            if rest is None:
                continue
            self._store.ttl_seconds[name] = ttl_seconds
            for piece in pieces:
                some = rest[: len(piece)]
                piece[: len(some)] = some
                rest = rest[len(some) :]
        return sizes

    def put(
        self, names: Sequence[bytes], value_of: Callable[[int], Sequence[bytes | memoryview]], ttl_seconds: float
    ) -> list[Outcome]:
        self._reach()
        outcomes = []
        with self._store.lock:
            for number, name in enumerate(names):
                if name not in self._store.values:
                    value = b"".join(value_of(number))
                    if sum(map(len, self._store.values.values())) + len(value) > self._store.capacity_bytes:
                        outcomes.append(Outcome.NO_SPACE)
                        continue
                    self._store.values[name] = value
                    self._store.written_bytes += len(value)
                    self._store.ttl_seconds[name] = ttl_seconds
                outcomes.append(Outcome.DONE)
        return outcomes

    def renew(self, names: Sequence[bytes], ttl_seconds: float) -> list[bool]:
        self._reach()
        self._store.ttl_seconds.update(dict.fromkeys(names, ttl_seconds))
        return [name in self._store.values for name in names]

    def delete_if_equal(self, name: bytes, value: Sequence[bytes | memoryview]) -> None:
        self._reach()
        with self._store.lock:
            if self._store.values.get(name) == b"".join(value):
                del self._store.values[name]

    def ping(self) -> None:
        self._reach()

    def close(self) -> None:
        pass

    def _reach(self) -> None:
        self._store.calls += 1
        if not self._store.is_up:
            raise StoreUnavailableError("connection refused")
        started = time.monotonic()
        if not self._store.answers.wait(self._deadline_seconds):
            raise StoreUnavailableError(f"no answer within {time.monotonic() - started:g} s")
