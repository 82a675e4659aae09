"""`kvtier serve` in a child process that tests can kill, stop, limit and restart."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvtier.client.transport.grpc_methods import CHANNEL_OPTIONS
from kvtier.protos.v1 import admin_pb2, admin_pb2_grpc

from .fork_server import ForkedProcess, fork_command
from .polling import polls, wait_until
from .ports import ReservedPort
from .signals import stop

__all__ = ["MIB", "ServerProcess", "bulk_pid", "own_bytes"]

MIB = 1 << 20

READY_SECONDS = 60.0
END_SECONDS = 60.0
LEASE = "10m"
"""Long enough that leases never expire during a test, unless the test sets its own."""
HEARTBEAT_INTERVAL = "10s"
"""Clients tolerate a server that is silent for seconds, because the machine may pause."""


def own_bytes(pid: int) -> int:
    """The resident memory of a process without shared memory."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:"))


def bulk_pid(server_pid: int) -> int | None:
    """The pid of a server's bulk process, if it has one."""
    for task in Path(f"/proc/{server_pid}/task").iterdir():
        with contextlib.suppress(OSError):  # the thread has just ended
            for child in map(int, (task / "children").read_text().split()):
                with contextlib.suppress(OSError):
                    if b"kvtier.server.bulk" in Path(f"/proc/{child}/cmdline").read_bytes():
                        return child
    return None


class ServerProcess:
    """One server: a Unix socket, a data directory and a log that outlive each process.

    Args:
        directory: of all its files; its path must be short, as a socket's path must be.
        region: size of the CPU tier in bytes.
        lmdb: size of the tier on disk in bytes; 0 for no such tier.
        config: additions to the TOML file.
        tier: type of the tier on disk.
        prefix: a command that runs the server's command. Without it, the server is a fork.
        tier_config: additions to the tier's table.
        tcp: also listens on a TCP port of the loopback, whose address is `tcp`.
        insecure: allows unencrypted TCP.
    """

    def __init__(
        self,
        directory: Path,
        *,
        region: int = 64 * MIB,
        lmdb: int = 256 * MIB,
        config: str = "",
        tier: str = "lmdb",
        prefix: Sequence[str] = (),
        tier_config: str = "",
        tcp: bool = False,
        insecure: bool = True,
    ) -> None:
        self.directory = directory
        self.path = directory / "s"
        self.endpoint = f"unix:{self.path}"
        self._port = ReservedPort() if tcp else None
        self.tcp = f"127.0.0.1:{self._port.number}" if self._port is not None else ""
        listen = json.dumps([self.endpoint, *filter(None, [self.tcp])])
        self.log_path = directory / "log"
        self.data_dir = directory / "data"
        config_path = directory / "kvtier.toml"
        if tcp and insecure:
            config = f"insecure = true\n{config}"
        if not lmdb:
            config = f"tiers = []\n{config}"
        tiers = f'[[tiers]]\ntype = "{tier}"\nsize = {lmdb}\n{tier_config}\n' if lmdb else ""
        config_path.write_text(
            f'region_size = {region}\ndata_dir = "{self.data_dir}"\nlisten = {listen}\n'
            f'{config}\n[log]\nformat = "json"\n{tiers}'
        )
        self._region = region
        self._arguments = ["serve", "--config", str(config_path)]
        self._environment = {name: text for name, text in os.environ.items() if not name.startswith("KVTIER_")}
        if "heartbeat_interval" not in config:
            self._environment["KVTIER_SESSIONS_HEARTBEAT_INTERVAL"] = HEARTBEAT_INTERVAL
        if "[leases]" not in config:
            self._environment["KVTIER_LEASES_DEFAULT"] = LEASE
        self._prefix = prefix
        self._process: ForkedProcess | subprocess.Popen[bytes] | None = None
        self._channel = grpc.insecure_channel(self.endpoint, options=CHANNEL_OPTIONS)
        self._admin = admin_pb2_grpc.AdminServiceStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def log(self) -> str:
        """The log of all its processes."""
        return self.log_path.read_text() if self.log_path.exists() else ""

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self, *, backed: bool = True) -> Self:
        """Starts a process and waits until it serves; with `backed` until its region is backed."""
        self.launch()
        self.wait_ready(backed=backed)
        return self

    def launch(self) -> None:
        """Starts a process."""
        assert not self.alive
        with self.log_path.open("ab") as log, open(os.devnull) as null:  # noqa: PTH123
            if self._prefix:
                command = [*self._prefix, sys.executable, "-m", "kvtier.server", *self._arguments]
                self._process = subprocess.Popen(command, stdin=null, stdout=log, stderr=log, env=self._environment)
            else:
                self._process = fork_command(
                    self._arguments,
                    environment=self._environment,
                    stdin=null.fileno(),
                    stdout=log.fileno(),
                    stderr=log.fileno(),
                )

    def wait_ready(self, *, backed: bool = True) -> None:
        """Waits until the health check returns SERVING."""

        def is_ready() -> bool:
            assert self.alive, f"the server ended with {self._process and self._process.poll()}:\n{self.log[-3000:]}"
            return self._is_ready(backed=backed)

        try:
            wait_until(is_ready, READY_SECONDS, otherwise=lambda: "the server is not ready")
        except AssertionError as error:
            if self.alive:
                self._log_stacks()
            raise AssertionError(f"{error}:\n{self.log[-20_000:]}") from None

    def kill(self) -> None:
        """SIGKILL, and waits for the end."""
        self._signal_and_wait(signal.SIGKILL)

    def terminate(self) -> int:
        """SIGTERM, and waits for the end; returns the exit code."""
        return self._signal_and_wait(signal.SIGTERM)

    def wait(self) -> int:
        """Waits until the process ends without a signal from here; returns the exit code."""
        return self._process.wait(END_SECONDS)

    def restart(self) -> None:
        """SIGKILL, and a new process on the same socket and directory."""
        self.kill()
        self.start()

    def suspend(self) -> None:
        """SIGSTOP."""
        stop(self.pid)

    def resume(self) -> None:
        """SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)

    def limit(self, what: int, value: int) -> None:
        """Sets a soft resource limit (`resource.RLIMIT_…`) of the running process."""
        _, hard = resource.prlimit(self.pid, what)
        resource.prlimit(self.pid, what, (value, hard))

    def status(self, timeout: float = 60.0) -> admin_pb2.GetStatusResponse:
        answer: admin_pb2.GetStatusResponse = self._admin.GetStatus(
            admin_pb2.GetStatusRequest(), timeout=timeout, wait_for_ready=True
        )
        return answer

    def tier(self, name: str) -> admin_pb2.TierStatus:
        return next(tier for tier in self.status().tiers if tier.name == name)

    def wait_for(self, what: Any, seconds: float = 60.0) -> admin_pb2.GetStatusResponse:
        """Waits until `what(status)` is true; returns that status."""
        for _ in polls(seconds, 0.02):
            status = self.status()
            if what(status):
                return status
        raise AssertionError(f"still {status}")

    def wait_for_stored(self, blocks: int) -> None:
        """Waits until the first lower tier has written these blocks, which a SIGKILL then keeps."""

        def are_stored(status: admin_pb2.GetStatusResponse) -> bool:
            tier = status.tiers[1]
            return tier.blocks == blocks and not tier.jobs and not tier.queued_bytes

        self.wait_for(are_stored)

    def own_bytes(self) -> int:
        """Its resident memory without the shared region."""
        return own_bytes(self.pid)

    def descriptors(self) -> int:
        return len(list(Path(f"/proc/{self.pid}/fd").iterdir()))

    def close(self) -> None:
        """Ends the running process. Files of a killed process stay in the directory."""
        if self.alive:
            self.kill()
        self._channel.close()
        if self._port is not None:
            self._port.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _is_ready(self, *, backed: bool) -> bool:
        try:
            answer = self._health.Check(health_pb2.HealthCheckRequest(), timeout=5, wait_for_ready=True)
            if answer.status != health_pb2.HealthCheckResponse.SERVING:
                return False
            # The last extent may be too short for a piece.
            return not backed or self.status(5).tiers[0].available_bytes >= self._region * 0.9
        except grpc.RpcError:
            return False

    def _signal_and_wait(self, number: int) -> int:
        self._process.send_signal(number)
        try:
            return self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._log_stacks()
            raise AssertionError(f"the server does not end:\n{self.log[-20_000:]}") from None

    def _log_stacks(self) -> None:
        """Ends a process that hangs, and waits until the stacks of its threads are in the log."""
        self._process.send_signal(signal.SIGABRT)
        self._process.wait(END_SECONDS)
        with contextlib.suppress(AssertionError):  # another process logs them
            wait_until(lambda: "stacks of the crash" in self.log, END_SECONDS)
