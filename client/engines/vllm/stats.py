"""Statistics for vLLM's log and its `/metrics`.

The scheduler and each worker have counters. Once per step vLLM takes their counts, adds them up,
and passes the sum to its log (`ConnectorStats.reduce`) and to Prometheus.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .compat import KVConnectorPromMetrics, KVConnectorStats

__all__ = ["METRICS", "ConnectorStats", "KVTierPromMetrics", "Metric", "TransferCounters"]

Counts = dict[str, int | list[float]]
"""Counts, and observed seconds, by the names in `METRICS`."""

_PREFIX = "vllm:kvtier_"
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class ConnectorStats(KVConnectorStats):
    """The counts of an interval. vLLM sends `data` between its processes."""

    data: Counts

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> ConnectorStats:
        total = ConnectorStats(dict(self.data))
        for name, value in other.data.items():
            total.data[name] = _sum(total.data.get(name), value)
        return total

    def reduce(self) -> dict[str, int | float]:
        """Returns the values for the log: counts, and the mean and maximum of durations."""
        line: dict[str, int | float] = {}
        for name, value in self.data.items():
            if not isinstance(value, list):
                line[name.replace(":", "_")] = value
            elif value:
                line[f"{name}_mean"] = round(sum(value) / len(value), 4)
                line[f"{name}_max"] = round(max(value), 4)
        return line

    def is_empty(self) -> bool:
        return not self.data


class TransferCounters:
    """Counts since the last `take`. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counts = {}

    def count(self, name: str, amount: int = 1) -> None:
        """Adds to a counter. `name` is NAME or NAME:OUTCOME, for example `lookups:hit`."""
        if amount:
            self._add(name, amount)

    def observe(self, name: str, seconds: float) -> None:
        self._add(name, [seconds])

    def take(self) -> ConnectorStats | None:
        if not self._counts:
            return None
        with self._lock:
            counts, self._counts = self._counts, {}
        return ConnectorStats(counts)

    def _add(self, name: str, value: int | list[float]) -> None:
        with self._lock:
            self._counts[name] = _sum(self._counts.get(name), value)


def _sum(left: int | list[float] | None, right: int | list[float]) -> int | list[float]:
    if isinstance(right, list):
        return [*left, *right] if isinstance(left, list) else list(right)
    return left + right if isinstance(left, int) else right


@dataclass(frozen=True)
class Metric:
    """A counter with one series per outcome, or a histogram of seconds."""

    documentation: str
    outcomes: tuple[str, ...] = ()
    in_seconds: bool = False


METRICS = {
    "lookups": Metric(
        "Lookups of requests' blocks. partial: hit is shorter than the lookup; timeout: answer was late and the request "
        "was computed; unavailable: no server, or the server refused or failed.",
        ("hit", "partial", "miss", "timeout", "unavailable"),
    ),
    "lookup_seconds": Metric("Seconds from the start of a lookup to its answer or timeout.", in_seconds=True),
    "load_blocks": Metric("KV blocks loaded, or computed because the load failed.", ("loaded", "failed")),
    "load_bytes": Metric("Bytes copied from the server into KV blocks, by all ranks."),
    "load_seconds": Metric("Seconds from queueing a request's load to its end, one per rank.", in_seconds=True),
    "claims": Metric(
        "Claims of requests that other engines hold. empty: the hold has no blocks; gone: not held, or about to expire; "
        "unavailable: the server of the hold cannot be called; peer_not_listed: no setting names that server; "
        "nothing_held: the other engine holds no blocks.",
        ("granted", "empty", "gone", "unavailable", "peer_not_listed", "nothing_held"),
    ),
    "claim_seconds": Metric("Seconds of a claim, including the wait for the last saves of the hold.", in_seconds=True),
    "pull_tokens": Metric("Tokens whose KV was pulled from other engines."),
    "pull_blocks": Metric("KV blocks pulled, or computed because the pull failed.", ("pulled", "failed")),
    "publications": Metric(
        "Requests published for other engines. no_room: no room for the blocks; too_many: too many holds.",
        ("published", "no_room", "too_many"),
    ),
    "save_blocks": Metric(
        "KV blocks that workers tried to store. stored: the server has the block afterwards.", ("stored", "not_stored")
    ),
    "save_bytes": Metric("Bytes copied from KV blocks into the server, by all ranks."),
    "audits": Metric(
        "Blocks of hits that the engine computed again and compared with the stored ones. equal: every byte; close: "
        "within the limit of rounding; different: one of the two is wrong; unknown: other bytes that are no numbers; gone: "
        "the server has lost the block.",
        ("equal", "close", "different", "unknown", "gone"),
    ),
    "save_seconds": Metric("Seconds from queueing a save to its end, one per rank.", in_seconds=True),
}
"""By name, without `vllm:kvtier_`. Counters use NAME, or NAME:OUTCOME."""


class KVTierPromMetrics(KVConnectorPromMetrics):
    """All time series of all engines, created at start so that rates include the first count."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._series: dict[tuple[int, str], Any] = {}
        for name, metric in METRICS.items():
            made = self._make(name, metric, labelnames)
            for engine, values in per_engine_labelvalues.items():
                for series, labels in _series_of(name, metric):
                    self._series[engine, series] = made.labels(*values, *labels)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Called with the counts of one step of an engine. Ignores unknown names."""
        for name, value in transfer_stats_data.items():
            series = self._series.get((engine_idx, name))
            if series is None:
                continue
            if isinstance(value, list):
                for seconds in value:
                    series.observe(seconds)
            else:
                series.inc(value)

    def _make(self, name: str, metric: Metric, labelnames: list[str]) -> Any:
        if metric.in_seconds:
            return self._histogram_cls(
                name=_PREFIX + name, documentation=metric.documentation, labelnames=labelnames, buckets=_SECONDS
            )
        labels = [*labelnames, "outcome"] if metric.outcomes else labelnames
        return self._counter_cls(name=_PREFIX + name, documentation=metric.documentation, labelnames=labels)


def _series_of(name: str, metric: Metric) -> Iterator[tuple[str, tuple[str, ...]]]:
    if not metric.outcomes:
        yield name, ()
    for outcome in metric.outcomes:
        yield f"{name}:{outcome}", (outcome,)
