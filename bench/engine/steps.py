"""Idle steps of one engine with kvtier's connector, without it, and with an empty one.

Runs in the engine's process. The connector is removed and restored between steps, so that noise of
the machine affects all sides alike and differences of microseconds show. The empty connector shows
vLLM's own share.

The connector's background threads (session, lookups, copies) run on all sides, so their cost does
not show. It is included when whole engines are compared (decode.py), with more noise.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from .results import Idle, Verdict
from .workload import FIRST_TOKEN, VOCABULARY

__all__ = ["gather", "run_steps"]

SIDES = ("with", "without", "empty")
SETTLING_STEPS = 1
"""Steps that are not counted after each switch."""
ROUNDS_MORE = 4
"""Rounds between two checks of the verdict. Each check can err, so there are few."""

Turn = dict[str, list[float]]


def run_steps(llm: Any, job: dict[str, Any]) -> dict[str, Any]:
    """Returns the seconds of all steps of each side in turns, and of the hooks by batch size."""
    engine = _Engine(llm, job["prompt_tokens"])
    with engine.decoding(job["batch"], job["hook_tokens"]):
        pass  # warm-up
    compare = partial(engine.compare, job["batch"], job["answer_tokens"], job["stretch"])
    turns = gather(compare, job["rounds"], job["more_seconds"])
    hooks = {str(batch): engine.time_hooks(batch, job["hook_tokens"]) for batch in job["hook_batches"]}
    return {"turns": turns, "hooks": hooks}


def gather(
    compare: Callable[[], list[Turn]], rounds: int, more_seconds: float, clock: Callable[[], float] = time.perf_counter
) -> list[Turn]:
    """Compares for ``rounds`` rounds, then continues while undecided and in time."""
    turns = [turn for _ in range(rounds) for turn in compare()]
    deadline = clock() + more_seconds
    while Idle.of(turns).verdict is Verdict.OPEN and clock() < deadline:
        turns += [turn for _ in range(ROUNDS_MORE) for turn in compare()]
    return turns


class _Engine:
    """An engine with its core in this process; its worker is another process."""

    def __init__(self, llm: Any, prompt_tokens: int) -> None:
        self._llm = llm
        self._core = llm.llm_engine.engine_core.engine_core
        self._executor = self._core.model_executor
        connector = self._core.scheduler.connector
        self._connectors = {"with": connector, "without": None, "empty": empty_like(connector)}
        self._aggregator = self._executor.kv_output_aggregator
        self._prompt_tokens = prompt_tokens
        self._random = random.Random(4)
        self._seconds: list[float] = []
        self._core.step_fn = self._timed(self._core.step_fn)

    @contextmanager
    def decoding(self, batch: int, tokens: int) -> Iterator[int]:
        """Starts ``batch`` requests; yields the number of decode steps that they share."""
        from vllm import SamplingParams

        sampling = SamplingParams(max_tokens=tokens, temperature=0.0, detokenize=False, ignore_eos=True)
        words = range(FIRST_TOKEN, VOCABULARY)
        prompts = [{"prompt_token_ids": self._random.choices(words, k=self._prompt_tokens)} for _ in range(batch)]
        self._llm.enqueue(prompts, sampling, use_tqdm=False)
        scheduler = self._core.scheduler
        while len(scheduler.running) < batch or any(not request.num_output_tokens for request in scheduler.running):
            self.step()
        yield tokens - max(request.num_output_tokens for request in scheduler.running) - 1
        while self._llm.llm_engine.has_unfinished_requests():
            self.step()

    def step(self) -> None:
        self._llm.llm_engine.step()

    def compare(self, batch: int, tokens: int, stretch: int) -> list[Turn]:
        """Decodes once; returns turns with a stretch per side, sides in random order."""
        with self.decoding(batch, tokens) as steps:
            turns = [self._turn(stretch) for _ in range(steps // (len(SIDES) * (stretch + SETTLING_STEPS)))]
            self._switch("with")
        return turns

    def time_hooks(self, batch: int, tokens: int) -> dict[str, tuple[float, float]]:
        """Decodes once; returns per hook its calls per step and its median seconds."""
        clocks = HookClocks(self._core.scheduler.connector)
        with self.decoding(batch, tokens) as steps:
            clocks.start()
            self._executor.collective_rpc(watch_worker)
            for _ in range(steps):
                self.step()
            (of_worker,) = self._executor.collective_rpc(unwatch_worker)
            of_scheduler = clocks.stop()
        return {
            f"{half}: {name}": (len(seconds) / steps, statistics.median(seconds))
            for half, hooks in (("scheduler", of_scheduler), ("worker", of_worker))
            for name, seconds in hooks.items()
        }

    def _turn(self, stretch: int) -> Turn:
        return {side: self._stretch(stretch, side) for side in self._random.sample(SIDES, len(SIDES))}

    def _stretch(self, steps: int, side: str) -> list[float]:
        self._switch(side)
        for _ in range(SETTLING_STEPS + steps):
            self.step()
        return self._seconds[-steps:]

    def _switch(self, side: str) -> None:
        connector = self._core.scheduler.connector = self._connectors[side]
        self._executor.kv_output_aggregator = self._aggregator if connector is not None else None
        self._executor.collective_rpc(switch_worker, args=(side,))

    def _timed(self, step: Callable[[], Any]) -> Callable[[], Any]:
        def timed() -> Any:
            start = time.perf_counter()
            result = step()
            self._seconds.append(time.perf_counter() - start)
            return result

        return timed


def empty_like(connector: Any) -> Any:
    """Returns a connector that does nothing, in place of another."""
    from .empty import EmptyConnector

    return EmptyConnector(connector._vllm_config, connector.role, connector._kv_cache_config)


class HookClocks:
    """Measures the calls of a connector's hooks in the process of the connector."""

    def __init__(self, connector: Any) -> None:
        self._connector = connector
        ours = (cls for cls in type(connector).__mro__ if cls.__module__.startswith("kvtier."))
        self._names = {name for cls in ours for name, value in vars(cls).items() if name[0] != "_" and callable(value)}
        self._seconds: dict[str, list[float]] = {}

    def start(self) -> None:
        """Wraps each hook with a clock."""
        for name in self._names:
            setattr(self._connector, name, self._watched(name, getattr(self._connector, name)))

    def stop(self) -> dict[str, list[float]]:
        """Removes the clocks; returns the seconds of each call per hook."""
        for name in self._names:
            delattr(self._connector, name)
        return self._seconds

    def _watched(self, name: str, hook: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = hook(*args, **kwargs)
            self._seconds.setdefault(name, []).append(time.perf_counter() - start)
            return result

        return watched


# Called by vLLM in its worker's process, which keeps the state of this module.

_kept: dict[str, Any] = {}
_clocks: dict[str, HookClocks] = {}


def switch_worker(_worker: Any, side: str) -> None:
    """Gives the worker the connector of a side, or none."""
    from vllm.distributed.kv_transfer import kv_transfer_state

    state: Any = kv_transfer_state
    if not _kept:
        connector = state._KV_CONNECTOR_AGENT
        _kept.update({"with": connector, "without": None, "empty": empty_like(connector)})
    state._KV_CONNECTOR_AGENT = _kept[side]


def watch_worker(_worker: Any) -> None:
    """Starts to measure the hooks of the worker's connector."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    clocks = _clocks["worker"] = HookClocks(get_kv_transfer_group())
    clocks.start()


def unwatch_worker(_worker: Any) -> dict[str, list[float]]:
    """Stops measuring; returns the seconds of each call."""
    seconds: dict[str, list[float]] = _clocks.pop("worker").stop()
    return seconds
