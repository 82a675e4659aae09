"""Copies between an engine's device blocks and slots of the host region.

The process that opened the engine's blocks makes the copies. When `copy` has returned
or raised, none of the call's copies is in progress, so the slots can be reused. The one
exception is a broken context (`Cause.BROKEN`): copies may still be in progress, so the slots must
not be reused until this process has ended.

If an engine is killed during a copy, its memory stays mapped in this process. The copy worker then
calls `cancel` and `close`: no new batch starts, and `close` unmaps the memory after the batches in
flight have ended.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial

from ..host.region import HostRegion
from .copy_plan import Plan, Planner
from .device_errors import Cause, CopyCancelled, DeviceError
from .driver_contract import Driver, EventId, StreamId
from .exports import DeviceExport, Origin
from .handles import OpenHandles

__all__ = ["CopyDirection", "EngineBlocks", "Tuning"]

_log = logging.getLogger(__name__)

_POLL_SECONDS = 100e-6
"""Interval of polling an event. One poll costs 1 to 2 microseconds; an engine's step takes tens of
milliseconds."""


class CopyDirection(Enum):
    """OUT: from the engine into slots. IN: from slots into the engine."""

    OUT = "out"
    IN = "in"


@dataclass(frozen=True)
class Tuning:
    """Limits of one batch. A cancelled `copy` ends when its running batches (at most two) end."""

    batch_bytes: int = 64 << 20
    batch_copies: int = 4096


class EngineBlocks:
    """The opened blocks of one engine process, with one stream per direction.

    Raises DeviceError if the blocks cannot be opened. Any thread may call. `copy` blocks the
    calling thread but releases the GIL; several calls may run at a time.
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
        """Opens all events of an engine; returns [] if one of them cannot be shared."""
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

    def after_event(self, index: int) -> Callable[[], bool]:
        """Returns a function that tells whether the engine's event with this index is reached.

        The engine must not record the event again until the copies that wait for the event have
        ended. Raises DeviceError (BAD_EXPORT) if there is no such event.
        """
        if not 0 <= index < len(self._events):
            raise DeviceError(Cause.BAD_EXPORT, f"there is no event {index}: {len(self._events)} are shared")
        return partial(self._driver.reached, self._events[index])

    def copy(
        self,
        direction: CopyDirection,
        group: int,
        blocks: Sequence[int],
        offsets: Sequence[int],
        after: Callable[[], bool] | None = None,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> None:
        """Waits until ``after()`` is true; then copies between blocks and the slots at ``offsets``.

        ``cancelled`` is called while waiting and before each batch. If it returns true, no further
        batch starts and CopyCancelled is raised. During a copy into blocks (IN) the engine must not
        access the blocks.

        Raises CopyCancelled and DeviceError. Raises LayoutError for blocks or slots out of range,
        and RegionError if the region is closed; in these two cases nothing is copied.
        """
        if group not in self._planners:
            raise DeviceError(Cause.BAD_EXPORT, f"there is no group {group}")
        plan = self._planners[group].plan(blocks, offsets)

        def is_cancelled() -> bool:
            return self._cancelled or cancelled()

        with self._counted(), self._region.memory[:0]:
            while after is not None and not after():
                if is_cancelled():
                    raise CopyCancelled("cancelled before the engine's compute was done")
                time.sleep(_POLL_SECONDS)
            self._run(direction, plan, is_cancelled)

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
        """Copies a plan, with up to two batches in flight. Also waits for them after an error."""
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
        finally:  # after an error, `_finish` must wait for the copies that the driver has started
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
