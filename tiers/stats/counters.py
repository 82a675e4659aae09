"""Counts what lookups met, per namespace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ..base import NamespaceId
from ..types import REST, TENANT_TAG_BYTES, MissReason
from .request_log import OutcomeRun

__all__ = ["MAX_NAMESPACES", "HitCounters", "NamespaceCounters"]

MAX_NAMESPACES = 64
"""Namespaces that are told apart; those that come later are counted together, per tenant. What a monitoring system keeps
grows with them."""


@dataclass(slots=True, eq=False)
class NamespaceCounters:
    """What lookups of one namespace met, or, where that is None, of those of a tenant that are not told apart."""

    namespace: NamespaceId | None
    tenant: str
    """Name of the tenant where it has a share of its own, else empty."""
    hits: list[int]
    """Per tier; the CPU tier is the first."""
    misses: Counter[MissReason] = field(default_factory=Counter)


class HitCounters:
    """Every key that was answered for counts once, when the answer is known: as a hit of a tier, or as a miss for a reason.

    A block on its way counts when it has arrived, or has not; one that a tier has been asked about counts when it is
    looked up again.
    """

    def __init__(self, tiers: int, tenants: Mapping[bytes, str] | None = None) -> None:
        """`tenants` names those that have shares of their own, by the tags that their namespaces begin with."""
        self._tiers = tiers + 1
        self._tenants = tenants or {}
        self._cells: dict[NamespaceId, NamespaceCounters] = {}
        self._others: dict[str, NamespaceCounters] = {}

    def cell(self, namespace: NamespaceId) -> NamespaceCounters:
        """Returns where a namespace is counted."""
        return self._cells.get(namespace) or self._new_cell(namespace)

    def cells(self) -> list[NamespaceCounters]:
        """Returns all of them: `MOST_NAMESPACES`, and one more per tenant at most."""
        return [*self._cells.values(), *self._others.values()]

    @property
    def keys(self) -> int:
        """Keys that were answered for."""
        return sum(self.hits) + self.misses.total()

    @property
    def hits(self) -> list[int]:
        """Hits per tier; the CPU tier is the first."""
        return [sum(cell.hits[tier] for cell in self.cells()) for tier in range(self._tiers)]

    @property
    def misses(self) -> Counter[MissReason]:
        """Misses by reason."""
        return sum((cell.misses for cell in self.cells()), Counter[MissReason]())

    def count(self, namespace: NamespaceId, runs: Iterable[OutcomeRun]) -> None:
        """Counts the keys of a lookup."""
        cell = self.cell(namespace)
        for run in runs:
            if isinstance(run.outcome, MissReason):
                cell.misses[run.outcome] += run.count
            elif run.outcome is not None:
                cell.hits[run.outcome] += run.count

    def hit(self, namespace: NamespaceId, tier: int, keys: int = 1) -> None:
        """Counts hits; with a negative number, takes back those that are on their way still."""
        self.cell(namespace).hits[tier] += keys

    def miss(self, namespace: NamespaceId, reason: MissReason, keys: int = 1) -> None:
        """Counts misses."""
        self.cell(namespace).misses[reason] += keys

    def _new_cell(self, namespace: NamespaceId) -> NamespaceCounters:
        tenant = self._tenants.get(namespace[:TENANT_TAG_BYTES], REST)
        if len(self._cells) < MAX_NAMESPACES:
            cell = self._cells[namespace] = NamespaceCounters(namespace, tenant, [0] * self._tiers)
            return cell
        if tenant not in self._others:
            self._others[tenant] = NamespaceCounters(None, tenant, [0] * self._tiers)
        return self._others[tenant]
