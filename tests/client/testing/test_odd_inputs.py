"""Odd inputs give the same outcome on the fake server and on a real one, over each transport."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from contracts.odd_inputs import NAMESPACE, odd_calls, outcome_of
from harness.bulk import wait_for_bulk
from harness.server_process import MIB, ServerProcess

from kvtier.client import Client
from kvtier.client.testing import FakeServer

DEFECTS = frozenset({"INTERNAL", "ServerError", "SessionLost", "NotConnected", "DeadlineExceeded"})


@contextmanager
def client_of(way: str, directory: Path) -> Iterator[Client]:
    if way == "fake":
        with FakeServer().client(NAMESPACE) as client:
            yield client
        return
    with ServerProcess(directory, region=64 * MIB, tcp=True).start() as server:
        endpoint = server.tcp if way == "tcp" else server.endpoint
        with Client(endpoint, namespace=replace(NAMESPACE, layout=way), transport=way) as client:  # type: ignore[arg-type]
            client.wait_until_connected()
            if way == "tcp":
                wait_for_bulk(client)
            yield client


@pytest.fixture(scope="module")
def of_fake(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    with client_of("fake", tmp_path_factory.mktemp("fake")) as client:
        return {name: outcome_of(call, client) for name, call in odd_calls()}


@pytest.mark.parametrize("way", ["shm", "grpc", "tcp"])
def test_both_servers_agree(way: str, of_fake: dict[str, Any], tmp_path: Path) -> None:
    with client_of(way, tmp_path) as client:
        assert {name: outcome_of(call, client) for name, call in odd_calls()} == of_fake


def test_there_are_many_and_none_shows_a_defect(of_fake: dict[str, Any]) -> None:
    """An exception that is not a `KVTierError` fails in the fixture."""
    assert len(of_fake) > 500
    assert not [name for name, outcome in of_fake.items() if isinstance(outcome, str) and outcome in DEFECTS]
