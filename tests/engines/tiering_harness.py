"""vLLM's tiering manager over its primary tier and kvtier; tests play the scheduler."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from engine_timeouts import LONG_TIMEOUT_SECONDS, long_timeouts
from harness.polling import wait_until
from tier_fixtures import ROW, make_config, request_of
from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kvtier.client.engines.vllm_tier import KVTierSecondaryTier

__all__ = ["TieringHarness", "content_of", "world"]

MODULE = "kvtier.client.engines.vllm_tier"


def content_of(key: bytes) -> bytes:
    """Returns distinct bytes for a row."""
    return (key * ROW)[:ROW]


class TieringHarness:
    """One engine's tiering, with a scheduler's calls."""

    def __init__(self, spec: TieringOffloadingSpec) -> None:
        self.spec = spec
        self.manager: Any = spec.get_manager()
        self.tier: KVTierSecondaryTier = self.manager.secondary_tiers[0]
        self.rows: Any = np.asarray(self.manager.primary_tier.get_kv_memoryview())

    def step(self, *new: str) -> None:
        """Ends a step in which the requests `new` were scheduled first."""
        self.manager.on_schedule_end(ScheduleEndContext(new, ()))

    def until(self, condition: Callable[[], bool], seconds: float = 2 * LONG_TIMEOUT_SECONDS) -> None:
        wait_until(lambda: condition() or self.step(), seconds, interval=0.002)

    def reset(self) -> None:
        """Empties the primary tier; 0.33 must be told that no worker has anything to flush."""
        self.manager.reset_cache()
        getattr(self.manager, "on_reset_flushed", lambda: None)()

    def idle(self) -> None:
        """Steps until no job runs."""
        self.until(lambda: not self.manager.has_pending_work())

    def store(self, context: ReqContext, keys: Sequence[Any]) -> list[Any]:
        """Computes chunks and stores them; returns the keys that the primary tier lacked.

        Does not wait for kvtier.
        """
        prepared = self.manager.prepare_store(keys, context)
        if prepared is None or not prepared.keys_to_store:
            return []
        for key, row in zip(prepared.keys_to_store, prepared.store_spec.chunk_ids, strict=True):
            self.rows[row] = np.frombuffer(content_of(key), np.int8)
        self.manager.complete_store(prepared.keys_to_store, context)
        return list(prepared.keys_to_store)

    def run(self, name: str, keys: Sequence[Any], params: dict[str, Any] | None = None) -> None:
        """Runs a request to its end and stores all of its chunks."""
        context = request_of(name, keys, params)
        self.manager.on_new_request(context)
        self.store(context, keys)
        self.step(name)
        self.manager.on_request_finished(context)
        self.idle()

    def ask(self, context: ReqContext, keys: Sequence[Any]) -> list[LookupResult]:
        """Looks a prompt's chunks up as vLLM does, up to the first miss, and ends the step."""
        answers = []
        for key in keys:
            answers.append(self.manager.lookup(key, context))
            if answers[-1] is LookupResult.MISS:
                break
        self.step()
        return answers

    def find(self, context: ReqContext, keys: Sequence[Any]) -> list[LookupResult]:
        """Asks until no answer is pending; returns the last answers."""
        answers: list[LookupResult] = []

        def settled() -> bool:
            answers[:] = self.ask(context, keys)
            return not {LookupResult.RETRY, LookupResult.HIT_PENDING} & set(answers)

        self.until(settled)
        return answers

    def read(self, context: ReqContext, keys: Sequence[Any]) -> list[bytes]:
        """Returns the bytes of chunks in the primary tier."""
        rows = self.manager.prepare_load(keys, context).chunk_ids
        found = [self.rows[row].tobytes() for row in rows]
        self.manager.complete_load(keys, context)
        return found


@contextlib.contextmanager
def world(
    endpoint: str,
    *,
    rows: int = 64,
    groups: int = 1,
    tier: dict[str, Any] | None = None,
    long_timeout: bool = True,
    **fields: Any,
) -> Iterator[TieringHarness]:
    """Tiering of an engine over kvtier, made from an operator's configuration."""
    table = {"type": "KVTierSecondaryTier", "module_path": MODULE, "endpoint": endpoint, "identity": "test"}
    extra = {
        "cpu_bytes_to_use": rows * ROW,
        "secondary_tiers": [table | {"lookup_timeout_s": LONG_TIMEOUT_SECONDS} | (tier or {})],
    }
    with long_timeouts() if long_timeout else contextlib.nullcontext():
        made = TieringHarness(TieringOffloadingSpec(make_config(extra, groups=groups, **fields)))
    try:
        wait_until(lambda: made.tier._transfers is not None)  # it connects in the background
        yield made
    finally:
        made.rows = None
        made.manager.shutdown()
