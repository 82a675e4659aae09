"""Prometheus metrics of a server.

The counters and histograms in this module are updated when events happen. All other metrics are
read from a snapshot at each scrape (`collector`). Names and help texts come from `definitions`. The
durations of calls are plain numbers, because each call adds one; a scrape reads them.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter as CountOf
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Literal, TypeAlias

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, disable_created_metrics
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar

from ...protos.error_reasons import STATUS_OF
from ...tiers.secondary_tier import Outcome
from .collector import ServerStats, Snapshot, SnapshotCollector
from .definitions import METRICS, SOURCE_OUTCOMES

__all__ = ["Direction", "JobObserver", "Metrics", "ServerStats", "Snapshot"]

Direction = Literal["in", "out"]

JobObserver: TypeAlias = Callable[[str, str, float, int, Sequence[Outcome]], None]
"""Called with tier, operation, seconds, bytes and outcomes of an ended job, on the job's thread."""

_RPC_BUCKETS = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 1, 5, 30)
_RPC_BOUNDS = (*(str(float(bound)) for bound in _RPC_BUCKETS), "+Inf")
_JOB_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 60)
_LAG_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10)
_SERVICES = (
    "SessionService",
    "CacheService",
    "TransferService",
    "HandoffService",
    "ConversationService",
    "AdminService",
)
_JOBS = ("store", "load")
_WORK = ("tick", "slice", "watch")


disable_created_metrics()  # type: ignore[no-untyped-call]


class _Series:
    """Durations of the calls of one method with one status."""

    __slots__ = ("exemplars", "numbers", "seconds")

    def __init__(self) -> None:
        self.numbers = [0] * (len(_RPC_BUCKETS) + 1)
        """Number of calls per bucket; those of the buckets below are not added."""
        self.seconds = 0.0
        self.exemplars: dict[int, Exemplar] = {}
        """Trace of the last recorded call, by bucket."""


class CallDurations(Collector):
    """Histogram of the durations of calls, by method and status. One thread may add calls."""

    def __init__(self) -> None:
        self._series: dict[tuple[str, str], _Series] = {}

    def observe(self, method: str, code: str, seconds: float, trace_id: str | None = None) -> None:
        """Counts an ended call. `method` is a gRPC name, like "/kvtier.v1.CacheService/Lookup".

        In the OpenMetrics format the trace id is exposed as an exemplar of the call's bucket.
        """
        series = self._series.get((method, code))
        if series is None:
            series = self._series[method, code] = _Series()
        bucket = bisect_left(_RPC_BUCKETS, seconds)
        series.numbers[bucket] += 1
        series.seconds += seconds
        if trace_id is not None:
            series.exemplars[bucket] = Exemplar({"trace_id": trace_id}, seconds, time.time())

    @property
    def total(self) -> int:
        """Number of calls that have ended."""
        return sum(sum(series.numbers) for series in self._series.values())

    def describe(self) -> Iterator[HistogramMetricFamily]:
        yield self._family()

    def collect(self) -> Iterator[HistogramMetricFamily]:
        family = self._family()
        for (method, code), series in self._series.copy().items():
            buckets: list[tuple[str, float] | tuple[str, float, Exemplar]] = []
            for bucket, (bound, number) in enumerate(zip(_RPC_BOUNDS, accumulate(series.numbers), strict=True)):
                exemplar = series.exemplars.get(bucket)
                buckets.append((bound, number) if exemplar is None else (bound, number, exemplar))
            family.add_metric([method.removeprefix("/kvtier.v1."), code], buckets, series.seconds)
        yield family

    @staticmethod
    def _family() -> HistogramMetricFamily:
        row = METRICS["kvtier_rpc_duration_seconds"]
        return HistogramMetricFamily(row.name, row.text, labels=row.labels)


class Metrics:
    """All metrics of one server, in a registry of their own.

    `snapshot` is called at each scrape on an HTTP thread, so it must read the server's state safely
    (`on_loop`). If it raises, the metrics of the snapshot are absent and `kvtier_snapshot_ok` is 0.
    """

    def __init__(self, snapshot: Snapshot, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry or CollectorRegistry()
        self.calls = CallDurations()
        self.registry.register(self.calls)
        self.refusals = self._counter("refusals")
        self.loop_lag = self._histogram("loop_lag_seconds", _LAG_BUCKETS)
        self.loop_failures = self._counter("loop_failures")
        self.job_duration = self._histogram("tier_job_duration_seconds", _JOB_BUCKETS)
        self.job_bytes = self._counter("tier_job_bytes")
        self.job_blocks = self._counter("tier_job_blocks")
        self.transfer_bytes = self._counter("transfer_bytes")
        self.checksum_mismatches = self._counter("checksum_mismatches")
        self.wrong_blocks = self._counter("wrong_blocks")
        self._source_searches = self._counter("source_searches")
        self._jobs: dict[tuple[str, str], tuple[Histogram, Counter]] = {}
        self._outcomes: dict[tuple[str, str, Outcome], Counter] = {}
        # Create the counters with 0. Prometheus's `rate` ignores the first event of a counter that
        # appears later.
        for service in _SERVICES:
            for reason in STATUS_OF:
                self.refusals.labels(service, reason)
        for work in _WORK:
            self.loop_failures.labels(work)
        for outcome in SOURCE_OUTCOMES:
            self._source_searches.labels(outcome)
        ProcessCollector(registry=self.registry)
        self.registry.register(SnapshotCollector(snapshot))

    def expect_tiers(self, names: Iterable[str]) -> None:
        """Creates the counters of tiers with value 0, so that `rate` counts the first event."""
        for tier in names:
            self.mismatches(tier)
            for job in _JOBS:
                self._bind_job(tier, job)
                for outcome in Outcome:
                    self._outcomes[tier, job, outcome] = self.job_blocks.labels(tier, job, outcome.value)

    def refused(self, method: str, reason: str) -> None:
        """Counts a refused or failed call; `reason` is a `kvtier.v1.ErrorReason`."""
        self.refusals.labels(method.removeprefix("/kvtier.v1.").partition("/")[0], reason).inc()

    def searched_source(self, outcome: str) -> None:
        """Counts a search of a lookup's source; `outcome` is a `SourceOutcome` in lower case."""
        self._source_searches.labels(outcome).inc()

    def failed(self, work: str) -> None:
        self.loop_failures.labels(work).inc()

    def observe_job(self, tier: str, job: str, seconds: float, nbytes: int, outcomes: Sequence[Outcome]) -> None:
        """Counts an ended job ("store" or "load") and its outcomes. Thread-safe."""
        duration, moved = self._jobs.get((tier, job)) or self._bind_job(tier, job)
        duration.observe(seconds)
        moved.inc(nbytes)
        for outcome, blocks in CountOf(outcomes).items():
            child = self._outcomes.get((tier, job, outcome))
            if child is None:
                child = self._outcomes[tier, job, outcome] = self.job_blocks.labels(tier, job, outcome.value)
            child.inc(blocks)
            if outcome is Outcome.CORRUPT:
                self.mismatches(tier).inc(blocks)

    def transfer(self, transport: str, direction: Direction) -> Counter:
        """Returns a transport's counter of bytes moved into ("in") or out of ("out") the region."""
        return self.transfer_bytes.labels(transport, direction)

    def mismatches(self, where: str) -> Counter:
        return self.checksum_mismatches.labels(where)

    def _bind_job(self, tier: str, job: str) -> tuple[Histogram, Counter]:
        bound = (self.job_duration.labels(tier, job), self.job_bytes.labels(tier, job))
        self._jobs[tier, job] = bound
        return bound

    def _counter(self, name: str) -> Counter:
        row = METRICS[f"kvtier_{name}"]
        return Counter(row.name, row.text, row.labels, registry=self.registry)

    def _histogram(self, name: str, buckets: tuple[float, ...]) -> Histogram:
        row = METRICS[f"kvtier_{name}"]
        return Histogram(row.name, row.text, row.labels, buckets=buckets, registry=self.registry)
