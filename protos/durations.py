"""Conversion between seconds and protobuf's `Duration`."""

from __future__ import annotations

from google.protobuf.duration_pb2 import Duration

__all__ = ["duration_of", "seconds_of"]


def duration_of(seconds: float) -> Duration:
    """Returns the duration; 0 for a negative one. `seconds` must be finite."""
    duration = Duration()
    duration.FromNanoseconds(int(max(0.0, seconds) * 1e9))
    return duration


def seconds_of(duration: Duration) -> float:
    return duration.seconds + duration.nanos / 1e9
