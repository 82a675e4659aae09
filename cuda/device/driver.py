"""What is asked of a device's driver: memory and events that other processes open, streams, batched copies, pinning.

Two classes obey this contract, and pass the same tests: `CudaDriver` (an NVIDIA GPU) and `HostDriver` (no GPU: device memory is
shared memory). A driver stands for one device in one process. Streams and events are numbers that only the driver that made them
understands.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NewType, Protocol

from .device_errors import Cause

__all__ = ["HANDLE_BYTES", "Allocation", "Driver", "EventId", "MemoryKind", "StreamId"]

HANDLE_BYTES = 64
"""The size of a handle that one process exports and another opens."""

StreamId = NewType("StreamId", int)
EventId = NewType("EventId", int)


class MemoryKind(StrEnum):
    """How memory was allocated, as far as sharing it goes."""

    SHAREABLE = "shareable"
    VMM = "vmm"
    POOL = "pool"
    MANAGED = "managed"
    HOST = "host"

    @property
    def obstacle(self) -> Cause | None:
        """Why such memory cannot be exported; None: it can."""
        return _OBSTACLES.get(self)


_OBSTACLES = {
    MemoryKind.VMM: Cause.VMM_MEMORY,
    MemoryKind.POOL: Cause.POOL_MEMORY,
    MemoryKind.MANAGED: Cause.MANAGED_MEMORY,
    MemoryKind.HOST: Cause.HOST_MEMORY,
}


@dataclass(frozen=True)
class Allocation:
    """What the driver allocated in one piece: handles are for whole allocations."""

    base: int
    nbytes: int
    kind: MemoryKind


class Driver(Protocol):
    """One device's driver. Any thread may call; calls for the same stream take effect in the order in which they return.

    Calls raise DeviceError, with `Cause.BROKEN` once the device's context is lost: then nothing more can be done in this process,
    and what was being copied is unknown. An engine's process calls `allocation_of`, `export_memory`, `create_event(shared=True)`
    and `export_event` once, when its KV tensors are there, and `record` or `write_value` while it serves; the rest is the server's.
    """

    @property
    def device(self) -> str:
        """The device's UUID (or that of the MIG instance), the same in every process and container."""
        ...

    def allocation_of(self, address: int) -> Allocation:
        """The allocation that an address of the device is in, made or opened here. Raises UNKNOWN_MEMORY."""
        ...

    def export_memory(self, base: int) -> bytes:
        """A handle of HANDLE_BYTES for the allocation at ``base``; the same one every time. Raises REFUSED."""
        ...

    def open_memory(self, handle: bytes) -> int:
        """Maps an allocation of another process, and returns where. A handle that is open is mapped once and counted.

        The mapping outlives its exporter. Raises CANNOT_OPEN: the driver does not say why (`origin` finds out).
        """
        ...

    def close_memory(self, address: int) -> None:
        """Gives up one `open_memory`, by what it returned; the last one unmaps. No copy may use the memory."""

    def create_event(self, *, shared: bool = False) -> EventId:
        """An event that counts as reached until it is recorded. ``shared``: `export_event` can be called."""
        ...

    def export_event(self, event: EventId) -> bytes:
        """A handle of HANDLE_BYTES for a shared event."""
        ...

    def open_event(self, handle: bytes) -> EventId:
        """Another process's event. Raises CANNOT_OPEN."""
        ...

    def destroy_event(self, event: EventId) -> None:
        """Gives up an event, made or opened here; the other process's stays. It need not have been reached; does not wait."""

    def record(self, event: EventId, stream: StreamId) -> None:
        """Makes the event be reached when all that the stream was given so far is done. Raises CAPTURING, and does nothing then."""

    def reached(self, event: EventId) -> bool:
        """Whether all that was in the event's stream at its last record is done; does not wait."""
        ...

    def wait(self, event: EventId) -> None:
        """Returns when an event of this process is reached; without the GIL."""

    def create_stream(self) -> StreamId:
        """A stream of copies, at the lowest priority, that waits for no other stream."""
        ...

    def destroy_stream(self, stream: StreamId) -> None:
        """Gives up a stream; what it has left to do is still done. Does not wait."""

    def copy(self, stream: StreamId, destinations: Sequence[int], sources: Sequence[int], sizes: Sequence[int]) -> None:
        """Begins to copy ``sizes[i]`` bytes from ``sources[i]`` to ``destinations[i]``, in any order, and returns.

        Host memory that is not pinned works too, slower. No copy may cross from one pinned chunk into the next. Nothing else is
        checked: addresses, and that the memory stays mapped until the stream has done it, are the caller's word.
        """

    def write_value(self, stream: StreamId, address: int, value: int) -> None:
        """Writes 64 bits to pinned host memory when all that the stream was given so far is done, and can be seen.

        Raises CAPTURING, and does nothing then.
        """

    def register(self, address: int, nbytes: int) -> None:
        """Pins host memory (whole pages, one chunk): with `unregister` a driver is a `pinning.Registrar`. Raises PinError."""

    def unregister(self, address: int) -> None:
        """Undoes ``register(address, …)``. Never raises."""

    def close(self) -> None:
        """Gives up the device. Nothing of it may be in use; may be repeated."""
