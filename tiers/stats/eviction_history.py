"""Eviction history: why tiers dropped blocks, to explain later misses."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import repeat

from ..negotiation import NamespaceId
from ..types import MissReason, tenant_of
from .tenant_records import RecordsByTenant

__all__ = ["EvictionHistory", "history_size"]

MAX_REMEMBERED = 1 << 18
"""Limit of blocks in the history, about 220 bytes each. A block that is not in the history counts
as never stored."""

MIN_REMEMBERED = 1 << 14

_BYTES_PER_NAME = 16 << 10

_BATCHES = 64
"""A full history drops this part of itself at once."""


def history_size(region_bytes: int) -> int:
    """Returns how many blocks to remember for a region: about 1.4 % of its memory."""
    return min(max(region_bytes // _BYTES_PER_NAME, MIN_REMEMBERED), MAX_REMEMBERED)


class EvictionHistory:
    """Reason per dropped block."""

    def __init__(self, most: int = MAX_REMEMBERED) -> None:
        self._reasons = RecordsByTenant[tuple[NamespaceId, bytes], MissReason](most, batch=1 + most // _BATCHES)

    def record(self, namespace: NamespaceId, key: bytes, reason: MissReason) -> None:
        self.record_all(namespace, (key,), reason)

    def record_all(self, namespace: NamespaceId, keys: Iterable[bytes], reason: MissReason) -> None:
        names = zip(repeat(namespace), keys, strict=False)
        self._reasons.put(tenant_of(namespace), dict.fromkeys(names, reason))

    def reason_for(self, namespace: NamespaceId, key: bytes) -> MissReason | None:
        return self._reasons.of(tenant_of(namespace)).get((namespace, key))

    def reasons_for(self, namespace: NamespaceId, keys: Iterable[bytes], default: MissReason) -> list[MissReason]:
        """Returns the reason per block; `default` for an unknown block."""
        known = self._reasons.of(tenant_of(namespace))
        if not known:
            return [default for _ in keys]
        return [known.get(name, default) for name in zip(repeat(namespace), keys, strict=False)]
