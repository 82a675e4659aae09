"""Request log: recent requests with the outcome of each block, for `kvtier explain`."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby, takewhile
from operator import attrgetter, itemgetter

from ..types import EngineKey, HandoffDirection, HoldEnd, MissReason, Negotiation, PublishStatus, tenant_of
from .tenant_records import RecordsByTenant

__all__ = [
    "ClaimOutcome",
    "ClaimRecord",
    "HoldRecord",
    "LookupOutcome",
    "LookupRecord",
    "OutcomeRun",
    "RequestLog",
    "RequestRecord",
    "limit_runs",
    "outcome_runs",
    "without_hits",
]


MAX_REQUESTS = 4096
MAX_AGE_SECONDS = 900.0

_MAX_LOOKUPS = 4
"""A record keeps only this many of its latest lookups: an engine that polls repeats its lookup."""

_MAX_HOLDS = 2

LookupOutcome = int | MissReason | None
"""Outcome of a key: position of the tier with the block, reason of a miss, or None for RETRY."""


@dataclass(frozen=True, slots=True)
class OutcomeRun:
    """Consecutive keys of a lookup with the same outcome."""

    count: int
    outcome: LookupOutcome


MAX_OUTCOME_RUNS = 256
"""Limit of runs per lookup. The runs after the limit are summed up per outcome."""


def limit_runs(runs: tuple[OutcomeRun, ...]) -> tuple[OutcomeRun, ...]:
    """Returns the first `MAX_OUTCOME_RUNS` runs unchanged, and the others summed up per outcome."""
    if len(runs) <= MAX_OUTCOME_RUNS:
        return runs
    rest: dict[LookupOutcome, int] = {}
    for run in runs[MAX_OUTCOME_RUNS:]:
        rest[run.outcome] = rest.get(run.outcome, 0) + run.count
    return runs[:MAX_OUTCOME_RUNS] + tuple(OutcomeRun(count, outcome) for outcome, count in rest.items())


def without_hits(runs: Sequence[OutcomeRun], reason: MissReason) -> tuple[OutcomeRun, ...]:
    """Returns the outcomes of a lookup that answers that no key is a hit, for this reason."""
    misses = [run.outcome if isinstance(run.outcome, MissReason) else reason for run in runs]
    counts = zip(misses, (run.count for run in runs), strict=True)
    grouped = groupby(counts, key=itemgetter(0))
    return tuple(OutcomeRun(sum(count for _, count in run), outcome) for outcome, run in grouped)


def outcome_runs(outcomes: Iterable[LookupOutcome]) -> tuple[OutcomeRun, ...]:
    return tuple(OutcomeRun(sum(1 for _ in run), outcome) for outcome, run in groupby(outcomes))


@dataclass(slots=True, eq=False)
class LookupRecord:
    """One lookup: time in seconds of the core's clock, and outcomes of the keys in order."""

    at: float
    found: tuple[OutcomeRun, ...]
    first_miss: bytes | None = None
    failed: dict[int, MissReason] = field(default_factory=dict)
    """Reason per position of a key whose block was pending and whose transfer failed."""
    claim: ClaimRecord | None = None
    """The claim that looked up the keys of a hold; None for a normal lookup."""

    def extend(self, runs: tuple[OutcomeRun, ...], first_miss: bytes | None) -> None:
        """Adds the outcomes of the next keys of the lookup."""
        known = self.found
        if known and runs and known[-1].outcome == runs[0].outcome:
            known, runs = known[:-1], (OutcomeRun(known[-1].count + runs[0].count, runs[0].outcome), *runs[1:])
        self.found = limit_runs(known + runs)
        self.first_miss = self.first_miss or first_miss

    def outcomes(self) -> tuple[OutcomeRun, ...]:
        if not self.failed:
            return self.found
        outcomes = [run.outcome for run in self.found for _ in range(run.count)]
        for position, reason in self.failed.items():
            outcomes[position] = reason
        return limit_runs(outcome_runs(outcomes))

    def fail(self, position: int, reason: MissReason) -> None:
        """Records the failed transfer of a key. Ignores failures beyond `MAX_OUTCOME_RUNS`."""
        if len(self.failed) < MAX_OUTCOME_RUNS:
            self.failed[position] = reason


@dataclass(slots=True, eq=False)
class RequestRecord:
    engine: EngineKey
    request_id: str
    at: float
    """Time of the last event, in seconds of the core's clock."""
    negotiation: Negotiation | None = None
    lookups: deque[LookupRecord] = field(default_factory=lambda: deque(maxlen=_MAX_LOOKUPS))
    asked: int = 0
    """Number of all lookups and claims, including those no longer kept."""
    holds: deque[HoldRecord] = field(default_factory=lambda: deque(maxlen=_MAX_HOLDS))
    finished: bool = False
    incomplete: int = 0
    """Number of blocks that a REQUEST_LEVEL tier did not get; set at the end of the request."""

    @property
    def engine_id(self) -> str:
        return self.engine[1]


class RequestLog:
    """Requests of the last 15 minutes, at most 4,096."""

    def __init__(self) -> None:
        self._records = RecordsByTenant[tuple[EngineKey, str], RequestRecord](MAX_REQUESTS)

    def open(self, engine: EngineKey, request_id: str, now: float) -> RequestRecord:
        """Returns the record of an unfinished request; creates a missing record."""
        record = self._get(engine, request_id)
        if record is None or record.finished:
            record = RequestRecord(engine, request_id, now)
        self._touch(record, now)
        return record

    def latest(self, engine: EngineKey, request_id: str, now: float) -> RequestRecord:
        """Like `open`, but also for a finished request, which may still publish a hold."""
        record = self._get(engine, request_id)
        if record is None:
            return self.open(engine, request_id, now)
        self._touch(record, now)
        return record

    def finish(self, engine: EngineKey, request_id: str, now: float, incomplete: int) -> None:
        record = self._get(engine, request_id) or self.open(engine, request_id, now)
        record.finished, record.incomplete = True, incomplete

    def record_lookup(self, engine: EngineKey, request_id: str, lookup: LookupRecord) -> None:
        if request_id:
            record = self.open(engine, request_id, lookup.at)
            record.lookups.append(lookup)
            record.asked += 1

    def find(self, request_id: str) -> list[RequestRecord]:
        """Returns the records of a request, of any engine; the latest first."""
        found = [each for tenant in self._records.tenants() for each in self._records.of(tenant).values()]
        latest = (each for each in reversed(found) if each.request_id == request_id)
        return sorted(latest, key=attrgetter("at"), reverse=True)

    def tick(self, now: float) -> None:
        for tenant in self._records.tenants():
            old = takewhile(lambda each: now - each[1].at >= MAX_AGE_SECONDS, self._records.of(tenant).items())
            for name, _ in list(old):
                self._records.pop(tenant, name)

    def _get(self, engine: EngineKey, request_id: str) -> RequestRecord | None:
        return self._records.of(tenant_of(engine[0])).get((engine, request_id))

    def _touch(self, record: RequestRecord, now: float) -> None:
        record.at = now
        self._records.put(tenant_of(record.engine[0]), {(record.engine, record.request_id): record})


class ClaimOutcome(enum.Enum):
    """Outcome of a claim. Numbers as in `kvtier.v1.ClaimOutcome`."""

    HELD = 1
    NOT_HELD = 2
    """The hold was not published in time, or has ended."""
    EXPIRED = 3
    """The hold has expired, or expires in less than 5 seconds."""
    OTHER_NAMESPACE = 4
    """An engine of another namespace holds the request."""
    PEER_NOT_LISTED = 5
    """No claim was made, because the engine's settings do not name the server of the hold."""
    NOTHING_HELD = 6
    """No claim was made, because the other engine holds no blocks of the request."""


@dataclass(frozen=True, slots=True)
class ClaimRecord:
    """A claim of a hold; `unwanted`: number of blocks that the claim did not request."""

    engine_id: str
    request_id: str
    outcome: ClaimOutcome
    unwanted: int = 0


@dataclass(slots=True, eq=False)
class HoldRecord:
    """A publication of a hold; times in seconds of the core's clock. Kept after its end."""

    at: float
    direction: HandoffDirection
    num_tokens: int
    blocks: int
    status: PublishStatus
    pending: int = 0
    """Blocks that were pending at the publication."""
    claims: int = 0
    """Successful claims."""
    hits: int = 0
    """Total number of blocks that these claims leased."""
    end: HoldEnd | None = None
    """How the hold ended; None while it is open, and for a refused publication."""
    ended_at: float = 0.0
