"""Runs a program that the kernel kills when its parent ends: `die_with_parent.py PARENT PROGRAM ARGUMENT...`.

The kernel sends the signal when the *thread* that started this process ends: start it from the main thread.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Becomes the program, in a session of its own: a Ctrl-C is for the parent to deal with."""
    parent, *command = sys.argv[1:]
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):  # it ended before we asked to be told
        sys.exit(1)
    os.setsid()
    os.execv(command[0], command)  # noqa: S606 - no shell is wanted


if __name__ == "__main__":
    main()
