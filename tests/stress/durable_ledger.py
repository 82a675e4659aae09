"""Files of a client process: blocks acknowledged as durable, and leases and holds for others."""

from __future__ import annotations

import contextlib
import json
import random
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import msgspec

__all__ = ["DepositPlan", "DurableLedger", "Entry", "Journal"]

_FRESH_SECONDS = 0.8
_SUFFIX = ".durable_ledger"
_INTENT = "<"
"""A line `<NUMBER`: from now on the client may store all blocks below this number."""

Entry = tuple[str, int]
"""Document and block number."""


class DepositPlan(msgspec.Struct, frozen=True, kw_only=True):
    """How many blocks clients deposit.

    Attributes:
        per_second: most blocks of a client per second.
        most: blocks of one slot over all its processes; they fit the large tier.
        batch: most blocks of one deposit.
    """

    per_second: float
    most: int
    batch: int


class Journal:
    """Reader of the records of all client processes, including killed ones.

    Attributes:
        done: blocks that were acknowledged as durable, in the order in which they were read.
        intended: per document the number below which blocks may have been stored.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._offsets: dict[Path, int] = {}
        self.done: list[Entry] = []
        self.intended: dict[str, int] = {}

    def read(self) -> Self:
        """Reads the new whole lines of all files; a line truncated by SIGKILL is ignored."""
        for path in sorted(self._directory.glob(f"*{_SUFFIX}")):
            with path.open("rb") as file:
                file.seek(self._offsets.get(path, 0))
                whole, newline, _ = file.read().rpartition(b"\n")
            self._offsets[path] = self._offsets.get(path, 0) + len(whole) + len(newline)
            document = path.stem.partition("-")[0]
            for line in whole.decode().splitlines():
                if line.startswith(_INTENT):
                    self.intended[document] = max(int(line[len(_INTENT) :]), self.intended.get(document, 0))
                else:
                    self.done.append((document, int(line)))
        return self


class DurableLedger:
    """The deposits of one slot: one document whose blocks its successive processes store."""

    def __init__(self, directory: Path, name: str, plan: DepositPlan, *, since: float = 0.0) -> None:
        """`name` is slot and incarnation; deposits follow a rate from `since` (monotonic clock)."""
        self.document = name.partition("-")[0]
        self._directory = directory
        self._since = since
        self._plan = plan
        self._lock = threading.Lock()
        self._done = [number for document, number in Journal(directory).read().done if document == self.document]
        self._next = max(self._done, default=-1) + 1
        self._open: set[int] = set()
        """Numbers of the deposits that run."""
        self._again: list[int] = []
        """Numbers of deposits that were not acknowledged."""
        self._file = (directory / f"{name}{_SUFFIX}").open("ab", buffering=0)

    def close(self) -> None:
        self._file.close()

    @contextlib.contextmanager
    def deposit(self, rng: random.Random) -> Iterator[Sequence[int]]:
        """Gives block numbers to deposit; fewer or none if the rate is reached.

        They are recorded before they are stored. Those that are not acknowledged at the end of the
        `with` block are deposited again later.
        """
        with self._lock:
            numbers = self._take(rng.randint(1, self._plan.batch))
            self._open.update(numbers)
        try:
            yield numbers
        finally:
            with self._lock:
                self._again += sorted(self._open.intersection(numbers))
                self._open.difference_update(numbers)

    def _take(self, count: int) -> Sequence[int]:
        if self._again:
            numbers, self._again = self._again[:count], self._again[count:]
            return numbers
        start = self._next
        allowed = int((time.monotonic() - self._since) * self._plan.per_second)
        self._next = max(start, min(start + count, allowed, self._plan.most))
        if self._next > start:
            self._file.write(f"{_INTENT}{self._next}\n".encode())
        return range(start, self._next)

    def acknowledged(self, numbers: Sequence[int]) -> None:
        """Records that these blocks are durable from now on."""
        with self._lock:
            self._open.difference_update(numbers)
        self._done += numbers
        self._file.write("".join(f"{number}\n" for number in numbers).encode())

    def some(self, rng: random.Random, count: int) -> list[int]:
        """Some of the durable blocks."""
        return rng.sample(self._done, min(count, len(self._done)))

    def shared_document(self, documents: int) -> int:
        """The document that both ranks use now."""
        return int(time.time() * 1.5) * 7919 % documents

    def leave(self, what: str, value: Any) -> None:
        """Leaves a value, for example the id of a lease, for the process that takes it next."""
        path = self._directory / what
        scratch = path.with_suffix(f".{time.monotonic_ns()}-{threading.get_ident()}")
        scratch.write_text(json.dumps([time.time(), value]))
        scratch.replace(path)

    def take(self, what: str, *, at_most: float = _FRESH_SECONDS) -> Any | None:
        """The latest value that was left, if it is younger than `at_most` seconds."""
        try:
            left, value = json.loads((self._directory / what).read_text())
        except FileNotFoundError:
            return None
        return value if time.time() - left <= at_most else None
