"""Places for connections of streams: which connection gives way."""

from __future__ import annotations

import contextlib

import pytest

from kvtier.server.bulk import connection_places
from kvtier.server.bulk.connection_places import ConnectionPlaces, Place
from kvtier.server.refused import Refused


class Connections:
    """Connections that record their end."""

    def __init__(self) -> None:
        self.places = ConnectionPlaces()
        self.ended: list[str] = []
        self._idling = contextlib.ExitStack()

    def take(self, tenant: str, name: str) -> Place:
        return self.places.take(tenant, lambda: self.ended.append(name))

    def idle(self, tenant: str, name: str) -> None:
        self._idling.enter_context(self.places.idling(self.take(tenant, name)))


@pytest.fixture
def connections(monkeypatch: pytest.MonkeyPatch) -> Connections:
    """Four places."""
    monkeypatch.setattr(connection_places, "_MAX_CONNECTIONS", 4)
    return Connections()


def test_the_longest_idle_connection_of_the_tenant_with_most_gives_way(connections: Connections) -> None:
    connections.idle("zeta", "oldest")
    connections.take("acme", "busy")
    connections.idle("acme", "first")
    connections.idle("acme", "second")
    connections.take("zeta", "new")
    assert connections.ended == ["first"]


def test_streams_of_a_tenant_give_way_until_the_shares_are_equal(connections: Connections) -> None:
    """The oldest stream first. A further connection of the other tenant is refused."""
    for name in "abcd":
        connections.take("acme", name)
    connections.take("zeta", "e")
    connections.take("zeta", "f")
    assert connections.ended == ["a", "b"]
    for tenant in ("zeta", "acme"):
        with pytest.raises(Refused, match="in use"):
            connections.take(tenant, "more")
    assert connections.ended == ["a", "b"]


def test_a_tenant_with_most_connections_takes_none_of_others(connections: Connections) -> None:
    connections.idle("zeta", "idle")
    for name in "abc":
        connections.take("acme", name)
    with pytest.raises(Refused, match="in use"):
        connections.take("acme", "more")
    connections.take("other", "new")
    assert connections.ended == ["a"]


def test_a_connection_that_gave_way_takes_no_place(connections: Connections) -> None:
    """Its thread may change its state and leave later."""
    with connections.places.idling(first := connections.take("acme", "first")):
        for name in "bcde":
            connections.take("acme", name)
        assert connections.ended == ["first"]
    connections.places.leave(first)
    with pytest.raises(Refused):
        connections.take("acme", "more")
