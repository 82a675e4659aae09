"""First tokens beside a dead shared store: engines that run at the same time and take turns.

The engines have the same prompts, one engine at a time in random order. So noise of the machine
affects all sides equally.
"""

from __future__ import annotations

import random
import statistics
import sys
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from .asked import ANSWER_TOKENS
from .configurations import CONFIGURATIONS, DEAD_STORES, KVTIER
from .results import interval
from .runner import asked_engine
from .workload import Workload

__all__ = ["LATER", "NEW", "STORE_TARGET", "StoreFound", "measure_stores"]

STORE_TARGET = 1.05
"""Maximum time to the first token with a dead store, relative to none."""
NEW, LATER = "new prompts", "later turns"
CONVERSATIONS = 4


@dataclass(frozen=True, slots=True)
class StoreFound:
    """Seconds to the first token of the same prompts, without a store and with a dead one."""

    name: str
    turn: str
    without: list[float]
    dead: list[float]

    @property
    def ratio(self) -> float:
        """Median of the ratios of the prompts."""
        return statistics.median(self._ratios())

    @property
    def confidence(self) -> tuple[float, float]:
        """95 % confidence interval of the ratio."""
        return interval(self._ratios(), statistics.median)

    def _ratios(self) -> list[float]:
        return [dead / without for dead, without in zip(self.dead, self.without, strict=True)]


def measure_stores(model: Path, folder: Path, rounds: int) -> list[StoreFound]:
    """Returns the results of each dead store, for new prompts and for later turns.

    The KV cache of an engine is smaller than the conversations of a round, so later turns load from
    the CPU tier. Raises EngineFailed, also if an answer is wrong.
    """
    print("measuring stores: three engines in turn …", file=sys.stderr, flush=True)
    sides = [configuration for configuration in CONFIGURATIONS if configuration.name == KVTIER]
    sides += DEAD_STORES
    workload = Workload(CONVERSATIONS, 2, opening=768, question=128, answer=ANSWER_TOKENS, at_once=1, pool_blocks=64)
    llm = {
        "model": str(model),
        "block_size": workload.block_tokens,
        "num_gpu_blocks_override": workload.pool_blocks,
        "max_model_len": workload.longest + workload.block_tokens,
    }
    seconds: dict[tuple[str, str], list[float]] = {}
    order = random.Random(4)
    with ExitStack() as engines:
        asks = {
            side.name: engines.enter_context(asked_engine(side, llm, folder / f"stores {side.name}")) for side in sides
        }
        for seed in range(rounds + 1):
            workload = replace(workload, seed=seed)
            said: dict[int, list[list[int]]] = {}
            for turn, [number] in workload.waves():
                prompt = workload.prompt(number, turn, said.get(number, ()))
                answers = {name: asks[name](prompt) for name in order.sample(list(asks), len(asks))}
                said[number] = [answers[KVTIER]["tokens"]]
                for name, answer in answers.items():
                    if answer["tokens"] != answers[KVTIER]["tokens"]:
                        raise RuntimeError(f"{name}: wrong answer to turn {turn} of conversation {number}")
                    if seed:  # the first round is a warm-up
                        seconds.setdefault((name, NEW if turn == 1 else LATER), []).append(
                            answer["first_token_seconds"]
                        )
    return [
        StoreFound(side.name, turn, seconds[KVTIER, turn], seconds[side.name, turn])
        for side in DEAD_STORES
        for turn in (NEW, LATER)
    ]
