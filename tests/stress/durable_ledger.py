"""Files of a client process: blocks acknowledged as durable, and leases for the other rank."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Sequence
from pathlib import Path

__all__ = ["MOST_DEPOSITS", "DurableLedger", "Entry", "entries"]

MOST_DEPOSITS = 300
"""Blocks of one slot over all its processes; they fit the large tier."""
_FRESH_SECONDS = 0.8

Entry = tuple[str, int]
"""Document and block number."""


class DurableLedger:
    """The deposits of one slot: one document whose blocks its successive processes store."""

    def __init__(self, directory: Path, name: str, *, since: float = 0.0, per_second: float = 1.0) -> None:
        """`name` is slot and incarnation; deposits follow a rate from `since` (monotonic clock)."""
        self.document = name.partition("-")[0]
        self._directory = directory
        self._since = since
        self._per_second = per_second
        self._lock = threading.Lock()
        self._done = [number for document, number in entries(directory) if document == self.document]
        self._next = max(self._done, default=-1) + 1
        self._file = (directory / f"{name}.durable_ledger").open("ab", buffering=0)

    def close(self) -> None:
        self._file.close()

    def fresh(self, count: int) -> range:
        """Block numbers to deposit now; fewer or none if the rate is reached."""
        with self._lock:
            start = self._next
            allowed = int((time.monotonic() - self._since) * self._per_second)
            self._next = max(start, min(start + count, allowed, MOST_DEPOSITS))
            return range(start, self._next)

    def acknowledged(self, numbers: Sequence[int]) -> None:
        """Records that these blocks are durable from now on."""
        self._done += numbers
        self._file.write("".join(f"{number}\n" for number in numbers).encode())

    def some(self, rng: random.Random, count: int) -> list[int]:
        """Some of the durable blocks."""
        return rng.sample(self._done, min(count, len(self._done)))

    def shared_document(self, documents: int) -> int:
        """The document that both ranks use now."""
        return int(time.time() * 1.5) * 7919 % documents

    def leave_lease(self, rank: int, lease_id: int, hits: int, keys: Sequence[bytes]) -> None:
        """Leaves a lease for the other rank."""
        path = self._directory / f"lease-of-{rank}"
        text = json.dumps([time.time(), lease_id, hits, [key.hex() for key in keys]])
        scratch = path.with_suffix(f".{time.monotonic_ns()}")
        scratch.write_text(text)
        scratch.replace(path)

    def take_lease(self, rank: int) -> tuple[int, int, list[bytes]] | None:
        """The latest lease of the other rank: its id, hits and keys."""
        try:
            left, lease_id, hits, keys = json.loads((self._directory / f"lease-of-{1 - rank}").read_text())
        except FileNotFoundError:
            return None
        if time.time() - left > _FRESH_SECONDS:
            return None
        return lease_id, hits, [bytes.fromhex(key) for key in keys]


def entries(directory: Path) -> dict[Entry, None]:
    """The records of all processes so far, including killed ones."""
    found: dict[Entry, None] = {}
    for path in sorted(directory.glob("*.durable_ledger")):
        whole = path.read_text().rpartition("\n")[0]
        found.update(((path.stem.partition("-")[0], int(line)), None) for line in whole.splitlines())
    return found
