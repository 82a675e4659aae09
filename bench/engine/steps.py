"""Idle steps of one engine: with kvtier's connector, without a connector, with an empty connector.

Runs in the engine's process. It swaps the connector between steps. So noise of the machine affects
all three sides equally, and differences of microseconds become visible. The side with the empty
connector shows the cost of vLLM's own code for connectors.

The background threads of kvtier's connector (session, lookups, copies) run on all sides, so this
measurement does not include their cost. The comparison of whole engines (decode.py) includes it,
but has more noise.
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
"""Steps after each swap that are not counted."""
ROUNDS_MORE = 4
"""Rounds between two checks of the verdict. There are few checks, because each can be wrong."""

Turn = dict[str, list[float]]


def run_steps(llm: Any, job: dict[str, Any]) -> dict[str, Any]:
    """Returns the seconds of all steps by turn and side, and of the hooks by batch size."""
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
    """Compares for ``rounds`` rounds, and then for up to ``more_seconds`` while undecided."""
    turns = [turn for _ in range(rounds) for turn in compare()]
    deadline = clock() + more_seconds
    while Idle.of(turns).verdict is Verdict.OPEN and clock() < deadline:
        turns += [turn for _ in range(ROUNDS_MORE) for turn in compare()]
    return turns


class _Engine:
    """Engine whose core is in this process and whose worker is in another process."""

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
        """Starts ``batch`` requests; yields the number of steps that decode all of them."""
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
        """Decodes a batch; returns turns with ``stretch`` steps per side, in random order."""
        with self.decoding(batch, tokens) as steps:
            turns = [self._turn(stretch) for _ in range(steps // (len(SIDES) * (stretch + SETTLING_STEPS)))]
            self._switch("with")
        return turns

    def time_hooks(self, batch: int, tokens: int) -> dict[str, tuple[float, float]]:
        """Decodes a batch; returns the calls per step and the median seconds of each hook."""
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
    """Returns a connector that does nothing, with the interface of another connector."""
    from .empty import EmptyConnector

    return EmptyConnector(connector._vllm_config, connector.role, connector._kv_cache_config)


class HookClocks:
    """Timer of a connector's hooks, in the process of the connector."""

    def __init__(self, connector: Any) -> None:
        self._connector = connector
        ours = (cls for cls in type(connector).__mro__ if cls.__module__.startswith("kvtier."))
        self._names = {name for cls in ours for name, value in vars(cls).items() if name[0] != "_" and callable(value)}
        self._seconds: dict[str, list[float]] = {}

    def start(self) -> None:
        """Starts to measure: wraps each hook."""
        for name in self._names:
            setattr(self._connector, name, self._watched(name, getattr(self._connector, name)))

    def stop(self) -> dict[str, list[float]]:
        """Removes the wrappers; returns the seconds of each call, by hook."""
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


# vLLM calls these functions in its worker's process, which keeps the state of this module.

_kept: dict[str, Any] = {}
_clocks: dict[str, HookClocks] = {}


def switch_worker(_worker: Any, side: str) -> None:
    """Sets the worker's connector to the one of a side, or to none."""
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
