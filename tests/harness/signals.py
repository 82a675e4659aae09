"""Signals that take effect before a test continues."""

from __future__ import annotations

import contextlib
import gc
import linecache
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from .polling import wait_until

__all__ = ["interrupted_at", "stop"]


def stop(pid: int, seconds: float = 60.0) -> None:
    """Sends SIGSTOP and waits until all threads have stopped.

    They run until one has received it.
    """
    os.kill(pid, signal.SIGSTOP)
    tasks = Path(f"/proc/{pid}/task")
    wait_until(lambda: all(map(_is_stopped, tasks.iterdir())), seconds, otherwise=f"process {pid} runs", interval=0.001)


def _is_stopped(task: Path) -> bool:
    return (task / "stat").read_text().rpartition(")")[2].split()[0] == "T"


@contextlib.contextmanager
def interrupted_at(line: int, *modules: ModuleType) -> Iterator[list[int]]:
    """Raises KeyboardInterrupt at this line of the modules, counted as executed, on this thread.

    Yields the numbers of the lines that were executed. Only lines with a call count, because Python
    handles signals at calls. The garbage of earlier tests is not collected, because its finalizers
    may execute these lines as well.
    """
    lines: list[int] = []
    paths = [module.__file__ for module in modules]

    def trace(frame: FrameType, event: str, _: object) -> Callable[..., Any]:
        path = frame.f_code.co_filename
        if event == "line" and path in paths:
            line_text = linecache.getline(path, frame.f_lineno).strip()
            if "(" in line_text and not line_text.startswith("with "):
                lines.append(len(lines))
                if len(lines) > line:
                    raise KeyboardInterrupt
        return trace

    gc.disable()
    sys.settrace(trace)
    try:
        yield lines
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(None)
        gc.enable()
