"""Deadlines of client calls."""

from __future__ import annotations

import threading
from dataclasses import dataclass, fields
from numbers import Real

from .errors import InvalidRequest

__all__ = ["Timeouts", "check_seconds"]


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Maximum waiting times of a client, in seconds.

    Attributes:
        connect: for the first attempt to connect. Later calls fail at once if there is no session.
        call: for a response, in addition to the `wait` of the call itself.
        transfer: for one stream of bytes (transports "tcp" and "grpc").
        device: for the copies of one call to or from a device.
    """

    connect: float = 2.0
    call: float = 2.0
    transfer: float = 60.0
    device: float = 5.0

    def __post_init__(self) -> None:
        """Raises `InvalidRequest` for a value that is not a number of seconds."""
        for field in fields(self):
            check_seconds(field.name, getattr(self, field.name))


def check_seconds(name: str, seconds: float, most: float = threading.TIMEOUT_MAX) -> None:
    """Raises `InvalidRequest` if a time is not a number, NaN, negative or too long."""
    is_number = isinstance(seconds, (float, int, Real))  # the last one includes numbers of numpy
    if isinstance(seconds, bool) or not is_number or not 0 <= seconds <= most:
        raise InvalidRequest(f"{name} must be a number of seconds from 0 to {most:.1e}, not {seconds!r}")
