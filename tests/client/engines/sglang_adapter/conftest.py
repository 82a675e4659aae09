"""Tests of the adapter of SGLang, with SGLang if it is installed, otherwise with a stand-in."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import sglang_stand_in
from harness.server_process import ServerProcess

from kvtier.client.engines import identity

HAS_SGLANG = importlib.util.find_spec("sglang") is not None
if not HAS_SGLANG:
    sglang_stand_in.install()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tests for `make test-sglang` if SGLang is installed."""
    if HAS_SGLANG:
        for item in items:
            if item.path.is_relative_to(Path(__file__).parent):
                item.add_marker(pytest.mark.sglang)


@pytest.fixture(autouse=True)
def no_clears(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test is a process of its own, in which no storage was cleared."""
    from kvtier.client.engines.sglang import KVTierStorage

    monkeypatch.setattr(KVTierStorage, "_clears", 0)
    monkeypatch.setattr(identity, "process_started_at", lambda: math.inf)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    """A running server with a tier on disk."""
    with ServerProcess(tmp_path) as process:
        yield process.start()
