"""An engine, a driver or a device ends in mid-copy.

Started batches are drained; later nothing is written.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from devices.backends import Backend, HostBackend
from devices.engine import CountingAfter, Engine
from devices.kv import BLOCKS, JOINED, JOINED_LAYERS, STEP, Kv, slots
from harness.polling import wait_until

from kvtier.cuda.device.copies import CopyDirection, EngineBlocks
from kvtier.cuda.device.device_errors import Cause, CopyCancelled, DeviceError
from kvtier.cuda.device.driver_contract import StreamId
from kvtier.cuda.device.handles import OpenHandles
from kvtier.cuda.host.region import HostRegion

StartEngine = Callable[[Kv], Engine]
Open = Callable[..., EngineBlocks]


def test_an_engine_killed_before_its_event(
    region: HostRegion, start_engine: StartEngine, open_blocks: Open, handles: OpenHandles, executor: ThreadPoolExecutor
) -> None:
    """A store that waits for a killed engine's compute is cancelled and writes nothing."""
    engine = start_engine(JOINED)
    blocks = open_blocks(engine)
    engine.tell("compute", 0)
    after = CountingAfter(blocks.after_event(0))
    storing = executor.submit(blocks.copy, CopyDirection.OUT, 0, [0], [0], after)
    wait_until(lambda: after.asked > 2)
    engine.kill()
    blocks.cancel()
    with pytest.raises(CopyCancelled):
        storing.result(60)
    assert slots(region, [0], 8) == [bytes(8)]
    blocks.close()
    assert handles.allocations == 0


def killed_in_mid_copy(engine: Engine, blocks: EngineBlocks, moving: Future[None]) -> BaseException | None:
    """Kills the engine and cancels, as the end of its session does.

    Returns the copy's exception.
    """
    engine.kill()
    blocks.cancel()
    return moving.exception(60)


@pytest.mark.parametrize("direction", CopyDirection)
def test_an_engine_killed_in_mid_copy(
    backend: Backend,
    region: HostRegion,
    start_engine: StartEngine,
    open_blocks: Open,
    handles: OpenHandles,
    executor: ThreadPoolExecutor,
    direction: CopyDirection,
) -> None:
    """Started batches are drained, the rest is cancelled, the memory is closed.

    The next engine is served.
    """
    engine = start_engine(JOINED)
    blocks = open_blocks(engine, batch_copies=1)
    for _ in range(5):
        moving = executor.submit(
            blocks.copy, direction, 0, [*range(BLOCKS)] * 100, [*range(0, BLOCKS * STEP, STEP)] * 100
        )
    ended = killed_in_mid_copy(engine, blocks, moving)
    assert ended is None or isinstance(ended, CopyCancelled)
    blocks.close()
    assert handles.allocations == 0
    other = start_engine(JOINED)
    again = open_blocks(other)
    again.copy(CopyDirection.OUT, 0, [5], [0])
    assert slots(region, [0], JOINED.layout().part_bytes) == [JOINED.parts(0)[5]]
    assert backend.driver.device == other.export.device


class Gate:
    """Lets ``passes`` copies of a host stream pass and holds the next one."""

    def __init__(self, passes: int) -> None:
        self.passed = 0
        self.reached = threading.Event()
        self.opened = threading.Event()
        self._passes = passes

    def __call__(self) -> None:
        if self.passed >= self._passes:
            self.reached.set()
            assert self.opened.wait(60)
        self.passed += 1


def test_slots_are_not_written_after_a_copy_has_returned(
    backend: Backend,
    region: HostRegion,
    start_engine: StartEngine,
    open_blocks: Open,
    executor: ThreadPoolExecutor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A cancelled copy ends only after its two batches in flight; then its slots may be reused.

    Thread 1 has started two batches, and the device has done neither. The engine is killed, thread
    2 closes. Both threads wait.
    """
    engine = start_engine(JOINED_LAYERS)
    blocks = open_blocks(engine, batch_copies=1)
    size, copy, begun = JOINED_LAYERS.layout().part_bytes, backend.driver.copy, []

    def count(*arguments: Any) -> None:
        copy(*arguments)
        begun.append(arguments)

    monkeypatch.setattr(backend.driver, "copy", count)
    release = backend.hold(blocks._streams[CopyDirection.OUT])
    moving = executor.submit(blocks.copy, CopyDirection.OUT, 0, [0, 2, 4], [0, STEP, 2 * STEP])
    wait_until(lambda: len(begun) == 2)
    engine.kill()
    closing = executor.submit(blocks.close)
    wait_until(lambda: blocks._cancelled)
    assert not moving.done()
    assert not closing.done()
    assert not any(region.memory)
    release()
    assert isinstance(moving.exception(60), CopyCancelled)
    closing.result(60)
    parts = JOINED_LAYERS.parts(0)
    assert slots(region, [0, STEP, 2 * STEP], size) == [parts[0], parts[2], bytes(size)]


@pytest.mark.parametrize("backend", ["host"], indirect=True)
def test_a_broken_context_is_told_apart(
    backend: HostBackend, start_engine: StartEngine, open_blocks: Open, executor: ThreadPoolExecutor
) -> None:
    """After a broken context copies and `close` raise BROKEN, and nothing is unmapped."""
    blocks = open_blocks(start_engine(JOINED), batch_copies=1)
    backend.pace = gate = Gate(1)
    moving = executor.submit(blocks.copy, CopyDirection.OUT, 0, range(BLOCKS), range(0, BLOCKS * STEP, STEP))
    assert gate.reached.wait(60)
    backend.driver.break_down("illegal address")
    gate.opened.set()
    for attempt in (
        lambda: moving.result(60),
        lambda: blocks.copy(CopyDirection.IN, 0, [0], [0]),
        blocks.close,
        blocks.close,
    ):
        with pytest.raises(DeviceError) as caught:
            attempt()
        assert caught.value.cause is Cause.BROKEN
    assert backend.driver.in_use["mappings"] == 3


@pytest.mark.parametrize("backend", ["host"], indirect=True)
def test_a_copy_that_fails_half_way_is_drained(
    backend: HostBackend,
    start_engine: StartEngine,
    open_blocks: Open,
    executor: ThreadPoolExecutor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Copies started before an error are drained; the blocks stay usable."""
    blocks = open_blocks(start_engine(JOINED))
    copy = backend.driver.copy

    def fail_half_way(
        stream: StreamId, destinations: Sequence[int], sources: Sequence[int], sizes: Sequence[int]
    ) -> None:
        copy(stream, destinations[:1], sources[:1], sizes[:1])
        raise DeviceError(Cause.REFUSED, "half-way")

    backend.pace = gate = Gate(0)
    with monkeypatch.context() as patch:
        patch.setattr(backend.driver, "copy", fail_half_way)
        moving = executor.submit(blocks.copy, CopyDirection.OUT, 0, range(BLOCKS), range(0, BLOCKS * STEP, STEP))
        assert gate.reached.wait(60)
        assert not moving.done()
        gate.opened.set()
        with pytest.raises(DeviceError, match="half-way") as caught:
            moving.result(60)
    assert caught.value.cause is Cause.REFUSED
    blocks.copy(CopyDirection.OUT, 0, [0], [0])
