"""Interface of a peer. Each peer has a file that implements it, run by `child.py`.

Each peer runs in its own environment. This file does not import kvtier, because most of these
environments do not have it.
"""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["Blocks", "Peer", "PeerFailed", "PeerMissing", "end", "free_port", "spawn", "wait_until"]

PATIENCE = 60.0
"""Maximum seconds for the start of a server, and for its end."""


class PeerFailed(Exception):
    """A peer did not do all of its work; the message says what is missing."""


class PeerMissing(Exception):
    """Software of a peer is not installed; the message names the software."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """Memory of a batch, in all forms that the clients need."""

    arrays: list[NDArray[np.uint8]]
    views: list[memoryview]
    addresses: list[int]
    sizes: list[int]

    @staticmethod
    def of(array: NDArray[np.uint8]) -> Blocks:
        """Wraps an array (blocks, bytes) with contiguous rows."""
        arrays = list(array)
        addresses = [row.ctypes.data for row in arrays]
        return Blocks(arrays, [row.data for row in arrays], addresses, [row.nbytes for row in arrays])


class Peer(Protocol):
    """A server and its client. One thread calls the methods, in this order.

    `store`, `load` and `lookup` are timed, the other methods are not. Each method raises
    `PeerFailed` if it did not do all of its work.
    """

    def start(self, directory: Path, capacity_bytes: int) -> None:
        """Starts the server and returns when it answers. Raises `PeerMissing`.

        The server listens on loopback only. It writes its files to `directory`.
        """

    def processes(self) -> Sequence[int]:
        """Returns the ids of the server's processes. Their children are not included."""

    def open(self, block_bytes: int, memory: Sequence[NDArray[np.uint8]]) -> None:
        """Connects a client for blocks of this size in `memory`; closes an earlier client."""

    def names(self, keys: Sequence[bytes]) -> Any:
        """Converts chained keys (32 bytes each) to the names of blocks that this client uses."""

    def store(self, names: Any, blocks: Blocks) -> None:
        """Stores a batch. Lookups find the batch when this returns, or shortly afterwards."""

    def load(self, names: Any, blocks: Blocks) -> None:
        """Fills `blocks` with a stored batch; includes the lookup and the release."""

    def lookup(self, names: Any) -> int:
        """Returns the number of leading keys that are present."""

    def settle(self) -> None:
        """Releases the pins of the last call, for example a lease."""

    def drop(self, names: Any) -> None:
        """Reports that a batch is not used again; peers that evict by themselves ignore this."""

    def stop(self) -> None:
        """Ends client and server. Is also called after a failed `start`."""


def free_port() -> int:
    """Returns an unused TCP port on loopback."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def spawn(
    command: Sequence[str | Path], directory: Path, environment: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Starts a server in `directory`, with its output in a file there."""
    with (directory / f"{Path(command[0]).name}.log").open("ab") as log:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=directory,
            env={**os.environ, **(environment or {})},
        )


def end(process: subprocess.Popen[bytes] | None) -> None:
    """Ends a process with SIGTERM, then SIGKILL."""
    if process is None:
        return
    process.terminate()
    try:
        process.wait(10.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def wait_until(ready: Callable[[], bool], process: subprocess.Popen[bytes], what: str) -> None:
    """Polls `ready`. Raises `PeerFailed` if the process ends, or after `PATIENCE` seconds."""
    deadline = time.monotonic() + PATIENCE
    while not ready():
        if process.poll() is not None:
            raise PeerFailed(f"{what} ended with {process.returncode}")
        if time.monotonic() > deadline:
            raise PeerFailed(f"{what} does not answer")
        time.sleep(0.005)
