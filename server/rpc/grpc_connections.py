"""Limits of the TCP connections for gRPC: a share of each address, and the memory of all.

gRPC closes a new connection if a listening address has `most` of them, and cannot close an old one
instead. So a peer that holds all of them would keep new clients out. This module finds the sockets
among the descriptors of the process. If an address has more connections than are free for others,
it shuts down the oldest ones that carry no session.

Until a client confirms the server's settings, gRPC (1.85) accepts a block of headers of 16 MiB. A
header that takes one byte on the wire takes 500 bytes of memory: 20 MB on 64 connections took 3.8
GiB within five seconds, without credentials. So a thread watches the memory of the process. If it
grows fast, the thread shuts down connections that carry no session. Tenants also make the memory
grow, by leases and running calls. This must not end the connections of others, so only bytes count
that a connection has sent since the growth began.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from urllib.parse import unquote

from ...cuda.host.memory import own_bytes
from ...protos.endpoint import network_of
from ..telemetry.logs import get_logger

__all__ = ["GrowthAlarm", "GrpcConnections"]

_log = get_logger(__name__)

_SECONDS = 0.5
"""Time between two checks. A client that was refused meanwhile connects again within a second."""
_SHORT_SECONDS = 0.05
"""The same after a check that closed connections, because their peer may open others at once."""
_PART_OF_TIME = 0.1
"""Largest part of the time that checks take. Each takes 10 µs per descriptor."""
_ALARM_BYTES = 256 << 20
"""Growth of the memory, within `_ALARM_SECONDS`, at which large connections are closed. At twice
this growth, all connections without a session are closed."""
_ALARM_SECONDS = 60.0
"""The trimmer of the heap returns freed memory within 15 s."""
_ALARM_CHECK_SECONDS = 0.05
"""Time between two checks of the memory, which take 20 µs each."""
_STEP_BYTES = 16 << 20
"""The memory changes by less than this in normal use. Such a change does not begin a growth."""
_SNAPSHOT_SECONDS = 5.0
"""Time between two snapshots of what each connection has sent."""
_PART_OF_SNAPSHOTS = 0.01
"""Largest part of the time that snapshots take."""
_LARGE_BYTES = 8 << 10
"""A client sends less until its session is open: a TLS handshake with a certificate takes 3 KiB."""
_BYTES_PER_BYTE = 512
"""Most memory that a received byte takes: 200 to 300 bytes were measured, 500 for one header."""
_SUSPICION_SECONDS = 20.0
"""The memory of closed connections is free again after 15 s."""
_RECEIVED = struct.Struct("<128xQ")
"""`tcpi_bytes_received` of `struct tcp_info`."""

Peer = tuple[str, int]
"""Address and port of the other end."""


class GrpcConnections:
    """Closes connections of addresses with too many. `watch` runs on the event loop."""

    def __init__(self, ports: Iterable[int], most: int, peers_with_sessions: Callable[[], Iterable[str]]) -> None:
        """`most`: limit of the connections of each port.

        The callback returns peers as gRPC names them. It may run on another thread.
        """
        self._ports = frozenset(ports)
        self._most = most
        self._peers_with_sessions = peers_with_sessions
        self._known: dict[int, dict[Peer, None]] = {}
        """Connections of each port at the last check, the oldest first."""
        self._suspicion_ends = float("-inf")
        """Time until which a growth of the memory is attributed to connections."""
        self._snapshots: deque[tuple[float, dict[int, int]]] = deque()
        """Times of the last minute, and what each socket had received, by its inode."""

    def start_alarm(self) -> Callable[[], None]:
        """Starts the thread that watches the memory; returns a function that ends it.

        Not a task: gRPC passes the headers of a call to Python on the event loop, which can take
        seconds for those of an attack.
        """
        ended = threading.Event()
        if self._ports:
            threading.Thread(target=self._watch_memory, args=(ended,), name="kvtier-memory", daemon=True).start()
        return ended.set

    def _watch_memory(self, ended: threading.Event) -> None:
        alarm, snapshot_at = GrowthAlarm(), float("-inf")
        while not ended.wait(_ALARM_CHECK_SECONDS):
            now = time.monotonic()
            with contextlib.suppress(OSError):  # no descriptor is free
                if now >= snapshot_at:
                    self.remember_received(now)
                    snapshot_at = now + max(_SNAPSHOT_SECONDS, (time.monotonic() - now) / _PART_OF_SNAPSHOTS)
                used = own_bytes()
                growth = alarm.check(now, used) if used else 0  # 0: it could not be read
                for network, count in self.close_large(growth, alarm.began_at).items() if growth else ():
                    _log.warning("connections closed: the memory grows fast", address=network, connections=count)

    def remember_received(self, now: float) -> None:
        """Takes a snapshot of what each connection sent. Runs on the thread of `close_large`."""
        received = {}
        for _, _, sock in _tcp_sockets(self._ports):
            with sock, contextlib.suppress(OSError):
                received[_inode_of(sock)] = _received_bytes(sock)
        self._snapshots.append((now, received))
        while len(self._snapshots) > 1 and self._snapshots[1][0] <= now - _ALARM_SECONDS:
            self._snapshots.popleft()

    def close_large(self, growth: int, began_at: float) -> Counter[str]:
        """Shuts down large connections without a session, because the memory has grown.

        Counts what each one has sent since the last snapshot before the growth began. Closes none
        if all of them together cannot take so much memory, and have not done so in the last
        seconds. Returns their number by address. Runs on any thread.
        """
        with_sessions = {_peer_of(name) for name in self._peers_with_sessions()}
        before = next((known for at, known in reversed(self._snapshots) if at <= began_at), {})
        received: dict[int, int] = {}
        for _, peer, sock in _tcp_sockets(self._ports):
            with sock, contextlib.suppress(OSError):
                if peer not in with_sessions:
                    inode = _inode_of(sock)
                    received[inode] = _received_bytes(sock) - before.get(inode, 0)
        closed: Counter[str] = Counter()
        if sum(received.values()) * _BYTES_PER_BYTE >= growth:
            self._suspicion_ends = time.monotonic() + _SUSPICION_SECONDS
        elif time.monotonic() >= self._suspicion_ends:
            return closed
        least = _LARGE_BYTES if growth < 2 * _ALARM_BYTES else 1
        for _, peer, sock in _tcp_sockets(self._ports):
            with sock, contextlib.suppress(OSError):
                if received.get(_inode_of(sock), 0) >= least:
                    sock.shutdown(socket.SHUT_RDWR)
                    closed[network_of(peer[0])] += 1
        return closed

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


class GrowthAlarm:
    """Compares the memory with the least of the last minute, in steps of `_STEP_BYTES`."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque()
        """Time and memory, each smaller than the next one: the first is the least of the window."""

    @property
    def began_at(self) -> float:
        """Time of the last check before the memory began to grow."""
        return self._samples[0][0]

    def check(self, now: float, memory_bytes: int) -> int:
        """Returns by how many bytes the memory has grown; 0 if that is no reason for an alarm."""
        while self._samples and self._samples[-1][1] // _STEP_BYTES >= memory_bytes // _STEP_BYTES:
            self._samples.pop()
        self._samples.append((now, memory_bytes))
        while self._samples[0][0] < now - _ALARM_SECONDS:
            self._samples.popleft()
        growth = memory_bytes - self._samples[0][1]
        return growth if growth >= _ALARM_BYTES else 0


def _inode_of(sock: socket.socket) -> int:
    """Returns what identifies a socket as long as it is open. A peer can use its port again."""
    return os.fstat(sock.fileno()).st_ino


def _received_bytes(sock: socket.socket) -> int:
    """Returns how much a TCP connection has received; 0 if the kernel does not tell."""
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RECEIVED.size)
    return int(_RECEIVED.unpack(info)[0]) if len(info) == _RECEIVED.size else 0


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
            duplicate = os.dup(descriptor)
        except OSError:  # closed meanwhile
            continue
        try:
            sock = socket.socket(fileno=duplicate)
        except OSError:  # no socket
            os.close(duplicate)
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
