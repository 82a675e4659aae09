"""Share of each address in the TCP connections for gRPC."""

from __future__ import annotations

import os
import select
import socket
from collections import Counter
from pathlib import Path

import pytest

from kvtier.server.rpc.grpc_connections import GrowthAlarm, GrpcConnections, Peer, _excess, _peer_of

MIB = 1 << 20


def peers(host: str, count: int) -> list[Peer]:
    return [(host, port) for port in range(1, count + 1)]


@pytest.mark.parametrize(
    ("found", "kept"),
    [
        ({"1.1.1.1": 50}, {"1.1.1.1": 50}),
        ({"1.1.1.1": 100}, {"1.1.1.1": 50}),
        ({"1.1.1.1": 50, "2.2.2.2": 50}, {"1.1.1.1": 25, "2.2.2.2": 37}),
        ({"1.1.1.1": 97, "2.2.2.2": 3}, {"1.1.1.1": 48, "2.2.2.2": 3}),
        # The hosts of one /64 network are one address.
        ({"2001:db8::1": 40, "2001:db8::2": 40}, {"2001:db8::/64": 50}),
    ],
)
def test_an_address_has_at_most_as_many_as_are_free(found: dict[str, int], kept: dict[str, int]) -> None:
    everyone = [peer for host, count in found.items() for peer in peers(host, count)]
    closed = set(_excess(everyone, set(), 100))
    left = Counter("2001:db8::/64" if ":" in host else host for host, port in everyone if (host, port) not in closed)
    assert {host: abs(left[host] - count) <= 1 for host, count in kept.items()} == dict.fromkeys(kept, True)


def test_the_oldest_connections_without_a_session_are_closed() -> None:
    everyone = peers("1.1.1.1", 10)
    assert _excess(everyone, set(everyone[:3]), 10) == everyone[3:8]
    assert _excess(everyone, set(everyone), 10) == []


def test_names_of_peers_are_those_of_sockets() -> None:
    assert _peer_of("ipv4:127.0.0.1:5") == _peer_of("ipv6:%5B::ffff:127.0.0.1%5D:5") == ("127.0.0.1", 5)
    assert _peer_of("ipv6:%5Bfe80::1%25eth0%5D:7") == ("fe80::1", 7)
    assert _peer_of("unix:") == ("", 0)


def test_only_connections_of_its_ports_are_closed() -> None:
    """The process has other sockets, such as connections for calls."""
    with socket.create_server(("127.0.0.1", 0)) as ours, socket.create_server(("127.0.0.1", 0)) as other:
        clients = [socket.create_connection(each.getsockname()) for each in (ours, other) for _ in range(4)]
        accepted = [each.accept()[0] for each in (ours, other) for _ in range(4)]
        connections = GrpcConnections([ours.getsockname()[1]], 4, list)
        assert connections.check(set()) == {"127.0.0.1": 2}
        for connection in accepted:
            connection.settimeout(0.0)
        closed = []
        for connection in accepted:
            try:
                closed.append(connection.recv(1) == b"")
            except BlockingIOError:
                closed.append(False)
        assert (sum(closed[:4]), sum(closed[4:])) == (2, 0)
        for connection in (*clients, *accepted):
            connection.close()


def test_a_check_keeps_no_descriptors(tmp_path: Path) -> None:
    """Before, each check kept a duplicate of each descriptor that is not a socket."""
    with socket.create_server(("127.0.0.1", 0)) as ours, (tmp_path / "file").open("w"):
        connections = GrpcConnections([ours.getsockname()[1]], 4, list)
        before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
        connections.check(set())
        connections.remember_received(0.0)
        connections.close_large(0, 0.0)
        assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


def test_large_connections_without_a_session_are_closed() -> None:
    """The memory grows fast. A connection with a session stays, and one that has sent little."""
    with socket.create_server(("127.0.0.1", 0)) as ours:
        sizes = (9000, 600_000, 100)
        clients = [socket.create_connection(ours.getsockname()) for _ in sizes]
        accepted = [ours.accept()[0] for _ in clients]
        host, port = clients[0].getsockname()
        connections = GrpcConnections([ours.getsockname()[1]], 4, lambda: [f"ipv4:{host}:{port}"])
        for client, connection, size in zip(clients, accepted, sizes, strict=True):
            for sent in (100, *([500] * (size // 500))):
                client.sendall(bytes(sent))
                connection.recv(sent, socket.MSG_WAITALL)

        def closed() -> list[bool]:
            return [bool(select.select([each], [], [], 0)[0]) for each in accepted]

        # Not all of them together can take so much memory: a tenant has used it.
        assert connections.close_large(600 * MIB, 0.0) == {}
        assert closed() == [False] * 3
        assert connections.close_large(280 * MIB, 0.0) == {"127.0.0.1": 1}
        assert closed() == [False, True, False]
        accepted.pop(1).close()
        assert connections.close_large(600 * MIB, 0.0) == {"127.0.0.1": 1}
        assert closed() == [False, True]
        for connection in (*clients, *accepted):
            connection.close()


def test_bytes_from_before_the_growth_are_not_its_cause() -> None:
    """A client without a session has sent much. Later a tenant and a peer make the memory grow."""
    with socket.create_server(("127.0.0.1", 0)) as ours:
        honest = socket.create_connection(ours.getsockname())
        honest_end = ours.accept()[0]
        connections = GrpcConnections([ours.getsockname()[1]], 4, list)

        def send(client: socket.socket, end: socket.socket) -> None:
            for _ in range(1200):
                client.sendall(bytes(500))
                end.recv(500, socket.MSG_WAITALL)

        send(honest, honest_end)
        connections.remember_received(10.0)
        assert connections.close_large(280 * MIB, 15.0) == {}
        peer = socket.create_connection(ours.getsockname())
        peer_end = ours.accept()[0]
        send(peer, peer_end)
        assert connections.close_large(600 * MIB, 15.0) == {}, "the peer has sent too little for this"
        assert connections.close_large(280 * MIB, 15.0) == {"127.0.0.1": 1}
        peer_end.close()
        assert connections.close_large(600 * MIB, 15.0) == {}, "the other one has sent nothing since"
        send(honest, honest_end)
        connections.remember_received(20.0)
        assert connections.close_large(280 * MIB, 15.0) == {"127.0.0.1": 1}, "it has sent much since"
        for connection in (honest, honest_end, peer, peer_end):
            connection.close()


def test_an_alarm_compares_with_the_least_memory_of_a_minute() -> None:
    alarm = GrowthAlarm()
    figures = [(0, 100), (30, 300), (31, 357), (32, 613), (33, 200), (90, 440), (92, 460), (156, 700), (157, 960)]
    answers = [alarm.check(second, mib * MIB) // MIB for second, mib in figures]
    assert answers == [0, 0, 257, 513, 0, 0, 260, 0, 260]


def test_a_growth_begins_at_the_last_small_change() -> None:
    """Else it would begin a minute ago whenever the memory creeps."""
    alarm = GrowthAlarm()
    for second in range(50):
        assert not alarm.check(second, 100 * MIB + second * 1000)
    assert alarm.check(50.0, 400 * MIB) // MIB == 299
    assert alarm.began_at == 49.0
    assert alarm.check(70.0, 500 * MIB) // MIB == 399
    assert alarm.began_at == 49.0
