"""Sockets of the publisher: PUB for messages, and ROUTER for requests to repeat them.

A thread owns both sockets, so that repeating ten thousand messages does not delay calls. ZeroMQ
drops messages to a subscriber that does not read. The subscriber sees a gap in the sequence, and
can request the missing messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import TYPE_CHECKING, Any

from ..config.events import EventConfig

if TYPE_CHECKING:
    import zmq

__all__ = ["PublisherError", "ZmqSocket"]

_QUEUED = 256
"""Messages that may wait for the thread."""
_SUBSCRIBER_QUEUE = 100_000
"""Messages that ZeroMQ keeps for a slow subscriber: like vLLM's publisher."""
_FULL_SECONDS = 0.005
_REPLAY_QUEUE = 1000
_REPLAY_STEP = 64
"""Messages of a replay that are sent before new messages are looked for."""
_REPLAY_POLL_MS = 5
_SEQUENCE_BYTES = 8
_END = (-1).to_bytes(_SEQUENCE_BYTES, "big", signed=True)
_MAX_REPLAYS = 64


class PublisherError(Exception):
    """The publisher cannot start; the message is for the operator."""


class ZmqSocket:
    """Sends messages in order and numbers them from 0."""

    def __init__(self, config: EventConfig) -> None:
        """Binds the sockets and starts the thread. Raises PublisherError."""
        try:
            import zmq
        except ImportError as error:
            raise PublisherError(
                f"events.publish = {config.publish}: {error}; install pyzmq with: pip install 'kvtier[events]'"
            ) from error
        self._zmq = zmq
        self._context = zmq.Context()
        self._max_bytes = config.buffer
        self._messages: dict[int, tuple[bytes, bytes]] = {}
        """The latest messages by sequence: topic and payload."""
        self._first = self._next = 0
        self._bytes = 0
        self._replays: dict[bytes, int] = {}
        """Sequence of the next message to repeat, per client."""
        try:
            self._inlet = self._socket(zmq.PUSH, _QUEUED)
            self._inlet.bind("inproc://messages")
            self._outlet = self._socket(zmq.PULL, _QUEUED)
            self._outlet.connect("inproc://messages")
            self._publisher = self._bind(zmq.PUB, _SUBSCRIBER_QUEUE, config.publish)
            self._router = self._bind(zmq.ROUTER, _REPLAY_QUEUE, config.replay) if config.replay else None
            if self._router is not None:
                self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._thread = threading.Thread(target=self._run, name="kvtier-publisher", daemon=True)
        self._thread.start()

    async def send(self, topic: bytes, payload: bytes) -> None:
        """Queues a message; waits while too many are queued. Called on the event loop only."""
        while True:
            try:
                self._inlet.send_multipart([topic, payload], self._zmq.NOBLOCK)
            except self._zmq.Again:
                await asyncio.sleep(_FULL_SECONDS)
            else:
                return

    def close(self) -> None:
        """Sends the queued messages and closes the sockets. Blocks for a second at most."""
        with contextlib.suppress(self._zmq.ZMQError):
            self._inlet.setsockopt(self._zmq.SNDTIMEO, 500)
            self._inlet.send_multipart([b""])
        self._thread.join(1.0)
        self._context.destroy(linger=0)

    def _socket(self, kind: int, limit: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.set_hwm(limit)
        return socket

    def _bind(self, kind: int, limit: int, address: str | None) -> zmq.Socket[bytes]:
        socket = self._socket(kind, limit)
        try:
            socket.bind(str(address))
        except self._zmq.ZMQError as error:
            raise PublisherError(f"cannot publish events on {address}: {error}") from error
        return socket

    def _run(self) -> None:
        zmq = self._zmq
        poller = zmq.Poller()
        poller.register(self._outlet, zmq.POLLIN)
        if self._router is not None:
            poller.register(self._router, zmq.POLLIN)
        while True:
            try:
                ready = dict(poller.poll(_REPLAY_POLL_MS if self._replays else None))
                if self._outlet in ready:
                    frames = self._outlet.recv_multipart()
                    if len(frames) < 2:
                        return
                    self._publish(*frames)
                if self._router is not None and self._router in ready:
                    self._take_request(self._router, self._router.recv_multipart())
                if self._router is not None and self._replays:
                    self._repeat(self._router)
            except zmq.ContextTerminated:
                return
            except zmq.ZMQError:
                self._replays.clear()

    def _publish(self, topic: bytes, payload: bytes) -> None:
        number = self._next
        self._next += 1
        self._messages[number] = (topic, payload)
        self._bytes += len(topic) + len(payload)
        while self._bytes > self._max_bytes:
            dropped = self._messages.pop(self._first)
            self._bytes -= sum(map(len, dropped))
            self._first += 1
        self._publisher.send_multipart([topic, number.to_bytes(_SEQUENCE_BYTES, "big"), payload])

    def _take_request(self, router: Any, frames: list[bytes]) -> None:
        """Begins a replay: the frames are client, an empty frame, and the first sequence.

        If there are too many replays, the client gets the end of a replay without messages.
        """
        if len(frames) != 3 or len(frames[2]) != _SEQUENCE_BYTES:
            return
        if frames[0] in self._replays or len(self._replays) < _MAX_REPLAYS:
            self._replays[frames[0]] = int.from_bytes(frames[2], "big")
            return
        with contextlib.suppress(self._zmq.ZMQError):  # the client has gone
            router.send_multipart([frames[0], b"", b"", _END, b""], self._zmq.NOBLOCK)

    def _repeat(self, router: Any) -> None:
        for client, wanted in list(self._replays.items()):
            begin = max(wanted, self._first)
            end = min(begin + _REPLAY_STEP, self._next)
            try:
                for each in range(begin, end):
                    topic, payload = self._messages[each]
                    frames = [client, b"", topic, each.to_bytes(_SEQUENCE_BYTES, "big"), payload]
                    router.send_multipart(frames, self._zmq.NOBLOCK)
                    self._replays[client] = each + 1
                if end >= self._next:
                    router.send_multipart([client, b"", b"", _END, b""], self._zmq.NOBLOCK)
                    del self._replays[client]
            except self._zmq.Again:
                continue  # the client reads slowly: the next step tries again
            except self._zmq.ZMQError:
                del self._replays[client]  # the client has gone
