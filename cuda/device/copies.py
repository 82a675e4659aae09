"""Copies between an engine's blocks on a device and slots of the host region, made by the process that opened the blocks.

What is promised: when `copy_out` or `copy_in` has returned or raised, nothing goes on behind the caller's back, so its slots may be
given away. The one exception is a broken context (`Cause.BROKEN`), after which nobody knows: then slots stay in quarantine
until this process is gone. That an engine is killed in mid-copy is an ordinary end: its memory stays mapped here, what was begun
is drained, the rest is called off, and only then is the memory closed.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from ..host.region import HostRegion
from .copy_plan import Plan, Planner
from .device_errors import Cause, CopyCancelled, DeviceError
from .driver import Driver, EventId, StreamId
from .exports import DeviceExport, Origin
from .handles import OpenHandles

__all__ = ["After", "CopyDirection", "CopyMethod", "EngineBlocks", "EventAfter", "Tuning", "ValueAfter", "wait_until"]


_PAUSE_SECONDS = 100e-6
"""Between two looks. A step of an engine takes tens of milliseconds; a look costs a microsecond or two."""


class After(Protocol):
    """What a copy comes after."""

    def reached(self) -> bool:
        """Whether it has happened; does not wait, and does not change back."""
        ...


class EventAfter:
    """An event of the engine's, opened here. The engine records it again only when what waits for it has been answered."""

    def __init__(self, driver: Driver, event: EventId) -> None:
        self._driver = driver
        self._event = event

    def reached(self) -> bool:
        """See After."""
        return self._driver.reached(self._event)


class ValueAfter:
    """A counter in memory that both processes map, which the engine's stream writes (`Driver.write_value`), each value higher.

    It needs neither a driver's handle nor /dev/shm, and looking at it is no call of the driver. ``word`` is 8 bytes of the region.
    """

    def __init__(self, word: memoryview, value: int) -> None:
        self._word = word.cast("Q")
        self._value = value

    def reached(self) -> bool:
        """See After."""
        return bool(self._word[0] >= self._value)


def wait_until(after: After, cancelled: Callable[[], bool]) -> None:
    """Returns when ``after`` is reached. Raises CopyCancelled when ``cancelled`` says so first: its engine may never get there."""
    while not after.reached():
        if cancelled():
            raise CopyCancelled("the engine ended before its compute did")
        time.sleep(_PAUSE_SECONDS)


_log = logging.getLogger(__name__)


def _never() -> bool:
    return False


class CopyDirection(Enum):
    """Which way bytes go: out of the engine into slots, or in from slots."""

    OUT = "out"
    IN = "in"


class CopyMethod(Protocol):
    """A way to copy: the driver's own is one, a kernel another (`gather.KernelCopier`)."""

    def copy(self, stream: StreamId, destinations: Sequence[int], sources: Sequence[int], sizes: Sequence[int]) -> None:
        """See `Driver.copy`."""
        ...


@dataclass(frozen=True)
class Tuning:
    """How much is given to the device at once, and by which way.

    A transfer is begun in batches of ``batch_bytes`` and ``batch_copies``, two of them under way at a time: so much has to be
    drained when an engine dies. ``small`` copies batches of at least ``small_copies`` whose copies have ``small_bytes`` at most.
    """

    batch_bytes: int = 64 << 20
    batch_copies: int = 4096
    small: CopyMethod | None = None
    small_bytes: int = 16 << 10
    small_copies: int = 64


class EngineBlocks:
    """The blocks of one engine process, open: one stream each way. Raises DeviceError where they cannot be opened.

    Any thread may call; `copy_out` and `copy_in` block theirs, without the GIL, and several may be under way.
    """

    def __init__(
        self,
        driver: Driver,
        handles: OpenHandles,
        region: HostRegion,
        export: DeviceExport,
        tuning: Tuning | None = None,
    ) -> None:
        if export.device != driver.device:
            raise DeviceError(Cause.NO_DEVICE, f"the memory is on {export.device}, this is {driver.device}")
        self._driver = driver
        self._tuning = tuning or Tuning()
        self._region = region
        self._idle = threading.Condition()
        self._closing = threading.Lock()
        self._running = 0
        self._cancelled = False
        self._closed = False
        self._lost: DeviceError | None = None
        with contextlib.ExitStack() as undo:
            addresses = handles.open(export)
            undo.callback(handles.close, export)
            self._events = self._open_events(undo, export)
            self._streams = {direction: self._open_stream(undo) for direction in CopyDirection}
            self._planners = {
                group: Planner(layout, addresses, region.address, region.size_bytes)
                for group, layout in export.layouts.items()
            }
            self._undo = undo.pop_all()

    def _open_events(self, undo: contextlib.ExitStack, export: DeviceExport) -> list[EventId]:
        """All events of an engine, or none where they cannot be opened from here: it is told, and says in another way."""
        if not export.origin.shares_events_with(Origin.here()):
            return []
        events: list[EventId] = []
        with contextlib.ExitStack() as opened:
            for handle in export.events:
                try:
                    events.append(self._driver.open_event(handle))
                except DeviceError as error:
                    if error.cause is not Cause.CANNOT_OPEN:
                        raise
                    _log.warning("kvtier: events of process %d cannot be shared: %s", export.origin.pid, error)
                    return []
                opened.callback(self._driver.destroy_event, events[-1])
            undo.push(opened.pop_all())
        return events

    def _open_stream(self, undo: contextlib.ExitStack) -> StreamId:
        stream = self._driver.create_stream()
        undo.callback(self._driver.destroy_stream, stream)
        return stream

    @property
    def has_events(self) -> bool:
        """Whether `after_event` works; else the engine says in another way when its compute is done."""
        return bool(self._events)

    def after_event(self, index: int) -> After:
        """The engine's event of that index in its export. Raises DeviceError (BAD_EXPORT) where there is none."""
        if not 0 <= index < len(self._events):
            raise DeviceError(Cause.BAD_EXPORT, f"no event {index} of {len(self._events)}")
        return EventAfter(self._driver, self._events[index])

    def part_bytes(self, group: int) -> int:
        """What one block of a group takes in its slot. Raises DeviceError (BAD_EXPORT) for a group that is not there."""
        return self._planner(group).part_bytes

    def copy_out(
        self,
        group: int,
        blocks: Sequence[int],
        offsets: Sequence[int],
        after: After | None = None,
        cancelled: Callable[[], bool] = _never,
    ) -> None:
        """Copies blocks into the slots at ``offsets`` of the region, after ``after``; returns when the bytes are there.

        ``cancelled`` is asked before each batch: once it says so nothing more is begun, and CopyCancelled is raised.

        Raises CopyCancelled and DeviceError; LayoutError for blocks or slots that are not there, and RegionError where the region
        is closed (then nothing is copied).
        """
        self._move(CopyDirection.OUT, group, blocks, offsets, after, cancelled)

    def copy_in(
        self,
        group: int,
        blocks: Sequence[int],
        offsets: Sequence[int],
        after: After | None = None,
        cancelled: Callable[[], bool] = _never,
    ) -> None:
        """Copies slots into blocks; otherwise as `copy_out`. ``after`` is when nothing reads the blocks any more."""
        self._move(CopyDirection.IN, group, blocks, offsets, after, cancelled)

    def cancel(self) -> None:
        """The engine is gone: nothing new is begun, and what runs raises CopyCancelled once it is drained. Does not wait."""
        self._cancelled = True

    def close(self) -> None:
        """Cancels, waits until nothing runs, and gives up memory, events and streams; may be repeated.

        Raises DeviceError (BROKEN) where copies may still be under way: then nothing is given up.
        """
        self._cancelled = True
        with self._idle:
            self._idle.wait_for(lambda: not self._running)
            self._closed = True
        with self._closing:  # whoever closes as well returns when all is given up
            if self._lost is not None:
                raise self._lost
            self._undo.close()

    def _planner(self, group: int) -> Planner:
        if group not in self._planners:
            raise DeviceError(Cause.BAD_EXPORT, f"there is no group {group}")
        return self._planners[group]

    def _move(
        self,
        direction: CopyDirection,
        group: int,
        blocks: Sequence[int],
        offsets: Sequence[int],
        after: After | None,
        cancelled: Callable[[], bool],
    ) -> None:
        plan = self._planner(group).plan(blocks, offsets)

        def is_off() -> bool:
            return self._cancelled or cancelled()

        with self._counted(), self._region.memory[:0]:
            if after is not None:
                wait_until(after, is_off)
            self._carry_out(direction, plan, is_off)

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        with self._idle:
            if self._closed or self._lost is not None:
                raise self._lost or DeviceError(Cause.CLOSED)
            self._running += 1
        try:
            yield
        finally:
            with self._idle:
                self._running -= 1
                self._idle.notify_all()

    def _carry_out(self, direction: CopyDirection, plan: Plan, is_off: Callable[[], bool]) -> None:
        """Begins batch after batch, waiting for the last but one; whatever happens, returns with none under way."""
        stream = self._streams[direction]
        under_way: list[EventId] = []
        try:
            for batch in plan.split(self._tuning.batch_copies, self._tuning.batch_bytes):
                if is_off():
                    raise CopyCancelled("the engine ended, or gave up, before its copies did")
                self._begin(direction, stream, batch, under_way)
                if len(under_way) > 1:
                    self._finish(under_way.pop(0))
        finally:
            with contextlib.ExitStack() as rest:  # one that fails does not keep the others from being waited for
                for event in under_way:
                    rest.callback(self._finish, event)

    def _begin(self, direction: CopyDirection, stream: StreamId, batch: Plan, under_way: list[EventId]) -> None:
        ends = (batch.host, batch.device) if direction is CopyDirection.OUT else (batch.device, batch.host)
        event = self._driver.create_event()
        try:
            self._method(batch).copy(stream, *ends, batch.sizes)
        finally:  # what fails half-way is waited for as well
            with self._or_lost():
                self._driver.record(event, stream)
            under_way.append(event)

    def _finish(self, event: EventId) -> None:
        with self._or_lost():
            self._driver.wait(event)
        self._driver.destroy_event(event)

    @contextlib.contextmanager
    def _or_lost(self) -> Iterator[None]:
        """Where the driver does not tell when copies end, nobody knows whether they have."""
        try:
            yield
        except DeviceError as error:
            self._lost = error if error.cause is Cause.BROKEN else DeviceError(Cause.BROKEN, str(error))
            raise self._lost from error

    def _method(self, batch: Plan) -> CopyMethod:
        tuning = self._tuning
        few = len(batch.sizes) < tuning.small_copies
        if tuning.small is None or few or max(batch.sizes) > tuning.small_bytes:
            return self._driver
        return tuning.small
