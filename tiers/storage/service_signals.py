"""Signals to the whole service, which child processes of the server must survive.

A terminal and systemd send signals to the server and to its children at the same time. The children
must live until the server has written its blocks, so they block these signals from their first
instruction on. The server closes their connections after its drain.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator

__all__ = ["SERVICE_SIGNALS", "without_signals"]

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
