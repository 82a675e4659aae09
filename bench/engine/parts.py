"""The two parts of this benchmark: conversations in every configuration, and idle steps with kvtier's connector."""

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
"""Of the idle engine: no block is filled while steps are timed, so that there is nothing to load or save."""
PROMPT_TOKENS = 16
BATCH = 8
STRETCH = 8
"""Steps on one side before the other has its turn."""
COMPARED = (ALONE, KVTIER)
"""What makes idle steps after its conversations: whole engines against each other, in the turns in which they run."""
PROCESS_ROUNDS = 30
HOOK_TOKENS = 16
"""What each request decodes while hooks are timed."""


@dataclass
class Conversations:
    """``found``: the figures of each configuration, or why it did not run. ``wrong``: what may not be, in words.

    ``steps``: of the configurations in ``COMPARED``, the seconds of idle steps, a list for each run.
    """

    found: dict[str, Runs | str] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    steps: dict[str, list[list[float]]] = field(default_factory=dict)
    _reference: list[dict[str, Any]] = field(default_factory=list)

    @property
    def processes(self) -> Processes | None:
        """Whole engines against each other; None where one side did not run."""
        sides = [self.steps.get(name) for name in COMPARED]
        return Processes.of(*(side for side in sides if side)) if all(sides) else None

    def measure(self, configuration: Configuration, model: Path, folder: Path, workload: Workload) -> None:
        """Runs the workload; the first configuration is the others' reference. Raises EngineFailed for those that must run."""
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
            print(f"{configuration.name}: {ties} answers differ from where two tokens tied", file=sys.stderr)

    def _job(self, configuration: Configuration, model: Path, workload: Workload) -> dict[str, Any]:
        job = _turns_job(model, workload, self._reference)
        return {**job, "idle_rounds": PROCESS_ROUNDS if configuration.name in COMPARED else 0}


def measure_turns(
    model: Path, folder: Path, workload: Workload, chosen: Collection[str], again: Collection[str]
) -> Conversations:
    """Runs the engine alone and in the chosen configurations; then those of them that are to run ``again``, in the same order."""
    conversations = Conversations()
    for names in ((ALONE, *chosen), {ALONE, *chosen} & {*again}):
        for configuration in CONFIGURATIONS:
            if configuration.name in names:
                conversations.measure(configuration, model, folder, workload)
    return conversations


def engine_settings(workload: Workload) -> str:
    """Returns, for people, how the engine of the conversations is set."""
    llm = _llm(Path(), workload.block_tokens, workload.pool_blocks, workload.longest + workload.block_tokens)
    return ", ".join(f"{name}={value}" for name, value in {**ENGINE, **llm}.items() if name != "model")


def wrong_steps(found: Mapping[str, IdleFound]) -> list[str]:
    """Returns, in words, where kvtier's idle steps are slower than they may be; what is not decided is not wrong."""
    return [
        f"{name}: idle steps take {of_name.kvtier.ratio_from:.4f} to {of_name.kvtier.ratio_to:.4f} times as long, not <= {TARGET}"
        for name, of_name in found.items()
        if of_name.kvtier.verdict is Verdict.NO
    ]


def measure_idle(
    model: Path, folder: Path, rounds: int, more_seconds: float, hook_batches: Sequence[int]
) -> dict[str, IdleFound]:
    """Returns what idle steps cost, and the hooks by batch size, with a server and without one.

    Each of the two takes up to ``more_seconds`` more, while its rounds do not decide whether the target is kept.
    """
    nobody = kvtier_connector(f"unix:{folder / 'nobody.sock'}")
    served = next(configuration for configuration in CONFIGURATIONS if configuration.name == KVTIER)
    found = {}
    for name, configuration in ((SERVED, served), (ABSENT, Configuration(ABSENT, within(nobody)))):
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
    """All configurations go on with the reference's answers, so that they are asked the same."""
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
