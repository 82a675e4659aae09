"""The process of `kvtier keeper`: holds descriptors of a server while the server restarts.

It serves one server at a time, because two servers must never write to the same region. A server
is gone when its connection has hung up or its process has ended, also if a fork of the process has
the connection open. Before the next server is admitted, all messages of the one before are read.

This module imports only the standard library, so that the process stays small.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import os
import select
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from .descriptor_messages import (
    FDLIST,
    HELLO,
    LIST_END,
    VERSION,
    Received,
    close_quietly,
    is_name,
    peer_of,
    receive,
    send,
)

__all__ = ["Keeper"]

_SO_PEERPIDFD = 77
"""Option of Linux 6.5; this Python has no name for it."""
_HELLO_SECONDS = 10.0
_MAX_PENDING = 16
_MESSAGES_PER_TURN = 64
_RETRY_SECONDS = 0.05
_OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_GONE = select.POLLHUP | select.POLLERR


@dataclass(slots=True, eq=False)
class _Kept:
    """A descriptor with its name."""

    name: str
    descriptor: int
    until_hangup: bool


@dataclass(slots=True, eq=False)
class _Peer:
    """A connection: of the server, or of a process whose hello has not arrived."""

    connection: socket.socket
    process: str
    deadline: float
    """Time by which the hello must arrive."""
    pidfd: int = -1
    listing: collections.deque[_Kept | None] = field(default_factory=collections.deque)
    """What the answer to FDLIST still has to send; None is its end."""
    is_invalid: bool = False
    """Whether it has sent an invalid message. It then stays the only server until it is gone."""


class Keeper:
    """Event loop of the keeper. It never waits for a server."""

    def __init__(
        self, listener: socket.socket, *, most: int, forget_after_seconds: float, log: Callable[[str], None]
    ) -> None:
        """`most`: maximum number of descriptors. `log` gets one line per event."""
        self._listener = listener
        self._most = most
        self._forget_after_seconds = forget_after_seconds
        self._log = log
        self._kept: dict[int, _Kept] = {}
        """By number of the descriptor in this process."""
        self._pending: dict[int, _Peer] = {}
        self._server: _Peer | None = None
        self._forget_at: float | None = None
        self._retry_at: float | None = None
        self._epoll = select.epoll()

    def run(self, stop: int) -> None:
        """Serves until the descriptor `stop` is readable; then closes everything."""
        for descriptor in (stop, self._listener.fileno()):
            self._epoll.register(descriptor, select.EPOLLIN)
        try:
            while True:
                for descriptor, _ in self._epoll.poll(self._timeout()):
                    if descriptor == stop:
                        return
                    self._on_event(descriptor)
                self._on_time(time.monotonic())
        finally:
            self._close()

    def _timeout(self) -> float | None:
        times = [peer.deadline for peer in self._pending.values()]
        times += [moment for moment in (self._forget_at, self._retry_at) if moment is not None]
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _on_event(self, descriptor: int) -> None:
        """Handles an event. It may concern a closed descriptor whose number is in use again."""
        server = self._server
        if descriptor == self._listener.fileno():
            self._accept()
        elif descriptor in self._pending:
            self._on_hello(self._pending[descriptor])
        elif server is not None and descriptor in (server.connection.fileno(), server.pidfd):
            self._on_server(server)
        else:
            kept = self._kept.get(descriptor)
            if kept is not None and kept.until_hangup and _events_of(descriptor) & _GONE:
                self._drop(kept)

    def _on_time(self, now: float) -> None:
        for peer in [peer for peer in self._pending.values() if peer.deadline <= now]:
            self._refuse(peer, "it has sent no hello")
        if self._retry_at is not None and self._retry_at <= now:
            self._retry_at = None
            if self._server is not None:
                self._send_list(self._server)
        if self._forget_at is not None and self._forget_at <= now:
            count = self._drop_all()
            self._log(f"forgotten: {count} descriptors, because no server has connected")

    # New connections

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            if error.errno in _OUT_OF_DESCRIPTORS:
                time.sleep(_RETRY_SECONDS)  # else the loop would spin
            return
        connection.setblocking(False)
        try:
            pid, uid = peer_of(connection)
        except OSError:
            connection.close()
            return
        peer = _Peer(connection, f"process {pid or '?'}", time.monotonic() + _HELLO_SECONDS)
        self._pending[connection.fileno()] = peer
        self._epoll.register(connection, select.EPOLLIN)
        if uid not in (0, os.geteuid()):
            self._refuse(peer, f"it belongs to user {uid}")
        elif len(self._pending) > _MAX_PENDING:
            self._refuse(next(iter(self._pending.values())), "too many connections without a hello")

    def _on_hello(self, peer: _Peer) -> None:
        try:
            received = receive(peer.connection)
        except BlockingIOError:
            return
        except OSError as error:
            self._refuse(peer, f"its hello cannot be read: {error.strerror}")
            return
        try:
            fields = received.fields() if received.text else {}
        except ValueError:
            fields = {}
        has_descriptors = bool(received.descriptors)
        received.close()
        if has_descriptors or list(fields) != [HELLO]:
            self._refuse(peer, "its first message is not a hello")
        elif fields[HELLO] != VERSION:
            self._refuse(peer, f"the keeper speaks version {VERSION} of the protocol, and the server another one")
        elif self._server is not None and not self._is_gone(self._server):
            self._refuse(peer, f"another server is connected ({self._server.process})")
        else:
            self._admit(peer)

    def _admit(self, peer: _Peer) -> None:
        if self._server is not None:
            self._end(self._server)
        del self._pending[peer.connection.fileno()]
        self._server = peer
        self._forget_at = None
        peer.pidfd = _pidfd_of(peer)
        if peer.pidfd >= 0:
            self._epoll.register(peer.pidfd, select.EPOLLIN)
        with contextlib.suppress(OSError):  # it is gone, as the next event reports
            send(peer.connection, {HELLO: VERSION, "FDSTOREMAX": f"{self._most}", "FDSTORED": f"{len(self._kept)}"})
        self._log(f"server connected ({peer.process}): {len(self._kept)} descriptors are kept")

    def _refuse(self, peer: _Peer, reason: str) -> None:
        del self._pending[peer.connection.fileno()]
        self._epoll.unregister(peer.connection)
        with contextlib.suppress(OSError):
            send(peer.connection, {"REFUSED": reason})
        peer.connection.close()
        self._log(f"refused ({peer.process}): {reason}")

    # Messages of the server

    def _on_server(self, server: _Peer) -> None:
        if self._is_gone(server):
            self._end(server)
            return
        for _ in range(_MESSAGES_PER_TURN):
            if not self._read(server):
                break
        self._send_list(server)

    def _is_gone(self, server: _Peer) -> bool:
        return bool(_events_of(server.connection.fileno()) & _GONE or (server.pidfd >= 0 and _events_of(server.pidfd)))

    def _end(self, server: _Peer) -> None:
        """Reads what the server had sent before it was gone, and ends its connection."""
        with contextlib.suppress(OSError):
            server.connection.shutdown(socket.SHUT_RD)  # a fork of the process cannot send any more
        while self._read(server):
            pass
        self._epoll.unregister(server.connection)
        server.connection.close()
        if server.pidfd >= 0:
            self._epoll.unregister(server.pidfd)
            os.close(server.pidfd)
        self._server = self._retry_at = None
        if self._kept:
            self._forget_at = time.monotonic() + self._forget_after_seconds
        self._log(f"server gone ({server.process}): {len(self._kept)} descriptors are kept")

    def _read(self, server: _Peer) -> bool:
        """Handles the next message, if there is one."""
        try:
            received = receive(server.connection)
        except OSError:
            return False
        if not received.text and not received.descriptors and self._is_gone(server):
            return False
        try:
            if not server.is_invalid:
                self._apply(server, received)
        except ValueError as error:
            self._invalidate(server, str(error))
        finally:
            received.close()
        return bool(received.text) or not server.is_invalid

    def _apply(self, server: _Peer, received: Received) -> None:
        """Executes a message; takes its descriptor if the message is valid. Raises `ValueError`."""
        fields = received.fields()
        name = fields.pop("FDNAME", None)
        if name is not None and not is_name(name):
            raise ValueError("an invalid name of a descriptor")
        is_stored = fields.pop("FDSTORE", None) == "1" and name is not None
        if len(received.descriptors) != is_stored:
            raise ValueError(f"{len(received.descriptors)} descriptors in a message")
        if is_stored and name is not None and fields in ({}, {"FDPOLL": "0"}):
            self._keep(_Kept(name, received.descriptors[0], until_hangup=not fields))
            received.descriptors.clear()
        elif not is_stored and name is not None and fields == {"FDSTOREREMOVE": "1"}:
            for kept in [kept for kept in self._kept.values() if kept.name == name]:
                self._drop(kept)
        elif name is None and fields == FDLIST and not server.listing:
            server.listing.extend([*self._kept.values(), None])
        else:
            raise ValueError("an unknown message")

    def _invalidate(self, server: _Peer, reason: str) -> None:
        """Ignores further messages of the server. Its sends fail from now on.

        All descriptors are dropped, because the server believes that the keeper has one more. If it
        is the connection of a client, the next server would give the slots to which the client
        still writes to others. The connection to the server stays open, so that no other one is
        admitted while this one writes to the region.
        """
        server.is_invalid = True
        server.listing.clear()
        count = self._drop_all()
        self._epoll.modify(server.connection, 0)  # only the hang-up
        with contextlib.suppress(OSError):
            server.connection.shutdown(socket.SHUT_RD)
        self._log(f"server ignored ({server.process}), and {count} descriptors are dropped: {reason}")
        while self._read(server):  # closes the descriptors that it had sent
            pass

    def _send_list(self, server: _Peer) -> None:
        """Sends as much of the list as the server's queue takes now."""
        while server.listing and self._retry_at is None:
            kept = server.listing[0]
            try:
                if kept is None:
                    send(server.connection, LIST_END)
                elif self._kept.get(kept.descriptor) is kept:
                    send(server.connection, {"FDSTORE": "1", "FDNAME": kept.name}, kept.descriptor)
            except BlockingIOError:
                break
            except OSError as error:
                if error.errno == errno.ETOOMANYREFS:  # of all processes of the user, in queues
                    self._retry_at = time.monotonic() + _RETRY_SECONDS
                else:  # the server is gone, as the next event reports
                    server.listing.clear()
                break
            server.listing.popleft()
        if not server.is_invalid:
            is_waiting = server.listing and self._retry_at is None
            self._epoll.modify(server.connection, select.EPOLLIN | (select.EPOLLOUT if is_waiting else 0))

    # Descriptors

    def _keep(self, kept: _Kept) -> None:
        """Raises `ValueError` if there are too many."""
        if len(self._kept) >= self._most:
            raise ValueError(f"more than {self._most} descriptors")
        self._kept[kept.descriptor] = kept
        if kept.until_hangup:
            with contextlib.suppress(OSError):  # a file of the disk, which cannot hang up
                self._epoll.register(kept.descriptor, 0)

    def _drop(self, kept: _Kept) -> None:
        del self._kept[kept.descriptor]
        # Without this the epoll would report the file while another process has it open.
        with contextlib.suppress(OSError):
            self._epoll.unregister(kept.descriptor)
        close_quietly(kept.descriptor)

    def _drop_all(self) -> int:
        count = len(self._kept)
        for kept in list(self._kept.values()):
            self._drop(kept)
        self._forget_at = None
        return count

    def _close(self) -> None:
        self._log(f"ends: {self._drop_all()} descriptors are closed")
        for peer in (*self._pending.values(), *filter(None, [self._server])):
            peer.connection.close()
            if peer.pidfd >= 0:
                os.close(peer.pidfd)
        self._pending.clear()
        self._server = None
        self._epoll.close()


def _events_of(descriptor: int) -> int:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return next((events for _, events in poll.poll(0)), 0)


def _pidfd_of(peer: _Peer) -> int:
    """Returns a descriptor that is readable when the process has ended; -1 without one."""
    with contextlib.suppress(OSError):
        return peer.connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    with contextlib.suppress(OSError):
        return os.pidfd_open(peer_of(peer.connection)[0])
    return -1
