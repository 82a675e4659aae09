"""Blocks of an engine's process, to slots and back: bit by bit, in order, and when somebody dies."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from devices.backends import Backend, HostBackend
from devices.engine import Engine, eventually
from devices.kv import BLOCKS, LAYOUTS, Kv

from kvtier.cuda.device_copies import Direction, EngineBlocks, Tuning
from kvtier.cuda.driver import StreamId
from kvtier.cuda.errors import Cause, CopyCancelled, DeviceError
from kvtier.cuda.handles import OpenHandles
from kvtier.cuda.layout import LayoutError
from kvtier.cuda.ordering import After, ValueAfter
from kvtier.cuda.region import HostRegion

StartEngine = Callable[[Kv], Engine]
Open = Callable[..., EngineBlocks]

JOINED = LAYOUTS["a tensor per layer, K and V joined"]
JOINED_LAYERS = LAYOUTS["all layers of a block together"]
STEP = 96 << 10
"""Between two slots: more than any part has, and no multiple of a page."""


@pytest.fixture
def handles(backend: Backend) -> OpenHandles:
    """What is open here."""
    return OpenHandles(backend.driver)


@pytest.fixture
def open_blocks(backend: Backend, handles: OpenHandles, region: HostRegion) -> Iterator[Open]:
    """Opens engines' blocks, and closes them."""
    opened: list[EngineBlocks] = []

    def open_them(engine: Engine, **tuning: object) -> EngineBlocks:
        opened.append(EngineBlocks(backend.driver, handles, region, engine.export, Tuning(**tuning)))  # type: ignore[arg-type]
        return opened[-1]

    yield open_them
    for blocks in opened:
        with contextlib.suppress(DeviceError):
            blocks.close()


@pytest.fixture
def aside() -> Iterator[ThreadPoolExecutor]:
    """A thread beside the test's."""
    with ThreadPoolExecutor(2) as pool:
        yield pool


def slots(region: HostRegion, offsets: Sequence[int], size: int) -> list[bytes]:
    """What the slots hold."""
    return [bytes(region.memory[offset : offset + size]) for offset in offsets]


@pytest.mark.parametrize("name", LAYOUTS)
def test_round_trips_are_identical(region: HostRegion, start_engine: StartEngine, open_blocks: Open, name: str) -> None:
    """Blocks come out as a plain gather has them, whatever the layout, and go back in, some elsewhere, without a bit changed."""
    kv = LAYOUTS[name]
    engine = start_engine(kv)
    blocks = open_blocks(engine)
    parts, order = kv.parts(0), [3, 4, 0, 5, 1, 2]
    assert blocks.part_bytes(0) == len(parts[0])
    offsets = [index * STEP for index in range(BLOCKS)]
    blocks.copy_out(0, order, offsets)
    assert slots(region, offsets, len(parts[0])) == [parts[block] for block in order]
    engine.tell("fill", 1)
    blocks.copy_in(0, order, offsets)
    assert engine.contents() == engine.expected(0)
    blocks.copy_in(0, [0, 1], [offsets[0], offsets[1]])
    blocks.copy_out(0, range(BLOCKS), offsets)
    assert slots(region, offsets, len(parts[0])) == [parts[block] for block in (3, 4, 2, 3, 4, 5)]


@pytest.mark.parametrize("tuning", [{"batch_copies": 1}, {"batch_bytes": 1}, {"batch_copies": 4}, {}])
def test_the_size_of_batches_changes_nothing(
    region: HostRegion, start_engine: StartEngine, open_blocks: Open, tuning: dict[str, int]
) -> None:
    """Transfers are begun in batches of any size."""
    blocks = open_blocks(start_engine(JOINED), **tuning)
    blocks.copy_out(0, range(BLOCKS), range(0, BLOCKS * STEP, STEP))
    assert slots(region, range(0, BLOCKS * STEP, STEP), blocks.part_bytes(0)) == JOINED.parts(0)


class Watched:
    """Counts how often somebody looks."""

    def __init__(self, after: After) -> None:
        self.asked = 0
        self._after = after

    def reached(self) -> bool:
        """See After."""
        self.asked += 1
        return self._after.reached()


def test_a_store_waits_for_the_engines_event(
    region: HostRegion, start_engine: StartEngine, open_blocks: Open, aside: ThreadPoolExecutor
) -> None:
    """B4.11: nothing is read before the compute that writes it is over, as the engine's event says."""
    engine = start_engine(JOINED)
    blocks = open_blocks(engine)
    assert blocks.has_events
    engine.tell("compute", 1)
    after = Watched(blocks.after_event(1))
    storing = aside.submit(blocks.copy_out, 0, [2], [0], after)
    eventually(lambda: after.asked > 2 or storing.done())
    assert not storing.done()
    assert slots(region, [0], 8) == [bytes(8)]
    engine.tell("finish", 1)
    storing.result(60)
    assert slots(region, [0], blocks.part_bytes(0)) == [JOINED.parts(1)[2]]


def test_a_store_waits_for_the_engines_counter(
    region: HostRegion, start_engine: StartEngine, open_blocks: Open, aside: ThreadPoolExecutor
) -> None:
    """B4.11: where events cannot be shared, a counter in the region says when the compute is over."""
    engine = start_engine(JOINED)
    blocks = open_blocks(engine)
    engine.tell("count", 5)
    after = Watched(ValueAfter(region.memory[-8:], 5))
    storing = aside.submit(blocks.copy_out, 0, [2], [0], after)
    eventually(lambda: after.asked > 2 or storing.done())
    assert not storing.done()
    assert slots(region, [0], 8) == [bytes(8)]
    engine.tell("finish", 1)
    storing.result(60)
    assert slots(region, [0], blocks.part_bytes(0)) == [JOINED.parts(1)[2]]


@pytest.mark.parametrize(("value", "reached"), [(0, False), (4, False), (5, True), (6, True), (1 << 63, True)])
def test_a_counter_is_reached_at_its_value(value: int, reached: bool) -> None:  # noqa: FBT001
    """And stays so when the engine's stream has gone further."""
    word = bytearray(value.to_bytes(8, "little"))
    assert ValueAfter(memoryview(word), 5).reached() is reached


def test_without_a_common_shm_there_are_no_events(
    backend: Backend, handles: OpenHandles, region: HostRegion, start_engine: StartEngine
) -> None:
    """An engine in a container with a /dev/shm of its own is served; its events are not used."""
    engine = start_engine(JOINED)
    apart = dataclasses.replace(engine.export, origin=dataclasses.replace(engine.export.origin, shm_device=1))
    blocks = EngineBlocks(backend.driver, handles, region, apart)
    assert not blocks.has_events
    with pytest.raises(DeviceError):
        blocks.after_event(0)
    blocks.copy_out(0, [1], [0])
    assert slots(region, [0], blocks.part_bytes(0)) == [JOINED.parts(0)[1]]
    blocks.close()


def test_an_engine_killed_before_its_event(
    region: HostRegion, start_engine: StartEngine, open_blocks: Open, handles: OpenHandles, aside: ThreadPoolExecutor
) -> None:
    """A store that waits for a killed engine's compute is called off, and has written nothing."""
    engine = start_engine(JOINED)
    blocks = open_blocks(engine)
    engine.tell("compute", 0)
    after = Watched(blocks.after_event(0))
    storing = aside.submit(blocks.copy_out, 0, [0], [0], after)
    eventually(lambda: after.asked > 2)
    engine.kill()
    blocks.cancel()
    with pytest.raises(CopyCancelled):
        storing.result(60)
    assert slots(region, [0], 8) == [bytes(8)]
    blocks.close()
    assert handles.allocations == 0


def killed_in_mid_copy(engine: Engine, blocks: EngineBlocks, moving: Future[None]) -> BaseException | None:
    """Kills the engine, then does as a session does that falls; returns how the copy ended."""
    engine.kill()
    blocks.cancel()
    return moving.exception(60)


@pytest.mark.parametrize("method", ["copy_out", "copy_in"])
def test_an_engine_killed_in_mid_copy(
    backend: Backend,
    region: HostRegion,
    start_engine: StartEngine,
    open_blocks: Open,
    handles: OpenHandles,
    aside: ThreadPoolExecutor,
    method: str,
) -> None:
    """What was begun is drained, the rest is called off; then the memory is closed, and the next engine is served."""
    engine = start_engine(JOINED)
    blocks = open_blocks(engine, batch_copies=1)
    for _ in range(5):
        moving = aside.submit(
            getattr(blocks, method), 0, [*range(BLOCKS)] * 100, [*range(0, BLOCKS * STEP, STEP)] * 100
        )
    ended = killed_in_mid_copy(engine, blocks, moving)
    assert ended is None or isinstance(ended, CopyCancelled)
    blocks.close()
    assert handles.allocations == 0
    other = start_engine(JOINED)
    again = open_blocks(other)
    again.copy_out(0, [5], [0])
    assert slots(region, [0], again.part_bytes(0)) == [JOINED.parts(0)[5]]
    assert backend.driver.device == other.export.device


class Gate:
    """Lets so many copies of a host stream pass, and holds up the next."""

    def __init__(self, passes: int) -> None:
        self.passed = 0
        self.reached = threading.Event()
        self.opened = threading.Event()
        self._passes = passes

    def __call__(self) -> None:
        """Called before each copy."""
        if self.passed >= self._passes:
            self.reached.set()
            assert self.opened.wait(60)
        self.passed += 1


def test_slots_are_not_written_after_a_copy_has_returned(
    backend: Backend,
    region: HostRegion,
    start_engine: StartEngine,
    open_blocks: Open,
    aside: ThreadPoolExecutor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A copy that is called off ends when the batches under way have, of which there are two; then its slots may be given away.

    Thread 1 has begun two batches, and the device comes to neither; the engine is killed; thread 2 closes. Both wait.
    """
    engine = start_engine(JOINED_LAYERS)
    blocks = open_blocks(engine, batch_copies=1)
    size, copy, begun = blocks.part_bytes(0), backend.driver.copy, []

    def count(*arguments: Any) -> None:
        copy(*arguments)
        begun.append(arguments)

    monkeypatch.setattr(backend.driver, "copy", count)
    release = backend.hold(blocks._streams[Direction.OUT])
    moving = aside.submit(blocks.copy_out, 0, [0, 2, 4], [0, STEP, 2 * STEP])
    eventually(lambda: len(begun) == 2)
    engine.kill()
    closing = aside.submit(blocks.close)
    eventually(lambda: blocks._cancelled)
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
    backend: HostBackend, start_engine: StartEngine, open_blocks: Open, aside: ThreadPoolExecutor
) -> None:
    """Where nobody can know whether copies go on, the error says so, closing does too, and nothing is unmapped under them."""
    blocks = open_blocks(start_engine(JOINED), batch_copies=1)
    backend.pace = gate = Gate(1)
    moving = aside.submit(blocks.copy_out, 0, range(BLOCKS), range(0, BLOCKS * STEP, STEP))
    assert gate.reached.wait(60)
    backend.driver.break_down("illegal address")
    gate.opened.set()
    for attempt in (lambda: moving.result(60), lambda: blocks.copy_in(0, [0], [0]), blocks.close, blocks.close):
        with pytest.raises(DeviceError) as caught:
            attempt()
        assert caught.value.cause is Cause.BROKEN
    assert backend.driver.in_use["mappings"] == 3


class HalfWay:
    """A way to copy that begins one copy and fails then."""

    def __init__(self, backend: HostBackend) -> None:
        self.driver = backend.driver

    def copy(self, stream: StreamId, destinations: Sequence[int], sources: Sequence[int], sizes: Sequence[int]) -> None:
        """See Method."""
        self.driver.copy(stream, destinations[:1], sources[:1], sizes[:1])
        raise DeviceError(Cause.REFUSED, "half-way")


@pytest.mark.parametrize("backend", ["host"], indirect=True)
def test_a_copy_that_fails_half_way_is_drained(
    backend: HostBackend, start_engine: StartEngine, open_blocks: Open, aside: ThreadPoolExecutor
) -> None:
    """What was begun before an error is waited for, too; the blocks stay usable."""
    blocks = open_blocks(start_engine(JOINED), small=HalfWay(backend), small_bytes=1 << 20, small_copies=3 * BLOCKS)
    backend.pace = gate = Gate(0)
    moving = aside.submit(blocks.copy_out, 0, range(BLOCKS), range(0, BLOCKS * STEP, STEP))
    assert gate.reached.wait(60)
    assert not moving.done()
    gate.opened.set()
    with pytest.raises(DeviceError, match="half-way") as caught:
        moving.result(60)
    assert caught.value.cause is Cause.REFUSED
    blocks.copy_out(0, [0], [0])


@pytest.mark.parametrize("backend", ["host"], indirect=True)
def test_small_copies_go_another_way(backend: HostBackend, start_engine: StartEngine, open_blocks: Open) -> None:
    """Batches of many small copies take the method for those; large ones, and few, the driver's."""
    small = HalfWay(backend)
    page = JOINED.layout().part_bytes // JOINED.count
    for limits, refused in (((page, 3), True), ((page - 1, 3), False), ((page, 4), False)):
        blocks = open_blocks(start_engine(JOINED), small=small, small_bytes=limits[0], small_copies=limits[1])
        with pytest.raises(DeviceError) if refused else contextlib.nullcontext():
            blocks.copy_out(0, [0], [0])


@pytest.mark.parametrize(
    ("blocks", "offsets"), [([BLOCKS], [0]), ([-1], [0]), ([0], [-1]), ([0], [4 << 20]), ([0, 1], [0, (4 << 20) - 8])]
)
def test_nothing_outside_is_touched(
    region: HostRegion, start_engine: StartEngine, open_blocks: Open, blocks: list[int], offsets: list[int]
) -> None:
    """A call that names a block or a slot that is not there copies nothing at all."""
    opened = open_blocks(start_engine(JOINED))
    with pytest.raises(LayoutError):
        opened.copy_out(0, blocks, offsets)
    assert not any(region.memory)


def test_groups_that_are_not_there(start_engine: StartEngine, open_blocks: Open) -> None:
    """A group of another number is refused."""
    blocks = open_blocks(start_engine(JOINED))
    with pytest.raises(DeviceError) as caught:
        blocks.copy_out(1, [0], [0])
    assert caught.value.cause is Cause.BAD_EXPORT


def test_closed_blocks_copy_nothing(start_engine: StartEngine, open_blocks: Open) -> None:
    """After `close` there is nothing to copy; closing again does nothing."""
    blocks = open_blocks(start_engine(JOINED))
    blocks.close()
    blocks.close()
    with pytest.raises(DeviceError) as caught:
        blocks.copy_out(0, [0], [0])
    assert caught.value.cause is Cause.CLOSED


def test_blocks_of_another_device_are_refused(
    backend: Backend, handles: OpenHandles, region: HostRegion, start_engine: StartEngine
) -> None:
    """Memory of a device that this driver is not for is not opened."""
    export = dataclasses.replace(start_engine(JOINED).export, device="another")
    with pytest.raises(DeviceError) as caught:
        EngineBlocks(backend.driver, handles, region, export)
    assert caught.value.cause is Cause.NO_DEVICE


def test_events_that_cannot_be_opened_are_done_without(
    backend: Backend, handles: OpenHandles, region: HostRegion, start_engine: StartEngine
) -> None:
    """One bad event among good ones: none is used, and the blocks are served all the same."""
    export = start_engine(JOINED).export
    blocks = EngineBlocks(
        backend.driver, handles, region, dataclasses.replace(export, events=(*export.events, bytes(64)))
    )
    assert not blocks.has_events
    blocks.copy_out(0, [1], [0])
    blocks.close()


@pytest.mark.parametrize("backend", ["host"], indirect=True)
def test_what_cannot_be_opened_leaves_nothing_open(
    backend: HostBackend,
    handles: OpenHandles,
    region: HostRegion,
    start_engine: StartEngine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An error at the last step: neither memory nor events nor streams stay open."""
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
