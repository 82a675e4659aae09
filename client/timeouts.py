"""Deadlines of client calls."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Timeouts"]


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
