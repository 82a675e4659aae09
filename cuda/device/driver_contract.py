"""Contract of a device driver: shareable memory and events, streams, batched copies, pinning.

Two classes implement the contract and pass the same tests: `CudaDriver` (an NVIDIA GPU) and
`HostDriver` (no GPU: device memory is shared memory). A driver object is for one device in one
process. Ids of streams and events are valid only with the driver that made them.
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
    """How memory was allocated. Only SHAREABLE memory can be exported."""

    SHAREABLE = "shareable"
    VMM = "vmm"
    POOL = "pool"
    MANAGED = "managed"
    HOST = "host"

    @property
    def obstacle(self) -> Cause | None:
        """Why memory of this kind cannot be exported; None if it can."""
        return _OBSTACLES.get(self)


_OBSTACLES = {
    MemoryKind.VMM: Cause.VMM_MEMORY,
    MemoryKind.POOL: Cause.POOL_MEMORY,
    MemoryKind.MANAGED: Cause.MANAGED_MEMORY,
    MemoryKind.HOST: Cause.HOST_MEMORY,
}


@dataclass(frozen=True)
class Allocation:
    """One allocation of the driver. A handle always refers to a whole allocation."""

    base: int
    nbytes: int
    kind: MemoryKind


class Driver(Protocol):
    """One device's driver.

    Any thread may call. Calls for one stream take effect in the order in which they return.

    Calls raise DeviceError. `Cause.BROKEN` means that the device's context is lost: no call in this
    process can succeed any more, and the state of copies in flight is unknown.

    An engine's process calls `allocation_of`, `export_memory`, `create_event(shared=True)` and
    `export_event` after it has allocated its KV tensors, and `record` before each copy request. The
    server's copy worker makes most of the other calls.
    """

    @property
    def device(self) -> str:
        """UUID of the device or MIG instance, the same in every process and container."""
        ...

    def allocation_of(self, address: int) -> Allocation:
        """The allocation at an address; this process made or opened it. Raises UNKNOWN_MEMORY."""
        ...

    def export_memory(self, base: int) -> bytes:
        """The handle (HANDLE_BYTES) of the allocation that starts at ``base``. Raises REFUSED."""
        ...

    def open_memory(self, handle: bytes) -> int:
        """Maps another process's allocation; the mapping remains valid if that process ends.

        Each call needs one `close_memory`. Raises CANNOT_OPEN; `exports.likely_cause` finds the
        reason.
        """
        ...

    def close_memory(self, address: int) -> None:
        """Undoes one `open_memory`; the last call unmaps the memory, which no copy may then use."""

    def create_event(self, *, shared: bool = False) -> EventId:
        """Creates an event, which counts as reached until its first `record`.

        Only a ``shared`` event can be exported.
        """
        ...

    def export_event(self, event: EventId) -> bytes:
        """A handle of HANDLE_BYTES for a shared event."""
        ...

    def open_event(self, handle: bytes) -> EventId:
        """Opens an event of another process. Raises CANNOT_OPEN."""
        ...

    def destroy_event(self, event: EventId) -> None:
        """Destroys an event made or opened by this process. Other processes can still use it."""

    def record(self, event: EventId, stream: StreamId) -> None:
        """Marks a point of the stream: the event is reached when all work before it is done.

        Raises CAPTURING if the stream is being captured into a graph.
        """

    def reached(self, event: EventId) -> bool:
        """Whether all work submitted before the event's last `record` is done; does not wait."""
        ...

    def wait(self, event: EventId) -> None:
        """Waits, without the GIL, until an event that this process created is reached."""

    def create_stream(self) -> StreamId:
        """A stream of the lowest priority that waits for no other stream."""
        ...

    def destroy_stream(self, stream: StreamId) -> None:
        """Destroys a stream. Work already submitted still runs; the call does not wait for it."""

    def copy(self, stream: StreamId, destinations: Sequence[int], sources: Sequence[int], sizes: Sequence[int]) -> None:
        """Starts to copy ``sizes[i]`` bytes from ``sources[i]`` to ``destinations[i]``.

        The copies run in any order. They are slower if host memory is not pinned. A copy must not
        cross a boundary of pinned chunks. Addresses are not checked. The caller keeps the memory
        mapped until the copies are done.
        """

    def register(self, address: int, nbytes: int) -> None:
        """Pins whole pages of one chunk, like `pinning.Registrar.register`. Raises PinError."""

    def unregister(self, address: int) -> None:
        """Undoes ``register(address, …)``. Never raises."""

    def close(self) -> None:
        """Releases the device. The caller closes memory, events and streams first. Idempotent."""
