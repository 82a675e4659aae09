"""Owners of the addresses that engines declare: each address belongs to the first tenant.

Routers take the events of a topic for those of the engine at its address. So without owners a
tenant could tell routers wrong things of another tenant's engine.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

__all__ = ["MAX_ADDRESSES", "TopicOwners", "is_address"]

KEEP_SECONDS: Final = 300.0
"""For so long a tenant without sessions keeps its address, because its engine may restart."""
MAX_ADDRESSES: Final = 64
"""Limit of the addresses of a tenant. Each block is published on all topics of its namespace."""

_ADDRESS = re.compile(r"[!-?A-~]{1,256}")
"""ASCII without spaces and `@`: routers find the address in a topic between two of these signs."""


def is_address(text: str) -> bool:
    """Returns whether an engine may declare this text as its address.

    The text must be 1 to 256 characters of ASCII, without spaces and `@`.
    """
    return _ADDRESS.fullmatch(text) is not None


class TopicOwners:
    """Owner and last use of each address. Tenants are tags. Pure: the caller reads the clock."""

    def __init__(self) -> None:
        self._owners: dict[str, tuple[bytes, float]] = {}

    def update(self, declared: Iterable[tuple[str, bytes]], now: float) -> set[tuple[str, bytes]]:
        """Returns which of the declared pairs of address and tenant may publish.

        `declared`: those of all open sessions, the oldest session first.
        """
        pairs = [(_normal(address), tenant) for address, tenant in declared]
        for address, tenant in pairs:
            if self._owner_of(address) == tenant:
                self._owners[address] = (tenant, now)
        for address, (_, used) in list(self._owners.items()):
            if now - used >= KEEP_SECONDS:
                del self._owners[address]
        full: set[bytes] = set()
        for address, tenant in pairs:
            if address in self._owners or tenant in full or not is_address(address):
                continue
            if self._has_room(tenant, now):
                self._owners[address] = (tenant, now)
            else:
                full.add(tenant)
        return {(address, tenant) for address, tenant in pairs if self._owner_of(address) == tenant}

    @staticmethod
    def pair(address: str, tenant: bytes) -> tuple[str, bytes]:
        """Returns the pair in the form of the result of `update`."""
        return _normal(address), tenant

    def _owner_of(self, address: str) -> bytes | None:
        owner, _ = self._owners.get(address, (None, 0.0))
        return owner

    def _has_room(self, tenant: bytes, now: float) -> bool:
        """If necessary, drops the address that the tenant has not used for the longest time."""
        used = {address: at for address, (owner, at) in self._owners.items() if owner == tenant}
        if len(used) < MAX_ADDRESSES:
            return True
        oldest = min(used, key=used.__getitem__)
        if used[oldest] < now:
            del self._owners[oldest]
        return used[oldest] < now


def _normal(address: str) -> str:
    """Names of hosts may be written in capital letters."""
    return address.lower()
