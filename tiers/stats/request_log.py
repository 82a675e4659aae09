"""What the requests of the last minutes asked for, and what each of their blocks met."""

from __future__ import annotations

import enum
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING

from ..types import (
    EngineKey,
    HandoffDirection,
    HoldEnd,
    MissReason,
    Negotiation,
    PublishStatus,
)

__all__ = [
    "ClaimOutcome",
    "ClaimRecord",
    "HoldRecord",
    "LookupOutcome",
    "LookupRecord",
    "OutcomeRun",
    "RequestLog",
    "RequestRecord",
    "bounded",
    "outcome_runs",
]


if TYPE_CHECKING:
    pass


MAX_REQUESTS = 4096


MAX_AGE_SECONDS = 900.0


_MAX_LOOKUPS = 4
"""Lookups that are kept per request, the latest: an engine that polls asks the same again and again."""


_MAX_HOLDS = 2
"""Publications that are kept per request: it ends once, unless its engine says so again."""


LookupOutcome = int | MissReason | None
"""What a key met: the position of the tier that had it, the reason of a miss, or None where a tier does not know yet."""


@dataclass(frozen=True, slots=True)
class OutcomeRun:
    """So many neighbouring keys of a lookup that met the same."""

    count: int
    outcome: LookupOutcome


MAX_OUTCOME_RUNS = 256
"""Runs that are kept of a lookup; of one that is more mixed than that, the rest is summed up per verdict."""


def bounded(runs: tuple[OutcomeRun, ...]) -> tuple[OutcomeRun, ...]:
    """Returns what is kept of these: the first as they are, the rest summed up."""
    if len(runs) <= MAX_OUTCOME_RUNS:
        return runs
    rest: dict[LookupOutcome, int] = {}
    for run in runs[MAX_OUTCOME_RUNS:]:
        rest[run.outcome] = rest.get(run.outcome, 0) + run.count
    return runs[:MAX_OUTCOME_RUNS] + tuple(OutcomeRun(count, outcome) for outcome, count in rest.items())


def outcome_runs(outcomes: Iterable[LookupOutcome]) -> tuple[OutcomeRun, ...]:
    """Returns the runs of equal verdicts."""
    return tuple(OutcomeRun(sum(1 for _ in run), outcome) for outcome, run in groupby(outcomes))


@dataclass(slots=True, eq=False)
class LookupRecord:
    """One lookup: when it came, in the core's seconds, and what its keys met, in order."""

    at: float
    found: tuple[OutcomeRun, ...]
    first_miss: bytes | None = None
    """Key of the first block that was not there."""
    failed: dict[int, MissReason] = field(default_factory=dict)
    """Keys, by position, that were on their way and did not arrive."""
    claim: ClaimRecord | None = None
    """The hold whose blocks the keys are, as far as they were wanted; None for a lookup."""

    def outcomes(self) -> tuple[OutcomeRun, ...]:
        """Returns what became of the keys, as far as that is known by now."""
        if not self.failed:
            return self.found
        outcomes = [run.outcome for run in self.found for _ in range(run.count)]
        for position, reason in self.failed.items():
            outcomes[position] = reason
        return bounded(outcome_runs(outcomes))

    def fail(self, position: int, reason: MissReason) -> None:
        """Takes note of a key that did not arrive; of very many, the first."""
        if len(self.failed) < MAX_OUTCOME_RUNS:
            self.failed[position] = reason


@dataclass(slots=True, eq=False)
class RequestRecord:
    """One request, as far as it can be explained."""

    engine: EngineKey
    request_id: str
    at: float
    """When it was heard of last, in the core's seconds."""
    negotiation: Negotiation | None = None
    lookups: deque[LookupRecord] = field(default_factory=lambda: deque(maxlen=_MAX_LOOKUPS))
    asked: int = 0
    """Lookups and claims so far, kept or not."""
    holds: deque[HoldRecord] = field(default_factory=lambda: deque(maxlen=_MAX_HOLDS))
    """Its last publications."""
    finished: bool = False
    incomplete: int = 0
    """Blocks that a REQUEST_LEVEL tier asked for and did not get; known when it has finished."""

    @property
    def engine_id(self) -> str:
        """The engine, for people."""
        return self.engine[1]


class RequestLog:
    """The requests of the last quarter of an hour, and not more than 4,096."""

    def __init__(self) -> None:
        self._requests: OrderedDict[tuple[EngineKey, str], RequestRecord] = OrderedDict()

    def __len__(self) -> int:
        return len(self._requests)

    def open(self, engine: EngineKey, request_id: str, now: float) -> RequestRecord:
        """Returns the record of a request; a new one if the last of that name has finished."""
        key = (engine, request_id)
        record = self._requests.get(key)
        if record is None or record.finished:
            record = self._requests[key] = RequestRecord(engine, request_id, now)
        record.at = now
        self._requests.move_to_end(key)
        if len(self._requests) > MAX_REQUESTS:
            self._requests.popitem(last=False)
        return record

    def latest(self, engine: EngineKey, request_id: str, now: float) -> RequestRecord:
        """Returns the record of a request, also of one that has finished: it may be published after that."""
        record = self._requests.get((engine, request_id))
        if record is None:
            return self.open(engine, request_id, now)
        record.at = now
        self._requests.move_to_end((engine, request_id))
        return record

    def finish(self, engine: EngineKey, request_id: str, now: float, incomplete: int) -> None:
        """Takes note of the end of a request."""
        record = self._requests.get((engine, request_id)) or self.open(engine, request_id, now)
        record.finished, record.incomplete = True, incomplete

    def note_lookup(self, engine: EngineKey, request_id: str, lookup: LookupRecord) -> None:
        """Takes note of a lookup; those without a request are not kept."""
        if request_id:
            record = self.open(engine, request_id, lookup.at)
            record.lookups.append(lookup)
            record.asked += 1

    def find(self, request_id: str) -> list[RequestRecord]:
        """Returns what is known of a request, of any engine; the latest first."""
        return [record for record in self if record.request_id == request_id]

    def tick(self, now: float) -> None:
        """Forgets what is too old."""
        while self._requests:
            oldest = next(iter(self._requests.values()))
            if now - oldest.at < MAX_AGE_SECONDS:
                return
            self._requests.popitem(last=False)

    def __iter__(self) -> Iterator[RequestRecord]:
        """Iterates over the requests, the latest first."""
        return reversed(self._requests.values())


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


@dataclass(slots=True, eq=False)
class HoldRecord:
    """What the journal keeps of a publication, in the core's seconds; it outlives its hold, and has no block."""

    at: float
    direction: HandoffDirection
    num_tokens: int
    blocks: int
    status: PublishStatus
    pending: int = 0
    """Blocks that were on their way when it was published."""
    claims: int = 0
    """Claims that found it."""
    hits: int = 0
    """Blocks that these were granted, added up."""
    end: HoldEnd | None = None
    """None as long as it is open, and for what was declined."""
    ended_at: float = 0.0
