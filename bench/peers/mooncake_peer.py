"""Driver of Mooncake Store over TCP: a master, a node with the memory, and a client.

Mooncake's servers always listen on every address of the host. So all processes run in a network
namespace that has only loopback (`child.py --isolated`).
"""

from __future__ import annotations

import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mooncake
import numpy as np
from mooncake.store import MooncakeDistributedStore
from numpy.typing import NDArray

from .base import Blocks, PeerFailed, end, free_port, spawn, wait_until

__all__ = ["Mooncake"]

HOST = "127.0.0.1"
CLIENT_BYTES = 16 << 20
"""Memory that a client allocates for itself."""
NODE = """
import sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
answer = store.setup(*sys.argv[1:3], int(sys.argv[3]), int(sys.argv[4]), "tcp", "", sys.argv[5])
print(answer, flush=True)
sys.stdin.read()
store.close()
"""


class Mooncake:
    """Store and client. Python does not copy the blocks, because their memory is registered."""

    def __init__(self) -> None:
        self._master: subprocess.Popen[bytes] | None = None
        self._node: subprocess.Popen[str] | None = None
        self._store: Any = None
        self._registered: list[int] = []

    def start(self, directory: Path, capacity_bytes: int) -> None:
        rpc, http = free_port(), free_port()
        self._metadata, self._address = f"http://{HOST}:{http}/metadata", f"{HOST}:{rpc}"
        master = Path(mooncake.__path__[0]) / "mooncake_master"
        flags = [f"-rpc_port={rpc}", f"-rpc_address={HOST}", f"-metrics_host={HOST}", f"-metrics_port={free_port()}"]
        flags += ["-enable_http_metadata_server=true", f"-http_metadata_server_host={HOST}"]
        self._master = spawn([master, *flags, f"-http_metadata_server_port={http}"], directory)
        wait_until(self._answers, self._master, master.name)
        self._start_node(directory, capacity_bytes)

    def processes(self) -> Sequence[int]:
        assert self._master is not None
        assert self._node is not None
        return [self._master.pid, self._node.pid]

    def open(self, block_bytes: int, memory: Sequence[NDArray[np.uint8]]) -> None:
        del block_bytes
        if self._store is None:
            self._store = MooncakeDistributedStore()
            if self._store.setup(HOST, self._metadata, 0, CLIENT_BYTES, "tcp", "", self._address):
                raise PeerFailed("the client cannot be set up")
        self._store.remove_all(True)
        for array in memory:
            if array.ctypes.data not in self._registered:
                self._store.register_buffer(array.ctypes.data, array.nbytes)
                self._registered.append(array.ctypes.data)

    def names(self, keys: Sequence[bytes]) -> list[str]:
        return [key.hex() for key in keys]

    def store(self, names: list[str], blocks: Blocks) -> None:
        answers = self._store.batch_put_from(names, blocks.addresses, blocks.sizes)
        if any(answers):
            raise PeerFailed(f"blocks were not stored: {set(answers)}")

    def load(self, names: list[str], blocks: Blocks) -> None:
        answers = self._store.batch_get_into(names, blocks.addresses, blocks.sizes)
        if answers != blocks.sizes:
            raise PeerFailed(f"blocks were not loaded: {set(answers)}")

    def lookup(self, names: list[str]) -> int:
        answers = self._store.batch_is_exist(names)
        return answers.index(0) if 0 in answers else len(answers)

    def settle(self) -> None:
        """Does nothing, because a read lease expires by itself."""

    def drop(self, names: list[str]) -> None:
        self._store.batch_remove(names, True)

    def stop(self) -> None:
        if self._store is not None:
            self._store.close()
        if self._node is not None and self._node.stdin is not None:
            self._node.stdin.close()
            try:
                self._node.wait(10.0)
            except subprocess.TimeoutExpired:
                self._node.kill()
                self._node.wait()
        end(self._master)

    def _answers(self) -> bool:
        try:
            urllib.request.urlopen(f"{self._metadata}?key=none", timeout=2).close()  # noqa: S310 - it is http
        except urllib.error.HTTPError:
            return True
        except OSError:
            return False
        return True

    def _start_node(self, directory: Path, capacity_bytes: int) -> None:
        with (directory / "node.log").open("ab") as log:
            arguments = [HOST, self._metadata, str(capacity_bytes), str(CLIENT_BYTES), self._address]
            self._node = subprocess.Popen(
                [sys.executable, "-c", NODE, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=directory,
                text=True,
            )
        assert self._node.stdout is not None
        if self._node.stdout.readline().strip() != "0":
            raise PeerFailed("the node that holds the memory cannot be set up")
