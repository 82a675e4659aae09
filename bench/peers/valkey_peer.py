"""Driver of Valkey or Redis, a key-value server over TCP; the client is redis-py with hiredis.

One command stores a batch (MSET) and one loads it (MGET). A lookup is one call of a script that
stops at the first missing key.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import redis
from numpy.typing import NDArray

from .base import Blocks, PeerFailed, PeerMissing, end, free_port, spawn, wait_until

__all__ = ["Valkey"]

PREFIX = "for i, key in ipairs(KEYS) do if redis.call('EXISTS', key) == 0 then return i - 1 end end return #KEYS"


class Valkey:
    """Server without persistence. At its memory limit it evicts the least recently used keys."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._client: Any = None

    def start(self, directory: Path, capacity_bytes: int) -> None:
        port = free_port()
        command = [server_program(), "--bind", "127.0.0.1", "--port", str(port), "--save", "", "--appendonly", "no"]
        command += ["--maxmemory", str(capacity_bytes), "--maxmemory-policy", "allkeys-lru", "--dir", str(directory)]
        self._process = spawn(command, directory)
        self._client = redis.Redis("127.0.0.1", port, socket_timeout=60)
        wait_until(self._answers, self._process, command[0])

    def version(self) -> str:
        """Returns name and version of the server."""
        info = self._client.info("server")
        return f"{info.get('server_name', 'redis')} {info.get('valkey_version', info['redis_version'])}"

    def processes(self) -> Sequence[int]:
        assert self._process is not None
        return [self._process.pid]

    def open(self, block_bytes: int, memory: Sequence[NDArray[np.uint8]]) -> None:
        del memory
        self._client.flushall()
        self._prefix = self._client.register_script(PREFIX)
        self._prefix([b"none"])
        self._block_bytes = block_bytes

    def names(self, keys: Sequence[bytes]) -> list[bytes]:
        return list(keys)

    def store(self, names: list[bytes], blocks: Blocks) -> None:
        self._client.mset(dict(zip(names, blocks.views, strict=True)))

    def load(self, names: list[bytes], blocks: Blocks) -> None:
        values = self._client.mget(names)
        for value, view in zip(values, blocks.views, strict=True):
            if value is None:
                raise PeerFailed("a block is missing")
            view[:] = value

    def lookup(self, names: list[bytes]) -> int:
        found: int = self._prefix(names)
        return found

    def settle(self) -> None:
        """Does nothing, because a load pins nothing."""

    def drop(self, names: list[bytes]) -> None:
        # The server counts the bytes of a store command as used memory. Without free space the next
        # store would evict blocks that are still needed.
        self._client.unlink(*names)

    def stop(self) -> None:
        if self._client is not None:
            self._client.close()
        end(self._process)

    def _answers(self) -> bool:
        try:
            return bool(self._client.ping())
        except redis.exceptions.ConnectionError:
            return False


def server_program() -> str:
    """Returns the path of `VALKEY_SERVER`, of valkey-server, or of redis-server.

    `debian.py` has unpacked Debian's packages beside this environment. Raises `PeerMissing`.
    """
    unpacked = Path(os.environ.get("KVTIER_BENCH_DEBIAN", "")) / "usr" / "bin"
    chosen = os.environ.get("VALKEY_SERVER")
    for program in (chosen, "valkey-server", "redis-server"):
        if program and (found := shutil.which(program, path=f"{os.environ['PATH']}:{unpacked}")):
            return found
    raise PeerMissing("neither valkey-server nor redis-server is installed, and the package is not available")
