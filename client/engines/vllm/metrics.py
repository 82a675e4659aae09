"""The connector's metrics in vLLM's own ``/metrics``: built and fed in the API server's process, from what the engine sends it."""

# vLLM is not in the environment that is checked:
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .compat import KVConnectorPromMetrics

__all__ = ["METRICS", "KVTierPromMetrics", "Metric"]

_PREFIX = "vllm:kvtier_"
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


@dataclass(frozen=True)
class Metric:
    """A counter, of one series per outcome; or, in seconds, a histogram."""

    documentation: str
    outcomes: tuple[str, ...] = ()
    in_seconds: bool = False


METRICS = {
    "lookups": Metric(
        "Lookups of requests' blocks in the store. Partial: less than all that was asked for; timeout: the request was computed "
        "because the answer did not come in time; unavailable: no server, or it refused or failed.",
        ("hit", "partial", "miss", "timeout", "unavailable"),
    ),
    "lookup_seconds": Metric(
        "Seconds from the start of a lookup to its answer, or to when it was given up.", in_seconds=True
    ),
    "load_blocks": Metric("KV blocks loaded, or computed because their load failed.", ("loaded", "failed")),
    "load_bytes": Metric("Bytes copied from the store into KV blocks, by all ranks."),
    "load_seconds": Metric(
        "Seconds from handing a request's load to a worker to its end, one per rank.", in_seconds=True
    ),
    "claims": Metric(
        "Claims of what other engines hold for requests of this one. Empty: held, but nothing of it is there; gone: not held, or "
        "not long enough any more; unavailable: its server cannot be asked.",
        ("granted", "empty", "gone", "unavailable"),
    ),
    "claim_seconds": Metric(
        "Seconds from the call to the answer of a claim: peers' last saves are waited for.", in_seconds=True
    ),
    "pull_tokens": Metric("Tokens whose KV was taken over from other engines."),
    "pull_blocks": Metric(
        "KV blocks pulled from other engines, or computed because that failed.", ("pulled", "failed")
    ),
    "publications": Metric(
        "Requests that were to be held for other engines, and were or were declined: for their blocks there was no room, or too "
        "many were held already.",
        ("published", "no_room", "too_many"),
    ),
    "save_blocks": Metric(
        "KV blocks offered to the store, by whether it has them afterwards; those that it had before count as stored.",
        ("stored", "not_stored"),
    ),
    "save_bytes": Metric("Bytes copied from KV blocks into the store, by all ranks."),
    "save_seconds": Metric("Seconds from handing a save to a worker to its end, one per rank.", in_seconds=True),
}
"""By name, without ``vllm:kvtier_``. A series is counted as NAME, or as NAME:OUTCOME."""


class KVTierPromMetrics(KVConnectorPromMetrics):
    """All series of all engines, there from the start so that rates are right from the first count on."""

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
        """Called with one step's counts, of all ranks of an engine. A name that it does not know is left out."""
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
