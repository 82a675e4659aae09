"""Tenant quotas, and the fair-share choice of victims.

A quota is a guarantee, not a limit: every tenant may use free space. To make room, the tier evicts
items of the share that is furthest above its quota. This can be the share that needs the room. A
share within its quota loses nothing to other tenants. All tenants without a quota or limit use one
default share ("rest") with quota 0.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from ..secondary_tier import NamespaceId
from ..types import REST, TENANT_TAG_BYTES

__all__ = ["QuotaError", "Quotas", "RetentionBudget", "Tenant", "TenantShare", "budgets_of", "pick_victims"]

T = TypeVar("T")


class QuotaError(ValueError):
    """The quotas of a tier exceed its capacity."""

    def __init__(self, tier: str, quota_bytes: int, capacity_bytes: int) -> None:
        super().__init__(f"tier {tier}: the quotas add up to {quota_bytes} bytes, but the tier has {capacity_bytes}")
        self.tier = tier
        self.quota_bytes = quota_bytes
        self.capacity_bytes = capacity_bytes


@dataclass(frozen=True, slots=True)
class Tenant:
    """Quotas and limits of a tenant, in bytes per tier name.

    Attributes:
        name: for messages and metrics.
        tag: prefix of the ids of its namespaces.
        quotas: guaranteed bytes; default 0.
        limits: upper limit in bytes; default: no limit.
        has_pool: whether its quota of the CPU tier is a memory pool of its own, which no other
            tenant uses.
    """

    name: str
    tag: bytes
    quotas: Mapping[str, int] = field(default_factory=dict)
    limits: Mapping[str, int] = field(default_factory=dict)
    has_pool: bool = False


class RetentionBudget:
    __slots__ = ("bound", "used")

    def __init__(self, bound: int) -> None:
        self.bound = bound
        self.used = 0

    @property
    def is_over(self) -> bool:
        return self.used > self.bound


class TenantShare:
    """Use of one tier, in bytes, by one tenant or by all tenants without a quota or limit."""

    __slots__ = ("budget", "busy", "limit", "name", "pool", "quota", "retained", "used")

    def __init__(self, name: str, quota: int, limit: int | None, budget: RetentionBudget, pool: int = 0) -> None:
        self.name = name
        self.quota = quota
        self.limit = limit
        self.pool = pool
        """Number of the memory pool of its blocks in the CPU tier; 0 is the common one."""
        self.budget = budget
        """Limit of retained bytes. Tenants without a quota share one budget."""
        self.used = 0
        self.retained = 0
        self.busy = 0
        """Bytes of items that are not retained and not evictable, because a store or load runs.
        Always 0 in the CPU tier."""

    @property
    def evictable(self) -> int:
        return self.used - self.retained - self.busy

    @property
    def excess(self) -> int:
        """Bytes above the quota; negative if the share uses less than its quota."""
        return self.used - self.quota

    def over_limit(self, nbytes: int) -> int:
        """Returns by how many bytes the share would exceed its limit after adding `nbytes`."""
        return 0 if self.limit is None else max(0, self.used + nbytes - self.limit)


class Quotas:
    """The tenant shares of one tier; the default share is the first."""

    def __init__(
        self, tier: str, capacity_bytes: int, tenants: Sequence[Tenant] = (), *, retained_part: float = 0.5
    ) -> None:
        """`retained_part`: how much may be retained, as a fraction of each quota and of the rest.

        Raises QuotaError if the quotas exceed the capacity, ValueError for an invalid limit or tag.
        """
        pools = {tenant.tag: number for number, tenant in enumerate(filter(_has_pool, tenants), start=1)}
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
                tenant.name,
                quota,
                limit,
                RetentionBudget(int(quota * retained_part)) if quota else common,
                pools.get(tenant.tag, 0),
            )
            self._by_tag[tenant.tag] = share
            self._all.append(share)
        per_pool = Counter(share.pool for share in self._all)
        self._only_shares = {share.pool: share for share in self._all if per_pool[share.pool] == 1}

    def of(self, namespace: NamespaceId) -> TenantShare:
        return self._by_tag.get(namespace[:TENANT_TAG_BYTES], self.rest)

    def only_share_of(self, pool: int) -> TenantShare | None:
        """Returns the share of a memory pool; None if several shares use it."""
        return self._only_shares.get(pool)

    def __iter__(self) -> Iterator[TenantShare]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)


def _has_pool(tenant: Tenant) -> bool:
    return tenant.has_pool


def pick_victims(
    taker: TenantShare, wanted: int, queues: Sequence[tuple[TenantShare, Iterator[T]]], size: Callable[[T], int]
) -> list[T]:
    """Returns victims that free `wanted` bytes for a share, as far as possible.

    Args:
        taker: the share that needs room. The wanted bytes already count as used by this share.
        wanted: number of bytes to free.
        queues: evictable items per share, next victim first; at most one iterator per share.
        size: returns the bytes that an item frees.
    """
    spare = [share.excess + (wanted if share is taker else 0) for share, _ in queues]
    # The taker goes first among shares with the same excess.
    heap = [(-spare[n], share is not taker, n) for n, (share, _) in enumerate(queues) if share is taker or spare[n] > 0]
    heapq.heapify(heap)
    chosen: list[T] = []
    while heap and wanted > 0:
        _, is_other, number = heapq.heappop(heap)
        next_spare = -heap[0][0] if heap else -math.inf
        if not (is_other or heap):  # only the taker's items are left
            return chosen + _enough(wanted, queues[number][1], size)
        for item in queues[number][1]:
            nbytes = size(item)
            if is_other and spare[number] < nbytes:
                break  # the share would fall below its quota
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
    """Returns the first items that free `wanted` bytes, or all."""
    chosen = []
    for item in items:
        chosen.append(item)
        wanted -= size(item)
        if wanted <= 0:
            break
    return chosen


def budgets_of(shares: Sequence[TenantShare], capacity_bytes: int, part: float) -> dict[TenantShare, RetentionBudget]:
    """Returns a budget per share: `part` of the quota, or of the memory without quota."""
    common = RetentionBudget(int((capacity_bytes - sum(share.quota for share in shares)) * part))
    return {share: RetentionBudget(int(share.quota * part)) if share.quota else common for share in shares}
