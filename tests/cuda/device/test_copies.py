"""Copies of an engine's blocks to slots and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from devices.backends import Backend, HostBackend
from devices.engine import CountingAfter, Engine
from devices.kv import BLOCKS, JOINED, LAYOUTS, STEP, Kv, slots
from harness.polling import wait_until

from kvtier.cuda.device.copies import CopyDirection, EngineBlocks
from kvtier.cuda.device.device_errors import Cause, DeviceError
from kvtier.cuda.device.driver_contract import EventId, StreamId
from kvtier.cuda.device.handles import OpenHandles
from kvtier.cuda.device.layout import LayoutError
from kvtier.cuda.host.region import HostRegion

StartEngine = Callable[[Kv], Engine]
Open = Callable[..., EngineBlocks]


@pytest.mark.parametrize("name", LAYOUTS)
def test_round_trips_are_identical(region: HostRegion, start_engine: StartEngine, open_blocks: Open, name: str) -> None:
    """Slots hold what a NumPy gather returns, for each layout; blocks are restored bit by bit."""
    kv = LAYOUTS[name]
    engine = start_engine(kv)
    blocks = open_blocks(engine)
    parts, order = kv.parts(0), [3, 4, 0, 5, 1, 2]
    offsets = [index * STEP for index in range(BLOCKS)]
    blocks.copy(CopyDirection.OUT, 0, order, offsets)
    assert slots(region, offsets, len(parts[0])) == [parts[block] for block in order]
    engine.tell("fill", 1)
    blocks.copy(CopyDirection.IN, 0, order, offsets)
    assert engine.contents() == engine.expected(0)
    blocks.copy(CopyDirection.IN, 0, [0, 1], [offsets[0], offsets[1]])
    blocks.copy(CopyDirection.OUT, 0, range(BLOCKS), offsets)
    assert slots(region, offsets, len(parts[0])) == [parts[block] for block in (3, 4, 2, 3, 4, 5)]


@pytest.mark.parametrize("tuning", [{"batch_copies": 1}, {"batch_bytes": 1}, {"batch_copies": 4}, {}])
def test_the_size_of_batches_changes_nothing(
    region: HostRegion, start_engine: StartEngine, open_blocks: Open, tuning: dict[str, int]
) -> None:
    """Every batch size gives the same result."""
    blocks = open_blocks(start_engine(JOINED), **tuning)
    blocks.copy(CopyDirection.OUT, 0, range(BLOCKS), range(0, BLOCKS * STEP, STEP))
    assert slots(region, range(0, BLOCKS * STEP, STEP), JOINED.layout().part_bytes) == JOINED.parts(0)


def test_a_store_waits_for_the_engines_event(
    region: HostRegion, start_engine: StartEngine, open_blocks: Open, executor: ThreadPoolExecutor
) -> None:
    """B4.11: nothing is read before the engine's event shows that the compute has ended."""
    engine = start_engine(JOINED)
    blocks = open_blocks(engine)
    assert blocks.has_events
    engine.tell("compute", 1)
    after = CountingAfter(blocks.after_event(1))
    storing = executor.submit(blocks.copy, CopyDirection.OUT, 0, [2], [0], after)
    wait_until(lambda: after.asked > 2 or storing.done())
    assert not storing.done()
    assert slots(region, [0], 8) == [bytes(8)]
    engine.tell("finish", 1)
    storing.result(60)
    assert slots(region, [0], JOINED.layout().part_bytes) == [JOINED.parts(1)[2]]


def test_without_a_common_shm_there_are_no_events(
    backend: Backend, handles: OpenHandles, region: HostRegion, start_engine: StartEngine
) -> None:
    """An engine in a container with its own /dev/shm is served without events."""
    engine = start_engine(JOINED)
    apart = dataclasses.replace(engine.export, origin=dataclasses.replace(engine.export.origin, shm_device=1))
    blocks = EngineBlocks(backend.driver, handles, region, apart)
    assert not blocks.has_events
    with pytest.raises(DeviceError):
        blocks.after_event(0)
    blocks.copy(CopyDirection.OUT, 0, [1], [0])
    assert slots(region, [0], JOINED.layout().part_bytes) == [JOINED.parts(0)[1]]
    blocks.close()


@pytest.mark.parametrize(
    ("blocks", "offsets"), [([BLOCKS], [0]), ([-1], [0]), ([0], [-1]), ([0], [4 << 20]), ([0, 1], [0, (4 << 20) - 8])]
)
def test_nothing_outside_is_touched(
    region: HostRegion, start_engine: StartEngine, open_blocks: Open, blocks: list[int], offsets: list[int]
) -> None:
    """A call that names a block or slot out of range copies nothing."""
    opened = open_blocks(start_engine(JOINED))
    with pytest.raises(LayoutError):
        opened.copy(CopyDirection.OUT, 0, blocks, offsets)
    assert not any(region.memory)


def test_unknown_groups(start_engine: StartEngine, open_blocks: Open) -> None:
    blocks = open_blocks(start_engine(JOINED))
    with pytest.raises(DeviceError) as caught:
        blocks.copy(CopyDirection.OUT, 1, [0], [0])
    assert caught.value.cause is Cause.BAD_EXPORT


def test_closed_blocks_copy_nothing(start_engine: StartEngine, open_blocks: Open) -> None:
    """After `close`, copies raise; a second `close` does nothing."""
    blocks = open_blocks(start_engine(JOINED))
    blocks.close()
    blocks.close()
    with pytest.raises(DeviceError) as caught:
        blocks.copy(CopyDirection.OUT, 0, [0], [0])
    assert caught.value.cause is Cause.CLOSED


def test_blocks_of_another_device_are_refused(
    backend: Backend, handles: OpenHandles, region: HostRegion, start_engine: StartEngine
) -> None:
    export = dataclasses.replace(start_engine(JOINED).export, device="another")
    with pytest.raises(DeviceError) as caught:
        EngineBlocks(backend.driver, handles, region, export)
    assert caught.value.cause is Cause.NO_DEVICE


def test_copies_work_without_events(
    backend: Backend, handles: OpenHandles, region: HostRegion, start_engine: StartEngine
) -> None:
    """If one event cannot be opened, no event is used, and copies still work."""
    export = start_engine(JOINED).export
    blocks = EngineBlocks(
        backend.driver, handles, region, dataclasses.replace(export, events=(*export.events, bytes(64)))
    )
    assert not blocks.has_events
    blocks.copy(CopyDirection.OUT, 0, [1], [0])
    blocks.close()


@pytest.mark.parametrize("backend", ["host"], indirect=True)
def test_a_failed_open_leaves_nothing_open(
    backend: HostBackend,
    handles: OpenHandles,
    region: HostRegion,
    start_engine: StartEngine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If the last step of opening fails, memory, events and streams are closed again."""
    export = start_engine(JOINED).export
    create, made = backend.driver.create_stream, []

    def fail_the_second_time() -> StreamId:
        if made:
            raise DeviceError(Cause.REFUSED, "no more")
        made.append(create())
        return made[0]

    monkeypatch.setattr(backend.driver, "create_stream", fail_the_second_time)
    with pytest.raises(DeviceError, match="no more"):
        EngineBlocks(backend.driver, handles, region, export)
    assert handles.allocations == 0
    assert backend.driver.in_use == {"mappings": 0, "events": 0, "streams": 0}


@pytest.mark.parametrize("backend", ["host"], indirect=True)
def test_copies_leave_no_events(backend: HostBackend, start_engine: StartEngine, open_blocks: Open) -> None:
    """Each batch has an event; a copy worker that kept them would run out of them."""
    blocks = open_blocks(start_engine(JOINED), batch_copies=1)
    before = backend.driver.in_use["events"]
    blocks.copy(CopyDirection.OUT, 0, range(BLOCKS), range(0, BLOCKS * STEP, STEP))
    assert backend.driver.in_use["events"] == before


@pytest.mark.parametrize("backend", ["host"], indirect=True)
def test_a_failed_copy_waits_for_both_of_its_batches(
    backend: HostBackend, start_engine: StartEngine, open_blocks: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver may have started a part of the failed batch, so its slots are still in use."""
    blocks, driver = open_blocks(start_engine(JOINED), batch_copies=1), backend.driver
    before = driver.in_use["events"]
    recorded, waited = list[EventId](), list[EventId]()
    copy, record, wait = driver.copy, driver.record, driver.wait

    def fail_second(*arguments: Any) -> None:
        if recorded:
            raise DeviceError(Cause.CANNOT_OPEN, "the second batch fails")
        copy(*arguments)

    monkeypatch.setattr(driver, "copy", fail_second)
    monkeypatch.setattr(driver, "record", lambda event, stream: (recorded.append(event), record(event, stream)))
    monkeypatch.setattr(driver, "wait", lambda event: (waited.append(event), wait(event)))
    with pytest.raises(DeviceError, match="the second batch fails"):
        blocks.copy(CopyDirection.OUT, 0, range(BLOCKS), range(0, BLOCKS * STEP, STEP))
    assert len(recorded) == 2
    assert sorted(waited) == sorted(recorded)
    assert driver.in_use["events"] == before
