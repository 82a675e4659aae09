"""Why there is no answer."""

from __future__ import annotations

__all__ = ["BreakEvenError", "NobodyAnswers"]


class BreakEvenError(Exception):
    """It cannot be measured; one line that says why, and what to do about it."""


class NobodyAnswers(BreakEvenError):
    """The server or the engine does not answer."""
