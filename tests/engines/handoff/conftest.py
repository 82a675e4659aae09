"""One deployment for all tests of this folder, because starting engines is slow."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from scenario import RunEngine
from tiny_models import make_dense, make_tokenizer

sys.path.insert(0, str(Path(__file__).resolve().parent))

from conversations import Truth
from deployment import Deployment
from talk import Talk


@pytest.fixture(scope="package")
def truth(run_engine: RunEngine) -> Truth:
    """A plain engine's answers; it has ended when the others start."""
    return Truth(run_engine)


@pytest.fixture(scope="package")
def _deployment(truth: Truth, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    del truth  # its engine has ended by now
    folder = tmp_path_factory.mktemp("handoff")
    make_dense(folder / "model")
    make_tokenizer(folder / "model")
    deployment = Deployment(folder, folder / "model")
    try:
        yield deployment
    finally:
        deployment.end()


@pytest.fixture
def deployment(_deployment: Deployment) -> Deployment:
    """A server, two engines and a proxy, all up and idle."""
    _deployment.heal()
    _deployment.await_decoders()
    return _deployment


@pytest.fixture
def talk(deployment: Deployment, truth: Truth) -> Talk:
    """Sends turns to the deployment and compares the answers."""
    return Talk(deployment, truth)
