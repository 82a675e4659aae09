"""How the commands talk to people and to scripts: answers, complaints, exit codes."""

from __future__ import annotations

import sys
from collections.abc import Iterable

__all__ = [
    "EXIT_CODES",
    "EXIT_CONFIG",
    "EXIT_FAILURE",
    "EXIT_LEFT_BEHIND",
    "EXIT_REPAIRED",
    "EXIT_UNCHECKED",
    "EXIT_UNREACHABLE",
    "EXIT_USAGE",
    "complain",
    "print_line",
    "refuse",
]

EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_UNREACHABLE = 2
EXIT_REPAIRED = 3
EXIT_LEFT_BEHIND = 3
EXIT_UNCHECKED = 4
EXIT_CONFIG = 78

EXIT_CODES = (
    (0, "all", "done; of `doctor`: nothing fails, though there may be warnings; of `fsck`: all sound"),
    (EXIT_FAILURE, "all", "failed, or refused by the server; the line on standard error says why"),
    (EXIT_FAILURE, "doctor", "a check fails"),
    (EXIT_FAILURE, "drain", "not all that was under way came to its end in time"),
    (EXIT_FAILURE, "fsck", "there is damage, and it is still there"),
    (EXIT_USAGE, "all", "wrong usage, or no server answers"),
    (EXIT_LEFT_BEHIND, "serve", "ended, and a tier was left behind"),
    (EXIT_REPAIRED, "fsck", "there was damage, all repaired"),
    (EXIT_UNCHECKED, "fsck", "a tier could not be checked"),
    (EXIT_CONFIG, "serve, config, fsck", "the configuration cannot be used (EX_CONFIG)"),
)
"""Every exit code, the commands that end with it, and what it says: the one table."""


def print_line(text: str) -> None:
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
