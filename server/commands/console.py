"""Output of the commands on standard output and standard error, and their exit codes."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from ..printable import printable

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
    (0, "all", "success; `doctor`: no check failed (warnings are possible); `fsck`: no damage"),
    (EXIT_FAILURE, "all", "failed, or refused by the server; standard error has the reason"),
    (EXIT_FAILURE, "doctor", "a check failed"),
    (EXIT_FAILURE, "drain", "some work did not finish in time"),
    (EXIT_FAILURE, "fleet", "a server did not answer, or was not drained"),
    (EXIT_FAILURE, "fsck", "there is unrepaired damage"),
    (EXIT_USAGE, "all", "wrong usage, or no server answered"),
    (EXIT_LEFT_BEHIND, "serve", "the server ended, but a tier did not close in time"),
    (EXIT_REPAIRED, "fsck", "all damage was repaired"),
    (EXIT_UNCHECKED, "fsck", "a tier could not be checked"),
    (EXIT_CONFIG, "serve, config, fsck, remote", "the configuration is invalid (EX_CONFIG)"),
)
"""Every exit code, the commands that use it, and its meaning."""


def print_line(text: str) -> None:
    sys.stdout.write(f"{text}\n")


def complain(lines: Iterable[str]) -> None:
    """Writes each line to standard error."""
    for line in lines:
        sys.stderr.write(f"kvtier: {printable(line)}\n")


def refuse(problems: Iterable[str], code: int) -> int:
    """Writes the problems to standard error; returns `code`."""
    complain(f"error: {problem}" for problem in problems)
    return code
