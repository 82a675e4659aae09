"""Prometheus collector: at each scrape converts a snapshot of the server to metrics."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ... import __version__
from ...tiers.secondary_tier import NamespaceId
from ...tiers.stats.request_log import ClaimOutcome
from ...tiers.stats.snapshots import HandoffStats, ManagerStats, NamespaceStats
from ...tiers.types import HandoffDirection, MissReason
from .definitions import METRICS, TRANSPORTS
from .downgrades import FEATURES, Downgrade

__all__ = ["ServerStats", "Snapshot", "SnapshotCollector", "curve_families"]

_OTHER = "other"
"""Label value for unknown transports, and for namespaces beyond the limit."""


@dataclass(frozen=True, slots=True)
class ServerStats:
    manager: ManagerStats
    epoch: int
    uptime_seconds: float
    region_bytes: int
    region_backed_bytes: int
    """Bytes that have memory pages. A thread backs the rest after the start."""
    sessions_by_transport: Mapping[str, int] = field(default_factory=dict)
    draining: bool = False
    sessions_attached: int = 0
    """Sessions whose process has mapped the region."""
    sessions_limit: int = 0
    sessions_opened: int = 0
    sessions_closed: int = 0
    namespaces: Sequence[NamespaceStats] = ()
    models: Mapping[NamespaceId, str] = field(default_factory=dict)
    downgrades: Sequence[Downgrade] = ()


Snapshot = Callable[[], ServerStats]

Sample = tuple[Sequence[str], float]
"""Label values in the order of the metric's labels, and the value of the sample."""


class SnapshotCollector(Collector):
    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def describe(self) -> Iterator[Metric]:
        """Returns no names, so that the registration does not take a snapshot."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        try:
            stats = self._snapshot()
        except Exception:  # noqa: BLE001 - the other metrics are still exposed
            yield _family("snapshot_ok", [((), 0)])
            return
        yield _family("snapshot_ok", [((), 1)])
        yield from _server_families(stats)
        yield from _manager_families(stats.manager)
        yield from _handoff_families(stats.manager)
        yield from _conversation_families(stats.manager)
        yield from _tier_families(stats.manager)
        yield from curve_families(stats.manager)
        yield from _namespace_families(stats)


_TIER_FIGURES = (
    *("capacity_bytes", "available_bytes", "used_bytes", "queued_bytes", "blocks", "jobs", "healthy"),
    *("hits", "misses", "evictions", "damaged", "dropped", "declined", "expired", "not_retained"),
)
_SHARE_FIGURES = ("used_bytes", "quota_bytes", "limit_bytes", "retained_bytes")
_MANAGER_FIGURES = {
    "leases": "leases",
    "oldest_lease_seconds": "oldest_lease_seconds",
    "leases_expired": "expired_leases",
    "room_waiting": "room.waiting",
    "room_waits": "room.waits",
    "room_waited_seconds": "room.waited_seconds",
    "stores": "stores",
    "stores_expired": "expired_stores",
    "quarantined_bytes": "quarantined_bytes",
    "namespaces": "namespaces",
    "held_bytes": "held_bytes",
    "lookup_keys": "lookup_keys",
}
"""Attribute of `ManagerStats` by metric name."""
_SERVER_FIGURES = (
    *("uptime_seconds", "draining", "region_bytes", "region_backed_bytes"),
    *("sessions_attached", "sessions_limit", "sessions_opened", "sessions_closed"),
)
_HANDOFF_FIGURES = (
    *("published", "declined", "claimed", "released", "expired", "dropped", "claimed_bytes", "held_seconds"),
)


def _family(name: str, samples: Iterable[Sample]) -> Metric:
    row = METRICS[f"kvtier_{name}"]
    make = GaugeMetricFamily if row.kind == "gauge" else CounterMetricFamily
    family = make(row.name, row.text, labels=row.labels)
    for labels, value in samples:
        family.add_metric(labels, float(value))
    return family


def _info(name: str, values: Iterable[Mapping[str, str]]) -> Metric:
    """Returns an info family. Each sample must have all labels of the metric."""
    row = METRICS[f"kvtier_{name}"]
    family = InfoMetricFamily(row.name, row.text, labels=())
    for value in values:
        assert tuple(value) == row.labels
        family.add_metric((), dict(value))
    return family


def _server_families(stats: ServerStats) -> Iterator[Metric]:
    build = {"version": __version__, "python": platform.python_version(), "epoch": f"{stats.epoch:016x}"}
    yield _info("build", [build])
    for name in _SERVER_FIGURES:
        yield _family(name, [((), getattr(stats, name))])
    downgrades = dict.fromkeys(FEATURES, 0)
    for each in stats.downgrades:
        downgrades[each.feature] += 1
    yield _family("downgrades", (((feature,), count) for feature, count in downgrades.items()))
    counts = dict.fromkeys((*TRANSPORTS, _OTHER), 0)
    for transport, count in stats.sessions_by_transport.items():
        counts[transport if transport in TRANSPORTS else _OTHER] += count
    yield _family("sessions", (((transport,), count) for transport, count in counts.items()))


def _manager_families(stats: ManagerStats) -> Iterator[Metric]:
    for name, attribute in _MANAGER_FIGURES.items():
        yield _family(name, [((), attrgetter(attribute)(stats))])
    misses = stats.misses_by_reason
    yield _family("lookup_misses", (((reason.name.lower(),), misses.get(reason, 0)) for reason in MissReason))


def _handoff_families(stats: ManagerStats) -> Iterator[Metric]:
    directions = {way.name.lower(): stats.handoffs.get(way, HandoffStats()) for way in HandoffDirection}
    yield _family("holds", (((way,), figures.open) for way, figures in directions.items()))
    for name in _HANDOFF_FIGURES:
        yield _family(f"handoffs_{name}", (((way,), getattr(each, name)) for way, each in directions.items()))
    missed = (outcome for outcome in ClaimOutcome if outcome is not ClaimOutcome.HELD)
    yield _family(
        "handoffs_claims_missed",
        (((outcome.name.lower(),), stats.claims_missed.get(outcome, 0)) for outcome in missed),
    )


def _conversation_families(stats: ManagerStats) -> Iterator[Metric]:
    recorded = stats.conversations
    yield _family("conversations", [((), recorded.conversations)])
    yield _family("conversation_keys", [((), recorded.keys)])
    yield _family("conversations_forgotten", [((), recorded.forgotten)])


def _tier_families(stats: ManagerStats) -> Iterator[Metric]:
    yield _info(
        "tier",
        (
            {"tier": tier.name, "type": tier.type, "position": f"{n}", "shared": "yes" if tier.shared else "no"}
            for n, tier in enumerate(stats.tiers)
        ),
    )
    for name in _TIER_FIGURES:
        yield _family(f"tier_{name}", (((tier.name,), getattr(tier, name)) for tier in stats.tiers))
    shares = [(tier.name, share) for tier in stats.tiers for share in tier.shares]
    for name in _SHARE_FIGURES:
        figures = (((tier, share.tenant), getattr(share, name)) for tier, share in shares)
        yield _family(f"tenant_{name}", ((labels, value) for labels, value in figures if value is not None))


def _namespace_families(stats: ServerStats) -> Iterator[Metric]:
    tiers = [tier.name for tier in stats.manager.tiers]
    spaces = [(each.namespace.hex() if each.namespace else _OTHER, each) for each in stats.namespaces]
    models = {name: stats.models.get(each.namespace, "") if each.namespace else "" for name, each in spaces}
    yield _info("namespace", ({"namespace": n, "tenant": each.tenant, "model": models[n]} for n, each in spaces))
    for name in ("blocks", "hits"):
        yield _family(
            f"namespace_{name}",
            (
                ((tier, label, each.tenant), value)
                for label, each in spaces
                for tier, value in zip(tiers, getattr(each, name), strict=True)
            ),
        )
    yield _family(
        "namespace_misses",
        (
            ((label, each.tenant, reason.name.lower()), count)
            for label, each in spaces
            for reason, count in each.misses.items()
        ),
    )


def curve_families(stats: ManagerStats) -> Iterator[Metric]:
    """Yields estimated hit ratios by tier and size. A tier without enough data has no estimate."""
    row = METRICS["kvtier_estimated_hit_ratio"]
    family = GaugeMetricFamily(row.name, row.text, labels=row.labels)
    for tier in stats.tiers:
        for estimate in tier.estimates:
            family.add_metric((tier.name, f"{estimate.scale:g}"), estimate.hit_ratio)
    yield family
