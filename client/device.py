"""KV tensors in device memory, which the server copies, and marks in CUDA streams.

An engine describes its KV tensors once (`KvBuffers`). The client registers the tensors again with
each new session. The server's copy worker copies between device blocks and slots of the region.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Self

from ..cuda.device.device_errors import DeviceError
from ..cuda.device.driver_contract import Driver, EventId, StreamId
from ..cuda.device.exports import DeviceExport, export_blocks
from ..cuda.device.layout import BlockLayout, LayoutRun
from ..protos.v1 import devices_pb2, transfer_pb2
from .errors import DeviceUnavailable

__all__ = ["KvBuffers", "Mark", "registration_of"]

_EVENTS = 64
"""Number of events that the server can wait for; an engine uses a few marks per step.

If all are in use by unreleased marks, a further mark has an event that only the client can wait
for: the client then waits before it requests the copy.
"""


class KvBuffers:
    """The KV tensors of this process on one device. Any thread may use the object.

    Construct the object after the tensors are allocated, and not during graph capture. Call `mark`
    from the thread that launches the compute.
    """

    def __init__(
        self, driver: Driver, groups: Mapping[int, tuple[BlockLayout, Sequence[int]]], *, events: int = _EVENTS
    ) -> None:
        """`groups`: per KV cache group the block layout and the addresses of its buffers (tensors).

        Raises:
            DeviceUnavailable: the memory cannot be shared; `reason` is a
                `kvtier.cuda.device.device_errors.Cause`.
        """
        self.driver = driver
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
        """Marks the work submitted to `stream` so far; copies with this mark start after that work.

        Raises:
            DeviceUnavailable: the stream is being captured, or the driver refuses.
        """
        with self._lock:
            index = self._free.popleft() if self._free else None
        try:
            event = self._events[index] if index is not None else self.driver.create_event()
            self.driver.record(event, stream)
        except DeviceError as error:
            self._give_back(index)
            raise DeviceUnavailable(str(error), error.cause) from error
        return Mark(self, event, index)

    def close(self) -> None:
        """Destroys the events. Release all marks before this call."""
        for event in self._events:
            self.driver.destroy_event(event)
        self._events.clear()

    def _give_back(self, index: int | None) -> None:
        if index is not None:
            with self._lock:
                self._free.append(index)

    def _release(self, event: EventId, index: int | None) -> None:
        if index is None:
            self.driver.destroy_event(event)
        self._give_back(index)


class Mark:
    """Position in a CUDA stream, recorded as an event. As a context manager, releases the event.

    Release a mark after all calls that use it have returned.
    """

    def __init__(self, buffers: KvBuffers, event: EventId, index: int | None) -> None:
        self.index = index
        """Index of the event in the registration; None if the server does not have the event."""
        self._buffers = buffers
        self._event = event
        self._released = False

    def wait(self) -> None:
        """Waits, without the GIL, until the marked work has ended. Raises `DeviceUnavailable`."""
        try:
            self._buffers.driver.wait(self._event)
        except DeviceError as error:
            raise DeviceUnavailable(str(error), error.cause) from error

    def release(self) -> None:
        """Gives the event back for reuse. Further calls have no effect."""
        if not self._released:
            self._released = True
            self._buffers._release(self._event, self.index)  # noqa: SLF001 - part of KvBuffers

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def registration_of(export: DeviceExport) -> transfer_pb2.RegisterDeviceBuffersRequest:
    """Returns the registration request of the buffers; the caller sets the session."""
    origin = export.origin
    return transfer_pb2.RegisterDeviceBuffersRequest(
        device_uuid=export.device,
        origin=devices_pb2.ProcessOrigin(
            boot_id=origin.boot, pid=origin.pid, pid_namespace=origin.pid_namespace, shm_device=origin.shm_device
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
