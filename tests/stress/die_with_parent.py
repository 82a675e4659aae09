"""Runs a program that dies with its parent: `die_with_parent.py PARENT PROGRAM ARGUMENT...`.

The kernel sends the signal when the *thread* that started this process ends, so start it from the
main thread.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Executes the program in its own session, so that only the parent receives Ctrl-C."""
    parent, *command = sys.argv[1:]
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):  # the parent ended before prctl
        sys.exit(1)
    os.setsid()
    os.execv(command[0], command)  # noqa: S606 - no shell is wanted


if __name__ == "__main__":
    main()
