"""An OpenTelemetry collector that receives spans over gRPC and keeps them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from .polling import wait_until

__all__ = ["Collector", "Span", "collector"]


@dataclass(frozen=True)
class Span:
    name: str
    trace_id: str
    parent_id: str
    seconds: float
    attributes: dict[str, Any]
    resource: dict[str, Any]
    failed: bool


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.endpoint = ""

    def Export(  # noqa: N802 - as in the protos
        self, request: trace_service_pb2.ExportTraceServiceRequest, _: grpc.ServicerContext
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        for source in request.resource_spans:
            for scope in source.scope_spans:
                self.spans += (_span(span, source.resource) for span in scope.spans)
        return trace_service_pb2.ExportTraceServiceResponse()

    def wait_for(self, wanted: Callable[[Span], bool], seconds: float = 60.0) -> Span:
        """Waits for a span that matches `wanted` and returns it."""
        return wait_until(
            lambda: next(filter(wanted, list(self.spans)), None),
            seconds,
            otherwise=lambda: f"there are only {self.spans}",
        )


def _span(span: Any, resource: Any) -> Span:
    return Span(
        span.name,
        span.trace_id.hex(),
        span.parent_span_id.hex(),
        (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9,
        _values(span.attributes),
        _values(resource.attributes),
        span.status.code == span.status.STATUS_CODE_ERROR,
    )


def _values(attributes: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}


@contextlib.contextmanager
def collector() -> Iterator[Collector]:
    kept = Collector()
    with ThreadPoolExecutor(2) as threads:
        server = grpc.server(threads)
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(kept, server)
        kept.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        try:
            yield kept
        finally:
            server.stop(0).wait()
