"""Prometheus metrics of the proxy."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from .conversations import Reuse
from .fleet import Fleet, Instance

__all__ = ["CONTENT_TYPE", "Metrics", "Outcome"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500)


class Outcome(Enum):
    """Result of a client's request."""

    OK = "ok"
    CLIENT_ERROR = "client_error"
    """The proxy or an engine refused the request (4xx)."""
    ENGINE_ERROR = "engine_error"
    BROKEN = "broken"
    """An engine failed during its response."""
    GONE = "client_gone"
    BUSY = "busy"
    DEFECT = "defect"
    """A failure of the proxy itself."""


class Metrics:
    """The proxy's metrics. Gauges read their values when Prometheus scrapes."""

    def __init__(self, fleets: Iterable[Fleet], entries: Callable[[], int]) -> None:
        self._registry = CollectorRegistry()
        self.requests = self._counter("requests", "Requests by outcome.", "route", "outcome")
        self.turns = self._counter("turns", "Turns, by use of D's hold of the previous turn.", "reuse")
        self.retries = self._counter(
            "retries", "Failures of engines. The proxy sent most of these requests to another engine.", "role", "cause"
        )
        self.fallbacks = self._counter("fallbacks", "Turns that D served without P, by cause.", "cause")
        self.dropped = self._counter("entries_evicted", "Entries removed before a turn used them, by reason.", "reason")
        self.state_errors = self._counter("state_errors", "Failed calls of the server of --state.", "operation")
        self.hints = self._counter("hints", "Hints for kvtier servers, by action and outcome.", "action", "outcome")
        self.first_token = self._histogram("first_token_seconds", "Seconds until the first event of a stream.", "route")
        self.duration = self._histogram("duration_seconds", "Seconds until the end of the response.", "route")
        self.prefill = self._histogram("prefill_seconds", "Seconds until P answered.")
        self._gauge("entries", "Conversations with a recorded hold.").set_function(entries)
        up = self._gauge("instance_up", "Whether the engine gets requests.", "role", "instance")
        outstanding = self._gauge("instance_outstanding", "Requests in flight at the engine.", "role", "instance")
        for instance in (instance for fleet in fleets for instance in fleet.instances):
            up.labels(instance.role.value, instance.url).set_function(_is_up(instance))
            outstanding.labels(instance.role.value, instance.url).set_function(_outstanding(instance))
        for reuse in Reuse:
            self.turns.labels(reuse.value)

    def render(self) -> bytes:
        """Returns the metrics in text format."""
        return generate_latest(self._registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"disagg_proxy_{name}", text, labels, registry=self._registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"disagg_proxy_{name}", text, labels, registry=self._registry)

    def _histogram(self, name: str, text: str, *labels: str) -> Histogram:
        return Histogram(f"disagg_proxy_{name}", text, labels, registry=self._registry, buckets=_SECONDS)


def _is_up(instance: Instance) -> Callable[[], float]:
    return lambda: float(instance.is_up)


def _outstanding(instance: Instance) -> Callable[[], float]:
    return lambda: float(instance.outstanding)
