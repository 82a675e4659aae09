"""Errors of the break-even measurement."""

from __future__ import annotations

__all__ = ["BreakEvenError", "PeerUnreachable"]


class BreakEvenError(Exception):
    """The measurement is impossible; the one-line message gives the cause and a remedy."""


class PeerUnreachable(BreakEvenError):
    """The server or the engine does not respond."""
