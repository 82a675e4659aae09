"""Copies between an engine's device blocks and slots of the host region.

The process that opened the engine's blocks makes the copies. When `copy_out` or `copy_in` has
returned or raised, none of the call's copies is in progress, so the slots can be reused. The one
exception is a broken context (`Cause.BROKEN`): copies may still be in progress, so the slots must
not be reused until this process has ended.

If an engine is killed during a copy, the engine's memory stays mapped in this process until the
batches in flight are done. The other batches are cancelled, and then the memory is closed.
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

__all__ = ["After", "CopyDirection", "EngineBlocks", "EventAfter", "Tuning", "wait_until"]

_log = logging.getLogger(__name__)

_POLL_SECONDS = 100e-6
"""Interval of polling an event. One poll costs 1 to 2 microseconds; an engine's step takes tens of
milliseconds."""


class After(Protocol):
    """The condition that a copy waits for before it starts."""

    def reached(self) -> bool:
        """Whether the condition is true. Does not wait. Once true, it stays true."""
        ...


class EventAfter:
    """Waits for an event of the engine.

    The engine records the event again only after the copies that wait for it have been answered.
    """

    def __init__(self, driver: Driver, event: EventId) -> None:
        self._driver = driver
        self._event = event

    def reached(self) -> bool:
        return self._driver.reached(self._event)


def wait_until(after: After, cancelled: Callable[[], bool]) -> None:
    """Waits until ``after`` is reached; raises CopyCancelled if ``cancelled()`` is true before."""
    while not after.reached():
        if cancelled():
            raise CopyCancelled("cancelled before the engine's compute was done")
        time.sleep(_POLL_SECONDS)


def _never() -> bool:
    return False


class CopyDirection(Enum):
    """OUT: from the engine into slots. IN: from slots into the engine."""

    OUT = "out"
    IN = "in"


@dataclass(frozen=True)
class Tuning:
    """Limits of one batch. A cancelled transfer still ends its running batches (at most two)."""

    batch_bytes: int = 64 << 20
    batch_copies: int = 4096


class EngineBlocks:
    """The opened blocks of one engine process, with one stream per direction.

    Raises DeviceError if the blocks cannot be opened. Any thread may call. `copy_out` and `copy_in`
    block the calling thread without the GIL; several calls may run at a time.
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
            raise DeviceError(Cause.NO_DEVICE, f"the memory is on {export.device}, the driver is for {driver.device}")
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
        """Opens all events of an engine; returns [] if one of them cannot be shared.

        Without events, the engine must wait for its compute before it requests a copy.
        """
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
        """Whether the engine's events can be used. If not, the engine must wait for its compute."""
        return bool(self._events)

    def after_event(self, index: int) -> After:
        """The engine's event with this index. Raises DeviceError (BAD_EXPORT) if it is missing."""
        if not 0 <= index < len(self._events):
            raise DeviceError(Cause.BAD_EXPORT, f"there is no event {index}: {len(self._events)} are shared")
        return EventAfter(self._driver, self._events[index])

    def part_bytes(self, group: int) -> int:
        """Bytes of one block in its slot. Raises DeviceError (BAD_EXPORT) for an unknown group."""
        return self._planner(group).part_bytes

    def copy_out(
        self,
        group: int,
        blocks: Sequence[int],
        offsets: Sequence[int],
        after: After | None = None,
        cancelled: Callable[[], bool] = _never,
    ) -> None:
        """Waits for ``after``, then copies blocks into the slots at ``offsets`` of the region.

        ``cancelled`` is called while waiting and before each batch. If it returns true, no further
        batch starts and CopyCancelled is raised.

        Raises CopyCancelled and DeviceError. Raises LayoutError for blocks or slots out of range,
        and RegionError if the region is closed; then nothing is copied.
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
        """Copies from slots into blocks, otherwise like `copy_out`.

        The engine must not access the blocks during the call.
        """
        self._move(CopyDirection.IN, group, blocks, offsets, after, cancelled)

    def cancel(self) -> None:
        """Cancels all copies and does not wait: no new batch starts.

        Running calls raise CopyCancelled when their batches in flight are done.
        """
        self._cancelled = True

    def close(self) -> None:
        """Cancels, waits for running calls, then closes memory, events and streams. Idempotent.

        Raises DeviceError (BROKEN) if copies may still be in progress; then nothing is closed.
        """
        self._cancelled = True
        with self._idle:
            self._idle.wait_for(lambda: not self._running)
            self._closed = True
        with self._closing:  # a concurrent close returns only after everything is closed
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

        def is_cancelled() -> bool:
            return self._cancelled or cancelled()

        with self._counted(), self._region.memory[:0]:
            if after is not None:
                wait_until(after, is_cancelled)
            self._run(direction, plan, is_cancelled)

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

    def _run(self, direction: CopyDirection, plan: Plan, is_cancelled: Callable[[], bool]) -> None:
        """Copies a plan with two batches in flight. At the end no batch is in flight."""
        stream = self._streams[direction]
        in_flight: list[EventId] = []
        try:
            for batch in plan.split(self._tuning.batch_copies, self._tuning.batch_bytes):
                if is_cancelled():
                    raise CopyCancelled("cancelled before all copies were made")
                self._begin(direction, stream, batch, in_flight)
                if len(in_flight) > 1:
                    self._finish(in_flight.pop(0))
        finally:
            with contextlib.ExitStack() as rest:  # waits for all batches even if one of them fails
                for event in in_flight:
                    rest.callback(self._finish, event)

    def _begin(self, direction: CopyDirection, stream: StreamId, batch: Plan, in_flight: list[EventId]) -> None:
        ends = (batch.host, batch.device) if direction is CopyDirection.OUT else (batch.device, batch.host)
        event = self._driver.create_event()
        try:
            self._driver.copy(stream, *ends, batch.sizes)
        finally:  # also wait for the copies of a batch that failed half-way
            with self._lost_on_error():
                self._driver.record(event, stream)
            in_flight.append(event)

    def _finish(self, event: EventId) -> None:
        with self._lost_on_error():
            self._driver.wait(event)
        self._driver.destroy_event(event)

    @contextlib.contextmanager
    def _lost_on_error(self) -> Iterator[None]:
        """Marks the context as lost if the driver cannot report the end of copies."""
        try:
            yield
        except DeviceError as error:
            self._lost = error if error.cause is Cause.BROKEN else DeviceError(Cause.BROKEN, str(error))
            raise self._lost from error
