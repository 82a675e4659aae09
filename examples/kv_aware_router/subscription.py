"""Subscription to the events of one kvtier server, with the replay of missed messages."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from .block_index import BlockIndex

__all__ = ["Subscription"]

REPLAY_TIMEOUT_S = 10.0
"""Longest time without a message of a replay."""
RETRY_S = 1.0

logger = logging.getLogger(__name__)


class Subscription:
    """Keeps the index of one host up to date.

    While the server cannot be reached, the index is empty, because engines cannot load its blocks.
    """

    def __init__(self, publish: str, replay: str | None, index: BlockIndex) -> None:
        """`publish`, `replay`: addresses as in the server's settings `events`."""
        self._publish = publish
        self._replay_address = replay
        self._index = index
        self._expected = 0
        """Sequence of the next message to apply."""
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
                    self._forget()
                else:
                    await self._replay(context)
            elif socket in ready:
                topic, sequence, payload = await socket.recv_multipart()
                await self._take(context, topic, int.from_bytes(sequence, "big"), payload)

    async def _take(self, context: zmq.asyncio.Context, topic: bytes, sequence: int, payload: bytes) -> None:
        if sequence <= self._live:
            self._forget()
        self._live = sequence
        if sequence > self._expected:
            await self._replay(context)
        if sequence >= self._expected:
            self._apply(topic, sequence, payload)

    async def _replay(self, context: zmq.asyncio.Context) -> None:
        """Applies the messages that were missed. If some are gone, the index begins anew."""
        if self._replay_address is None:
            return
        socket = context.socket(zmq.DEALER)
        try:
            socket.connect(self._replay_address)
            await socket.send_multipart([b"", self._expected.to_bytes(8, "big")])
            while True:
                async with asyncio.timeout(REPLAY_TIMEOUT_S):
                    _, topic, raw, payload = await socket.recv_multipart()
                sequence = int.from_bytes(raw, "big", signed=True)
                if sequence < 0:
                    return
                if sequence > self._expected:
                    logger.warning("%s no longer has the message %d", self._publish, self._expected)
                    self._index.clear()
                self._apply(topic, sequence, payload)
        except TimeoutError:
            logger.warning("%s does not answer", self._replay_address)
        finally:
            socket.close(linger=0)

    def _apply(self, topic: bytes, sequence: int, payload: bytes) -> None:
        self._expected = sequence + 1
        batch: list[Any] = msgspec.msgpack.decode(payload)
        self._index.apply(topic.decode(), batch[1])

    def _forget(self) -> None:
        self._index.clear()
        self._expected, self._live = 0, -1
