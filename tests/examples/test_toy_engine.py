"""The adapter in the documentation: what it saves, and that failures do not change an answer."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from harness.launch import launch

from kvtier.client import Client
from kvtier.client.testing import FakeServer

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "toy_engine"
PROMPT = list(range(100))


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The example, as a module."""
    monkeypatch.syspath_prepend(str(EXAMPLE))
    import adapter

    yield adapter
    for name in ("adapter", "engine"):
        sys.modules.pop(name, None)


def _answer(toy: ModuleType, client: Client, prompt: list[int], weights: str = "toy") -> tuple[int, int]:
    engine = toy.ToyEngine(weights)
    with toy.CachedEngine(engine, client) as cached:
        return cached.generate(prompt), engine.computed


def _plain(toy: ModuleType, prompt: list[int], weights: str = "toy") -> int:
    engine = toy.ToyEngine(weights)
    answer: int = engine.decode(engine.prefill(prompt, np.empty((0, toy.TOKEN_BYTES), np.uint8)))
    return answer


def test_a_known_prefix_is_loaded_and_the_answer_is_the_same(toy: ModuleType) -> None:
    """Of 100 tokens 96 are in full blocks; a longer prompt continues from there."""
    server = FakeServer()
    namespace = toy.namespace_of("toy")
    assert _answer(toy, server.client(namespace), PROMPT) == (_plain(toy, PROMPT), 100)
    assert _answer(toy, server.client(namespace), PROMPT) == (_plain(toy, PROMPT), 4)
    longer = [*PROMPT, *range(30)]
    assert _answer(toy, server.client(namespace), longer) == (_plain(toy, longer), 34)


def test_at_least_one_token_is_computed(toy: ModuleType) -> None:
    """Also where the prompt ends with a block."""
    server = FakeServer()
    prompt = PROMPT[:96]
    for computed in (96, 16):
        assert _answer(toy, server.client(toy.namespace_of("toy")), prompt) == (_plain(toy, prompt), computed)


def test_prompts_that_differ_early_share_nothing_later(toy: ModuleType) -> None:
    """Keys are chained: the same 16 tokens after others are another block."""
    assert toy.keys_of(PROMPT)[0] != toy.keys_of([1, *PROMPT[1:]])[0]
    assert not set(toy.keys_of(PROMPT)) & set(toy.keys_of([1, *PROMPT[1:]]))
    server = FakeServer()
    _answer(toy, server.client(toy.namespace_of("toy")), PROMPT)
    other = [1, *PROMPT[1:]]
    assert _answer(toy, server.client(toy.namespace_of("toy")), other) == (_plain(toy, other), 100)


def test_other_weights_find_nothing(toy: ModuleType) -> None:
    """The namespace contains the weights."""
    server = FakeServer()
    _answer(toy, server.client(toy.namespace_of("toy")), PROMPT)
    found = _answer(toy, server.client(toy.namespace_of("other")), PROMPT, "other")
    assert found == (_plain(toy, PROMPT, "other"), 100)


@pytest.mark.parametrize("trouble", ["down", "hanging"])
def test_a_server_in_trouble_is_a_miss(toy: ModuleType, trouble: str, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing raises, and there is one warning."""
    server = FakeServer()
    client = server.client(toy.namespace_of("toy"))
    engine = toy.ToyEngine()
    with toy.CachedEngine(engine, client) as cached:
        cached.generate(PROMPT)
        setattr(server, trouble, True)
        assert cached.generate(PROMPT) == _plain(toy, PROMPT)
    assert engine.computed == 200
    assert len([record for record in caplog.records if record.levelname == "WARNING"]) == 1


def test_it_works_with_a_real_server(toy: ModuleType, tmp_path: Path) -> None:
    """A killed engine's blocks serve the next one."""
    with launch(tmp_path, "--cpu-only") as server:
        server.wait_ready()
        for computed in (100, 4):
            client = Client(f"unix:{tmp_path}/s", namespace=toy.namespace_of("toy"))
            client.wait_until_connected(60)
            assert _answer(toy, client, PROMPT) == (_plain(toy, PROMPT), computed)
