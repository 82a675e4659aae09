"""Blocks of this process on a device, as a server is told of them, and how it is told when compute is over.

An engine describes its KV tensors once (`KvBuffers`); the client registers them with each server, and each life of a server, by
itself. The server's mover then copies between blocks and slots: this process only says which.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

from ..cuda.device.device_errors import DeviceError
from ..cuda.device.driver import Driver, EventId, StreamId
from ..cuda.device.exports import DeviceExport, export_blocks
from ..cuda.device.layout import BlockLayout, LayoutRun
from ..protos.v1 import devices_pb2, transfer_pb2
from .errors import DeviceUnavailable

__all__ = ["KvBuffers", "Mark", "registration_of"]

_EVENTS = 64
"""Marks that can be under way at once, a handful per step; with more the client waits in place of the server."""


class KvBuffers:
    """The KV tensors of this process on one device. Any thread may use it; `mark` belongs to whoever launches the compute.

    To be made when the tensors are there, and not while a graph is captured.
    """

    def __init__(
        self, driver: Driver, groups: Mapping[int, tuple[BlockLayout, Sequence[int]]], *, events: int = _EVENTS
    ) -> None:
        """``groups`` has, per KV cache group, where blocks lie and the addresses of the layout's buffers (tensors).

        Raises:
            DeviceUnavailable: the memory cannot be shared; `reason` is the cause (`kvtier.cuda.device.device_errors.Cause`).
        """
        self._driver = driver
        self._lock = threading.Lock()
        self._events: list[EventId] = []
        try:
            self._events += [driver.create_event(shared=True) for _ in range(events)]
            self.export: DeviceExport = export_blocks(driver, groups, events=self._events)
        except DeviceError as error:
            self.close()
            raise DeviceUnavailable(str(error), error.cause) from error
        self._free = deque(range(events))

    def mark(self, stream: StreamId) -> Mark:
        """Marks what the stream has been given so far: copies that are given the mark come after it.

        Raises:
            DeviceUnavailable: the stream is being captured, or the driver refuses.
        """
        with self._lock:
            index = self._free.popleft() if self._free else None
        try:
            event = self._events[index] if index is not None else self._driver.create_event()
            self._driver.record(event, stream)
        except DeviceError as error:
            self._give_back(index)
            raise DeviceUnavailable(str(error), error.cause) from error
        return Mark(self, event, index)

    def close(self) -> None:
        """Gives up the events. No mark may be in use."""
        for event in self._events:
            self._driver.destroy_event(event)
        self._events.clear()

    def _wait(self, event: EventId) -> None:
        try:
            self._driver.wait(event)
        except DeviceError as error:
            raise DeviceUnavailable(str(error), error.cause) from error

    def _give_back(self, index: int | None) -> None:
        if index is not None:
            with self._lock:
                self._free.append(index)

    def _release(self, event: EventId, index: int | None) -> None:
        if index is None:
            self._driver.destroy_event(event)
        self._give_back(index)


class Mark:
    """A moment of a stream, by an event that the server may look at. A context manager, which releases it.

    To be released when no call that was given it is under way.
    """

    def __init__(self, buffers: KvBuffers, event: EventId, index: int | None) -> None:
        self.index = index
        """The event, as the server knows it; None: it does not."""
        self._buffers = buffers
        self._event = event
        self._released = False

    def wait(self) -> None:
        """Returns when the compute is over; without the GIL. Raises DeviceUnavailable."""
        self._buffers._wait(self._event)  # noqa: SLF001 - the two are one

    def release(self) -> None:
        """Gives the event back; may be repeated."""
        if not self._released:
            self._released = True
            self._buffers._release(self._event, self.index)  # noqa: SLF001

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def registration_of(export: DeviceExport) -> transfer_pb2.RegisterDeviceBuffersRequest:
    """Returns what a server is told, but for the session."""
    origin = export.origin
    return transfer_pb2.RegisterDeviceBuffersRequest(
        device_uuid=export.device,
        origin=devices_pb2.ProcessOrigin(
            boot_id=origin.boot,
            pid=origin.pid,
            pid_namespace=origin.pid_namespace,
            shm_device=origin.shm_device,
        ),
        allocations=[
            devices_pb2.DeviceAllocation(handle=one.handle, size_bytes=one.nbytes) for one in export.allocations
        ],
        groups=[
            devices_pb2.DeviceGroup(group_index=group, num_blocks=layout.num_blocks, runs=map(_run, layout.runs))
            for group, layout in export.layouts.items()
        ],
        event_handles=export.events,
    )


def _run(run: LayoutRun) -> devices_pb2.DeviceRun:
    return devices_pb2.DeviceRun(
        allocation_index=run.buffer,
        offset_bytes=run.offset,
        block_stride_bytes=run.block_stride,
        piece_bytes=run.piece_bytes,
        pieces=run.pieces,
        piece_stride_bytes=run.piece_stride,
    )
