"""Tests of the adapters of vLLM, with vLLM if it is installed, otherwise with a stand-in."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import vllm_stand_in

from kvtier.client.engines import identity
from kvtier.client.engines.identity import InBackground

HAS_VLLM = importlib.util.find_spec("vllm") is not None
if not HAS_VLLM:
    vllm_stand_in.install()


@pytest.fixture(autouse=True)
def later_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets tests write the files of a model: engines begin after that, this process before."""
    monkeypatch.setattr(identity, "process_started_at", lambda: math.inf)


class Awaited(InBackground[Any]):
    """A digest for which its reader waits."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.wait(60)


@pytest.fixture
def digests_are_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes adapters known at their first use."""
    from kvtier.client.engines.vllm import lora

    monkeypatch.setattr(lora, "InBackground", Awaited)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tests for `make test-engines` if vLLM is installed."""
    if HAS_VLLM:
        for item in items:
            if item.path.is_relative_to(Path(__file__).parent):
                item.add_marker(pytest.mark.engines)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The folder of a model."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Creates the scheduler's connector of an engine (`connector_rig.MakeConnector`)."""
    from connector_rig import Server
    from engine_config import kv_cache

    from kvtier.client.engines.vllm import KVTierConnector, connector
    from kvtier.client.engines.vllm.compat import KVConnectorRole

    made: list[KVTierConnector] = []
    monkeypatch.setattr(connector, "Client", Server)

    def make(config: Any, cache: Any = None) -> KVTierConnector:
        made.append(KVTierConnector(config, KVConnectorRole.SCHEDULER, cache or kv_cache()))
        return made[-1]

    yield make
    for each in made:
        each.shutdown()
