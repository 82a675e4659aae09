"""Directory of packs: which packs have a block, in bounded memory. No I/O.

If the memory is full, the directory drops the oldest packs of the tenant that uses the most memory.
The store still has them.
"""

from __future__ import annotations

import heapq
import threading
from array import array
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..secondary_tier import NamespaceId
from ..types import TENANT_TAG_BYTES
from .pack_format import PackedValue, PackName

__all__ = ["KnownPack", "PackDirectory"]

ENTRY_BYTES = 140
"""Memory of one block: measured, for keys of 20 bytes. The key's bytes above 20 are added."""
PACK_BYTES = 400
"""Memory of one pack, apart from its blocks: measured."""
MAX_COPIES = 16
"""Limit of the packs that are known for one block. Those of the lowest ranks are not used."""


class KnownPack:
    """A pack and the places of its values. Does not change.

    `rank` orders the packs of a block: the highest one counts. It is a time, by default that of the
    name.
    """

    __slots__ = ("_offsets", "_sizes", "keys", "memory_bytes", "name", "namespace", "rank")

    def __init__(
        self, namespace: NamespaceId, name: PackName, values: Sequence[PackedValue], rank: float | None = None
    ) -> None:
        self.namespace = namespace
        self.name = name
        self.rank = name.written_at if rank is None else rank
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
        return self.rank < other.rank


@dataclass(slots=True)
class _Tenant:
    """Packs of one tenant."""

    by_age: list[KnownPack] = field(default_factory=list)
    memory_bytes: int = 0
    pack_count: int = 0
    dropped_until: float = 0.0


class PackDirectory:
    """Map from blocks to packs. Thread-safe."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._spaces: dict[NamespaceId, dict[bytes, KnownPack | list[KnownPack]]] = {}
        """Packs of each block: one, or several in ascending order."""
        self._tenants: dict[bytes, _Tenant] = {}
        self._paths: dict[str, KnownPack] = {}
        self.memory_bytes = 0

    def __contains__(self, path: str) -> bool:
        return path in self._paths

    def find(self, namespace: NamespaceId, key: bytes) -> KnownPack | None:
        """Returns the pack of a block with the highest rank."""
        found = self._spaces.get(namespace, {}).get(key)
        return found[-1] if isinstance(found, list) else found

    def find_other(self, namespace: NamespaceId, key: bytes, tried: Sequence[KnownPack]) -> KnownPack | None:
        """Returns the pack of a block with the highest rank among those that were not tried."""
        with self._lock:
            found = self._spaces.get(namespace, {}).get(key)
            packs = found if isinstance(found, list) else [found] if found else []
            return next((pack for pack in reversed(packs) if pack not in tried), None)

    def dropped_until(self, namespace: NamespaceId) -> float:
        """Returns the rank of the newest pack of the tenant that was dropped to free memory."""
        tenant = self._tenants.get(namespace[:TENANT_TAG_BYTES])
        return tenant.dropped_until if tenant else 0.0

    def add(self, pack: KnownPack) -> None:
        """Adds a pack. Drops old packs if the memory is full, perhaps this one."""
        with self._lock:
            if pack.name.path in self._paths:
                return
            self._paths[pack.name.path] = pack
            tenant = self._tenants.setdefault(pack.namespace[:TENANT_TAG_BYTES], _Tenant())
            heapq.heappush(tenant.by_age, pack)
            tenant.pack_count += 1
            tenant.memory_bytes += pack.memory_bytes
            self.memory_bytes += pack.memory_bytes
            space = self._spaces.setdefault(pack.namespace, {})
            for key in pack.keys:
                known = space.get(key)
                if known is None:
                    space[key] = pack
                elif isinstance(known, list):
                    insort(known, pack)
                    del known[:-MAX_COPIES]
                else:
                    space[key] = sorted((known, pack))
            while self.memory_bytes > self._limit_bytes:
                largest = max(self._tenants.values(), key=lambda each: each.memory_bytes)
                oldest = heapq.heappop(largest.by_age)
                if self._paths.get(oldest.name.path) is oldest:
                    largest.dropped_until = max(largest.dropped_until, oldest.rank)
                    self._remove(oldest)

    def forget(self, pack: KnownPack, key: bytes) -> None:
        """Forgets one block of a pack, because its value is damaged."""
        with self._lock:
            self._forget(self._spaces.get(pack.namespace, {}), pack, key)

    def forget_copy(self, pack: KnownPack, key: bytes) -> None:
        """Forgets one block of a pack that cannot be read, if another pack has the block."""
        with self._lock:
            space = self._spaces.get(pack.namespace, {})
            if isinstance(space.get(key), list):
                self._forget(space, pack, key)

    def drop(self, pack: KnownPack) -> None:
        """Drops a pack that the store no longer has."""
        with self._lock:
            if self._paths.get(pack.name.path) is pack:
                self._remove(pack)
            tenant = self._tenants[pack.namespace[:TENANT_TAG_BYTES]]
            if len(tenant.by_age) > 2 * tenant.pack_count + 100:
                tenant.by_age = [each for each in tenant.by_age if self._paths.get(each.name.path) is each]
                heapq.heapify(tenant.by_age)

    def drop_before(self, written_at: float) -> None:
        """Drops the packs that are older than this time."""
        with self._lock:
            for tenant in self._tenants.values():
                while tenant.by_age and tenant.by_age[0].rank < written_at:
                    oldest = heapq.heappop(tenant.by_age)
                    if self._paths.get(oldest.name.path) is oldest:
                        self._remove(oldest)

    def _remove(self, pack: KnownPack) -> None:
        del self._paths[pack.name.path]
        tenant = self._tenants[pack.namespace[:TENANT_TAG_BYTES]]
        tenant.memory_bytes -= pack.memory_bytes
        tenant.pack_count -= 1
        self.memory_bytes -= pack.memory_bytes
        space = self._spaces.get(pack.namespace, {})
        for key in pack.keys:
            self._forget(space, pack, key)
        if not space:
            self._spaces.pop(pack.namespace, None)

    @staticmethod
    def _forget(space: dict[bytes, KnownPack | list[KnownPack]], pack: KnownPack, key: bytes) -> None:
        known = space.get(key)
        if known is pack:
            del space[key]
        elif isinstance(known, list) and pack in known:
            rest = [each for each in known if each is not pack]
            # Another list, because `find` reads without the lock.
            space[key] = rest if len(rest) > 1 else rest[0]
