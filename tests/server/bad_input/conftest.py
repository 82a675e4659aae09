"""Fixtures: the server that receives bad input, and the checks that follow every case."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import grpc
import pytest
from harness.misbehaving import GROWTH_BYTES, KEYS, NAMESPACE, PART, TWO_RANKS, World
from harness.payloads import assert_serves, payload
from harness.raw import RawSession
from harness.server_process import ServerProcess

from kvtier.client import Client
from kvtier.client.results import DurableStatus


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with (
        ServerProcess(tmp_path_factory.mktemp("bad")) as server,
        Client(server.start().endpoint, namespace=NAMESPACE, name="bystander") as bystander,
        RawSession(server.endpoint, NAMESPACE, engine_id="mine") as mine,
        RawSession(server.endpoint, NAMESPACE, engine_id="theirs") as theirs,
        RawSession(server.endpoint, TWO_RANKS, engine_id="headless") as headless,
    ):
        bystander.store(KEYS, [payload(key, PART) for key in KEYS])
        assert set(bystander.flush(KEYS)) == {DurableStatus.DURABLE}
        assert_serves(bystander, KEYS)
        yield World(server, bystander, mine, theirs, headless, server.own_bytes())
        # The same holds after all cases, and after a restart.
        server.restart()
        with Client(server.endpoint, namespace=NAMESPACE) as client:
            assert_serves(client, KEYS)


@pytest.fixture
def world(shared: World) -> Iterator[World]:
    """Yields the shared server.

    Then checks that it serves the bystander's blocks and pins nothing.
    """
    yield shared
    while shared.held:
        # the case may have ended it; what is left is counted below
        with contextlib.suppress(grpc.RpcError):
            shared.held.pop()()
    assert shared.server.alive, shared.server.log[-3000:]
    assert_serves(shared.bystander, KEYS)
    status = shared.server.wait_for(
        lambda status: not (status.leases or status.stores or status.holds or status.quarantined_bytes), 20
    )
    assert all(tier.healthy for tier in status.tiers)
    assert {session.engine_id for session in status.sessions} >= {"mine", "theirs", "headless"}
    assert shared.server.own_bytes() < shared.own_bytes + GROWTH_BYTES
    assert '"call failed"' not in shared.server.log, "a defect, answered with INTERNAL"
