"""The demo of the router detects wrong results and computes its table from the answers."""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from harness.fake_engine import FakeEngine, fail, stream

DEMO = Path(__file__).resolve().parent.parent / "examples" / "demo"
MODULES = ("router", "processes", "report")


@pytest.fixture
def router(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(DEMO))
    for name in MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module("router")


def _runs(router: ModuleType) -> list[Any]:
    """Two conversations of two turns; the router finds 320 of 672 tokens, round robin 160."""
    runs = []
    for policy, cached in (("round_robin", 80), ("prefix", 160)):
        answers = {(number, 0): router.Answer(160, 0, 2.0, [number]) for number in range(2)}
        answers |= {(number, 1): router.Answer(176, cached, 1.0, [number, 7]) for number in range(2)}
        runs.append(router.Run(policy, answers))
    return runs


def test_correct_results_pass(router: ModuleType) -> None:
    runs = _runs(router)
    assert router.verdict(runs) == []
    assert [run.hit_rate for run in runs] == [160 / 672, 320 / 672]
    assert router.reusable_rate(runs[0]) == 320 / 672, "5 blocks of 32 tokens per conversation"
    assert [runs[1].first_token_seconds(later=later) for later in (False, True)] == [1.5, 1.0]


def test_wrong_results_fail(router: ModuleType) -> None:
    """Another output, and a router that finds no more than round robin."""
    plain, routed = _runs(router)
    routed.answers[1, 1] = replace(routed.answers[1, 1], output=[1, 8])
    assert router.verdict([plain, routed]) == ["the output of conversation 2, turn 2 differs"]
    (complaint,) = router.verdict([plain, replace(plain, policy="prefix")])
    assert "hit rate" in complaint


def test_the_table(router: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    router.console.width = router.PLAIN_WIDTH
    router.show(_runs(router), {"round_robin": 20.0, "prefix": 10.0})
    shown = capsys.readouterr().out
    assert "4 requests to two engines; at most 48%" in shown
    rows = [line for line in shown.splitlines() if "│" in line]
    assert ["24%" in rows[0], "48%" in rows[1]] == [True, True]


def _turn(tokens: list[int], cached: int) -> list[bytes]:
    pieces: list[dict[str, Any]] = [{"choices": [{"token_ids": [token]}]} for token in tokens]
    usage = {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": cached}}
    return [f"data: {json.dumps(piece)}\n\n".encode() for piece in [*pieces, {"choices": [], "usage": usage}]]


async def test_each_turn_has_the_conversation_so_far(router: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompt of a turn is that of the turn before, its answer, and new tokens."""
    monkeypatch.setattr(router, "SETTLE_SECONDS", 0.0)
    engine = FakeEngine("e")
    await engine.start()
    try:
        engine.script.extend([stream(*_turn([5, 6], 0), b"data: [DONE]\n\n"), stream(*_turn([7], 8))])
        run = await router.converse("prefix", engine.url, [[[1, 2], [3]]])
    finally:
        await engine.stop()
        engine.close()
    assert [asked.body["prompt"] for asked in engine.seen] == [[1, 2], [1, 2, 5, 6, 3]]
    assert [(answer.cached_tokens, answer.output) for answer in run.answers.values()] == [(0, [5, 6]), (8, [7])]


async def test_an_error_in_a_stream_ends_the_demo(router: ModuleType) -> None:
    engine = FakeEngine("e")
    await engine.start()
    try:
        engine.script.append(stream(b'data: {"error": {"message": "no"}}\n\n'))
        with pytest.raises(router.DemoError, match="an engine failed"):
            await router.converse("prefix", engine.url, [[[1, 2]]])
        engine.script.append(fail(503))
        with pytest.raises(router.DemoError, match="503"):
            await router.converse("prefix", engine.url, [[[1, 2]]])
    finally:
        await engine.stop()
        engine.close()
