"""Server process for the benchmarks: a real `kvtier serve`."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from kvtier.client import KVTierError
from kvtier.protos.endpoint import parse_endpoint
from kvtier.protos.v1.admin_pb2 import GetStatusResponse
from kvtier.server.commands.admin_client import ask_status

from .certificate import Certificate

__all__ = ["Service", "cpu_seconds_of", "memory_bytes_of"]

PATIENCE = 60.0
"""Maximum seconds for each of start, allocation of the region, and end."""


class Service:
    """`kvtier serve` on its own Unix socket and TCP port."""

    def __init__(
        self,
        directory: Path,
        region_bytes: int,
        *,
        lmdb_bytes: int | None = None,
        valkey_url: str | None = None,
        config: str = "",
        certificate: Certificate | None = None,
        eviction: str | None = "lru",
        tree: Path | None = None,
    ) -> None:
        """Prepares a server; without `lmdb_bytes` and `valkey_url` it has the CPU tier only.

        With `certificate` TCP uses TLS, and clients need that certificate. `config` is appended to
        the configuration. `eviction`: the policy of the CPU tier, or None for the default one; with
        `lru` the next load finds its blocks, although the benchmark sends no requests. `tree`:
        directory of another tree whose server runs. The caller removes `directory`.
        """
        self._directory = directory
        # Not in `directory`, whose path may be too long for a socket.
        self._sockets = Path(tempfile.mkdtemp(prefix="kvtier-bench-"))
        self.unix = f"unix:{self._sockets / 'kvtier.sock'}"
        self.tcp = f"127.0.0.1:{_free_port()}"
        self._region_bytes = region_bytes
        self.log = directory / "server.log"
        self._config = directory / "kvtier.toml"
        tiers = "tiers = []\n"
        if lmdb_bytes is not None:
            tiers = f'[[tiers]]\ntype = "lmdb"\nsize = {lmdb_bytes}\ndurability = "process"\neviction = "lru"\n'
        if valkey_url is not None:
            tiers = f'[[tiers]]\ntype = "valkey"\noptions = {{url = "{valkey_url}"}}\n'
        self._config.write_text(
            f"insecure = {json.dumps(certificate is None)}\n"
            f"listen = {json.dumps([self.unix, self.tcp])}\nregion_size = {region_bytes}\n"
            f"data_dir = {json.dumps(str(directory))}\n"
            + (f"cpu = {{eviction = {json.dumps(eviction)}}}\n" if eviction is not None else "")
            + f"{config}\n{tiers}"
            + (certificate.settings if certificate is not None else "")
        )
        self._source = {} if tree is None else {"PYTHONPATH": str(tree / "src")}
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> float:
        """Starts the server and waits for its region; returns the seconds to the first answer."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("KVTIER_")}
        environment |= self._source
        started = time.perf_counter()
        with self.log.open("ab") as log:
            command = [sys.executable, "-m", "kvtier.server", "serve", "--config", str(self._config)]
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)
        status = self._wait_for_status()
        answered = time.perf_counter() - started
        while status.tiers[0].available_bytes < self._region_bytes:
            if time.perf_counter() - started > PATIENCE:
                raise RuntimeError(f"only {status.tiers[0].available_bytes} bytes of the region are allocated")
            time.sleep(0.05)
            status = self.status()
        return answered

    @property
    def pid(self) -> int:
        """Process id of the server process; its children have others."""
        assert self._process is not None
        return self._process.pid

    def stop(self) -> None:
        """Stops the server with SIGTERM."""
        process, self._process = self._process, None
        if process is not None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                raise RuntimeError("the server did not end on SIGTERM") from None

    def status(self) -> GetStatusResponse:
        return ask_status(parse_endpoint(self.unix), 5.0)

    def memory_bytes(self) -> int:
        """Returns the anonymous memory of the server's processes. The region does not count."""
        return memory_bytes_of(self.pid)

    def cpu_seconds(self) -> float:
        """Returns the processor time of the server's processes."""
        return cpu_seconds_of(self.pid)

    def _wait_for_status(self) -> GetStatusResponse:
        assert self._process is not None
        deadline = time.perf_counter() + PATIENCE
        while True:
            try:
                return self.status()
            except KVTierError as error:
                if self._process.poll() is not None or time.perf_counter() > deadline:
                    tail = self.log.read_text(errors="replace")[-2000:]
                    raise RuntimeError(f"the server does not answer: {error}\n{tail}") from error
            time.sleep(0.005)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.stop()
        finally:
            shutil.rmtree(self._sockets, ignore_errors=True)


def memory_bytes_of(pid: int) -> int:
    """Returns the anonymous memory of a process and its descendants."""
    return sum(map(_anonymous_bytes, (pid, *_children(pid))))


def cpu_seconds_of(pid: int) -> float:
    """Returns the processor time of a process and its living descendants."""
    return sum(map(_cpu_seconds, (pid, *_children(pid))))


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            found += [child, *_children(child)]
    return found


def _anonymous_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
