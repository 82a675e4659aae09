"""Subscription to the events of one kvtier server, with the replay of missed messages."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, NamedTuple

import msgspec
import zmq
import zmq.asyncio

from .block_index import BlockIndex

__all__ = ["Subscription"]

REPLAY_TIMEOUT_S = 10.0
"""Longest time without a message of a replay."""
RETRY_S = 1.0

logger = logging.getLogger(__name__)


class _Message(NamedTuple):
    sequence: int
    topic: bytes
    payload: bytes


class Subscription:
    """Keeps the index of one host up to date.

    While the server cannot be reached, its blocks do not count, because engines cannot load them.
    """

    def __init__(self, publish: str, replay: str | None, index: BlockIndex) -> None:
        """`publish`, `replay`: addresses as in the server's settings `events`."""
        self._publish = publish
        self._replay_address = replay
        self._index = index
        self._last: _Message | None = None
        """The last message that was applied."""
        self._live = -1
        """Sequence of the last live message. A lower one means that the server was restarted."""

    async def run(self) -> None:
        """Follows the events until it is cancelled."""
        while True:
            context = zmq.asyncio.Context()
            try:
                await self._follow(context)
            except Exception:
                logger.exception("the events of %s cannot be read", self._publish)
                self._forget()
            finally:
                context.destroy(linger=0)
            await asyncio.sleep(RETRY_S)

    async def _follow(self, context: zmq.asyncio.Context) -> None:
        socket = context.socket(zmq.SUB)
        socket.setsockopt(zmq.IPV6, 1)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.subscribe(b"")
        monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        socket.connect(self._publish)
        poller = zmq.asyncio.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(monitor, zmq.POLLIN)
        while True:
            ready = dict(await poller.poll())
            if monitor in ready:
                frames = await monitor.recv_multipart()
                if int.from_bytes(frames[0][:2], "little") == zmq.EVENT_DISCONNECTED:
                    logger.warning("%s is not connected", self._publish)
                    self._index.is_reachable = False
                    if self._replay_address is None:
                        self._forget()
                else:
                    if self._replay_address is not None and not await self._replay(context):
                        self._forget()
                    self._index.is_reachable = True
            elif socket in ready:
                topic, sequence, payload = await socket.recv_multipart()
                await self._take(context, _Message(int.from_bytes(sequence, "big"), topic, payload))

    @property
    def _expected(self) -> int:
        """Sequence of the next message to apply."""
        return self._last.sequence + 1 if self._last is not None else 0

    async def _take(self, context: zmq.asyncio.Context, message: _Message) -> None:
        if message.sequence <= self._live:
            self._forget()
        self._live = message.sequence
        if message.sequence > self._expected:
            has_answered = await self._replay(context)
            if message.sequence > self._expected and has_answered:
                self._forget()  # the server refuses: the next message asks for all messages again
                return
        if message.sequence >= self._expected:
            self._apply(message)

    async def _replay(self, context: zmq.asyncio.Context) -> bool:
        """Applies the messages that were missed. Returns whether the server has answered.

        The first answer must be the last message again: that of a restarted server has another
        payload, because payloads have a time.
        """
        if self._replay_address is None:
            return False
        last = self._last
        try:
            async with aclosing(self._answers(context, last.sequence if last else 0)) as answers:
                async for message in answers:
                    if last is not None and message.sequence == last.sequence:
                        if message != last:
                            break
                        last = None
                    else:
                        last = None
                        self._apply(message)
        except TimeoutError:
            logger.warning("%s does not answer", self._replay_address)
            return False
        if last is None:
            return True
        self._forget()  # the server was restarted
        return await self._replay(context)

    async def _answers(self, context: zmq.asyncio.Context, first: int) -> AsyncGenerator[_Message, None]:
        """Yields the messages that the server has kept, from a sequence on. Raises TimeoutError."""
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IPV6, 1)
        try:
            socket.connect(str(self._replay_address))
            await socket.send_multipart([b"", first.to_bytes(8, "big")])
            while True:
                async with asyncio.timeout(REPLAY_TIMEOUT_S):
                    _, topic, raw, payload = await socket.recv_multipart()
                sequence = int.from_bytes(raw, "big", signed=True)
                if sequence < 0:
                    return
                yield _Message(sequence, topic, payload)
        finally:
            socket.close(linger=0)

    def _apply(self, message: _Message) -> None:
        """Applies a message. After a gap the index begins anew: some of its blocks may be gone."""
        if message.sequence > self._expected:
            logger.warning("%s: messages from %d on are lost", self._publish, self._expected)
            self._index.clear()
        self._last = message
        batch: list[Any] = msgspec.msgpack.decode(message.payload)
        self._index.apply(message.topic.decode(), batch[1])

    def _forget(self) -> None:
        self._index.clear()
        self._last, self._live = None, -1
