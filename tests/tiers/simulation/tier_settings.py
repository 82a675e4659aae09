"""Random settings of tiers (policies, TTLs, quotas, limits), and a model of their effects."""

from __future__ import annotations

from itertools import accumulate
from random import Random

from kvtier.tiers.core.block import Block
from kvtier.tiers.core.manager import TierManager
from kvtier.tiers.core.settings import CPU_TIER, TierSettings
from kvtier.tiers.eviction import POLICIES
from kvtier.tiers.eviction.admission import ADMISSION
from kvtier.tiers.eviction.quotas import Tenant
from kvtier.tiers.negotiation import NamespaceId
from kvtier.tiers.types import TENANT_TAG_BYTES

from . import inspect as inside
from .model import EXTENT, SPECS

__all__ = ["TierSettingsModel", "random_settings", "tenant_of"]

TTL_SECONDS = (20.0, 100.0, 5000.0)


def tenant_of(namespace: NamespaceId) -> str:
    return namespace[:1].decode()


def random_settings(rng: Random, capacities: dict[str, int], pools: Random) -> TierSettings:
    """Returns random policies, TTLs, and tenants with quotas, limits and memory pools.

    `pools`: random numbers for the memory pools.
    """
    has_pools = pools.random() < 0.3
    eviction = {tier: rng.choice(list(POLICIES)) for tier in capacities if rng.random() < 0.9}
    ttl = {tier: rng.choice(TTL_SECONDS) for tier in capacities if rng.random() < 0.2}
    tenants = []
    for spec in SPECS:
        quotas = {tier: size // rng.choice((3, 4, 8)) for tier, size in capacities.items() if rng.random() < 0.5}
        limits = {tier: size // 2 for tier, size in capacities.items() if rng.random() < 0.2}
        is_tenant, extents = rng.random() < 0.4, capacities[CPU_TIER] // pools.choice((3, 4, 8)) // EXTENT
        if has_pool := has_pools and extents > 0 and pools.random() < 0.7:
            quotas[CPU_TIER] = extents * EXTENT
            limits.pop(CPU_TIER, None)
        if is_tenant or has_pool:
            tenants.append(Tenant(tenant_of(spec.id), spec.id[:TENANT_TAG_BYTES], quotas, limits, has_pool))
    sizes = [tenant.quotas[CPU_TIER] for tenant in tenants if tenant.has_pool]
    below = [tier for tier in capacities if tier != CPU_TIER]
    return TierSettings(
        eviction=eviction,
        admission={tier: rng.choice(list(ADMISSION)) for tier in below if rng.random() < 0.3},
        ttl=ttl,
        tenants=tenants,
        retained_part=rng.choice((0.0, 0.5, 0.5, 1.0)),
        leased_part=rng.choice((0.25, 0.5, 0.75, 1.0, 1.0)),
        held_part=rng.choice((0.0, 0.25, 0.5, 1.0)),
        max_holds=rng.choice((1, 3, 100)),
        spare_part=rng.choice((0.0, 1 / 64, 0.25)),
        pool_starts=(0, *accumulate(sizes[:-1], initial=capacities[CPU_TIER] - sum(sizes)))[: len(sizes) + 1],
    )


class TierSettingsModel:
    """Model of shares, retention and expiry in one run of a server."""

    def __init__(self, settings: TierSettings) -> None:
        self.settings = settings
        self.with_pools = {tenant.name for tenant in settings.tenants if tenant.has_pool}
        """Names of the tenants with a memory pool of their own."""
        self.takers: set[str] = set()
        """Tenants whose stores may evict blocks in this event."""
        self.used_at: dict[Block, float] = {}
        """Last use of the blocks of the CPU tier."""
        self.retained: dict[Block, float] = {}
        """End of retention of the blocks of the CPU tier."""
        self.overdue: list[Block] = []
        """Unused blocks that must have expired after this event."""
        self._due: dict[Block, float] = {}

    def ttl(self, tier: str = CPU_TIER) -> float | None:
        """Returns the TTL of a tier, in seconds."""
        return self.settings.ttl.get(tier)

    def begin_event(self) -> None:
        """Resets the state of the previous event."""
        self.takers = set()
        self.overdue = []

    def used(self, blocks: list[Block], now: float, retain_until: float, not_retained: int) -> None:
        """Records a use by one call; all blocks must be retained, unless it reported exceptions."""
        ttl = self.ttl()
        for block in blocks:
            self.used_at[block] = now
            if ttl is not None:
                self._due[block] = now + ttl
            if retain_until > now and not not_retained:
                self.retained[block] = max(self.retained.get(block, 0.0), retain_until)

    def ticking(self, core: TierManager, now: float) -> None:
        """Records, before a tick, which blocks must expire.

        Blocks in use at that time get a new TTL.
        """
        ttl = self.ttl()
        if ttl is None:
            return
        for block in inside.blocks(core):
            due = self._due.get(block, now)
            if due > now or block.invalidated:
                continue
            if block.pins or block.retained:
                self._due[block] = now + ttl
            elif due + max(1.0, ttl / 1000) <= now:
                self.overdue.append(block)
