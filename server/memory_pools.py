"""Memory pools: which tenants have memory of their own in the CPU tier, and how much.

A client that maps shared memory sees all bytes of the pool that it maps. So each tenant whose
credentials permit shared memory gets a pool of its own when the server starts, and its clients map
only this pool. All other tenants use the common pool. Only callers that may act for any tenant can
map the common pool. No memory moves between pools while the server runs, because a GPU's driver
keeps the pages that a client has registered: copies would go on to pages that no other process has.

The size of a pool is the tenant's quota in the CPU tier. Tenants without a quota get equal parts of
the memory that is left, and so does the common pool if the configuration or the token file names
tenants that use it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from ..cuda.host.region import POOL_ALIGNMENT, HostRegion
from ..tiers.core.settings import CPU_TIER
from ..tiers.core.slot_allocator import extent_bytes_for
from ..tiers.eviction.quotas import Tenant
from .config.tenants import tenant_tag
from .telemetry.logs import get_logger

__all__ = ["MemoryLayout", "with_pools"]

_log = get_logger(__name__)

_UNNAMED = "(unnamed)"
"""Name, in figures and messages, of the memory of clients without a tenant."""


@dataclass(frozen=True, slots=True)
class MemoryLayout:
    """What the region of a server is like.

    Attributes:
        region_bytes: its size.
        pool_starts: offset at which each memory pool begins, the common one first.
        pool_owners: 16 bytes that differ for pools of other sizes or tenants.
    """

    region_bytes: int
    pool_starts: tuple[int, ...] = (0,)
    pool_owners: bytes = bytes(16)

    def create_region(self) -> HostRegion:
        """Raises `RegionError`."""
        return HostRegion.create(self.region_bytes, pool_starts=self.pool_starts)


def with_pools(
    tenants: Sequence[Tenant], sharing: Collection[str], region_bytes: int, *, has_others: bool
) -> tuple[list[Tenant], MemoryLayout]:
    """Returns the tenants, some with a memory pool, and the layout of the region.

    Args:
        tenants: those with a quota or limit.
        sharing: names of the tenants whose clients may map shared memory.
        region_bytes: size of the region.
        has_others: whether the credentials permit further tenants.

    A tenant gets no pool if the region is too small for the pools of all, or its limit for one.
    """
    known = {tenant.name: tenant for tenant in tenants}
    unit = max(extent_bytes_for(region_bytes), POOL_ALIGNMENT)
    common = [tenant.quotas.get(CPU_TIER, 0) for tenant in tenants if tenant.name not in sharing]
    own = [known.get(name) or Tenant(name or _UNNAMED, tenant_tag(name)) for name in sorted(sharing)]
    sizes = _sizes(
        own, region_bytes // unit - max(1, -(-sum(common) // unit)), unit, shares_rest=has_others or bool(common)
    )
    starts, begin = [0], (region_bytes // unit - sum(sizes.values())) * unit
    found = [tenant for tenant in tenants if tenant.name not in sizes]
    for tenant in own:
        if size := sizes.get(tenant.name):
            quotas = {**tenant.quotas, CPU_TIER: size * unit}
            found.append(replace(tenant, quotas=quotas, has_pool=True))
            starts.append(begin)
            begin += size * unit
    for name, size in sizes.items():
        _log.info("a tenant has memory of its own", tenant=name, bytes=size * unit)
    return found, MemoryLayout(region_bytes, tuple(starts), _owners(found, starts))


def _sizes(tenants: Sequence[Tenant], left: int, unit: int, *, shares_rest: bool) -> Mapping[str, int]:
    """Returns the sizes of pools in units, by the name of the tenant.

    `left`: number of units that pools can have. `shares_rest`: whether the common pool gets a part
    of what quotas leave.
    """
    sizes: dict[str, int] = {}
    left = max(0, left)
    rest = sum(not tenant.quotas.get(CPU_TIER) for tenant in tenants)
    for tenant in sorted(tenants, key=lambda each: not each.quotas.get(CPU_TIER)):
        quota, limit = tenant.quotas.get(CPU_TIER, 0), tenant.limits.get(CPU_TIER)
        wanted = quota // unit if quota else left // (rest + shares_rest)
        rest -= not quota
        if size := min(left, max(1, wanted), left if limit is None else limit // unit):
            sizes[tenant.name] = size
            left -= size
    return sizes


def _owners(tenants: Sequence[Tenant], pool_starts: Sequence[int]) -> bytes:
    digest = hashlib.blake2b(repr(tuple(pool_starts)).encode(), digest_size=16, person=b"kvtier.pools")
    for tenant in tenants:
        if tenant.has_pool:
            digest.update(tenant.tag)
    return digest.digest()
