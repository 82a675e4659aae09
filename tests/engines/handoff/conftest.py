"""One deployment for all tests of this folder, because starting engines is slow."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from scenario import RunEngine
from tiny_models import make_dense, make_tokenizer

sys.path.insert(0, str(Path(__file__).resolve().parent))

from conversation_client import ConversationClient
from conversations import ExpectedAnswers
from deployment import Deployment


@pytest.fixture(scope="package")
def reference(run_engine: RunEngine) -> ExpectedAnswers:
    """A plain engine's answers; it has ended when the others start."""
    return ExpectedAnswers(run_engine)


@pytest.fixture(scope="package")
def _deployment(reference: ExpectedAnswers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    del reference  # its engine has ended by now
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
    _deployment.restart_stopped()
    _deployment.wait_for_decodes()
    return _deployment


@pytest.fixture
def talk(deployment: Deployment, reference: ExpectedAnswers) -> ConversationClient:
    """Sends turns to the deployment and compares the answers."""
    return ConversationClient(deployment, reference)
