"""Reasons of the misses of a lookup."""

from __future__ import annotations

from collections.abc import Sequence

from ..secondary_tier import NamespaceId
from ..stats.eviction_history import EvictionHistory
from ..stats.request_log import LookupOutcome, OutcomeRun, outcome_runs
from ..types import EngineSession, MissReason
from .block_matcher import LookupMatch
from .cpu_tier import CpuTier
from .residency import ResidencyIndex
from .running_lookup import RunningLookup

__all__ = ["MissExplainer"]

_MAX_TENANTS = 1024
_FORMATS = 16
"""How many namespaces of a tenant are searched for a missing block, to report FORMAT_MISMATCH."""


class MissExplainer:
    def __init__(self, cpu_tier: CpuTier, residency: ResidencyIndex, history: EvictionHistory) -> None:
        self._cpu_tier = cpu_tier
        self._residency = residency
        self._history = history
        self._formats: dict[str, dict[NamespaceId, None]] = {}
        """Per tenant the namespaces of its latest sessions, the latest tenant last."""

    def remember_namespace(self, namespace: NamespaceId, tenant: str) -> None:
        formats = self._formats[tenant] = self._formats.pop(tenant, {})
        if len(self._formats) > _MAX_TENANTS:
            del self._formats[next(iter(self._formats))]
        formats.pop(namespace, None)
        formats[namespace] = None
        if len(formats) > _FORMATS:
            del formats[next(iter(formats))]

    def explain(
        self, lookup: RunningLookup, keys: Sequence[bytes], match: LookupMatch
    ) -> tuple[tuple[OutcomeRun, ...], bytes | None]:
        """Returns the outcomes and the first missing key. Sets the reason behind a prefix.

        Behind the first key of a prefix that no tier has, all keys are one run with its reason.
        """
        examined = len(match.items)
        if match.ready == len(keys):
            return ((OutcomeRun(examined, 0),) if keys else ()), None
        if lookup.rest is not None:
            return (OutcomeRun(len(keys), lookup.rest),), keys[0]
        outcomes: list[LookupOutcome] = list(match.sources)
        for position in match.retries:
            outcomes[position] = None
        known = match.reasons if lookup.spec.prefix else self._reasons_of_each(lookup.session, keys, match)
        missed = [position for position in sorted(known) if position < examined]
        for position in missed:
            outcomes[position] = known[position]
        runs = outcome_runs(outcomes)
        if examined < len(keys):
            missed.append(examined)
            lookup.rest = known.get(examined) or self._miss_reason(lookup.session, keys[examined])
            runs += (OutcomeRun(len(keys) - examined, lookup.rest),)
        elif missed and lookup.spec.prefix and not lookup.is_short:
            lookup.rest = known[missed[0]]
        return runs, keys[missed[0]] if missed else None

    def _reasons_of_each(
        self, session: EngineSession, keys: Sequence[bytes], match: LookupMatch
    ) -> dict[int, MissReason]:
        """Returns the reason of each miss, by position."""
        skipped = {*match.retries, *match.reasons}
        unknown = [n for n, block in enumerate(match.items) if block is None and n not in skipped]
        if not unknown:
            return match.reasons
        why = self._miss_reason(session, keys[unknown[0]])
        default = MissReason.FORMAT_MISMATCH if why is MissReason.FORMAT_MISMATCH else MissReason.NEVER_STORED
        found = self._history.reasons_for(session.namespace.id, [keys[n] for n in unknown], default)
        return match.reasons | dict(zip(unknown, found, strict=True))

    def _miss_reason(self, session: EngineSession, key: bytes) -> MissReason:
        if (known := self._history.reason_for(session.namespace.id, key)) is not None:
            return known
        others = reversed(self._formats.get(session.tenant, {}))
        elsewhere = any(self._is_in_namespace(other, key) for other in others if other != session.namespace.id)
        return MissReason.FORMAT_MISMATCH if elsewhere else MissReason.NEVER_STORED

    def _is_in_namespace(self, namespace: NamespaceId, key: bytes) -> bool:
        block = self._cpu_tier.blocks_of(namespace).get(key)
        return (block is not None and block.ready) or self._residency.position_of(namespace, key) is not None
