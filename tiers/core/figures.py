"""What the core says of itself: reads what the others have counted, and decides nothing."""

from __future__ import annotations

from dataclasses import replace

from ..stats.counters import NamespaceCounters
from ..stats.miss_ratio_curve import MissRatioCurves
from ..stats.snapshots import ManagerStats, NamespaceStats
from .cpu_tier import CpuTier
from .handoffs import HandoffHandler
from .lookups import LookupHandler
from .settings import CPU_TIER
from .stores import StoreHandler
from .transfers import TransferScheduler

__all__ = ["Figures"]


class Figures:
    """The figures of a core, gathered from its rooms."""

    def __init__(
        self,
        region_bytes: int,
        cpu_tier: CpuTier,
        transfers: TransferScheduler,
        lookups: LookupHandler,
        stores: StoreHandler,
        handoffs: HandoffHandler,
        miss_ratio_curves: MissRatioCurves | None,
    ) -> None:
        self._region_bytes = region_bytes
        self._cpu_tier = cpu_tier
        self._transfers = transfers
        self._lookups = lookups
        self._stores = stores
        self._handoffs = handoffs
        self._miss_ratio_curves = miss_ratio_curves
        self.expired_leases = 0
        self.expired_stores = 0

    def stats(self, now: float, *, sessions: int, namespaces: int) -> ManagerStats:
        """Returns the figures of this moment."""
        counters = self._lookups.counters
        hits, misses = counters.hits, counters.misses
        keys = sum(hits) + misses.total()
        cpu = self._cpu_tier.stats(CPU_TIER, self._region_bytes, hits=hits[0], misses=keys - hits[0])
        tiers = (cpu, *(secondary.stats(hits[secondary.index]) for secondary in self._transfers.secondaries))
        if self._miss_ratio_curves is not None:
            tiers = tuple(
                replace(tier, estimates=self._miss_ratio_curves.of(number)) for number, tier in enumerate(tiers)
            )
        return ManagerStats(
            tiers=tiers,
            leases=len(self._lookups.leases),
            oldest_lease_seconds=self._lookups.leases.oldest_age(now),
            expired_leases=self.expired_leases,
            expired_stores=self.expired_stores,
            stores=len(self._stores.table),
            quarantined_bytes=self._stores.table.quarantined_bytes,
            sessions=sessions,
            namespaces=namespaces,
            holds=len(self._handoffs),
            held_bytes=self._handoffs.held_bytes,
            handoffs=self._handoffs.stats(),
            claims_missed=self._handoffs.claims_missed,
            lookup_keys=keys,
            lookup_misses=misses.total(),
            misses_by_reason=dict(misses),
        )

    def namespace_stats(self) -> list[NamespaceStats]:
        """Returns the figures of each namespace, so many at most as a `Tally` tells apart. Takes longer than `stats`."""
        counters = self._lookups.counters
        blocks: dict[NamespaceCounters, list[int]] = {}
        for tier, counts in enumerate(
            [self._cpu_tier.counts(), *(secondary.catalog.counts() for secondary in self._transfers.secondaries)]
        ):
            for namespace, count in counts:
                per_tier = blocks.setdefault(counters.cell(namespace), [0] * (len(self._transfers.secondaries) + 1))
                per_tier[tier] += count
        none = [0] * (len(self._transfers.secondaries) + 1)
        return [
            NamespaceStats(
                cell.namespace, cell.tenant, tuple(blocks.get(cell, none)), tuple(cell.hits), dict(cell.misses)
            )
            for cell in counters.cells()
        ]
