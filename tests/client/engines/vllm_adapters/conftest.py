"""Tests of the adapters of vLLM, with vLLM if it is installed, otherwise with a stand-in."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

import pytest
import vllm_stand_in

from kvtier.client.engines import identity

HAS_VLLM = importlib.util.find_spec("vllm") is not None
if not HAS_VLLM:
    vllm_stand_in.install()


@pytest.fixture(autouse=True)
def later_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets tests write the files of a model: engines begin after that, this process before."""
    monkeypatch.setattr(identity, "process_started_at", lambda: math.inf)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tests for `make test-engines` if vLLM is installed."""
    if HAS_VLLM:
        for item in items:
            if item.path.is_relative_to(Path(__file__).parent):
                item.add_marker(pytest.mark.engines)
