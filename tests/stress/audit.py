"""After a kill of the server, checks that acknowledged durable blocks are present and correct."""

from __future__ import annotations

import random
import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from harness.payloads import filled
from harness.polling import polls

from kvtier.client import Client, KVTierError
from stress.client_slots import TIMEOUTS
from stress.durable_ledger import Entry
from stress.shape import LEDGER, difference

__all__ = ["Auditor"]

LONG_TIMEOUT_SECONDS = 30.0
"""How long a block may be missing: the CPU tier may be full, and the server may be stopped."""
HASTE_SECONDS = 2.0
"""The same limit after the first missing block."""
_STEP = 32
_OLD = 128
"""Number of blocks from earlier audits that are checked again."""


@dataclass
class Auditor:
    """Loads deposits on its own thread, beside the load."""

    endpoint: str
    rng: random.Random
    audited: int = 0
    missing: list[str] = field(default_factory=list)
    wrong: list[dict[str, Any]] = field(default_factory=list)
    _known: dict[Entry, None] = field(default_factory=dict)
    _thread: threading.Thread | None = None

    def begin(self, entries: Collection[Entry], *, all_of_them: bool = False) -> None:
        """Starts to check the blocks acknowledged since the last audit, and some or all others."""
        new = [entry for entry in entries if entry not in self._known]
        old = list(self._known)
        chosen = new + (old if all_of_them else self.rng.sample(old, min(_OLD, len(old))))
        self._known.update(dict.fromkeys(new))
        self._thread = threading.Thread(target=self._audit, args=(chosen,), name="audit", daemon=True)
        self._thread.start()

    def wait(self, seconds: float | None = None) -> bool:
        """Waits this long for the current audit; returns whether it has ended."""
        if self._thread is None:
            return True
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _audit(self, chosen: Sequence[Entry]) -> None:
        with Client(self.endpoint, namespace=LEDGER.namespace, name="auditor", timeouts=TIMEOUTS) as client:
            for start in range(0, len(chosen), _STEP):
                self._audit_some(client, list(chosen[start : start + _STEP]))

    def _audit_some(self, client: Client, entries: list[Entry]) -> None:
        """Repeats the load of missing blocks until the limit."""
        for _ in polls(HASTE_SECONDS if self.missing else LONG_TIMEOUT_SECONDS):
            while entries and (hits := self._load(client, entries)):
                del entries[:hits]
            if not entries:
                return
            entries.append(entries.pop(0))
        self.missing += [f"{document} {number}" for document, number in entries]

    def _load(self, client: Client, entries: Sequence[Entry]) -> int:
        keys = [key for document, number in entries for key in LEDGER.keys(document, number, 1)]
        buffers = [filled(1, LEDGER.parts[0])[0] for _ in keys]
        try:
            hits = client.load(keys, buffers, wait=1.0)
        except KVTierError:
            return 0
        for key, found in zip(keys[:hits], buffers, strict=False):
            damage = difference(LEDGER.payload(key, 0), found)
            if damage is not None:
                self.wrong.append({"client": "auditor", "field": LEDGER.name, "key": key.hex(), **damage})
        self.audited += hits
        return hits
