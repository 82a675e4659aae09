"""A driver for machines without a GPU: device memory is shared memory, copies are made by threads.

It keeps the whole contract of `Driver`, so that everything above it is tested where there is no GPU: handles that fail for the same
reasons, memory that outlives its exporter, copies that are under way when somebody dies, a context that breaks. It is no transport:
an engine on the CPU copies straight into the slots.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections.abc import Callable, Sequence

from ..device.device_errors import Cause, DeviceError
from ..device.driver import Allocation, EventId, MemoryKind, StreamId
from ..host.copy import copy_batch
from ..host.region import PAGE_BYTES
from .host_streams import HostEvent, HostStream, SharedBytes

__all__ = ["HostDriver"]

_EVENT_BYTES = 16


class HostDriver:
    """See Driver. ``pace`` is called before every copy of a batch, on the stream's thread: tests hold copies up with it.

    `allocate`, `free` and `break_down` are for tests; so is ``device``, which stands for a UUID.
    """

    def __init__(self, device: str = "host", *, pace: Callable[[], None] = lambda: None) -> None:
        self.device = device
        self._pace = pace
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._allocations: dict[int, tuple[SharedBytes, MemoryKind]] = {}
        self._opened: dict[int, tuple[SharedBytes, bytes]] = {}
        self._users: dict[int, int] = {}
        self._vacated: list[SharedBytes] = []
        self._events: dict[EventId, HostEvent] = {}
        self._streams: dict[StreamId, HostStream] = {}
        self._ended: list[HostStream] = []
        self._broken: str | None = None
        self._changed = threading.Condition(self._lock)

    def allocate(self, nbytes: int, kind: MemoryKind = MemoryKind.SHAREABLE) -> int:
        """Makes memory of the device, all zero; returns its address."""
        memory = SharedBytes.create(-(-nbytes // PAGE_BYTES) * PAGE_BYTES)
        self._allocations[memory.address] = (memory, kind)
        return memory.address

    def free(self, address: int) -> None:
        """Gives up what `allocate` made; other processes keep what they opened."""
        memory, _ = self._allocations.pop(address)
        memory.close()

    def break_down(self, reason: str) -> None:
        """From now on every call raises BROKEN, and no stream goes on."""
        with self._changed:
            self._broken = reason
            self._changed.notify_all()

    @property
    def in_use(self) -> dict[str, int]:
        """How much of everything there is, for tests of leaks."""
        return {"mappings": len(self._opened), "events": len(self._events), "streams": len(self._streams)}

    def allocation_of(self, address: int) -> Allocation:
        """See Driver."""
        self._check()
        opened = {base: (memory, MemoryKind.SHAREABLE) for base, (memory, _) in self._opened.items()}
        for base, (memory, kind) in (self._allocations | opened).items():
            if base <= address < base + memory.nbytes:
                return Allocation(base, memory.nbytes, kind)
        raise DeviceError(Cause.UNKNOWN_MEMORY, f"{address:#x}")

    def export_memory(self, base: int) -> bytes:
        """See Driver."""
        self._check()
        memory, kind = self._allocations[base]
        if kind is not MemoryKind.SHAREABLE:
            raise DeviceError(Cause.REFUSED, "invalid argument")
        return memory.handle()

    def open_memory(self, handle: bytes) -> int:
        """See Driver."""
        self._check()
        with self._lock:
            for address, (_, known) in self._opened.items():
                if known == handle:
                    self._users[address] += 1
                    return address
            memory = SharedBytes.open(handle)
            self._opened[memory.address] = (memory, handle)
            self._users[memory.address] = 1
            return memory.address

    def close_memory(self, address: int) -> None:
        """See Driver."""
        self._check()
        with self._lock:
            if address not in self._users:
                raise DeviceError(Cause.REFUSED, "invalid argument")
            self._users[address] -= 1
            if not self._users[address]:
                memory, _ = self._opened.pop(address)
                del self._users[address]
                memory.vacate()
                self._vacated.append(memory)

    def create_event(self, *, shared: bool = False) -> EventId:
        """See Driver."""
        self._check()
        return self._add_event(SharedBytes.create(_EVENT_BYTES))

    def export_event(self, event: EventId) -> bytes:
        """See Driver."""
        self._check()
        return self._events[event].memory.handle()

    def open_event(self, handle: bytes) -> EventId:
        """See Driver."""
        self._check()
        return self._add_event(SharedBytes.open(handle))

    def _add_event(self, memory: SharedBytes) -> EventId:
        event = EventId(next(self._numbers))
        self._events[event] = HostEvent(memory)
        return event

    def destroy_event(self, event: EventId) -> None:
        """See Driver."""
        self._events.pop(event).close()

    def record(self, event: EventId, stream: StreamId) -> None:
        """See Driver."""
        self._check()
        self._events[event].record(self._streams[stream])
        self._streams[stream].submit(self._tell)

    def _tell(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def reached(self, event: EventId) -> bool:
        """See Driver."""
        self._check()
        return self._events[event].reached()

    def wait(self, event: EventId) -> None:
        """See Driver."""
        with self._changed:
            self._changed.wait_for(lambda: self._broken is not None or self._events[event].reached())
        self._check()

    def create_stream(self) -> StreamId:
        """See Driver."""
        self._check()
        stream = StreamId(next(self._numbers))
        self._streams[stream] = HostStream(lambda error: self.break_down(str(error)))
        return stream

    def destroy_stream(self, stream: StreamId) -> None:
        """See Driver."""
        ended = self._streams.pop(stream)
        ended.end()
        self._ended = [other for other in (*self._ended, ended) if not other.over]

    def copy(self, stream: StreamId, destinations: Sequence[int], sources: Sequence[int], sizes: Sequence[int]) -> None:
        """See Driver."""
        self._check()
        if not len(destinations) == len(sources) == len(sizes):
            raise ValueError("destinations, sources and sizes differ in number")
        self._streams[stream].submit(lambda: self._copy(destinations, sources, sizes))

    def _copy(self, destinations: Sequence[int], sources: Sequence[int], sizes: Sequence[int]) -> None:
        for destination, source, size in zip(destinations, sources, sizes, strict=True):
            self._pace()
            self._check()
            self._check_open(destination)
            self._check_open(source)
            copy_batch([destination], [source], [size])

    def _check_open(self, address: int) -> None:
        """A GPU faults where memory is used after it was closed; so does this, in place of a segmentation fault."""
        with self._lock:
            if any(memory.address <= address < memory.address + memory.nbytes for memory in self._vacated):
                raise DeviceError(Cause.BROKEN, f"illegal address {address:#x}")

    def write_value(self, stream: StreamId, address: int, value: int) -> None:
        """See Driver."""
        self._check()
        word = ctypes.c_uint64.from_address(address)
        self._streams[stream].submit(lambda: setattr(word, "value", value))

    def register(self, address: int, nbytes: int) -> None:
        """See Driver."""

    def unregister(self, address: int) -> None:
        """See Driver."""

    def close(self) -> None:
        """See Driver."""
        for stream in list(self._streams):
            self.destroy_stream(stream)
        for ended in self._ended:
            ended.join()
        for event in list(self._events):
            self.destroy_event(event)
        mapped = [memory for memory, _ in (*self._opened.values(), *self._allocations.values())]
        for memory in (*mapped, *self._vacated):
            memory.close()
        for kept in (self._opened, self._allocations, self._users):
            kept.clear()
        self._vacated.clear()

    def _check(self) -> None:
        if self._broken is not None:
            raise DeviceError(Cause.BROKEN, self._broken)
