"""Sandbox that runs the documentation's commands: a home, a socket, a server with some blocks."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from harness.launch import Launched
from harness.payloads import key_of, namespace_of, payload
from harness.ports import ReservedPort
from harness.traffic import PART, wait_connected

from kvtier.client import Client

__all__ = ["DocSandbox"]

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 100.0
REQUEST = "demo-2"
"""The request id that pages use."""

_PRELUDE = """
set -e -m
sleep_until_ready() { for _ in $(seq 300); do kvtier status > /dev/null 2>&1 && return; sleep 0.1; done; return 1; }
finish() { for job in $(jobs -p); do kill -TERM -- -$job 2> /dev/null || true; done; wait; }
trap finish EXIT
"""

_PROGRAMS = {
    "kvtier": 'PYTHONPATH={root}/src:$PYTHONPATH exec {python} -m kvtier.server "$@"',
    "python": 'exec {python} "$@"',
    # Error 2 of grep: a process ended during the search.
    "grep": '/usr/bin/grep "$@" || [ $? -eq 2 ]',
}
"""Programs on a reader's path."""


class DocSandbox:
    """A directory with links to all files of the repository, and its own environment."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._runtime = directory / "run"
        self._work = directory / "work"
        for made in (self._runtime, self._work, directory / "home", directory / "bin"):
            made.mkdir()
        (directory / "home" / "data" / "kvtier").mkdir(mode=0o700, parents=True)  # left by a server
        for name in ("deploy", "docs", "examples", "tests", "bench"):
            (self._work / name).symlink_to(ROOT / name)
        for name, program in _PROGRAMS.items():
            file = directory / "bin" / name
            file.write_text(f"#!/bin/sh\n{program.format(root=ROOT, python=sys.executable)}\n")
            file.chmod(0o755)
        self._port = ReservedPort()
        # Pages show a large server, and its ports and paths may be in use on this machine.
        self._instead = {
            "127.0.0.1:9464": f"127.0.0.1:{self._port.number}",
            "/var/lib/kvtier": f"{directory}/var",
            "8GiB": "64MiB",
            "1GiB": "64MiB",
            "4GiB": "64MiB",
        }
        self.environment = {name: text for name, text in os.environ.items() if not name.startswith("KVTIER_")}
        self.environment |= {
            "HOME": str(directory / "home"),
            "XDG_RUNTIME_DIR": str(self._runtime),
            "XDG_DATA_HOME": str(directory / "home" / "data"),
            "PATH": f"{directory}/bin:{os.environ['PATH']}",
            "KVTIER_TEST_DESK": str(directory),
        }

    @property
    def socket(self) -> str:
        """The default socket of this reader's server."""
        return f"unix:{self._runtime}/kvtier/kvtier.sock"

    def server(self) -> Launched:
        """Starts `kvtier serve` in the background and makes one request with misses."""
        arguments = ["--listen", self.socket, "--data-dir", f"{self.directory}/served", "--region-size", "64MiB"]
        arguments += ["--metrics", self._instead["127.0.0.1:9464"], "--log-format", "json"]
        return Launched(arguments, self.directory / "log")

    def serve_a_request(self) -> None:
        """Stores some blocks and makes one request with the id that pages use."""
        keys = [key_of(number) for number in range(5)]
        with Client(self.socket, namespace=namespace_of(PART)) as client:
            wait_connected(client)
            client.begin_request("turn-1", keys, conversation_id="c1").release()
            client.store(keys[:4], [payload(key, PART) for key in keys[:4]])
            client.load(keys, list(np.zeros((5, PART), np.uint8)), request_id=REQUEST)

    def run(self, commands: list[str]) -> subprocess.CompletedProcess[str]:
        """Runs commands in one shell; each must exit with 0.

        Waits for servers in the background.
        """
        script = _PRELUDE
        for command in commands:
            script += f"{self._translated(command)}\n"
            if "kvtier serve" in command:
                script += "sleep_until_ready\n"
            elif command.startswith("kill "):
                script += "wait %1 2> /dev/null || true\n"
        return self._run(["bash", "-c", script])

    def run_python(self, text: str) -> subprocess.CompletedProcess[str]:
        return self._run([sys.executable, "-W", "error", "-c", self._translated(text)])

    def clear(self) -> None:
        """Kills processes that a command has left running, and releases the port."""
        mark = f"KVTIER_TEST_DESK={self.directory}".encode()
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if mark in (process / "environ").read_bytes().split(b"\0"):
                    os.kill(int(process.name), signal.SIGKILL)
        self._port.close()

    def _translated(self, text: str) -> str:
        for said, meant in self._instead.items():
            text = text.replace(said, meant)
        return text

    def _run(self, command: list[str]) -> subprocess.CompletedProcess[str]:
        # A file, because a background process of the command would keep a pipe open.
        log = self.directory / f"output{time.monotonic_ns()}"
        with log.open("w") as output:
            done = subprocess.run(
                command,
                cwd=self._work,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                timeout=SECONDS,
                check=False,
            )
        return subprocess.CompletedProcess(command, done.returncode, log.read_text(), "")
