"""The server that bad input is sent to, and what must hold whatever was sent."""

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
    """One server for the whole table."""
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
        # All of it still holds after the table as a whole, and in another life.
        server.restart()
        with Client(server.endpoint, namespace=NAMESPACE) as client:
            assert_serves(client, KEYS)


@pytest.fixture
def world(shared: World) -> Iterator[World]:
    """The shared server; whatever a case did, the bystander's blocks are served and nothing is left pinned."""
    yield shared
    while shared.held:
        with contextlib.suppress(grpc.RpcError):  # the case has ended it itself; what remains is counted below
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
