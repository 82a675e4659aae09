"""The demo's verdict detects wrong results."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

DEMO = Path(__file__).resolve().parent.parent / "examples" / "demo"
PROMPT = 640


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(DEMO))
    spec = importlib.util.spec_from_file_location("demo_run", DEMO / "run.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def _results(demo: ModuleType) -> list[Any]:
    loads: tuple[dict[str, int], ...] = ({}, {"cpu": 576}, {"cpu": 576}, {"lmdb": 576})
    return [demo.Result(PROMPT - sum(loaded.values()), loaded, 1.0, [1, 2, 3]) for loaded in loads]


def test_correct_results_pass(demo: ModuleType) -> None:
    """No hit at first, then all but the last block from the CPU tier twice, then from LMDB.

    Equal output.
    """
    assert demo.verdict(_results(demo), PROMPT) == []


@pytest.mark.parametrize(
    ("number", "change", "complaint"),
    [
        (1, {"output": [1, 2, 4]}, "output of engine 2"),
        (2, {"loaded": {"lmdb": 576}}, "engine 3 loaded"),
        (3, {"loaded": {"cpu": 576}}, "engine 4 loaded"),
        (1, {"loaded": {"cpu": 512}, "computed": 128}, "engine 2 loaded"),
        (1, {"computed": PROMPT}, "engine 2 computed"),
        (0, {"loaded": {"lmdb": 576}}, "engine 1 loaded"),
    ],
)
def test_wrong_results_fail(demo: ModuleType, number: int, change: dict[str, Any], complaint: str) -> None:
    """Another output or tier, too few loaded tokens, and recomputed tokens are reported."""
    results = _results(demo)
    results[number] = replace(results[number], **change)
    assert any(complaint in line for line in demo.verdict(results, PROMPT))


def test_tokens_from_outside_are_attributed_to_the_tier_that_had_them(demo: ModuleType) -> None:
    """VLLM reports external tokens; they count for the lowest tier whose hits grew."""
    result = demo.Result(64, {"": 576}, 1.0, [])
    before = {"tiers": [{"name": "cpu", "hits": 3}, {"name": "lmdb", "hits": 0}]}
    after = {"tiers": [{"name": "cpu", "hits": 12}, {"name": "lmdb", "hits": 9}]}
    assert demo.attributed(result, before, after).loaded == {"lmdb": 576}
    assert demo.attributed(result, before, before).loaded == {"?": 576}
