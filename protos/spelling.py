"""Proposals for misspelt names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["closest", "did_you_mean"]


def closest(name: str, known: Iterable[str], similarity: float = 0.6) -> str | None:
    """Returns the known name that is most like `name`; None if all are less similar (0 to 1)."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=similarity)), None)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns "; did you mean …?" with the closest known name (lower case), or an empty string."""
    near = closest(name.lower(), known)
    return f"; did you mean {near}?" if near else ""
