"""What a client process has seen, told in lines of JSON that outlive a SIGKILL of it."""

from __future__ import annotations

import json
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from stress.shape import Field, difference

__all__ = ["Tally"]


class Tally:
    """Counts, and appends lines to a file; any thread may use it.

    Each line is one `write`, so that a killed process leaves whole lines. Wrong bytes and failures are written at once, counters
    when `publish` is called: a SIGKILL costs what was counted since.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self.failed = False

    def count(self, what: str, number: int = 1) -> None:
        """Adds to a counter."""
        with self._lock:
            self._counts[what] += number

    def check(self, field: Field, keys: list[bytes], found: list[np.ndarray], rank: int, **how: Any) -> None:
        """Verifies each byte of loaded parts."""
        for key, part in zip(keys, found, strict=True):
            damage = difference(field.payload(key, rank), part)
            if damage is not None:
                self.line("wrong", field=field.name, key=key.hex(), rank=rank, **how, **damage)
        self.count("verified blocks", len(keys))
        self.count("verified bytes", sum(part.nbytes for part in found))

    def fail(self, text: str) -> None:
        """Takes note of what must never happen to a client."""
        self.failed = True
        self.line("failure", text=text)

    def publish(self, kind: str = "counts") -> None:
        """Writes the counters as they are now."""
        with self._lock:
            counts = dict(self._counts)
        self.line(kind, counts=counts)

    def close(self) -> None:
        """Ends it."""
        self._file.close()

    def line(self, kind: str, **fields: Any) -> None:
        """Writes a line."""
        self._file.write(json.dumps({"kind": kind, **fields}).encode() + b"\n")
