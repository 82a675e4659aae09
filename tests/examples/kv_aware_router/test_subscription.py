"""The router's subscription to a publisher that loses messages, restarts, or does not answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq.asyncio
from harness.polling import async_wait_until
from kv_aware_router import subscription as subscription_module
from kv_aware_router.block_index import BlockIndex
from kv_aware_router.subscription import Subscription

TOPIC = b"kv@10.0.0.1:8000@m"


def event(kind: str, *numbers: int) -> dict[str, Any]:
    """Event of blocks without a parent, with one token each."""
    stored = {"parent_block_hash": None, "token_ids": list(numbers), "block_size": 1, "lora_name": None}
    return {"type": kind, "block_hashes": list(numbers), "medium": "CPU", "group_idx": 0, **stored}


class Publisher:
    """A publisher whose messages can be lost, and whose replay can be cut, refused or silent."""

    def __init__(self, directory: Path) -> None:
        self.addresses = (f"ipc://{directory}/pub", f"ipc://{directory}/replay")
        self.messages: list[bytes] = []
        self.first = 0
        """First message that is kept."""
        self.answers = True
        self.refusals = 0
        self.requested: list[int] = []
        self._context = zmq.asyncio.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.bind(self.addresses[1])
        self._task = asyncio.create_task(self._serve())
        self.connect()

    def connect(self) -> None:
        self._publisher = self._context.socket(zmq.PUB)
        self._publisher.bind(self.addresses[0])

    def disconnect(self) -> None:
        self._publisher.close(linger=0)

    async def send(self, kind: str, *numbers: int, lost: bool = False) -> None:
        sequence = len(self.messages)
        self.messages.append(msgspec.msgpack.encode([time.time(), [event(kind, *numbers)], None]))
        if not lost:
            await self._publisher.send_multipart([TOPIC, sequence.to_bytes(8, "big"), self.messages[-1]])

    async def _serve(self) -> None:
        while True:
            client, _, raw = await self._router.recv_multipart()
            first = int.from_bytes(raw, "big")
            self.requested.append(first)
            if not self.answers:
                continue
            if self.refusals:
                self.refusals -= 1
            else:
                for number in range(max(first, self.first), len(self.messages)):
                    frames = [client, b"", TOPIC, number.to_bytes(8, "big"), self.messages[number]]
                    await self._router.send_multipart(frames)
            await self._router.send_multipart([client, b"", b"", b"\xff" * 8, b""])

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._context.destroy(linger=0)


@asynccontextmanager
async def following(directory: Path, *, has_replay: bool = True) -> AsyncIterator[tuple[Publisher, BlockIndex]]:
    """A publisher, and the index of a subscription that has received the block 1."""
    publisher, index = Publisher(directory), BlockIndex()
    address, replay = publisher.addresses
    running = asyncio.create_task(Subscription(address, replay if has_replay else None, index).run())
    try:
        await publisher.send("BlockStored", 1)

        async def is_connected() -> bool:
            await publisher.send("BlockStored", 1)
            return held(index, 1)

        await async_wait_until(is_connected)
        await wait_for(index, {1})
        yield publisher, index
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await publisher.close()


def held(index: BlockIndex, number: int) -> bool:
    return index.match([number], "m") == 1


async def wait_for(index: BlockIndex, numbers: set[int]) -> None:
    await async_wait_until(lambda: {each for each in range(10) if held(index, each)} == numbers, 20)


async def test_missed_messages_are_requested(tmp_path: Path) -> None:
    """B6.8 The router then knows the same as without the gap."""
    async with following(tmp_path) as (publisher, index):
        await publisher.send("BlockRemoved", 1, lost=True)
        await publisher.send("BlockStored", 2, lost=True)
        await publisher.send("BlockStored", 3)
        await wait_for(index, {2, 3})


@pytest.mark.parametrize("has_replay", [True, False])
async def test_after_a_gap_that_stays_no_removed_block_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, has_replay: bool
) -> None:
    """B6.8 The server does not answer, or the router has no address of replays."""
    monkeypatch.setattr(subscription_module, "REPLAY_TIMEOUT_S", 0.05)
    async with following(tmp_path, has_replay=has_replay) as (publisher, index):
        publisher.answers = False
        await publisher.send("BlockRemoved", 1, lost=True)
        await publisher.send("BlockStored", 2)
        await wait_for(index, {2})
        await publisher.send("BlockStored", 3)
        await wait_for(index, {2, 3})


async def test_messages_that_the_server_no_longer_has(tmp_path: Path) -> None:
    """B6.8 The router begins anew with what the server has kept."""
    async with following(tmp_path) as (publisher, index):
        await publisher.send("BlockRemoved", 1, lost=True)
        publisher.first = len(publisher.messages)
        await publisher.send("BlockStored", 2, lost=True)
        await publisher.send("BlockStored", 3)
        await wait_for(index, {2, 3})


async def test_a_refused_request_is_repeated(tmp_path: Path) -> None:
    """B6.8 The server answers with the end only, and the next message causes another request."""
    async with following(tmp_path) as (publisher, index):
        await publisher.send("BlockRemoved", 1, lost=True)
        publisher.refusals = 2
        await publisher.send("BlockStored", 2)
        await wait_for(index, set())
        await publisher.send("BlockStored", 3)
        await wait_for(index, {2, 3})


async def test_an_interrupted_connection_loses_nothing(tmp_path: Path) -> None:
    """B6.8 Meanwhile no block counts. Afterwards the router asks only for what it has missed."""
    async with following(tmp_path) as (publisher, index):
        await publisher.send("BlockStored", 2)
        await wait_for(index, {1, 2})
        publisher.first = len(publisher.messages) - 1
        publisher.disconnect()
        await wait_for(index, set())
        assert len(index) == 0
        await publisher.send("BlockRemoved", 1, lost=True)
        publisher.connect()
        await wait_for(index, {2})
        assert publisher.requested[-1] == publisher.first


@pytest.mark.parametrize("messages", [0, 1, 100])
async def test_a_restart_is_seen_by_another_last_message(tmp_path: Path, messages: int) -> None:
    """B6.8 Also if the restarted server has already sent as many messages as before."""
    async with following(tmp_path) as (publisher, index):
        publisher.disconnect()
        await wait_for(index, set())
        publisher.messages.clear()
        for _ in range(messages):
            await publisher.send("BlockStored", 2, lost=True)
        publisher.connect()
        await wait_for(index, {2} if messages else set())
        await async_wait_until(lambda: index.is_reachable)
        await wait_for(index, {2} if messages else set())
