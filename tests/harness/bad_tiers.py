"""A tier in memory that misbehaves in a running server, controlled by files in its directory.

While the file `hang-store` exists, `store` hangs; `raise-load` makes `load` raise the error that it
names, and so on.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar

from harness.polling import wait_until

from kvtier.tiers.negotiation import vote
from kvtier.tiers.secondary_tier import BlockBytes, Entry, NamespaceId, Outcome, RequestInfo, SecondaryTier, Vote

__all__ = ["HONEST_ENTRY", "BadTier"]

HONEST_ENTRY = Entry(NamespaceId(b"a real tenant..." + b"a real namespace"), b"a block" + bytes(4), 4096)


HANG_SECONDS = 3600.0


class OddError(BaseException):
    """An error that `except Exception` does not catch."""


ERRORS = {error.__name__: error for error in (OddError, RuntimeError, GeneratorExit, SystemExit, MemoryError)}


class BadTier(SecondaryTier):
    """Keeps blocks in a dict and claims that they are durable."""

    type: ClassVar[str] = "bad"
    durable: ClassVar[bool] = True

    def __init__(self, name: str, directory: Path, size_bytes: int, durability: str = "process") -> None:
        super().__init__(name, size_bytes)
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self.blocks: dict[tuple[NamespaceId, bytes], tuple[bytes, ...]] = {}
        self.heard: list[str] = []
        self.changing = threading.Lock()

    def misbehave(self, operation: str) -> None:
        hang = self.directory / f"hang-{operation}"
        wait_until(lambda: not hang.exists(), HANG_SECONDS)
        what = self.directory / f"raise-{operation}"
        if what.exists():
            raise ERRORS[what.read_text()]("odd")

    def on_new_request(self, request: RequestInfo) -> Vote:
        self.misbehave("on_new_request")
        self.heard.append(f"new {request.request_id}")
        return vote(self.rules, request)

    def on_request_finished(self, request_id: str) -> None:
        self.misbehave("on_request_finished")
        self.heard.append(f"end {request_id}")

    def entries(self) -> Iterator[Entry]:
        self.misbehave("entries")
        if (self.directory / "lie-entries").exists():
            yield from invalid_entries(self.capacity_bytes)
        yield HONEST_ENTRY
        self.misbehave("last-entry")

    def store(self, blocks: Sequence[BlockBytes]) -> list[Outcome]:
        self.misbehave("store")
        with self.changing:
            for block in blocks:
                self.blocks[block.namespace, block.key] = tuple(map(bytes, block.parts))
        return [Outcome.DONE for _ in blocks]

    def load(self, blocks: Sequence[BlockBytes]) -> list[Outcome]:
        self.misbehave("load")
        outcomes = []
        for block in blocks:
            parts = self.blocks.get((block.namespace, block.key))
            for part, content in zip(block.parts, parts or (), strict=False):
                part[:] = content
            outcomes.append(Outcome.MISSING if parts is None else Outcome.DONE)
        return outcomes

    def remove(self, keys: Sequence[tuple[NamespaceId, bytes]]) -> None:
        self.misbehave("remove")
        with self.changing:
            for name in keys:
                self.blocks.pop(name, None)

    def close(self) -> None:
        self.misbehave("close")


def invalid_entries(capacity: int) -> Iterator[object]:
    """Invalid values that no tier can hold."""
    space, key = HONEST_ENTRY.namespace, b"lie" + bytes(4)
    for nbytes in (0, -1, -(1 << 70), capacity + 1, 1 << 70, 1.5, None, True, "4096"):
        yield Entry(space, key, nbytes)  # type: ignore[arg-type]
    for namespace, name in ((b"short", key), (b"", key), (space, b""), (space, b"k" * 5000), ("text", key), (space, 7)):
        yield Entry(namespace, name, 4096)  # type: ignore[arg-type]
    yield from (None, 7, "entry", (space, key, 4096), object())
    yield HONEST_ENTRY
