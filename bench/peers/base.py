"""Interface of a peer. A file per peer implements it; `child.py` runs it in its own environment.

This file does not import kvtier, because the environments of most peers do not have it.
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
"""Most seconds for a start, and for the end."""


class PeerFailed(Exception):
    """A peer did less than asked; the message says what."""


class PeerMissing(Exception):
    """Software of a peer is not installed; the message says what."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """Memory of a batch, in every form that clients need."""

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
    """A server and a client to it. One thread calls the methods, in this order.

    `store`, `load` and `lookup` are timed, other methods are not. Each raises `PeerFailed` if it
    did less than asked.
    """

    def start(self, directory: Path, capacity_bytes: int) -> None:
        """Starts the server and returns when it answers. Raises `PeerMissing`.

        Servers listen on loopback only; their files go to `directory`.
        """

    def processes(self) -> Sequence[int]:
        """Returns the server's processes, without their children."""

    def open(self, block_bytes: int, memory: Sequence[NDArray[np.uint8]]) -> None:
        """Connects a client for blocks of this size in `memory`; an earlier client is closed."""

    def names(self, keys: Sequence[bytes]) -> Any:
        """Converts chained keys (32 bytes each) to the names that this client uses."""

    def store(self, names: Any, blocks: Blocks) -> None:
        """Stores a batch. It can be found on return or shortly after."""

    def load(self, names: Any, blocks: Blocks) -> None:
        """Fills `blocks` with a stored batch, from its lookup to its release."""

    def lookup(self, names: Any) -> int:
        """Returns the number of leading keys that are present."""

    def settle(self) -> None:
        """Releases what the last call holds, for example a lease."""

    def drop(self, names: Any) -> None:
        """Tells the peer, if it needs to know, that a batch is not used again."""

    def stop(self) -> None:
        """Ends client and server, also after a failed `start`."""


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
    """Polls `ready`. Raises `PeerFailed` if the process ends or time is up."""
    deadline = time.monotonic() + PATIENCE
    while not ready():
        if process.poll() is not None:
            raise PeerFailed(f"{what} ended with {process.returncode}")
        if time.monotonic() > deadline:
            raise PeerFailed(f"{what} does not answer")
        time.sleep(0.005)
