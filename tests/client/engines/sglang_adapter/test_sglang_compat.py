"""What the adapter asks SGLang for: the engine's arguments, and agreement of ranks."""

from __future__ import annotations

import importlib.util
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from rig import kv_pool, latent_pool

from kvtier.client.engines.sglang import compat


class Arguments:
    """The class of the engine's arguments."""


def test_arguments_are_those_that_sglang_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    """By SGLang's groups; an argument that is in no group counts too."""
    resolved = {"device": "cuda", "model_path": "tiny", "revision": None, "new": 1}
    context = SimpleNamespace(server_args=Arguments(), resolved_server_args_dict=lambda: resolved)

    def namespace_of(kind: type) -> dict[str, str]:
        assert kind is Arguments
        return {"device": "device", "model_path": "model", "revision": "model"}

    monkeypatch.setattr(compat, "get_context", lambda: context)
    monkeypatch.setattr(compat, "namespace_of", namespace_of)
    assert compat.engine_settings() == {
        "device": {"device": "cuda"},
        "model": {"model_path": "tiny", "revision": None},
        "": {"new": 1},
    }


def test_all_ranks_take_the_text_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """They clear into one namespace. A single rank calls no other."""
    asked: list[tuple[str, int]] = []

    def broadcast(text: str, *, src: int) -> str:
        asked.append((text, src))
        return "of rank 0"

    group: Any = SimpleNamespace(tp_group=SimpleNamespace(broadcast_object=broadcast))
    monkeypatch.setattr(compat, "get_parallel", lambda: group)
    assert compat.agree("mine", 1) == "mine"
    assert asked == []
    assert compat.agree("mine", 4) == "of rank 0"
    assert asked == [("mine", 0)]


@pytest.mark.parametrize(("version", "warns"), [("0.5.23", False), ("0.5.23.post1", False), ("0.5.24", True)])
def test_a_version_that_was_not_tested_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, version: str, *, warns: bool
) -> None:
    """The storage starts all the same."""
    with monkeypatch.context() as changed:
        changed.setattr(sys.modules["sglang.version"], "__version__", version)
        spec = importlib.util.spec_from_file_location(compat.__name__, compat.__file__)
        assert spec is not None
        assert spec.loader is not None
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    assert (f"tested with SGLang 0.5.23; this is {version}" in caplog.text) is warns


def test_only_pools_of_heads_are_split() -> None:
    """Latent KV is the same on all ranks."""
    assert compat.is_split_by_heads(kv_pool())
    assert not compat.is_split_by_heads(latent_pool())
