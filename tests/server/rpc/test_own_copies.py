"""Copies and digests by the server's own processes."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from harness.polling import async_wait_until

from kvtier.server.rpc.own_copies import Writers


class Digests:
    """Digests whose computation waits for `gate`."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.threads: list[str] = []

    def bytes_of(self, blocks: Any) -> int:
        return sum(block.part_bytes for block in blocks)

    def record(self, blocks: Any, rank: int) -> None:
        self.threads.append(threading.current_thread().name)
        if threading.current_thread() is not threading.main_thread():
            assert self.gate.wait(60)


def writers_of(digests: Digests) -> tuple[Writers, list[str]]:
    log: list[str] = []
    core = SimpleNamespace(writer_attached=lambda *_: log.append("attached"), writer_gone=lambda *_: log.append("gone"))
    runtime: Any = SimpleNamespace(core=core, digests=digests, run_commands=lambda: None)
    return Writers(runtime), log


def store_of(*sizes: int) -> Any:
    blocks = [SimpleNamespace(part_bytes=size) for size in sizes]
    return SimpleNamespace(id=7, rank=0, blocks=blocks, owner=SimpleNamespace(session_id=b"s"))


async def test_few_bytes_are_read_at_once() -> None:
    digests = Digests()
    writers, log = writers_of(digests)
    assert writers.record_digests(store_of(4096, 4096)) is None
    assert digests.threads == [threading.main_thread().name]
    assert not log


@pytest.mark.parametrize("sizes", [[4096] + [2 << 20] * 255, [2 << 20], [1] * 257])
async def test_many_bytes_or_parts_are_read_on_a_thread(sizes: list[int]) -> None:
    """The first part may be the smallest one."""
    digests = Digests()
    writers, log = writers_of(digests)
    recording = writers.record_digests(store_of(*sizes))
    assert recording is not None
    assert writers.busy(7)
    digests.gate.set()
    await recording
    assert not writers.busy(7)
    assert log == ["attached", "gone"]
    assert digests.threads != [threading.main_thread().name]


async def test_a_cancelled_call_does_not_free_slots_that_a_thread_reads() -> None:
    """The thread writes a digest when it has read a part; the slot must not be another store's."""
    digests = Digests()
    writers, log = writers_of(digests)

    async def call() -> None:
        recording = writers.record_digests(store_of(2 << 20))
        assert recording is not None
        await recording

    task = asyncio.create_task(call())
    await async_wait_until(lambda: bool(digests.threads))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert writers.busy(7)
    assert log == ["attached"]
    digests.gate.set()
    await async_wait_until(lambda: not writers.busy(7))
    assert log == ["attached", "gone"]
