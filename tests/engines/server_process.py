"""A real kvtier server in a process of its own, also controlled from other processes: `server_process.py DIR ACTION`."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

__all__ = ["ServerProcess"]

_KVTIER = Path(sys.executable).with_name("kvtier")


class ServerProcess:
    """A server whose socket, data and process id are in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.endpoint = f"unix:{folder / 'kvtier.sock'}"

    def start(self) -> None:
        """Starts it and waits until it answers."""
        command = [_KVTIER, "serve", "--listen", self.endpoint, "--region-size", "512MiB"]
        with (self.folder / "server.log").open("ab") as log:
            process = subprocess.Popen(
                [*command, "--data-dir", self.folder / "data"], stdout=log, stderr=log, start_new_session=True
            )
        (self.folder / "pid").write_text(str(process.pid))
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            with contextlib.suppress(subprocess.CalledProcessError):
                self.status()
                return
            time.sleep(0.1)
        raise TimeoutError((self.folder / "server.log").read_text()[-2000:])

    def signal(self, number: int) -> None:
        """Sends it a signal."""
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            os.kill(int((self.folder / "pid").read_text()), number)

    def kill(self) -> None:
        """Kills it without notice."""
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGKILL)
        (self.folder / "pid").unlink(missing_ok=True)
        time.sleep(0.2)

    def status(self) -> dict[str, Any]:
        """Asks what it holds."""
        command = [_KVTIER, "status", "--json", "--timeout", "2", "--endpoint", self.endpoint]
        done = subprocess.run(command, capture_output=True, check=True, timeout=20)
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer


if __name__ == "__main__":
    server = ServerProcess(Path(sys.argv[1]))
    match sys.argv[2]:
        case "start":
            server.start()
        case "kill":
            server.kill()
        case "hang":
            server.signal(signal.SIGSTOP)
        case "status":
            print(json.dumps(server.status()))
