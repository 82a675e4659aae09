"""A Mooncake master and nodes with memory as child processes, in a network of their own."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from harness.own_network import own_network
from harness.polling import wait_until
from harness.signals import stop

from kvtier.tiers.remote.mooncake import MooncakeStore
from kvtier.tiers.remote.mooncake_process import MooncakeProcess, MooncakeSettings

__all__ = ["MASTER", "MooncakeCluster", "needs_mooncake"]

PORT, METRICS_PORT = 17301, 17302
MASTER = f"127.0.0.1:{PORT}"
NODE_BYTES = 128 << 20

NODE = """
import json, sys
from mooncake.store import MooncakeDistributedStore, ReplicateConfig
store = MooncakeDistributedStore()
print(json.dumps(store.setup("127.0.0.1", "P2PHANDSHAKE", int(sys.argv[1]), 16 << 20, "tcp", "", sys.argv[2])), flush=True)
pinned = ReplicateConfig()
pinned.with_hard_pin = True
number = 0
for line in sys.stdin:
    nbytes, codes = json.loads(line), {}
    while nbytes >= 4096:  # fills all memory that Mooncake could evict
        code = store.put(f"filler-{number}", bytes(nbytes), pinned)
        number += 1
        if code:
            nbytes //= 2
    print(json.dumps(number), flush=True)
"""


def _directory() -> Path | None:
    found = importlib.util.find_spec("mooncake")
    return Path(found.submodule_search_locations[0]) if found and found.submodule_search_locations else None


def needs_mooncake() -> None:
    """Skips a test if Mooncake or its libraries are not installed, or without own networks."""
    directory = _directory()
    if directory is None or not (directory / "mooncake_master").exists():
        pytest.skip("needs Mooncake: make test-remote")
    try:
        with own_network():
            pass
    except OSError as error:
        pytest.skip(f"needs a network of its own: {error}")
    probe = subprocess.run([sys.executable, "-c", "import mooncake.store"], capture_output=True, check=False)
    if probe.returncode:
        pytest.skip(f"needs Mooncake's libraries: make test-remote ({probe.stderr[-200:]!r})")


class MooncakeCluster:
    """A master and nodes; `start` may be called again after `kill`.

    Call all methods inside of `own_network`.
    """

    def __init__(self, directory: Path, *options: str, nodes: int = 1, node_bytes: int = NODE_BYTES) -> None:
        self.directory = directory
        self.settings = MooncakeSettings(MASTER, log=directory / "client.log")
        self._options = options
        self._count = nodes
        self._node_bytes = node_bytes
        self.master: subprocess.Popen[bytes] | None = None
        self.nodes: list[subprocess.Popen[str]] = []
        self._admin = MooncakeProcess(self.settings)
        self._client = MooncakeStore(self._admin, 20.0)

    def start(self) -> None:
        directory = _directory()
        assert directory
        flags = ["-rpc_address=127.0.0.1", f"-rpc_port={PORT}", "-metrics_host=127.0.0.1"]
        flags += [f"-metrics_port={METRICS_PORT}", "-logtostderr=true", "-enable_metric_reporting=false"]
        with (self.directory / "master.log").open("ab") as log:
            self.master = subprocess.Popen(
                [directory / "mooncake_master", *flags, *self._options], stdout=log, stderr=log, cwd=self.directory
            )
        wait_until(self._listens)
        for _ in range(self._count):
            self.start_node()

    def start_node(self) -> None:
        with (self.directory / "node.log").open("ab") as log:
            node = subprocess.Popen(
                [sys.executable, "-c", NODE, str(self._node_bytes), MASTER],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=self.directory,
                text=True,
                env=os.environ | {"MC_STORE_CLIENT_METRIC": "0"},
            )
        self.nodes.append(node)
        assert _answer(node) == 0, "the node cannot be set up"

    def fill(self) -> None:
        """Fills all memory with values that Mooncake may not evict."""
        for node in self.nodes:
            assert node.stdin
            node.stdin.write(f"{json.dumps(8 << 20)}\n")
            node.stdin.flush()
            _answer(node)

    def read(self, name: bytes) -> bytes | None:
        [size] = self._client._ask("size", [name])
        if size < 0:
            return None
        value = bytearray(size)
        assert self._client._get([name], [[memoryview(value)]]) == [size]
        return bytes(value)

    def write(self, name: bytes, value: bytes) -> None:
        """Writes a value, and removes an existing one first: Mooncake would keep it."""
        self._client._ask("remove", [name])
        assert [outcome.value for outcome in self._client.put([name], lambda _: [value], 0.0)] == ["done"]

    def exists(self, name: bytes) -> bool:
        return self._client.exists([name]) == [True]

    def freeze(self, *, frozen: bool) -> None:
        for process in (self.master, *self.nodes):
            assert process
            self.freeze_process(process, frozen=frozen)

    def freeze_process(self, process: subprocess.Popen[bytes] | subprocess.Popen[str], *, frozen: bool) -> None:
        """Returns when all threads of the process have stopped."""
        if frozen:
            stop(process.pid)
        else:
            process.send_signal(signal.SIGCONT)

    def kill_node(self, number: int) -> None:
        _end(self.nodes.pop(number))

    def kill(self) -> None:
        """Kills all processes with SIGKILL. May be repeated."""
        for process in (self.master, *self.nodes):
            if process is not None:
                _end(process)
        self.master = None
        self.nodes.clear()

    def end(self) -> None:
        self.kill()
        self._client.close()
        self._admin.close()

    def _listens(self) -> bool:
        assert self.master
        assert self.master.poll() is None, "mooncake_master has ended"
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", PORT), 1.0):
            return True
        return False


def _answer(node: subprocess.Popen[str]) -> object:
    """Returns the next answer of a node. Mooncake prints other lines, too."""
    assert node.stdout
    for line in node.stdout:
        with contextlib.suppress(ValueError):
            return json.loads(line)
    raise AssertionError("the node has ended")


def _end(process: subprocess.Popen[bytes] | subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
