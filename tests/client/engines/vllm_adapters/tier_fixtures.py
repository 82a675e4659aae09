"""Lookups and transfers of the tier, over a fake client and an array as primary tier."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import uuid
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from connector_fakes import FakeClient
from harness.polling import wait_until
from vllm.v1.kv_offload.base import ReqContext, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)

from kvtier.client import Medium, StoreStatus, TierFilter
from kvtier.client.engines.vllm.background import BackgroundThreads, RateLimitedLog
from kvtier.client.engines.vllm_tier.tier_lookups import Pin, TierLookups, TierRequest
from kvtier.client.engines.vllm_tier.transfers import EnginePrimaryTier, Job, Transfers

__all__ = ["KEYS", "ROW", "SlotClient", "TierParts", "keys_of", "make_config", "make_tier_parts", "request_of"]

ROW = 4096


def make_config(extra: dict[str, Any], *, groups: int = 1, **fields: Any) -> OffloadingConfig:
    """Returns vLLM's offloading configuration of an engine with two layers per group."""
    return OffloadingConfig(
        groups=tuple(OffloadingGroupConfig(16, (f"layer {2 * g}", f"layer {2 * g + 1}"), g) for g in range(groups)),
        worker_kv_bytes_per_block=3000,
        enable_kv_cache_events=False,
        extra_config=extra,
        engine_id=uuid.uuid4().hex,
        model=OffloadingModelConfig("model", "float32"),
        cache=OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=1),
        parallel=OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, is_parallelism_agnostic=False),
        **fields,
    )


def keys_of(count: int, seed: int = 0, group: int = 0) -> list[Any]:
    """Returns the keys of a prompt's chunks."""
    return [make_offload_key(bytes([seed, number]) * 16, group) for number in range(count)]


def request_of(request_id: str, keys: Sequence[Any] = (), params: dict[str, Any] | None = None) -> ReqContext:
    context = ReqContext(request_id, params)
    for number, key in enumerate(keys):
        context.set_offload_key_position(key, 16 * (number + 1))
    return context


KEYS = keys_of(4)


class SlotClient(FakeClient):
    """Reads and writes over one memory, with hooks before it is lent and before it is confirmed."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = np.full((8, ROW), 7, np.int8)
        self.told: list[str] = []
        self.marked: list[list[bytes]] = []
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

    def prefetch(self, keys: Sequence[bytes], *, request_id: str, exclude: TierFilter) -> Any:
        """Marks the leading keys that the server has. Excludes all tiers, so it loads nothing."""
        assert set(exclude.media) == set(Medium)
        self.before()
        present = list(itertools.takewhile(self.keys.__contains__, keys))
        self.marked.append(present)
        self.told.append(f"marked for {request_id}")
        return SimpleNamespace(present=len(present))

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

        wait_until(reported)
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
        part.close()  # type: ignore[attr-defined]
