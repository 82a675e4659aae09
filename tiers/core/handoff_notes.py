"""What became of the requests that engines handed over, as the journal keeps it for whoever asks."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from ..stats.eviction_history import History, MissReason
from ..stats.request_log import Journal, LookupRecord, Verdict, bounded, spans_of
from .holds import HandoffDirection, Hold, HoldEnd, HoldName, HoldRecord, PublishStatus
from .leases import KeyStatus, Owner

__all__ = ["ClaimOutcome", "ClaimRecord", "HandoffNotes"]

_CPU_TIER = 0


class ClaimOutcome(enum.Enum):
    """What a claim met. Numbers as in `kvtier.v1.ClaimOutcome`."""

    HELD = 1
    NOT_HELD = 2
    """Nobody had published it in time, or it had ended."""
    EXPIRED = 3
    """Its time was over, or nearly so."""
    OTHER_NAMESPACE = 4
    """It is held, by an engine whose blocks mean something else."""


@dataclass(frozen=True, slots=True)
class ClaimRecord:
    """Which hold a request claimed, and what it met; `unwanted` blocks of it were not asked for."""

    engine_id: str
    request_id: str
    outcome: ClaimOutcome
    unwanted: int = 0


class HandoffNotes:
    """Writes publications and claims into the journal."""

    def __init__(self, journal: Journal, history: History) -> None:
        self._journal = journal
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
        """Takes note of a publication, be it declined or not."""
        record = HoldRecord(now, direction, num_tokens, blocks, status)
        self._journal.latest(name[:2], name[2], now).holds.append(record)
        return record

    def ended(self, hold: Hold, how: HoldEnd, now: float) -> None:
        """Takes note of the end of a hold."""
        if hold.record is not None:
            hold.record.end, hold.record.ended_at = how, now

    def claimed(self, owner: Owner, hold: Hold, statuses: bytes, now: float) -> None:
        """Takes note of a claim that found its hold, whatever was there of it."""
        keys = [key for key, status in zip(hold.keys, statuses, strict=True) if status]
        met = [status for status in statuses if status]
        verdicts = self._verdicts(hold, keys, met)
        first = next((key for key, verdict in zip(keys, verdicts, strict=True) if verdict != _CPU_TIER), None)
        if hold.record is not None:
            hold.record.claims += 1
            hold.record.hits += met.count(KeyStatus.HIT)
        claim = ClaimRecord(hold.name[1], hold.name[2], ClaimOutcome.HELD, len(statuses) - len(met))
        record = LookupRecord(now, bounded(spans_of(verdicts)), first, claim=claim)
        self._journal.note_lookup(owner.engine, owner.request_id, record)

    def not_claimed(self, owner: Owner, name: HoldName, outcome: ClaimOutcome, now: float) -> None:
        """Takes note of a claim that did not find its hold."""
        record = LookupRecord(now, (), claim=ClaimRecord(name[1], name[2], outcome))
        self._journal.note_lookup(owner.engine, owner.request_id, record)

    def _verdicts(self, hold: Hold, keys: Sequence[bytes], met: Sequence[int]) -> list[Verdict]:
        known: dict[int, Verdict] = {KeyStatus.HIT: _CPU_TIER, KeyStatus.HIT_PENDING: MissReason.PENDING}
        if KeyStatus.MISS not in met:
            return [known[status] for status in met]
        lost = self._history.why_each(hold.name[0], keys, MissReason.NEVER_STORED)
        return [known.get(status, reason) for status, reason in zip(met, lost, strict=True)]
