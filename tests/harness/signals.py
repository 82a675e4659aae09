"""Signals that take effect before a test continues."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

__all__ = ["stop"]


def stop(pid: int, seconds: float = 60.0) -> None:
    """Sends SIGSTOP and waits until all threads have stopped.

    They run until one has received it.
    """
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + seconds
    while not all(_is_stopped(task) for task in Path(f"/proc/{pid}/task").iterdir()):
        assert time.monotonic() < deadline, f"process {pid} does not stop"
        time.sleep(0.001)


def _is_stopped(task: Path) -> bool:
    return (task / "stat").read_text().rpartition(")")[2].split()[0] == "T"
