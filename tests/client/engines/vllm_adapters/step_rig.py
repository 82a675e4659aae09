"""Decode steps of an engine, as the two halves of the connector see them. Needs no server."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, TypeAlias

from connector_fakes import FakePool, await_namespace, make_request, make_step
from engine_config import engine_config, full, kv_cache
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from kvtier.client.engines.vllm import KVTierConnector

__all__ = ["BLOCK_TOKENS", "PROMPT_TOKENS", "StepRig"]

BLOCK_TOKENS = 128
PROMPT_TOKENS = 16
_NOTHING = SimpleNamespace(finished_recving=None, failed_recving=set(), kv_connector_worker_meta=None)
"""What the workers report after a step without transfers."""

Around: TypeAlias = Callable[[Callable[[], Any]], Any]


class StepRig:
    """An engine with a scheduler's connector and a worker's, and a batch of running requests.

    `drafts`: tokens that a step computes for each request, besides one.
    """

    def __init__(self, model: str, batch: int, drafts: int = 0) -> None:
        config, cache = engine_config(model, {}, cache={"block_size": BLOCK_TOKENS}), kv_cache(full(BLOCK_TOKENS))
        self.scheduler = KVTierConnector(config, KVConnectorRole.SCHEDULER, cache)
        self.worker = KVTierConnector(config, KVConnectorRole.WORKER, cache)
        self.scheduler.bind_gpu_block_pool(FakePool(2 * batch + 1))
        await_namespace(self.scheduler)
        self.requests = {f"{number}": self._request(f"{number}") for number in range(batch)}
        self._tables = {name: [[number + 1]] for number, name in enumerate(self.requests)}
        self._drafts = {name: [-1] * drafts for name in self.requests} if drafts else {}
        self._new_tokens = dict.fromkeys(self.requests, 1 + drafts)
        self.metadata: Any = None
        self.step(tokens=PROMPT_TOKENS)

    def step(
        self, around_scheduler: Around = lambda act: act(), around_worker: Around = lambda act: act(), tokens: int = 0
    ) -> None:
        """Runs the hooks of a step. `around_*` calls those of one half; `tokens`: of a prefill."""
        new_tokens = dict.fromkeys(self.requests, tokens) if tokens else self._new_tokens
        step = make_step(self._tables, **new_tokens)
        step.scheduled_spec_decode_tokens = self._drafts
        around_scheduler(lambda: self._schedule(step))
        self.metadata = pickle.loads(pickle.dumps(self.metadata))  # noqa: S301 - as vLLM sends it
        around_worker(self._compute)
        for request in self.requests.values():
            # The engine rejects all drafts.
            request.num_computed_tokens += tokens or 1
            request.num_tokens += tokens or 1

    def close(self) -> None:
        self.scheduler.shutdown()
        self.worker.shutdown()

    def _schedule(self, step: Any) -> None:
        self.metadata = self.scheduler.build_connector_meta(step)
        self.scheduler.update_connector_output(_NOTHING)
        self.scheduler.get_kv_connector_stats()
        self.scheduler.take_events()

    def _compute(self) -> None:
        worker = self.worker
        worker.bind_connector_metadata(self.metadata)
        worker.handle_preemptions(self.metadata)
        worker.start_load_kv(None)
        worker.wait_for_save()
        worker.get_transfer_results(set())
        worker.get_kv_connector_stats()
        worker.build_connector_worker_meta()

    def _request(self, name: str) -> Any:
        request = make_request(0, name, num_tokens=PROMPT_TOKENS, num_prompt_tokens=PROMPT_TOKENS)
        self.scheduler.on_new_request(request)
        self.scheduler.get_num_new_matched_tokens(request, 0)
        self.scheduler.update_state_after_alloc(request, SimpleNamespace(get_block_ids=lambda: [[1]]), 0)
        return request
