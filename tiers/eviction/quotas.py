"""Shares: how much of a tier each tenant is guaranteed, and at whose cost room is made.

A quota is a guarantee and not a border: anybody may use what is free. When room is needed, it is taken from the share that
is the furthest above its quota, which may be the taker's own; never from one that would be left with less than its quota.
So a flood costs those who flood. Tenants without an entry of their own share "the rest", whose quota is 0.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from ..base import NamespaceId
from ..types import REST, TENANT_TAG_BYTES

__all__ = ["QuotaError", "Quotas", "RetentionBudget", "Tenant", "TenantShare", "pick_victims"]


T = TypeVar("T")


class QuotaError(ValueError):
    """The quotas of a tier add up to more than it has."""

    def __init__(self, tier: str, quota_bytes: int, capacity_bytes: int) -> None:
        super().__init__(f"tier {tier}: the quotas add up to {quota_bytes} bytes, it has {capacity_bytes}")
        self.tier = tier
        self.quota_bytes = quota_bytes
        self.capacity_bytes = capacity_bytes


@dataclass(frozen=True, slots=True)
class Tenant:
    """What a tenant may have, in bytes per name of a tier.

    Attributes:
        name: for people.
        tag: what the ids of its namespaces begin with.
        quotas: what it is guaranteed; nothing of a tier that is not named.
        limits: the most that it may hold; all of a tier that is not named.
    """

    name: str
    tag: bytes
    quotas: Mapping[str, int] = field(default_factory=dict)
    limits: Mapping[str, int] = field(default_factory=dict)


class RetentionBudget:
    """How many bytes may be retained: for a while they make no room for anybody."""

    __slots__ = ("bound", "used")

    def __init__(self, bound: int) -> None:
        self.bound = bound
        self.used = 0


class TenantShare:
    """What one tenant, or the rest, has of one tier. Counted by the tier, in bytes."""

    __slots__ = ("budget", "busy", "limit", "name", "quota", "retained", "used")

    def __init__(self, name: str, quota: int, limit: int | None, budget: RetentionBudget) -> None:
        self.name = name
        self.quota = quota
        self.limit = limit
        self.budget = budget
        """What it may retain: a part of its own quota, or, without one, of what is nobody's quota, with others like it."""
        self.used = 0
        self.retained = 0
        self.busy = 0
        """What is not retained and may not go all the same, for its store or a load of it runs. Not counted in the CPU tier."""

    @property
    def evictable(self) -> int:
        """What may go now."""
        return self.used - self.retained - self.busy

    @property
    def excess(self) -> int:
        """By how much it is above its quota; negative where it is below."""
        return self.used - self.quota

    def over_limit(self, nbytes: int) -> int:
        """Returns by how much it would be above its limit with so many bytes more."""
        return 0 if self.limit is None else max(0, self.used + nbytes - self.limit)


class Quotas:
    """The shares of one tier, the rest's first."""

    def __init__(
        self, tier: str, capacity_bytes: int, tenants: Iterable[Tenant] = (), *, retained_part: float = 0.5
    ) -> None:
        """`retained_part` bounds what may be retained, as a part of each quota and of what is nobody's quota.

        Raises:
            QuotaError: the quotas do not fit the tier.
            ValueError: a limit is below its quota, or two tenants have one tag.
        """
        tenants = [tenant for tenant in tenants if tier in tenant.quotas or tier in tenant.limits]
        free = capacity_bytes - sum(tenant.quotas.get(tier, 0) for tenant in tenants)
        if free < 0:
            raise QuotaError(tier, capacity_bytes - free, capacity_bytes)
        common = RetentionBudget(int(free * retained_part))
        self.rest = TenantShare(REST, 0, None, common)
        self._all = [self.rest]
        self._by_tag: dict[bytes, TenantShare] = {}
        for tenant in tenants:
            quota, limit = tenant.quotas.get(tier, 0), tenant.limits.get(tier)
            if limit is not None and limit < quota:
                raise ValueError(f"tier {tier}: the limit of tenant {tenant.name} is less than its quota")
            if tenant.tag in self._by_tag:
                raise ValueError(f"tenants {tenant.name} and {self._by_tag[tenant.tag].name} have the same tag")
            share = TenantShare(
                tenant.name, quota, limit, RetentionBudget(int(quota * retained_part)) if quota else common
            )
            self._by_tag[tenant.tag] = share
            self._all.append(share)

    def of(self, namespace: NamespaceId) -> TenantShare:
        """Returns the share that a namespace belongs to."""
        return self._by_tag.get(namespace[:TENANT_TAG_BYTES], self.rest)

    def __iter__(self) -> Iterator[TenantShare]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)


def pick_victims(
    taker: TenantShare, wanted: int, queues: Sequence[tuple[TenantShare, Iterator[T]]], size: Callable[[T], int]
) -> list[T]:
    """Returns who makes room for `wanted` bytes of the taker, as far as that can be had.

    Args:
        taker: for whom it is; what it wants counts as its own already.
        wanted: bytes.
        queues: per share what may go, the next first; not changed while this runs. At most one of each share.
        size: returns the bytes that an item frees.
    """
    spare = [share.excess + (wanted if share is taker else 0) for share, _ in queues]
    # Where several are above by as much, the taker goes first.
    heap = [(-spare[n], share is not taker, n) for n, (share, _) in enumerate(queues) if share is taker or spare[n] > 0]
    heapq.heapify(heap)
    chosen: list[T] = []
    while heap and wanted > 0:
        _, is_other, number = heapq.heappop(heap)
        next_spare = -heap[0][0] if heap else -math.inf
        if not (is_other or heap):  # it pays for itself, and there is nobody to take turns with
            return chosen + _enough(wanted, queues[number][1], size)
        for item in queues[number][1]:
            nbytes = size(item)
            if is_other and spare[number] < nbytes:
                break  # or it would be left with less than its quota
            chosen.append(item)
            wanted -= nbytes
            spare[number] -= nbytes
            if wanted <= 0:
                return chosen
            if spare[number] < next_spare:
                heapq.heappush(heap, (-spare[number], is_other, number))
                break
    return chosen


def _enough(wanted: int, items: Iterable[T], size: Callable[[T], int]) -> list[T]:
    """Returns as many of the first items as free so many bytes, or all."""
    chosen = []
    for item in items:
        chosen.append(item)
        wanted -= size(item)
        if wanted <= 0:
            break
    return chosen
