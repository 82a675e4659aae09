"""Eviction history: why tiers dropped blocks, to explain later misses."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from ..negotiation import NamespaceId
from ..types import MissReason

__all__ = ["EvictionHistory", "history_size"]

MAX_REMEMBERED = 1 << 18
"""Limit of blocks in the history, about 170 bytes each. A block that is not in the history counts
as never stored."""

MIN_REMEMBERED = 1 << 14

_BYTES_PER_NAME = 16 << 10


def history_size(region_bytes: int) -> int:
    """Returns how many blocks to remember for a region: about 1 % of its memory."""
    return min(max(region_bytes // _BYTES_PER_NAME, MIN_REMEMBERED), MAX_REMEMBERED)


class EvictionHistory:
    """Reason per dropped block, in two generations; a full young generation replaces the old."""

    def __init__(self, most: int = MAX_REMEMBERED) -> None:
        self._most = most
        self._count = 0
        self._young: defaultdict[NamespaceId, dict[bytes, MissReason]] = defaultdict(dict)
        self._old: defaultdict[NamespaceId, dict[bytes, MissReason]] = defaultdict(dict)

    def record(self, namespace: NamespaceId, key: bytes, reason: MissReason) -> None:
        self.record_all(namespace, (key,), reason)

    def record_all(self, namespace: NamespaceId, keys: Iterable[bytes], reason: MissReason) -> None:
        young = self._young[namespace]
        before = len(young)
        young.update(dict.fromkeys(keys, reason))
        self._count += len(young) - before
        if self._count >= self._most // 2:
            self._old, self._young, self._count = self._young, defaultdict(dict), 0

    def reason_for(self, namespace: NamespaceId, key: bytes) -> MissReason | None:
        return self._young.get(namespace, {}).get(key) or self._old.get(namespace, {}).get(key)

    def reasons_for(self, namespace: NamespaceId, keys: Iterable[bytes], default: MissReason) -> list[MissReason]:
        """Returns the reason per block; `default` for an unknown block."""
        young, old = self._young.get(namespace, {}), self._old.get(namespace, {})
        if not young and not old:
            return [default for _ in keys]
        return [young.get(key) or old.get(key) or default for key in keys]
