"""Hit and miss counters, per namespace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ..secondary_tier import NamespaceId
from ..types import REST, MissReason, tenant_of
from .request_log import OutcomeRun
from .snapshots import NamespaceStats

__all__ = ["MAX_NAMESPACES", "HitCounters", "NamespaceCounters"]

MAX_NAMESPACES = 128
"""The first namespaces, up to this number, have separate counters; those of one tenant at most as
many as are then free. Of the other namespaces, all of one tenant share counters. This limits the
number of time series in a monitoring system."""


@dataclass(slots=True, eq=False)
class NamespaceCounters:
    """Counters of one namespace, or of a tenant's other namespaces; then `namespace` is None."""

    namespace: NamespaceId | None
    tenant: str
    hits: list[int]
    """Per tier; the CPU tier is the first."""
    misses: Counter[MissReason] = field(default_factory=Counter)


class HitCounters:
    """Counts every looked-up key once its outcome is known: a hit of a tier, or a miss by reason.

    A key whose block is pending is counted when the transfer of the block has ended. A key that
    needs a query to a shared tier is counted when the client looks it up again.
    """

    def __init__(self, tiers: int, tenants: Mapping[bytes, str] | None = None) -> None:
        """`tenants` maps the tags of tenants with a quota to their names."""
        self._tiers = tiers + 1
        self._tenants = tenants or {}
        self._by_namespace: dict[NamespaceId, NamespaceCounters] = {}
        self._namespaces = Counter[bytes]()
        """Number of separate counters per tenant."""
        self._by_tenant: dict[str, NamespaceCounters] = {}

    def of(self, namespace: NamespaceId) -> NamespaceCounters:
        return self._by_namespace.get(namespace) or self._add(namespace)

    def all(self) -> list[NamespaceCounters]:
        """Returns at most `MAX_NAMESPACES` counters plus one per tenant."""
        return [*self._by_namespace.values(), *self._by_tenant.values()]

    @property
    def hits(self) -> list[int]:
        return [sum(counters.hits[tier] for counters in self.all()) for tier in range(self._tiers)]

    @property
    def misses(self) -> Counter[MissReason]:
        return sum((counters.misses for counters in self.all()), Counter[MissReason]())

    def count(self, namespace: NamespaceId, runs: Iterable[OutcomeRun]) -> None:
        counters = self.of(namespace)
        for run in runs:
            if isinstance(run.outcome, MissReason):
                counters.misses[run.outcome] += run.count
            elif run.outcome is not None:
                counters.hits[run.outcome] += run.count

    def hit(self, namespace: NamespaceId, tier: int, keys: int = 1) -> None:
        """Counts hits. A negative number takes back hits of blocks that are still pending."""
        self.of(namespace).hits[tier] += keys

    def miss(self, namespace: NamespaceId, reason: MissReason, keys: int = 1) -> None:
        if keys:
            self.of(namespace).misses[reason] += keys

    def namespace_stats(self, blocks_per_tier: Sequence[Iterable[tuple[NamespaceId, int]]]) -> list[NamespaceStats]:
        """Returns statistics per namespace; `blocks_per_tier` yields (namespace, blocks)."""
        blocks = {counters: [0] * self._tiers for counters in self.all()}
        for tier, counts in enumerate(blocks_per_tier):
            for namespace, count in counts:
                blocks.setdefault(self.of(namespace), [0] * self._tiers)[tier] += count
        return [
            NamespaceStats(each.namespace, each.tenant, tuple(held), tuple(each.hits), dict(each.misses))
            for each, held in blocks.items()
        ]

    def _add(self, namespace: NamespaceId) -> NamespaceCounters:
        tag = tenant_of(namespace)
        tenant = self._tenants.get(tag, REST)
        if self._namespaces[tag] < MAX_NAMESPACES - len(self._by_namespace):
            self._namespaces[tag] += 1
            counters = self._by_namespace[namespace] = NamespaceCounters(namespace, tenant, [0] * self._tiers)
            return counters
        if tenant not in self._by_tenant:
            self._by_tenant[tenant] = NamespaceCounters(None, tenant, [0] * self._tiers)
        return self._by_tenant[tenant]
