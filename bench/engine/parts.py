"""Parts of the benchmark: conversations per configuration, and idle steps with kvtier."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from .child import ENGINE
from .configurations import ALONE, CONFIGURATIONS, KVTIER, Configuration, kvtier_connector, within
from .results import TARGET, IdleFound, Processes, Runs, Turns, Verdict, compare
from .runner import EngineFailed, run_engine
from .workload import Workload

__all__ = ["ABSENT", "SERVED", "Conversations", "engine_settings", "measure_idle", "measure_turns", "wrong_steps"]

SERVED, ABSENT = "server connected", "server absent"
BLOCK_TOKENS = 128
"""Block size of the idle engine. No block becomes full while steps are timed, so the connector
loads and saves nothing."""
PROMPT_TOKENS = 16
BATCH = 8
STRETCH = 8
"""Steps of one side before the next side's turn."""
COMPARED = (ALONE, KVTIER)
"""Configurations whose engines also run idle steps, to compare whole engines."""
PROCESS_ROUNDS = 30
HOOK_TOKENS = 16
"""Tokens that each request decodes while hooks are timed."""


@dataclass
class Conversations:
    """Results of the conversations.

    ``found``: figures of each configuration, or the reason why it did not run. ``wrong``: wrong
    results, as text. ``steps``: seconds of idle steps per run, for configurations in ``COMPARED``.
    """

    found: dict[str, Runs | str] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    steps: dict[str, list[list[float]]] = field(default_factory=dict)
    _reference: list[dict[str, Any]] = field(default_factory=list)

    @property
    def processes(self) -> Processes | None:
        """Comparison of whole engines; None if one side did not run."""
        sides = [self.steps.get(name) for name in COMPARED]
        return Processes.of(*(side for side in sides if side)) if all(sides) else None

    def measure(self, configuration: Configuration, model: Path, folder: Path, workload: Workload) -> None:
        """Runs the workload. The answers of the first configuration are the reference.

        Raises EngineFailed for a configuration that must run.
        """
        try:
            result = _run(configuration, self._job(configuration, model, workload), folder)
        except EngineFailed as error:
            if configuration.must_run:
                raise
            self.found[configuration.name] = str(error)
            return
        turns, before = Turns.of(result), self.found.get(configuration.name)
        self.found[configuration.name] = Runs((*(before.runs if isinstance(before, Runs) else ()), turns))
        if result["steps"]:
            self.steps.setdefault(configuration.name, []).append(result["steps"])
        self._reference = self._reference or result["rows"]
        answers, ties = compare(self._reference, result["rows"])
        self.wrong += [f"{configuration.name}: wrong answer, {answer}" for answer in answers]
        if configuration.must_run and configuration.name != ALONE and not turns.external_hits:
            self.wrong.append(f"{configuration.name}: nothing was found outside of the engine")
        if ties:
            print(
                f"{configuration.name}: {ties} answers differ from a token on that had a nearly equal alternative",
                file=sys.stderr,
            )

    def _job(self, configuration: Configuration, model: Path, workload: Workload) -> dict[str, Any]:
        job = _turns_job(model, workload, self._reference)
        return {**job, "idle_rounds": PROCESS_ROUNDS if configuration.name in COMPARED else 0}


def measure_turns(
    model: Path, folder: Path, workload: Workload, chosen: Collection[str], again: Collection[str]
) -> Conversations:
    """Runs the engine alone and the chosen configurations, then those in ``again``."""
    conversations = Conversations()
    for names in ((ALONE, *chosen), {ALONE, *chosen} & {*again}):
        for configuration in CONFIGURATIONS:
            if configuration.name in names:
                conversations.measure(configuration, model, folder, workload)
    return conversations


def engine_settings(workload: Workload) -> str:
    """Returns the settings of the conversations' engine, for the report."""
    llm = _llm(Path(), workload.block_tokens, workload.pool_blocks, workload.longest + workload.block_tokens)
    return ", ".join(f"{name}={value}" for name, value in {**ENGINE, **llm}.items() if name != "model")


def wrong_steps(found: Mapping[str, IdleFound]) -> list[str]:
    """Returns the cases in which kvtier's idle steps are clearly slower than the target."""
    return [
        f"{name}: idle steps take {of_name.kvtier.ratio_from:.4f} to {of_name.kvtier.ratio_to:.4f} times as long, not <= {TARGET}"
        for name, of_name in found.items()
        if of_name.kvtier.verdict is Verdict.NO
    ]


def measure_idle(
    model: Path, folder: Path, rounds: int, more_seconds: float, hook_batches: Sequence[int]
) -> dict[str, IdleFound]:
    """Returns the cost of idle steps, and of hooks by batch size, with and without a server.

    While a result is undecided, the measurement continues for up to ``more_seconds``.
    """
    absent = kvtier_connector(f"unix:{folder / 'absent.sock'}")
    served = next(configuration for configuration in CONFIGURATIONS if configuration.name == KVTIER)
    found = {}
    for name, configuration in ((SERVED, served), (ABSENT, Configuration(ABSENT, within(absent)))):
        job = {
            "operation": "steps",
            "llm": {
                **_llm(model, BLOCK_TOKENS, 2 * max(BATCH, *hook_batches), BLOCK_TOKENS),
                "max_num_seqs": max(BATCH, *hook_batches),
                "distributed_executor_backend": "mp",
            },
            "batch": BATCH,
            "rounds": rounds,
            "more_seconds": more_seconds,
            "stretch": STRETCH,
            "prompt_tokens": PROMPT_TOKENS,
            "answer_tokens": BLOCK_TOKENS - PROMPT_TOKENS - 1,
            "hook_batches": hook_batches,
            "hook_tokens": HOOK_TOKENS,
        }
        result = _run(Configuration(name, configuration.serve), job, folder, VLLM_ENABLE_V1_MULTIPROCESSING="0")
        found[name] = IdleFound.of(result)
    return found


def _run(configuration: Configuration, job: dict[str, Any], folder: Path, **environment: str) -> dict[str, Any]:
    print(f"measuring {job['operation']}: {configuration.name} …", file=sys.stderr, flush=True)
    places = (folder / f"{job['operation']} {configuration.name} {number}" for number in count(1))
    place = next(place for place in places if not place.exists())
    place.mkdir()
    return run_engine(configuration, job, place, environment)


def _turns_job(model: Path, workload: Workload, reference: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns a job whose prompts contain the reference's answers, so prompts are equal."""
    transcript: list[list[list[int]]] | None = [[] for _ in range(workload.conversations)] if reference else None
    for row in reference:
        assert transcript is not None
        transcript[row["conversation"]].append(row["tokens"])
    return {
        "operation": "turns",
        "llm": _llm(model, workload.block_tokens, workload.pool_blocks, workload.longest + workload.block_tokens),
        "workload": asdict(workload),
        "transcript": transcript,
    }


def _llm(model: Path, block_tokens: int, blocks: int, max_model_len: int) -> dict[str, Any]:
    return {
        "model": str(model),
        "block_size": block_tokens,
        "num_gpu_blocks_override": blocks,
        "max_model_len": max_model_len,
    }
