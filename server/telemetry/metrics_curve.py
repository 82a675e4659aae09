"""The miss-ratio curves of the tiers, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from ...tiers.stats.snapshots import ManagerStats
from .definitions import METRICS

__all__ = ["curve_families"]


def curve_families(stats: ManagerStats) -> Iterator[Metric]:
    """Yields the estimated hit ratios, one series per tier and size; none of a tier of which too little is known."""
    row = METRICS["kvtier_estimated_hit_ratio"]
    family = GaugeMetricFamily(row.name, row.text, labels=row.labels)
    for tier in stats.tiers:
        for estimate in tier.estimates:
            family.add_metric((tier.name, f"{estimate.scale:g}"), estimate.hit_ratio)
    yield family
