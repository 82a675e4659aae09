"""A real kvtier server in its own process: `server_process.py DIR ACTION` also controls it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.fork_server import ForkedProcess, fork_command, run_command
from harness.polling import polls, wait_until
from harness.signals import stop

__all__ = ["ServerProcess"]

_KVTIER = Path(sys.executable).with_name("kvtier")
_LONG_TIMEOUTS = {"KVTIER_SESSIONS_HEARTBEAT_INTERVAL": "10s"}
START_SECONDS = 120


class ServerProcess:
    """A server with its files in `folder`; `region` is the CPU tier's size, `flags` are added.

    Clients of one that is ``long_timeout`` do not give it up when it is silent for seconds, as all
    of a machine may be.
    """

    def __init__(
        self, folder: Path, region: str = "512MiB", flags: Sequence[str] = (), *, long_timeout: bool = False
    ) -> None:
        self.folder, self.region, self.flags = folder, region, tuple(flags)
        self._environment = {**os.environ, **(_LONG_TIMEOUTS if long_timeout else {})}
        self.endpoint = f"unix:{folder / 'kvtier.sock'}"
        self._child: subprocess.Popen[bytes] | ForkedProcess | None = None

    @property
    def is_running(self) -> bool:
        """Whether this process has started it and it has not ended."""
        return self._child is not None and self._child.poll() is None

    def start(self) -> None:
        """Starts it and waits until it answers."""
        arguments = ["serve", "--listen", self.endpoint, "--region-size", self.region, *self.flags]
        arguments += ["--data-dir", str(self.folder / "data")]
        self._reap()
        with (self.folder / "server.log").open("ab") as log, open(os.devnull) as null:  # noqa: PTH123
            files = {"stdin": null.fileno(), "stdout": log.fileno(), "stderr": log.fileno()}
            if __name__ == "__main__":  # a fork would end with this process
                command = [_KVTIER, *arguments]
                self._child = subprocess.Popen(command, env=self._environment, start_new_session=True, **files)
            else:
                self._child = fork_command(arguments, environment=self._environment, **files)
        (self.folder / "pid").write_text(str(self._child.pid))
        for _ in polls(START_SECONDS, 0.1):
            with contextlib.suppress(subprocess.CalledProcessError):
                self._ask("status", seconds=2)
                return
        raise TimeoutError((self.folder / "server.log").read_text()[-2000:])

    def signal(self, number: int) -> None:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            pid = int((self.folder / "pid").read_text())
            if number == signal.SIGSTOP:
                stop(pid)
            else:
                os.kill(pid, number)

    def kill(self) -> None:
        """Kills it with SIGKILL and waits until it is gone, so that the socket is free."""
        self.signal(signal.SIGKILL)
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it was reaped meanwhile
            process = Path("/proc", (self.folder / "pid").read_text(), "stat")
            wait_until(lambda: process.read_text().rpartition(")")[2].split()[0] in "ZX")
        (self.folder / "pid").unlink(missing_ok=True)
        self._reap()

    def _reap(self) -> None:
        """Waits for the process that was started here; another process may have killed it."""
        child, self._child = self._child, None
        if child is not None:
            child.wait(START_SECONDS)

    def restart_twice(self) -> None:
        for _ in range(2):
            self.kill()
            self.start()

    def status(self) -> dict[str, Any]:
        return self._ask("status")

    def handoffs(self) -> dict[str, Any]:
        return self._ask("handoffs")

    def evict_all(self) -> None:
        """Evicts all blocks that are not pinned."""
        assert self._ask("evict", "--all")["done"]

    def conversations(self, *options: str) -> dict[str, Any]:
        """Lists conversations or acts on one, like `kvtier conversations`."""
        return self._ask("conversations", *options)

    def _ask(self, what: str, *options: str, seconds: int = 60) -> dict[str, Any]:
        arguments = [what, *options, "--json", "--timeout", str(seconds), "--endpoint", self.endpoint]
        done = run_command(arguments, environment=os.environ, timeout=seconds + 60)
        done.check_returncode()
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer


if __name__ == "__main__":
    # The caller may be pinned to a processor that it keeps busy.
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    server = ServerProcess(Path(sys.argv[1]))
    match sys.argv[2]:
        case "start":
            server.start()
        case "kill":
            server.kill()
        case "hang":
            server.signal(signal.SIGSTOP)
        case "resume":
            server.signal(signal.SIGCONT)
        case "restart-twice":  # a client that knows the process id sees the third life only
            os.kill(int(sys.argv[3]), signal.SIGSTOP)
            try:
                server.restart_twice()
            finally:
                os.kill(int(sys.argv[3]), signal.SIGCONT)
        case "await-holds":  # this many of a direction, published since it started
            direction, count = sys.argv[3], int(sys.argv[4])
            wait_until(
                lambda: any(
                    row["direction"] == direction and row["published"] >= count for row in server.handoffs()["totals"]
                ),
                START_SECONDS,
            )
        case "await-durable":

            def is_durable() -> bool:
                cpu, lmdb = server.status()["tiers"]
                return not (lmdb["queued_bytes"] or lmdb["jobs"]) and int(lmdb["blocks"]) >= int(cpu["blocks"]) > 0

            wait_until(is_durable, START_SECONDS)
        case "await-session":
            wait_until(lambda: server.status()["sessions"], START_SECONDS)
        case "status":
            print(json.dumps(server.status()))
