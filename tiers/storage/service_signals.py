"""Start of child processes, which must survive signals to the whole service.

A terminal and systemd send signals to the server and to its children at the same time. The children
must live until the server has written its blocks, so they block these signals from their first
instruction on. The server closes their connections after its drain.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

__all__ = ["SERVICE_SIGNALS", "start_module", "without_signals"]

SERVICE_SIGNALS = frozenset(
    (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
)


@contextlib.contextmanager
def without_signals() -> Iterator[None]:
    """Blocks the signals in this thread, so that a process started here blocks them too."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SERVICE_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def start_module(
    module: str,
    arguments: Sequence[str],
    fds: Sequence[int],
    *,
    stdout: IO[bytes] | int = subprocess.DEVNULL,
    stderr: IO[bytes] | int = subprocess.PIPE,
) -> subprocess.Popen[bytes]:
    """Runs a module with the same interpreter; the child inherits `fds`. Raises `OSError`.

    A child that asks the kernel to end it with its parent ends with the thread that calls this.
    """
    own = str(Path(__file__).absolute().parents[3])  # from which a child can import this package
    path = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), own])
    with without_signals():
        return subprocess.Popen(  # noqa: S603 - our own interpreter and arguments
            # -P: nothing in the current directory may shadow a package, such as `cuda` NVIDIA's.
            [sys.executable, "-P", "-m", module, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            pass_fds=fds,
            env=os.environ | {"PYTHONPATH": path},
        )
