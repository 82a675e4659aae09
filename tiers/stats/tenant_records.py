"""Records of all tenants within one limit: the tenant with most loses its oldest ones.

So a tenant cannot push out the records of others.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from itertools import islice
from typing import Generic, TypeVar

__all__ = ["RecordsByTenant"]

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class RecordsByTenant(Generic[K, V]):
    """A dict per tenant, in the order of the latest change."""

    def __init__(self, most: int, *, batch: int = 1) -> None:
        """`batch`: number of records that a tenant loses at once.

        To find the oldest record takes 1 ns for each record that was removed before it.
        """
        self._most = most
        self._batch = batch
        self._by_tenant: dict[bytes, dict[K, V]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def tenants(self) -> list[bytes]:
        return [*self._by_tenant]

    def of(self, tenant: bytes) -> Mapping[K, V]:
        """Returns the records of a tenant, the latest last."""
        return self._by_tenant.get(tenant, {})

    def put(self, tenant: bytes, records: Mapping[K, V]) -> None:
        """Adds or replaces records, which then are the latest ones of the tenant."""
        if not records:
            return
        own = self._by_tenant.setdefault(tenant, {})
        before = len(own)
        for key in own.keys() & records.keys():
            del own[key]
        own.update(records)
        self._count += len(own) - before
        while self._count > self._most:
            largest = max(self._by_tenant, key=lambda each: len(self._by_tenant[each]))
            for key in list(islice(self._by_tenant[largest], self._batch)):
                self.pop(largest, key)

    def pop(self, tenant: bytes, key: K) -> V | None:
        """Removes and returns a record; None if it is unknown."""
        own = self._by_tenant.get(tenant, {})
        if key not in own:
            return None
        record = own.pop(key)
        self._count -= 1
        if not own:
            del self._by_tenant[tenant]
        return record
