"""Connections of readers: what each sends, may send, and has not read yet.

A connection never waits for another one. What it has not read stays in the ring that all
connections share, so it holds the message that it is sending, and its subscriptions.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections import Counter
from collections.abc import Sequence
from typing import ClassVar, Protocol

from .recent_messages import END_FRAMES, SEQUENCE_BYTES, RecentMessages
from .zmtp import Frame, Mechanism, Peer, ProtocolError

__all__ = ["ReaderConnection", "ReplayConnection", "Site", "SubscriberConnection"]

_RECEIVED_BYTES = 4096
"""Bytes that are received from a peer per turn of the event loop."""
_BURST_BYTES, _BYTES_PER_SECOND = 64 << 10, 1024
"""What a peer may send at once, and in the long run: a subscription has 10 to 300 bytes."""
_PIECE_BYTES = 64
"""A shorter piece counts as 64 bytes, because each piece takes a turn of the event loop."""
_MAX_ANSWER_BYTES = 4096
_TURN_MESSAGES = 32
"""Messages that a connection sends before others send theirs."""
_TURN_SCANNED = 256
"""Messages of other topics that are passed over per turn: at most 15 ms with 256 subscriptions."""
_SUBSCRIPTION_BYTES = 64
"""Memory of a subscription beside its prefix."""
_MAX_SUBSCRIPTION_BYTES = 16 << 10
_HANDSHAKE_SECONDS = 5.0
_STALLED_SECONDS = 30.0


class Site(Protocol):
    """What a connection needs of its server."""

    def admit(self, connection: ReaderConnection) -> bool:
        """Counts a connection as a reader, when it first asks for something."""
        ...

    def closed(self, connection: ReaderConnection, reason: str) -> None:
        """`reason`: why the connection was closed from this end; empty if the peer has gone."""


class ReaderConnection:
    """One peer. All calls must come from the event loop."""

    socket_type: ClassVar[bytes]
    _peer_types: ClassVar[Sequence[bytes]]

    def __init__(self, site: Site, sock: socket.socket, address: str, messages: RecentMessages) -> None:
        self.address = address
        self.messages = messages
        """What the peer may read."""
        self.is_reader = False
        """Whether the peer has subscribed or requested something."""
        self.is_open = True
        self.key = b""
        """Public key of the peer, if it has authenticated itself."""
        self.accepted_at = self.active_at = time.monotonic()
        """When the connection was accepted, and when it last made progress."""
        self._site = site
        self._socket = sock
        self._loop = asyncio.get_running_loop()
        self._credit = float(_BURST_BYTES)
        self._credit_at = self.active_at
        self._sending = memoryview(b"")
        self.waits_for_room = False
        """Whether the peer must read before more can be sent."""

    def start(self, mechanism: Mechanism) -> None:
        self._mechanism = mechanism
        self._peer = Peer(mechanism, self._peer_types)
        self._peer.outgoing += Peer.greeting(mechanism.name, is_server=True)
        self._loop.add_reader(self._socket, self._receive)
        self.flush()

    @property
    def may_be_replaced(self) -> bool:
        """Whether another reader may have the place of this one. ZeroMQ's clients connect again."""
        return False

    @property
    def is_idle(self) -> bool:
        """Whether the peer has got all that it asked for."""
        return not self.waits_for_room and not self._has_more()

    def is_overdue(self, now: float) -> bool:
        """Whether the handshake takes too long, or the peer does not read."""
        if not self._peer.is_ready:
            return now - self.accepted_at > _HANDSHAKE_SECONDS
        return self.waits_for_room and now - self.active_at > _STALLED_SECONDS

    def flush(self) -> None:
        """Sends what there is, until the peer has no room or it is the turn of others."""
        for _ in range(_TURN_MESSAGES):
            if not self.is_open:
                return
            if not self._sending and not self._load_next():
                break
            try:
                sent = self._socket.send(self._sending)
            except BlockingIOError:
                break
            except OSError:
                self.close()
                return
            self.active_at = time.monotonic()
            self._sending = self._sending[sent:]
        self._wait_for_room(needed=bool(self._sending) or bool(self._peer.outgoing) or self._has_more())

    def close(self, reason: str = "") -> None:
        if not self.is_open:
            return
        self.is_open = False
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        self._socket.close()
        self._sending = memoryview(b"")
        self._site.closed(self, reason)

    def _wait_for_room(self, *, needed: bool) -> None:
        if needed and not self.waits_for_room:
            self._loop.add_writer(self._socket, self.flush)
            self.active_at = time.monotonic()
        elif not needed and self.waits_for_room:
            self._loop.remove_writer(self._socket)
        self.waits_for_room = needed

    def _load_next(self) -> bool:
        """Begins to send the next answer or message; returns whether there is one."""
        if self._peer.outgoing:
            data = bytes(self._peer.outgoing)
            self._peer.outgoing.clear()
        else:
            data = self._next_message()
        self._sending = memoryview(data)
        return bool(data)

    def _receive(self) -> None:
        try:
            data = self._socket.recv(_RECEIVED_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        try:
            if not data:
                self.close()
                return
            self._charge(max(len(data), _PIECE_BYTES))
            for message in self._peer.receive(data):
                self._take(message)
            self._check_answers()
        except ProtocolError as error:
            self.close(f"{error}")
            return
        self.flush()

    def _charge(self, nbytes: int) -> None:
        now = time.monotonic()
        self._credit = min(_BURST_BYTES, self._credit + _BYTES_PER_SECOND * (now - self._credit_at)) - nbytes
        self._credit_at = now
        if self._credit < 0:
            raise ProtocolError("the peer sends too much")

    def _check_answers(self) -> None:
        if len(self._peer.outgoing) > _MAX_ANSWER_BYTES:
            raise ProtocolError("the peer does not read")

    def _become_reader(self) -> None:
        if not self.is_reader and not self._site.admit(self):
            raise ProtocolError("there are too many readers")
        self.is_reader = True

    def _has_more(self) -> bool:
        raise NotImplementedError

    def _next_message(self) -> bytes:
        raise NotImplementedError

    def _take(self, message: list[bytes]) -> None:
        raise NotImplementedError


class SubscriberConnection(ReaderConnection):
    """Peer of the address `publish`: gets new messages of the topics to which it has subscribed."""

    socket_type = b"PUB"
    _peer_types = (b"SUB", b"XSUB")

    def __init__(self, site: Site, sock: socket.socket, address: str, messages: RecentMessages) -> None:
        super().__init__(site, sock, address, messages)
        self._subscriptions: Counter[bytes] = Counter()
        self._subscription_bytes = 0
        self._next = 0

    def _has_more(self) -> bool:
        return bool(self._subscriptions) and self._next < self.messages.end

    def _next_message(self) -> bytes:
        messages = self.messages
        self._next = max(self._next, messages.first)  # the peer sees a gap
        for _ in range(min(_TURN_SCANNED, messages.end - self._next) if self._subscriptions else 0):
            number, message = self._next, messages[self._next]
            self._next += 1
            if any(map(message.topic.startswith, self._subscriptions)):
                return self._peer.seal(message.frames(number))
        return b""

    def _take(self, message: list[bytes]) -> None:
        if len(message) != 1 or message[0][:1] not in (b"\x00", b"\x01"):
            raise ProtocolError("not a subscription")
        prefix = message[0][1:]
        if message[0][0]:
            self._become_reader()
            if not self._subscriptions:
                self._next = self.messages.end
            self._count(prefix, 1)
        elif self._subscriptions[prefix]:
            self._count(prefix, -1)

    def _count(self, prefix: bytes, number: int) -> None:
        was = self._subscriptions[prefix]
        self._subscriptions[prefix] = was + number
        if not was or not self._subscriptions[prefix]:
            self._subscription_bytes += number * (_SUBSCRIPTION_BYTES + len(prefix))
        if not self._subscriptions[prefix]:
            del self._subscriptions[prefix]
        if self._subscription_bytes > _MAX_SUBSCRIPTION_BYTES:
            raise ProtocolError("the peer has too many subscriptions")


class ReplayConnection(ReaderConnection):
    """Peer of the address `replay`: gets the kept messages from a number on, then the end."""

    socket_type = b"ROUTER"
    _peer_types = (b"DEALER", b"REQ")

    def __init__(self, site: Site, sock: socket.socket, address: str, messages: RecentMessages) -> None:
        super().__init__(site, sock, address, messages)
        self._next: int | None = None
        """Number of the next message; None if nothing was requested."""

    @property
    def may_be_replaced(self) -> bool:
        return self.is_idle

    def _has_more(self) -> bool:
        return self._next is not None

    def _next_message(self) -> bytes:
        if self._next is None:
            return b""
        messages = self.messages
        self._next = max(self._next, messages.first)
        if self._next >= messages.end:
            self._next = None
            return self._peer.seal(END_FRAMES)
        frames = messages[self._next].frames(self._next)
        self._next += 1
        return self._peer.seal((Frame(b"", True), *frames))

    def _take(self, message: list[bytes]) -> None:
        """Begins a replay: the frames are an empty one and the first sequence."""
        self._become_reader()
        if len(message) == 2 and len(message[1]) == SEQUENCE_BYTES:
            self._next = int.from_bytes(message[1], "big")
