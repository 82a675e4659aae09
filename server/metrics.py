"""What Prometheus sees of a server.

Two kinds: counters and histograms that code raises as things happen, and figures that are read from a snapshot when
Prometheus asks. Labels are bound once and the bound child is kept: 0.3 instead of 1.2 microseconds a time.
"""

from __future__ import annotations

import platform
from collections import Counter as CountOf
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from .. import __version__
from ..tiers.base import Outcome
from ..tiers.handoff_notes import ClaimOutcome
from ..tiers.history import MissReason
from ..tiers.holds import HandoffDirection, HandoffStats
from ..tiers.stats import ManagerStats

__all__ = ["Direction", "Metrics", "ServerStats", "Snapshot"]

Direction = Literal["in", "out"]

_RPC_BUCKETS = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 1, 5, 30)
_JOB_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 60)


@dataclass(frozen=True, slots=True)
class ServerStats:
    """A server at one moment, as far as metrics show it."""

    manager: ManagerStats
    epoch: int
    uptime_seconds: float
    region_bytes: int
    region_backed_bytes: int
    """How much of the region has memory behind it; it is backed in the background after start."""
    sessions_by_transport: Mapping[str, int] = field(default_factory=dict)
    draining: bool = False


Snapshot = Callable[[], ServerStats]


class Metrics:
    """All metrics of one server, in one registry of their own.

    `snapshot` is called when Prometheus asks, on a thread of the HTTP endpoint: it has to see to it that the state
    it reads is not being changed (`metrics_http.on_loop`). When it raises, its figures are absent, and
    `kvtier_snapshot_ok` is 0.
    """

    def __init__(self, snapshot: Snapshot, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry or CollectorRegistry()
        self.rpc_duration = self._histogram(
            "kvtier_rpc_duration_seconds", "Duration of calls.", ("method", "code"), _RPC_BUCKETS
        )
        self.job_duration = self._histogram(
            "kvtier_tier_job_duration_seconds", "Duration of jobs on tiers.", ("tier", "job"), _JOB_BUCKETS
        )
        self.job_bytes = self._counter("kvtier_tier_job_bytes", "Bytes that jobs on tiers moved.", ("tier", "job"))
        self.job_blocks = self._counter(
            "kvtier_tier_job_blocks", "Blocks of jobs on tiers, by what became of them.", ("tier", "job", "outcome")
        )
        self.transfer_bytes = self._counter(
            "kvtier_transfer_bytes",
            "Bytes between engines and the region, as far as the server moves them: over networks. Copies of engines that have"
            " the region mapped pass the server by and are not counted.",
            ("transport", "direction"),
        )
        self.checksum_mismatches = self._counter(
            "kvtier_checksum_mismatches", "Bytes that were not what had been written, by where it showed.", ("where",)
        )
        self.calls = 0
        """Calls that have ended."""
        self._rpcs: dict[tuple[str, str], Histogram] = {}
        self._jobs: dict[tuple[str, str], tuple[Histogram, Counter]] = {}
        self._outcomes: dict[tuple[str, str, Outcome], Counter] = {}
        ProcessCollector(registry=self.registry)
        self.registry.register(_SnapshotCollector(snapshot))

    def observe_rpc(self, method: str, code: str, seconds: float) -> None:
        """Counts a call that ended; `method` as gRPC names it, "/kvtier.v1.CacheService/Lookup"."""
        self.calls += 1
        child = self._rpcs.get((method, code))
        if child is None:
            name = method.removeprefix("/kvtier.v1.")
            child = self._rpcs[method, code] = self.rpc_duration.labels(name, code)
        child.observe(seconds)

    def observe_job(self, tier: str, job: str, seconds: float, nbytes: int, outcomes: Sequence[Outcome]) -> None:
        """Counts a job that ended, "store" or "load", and an outcome per block. Any thread may call it."""
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
        """Returns the counter of bytes that the server moves for a transport, into ("in") or out of the region. Keep it."""
        return self.transfer_bytes.labels(transport, direction)

    def mismatches(self, where: str) -> Counter:
        """Returns the counter of checksum mismatches in a tier or transport; `observe_job` counts those of tiers."""
        return self.checksum_mismatches.labels(where)

    def _bind_job(self, tier: str, job: str) -> tuple[Histogram, Counter]:
        bound = (self.job_duration.labels(tier, job), self.job_bytes.labels(tier, job))
        self._jobs[tier, job] = bound
        return bound

    def _counter(self, name: str, text: str, labels: tuple[str, ...]) -> Counter:
        return Counter(name, text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, labels: tuple[str, ...], buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, labels, buckets=buckets, registry=self.registry)


class _SnapshotCollector(Collector):
    """Turns a snapshot into metrics when Prometheus asks."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def describe(self) -> Iterator[Metric]:
        """Names nothing, so that registering does not ask for a snapshot; all names start with `kvtier_`."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """Yields the metrics of this moment."""
        try:
            stats = self._snapshot()
        except Exception:  # noqa: BLE001 - the other metrics are worth having all the more
            yield GaugeMetricFamily("kvtier_snapshot_ok", "Whether the figures of the tiers could be read.", value=0)
            return
        yield GaugeMetricFamily("kvtier_snapshot_ok", "Whether the figures of the tiers could be read.", value=1)
        yield from _server_families(stats)
        yield from _manager_families(stats.manager)
        yield from _handoff_families(stats.manager)
        yield from _tier_families(stats.manager)


_TIER_GAUGES = {
    "capacity_bytes": "What the tier may hold at most.",
    "available_bytes": "What the tier can hold now.",
    "used_bytes": "What the tier holds.",
    "blocks": "Blocks that the tier holds.",
    "jobs": "Jobs of the tier that wait or run.",
    "healthy": "Whether all is well with the tier.",
}
_TIER_COUNTERS = {
    "hits": "Keys found in the tier.",
    "misses": "Keys asked of the tier and not found in it.",
    "evictions": "Blocks evicted from the tier.",
    "damaged": "Blocks that were found damaged, by a load or by a check, and put out of use; none of them is served.",
    "dropped": "Blocks not stored in the tier because its queue or the tier itself was full.",
    "expired": "Blocks dropped from the tier because they were not used for as long as its ttl.",
    "not_retained": "Blocks that requests wanted to retain in the tier, beyond what may be retained.",
}
_SHARE_GAUGES = {
    "used_bytes": "What a tenant holds of the tier; the empty name is all who have no share of their own.",
    "quota_bytes": "What a tenant is guaranteed of the tier.",
    "retained_bytes": "What a tenant holds of the tier that may not be evicted for a while.",
}
_MANAGER_GAUGES = {
    "leases": "Leases that are held.",
    "stores": "Stores that are in flight.",
    "quarantined_bytes": "Bytes out of use because a process that lost its store, fallen or merely silent, may still write there.",
    "namespaces": "Namespaces seen since start.",
    "held_bytes": "Bytes of the CPU tier that holds pin; what several hold counts once.",
}
_HANDOFF_COUNTERS = {
    "published": "Requests that were held for another engine.",
    "declined": "Requests that were not held: more than may be, or too many.",
    "claimed": "Claims of held requests that were granted something.",
    "released": "Holds that were given back.",
    "expired": "Holds whose time was over before anybody gave them back.",
    "dropped": "Holds that ended with a reset, or were published anew.",
    "claimed_bytes": "Bytes of blocks that claims were granted.",
    "held_seconds": "For how long the holds that have ended kept their blocks from eviction, added up.",
}
_MANAGER_COUNTERS = {
    "lookup_keys": "Looked-up keys that were answered for: each is a hit of a tier, or a miss.",
}


def _server_families(stats: ServerStats) -> Iterator[Metric]:
    build = {"version": __version__, "python": platform.python_version(), "epoch": f"{stats.epoch:016x}"}
    yield InfoMetricFamily("kvtier_build", "Version, and the random id of this server's life.", value=build)
    yield GaugeMetricFamily("kvtier_uptime_seconds", "Time since the server was ready.", value=stats.uptime_seconds)
    yield GaugeMetricFamily("kvtier_draining", "Whether the server is shutting down.", value=stats.draining)
    yield GaugeMetricFamily("kvtier_region_bytes", "Size of the host region.", value=stats.region_bytes)
    yield GaugeMetricFamily(
        "kvtier_region_backed_bytes", "What of the region has memory behind it.", value=stats.region_backed_bytes
    )
    sessions = GaugeMetricFamily("kvtier_sessions", "Open sessions.", labels=("transport",))
    for transport, count in stats.sessions_by_transport.items():
        sessions.add_metric((transport,), count)
    yield sessions


def _manager_families(stats: ManagerStats) -> Iterator[Metric]:
    for name, text in _MANAGER_GAUGES.items():
        yield GaugeMetricFamily(f"kvtier_{name}", text, value=getattr(stats, name))
    for name, text in _MANAGER_COUNTERS.items():
        yield CounterMetricFamily(f"kvtier_{name}", text, value=getattr(stats, name))
    misses = CounterMetricFamily(
        "kvtier_lookup_misses", "Looked-up keys that were misses, by reason.", labels=("reason",)
    )
    for reason in MissReason:
        misses.add_metric((reason.name.lower(),), stats.misses_by_reason.get(reason, 0))
    yield misses


def _handoff_families(stats: ManagerStats) -> Iterator[Metric]:
    holds = GaugeMetricFamily("kvtier_holds", "Requests that are held for another engine.", labels=("direction",))
    for direction in HandoffDirection:
        holds.add_metric((direction.name.lower(),), stats.handoffs.get(direction, HandoffStats()).open)
    yield holds
    for name, text in _HANDOFF_COUNTERS.items():
        family = CounterMetricFamily(f"kvtier_handoffs_{name}", text, labels=("direction",))
        for direction in HandoffDirection:
            value = getattr(stats.handoffs.get(direction, HandoffStats()), name)
            family.add_metric((direction.name.lower(),), value)
        yield family
    missed = CounterMetricFamily(
        "kvtier_handoffs_claims_missed", "Claims that did not find their hold, by what they met.", labels=("outcome",)
    )
    for outcome in ClaimOutcome:
        if outcome is not ClaimOutcome.HELD:
            missed.add_metric((outcome.name.lower(),), stats.claims_missed.get(outcome, 0))
    yield missed


def _tier_families(stats: ManagerStats) -> Iterator[Metric]:
    info = InfoMetricFamily("kvtier_tier", "The tiers, in lookup order.", labels=("tier",))
    for position, tier in enumerate(stats.tiers):
        info.add_metric((tier.name,), {"type": tier.type, "position": str(position)})
    yield info
    for table, make in ((_TIER_GAUGES, GaugeMetricFamily), (_TIER_COUNTERS, CounterMetricFamily)):
        for name, text in table.items():
            family = make(f"kvtier_tier_{name}", text, labels=("tier",))
            for tier in stats.tiers:
                family.add_metric((tier.name,), float(getattr(tier, name)))
            yield family
    for name, text in _SHARE_GAUGES.items():
        shares = GaugeMetricFamily(f"kvtier_tenant_{name}", text, labels=("tier", "tenant"))
        for tier in stats.tiers:
            for share in tier.shares:
                shares.add_metric((tier.name, share.tenant), getattr(share, name))
        yield shares
