"""Directory of packs: which pack has a block, in bounded memory. No I/O.

If the memory is full, the directory drops the oldest packs. The store still has them.
"""

from __future__ import annotations

import heapq
import threading
from array import array
from bisect import bisect_left
from collections.abc import Sequence

from ..base import NamespaceId
from .pack_format import PackedValue, PackName

__all__ = ["KnownPack", "PackDirectory"]

ENTRY_BYTES = 140
"""Memory of one block: measured, for keys of 20 bytes. The key's bytes above 20 are added."""
PACK_BYTES = 400
"""Memory of one pack, apart from its blocks: measured."""


class KnownPack:
    """A pack and the places of its values. Does not change."""

    __slots__ = ("_offsets", "_sizes", "keys", "memory_bytes", "name", "namespace")

    def __init__(self, namespace: NamespaceId, name: PackName, values: Sequence[PackedValue]) -> None:
        self.namespace = namespace
        self.name = name
        ordered = sorted(values, key=lambda value: value.key)
        self.keys = tuple(value.key for value in ordered)
        self._offsets = array("Q", [value.offset_bytes for value in ordered])
        self._sizes = array("Q", [value.nbytes for value in ordered])
        self.memory_bytes = PACK_BYTES + sum(ENTRY_BYTES + max(0, len(key) - 20) for key in self.keys)

    def place(self, key: bytes) -> PackedValue:
        """Returns the place of a block that the pack has."""
        at = bisect_left(self.keys, key)
        return PackedValue(self.keys[at], self._offsets[at], self._sizes[at])

    def __lt__(self, other: KnownPack) -> bool:
        return self.name.written_at < other.name.written_at


class PackDirectory:
    """Map from blocks to packs. Thread-safe. Of packs with the same block, the newest counts."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._spaces: dict[NamespaceId, dict[bytes, KnownPack]] = {}
        self._by_age: list[KnownPack] = []
        self._paths: dict[str, KnownPack] = {}
        self.memory_bytes = 0
        self.dropped_until = 0.0
        """Time of the newest pack that was dropped because the memory was full."""

    def find(self, namespace: NamespaceId, key: bytes) -> KnownPack | None:
        return self._spaces.get(namespace, {}).get(key)

    def add(self, pack: KnownPack) -> None:
        """Adds a pack. Drops the oldest packs if the memory is full, perhaps this one."""
        with self._lock:
            if pack.name.path in self._paths:
                return
            self._paths[pack.name.path] = pack
            heapq.heappush(self._by_age, pack)
            self.memory_bytes += pack.memory_bytes
            space = self._spaces.setdefault(pack.namespace, {})
            for key in pack.keys:
                known = space.get(key)
                if known is None or known < pack:
                    space[key] = pack
            while self.memory_bytes > self._limit_bytes and self._by_age:
                oldest = heapq.heappop(self._by_age)
                if self._paths.get(oldest.name.path) is oldest:
                    self.dropped_until = max(self.dropped_until, oldest.name.written_at)
                    self._remove(oldest)

    def forget(self, pack: KnownPack, key: bytes) -> None:
        """Forgets one block of a pack, because its value is damaged."""
        with self._lock:
            space = self._spaces.get(pack.namespace, {})
            if space.get(key) is pack:
                del space[key]

    def drop(self, pack: KnownPack) -> None:
        """Drops a pack that the store no longer has."""
        with self._lock:
            if self._paths.get(pack.name.path) is pack:
                self._remove(pack)
            if len(self._by_age) > 2 * len(self._paths) + 100:
                self._by_age = list(self._paths.values())
                heapq.heapify(self._by_age)

    def drop_before(self, written_at: float) -> None:
        """Drops the packs that are older than this time."""
        with self._lock:
            while self._by_age and self._by_age[0].name.written_at < written_at:
                oldest = heapq.heappop(self._by_age)
                if self._paths.get(oldest.name.path) is oldest:
                    self._remove(oldest)

    def _remove(self, pack: KnownPack) -> None:
        del self._paths[pack.name.path]
        self.memory_bytes -= pack.memory_bytes
        space = self._spaces.get(pack.namespace, {})
        for key in pack.keys:
            if space.get(key) is pack:
                del space[key]
        if not space:
            self._spaces.pop(pack.namespace, None)
