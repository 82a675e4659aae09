"""Settings of the tracing of calls and jobs."""

from __future__ import annotations

from typing import Annotated

import msgspec

from .annotations import _setting

__all__ = ["TracingConfig"]


class TracingConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Tracing of calls and jobs with OpenTelemetry (`kvtier[tracing]`)."""

    endpoint: Annotated[str | None, _setting("Address of the collector (OTLP, gRPC), like `http://HOST:4317`.")] = None
    ratio: Annotated[
        float,
        _setting(
            "Fraction of the traces started by the server that are recorded. A trace that a caller started is recorded if "
            "the caller records it.",
            ge=0,
            le=1,
        ),
    ] = 1.0
