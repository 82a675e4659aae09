"""A tier on a directory shared by several servers, one file per block. For tests only."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar

from kvtier.tiers.negotiation import vote
from kvtier.tiers.secondary_tier import (
    BlockBytes,
    Entry,
    Medium,
    NamespaceId,
    Outcome,
    RequestInfo,
    SecondaryTier,
    Vote,
)

__all__ = ["SharedDirectory"]


class SharedDirectory(SecondaryTier):
    """Knows its own stores of this process; other blocks must be looked up."""

    type: ClassVar[str] = "harness.shared_tier:SharedDirectory"
    durable: ClassVar[bool] = True
    medium: ClassVar[Medium] = Medium.NETWORK
    local: ClassVar[bool] = False
    shared: ClassVar[bool] = True

    def __init__(
        self, name: str, directory: Path, size_bytes: int, *, durability: str, delay_seconds: float = 0.0
    ) -> None:
        super().__init__(name, size_bytes)
        assert durability == "process"
        self._path = directory
        self._delay_seconds = delay_seconds
        directory.mkdir(parents=True, exist_ok=True)

    def on_new_request(self, request: RequestInfo) -> Vote:
        return vote(self.rules, request)

    def entries(self) -> Iterator[Entry]:
        return iter(())

    def lookup(self, keys: Sequence[tuple[NamespaceId, bytes]]) -> list[bool]:
        time.sleep(self._delay_seconds)
        return [self._file(*name).exists() for name in keys]

    def store(self, blocks: Sequence[BlockBytes]) -> list[Outcome]:
        for block in blocks:
            file = self._file(block.namespace, block.key)
            with file.with_suffix(".new").open("wb") as new:
                new.writelines(block.parts)
            file.with_suffix(".new").replace(file)
        return [Outcome.DONE] * len(blocks)

    def load(self, blocks: Sequence[BlockBytes]) -> list[Outcome]:
        return [self._load(block) for block in blocks]

    def remove(self, keys: Sequence[tuple[NamespaceId, bytes]]) -> None:
        for name in keys:
            self._file(*name).unlink(missing_ok=True)

    def close(self) -> None:
        pass

    def _load(self, block: BlockBytes) -> Outcome:
        try:
            with self._file(block.namespace, block.key).open("rb") as file:
                filled = sum(file.readinto(part) for part in block.parts)
        except FileNotFoundError:
            return Outcome.MISSING
        return Outcome.DONE if filled == block.nbytes else Outcome.CORRUPT

    def _file(self, namespace: NamespaceId, key: bytes) -> Path:
        return self._path / f"{namespace.hex()}.{key.hex()}"
