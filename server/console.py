"""How the commands talk to people and to scripts: answers, complaints, exit codes."""

from __future__ import annotations

import sys
from collections.abc import Iterable

__all__ = ["EXIT_CONFIG", "EXIT_FAILURE", "EXIT_UNREACHABLE", "EXIT_USAGE", "complain", "refuse", "say"]

EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_UNREACHABLE = 2
EXIT_CONFIG = 78


def say(text: str) -> None:
    """Writes a part of the answer."""
    sys.stdout.write(f"{text}\n")


def complain(lines: Iterable[str]) -> None:
    """Writes what is wrong, a line each, where it does not get into the answer."""
    for line in lines:
        sys.stderr.write(f"kvtier: {line}\n")


def refuse(problems: Iterable[str], code: int) -> int:
    """Says why nothing was done; returns the exit code."""
    complain(f"error: {problem}" for problem in problems)
    return code
