"""What a peer is to the benchmark. A file per peer implements it; `child.py` runs it in an environment of its own.

Nothing here imports kvtier: the environments of most peers do not have it.
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

__all__ = ["Blocks", "NotToBeHad", "Peer", "PeerFailed", "end", "free_port", "spawn", "wait_until"]

PATIENCE = 60.0
"""Seconds that a server may take to start, or to end."""


class PeerFailed(Exception):
    """A peer did not do what it was asked for; the message is for people."""


class NotToBeHad(Exception):
    """What a peer consists of is not on this machine; the message says what is missing."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """Memory of a batch, in every form that a client may want."""

    arrays: list[NDArray[np.uint8]]
    views: list[memoryview]
    addresses: list[int]
    sizes: list[int]

    @staticmethod
    def of(array: NDArray[np.uint8]) -> Blocks:
        """Takes an array (blocks, bytes) whose rows are contiguous."""
        arrays = list(array)
        addresses = [row.ctypes.data for row in arrays]
        return Blocks(arrays, [row.data for row in arrays], addresses, [row.nbytes for row in arrays])


class Peer(Protocol):
    """A server of its own, and a client to it. Methods are called from one thread, in the order in which they stand here.

    `store`, `load` and `lookup` are timed; everything else is not. Each raises `PeerFailed` when it did less than asked.
    """

    def start(self, directory: Path, capacity_bytes: int) -> None:
        """Starts the server and returns once it answers. Servers listen on loopback only, files go to `directory`.

        Raises `NotToBeHad`.
        """

    def processes(self) -> Sequence[int]:
        """Returns the server's processes, without their children."""

    def open(self, block_bytes: int, memory: Sequence[NDArray[np.uint8]]) -> None:
        """Connects a client for blocks of this size that lie in `memory`; what an earlier `open` connected is let go."""

    def names(self, keys: Sequence[bytes]) -> Any:
        """Returns chained keys (32 bytes each) in the form in which this client wants to be told of them."""

    def store(self, names: Any, blocks: Blocks) -> None:
        """Stores a batch; it can be found when this returns, or soon after."""

    def load(self, names: Any, blocks: Blocks) -> None:
        """Fills `blocks` with what was stored: everything counts, from the question whether it is there to its release."""

    def lookup(self, names: Any) -> int:
        """Returns how many of these keys are there, from the first on."""

    def settle(self) -> None:
        """Lets go of what the last call has left behind, a lease for example."""

    def drop(self, names: Any) -> None:
        """A batch will not be asked for any more: the peer that needs to be told is told."""

    def stop(self) -> None:
        """Ends client and server; also after a `start` that failed half-way."""


def free_port() -> int:
    """Returns a TCP port of loopback that nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def spawn(
    command: Sequence[str | Path], directory: Path, environment: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Starts a server in `directory`; what it says goes to a file there, named after it."""
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
    """Ends a process, gently first."""
    if process is None:
        return
    process.terminate()
    try:
        process.wait(10.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def wait_until(ready: Callable[[], bool], process: subprocess.Popen[bytes], what: str) -> None:
    """Polls `ready` until it is true. Raises `PeerFailed` when the process ends, or time is up."""
    deadline = time.monotonic() + PATIENCE
    while not ready():
        if process.poll() is not None:
            raise PeerFailed(f"{what} ended with {process.returncode}")
        if time.monotonic() > deadline:
            raise PeerFailed(f"{what} does not answer")
        time.sleep(0.005)
