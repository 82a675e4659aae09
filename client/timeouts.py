"""Deadlines of client calls."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Timeouts"]


@dataclass(frozen=True, slots=True)
class Timeouts:
    """How long, in seconds, a client waits at most. Nothing waits without a deadline.

    Attributes:
        connect: for the first session; later calls fail at once while there is none.
        call: for an answer, on top of what the call itself asks the server to wait.
        device: for the copies of one call whose bytes the server moves to or from a device.
        transfer: for one stream of bytes over the grpc transport.
    """

    connect: float = 2.0
    call: float = 2.0
    transfer: float = 60.0
    device: float = 5.0
