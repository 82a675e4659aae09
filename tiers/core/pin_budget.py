"""Bound of the bytes that a tenant's leases, holds and stores pin; shares of a common budget.

No tenant has a reservation in such a budget.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from ..eviction.quotas import Quotas
from ..secondary_tier import NamespaceId
from ..types import tenant_of
from .block import Block

__all__ = ["PinBudget", "add_to_counter", "affordable"]


def affordable(sizes: Iterable[int], *, free: int, own: int) -> int:
    """Returns how many of the leading items one tenant may take, which already has `own` bytes.

    With each item it has at most as much as is free afterwards: alone a half of the budget, so that
    another tenant always finds room. Its first item may take all that is free, because an item can
    be larger than a share.
    """
    count = 0
    for nbytes in sizes:
        free -= nbytes
        if free < 0 or (own and own + nbytes > free):
            break
        own += nbytes
        count += 1
    return count


def add_to_counter(counter: Counter[bytes], tenant: bytes, change: int) -> None:
    """Adds `change` to the number of a tenant. The counter has no entry for 0."""
    counter[tenant] = left = counter.get(tenant, 0) + change
    if not left:
        counter.pop(tenant)


class PinBudget:
    """Limit of the bytes of the CPU tier that leases, stores and holds of one tenant pin.

    Leases pin at most the part `leased_part` of the tenant's quota, or of the space without quotas.
    Stores pin at most the tenant's quota, or this part of the space without quotas if that is more.
    Together with holds they pin at most half of the rest of this space more. So leases leave room
    for the tenant's own stores, and all of them leave room for other tenants.
    """

    def __init__(
        self,
        shares: Quotas,
        region_bytes: int,
        leased_part: float,
        leased: Mapping[bytes, int],
        held: Counter[bytes],
    ) -> None:
        """`leased`: bytes of the blocks that leases pin, by the tag of the tenant.

        `held`: bytes of the blocks with `Block.held` and without a lease. Both count a block once.
        """
        self.stored: Counter[bytes] = Counter()
        """Bytes of the slots of stores in flight and in quarantine, by the tag of the tenant."""
        self.is_limited = leased_part < 1
        self._shares = shares
        self._part = leased_part
        self._free_bytes = region_bytes - sum(share.quota for share in shares)
        self._leased = leased
        self.held = held

    def begin_hold(self, block: Block) -> None:
        """Called when the first hold, or a store that runs in slices, pins a block."""
        block.held += 1
        if block.held == 1 and not block.leases:
            self.held[tenant_of(block.namespace)] += block.allocated_bytes

    def end_hold(self, block: Block) -> None:
        """Called when no hold pins a block any more, or at the end of a store's slices."""
        block.held -= 1
        if not block.held and not block.leases:
            add_to_counter(self.held, tenant_of(block.namespace), -block.allocated_bytes)

    def is_over(self, namespace: NamespaceId) -> bool:
        """Returns whether the tenant pins more than leases, stores and holds may pin together."""
        return self.is_limited and self._left_for_all(namespace) < 0

    def lease_bound(self, namespace: NamespaceId) -> int:
        return int(self._part * (self._shares.of(namespace).quota or self._free_bytes))

    def left_for_leases(self, namespace: NamespaceId) -> int:
        bound = self.lease_bound(namespace) - self._leased.get(tenant_of(namespace), 0)
        return min(bound, self._left_for_all(namespace))

    def left_for_slices(self, namespace: NamespaceId) -> int:
        """Returns how many bytes of present blocks stores may pin more between their slices."""
        tenant = tenant_of(namespace)
        return self.lease_bound(namespace) - self._leased.get(tenant, 0) - self.held.get(tenant, 0)

    def left_for_stores(self, namespace: NamespaceId) -> int:
        own = self._bound(namespace, self._part) - self.stored.get(tenant_of(namespace), 0)
        return min(own, self._left_for_all(namespace))

    def _left_for_all(self, namespace: NamespaceId) -> int:
        tenant = tenant_of(namespace)
        bound = self._bound(namespace, (1 + self._part) / 2)
        return bound - self._leased.get(tenant, 0) - self.held.get(tenant, 0) - self.stored.get(tenant, 0)

    def _bound(self, namespace: NamespaceId, part: float) -> int:
        return max(self._shares.of(namespace).quota, int(part * self._free_bytes))
