"""Share of each address in the TCP connections for gRPC.

gRPC closes a new connection if a listening address has `most` of them, and cannot close an old one
instead. So a peer that holds all of them would keep new clients out. This module finds the sockets
among the descriptors of the process. If an address has more connections than are free for others,
it shuts down the oldest ones that carry no session.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from urllib.parse import unquote

from ...protos.endpoint import network_of
from ..telemetry.logs import get_logger

__all__ = ["GrpcConnections"]

_log = get_logger(__name__)

_SECONDS = 0.5
"""Time between two checks. A client that was refused meanwhile connects again within a second."""
_SHORT_SECONDS = 0.05
"""The same after a check that closed connections, because their peer may open others at once."""
_PART_OF_TIME = 0.1
"""Largest part of the time that checks take. Each takes 10 µs per descriptor."""

Peer = tuple[str, int]
"""Address and port of the other end."""


class GrpcConnections:
    """Closes connections of addresses with too many. `watch` runs on the event loop."""

    def __init__(self, ports: Iterable[int], most: int, peers_with_sessions: Callable[[], Iterable[str]]) -> None:
        """`most`: limit of the connections of each port.

        The callback returns peers as gRPC names them, and runs on the event loop.
        """
        self._ports = frozenset(ports)
        self._most = most
        self._peers_with_sessions = peers_with_sessions
        self._known: dict[int, dict[Peer, None]] = {}
        """Connections of each port at the last check, the oldest first."""

    async def watch(self) -> None:
        """Checks the connections, until the task is cancelled."""
        seconds = _SECONDS
        while self._ports:
            await asyncio.sleep(seconds)
            seconds = _SECONDS
            # Fewer descriptors than half of the limit: no address can have too many connections.
            if len(_descriptors()) <= self._most // 2:
                self._known.clear()
                continue
            began = time.monotonic()
            with_sessions = {_peer_of(name) for name in self._peers_with_sessions()}
            closed = await asyncio.to_thread(self.check, with_sessions)
            if closed:
                seconds = max(_SHORT_SECONDS, (time.monotonic() - began) / _PART_OF_TIME)
            for network, count in closed.items():
                _log.warning("connections closed: an address has too many", address=network, connections=count)

    def check(self, with_sessions: set[Peer]) -> Counter[str]:
        """Shuts down the excess connections; returns their number by address."""
        found: dict[int, dict[Peer, socket.socket]] = {}
        closed: Counter[str] = Counter()
        with contextlib.ExitStack() as opened:
            for port, peer, sock in _tcp_sockets(self._ports):
                opened.enter_context(sock)
                found.setdefault(port, {})[peer] = sock
            for port, sockets in found.items():
                before = self._known.get(port, {})
                known = [
                    *(peer for peer in before if peer in sockets),
                    *(peer for peer in sockets if peer not in before),
                ]
                for peer in _excess(known, with_sessions, self._most):
                    with contextlib.suppress(OSError):
                        sockets[peer].shutdown(socket.SHUT_RDWR)
                    known.remove(peer)
                    closed[network_of(peer[0])] += 1
                self._known[port] = dict.fromkeys(known)
        return closed


def _excess(peers: Iterable[Peer], with_sessions: set[Peer], most: int) -> list[Peer]:
    """Returns the connections to close. Each address may have as many as are then free."""
    by_network: dict[str, list[Peer]] = {}
    free = most
    for peer in peers:
        by_network.setdefault(network_of(peer[0]), []).append(peer)
        free -= 1
    excess = []
    for own in sorted(by_network.values(), key=len, reverse=True):
        closable = [peer for peer in own if peer not in with_sessions]
        count = len(own)
        for peer in closable:
            if count <= free:
                break
            excess.append(peer)
            count, free = count - 1, free + 1
    return excess


def _tcp_sockets(ports: frozenset[int]) -> Iterator[tuple[int, Peer, socket.socket]]:
    """Yields port, peer and a duplicate of each connected TCP socket of these local ports."""
    for descriptor in _descriptors():
        try:
            sock = socket.socket(fileno=os.dup(descriptor))
        except OSError:  # closed meanwhile, or no socket
            continue
        try:
            if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM:
                port, (host, remote, *_) = sock.getsockname()[1], sock.getpeername()
                if port in ports:
                    yield port, (_address(host), remote), sock
                    continue
        except OSError:  # not connected
            pass
        sock.close()


def _descriptors() -> list[int]:
    with os.scandir("/proc/self/fd") as entries:
        return [int(entry.name) for entry in entries]


def _peer_of(name: str) -> Peer:
    """Returns the peer that gRPC calls "ipv4:127.0.0.1:1" or "ipv6:%5B::1%5D:1"."""
    host, _, port = unquote(name).partition(":")[2].rpartition(":")
    return _address(host.strip("[]")), int(port) if port.isdecimal() else 0


def _address(host: str) -> str:
    """Returns an address without a prefix of IPv4 in IPv6, and without a zone."""
    return host.partition("%")[0].removeprefix("::ffff:")
