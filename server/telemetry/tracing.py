"""OpenTelemetry spans of calls and tier jobs, sent over OTLP/gRPC. Off by default.

A call whose gRPC metadata has a `traceparent` (W3C Trace Context) continues the caller's trace. The
server records the call's span if the caller records the trace. All other calls and all jobs begin
new traces; the setting `tracing.ratio` is the fraction of these traces that is recorded. Calls over
sockets have no metadata, so they begin new traces. A thread sends the spans. If the collector is
slow or missing, spans are lost but no call is delayed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from ... import __version__
from ...tiers.secondary_tier import Outcome
from ..config.tracing import TracingConfig
from .downgrades import Downgrades
from .metrics import JobObserver

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider

__all__ = ["Tracing", "TracingError", "open_tracing"]

_SEND_SECONDS = 1.0
_TIMEOUT_SECONDS = 5
_CLOSE_SECONDS = 3.0
_COMPLAINT_SECONDS = 300.0

_request_id: ContextVar[str] = ContextVar("kvtier_request_id", default="")
"""The engine's request id of the call that this task serves."""


class TracingError(Exception):
    """Tracing is configured but OpenTelemetry is missing; the message is one line."""


def open_tracing(config: TracingConfig, epoch: int, downgrades: Downgrades | None = None) -> Tracing | None:
    """Returns None if tracing is not configured. Raises TracingError without OpenTelemetry."""
    if config.endpoint is None:
        return None
    try:
        provider = _provider(config.endpoint, config.ratio, epoch, downgrades or Downgrades())
    except ImportError as error:
        raise TracingError(
            f"tracing.endpoint = {config.endpoint}: {error}; install OpenTelemetry with: pip install 'kvtier[tracing]'"
        ) from error
    return Tracing(provider)


class Tracing:
    """Creates the spans of ended calls and jobs. Any thread may call."""

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("kvtier", __version__)
        self._extract: Callable[[dict[str, str]], Context] = TraceContextTextMapPropagator().extract
        self._trace = trace

    def record_request_id(self, request: Any) -> None:
        """Records the engine's request id for the span of the running call. None: not known."""
        _request_id.set(getattr(request, "request_id", ""))

    def call_ended(self, method: str, code: str, seconds: float, context: Any) -> str | None:
        """Creates the span of an ended call. Must run in the task that served the call.

        `method` is the gRPC name. Returns the trace id if the trace is recorded.
        """
        service, _, name = method.removeprefix("/").partition("/")
        span = self._tracer.start_span(
            f"{service}/{name}",
            context=self._parent(context),
            kind=self._trace.SpanKind.SERVER,
            start_time=time.time_ns() - int(seconds * 1e9),
            attributes={"rpc.system": "grpc", "rpc.service": service, "rpc.method": name, "rpc.grpc.status_code": code},
        )
        if not span.is_recording():
            return None
        if request_id := _request_id.get():
            span.set_attribute("kvtier.request_id", request_id)
        if code in ("INTERNAL", "UNKNOWN", "DATA_LOSS"):  # other codes are not errors of the server
            span.set_status(self._trace.StatusCode.ERROR)
        span.end()
        return self._trace.format_trace_id(span.get_span_context().trace_id)

    def with_spans(self, observer: JobObserver) -> JobObserver:
        """Adds spans to an observer. They have no parent, as a job has blocks of many requests."""

        def observe(tier: str, operation: str, seconds: float, nbytes: int, outcomes: Sequence[Outcome]) -> None:
            observer(tier, operation, seconds, nbytes, outcomes)
            span = self._tracer.start_span(
                f"{operation} {tier}",
                kind=self._trace.SpanKind.INTERNAL,
                start_time=time.time_ns() - int(seconds * 1e9),
                attributes={
                    "kvtier.tier": tier,
                    "kvtier.bytes": nbytes,
                    "kvtier.blocks": len(outcomes),
                    "kvtier.blocks_done": list(outcomes).count(Outcome.DONE),
                },
            )
            if not all(outcome is Outcome.DONE for outcome in outcomes):
                span.set_status(self._trace.StatusCode.ERROR)
            span.end()

        return observe

    def close(self) -> None:
        """Sends the remaining spans, for at most three seconds. Called once."""
        closer = threading.Thread(target=self._provider.shutdown, name="kvtier-tracing-close", daemon=True)
        closer.start()
        closer.join(_CLOSE_SECONDS)

    def _parent(self, context: Any) -> Context | None:
        metadata: Callable[[], Iterable[tuple[str, str]] | None] | None
        metadata = getattr(context, "invocation_metadata", None)
        if metadata is None:  # a call over a socket
            return None
        carrier = {key: value for key, value in metadata() or () if key in ("traceparent", "tracestate")}
        return self._extract(carrier) if carrier else None


class _RateLimitFilter(logging.Filter):
    """Passes one record every five minutes. An unreachable collector causes repeated errors."""

    def __init__(self) -> None:
        super().__init__()
        self._next = 0.0

    def filter(self, record: logging.LogRecord) -> bool:
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + _COMPLAINT_SECONDS
        return True


def _provider(endpoint: str, ratio: float, epoch: int, downgrades: Downgrades) -> TracerProvider:
    from opentelemetry.exporter.otlp.proto.grpc import exporter
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult
    from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

    logging.getLogger(exporter.__name__).addFilter(_RateLimitFilter())
    resource = Resource.create(
        {"service.name": "kvtier", "service.version": __version__, "service.instance.id": f"{epoch:016x}"}
    )
    provider = TracerProvider(sampler=ParentBased(TraceIdRatioBased(ratio)), resource=resource, shutdown_on_exit=False)

    class ReportingExporter(OTLPSpanExporter):
        """Records whether the collector accepts the spans."""

        def export(self, spans: Any) -> Any:
            result = super().export(spans)
            if result is SpanExportResult.SUCCESS:
                downgrades.end("tracing")
            else:
                cause = f"spans are lost, because the collector at {endpoint} does not accept them"
                remedy = "check tracing.endpoint, the collector, and proxies (kvtier doctor)"
                # The exporter logs the cause.
                downgrades.report("tracing", cause, remedy, is_logged=False)
            return result

    sender = ReportingExporter(endpoint, timeout=_TIMEOUT_SECONDS)
    provider.add_span_processor(BatchSpanProcessor(sender, schedule_delay_millis=_SEND_SECONDS * 1000))
    return provider
