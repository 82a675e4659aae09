"""Results of a client process, in lines of JSON that survive its SIGKILL."""

from __future__ import annotations

import json
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from stress.shape import Dataset, difference

__all__ = ["ResultLog"]


class ResultLog:
    """Counts, and appends lines to a file. Any thread may call.

    Each line is one `write`, so a killed process leaves whole lines. Wrong bytes and failures are
    written at once, counters by `publish`; a SIGKILL loses the counts since then.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self.failed = False

    def count(self, what: str, number: int = 1) -> None:
        with self._lock:
            self._counts[what] += number

    def check(self, dataset: Dataset, keys: list[bytes], found: list[np.ndarray], rank: int, **how: Any) -> None:
        """Verifies each byte of loaded parts."""
        for key, part in zip(keys, found, strict=True):
            damage = difference(dataset.payload(key, rank), part)
            if damage is not None:
                self.line("wrong", dataset=dataset.name, key=key.hex(), rank=rank, **how, **damage)
        self.count("verified blocks", len(keys))
        self.count("verified bytes", sum(part.nbytes for part in found))

    def fail(self, text: str) -> None:
        """Records an error that no client may see."""
        self.failed = True
        self.line("failure", text=text)

    def publish(self, kind: str = "counts") -> None:
        with self._lock:
            counts = dict(self._counts)
        self.line(kind, counts=counts)

    def close(self) -> None:
        self._file.close()

    def line(self, kind: str, **fields: Any) -> None:
        self._file.write(json.dumps({"kind": kind, **fields}).encode() + b"\n")
