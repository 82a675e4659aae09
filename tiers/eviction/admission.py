"""Admission filters: decide which blocks a tier stores.

A filter avoids SSD writes for blocks that are never read.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from types import MappingProxyType
from typing import Protocol

from ..secondary_tier import NamespaceId
from ..stats.tenant_records import RecordsByTenant
from ..types import tenant_of

__all__ = ["ADMISSION", "DEFAULT_ADMISSION", "Admission", "SecondUse"]

MAX_REMEMBERED = 1 << 17
_BATCH = 1 / 64
"""A full filter forgets this part of its names at once."""


class Admission(Protocol):
    """Admission filter of a tier. Called once per use of a block that the tier does not have."""

    def admits(self, name: tuple[NamespaceId, bytes], user: Hashable) -> bool:
        """Returns whether to store a block that request `user` has used (None: unknown request)."""
        ...


class SecondUse:
    """Admits a block when a second request uses it (CacheLib: reject first).

    Remembers about 131,000 names; then the tenant with most loses its oldest ones.
    """

    def __init__(self, most: int = MAX_REMEMBERED) -> None:
        self._first_users = RecordsByTenant[tuple[NamespaceId, bytes], Hashable](most, batch=1 + int(most * _BATCH))

    def admits(self, name: tuple[NamespaceId, bytes], user: Hashable) -> bool:
        tenant = tenant_of(name[0])
        known = self._first_users.of(tenant)
        if name in known:
            return user is None or known[name] != user
        self._first_users.put(tenant, {name: user})
        return False


ADMISSION: Mapping[str, Callable[[], Admission] | None] = MappingProxyType({"all": None, "second_use": SecondUse})
"""Filters by their names in the configuration; None admits all blocks."""

DEFAULT_ADMISSION = "all"
