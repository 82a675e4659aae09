"""Fake peers without a server, for tests of the harness."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.peers.base import Blocks, PeerFailed, PeerMissing


class Dictionary:
    """Keeps blocks in its process."""

    def __init__(self) -> None:
        self.blocks: dict[bytes, bytes] = {}
        self.settled = True

    def start(self, directory: Path, capacity_bytes: int) -> None:
        (directory / "started").write_text(f"{capacity_bytes}")

    def processes(self) -> Sequence[int]:
        return [os.getpid()]

    def open(self, block_bytes: int, memory: Sequence[NDArray[np.uint8]]) -> None:
        assert len(memory) == 2
        self.blocks.clear()

    def names(self, keys: Sequence[bytes]) -> list[bytes]:
        return list(keys)

    def store(self, names: list[bytes], blocks: Blocks) -> None:
        for name, view in zip(names, blocks.views, strict=True):
            self.blocks[name] = bytes(view)

    def load(self, names: list[bytes], blocks: Blocks) -> None:
        for name, view in zip(names, blocks.views, strict=True):
            view[:] = self.blocks[name]

    def lookup(self, names: list[bytes]) -> int:
        return next((number for number, name in enumerate(names) if name not in self.blocks), len(names))

    def settle(self) -> None: ...

    def drop(self, names: list[bytes]) -> None:
        for name in names:
            del self.blocks[name]

    def stop(self) -> None: ...


class Another(Dictionary):
    """A second correct peer."""


class Forgetful(Dictionary):
    """Damages one byte of its blocks."""

    def load(self, names: list[bytes], blocks: Blocks) -> None:
        super().load(names, blocks)
        blocks.arrays[-1][-1] ^= 1


class Liar(Dictionary):
    """Finds every key."""

    def lookup(self, names: list[bytes]) -> int:
        return len(names)


class Absent(Dictionary):
    """Needs missing software."""

    def start(self, directory: Path, capacity_bytes: int) -> None:
        raise PeerMissing("it is not installed")


class Dying(Dictionary):
    """Ends its process."""

    def store(self, names: list[bytes], blocks: Blocks) -> None:
        os._exit(3)


class Refusing(Dictionary):
    """Refuses every store."""

    def store(self, names: list[bytes], blocks: Blocks) -> None:
        raise PeerFailed("no room")


class Orphaning(Dictionary):
    """Leaves a server running."""

    def start(self, directory: Path, capacity_bytes: int) -> None:
        server = subprocess.Popen(["sleep", "600"])
        (directory / "pid").write_text(f"{server.pid}")
        self.pid = server.pid

    def processes(self) -> Sequence[int]:
        return [self.pid]
