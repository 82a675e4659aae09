"""Process of a peer: starts `child.py` and sends commands to it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from .base import PeerFailed, PeerMissing
from .entries import Entry, isolation

__all__ = ["PeerProcess"]

PATIENCE = 20.0
"""Maximum seconds until a peer's process has ended all its servers."""


class PeerProcess:
    """Context manager that runs `child.py` and ends all its processes.

    The child and its servers are a separate process group. So Ctrl-C at the terminal reaches only
    the parent, which then ends the group. They are of the parent's session, because Linux shares
    the processors between sessions (sched_autogroup).
    """

    def __init__(self, entry: Entry, directory: Path) -> None:
        """Output goes to `directory`, which the caller removes. Raises `PeerMissing`."""
        self._name = entry.name
        self._log = directory / "child.log"
        command = [str(entry.python), "-m", "bench.peers.child", entry.peer]
        if not entry.python.exists():
            raise PeerMissing(f"its environment is not installed ({entry.python.parent.parent.name}: make bench-peers)")
        if entry.isolated:
            command = [*_isolated(), *command, "--isolated"]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=entry.environment(),
                process_group=0,
            )

    def __enter__(self) -> Self:
        try:
            self._answer()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Runs a command of `Player`. Raises `PeerMissing` and `PeerFailed`."""
        assert self._process.stdin is not None
        try:
            print(json.dumps({"do": do, **arguments}), file=self._process.stdin, flush=True)
        except BrokenPipeError:
            raise self._ended() from None
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._ended()
        answer: dict[str, Any] = json.loads(line)
        if "absent" in answer:
            raise PeerMissing(answer["absent"])
        if "failed" in answer:
            raise PeerFailed(f"{self._name}: {answer['failed']}")
        return answer

    def _ended(self) -> PeerFailed:
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return PeerFailed(f"the process of {self._name} ended: {lines[-1] if lines else 'without a word'}")

    def _end(self) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
            self._process.wait(PATIENCE)
        except (BrokenPipeError, subprocess.TimeoutExpired, KeyboardInterrupt):
            pass
        finally:
            _kill_group(self._process.pid)
            self._process.wait()
            if self._process.stdout is not None:
                self._process.stdout.close()


def _isolated() -> list[str]:
    command = isolation()
    if command is None:
        raise PeerMissing(
            "its servers listen on every address, and this system does not allow a separate network (unshare)"
        )
    return command


def _kill_group(group: int) -> None:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return
