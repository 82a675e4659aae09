"""Process of the publisher that serves readers: it speaks ZMTP with them, and keeps the messages.

`python -m kvtier.server.events.readers` with the descriptors of the server and of the listening
sockets runs it. Peers without credentials reach this process only. So what they cost, in
descriptors, memory and processor time, is not the server's, and all of it has limits.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

from ...protos.endpoint import network_of
from ..process.child_main import Channel, connect
from .reader_connection import ReaderConnection, ReplayConnection, SubscriberConnection
from .reader_sockets import SEND_BUFFER_BYTES
from .recent_messages import Message, RecentMessages
from .zmtp import Mechanism, NullMechanism

__all__ = ["ReaderServer", "main"]

_log = logging.getLogger(__name__)

_MAX_NEW: Final = 64
"""Connections that have not asked for anything yet. A further one closes the oldest."""
_ACCEPTED_PER_TURN = 8
_SWEEP_SECONDS = 1.0
_LOG_SECONDS = 10.0
_NO_DESCRIPTORS_SECONDS = 0.1
_END_TURNS, _END_TURN_SECONDS = 50, 0.01
_OTHER_DESCRIPTORS = 32
_OTHER_BYTES = 256 << 20
_READER_BYTES = 2 << 20
"""What a reader may hold: the message that it gets, of at most 1 MiB, and an encrypted copy."""
_NICE = 5


class ReaderServer:
    """All connections, and the messages for them. All calls must come from the event loop."""

    def __init__(
        self, max_bytes: int, max_readers: int, secret: bytes = b"", *, report: Callable[[str], object] = lambda _: None
    ) -> None:
        """`secret`: key with which TCP connections are authenticated; empty: they are not.

        `report` gets at each attempt why a connection is not accepted; an empty text if it is.
        """
        self._report = report
        self._max_bytes = max_bytes
        self._messages: dict[bytes | None, RecentMessages] = {None: RecentMessages(max_bytes)}
        """Messages by tenant, and those of all. So the numbers that a reader sees have no gaps."""
        self._max_readers = max_readers
        self._secret = secret
        self._keys: Mapping[bytes, bytes | None] = {}
        self._new: dict[ReaderConnection, None] = {}
        """In the order of their start."""
        self._readers: dict[type[ReaderConnection], dict[ReaderConnection, None]] = {
            SubscriberConnection: {},
            ReplayConnection: {},
        }
        self._refused = 0
        self._log_at = 0.0

    def listen(self, listener: socket.socket, kind: type[ReaderConnection]) -> None:
        listener.setblocking(False)
        asyncio.get_running_loop().add_reader(listener, self._accept, listener, kind)

    def set_keys(self, keys: Mapping[bytes, bytes | None]) -> None:
        """Sets the public keys of readers and their tenants; closes other connections."""
        self._keys = keys
        scopes = {None, *keys.values()}
        self._messages = {each: self._messages.get(each) or RecentMessages(self._max_bytes) for each in scopes}
        for connection in self._all():
            if connection.key and connection.messages is not self._messages_of(connection.key):
                connection.close("the key is no longer valid")

    def publish(self, scope: bytes, topic: bytes, payload: bytes) -> None:
        message = Message(topic, payload)
        for messages in filter(None, map(self._messages.get, (None, scope))):
            messages.add(message)
        for reader in list(self._readers[SubscriberConnection]):
            if not reader.waits_for_room:
                reader.flush()

    def sweep(self) -> None:
        """Closes connections that wait for too long. Called once per second."""
        now = time.monotonic()
        for connection in self._all():
            if connection.is_overdue(now):
                connection.close("the handshake takes too long, or the peer does not read")

    @property
    def has_unsent(self) -> bool:
        return any(not connection.is_idle for connection in self._all())

    def admit(self, connection: ReaderConnection) -> bool:
        readers = self._readers[type(connection)]
        same = [each for each in readers if each.address == connection.address]
        limit = self._max_readers if not connection.address else max(1, self._max_readers // 2)
        if len(same) >= limit:
            _close_one(same)
        elif len(readers) >= self._max_readers:
            _close_one(list(readers))
        if len(readers) >= self._max_readers or sum(each.is_open for each in same) >= limit:
            return False
        self._new.pop(connection, None)
        readers[connection] = None
        return True

    def closed(self, connection: ReaderConnection, reason: str) -> None:
        self._new.pop(connection, None)
        self._readers[type(connection)].pop(connection, None)
        self._refused += bool(reason)
        if reason and time.monotonic() >= self._log_at:
            self._log_at = time.monotonic() + _LOG_SECONDS
            where = connection.address or "this host"
            _log.warning(
                "connection of a reader of events from %s closed: %s (%d so far)", where, reason, self._refused
            )

    def _all(self) -> list[ReaderConnection]:
        return [*self._new, *(each for readers in self._readers.values() for each in readers)]

    def _accept(self, listener: socket.socket, kind: type[ReaderConnection]) -> None:
        for _ in range(_ACCEPTED_PER_TURN):
            try:
                accepted, where = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:  # such as too many open files
                self._report(f"connections of readers of events are not accepted: {error}")
                loop = asyncio.get_running_loop()
                loop.remove_reader(listener)
                loop.call_later(_NO_DESCRIPTORS_SECONDS, self.listen, listener, kind)
                return
            self._report("")
            accepted.setblocking(False)
            accepted.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
            address = "" if listener.family == socket.AF_UNIX else network_of(where[0])
            connection = kind(self, accepted, address, self._messages[None])
            self._begin(connection, is_tcp=listener.family != socket.AF_UNIX)

    def _begin(self, connection: ReaderConnection, *, is_tcp: bool) -> None:
        if len(self._new) >= _MAX_NEW:
            numbers = Counter(each.address for each in self._new)
            most = max(numbers, key=numbers.__getitem__)
            next(each for each in self._new if each.address == most).close("too many connections at once")
        self._new[connection] = None
        connection.start(self._mechanism(connection, is_tcp=is_tcp))

    def _mechanism(self, connection: ReaderConnection, *, is_tcp: bool) -> Mechanism:
        if not is_tcp or not self._secret:
            return NullMechanism(connection.socket_type)
        from .curve import CurveMechanism

        return CurveMechanism(self._secret, connection.socket_type, partial(self._authenticate, connection))

    def _authenticate(self, connection: ReaderConnection, key: bytes) -> bool:
        messages = self._messages_of(key)
        if messages is None:
            return False
        connection.key, connection.messages = key, messages
        return True

    def _messages_of(self, key: bytes) -> RecentMessages | None:
        return self._messages[self._keys[key]] if key in self._keys else None


def _close_one(connections: list[ReaderConnection]) -> None:
    """Closes the connection that has been idle for the longest time, if it may be closed."""
    idle = [each for each in connections if each.may_be_replaced]
    if idle:
        min(idle, key=lambda each: each.active_at).close("others need its place")


def _limit_resources(max_readers: int, max_bytes: int) -> None:
    descriptors = _OTHER_DESCRIPTORS + _MAX_NEW + 2 * max_readers
    limits = {
        resource.RLIMIT_NOFILE: descriptors,
        resource.RLIMIT_DATA: _OTHER_BYTES + max_bytes + _READER_BYTES * 2 * max_readers,
    }
    for which, most in limits.items():
        _, hard = resource.getrlimit(which)
        if hard != resource.RLIM_INFINITY:
            most = min(most, hard)  # noqa: PLW2901
        resource.setrlimit(which, (most, most))


async def _serve(channel: Channel, listeners: list[tuple[int, type[ReaderConnection]]], setup: dict[str, Any]) -> None:
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    report = partial(channel.slower, "accept")
    server = ReaderServer(setup["buffer"], setup["max_readers"], bytes.fromhex(setup["secret"]), report=report)

    def handle(header: dict[str, Any], body: bytes) -> None:
        if "keys" in header:
            items = header["keys"].items()
            server.set_keys({bytes.fromhex(k): None if v is None else bytes.fromhex(v) for k, v in items})
            return
        server.publish(bytes.fromhex(header["scope"]), body[: header["topic"]], body[header["topic"] :])
        with contextlib.suppress(OSError):
            channel.send({"taken": 1})

    def receive() -> None:
        for header, body in channel:
            loop.call_soon_threadsafe(handle, header, body)
        loop.call_soon_threadsafe(ended.set)

    handle(setup, b"")
    for descriptor, kind in listeners:
        server.listen(socket.socket(fileno=descriptor), kind)
    threading.Thread(target=receive, name="kvtier-messages", daemon=True).start()
    while not ended.is_set():
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(ended.wait(), _SWEEP_SECONDS)
        server.sweep()
    for _ in range(_END_TURNS):
        if server.has_unsent:
            await asyncio.sleep(_END_TURN_SECONDS)


def main(socket_fd: int, publish_fds: Sequence[int], replay_fds: Sequence[int] = ()) -> None:
    """Serves until the server has ended. The descriptors are listening sockets."""
    channel = connect(socket_fd)
    try:
        os.nice(_NICE)
    except OSError as error:  # a sandbox may forbid it
        text = f"readers of events may delay calls, because their process has the server's priority: {error}"
        channel.slower("priority", text)
    setup, _ = next(iter(channel))
    _limit_resources(setup["max_readers"], setup["buffers"] * setup["buffer"])
    listeners: list[tuple[int, type[ReaderConnection]]] = [(fd, SubscriberConnection) for fd in publish_fds]
    listeners += [(fd, ReplayConnection) for fd in replay_fds]
    asyncio.run(_serve(channel, listeners, setup))


if __name__ == "__main__":
    main(int(sys.argv[1]), *([int(fd) for fd in text.split(",")] for text in sys.argv[2:]))
