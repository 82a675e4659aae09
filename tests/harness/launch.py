"""Starts `kvtier serve` with flags, as a user does; gives access to its log and memory."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from .fork_server import fork_command
from .polling import polls
from .server_process import HEARTBEAT_INTERVAL

__all__ = ["Launched", "launch", "refused_start"]

READY_SECONDS = 60.0
END_SECONDS = 60.0


class Launched:
    """A server process and its log in JSON lines."""

    def __init__(self, arguments: list[str], log_path: Path) -> None:
        environment = {name: text for name, text in os.environ.items() if not name.startswith("KVTIER_")}
        environment["KVTIER_SESSIONS_HEARTBEAT_INTERVAL"] = HEARTBEAT_INTERVAL
        self._log_path = log_path
        self.started = time.monotonic()
        with log_path.open("wb") as log, open(os.devnull) as null:  # noqa: PTH123
            self.process = fork_command(
                ["serve", *arguments],
                environment=environment,
                stdin=null.fileno(),
                stdout=log.fileno(),
                stderr=log.fileno(),
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def log(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._log_path.read_text().splitlines()]

    def wait_ready(self, *, backed: bool = True) -> dict[str, Any]:
        """Waits until the server is ready, with `backed` until its region is backed.

        Returns that log line, and `seconds` since the start of the process.
        """
        line = self._wait_line("ready")
        if backed:
            self._wait_line("region backed")
        return line

    def end(self, number: int = signal.SIGTERM) -> int:
        """Sends a signal, waits for the end, returns the exit code."""
        self.process.send_signal(number)
        return self.process.wait(END_SECONDS)

    def memory(self) -> dict[str, int]:
        """Memory fields of /proc/PID/status, in bytes."""
        rows = (line.split() for line in Path(f"/proc/{self.pid}/status").read_text().splitlines())
        return {row[0].rstrip(":"): int(row[1]) << 10 for row in rows if row[-1] == "kB"}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(END_SECONDS)

    def _wait_line(self, event: str) -> dict[str, Any]:
        for _ in polls(READY_SECONDS):
            text = self._log_path.read_text()
            if f'"event": "{event}"' in text and text.endswith("\n"):
                line = next(line for line in self.log if line["event"] == event)
                return line | {"seconds": time.monotonic() - self.started}
            assert self.process.poll() is None, f"it ended with {self.process.returncode}:\n{text}"
        raise AssertionError(f"no {event!r}:\n{text}")


def launch(directory: Path, *flags: str, region: str = "32MiB", listen: str | None = None) -> Launched:
    """Starts a server with socket `s` and its data in this directory; later flags win."""
    number = len(list(directory.glob("log*")))
    arguments = ["--listen", listen or f"unix:{directory}/s", "--data-dir", f"{directory}/data"]
    return Launched([*arguments, "--region-size", region, *flags], directory / f"log{number}")


def refused_start(directory: Path, *flags: str, **more: Any) -> str:
    """Starts a server that must refuse to start; returns the reason."""
    with launch(directory, *flags, **more) as server:
        assert server.process.wait(READY_SECONDS) == 1
        [line] = [line for line in server.log if line["level"] == "error"]
        assert "exception" not in line
        assert line["event"] == "cannot start"
        reason: str = line["reason"]
        return reason
