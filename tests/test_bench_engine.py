"""What the benchmark of engines asks and concludes, without an engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.engine.configurations import ALONE, CONFIGURATIONS, KVTIER, Configuration, kvtier_connector
from bench.engine.decode import ANSWER_TOKENS, PROMPT_TOKENS, decode_seconds
from bench.engine.parts import Conversations, wrong_steps
from bench.engine.results import Idle, IdleFound, Processes, Runs, Turns, Verdict, compare, hook_microseconds, interval
from bench.engine.runner import EngineFailed, find_reason, run_engine
from bench.engine.steps import gather
from bench.engine.table import (
    BUSY_LOAD,
    rows_of_idle,
    rows_of_processes,
    rows_of_turns,
    show_idle,
    show_load,
    show_processes,
    show_turns,
)
from bench.engine.workload import FULL, QUICK, Workload
from bench.report import Report


@pytest.mark.parametrize("workload", [FULL, QUICK])
def test_conversations_do_not_fit_the_engine(workload: Workload) -> None:
    """The engine holds the requests in flight, and has evicted a conversation at its next turn."""
    pool = workload.pool_blocks * workload.block_tokens
    assert workload.at_once * (workload.longest + workload.block_tokens) <= pool
    others = (workload.conversations - workload.at_once) * workload.opening
    assert others + workload.at_once * workload.opening > pool


def test_a_turn_repeats_all_that_was_said() -> None:
    """A conversation is always the same and has the stated length; each turn is sent once."""
    answers = [[turn] * FULL.answer for turn in range(FULL.turns)]
    prompts = [FULL.prompt(3, turn, answers) for turn in range(1, FULL.turns + 1)]
    for turn in range(1, FULL.turns):
        assert prompts[turn][: len(prompts[turn - 1])] == prompts[turn - 1]
        assert prompts[turn][len(prompts[turn - 1]) :][: FULL.answer] == answers[turn - 1]
    assert len(prompts[-1]) + FULL.answer == FULL.longest
    assert prompts[-1] == FULL.prompt(3, FULL.turns, answers) != FULL.prompt(4, FULL.turns, answers)
    sent = [(turn, number) for turn, conversations in FULL.waves() for number in conversations]
    assert sorted(sent) == [(turn, number) for turn in range(1, FULL.turns + 1) for number in range(FULL.conversations)]
    assert [turn for turn, _ in sent] == sorted(turn for turn, _ in sent)


def _row(turn: int, tokens: list[int], margins: list[float], seconds: float = 1.0) -> dict[str, Any]:
    return {
        "conversation": 0,
        "turn": turn,
        "tokens": tokens,
        "margins": margins,
        "first_token_seconds": seconds,
        "prompt_tokens": 10 * turn,
    }


def test_a_wrong_token_is_told_from_a_tie() -> None:
    """The first difference counts: after a clear best token it is wrong, after a tie it is not."""
    right = [_row(1, [5, 6, 7], [1.0, 1e-5, 1.0]), _row(2, [5, 6, 7], [1.0, 1e-5, 1.0])]
    assert compare(right, right) == ([], 0)
    tied = [right[0], _row(2, [5, 9, 9], [])]
    assert compare(right, tied) == ([], 1)
    wrong = [_row(1, [8, 6, 7], []), right[1]]
    assert compare(right, wrong) == (["conversation 0, turn 1, token 1"], 0)


def test_first_and_later_turns_are_told_apart() -> None:
    """The first turn stores, later ones load; computed tokens were cached nowhere."""
    rows = [_row(1, [1] * 4, [], 9.0), *(_row(2, [1] * 4, [], seconds) for seconds in (1.0, 2.0, 3.0))]
    turns = Turns.of({"rows": rows, "seconds": 8.0, "external_hits": 20.0, "local_hits": 5.0})
    assert turns == Turns(9000, 2000, 3000, 2.0, 8.0, 20, 45)


def test_runs_of_a_configuration_show_their_spread() -> None:
    """The figures are medians; the speed-up ranges from the worst to the best pair of runs."""
    alone = Runs((Turns(10, 100, 200, 5.0, 10.0, 0, 1000), Turns(10, 140, 200, 5.0, 10.0, 0, 1000)))
    other = Runs((Turns(10, 20, 30, 5.0, 10.0, 601, 400), Turns(20, 10, 50, 7.0, 20.0, 600, 400)))
    assert other.middle == Turns(15, 15, 40, 6.0, 15.0, 600, 400)
    assert other.later_p50s == (10, 20)
    assert other.faster(alone) == (5, 14)


def test_what_is_not_a_default_is_shown() -> None:
    """LMCache runs with its own chunk size and with small chunks; kvtier's settings are named."""
    settings = {configuration.name: configuration.settings for configuration in CONFIGURATIONS}
    assert all(text for name, text in settings.items() if name != ALONE)
    assert "--chunk-size" not in settings["LMCache server"]
    assert settings["LMCache server, small chunks"].endswith(f"--chunk-size {FULL.block_tokens}")
    for configuration in CONFIGURATIONS:
        if "kvtier" in configuration.name:
            assert configuration.must_run
    assert kvtier_connector("unix:x", transport="shm")["kv_connector_extra_config"] == {
        "endpoint": "unix:x",
        "transport": "shm",
    }


def test_an_interval_holds_what_most_samples_say() -> None:
    """Equal values give a point; other intervals contain the median and lie within the values."""
    assert interval([1.5] * 9, max) == (1.5, 1.5)
    values = [1 + number / 1000 for number in range(41)]
    low, high = interval(values, lambda sample: sorted(sample)[len(sample) // 2])
    assert values[0] < low < 1.02 < high < values[-1]


TURN = {"with": [1.01, 1.02, 9.0], "without": [0.9, 1.0, 1.1], "empty": [1.01, 1.01, 1.01]}
HOOKS = {"1": {"scheduler: a": (1.0, 2e-6), "scheduler: b": (2.0, 3e-6), "worker: a": (4.0, 1e-6)}}


def test_stretches_of_a_turn_are_compared_with_each_other() -> None:
    """One slow step changes no median; a turn at half the speed changes no ratio."""
    slow = {side: [2 * seconds for seconds in values] for side, values in TURN.items()}
    idle = Idle.of([TURN, slow, TURN])
    assert idle.ratio == idle.ratio_from == idle.ratio_to == pytest.approx(1.02)
    assert (idle.without_ms, idle.turns) == (1000, 3)
    assert idle.undisturbed == pytest.approx(1.01 / 0.9)
    assert idle.added_us == pytest.approx(110_000)
    assert Idle.of([TURN, slow, TURN], "empty").ratio == pytest.approx(1.01)


def _turn(ratio: float) -> dict[str, list[float]]:
    return {"with": [ratio], "without": [1.0], "empty": [1.0]}


CLEAR, SLOW, UNSURE = [_turn(1.01)] * 8, [_turn(1.03)] * 8, [_turn(0.98), _turn(1.06)] * 4


@pytest.mark.parametrize(
    ("turns", "verdict"),
    [(CLEAR, Verdict.YES), (SLOW, Verdict.NO), (UNSURE, Verdict.OPEN), ([_turn(1.02)], Verdict.YES)],
)
def test_the_whole_interval_decides(turns: list[dict[str, list[float]]], verdict: Verdict) -> None:
    """Yes if the upper end is within the target, no if the lower end is above it."""
    assert Idle.of(turns).verdict is verdict
    found = {"server there": IdleFound.of({"turns": turns, "hooks": HOOKS})}
    assert bool(wrong_steps(found)) is (verdict is Verdict.NO)


def test_a_median_within_the_target_is_not_yet_a_yes() -> None:
    """An interval that reaches above the target decides nothing."""
    idle = Idle.of([_turn(ratio) for ratio in (0.95, 0.99, 1.0, 1.0, 1.1, 1.2, 1.3)])
    assert idle.ratio == 1.0
    assert idle.verdict is Verdict.OPEN


def _gathered(first: list[dict[str, list[float]]], more: list[dict[str, list[float]]]) -> int:
    """Returns the gathered rounds.

    The requested rounds give ``first``, further ones ``more``; each takes one of thirty seconds.
    """
    taken = 0

    def compare() -> list[dict[str, list[float]]]:
        nonlocal taken
        taken += 1
        return first if taken <= 2 else more

    gather(compare, 2, 30.0, clock=lambda: float(taken))
    return taken


def test_rounds_are_taken_until_they_decide() -> None:
    """Stops after the requested rounds if decided; else until decided or out of time."""
    assert _gathered(CLEAR, CLEAR) == _gathered(SLOW, CLEAR) == 2
    assert 2 < _gathered(UNSURE, CLEAR) < 32
    assert _gathered(UNSURE, UNSURE) == 34


class _Steps:
    """An engine whose requests end one after another, from its twelfth step on."""

    def __init__(self) -> None:
        self.left = 15

    def has_unfinished_requests(self) -> bool:
        return self.left > 0

    def step(self) -> list[SimpleNamespace]:
        self.left -= 1
        return [SimpleNamespace(finished=True)] if self.left < 4 else []


def test_steps_count_while_all_decode() -> None:
    """Neither steps with prompts nor steps after the first finished request; none is left."""
    engine = _Steps()
    assert len(decode_seconds(engine)) == 15 - 4 - 4
    assert engine.left == 0


def test_no_block_is_filled_by_an_idle_step() -> None:
    """A full block would be stored."""
    assert PROMPT_TOKENS + ANSWER_TOKENS < FULL.block_tokens == QUICK.block_tokens


def test_whole_processes_are_compared_with_their_spread(capsys: pytest.CaptureFixture[str]) -> None:
    """Each process counts by its median step; the spread covers any two. Needs both sides."""
    from rich.console import Console

    alone, connected = [[0.010, 0.010, 9.0], [0.012]], [[0.011], [0.013]]
    found = Conversations(steps={ALONE: alone, KVTIER: connected}).processes
    assert found == Processes((10.0, 12.0), (11.0, 13.0))
    assert found.ratio == pytest.approx(12 / 11)
    assert found.spread == pytest.approx((11 / 12, 1.3))
    assert Conversations(steps={ALONE: alone}).processes is None
    report = Report()
    rows_of_processes(report, found)
    assert {row.value for row in report.rows} >= {10.0, 12.0, 11.0, 13.0}
    show_processes(Console(width=140), found)
    assert "10.00, 12.00" in capsys.readouterr().out


def test_a_busy_machine_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """Above the limit the output warns; at the limit it does not."""
    from rich.console import Console

    show_load(Console(width=140), BUSY_LOAD)
    assert not capsys.readouterr().out
    show_load(Console(width=140), 11.5)
    assert "load 11.5 at the start): do not quote these figures" in capsys.readouterr().out


def test_hooks_of_each_half_add_up() -> None:
    """Calls per step times the median of a call."""
    assert hook_microseconds(HOOKS["1"], "scheduler") == pytest.approx(8)
    assert hook_microseconds(HOOKS["1"], "worker") == pytest.approx(4)


LOG = """\
(Worker pid=2) ERROR 11-20 13:56:00 [x.py:1063] ValueError: an early one that was dealt with
(Worker pid=2) ERROR 11-20 13:56:00 [x.py:1063] Exception: only supported on GPUs
(EngineCore pid=1) ERROR 11-20 13:56:00 [core.py:1510] RuntimeError: failed with 'x', see the trace for the root cause
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
  warnings.warn('resource_tracker: There appear to be %d '
"""


def test_the_reason_is_the_error_that_came_first() -> None:
    """Not the errors of processes that failed as a result; without an error, the log's end."""
    assert find_reason(LOG) == "Exception: only supported on GPUs"
    assert find_reason("RuntimeError: See root cause above") == "RuntimeError: See root cause above"
    assert find_reason("Killed\n") == "Killed"
    assert find_reason("") == "no output"


def test_an_engine_that_ends_says_why(tmp_path: Path) -> None:
    """A real child without vLLM or the model: the benchmark continues and has the error."""

    @contextmanager
    def serve(_: Path) -> Iterator[None]:
        yield None

    job = {"operation": "turns", "llm": {"model": str(tmp_path / "none")}}
    with pytest.raises(EngineFailed, match="Error: "):
        run_engine(Configuration("alone", serve), job, tmp_path, {})
    with pytest.raises(EngineFailed, match="there is no"):
        run_engine(Configuration("other", serve, python=Path("/nonexistent/python")), job, tmp_path, {})


def test_rows_and_tables(capsys: pytest.CaptureFixture[str]) -> None:
    """A ratio above 1 is better than the engine alone; a failed run has its reason, no figure."""
    from rich.console import Console

    alone, better = Turns(10, 100, 200, 5.0, 10.0, 0, 1000), Turns(10, 25, 50, 10.0, 5.0, 600, 400)
    found: dict[str, Runs | str] = {
        ALONE: Runs((alone,)),
        KVTIER: Runs((better, better)),
        "other": Runs((better,)),
        "broken": "Exception: [no] GPU",
    }
    idle = {"server there": IdleFound.of({"turns": [TURN], "hooks": HOOKS})}
    report = Report()
    rows_of_turns(report, found)
    rows_of_idle(report, idle)
    ratios = {row.name: row.ratio for row in report.rows}
    assert ratios["other: first token, later turns, p50"] == 4
    assert ratios["other: output"] == 2
    assert not any("broken" in name for name in ratios)
    console = Console(width=140)
    show_turns(console, found)
    show_idle(console, idle)
    shown = capsys.readouterr().out
    assert "broken does not run here: Exception: [no] GPU" in shown
    assert all(
        text in shown for text in ("4.0 - 4.0", "1.0200", "server there", "kvtier, shm: transport=shm; server: ")
    )


def test_the_engine_alone_is_among_the_configurations() -> None:
    """It is the first, and names are unique."""
    names = [configuration.name for configuration in CONFIGURATIONS]
    assert names[0] == ALONE
    assert len(set(names)) == len(names)
