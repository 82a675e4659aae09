"""Lookups and transfers of the tier, over a fake client and an array as primary tier."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from connector_fakes import FakeClient, wait_for
from tiering_harness import ROW, keys_of

from kvtier.client import StoreStatus
from kvtier.client.engines.vllm.background import BackgroundThreads, RateLimitedLog
from kvtier.client.engines.vllm_tier.tier_lookups import Pin, TierLookups, TierRequest
from kvtier.client.engines.vllm_tier.transfers import EnginePrimaryTier, Job, Transfers

__all__ = ["KEYS", "SlotClient", "TierParts", "make_tier_parts"]

KEYS = keys_of(4)


class SlotClient(FakeClient):
    """Reads and writes over one memory, with hooks before it is lent and before it is confirmed."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = np.full((8, ROW), 7, np.int8)
        self.told: list[str] = []
        self.statuses = bytes([StoreStatus.GRANTED] * len(KEYS))
        self.hand_out: Callable[[], None] = lambda: None
        self.confirm: Callable[[int], object] = str

    def _batch(self, items: Sequence[int]) -> Any:
        self.hand_out()
        return SimpleNamespace(
            address=self.memory.ctypes.data, offsets=[ROW * item for item in items], sizes=[ROW] * len(items)
        )

    @contextlib.contextmanager
    def read(self, lease: Any, items: Sequence[int]) -> Iterator[Any]:
        yield self._batch(items)
        self.confirm(lease.id)

    @contextlib.contextmanager
    def write(self, keys: Sequence[bytes], *, request_id: str) -> Iterator[Any]:
        batch = self._batch([number for number in range(len(keys)) if self.statuses[number] == StoreStatus.GRANTED])
        batch.wanted, batch.statuses = [offset // ROW for offset in batch.offsets], self.statuses[: len(keys)]
        yield batch
        self.confirm(0)
        self.told.append(f"stored for {request_id}")

    def finish_request(self, request_id: str) -> None:
        self.told.append(f"finished {request_id}")


@dataclasses.dataclass
class TierParts:
    """Transfers over a primary tier of four rows, filled with 1."""

    client: SlotClient
    rows: np.ndarray
    lookups: TierLookups
    transfers: Transfers

    def job(self, number: int, request: TierRequest, leases: Sequence[int] | None = None) -> Job:
        """A store, or a load of which each key is that item of the lease."""
        pins = None if leases is None else [Pin(SimpleNamespace(id=lease), 0, 1e9) for lease in leases]  # type: ignore[arg-type]
        return Job(number, request, KEYS, range(len(KEYS)), pins)

    def finished(self) -> dict[int, frozenset[bytes]]:
        """Waits for a report."""
        found: dict[int, frozenset[bytes]] = {}

        def reported() -> bool:
            found.update({job.number: job.done for job in self.transfers.take_finished()})
            return bool(found)

        wait_for(reported)
        return found


@contextlib.contextmanager
def make_tier_parts() -> Iterator[TierParts]:
    """Transfers and lookups over a fake client."""
    client, rows, log = SlotClient(), np.full((len(KEYS), ROW), 1, np.int8), RateLimitedLog()
    lookups = TierLookups(client, 60.0, log, BackgroundThreads("lookup", log))  # type: ignore[arg-type]
    threads = [BackgroundThreads(name, log) for name in ("load", "store")]
    primary = EnginePrimaryTier(rows.ctypes.data, ROW, len(rows))
    yield TierParts(client, rows, lookups, Transfers(client, primary, lookups, log, threads))  # type: ignore[arg-type]
    for part in (*threads, lookups):
        part.close()
