"""Signals that take effect before a test continues."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from .polling import wait_until

__all__ = ["stop"]


def stop(pid: int, seconds: float = 60.0) -> None:
    """Sends SIGSTOP and waits until all threads have stopped.

    They run until one has received it.
    """
    os.kill(pid, signal.SIGSTOP)
    tasks = Path(f"/proc/{pid}/task")
    wait_until(lambda: all(map(_is_stopped, tasks.iterdir())), seconds, otherwise=f"process {pid} runs", interval=0.001)


def _is_stopped(task: Path) -> bool:
    return (task / "stat").read_text().rpartition(")")[2].split()[0] == "T"
