"""What a client process leaves behind in files: what is acknowledged as durable, and leases for the other rank."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Sequence
from pathlib import Path

__all__ = ["MOST_DEPOSITS", "DurableLedger", "Entry", "entries"]

MOST_DEPOSITS = 300
"""Blocks of one slot, over all the processes that are in it one after the other: they are to fit the large tier."""
_FRESH_SECONDS = 0.8

Entry = tuple[str, int]
"""A document and a block of it."""


class DurableLedger:
    """The deposits of one slot: a document, of which the processes in that slot, one after the other, store each block."""

    def __init__(self, directory: Path, name: str, *, since: float = 0.0, per_second: float = 1.0) -> None:
        """`name` is slot and incarnation; deposits are made at a rate, `since` a time of the monotonic clock."""
        self.document = name.partition("-")[0]
        self._directory = directory
        self._since = since
        self._per_second = per_second
        self._lock = threading.Lock()
        self._done = [number for document, number in entries(directory) if document == self.document]
        self._next = max(self._done, default=-1) + 1
        self._file = (directory / f"{name}.durable_ledger").open("ab", buffering=0)

    def close(self) -> None:
        """Ends it; what it has noted down stays."""
        self._file.close()

    def fresh(self, count: int) -> range:
        """Returns numbers of blocks that are not acknowledged yet; fewer, or none, if there were enough for now."""
        with self._lock:
            start = self._next
            allowed = int((time.monotonic() - self._since) * self._per_second)
            self._next = max(start, min(start + count, allowed, MOST_DEPOSITS))
            return range(start, self._next)

    def acknowledged(self, numbers: Sequence[int]) -> None:
        """Notes down, for whoever lives on, that these blocks must be there from now on."""
        self._done += numbers
        self._file.write("".join(f"{number}\n" for number in numbers).encode())

    def some(self, rng: random.Random, count: int) -> list[int]:
        """Returns some of the blocks that must be there."""
        return rng.sample(self._done, min(count, len(self._done)))

    def shared_document(self, documents: int) -> int:
        """Returns the document that both ranks work on at this time."""
        return int(time.time() * 1.5) * 7919 % documents

    def hand_over(self, rank: int, lease_id: int, hits: int, keys: Sequence[bytes]) -> None:
        """Leaves a lease for the other rank."""
        path = self._directory / f"lease-of-{rank}"
        text = json.dumps([time.time(), lease_id, hits, [key.hex() for key in keys]])
        scratch = path.with_suffix(f".{time.monotonic_ns()}")
        scratch.write_text(text)
        scratch.replace(path)

    def handed_over(self, rank: int) -> tuple[int, int, list[bytes]] | None:
        """Returns the lease that the other rank has left lately: its id, its hits, its keys."""
        try:
            left, lease_id, hits, keys = json.loads((self._directory / f"lease-of-{1 - rank}").read_text())
        except FileNotFoundError:
            return None
        if time.time() - left > _FRESH_SECONDS:
            return None
        return lease_id, hits, [bytes.fromhex(key) for key in keys]


def entries(directory: Path) -> dict[Entry, None]:
    """Returns what all processes, those that were killed among them, have noted down so far."""
    found: dict[Entry, None] = {}
    for path in sorted(directory.glob("*.durable_ledger")):
        whole = path.read_text().rpartition("\n")[0]
        found.update(((path.stem.partition("-")[0], int(line)), None) for line in whole.splitlines())
    return found
