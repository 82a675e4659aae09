"""Contract of a device driver: shareable memory and events, streams, batched copies, pinning.

Two classes implement it and pass the same tests: `CudaDriver` (an NVIDIA GPU) and `HostDriver` (no
GPU: device memory is shared memory). A driver object is for one device in one process. Ids of
streams and events are valid only with the driver that made them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NewType, Protocol

from .device_errors import Cause

__all__ = ["HANDLE_BYTES", "Allocation", "Driver", "EventId", "MemoryKind", "StreamId"]

HANDLE_BYTES = 64
"""Size of a handle that one process exports and another opens."""

StreamId = NewType("StreamId", int)
EventId = NewType("EventId", int)


class MemoryKind(StrEnum):
    """How memory was allocated; decides whether it can be shared."""

    SHAREABLE = "shareable"
    VMM = "vmm"
    POOL = "pool"
    MANAGED = "managed"
    HOST = "host"

    @property
    def obstacle(self) -> Cause | None:
        """Why such memory cannot be exported; None if it can."""
        return _OBSTACLES.get(self)


_OBSTACLES = {
    MemoryKind.VMM: Cause.VMM_MEMORY,
    MemoryKind.POOL: Cause.POOL_MEMORY,
    MemoryKind.MANAGED: Cause.MANAGED_MEMORY,
    MemoryKind.HOST: Cause.HOST_MEMORY,
}


@dataclass(frozen=True)
class Allocation:
    """One allocation of the driver. Handles are for whole allocations."""

    base: int
    nbytes: int
    kind: MemoryKind


class Driver(Protocol):
    """One device's driver.

    Any thread may call. Calls for one stream take effect in the order they return.

    Calls raise DeviceError. `Cause.BROKEN` means that the device's context is lost: no call in this
    process can succeed any more, and the state of copies in flight is unknown. An engine's process
    calls `allocation_of`, `export_memory`, `create_event(shared=True)` and `export_event` once,
    when its KV tensors exist, and `record` while it serves. The copy process of the server uses the
    other calls.
    """

    @property
    def device(self) -> str:
        """UUID of the device or MIG instance, the same in every process and container."""
        ...

    def allocation_of(self, address: int) -> Allocation:
        """The allocation of a device address, made or opened here. Raises UNKNOWN_MEMORY."""
        ...

    def export_memory(self, base: int) -> bytes:
        """The handle (HANDLE_BYTES) of an allocation, by its base. Raises REFUSED."""
        ...

    def open_memory(self, handle: bytes) -> int:
        """Maps another process's allocation; the mapping outlives that process. Opens are counted.

        Raises CANNOT_OPEN; `exports.likely_cause` finds the reason.
        """
        ...

    def close_memory(self, address: int) -> None:
        """Ends one `open_memory` by its address; the last unmaps. No copy may use the memory."""

    def create_event(self, *, shared: bool = False) -> EventId:
        """An event, which counts as reached until recorded. ``shared``: it can be exported."""
        ...

    def export_event(self, event: EventId) -> bytes:
        """A handle of HANDLE_BYTES for a shared event."""
        ...

    def open_event(self, handle: bytes) -> EventId:
        """Opens an event of another process. Raises CANNOT_OPEN."""
        ...

    def destroy_event(self, event: EventId) -> None:
        """Destroys an event made or opened here, reached or not. Other processes keep theirs."""

    def record(self, event: EventId, stream: StreamId) -> None:
        """Makes the event reached when all submitted work is done. Raises CAPTURING."""

    def reached(self, event: EventId) -> bool:
        """Whether all work that preceded the event's last record is done; does not wait."""
        ...

    def wait(self, event: EventId) -> None:
        """Returns when an event of this process is reached; waits without the GIL."""

    def create_stream(self) -> StreamId:
        """A stream of the lowest priority that waits for no other stream."""
        ...

    def destroy_stream(self, stream: StreamId) -> None:
        """Destroys a stream; its submitted work is still done. Does not wait."""

    def copy(self, stream: StreamId, destinations: Sequence[int], sources: Sequence[int], sizes: Sequence[int]) -> None:
        """Starts to copy ``sizes[i]`` bytes from ``sources[i]`` to ``destinations[i]``, any order.

        Host memory that is not pinned works too, but slower. No copy may cross a boundary of pinned
        chunks. Addresses are not checked. The caller keeps the memory mapped until the stream is
        done.
        """

    def register(self, address: int, nbytes: int) -> None:
        """Pins host memory (whole pages, one chunk), as a `pinning.Registrar`. Raises PinError."""

    def unregister(self, address: int) -> None:
        """Undoes ``register(address, …)``. Never raises."""

    def close(self) -> None:
        """Releases the device, of which nothing may be in use. May be repeated."""
