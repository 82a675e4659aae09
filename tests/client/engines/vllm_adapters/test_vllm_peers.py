"""Servers to which an engine of vLLM connects."""

from __future__ import annotations

from typing import cast

import pytest
from connector_fakes import FakeClient

from kvtier.client import Client, Unavailable
from kvtier.client.engines.vllm.peers import OWN, Peers
from kvtier.client.handoff import RemoteRequest

PEERS = Peers(cast("Client", None), [("10.0.0.1", 7000)], ["10.0.0.2:7000"])


@pytest.mark.parametrize(
    ("host", "port", "endpoint"),
    [
        ("10.0.0.1", 7000, OWN),
        ("unix:/another/path", 0, OWN),
        ("10.0.0.2", 7000, "10.0.0.2:7000"),
        ("10.0.0.2", 7001, None),
        ("10.0.0.3", 7000, None),
        ("", 0, None),
    ],
)
def test_only_servers_in_the_settings_are_peers(host: str, port: int, endpoint: str | None) -> None:
    """A request can name any server. The engine connects only to its own server and to `peers`."""
    assert PEERS.endpoint_of(RemoteRequest("engine", "request", host, port)) == endpoint


def test_a_worker_without_connections_reads_only_from_its_own_server() -> None:
    with pytest.raises(Unavailable, match="reads only from its own server"):
        PEERS.client("10.0.0.2:7000")


def test_each_peer_is_connected_once_until_it_is_closed() -> None:
    """A reset closes the clients of old weights; later pulls use others. The own client stays."""
    made: list[FakeClient] = []

    def connect(_: str) -> FakeClient:
        made.append(FakeClient())
        return made[-1]

    own = FakeClient()
    peers = Peers(own, [], ["10.0.0.2:7000"], connect)  # type: ignore[arg-type]
    assert peers.client(OWN) is own
    first = peers.client("10.0.0.2:7000")
    assert peers.client("10.0.0.2:7000") is first
    peers.close()
    assert (own.connected, first.connected) == (True, False)
    assert peers.client("10.0.0.2:7000") is made[1] is not first
    assert peers.client(OWN) is own
    assert len(made) == 2
