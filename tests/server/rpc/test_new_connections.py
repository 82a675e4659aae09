"""Limit of connections without an accepted hello: which of them gives way."""

from __future__ import annotations

import contextlib
from collections import Counter

import pytest

from kvtier.server.rpc.new_connections import NewConnections


class Connections:
    def __init__(self) -> None:
        self.ended: list[str] = []
        self.opened = contextlib.ExitStack()
        self._new = NewConnections(most=6, per_address=4)

    def begin(self, address: str, name: str) -> None:
        self.opened.enter_context(self._new.counting(address, lambda: self.ended.append(name)))

    def counts(self) -> Counter[str]:
        return Counter({address: len(each) for address, each in self._new._by_address.items()})


@pytest.fixture
def connections() -> Connections:
    return Connections()


def test_the_oldest_of_an_address_gives_way_at_its_limit(connections: Connections) -> None:
    for name in "abcdef":
        connections.begin("10.0.0.1", name)
    assert connections.ended == ["a", "b"]


def test_the_address_with_most_gives_way_at_the_limit_of_all(connections: Connections) -> None:
    """Two addresses cannot keep a third one out."""
    for name in "abcd":
        connections.begin("10.0.0.1", name)
    for name in "ef":
        connections.begin("10.0.0.2", name)
    for name in "gh":
        connections.begin("10.0.0.3", name)
    assert connections.ended == ["a", "b"]
    assert connections.counts() == {"10.0.0.1": 2, "10.0.0.2": 2, "10.0.0.3": 2}


def test_ended_connections_are_not_counted(connections: Connections) -> None:
    for name in "abcdef":
        connections.begin("10.0.0.1", name)
    connections.opened.close()
    assert connections.counts() == {}
    connections.begin("10.0.0.1", "g")
    assert connections.ended == ["a", "b"]


def test_the_addresses_of_one_ipv6_network_count_together(connections: Connections) -> None:
    """A host that has a /64 cannot keep another one out by connecting from many addresses."""
    connections.begin("10.0.0.1", "honest")
    for number in range(100):
        connections.begin(f"fd00::{number:x}", f"{number}")
    assert "honest" not in connections.ended
    assert connections.counts() == {"10.0.0.1": 1, "fd00::/64": 4}
