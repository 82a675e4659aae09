"""Records of publications and claims of holds in the request log."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..stats.eviction_history import EvictionHistory
from ..stats.request_log import (
    ClaimOutcome,
    ClaimRecord,
    HoldRecord,
    LookupOutcome,
    LookupRecord,
    RequestLog,
    limit_runs,
    outcome_runs,
    without_hits,
)
from ..types import HandoffDirection, HoldName, KeyStatus, MissReason, Owner, PublishStatus
from .holds import Hold, HoldClaim

__all__ = ["HandoffLog"]

_CPU_TIER = 0


class HandoffLog:
    def __init__(self, request_log: RequestLog, history: EvictionHistory) -> None:
        self._request_log = request_log
        self._history = history

    def published(
        self,
        name: HoldName,
        direction: HandoffDirection,
        *,
        num_tokens: int,
        blocks: int,
        status: PublishStatus,
        now: float,
    ) -> HoldRecord:
        record = HoldRecord(now, direction, num_tokens, blocks, status)
        self._request_log.latest(name[:2], name[2], now).holds.append(record)
        return record

    def claimed(self, claim: HoldClaim, keys: Sequence[bytes], statuses: bytes, now: float) -> None:
        """Records the outcomes of the next keys of a claim."""
        hold = claim.hold
        keys = [key for key, status in zip(keys, statuses, strict=True) if status]
        met = [status for status in statuses if status]
        outcomes = self._verdicts(hold, keys, met)
        first = next((key for key, outcome in zip(keys, outcomes, strict=True) if outcome != _CPU_TIER), None)
        runs, unwanted = outcome_runs(outcomes), len(statuses) - len(met)
        hold.record.hits += met.count(KeyStatus.HIT)
        record = claim.record
        if record is None or record.claim is None:
            hold.record.claims += 1
            about = ClaimRecord(hold.name[1], hold.name[2], ClaimOutcome.HELD, unwanted)
            claim.record = LookupRecord(now, limit_runs(runs), first, claim=about)
            self._request_log.record_lookup(claim.owner.engine, claim.owner.request_id, claim.record)
        else:
            record.extend(runs, first)
            record.claim = replace(record.claim, unwanted=record.claim.unwanted + unwanted)

    def abandoned(self, claim: HoldClaim) -> None:
        """Takes back the hits of a claim whose engine gets no answer."""
        record = claim.record
        if record is not None:
            claim.hold.record.claims -= 1
            claim.hold.record.hits -= claim.statuses.count(KeyStatus.HIT)
            record.found = without_hits(record.found, MissReason.PENDING)

    def not_claimed(self, owner: Owner, name: HoldName, outcome: ClaimOutcome, now: float) -> None:
        record = LookupRecord(now, (), claim=ClaimRecord(name[1], name[2], outcome))
        self._request_log.record_lookup(owner.engine, owner.request_id, record)

    def _verdicts(self, hold: Hold, keys: Sequence[bytes], met: Sequence[int]) -> list[LookupOutcome]:
        known: dict[int, LookupOutcome] = {KeyStatus.HIT: _CPU_TIER, KeyStatus.HIT_PENDING: MissReason.PENDING}
        if KeyStatus.MISS not in met:
            return [known[status] for status in met]
        lost = self._history.reasons_for(hold.name[0], keys, MissReason.NEVER_STORED)
        return [known.get(status, reason) for status, reason in zip(met, lost, strict=True)]
