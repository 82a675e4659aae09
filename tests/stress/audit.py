"""After a start of the server, checks that it has what it acknowledged, and nothing else."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from harness.polling import polls

from kvtier.client import Client, KeyStatus, KVTierError, Namespace, TierFilter
from stress.client_slots import TIMEOUTS
from stress.durable_ledger import Entry, Journal
from stress.inventory import KnownBlocks, read_inventory
from stress.shape import LEDGER, STRANGER, difference

__all__ = ["Auditor"]

LONG_TIMEOUT_SECONDS = 30.0
"""How long a block may be missing: the CPU tier may be full, and the server may be stopped."""
HASTE_SECONDS = 2.0
"""The same limit after the first missing block."""
_STEP = 64
_OLD = 128
"""Number of blocks from earlier audits that are loaded again."""
_PROBES = 32
_NEVER = "never"
"""Document whose blocks no client stores."""


@dataclass
class Auditor:
    """Compares the server with the journal, on its own thread, beside the load.

    Attributes:
        endpoint: address of the server.
        rng: draws the blocks that are loaded again.
        directory: of the journal.
        large: name of the tier that must have every acknowledged block.
        small: name of the other tier, which audits do not read.
        audited: acknowledged blocks that were loaded, and whose bytes were compared.
        listed: acknowledged blocks that were looked for in an inventory.
        missing: acknowledged blocks that the server has lost.
        unknown: blocks that the server has, although no client has begun to store them.
        failures: audits that could not be made.
    """

    endpoint: str
    rng: random.Random
    directory: Path
    large: str
    small: str
    audited: int = 0
    listed: int = 0
    missing: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    wrong: list[dict[str, Any]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    _known: int = 0
    """Number of acknowledged blocks that were loaded in an audit."""
    _blocks: KnownBlocks = field(default_factory=KnownBlocks)
    _thread: threading.Thread | None = None

    def __post_init__(self) -> None:
        self._journal = Journal(self.directory)

    def begin(self, acknowledged: Sequence[Entry], *, all_of_them: bool = False) -> None:
        """Starts to look for all acknowledged blocks.

        Loads those that were acknowledged since the last audit, and some or all others.
        """
        old = acknowledged[: self._known]
        chosen = [*acknowledged[self._known :], *(old if all_of_them else self.rng.sample(old, min(_OLD, len(old))))]
        self._known = len(acknowledged)
        self._thread = threading.Thread(target=self._audit, args=(acknowledged, chosen), name="audit", daemon=True)
        self._thread.start()

    def wait(self, seconds: float | None = None) -> bool:
        """Waits this long for the current audit; returns whether it has ended."""
        if self._thread is None:
            return True
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _audit(self, acknowledged: Sequence[Entry], chosen: Sequence[Entry]) -> None:
        try:
            self._compare_inventory(acknowledged)
            self._probe(LEDGER.namespace, LEDGER.keys(_NEVER, self.rng.randrange(LEDGER.length // 2), _PROBES))
            if chosen:
                self._probe(STRANGER.namespace, _keys_of(chosen[:_PROBES]))
            with self._client(LEDGER.namespace) as client:
                for start in range(0, len(chosen), _STEP):
                    self._audit_some(client, list(chosen[start : start + _STEP]))
        except Exception as error:  # noqa: BLE001 - an audit that ends early must not look like one that found nothing
            self.failures.append(f"an audit failed: {error!r}")

    def _client(self, namespace: Namespace) -> Client:
        """A client that compares no digests: the audit compares the bytes itself."""
        return Client(self.endpoint, namespace=namespace, name="auditor", timeouts=TIMEOUTS, verify="off")

    def _compare_inventory(self, acknowledged: Sequence[Entry]) -> None:
        """Compares what the server lists with all acknowledged and all begun deposits."""
        error: Exception | None = None
        for _ in polls(LONG_TIMEOUT_SECONDS, 0.05):
            try:
                held = read_inventory(self.endpoint)
            except (grpc.RpcError, OSError) as failed:
                error = failed
                continue
            # Read after the inventory: clients record a deposit before they store it.
            self._blocks.intend(self._journal.read().intended)
            self.unknown += self._blocks.never_stored(held)
            self.missing += self._blocks.lost(held, self.large, acknowledged)
            self.listed += len(acknowledged)
            return
        self.failures.append(f"the server gives no inventory: {error!r}")

    def _probe(self, namespace: Namespace, keys: Sequence[bytes]) -> None:
        """Looks up keys that were never stored in this namespace: each must be a miss."""
        error: Exception | None = None
        for _ in polls(LONG_TIMEOUT_SECONDS, 0.05):
            try:
                with self._client(namespace) as client:
                    statuses = client.lookup(keys, prefix=False, lease=1.0).statuses
            except KVTierError as failed:
                error = failed
                continue
            found = [key for key, status in zip(keys, statuses, strict=True) if status != KeyStatus.MISS]
            self.unknown += [f"a lookup finds {key.hex()} in namespace {namespace.model}" for key in found]
            return
        self.failures.append(f"the server answers no lookup: {error!r}")

    def _audit_some(self, client: Client, entries: list[Entry]) -> None:
        """Repeats the load of missing blocks until the limit."""
        for _ in polls(HASTE_SECONDS if self.missing else LONG_TIMEOUT_SECONDS):
            while entries and (hits := self._load(client, entries)):
                del entries[:hits]
            if not entries:
                return
            entries.append(entries.pop(0))
        self.missing += [f"{document} {number}: cannot be loaded" for document, number in entries]

    def _load(self, client: Client, entries: Sequence[Entry]) -> int:
        """Loads from the tier that must have all blocks; the small tier may have some of them."""
        keys = _keys_of(entries)
        try:
            with client.lookup(keys, wait=1.0, exclude=TierFilter(names=[self.small])) as lease:
                hits = range(lease.prefix_hits)
                if not hits:
                    return 0
                with client.read(lease, hits) as batch:
                    copies = [np.frombuffer(bytes(view), np.uint8) for view in batch.views()]
        except KVTierError:
            return 0
        for key, found in zip(keys, copies, strict=False):
            damage = difference(LEDGER.payload(key, 0), found)
            if damage is not None:
                self.wrong.append({"client": "auditor", "field": LEDGER.name, "key": key.hex(), **damage})
        self.audited += len(hits)
        return len(hits)


def _keys_of(entries: Sequence[Entry]) -> list[bytes]:
    return [key for document, number in entries for key in LEDGER.keys(document, number, 1)]
