"""A vLLM engine in this process, stepped by the test, which can inspect it between steps."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from harness.polling import wait_until

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

__all__ = ["LiveEngine"]

IDLE_SECONDS = 120.0
"""Most seconds for which an idle engine may step for its connector; more is a hang."""


class LiveEngine:
    """One engine. `moments`: callbacks for each moment, called when the engine reaches it.

    Moments: "asking" (a request arrives, its lookup is about to begin), "loading" (a hit was taken,
        its load is about to begin),
    "saving" (saves are about to begin), "decoding" (a request has its first token).
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        from vllm import LLM

        defaults = {"dtype": "float32", "enforce_eager": True, "enable_prefix_caching": True, "max_model_len": 4096}
        llm = LLM(disable_log_stats=False, skip_tokenizer_init=True, seed=0, **defaults | settings)
        self.engine: Any = llm.llm_engine
        self.llm = llm
        self.scheduler: Any = self.engine.engine_core.engine_core.scheduler
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.moments: dict[str, Callable[[], None]] = {}
        self.abandoned = self.failed_loads = self.not_stored = 0
        if self.scheduler.connector is not None:
            self._watch(self.scheduler.connector)

    @property
    def side(self) -> Any:
        """The connector's scheduler half."""
        return self.scheduler.connector._scheduler

    def add(self, request_id: str, prompt: Sequence[int], max_tokens: int, salt: str | None = None) -> None:
        """Hands in a request; it is computed by `step`.

        With a `salt` of its own it shares blocks with no other request.
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        sampling = SamplingParams(
            max_tokens=max_tokens,
            temperature=0.0,
            logprobs=3,
            detokenize=False,
            ignore_eos=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        salted = {"cache_salt": salt} if salt else {}
        self.engine.add_request(request_id, {"prompt_token_ids": list(prompt), **salted}, sampling)

    def step(self) -> list[Any]:
        """Runs one step; returns the requests that ended."""
        outputs: list[Any] = self.engine.step()
        if any(request.num_output_tokens for request in self.scheduler.running):
            self._at("decoding")
        return outputs

    def run(self) -> list[Any]:
        """Steps until all requests have ended; returns their outputs."""
        outputs = []
        while self.engine.has_unfinished_requests():
            outputs += self.step()
        return outputs

    def rest(self) -> None:
        """Steps until the connector is idle too."""
        deadline = time.monotonic() + IDLE_SECONDS
        while self.scheduler.has_requests():
            self.step()
            assert time.monotonic() < deadline, "the connector never ends"

    def reset(self) -> bool:
        """Empties the engine's own prefix cache; returns whether that was possible."""
        return bool(self.llm.reset_prefix_cache())

    def meet(self, epoch: int, seconds: float = 120.0) -> None:
        """Waits until the connector's sessions are with this server and circuits are closed.

        The worker learns the namespace in a step, so short requests are computed until then.
        """
        remote, worker, walk = self.side._server, self._worker(), self.side._core._lookahead
        greetings = itertools.count()

        def has_met() -> bool:
            if not worker._clients:
                self.add(f"greeting {epoch} {next(greetings)}", [1, 2], 1)
                self.run()
            now = time.monotonic()
            return (
                all(client.epoch == epoch for client in (remote._client, *worker._clients))
                and not (remote.circuit.is_open or worker._saves_circuit.is_open)
                and (walk is None or walk._backoff.is_over(now))
            )

        wait_until(has_met, seconds, otherwise="the connector does not find the server")

    def hear(self) -> None:
        """Waits until every lookup that has begun is answered."""
        from kvtier.client.engines.vllm.scheduler.prefix_lookups import LookupState

        lookups = self.side._server._lookups
        wait_until(
            lambda: all(lookup.state is not LookupState.PENDING for lookup in lookups.values()),
            IDLE_SECONDS,
            otherwise="a lookup never ends",
            interval=0.002,
        )

    def counters(self) -> dict[str, float]:
        from vllm.v1.metrics.reader import Counter

        values: dict[str, float] = {}
        for metric in self.llm.get_metrics():
            if isinstance(metric, Counter):
                values[metric.name] = values.get(metric.name, 0) + metric.value
        return values

    def leftovers(self) -> dict[str, Any]:
        """Returns what an engine at rest must not have: each is to be empty, 0 or False."""
        core = self.side._core
        return {
            "blocks in use": self.pool.num_gpu_blocks - 1 - self.pool.get_num_free_blocks(),
            "references": sum(block.ref_cnt for block in self.pool.blocks if not block.is_null),
            "requests": [*self.scheduler.requests, *self.side._requests],
            "pending": core.pending,
            "core": [*core._requests, *core._saving, *core._loading, *core._saves._in_flight, *core._loads._lookups],
            "lookups": [*self.side._server._lookups],
        }

    def _worker(self) -> Any:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group()._worker  # type: ignore[attr-defined]

    def _at(self, moment: str) -> None:
        self.moments.get(moment, lambda: None)()

    def _watch(self, connector: Any) -> None:
        """Wraps the connector's hooks with the moments and the counts."""
        _before(connector, "on_new_request", lambda *_: self._at("asking"))
        _after(self.side._server, "abandon_lookup", lambda *_: self._count("abandoned", 1))

        def allocated(_: Any, __: Any, ___: Any, external_tokens: int) -> None:
            if external_tokens:
                self._at("loading")

        def built(meta: Any, _: Any) -> None:
            if meta.saves:
                self._at("saving")

        def loads_ended(_: Any, __: Any, failed: Sequence[str]) -> None:
            self._count("failed_loads", len(failed))

        def saves_ended(ended: Sequence[Any], *_: Any) -> None:
            self._count("not_stored", sum(len(save.not_stored) for save in ended))

        _after(connector, "update_state_after_alloc", allocated)
        _after(connector, "build_connector_meta", built)
        _after(self.side, "loads_reported", loads_ended)
        _after(self.side._core, "saves_ended", saves_ended)

    def _count(self, name: str, more: int) -> None:
        setattr(self, name, getattr(self, name) + more)


def _before(owner: Any, name: str, first: Callable[..., None]) -> None:
    """Calls `first` with a method's arguments before each call."""
    method = getattr(owner, name)

    def call(*arguments: Any) -> Any:
        first(*arguments)
        return method(*arguments)

    setattr(owner, name, call)


def _after(owner: Any, name: str, then: Callable[..., None]) -> None:
    """Calls `then` with a method's result and arguments after each call."""
    method = getattr(owner, name)

    def call(*arguments: Any) -> Any:
        result = method(*arguments)
        then(result, *arguments)
        return result

    setattr(owner, name, call)
