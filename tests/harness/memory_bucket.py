"""A bucket in memory, shared by several tiers of one process, with faults. For tests only."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import obstore
from obstore.store import MemoryStore

from kvtier.tiers.remote.bucket import Bucket, StoredObject, StoreFullError
from kvtier.tiers.remote.network_tier import RemoteLimits
from kvtier.tiers.remote.object_store import StoreUnavailableError
from kvtier.tiers.remote.pack_tier import PackTier
from kvtier.tiers.secondary_tier import TierError

__all__ = ["MemoryBucket", "MemoryPackTier", "pack_tier"]

T = TypeVar("T")


class MemoryBucket:
    """The objects of a store, and its faults."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.answers = threading.Event()
        """Cleared while the store is hanging: calls end at their deadline."""
        self.answers.set()
        self.is_up = True
        """If False, connections are refused."""
        self.is_full = False
        self.calls: list[str] = []
        """Names of the calls, in order."""
        self.before: Callable[[str, str], TierError | None] = lambda *_: None
        """Called before each read and write with its name and path; may return its error."""

    def paths(self) -> list[str]:
        return sorted(entry["path"] for chunk in obstore.list(self.store) for entry in chunk)

    def get(self, path: str) -> bytes:
        return bytes(obstore.get(self.store, path).bytes())

    def put(self, path: str, content: bytes) -> None:
        obstore.put(self.store, path, content)

    def delete(self, *paths: str) -> None:
        obstore.delete(self.store, list(paths))

    def client(self, deadline_seconds: float) -> Bucket:
        return _FaultyBucket(self, deadline_seconds)


class _FaultyBucket(Bucket):
    def __init__(self, memory: MemoryBucket, deadline_seconds: float) -> None:
        super().__init__(lambda _: memory.store, "", deadline_seconds)
        self._memory = memory

    def listed(self, folder: str, after: str, limit: int, before: str = "~") -> list[StoredObject]:
        self._memory.calls.append("list")
        return super().listed(folder, after, limit, before)

    def folders(self, folder: str) -> list[str]:
        self._memory.calls.append("folders")
        return super().folders(folder)

    def read(self, path: str, start: int, end: int) -> memoryview:
        self._before("read", path)
        return super().read(path, start, end)

    def write(self, path: str, content: memoryview) -> None:
        self._before("write", path)
        if self._memory.is_full:
            raise StoreFullError("the store is full")
        super().write(path, memoryview(bytes(content)))  # the store in memory keeps the buffer

    def _before(self, what: str, path: str) -> None:
        self._memory.calls.append(what)
        error = self._memory.before(what, path)
        if error is not None:
            raise error

    def _call(self, call: Callable[[Any], T], nbytes: int = 0) -> T:
        if not self._memory.is_up:
            raise StoreUnavailableError("connection refused")
        started = time.monotonic()
        if not self._memory.answers.wait(self._deadline_seconds):
            raise StoreUnavailableError(f"no answer within {time.monotonic() - started:g} s")
        return super()._call(call, nbytes)


class MemoryPackTier(PackTier):
    type = "memory-packs"


def pack_tier(memory: MemoryBucket, limits: RemoteLimits | None = None, **options: Any) -> MemoryPackTier:
    """Returns the tier of one server."""
    limits = limits or RemoteLimits()
    bucket = memory.client(limits.deadline_seconds)
    return MemoryPackTier("far", 1 << 30, node="store", bucket=bucket, limits=limits, **options)
