"""Output of the commands on standard output and standard error, and their exit codes."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from collections.abc import Iterable

from ..printable import printable

__all__ = [
    "EXIT_CODES",
    "EXIT_CONFIG",
    "EXIT_FAILURE",
    "EXIT_INTERRUPTED",
    "EXIT_LEFT_BEHIND",
    "EXIT_REPAIRED",
    "EXIT_UNCHECKED",
    "EXIT_UNREACHABLE",
    "EXIT_USAGE",
    "complain",
    "forget_output",
    "is_lost_output",
    "prepare_streams",
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
EXIT_INTERRUPTED = 130

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
    (EXIT_INTERRUPTED, "all", "interrupted by Ctrl-C"),
)
"""Every exit code, the commands that use it, and its meaning."""


_LOST_OUTPUT = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EBADF, errno.EIO))


def prepare_streams() -> None:
    """Opens closed standard streams, and escapes characters that a terminal cannot show.

    If a standard stream were closed, the next file or socket would get its number, and would
    receive what a library writes to this stream. A closed standard output stays unwritable.
    """
    for number, (name, flags) in enumerate((("stdin", os.O_RDONLY), ("stdout", os.O_RDONLY), ("stderr", os.O_WRONLY))):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, flags)  # gets the lowest free number
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def is_lost_output(error: OSError) -> bool:
    """Returns whether a write to a standard stream failed, not an operation on a file."""
    return error.errno in _LOST_OUTPUT and error.filename is None


def forget_output() -> None:
    """Discards buffered output, so that the interpreter's flush at exit does not fail again."""
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(null, stream.fileno())
    os.close(null)


def print_line(text: str) -> None:
    sys.stdout.write(f"{text}\n")


def complain(lines: Iterable[str]) -> None:
    """Writes each line to standard error, if it can be written to."""
    with contextlib.suppress(OSError):
        for line in lines:
            sys.stderr.write(f"kvtier: {printable(line)}\n")


def refuse(problems: Iterable[str], code: int) -> int:
    """Writes the problems to standard error; returns `code`."""
    complain(f"error: {problem}" for problem in problems)
    return code
