"""`HostDriver`: a device driver for tests without a GPU. Device memory is shared memory.

The class implements the whole contract of `Driver`, so all code that uses a driver can be tested
without a GPU. As on a GPU, handles fail for the same reasons, memory remains valid after its
exporter has ended, copies may still be in flight when a process ends, and a context can break.
Threads make the copies. Only tests and benchmarks use this driver; an engine on the CPU copies
directly into the slots.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import queue
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Final

from ..device.device_errors import Cause, DeviceError
from ..device.driver_contract import HANDLE_BYTES, Allocation, EventId, MemoryKind, StreamId
from ..host.copy import address_of, copy_batch
from ..host.region import PAGE_BYTES

__all__ = ["HostDriver", "HostEvent", "HostStream", "SharedBytes"]

_MAGIC: Final = b"kvtier-h"
_HANDLE = struct.Struct("<8sIIQQ")  # magic, pid, descriptor, inode, size
_EVENT_BYTES = 16

_PROT_NONE = 0
_RESERVED = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x10 | 0x4000  # MAP_FIXED, MAP_NORESERVE
_mmap = ctypes.CDLL(None, use_errno=True)["mmap"]
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]


class HostDriver:
    """`Driver` over shared memory.

    ``pace`` is called before every copy, on the stream's thread, so that tests can delay copies.
    ``device`` replaces the UUID. `allocate`, `free` and `break_down` are for tests.
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
        """Allocates zeroed device memory; returns its address."""
        memory = SharedBytes.create(-(-nbytes // PAGE_BYTES) * PAGE_BYTES)
        self._allocations[memory.address] = (memory, kind)
        return memory.address

    def free(self, address: int) -> None:
        """Frees memory of `allocate`. Mappings in other processes remain valid."""
        memory, _ = self._allocations.pop(address)
        memory.close()

    def break_down(self, reason: str) -> None:
        """Breaks the context: every later call raises BROKEN, and streams copy no more."""
        with self._changed:
            self._broken = reason
            self._changed.notify_all()

    @property
    def in_use(self) -> dict[str, int]:
        """Number of open resources by kind, for leak tests."""
        return {"mappings": len(self._opened), "events": len(self._events), "streams": len(self._streams)}

    def allocation_of(self, address: int) -> Allocation:
        self._check()
        opened = {base: (memory, MemoryKind.SHAREABLE) for base, (memory, _) in self._opened.items()}
        for base, (memory, kind) in (self._allocations | opened).items():
            if base <= address < base + memory.nbytes:
                return Allocation(base, memory.nbytes, kind)
        raise DeviceError(Cause.UNKNOWN_MEMORY, f"{address:#x}")

    def export_memory(self, base: int) -> bytes:
        self._check()
        memory, kind = self._allocations[base]
        if kind is not MemoryKind.SHAREABLE:
            raise DeviceError(Cause.REFUSED, "invalid argument")
        return memory.handle()

    def open_memory(self, handle: bytes) -> int:
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
        self._check()
        return self._add_event(SharedBytes.create(_EVENT_BYTES))

    def export_event(self, event: EventId) -> bytes:
        self._check()
        return self._events[event].memory.handle()

    def open_event(self, handle: bytes) -> EventId:
        self._check()
        return self._add_event(SharedBytes.open(handle))

    def _add_event(self, memory: SharedBytes) -> EventId:
        event = EventId(next(self._numbers))
        self._events[event] = HostEvent(memory)
        return event

    def destroy_event(self, event: EventId) -> None:
        self._events.pop(event).close()

    def record(self, event: EventId, stream: StreamId) -> None:
        self._check()
        self._events[event].record(self._streams[stream])
        self._streams[stream].submit(self._tell)

    def _tell(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def reached(self, event: EventId) -> bool:
        self._check()
        return self._events[event].reached()

    def wait(self, event: EventId) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._broken is not None or self._events[event].reached())
        self._check()

    def create_stream(self) -> StreamId:
        self._check()
        stream = StreamId(next(self._numbers))
        self._streams[stream] = HostStream(lambda error: self.break_down(str(error)))
        return stream

    def destroy_stream(self, stream: StreamId) -> None:
        ended = self._streams.pop(stream)
        ended.end()
        self._ended = [other for other in (*self._ended, ended) if not other.over]

    def copy(self, stream: StreamId, destinations: Sequence[int], sources: Sequence[int], sizes: Sequence[int]) -> None:
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
        """Raises BROKEN for closed memory, as a GPU does, instead of a segmentation fault."""
        with self._lock:
            if any(memory.address <= address < memory.address + memory.nbytes for memory in self._vacated):
                raise DeviceError(Cause.BROKEN, f"illegal address {address:#x}")

    def register(self, address: int, nbytes: int) -> None:
        """Does nothing, because this driver needs no pinned memory."""

    def unregister(self, address: int) -> None:
        """Does nothing, like `register`."""

    def close(self) -> None:
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


class SharedBytes:
    """Unnamed shared memory, which other processes of the same user open through /proc."""

    def __init__(self, fd: int, nbytes: int) -> None:
        """Takes ownership of the descriptor. Use `create` or `open`."""
        self._fd = fd
        self.nbytes = nbytes
        self._map = mmap.mmap(fd, nbytes)
        self.address, _ = address_of(self._map)

    @classmethod
    def create(cls, nbytes: int) -> SharedBytes:
        fd = os.memfd_create("kvtier-device", os.MFD_CLOEXEC)
        os.ftruncate(fd, nbytes)
        return cls(fd, nbytes)

    @classmethod
    def open(cls, handle: bytes) -> SharedBytes:
        """Opens memory of another process by its handle. Raises DeviceError (CANNOT_OPEN)."""
        if len(handle) != HANDLE_BYTES:
            raise DeviceError(Cause.CANNOT_OPEN, f"the handle has {len(handle)} bytes, not {HANDLE_BYTES}")
        magic, pid, fd, inode, nbytes = _HANDLE.unpack(handle[: _HANDLE.size])
        if magic != _MAGIC or pid == os.getpid():
            raise DeviceError(Cause.CANNOT_OPEN, "invalid device context" if magic == _MAGIC else "invalid handle")
        try:
            own = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise DeviceError(Cause.CANNOT_OPEN, str(error)) from error
        stat = os.fstat(own)
        if (stat.st_ino, stat.st_size) != (inode, nbytes):
            os.close(own)
            raise DeviceError(Cause.CANNOT_OPEN, "the memory has been freed")
        return cls(own, nbytes)

    def handle(self) -> bytes:
        """Handle for `open` in another process. Valid until this process closes the memory."""
        inode = os.fstat(self._fd).st_ino
        return _HANDLE.pack(_MAGIC, os.getpid(), self._fd, inode, self.nbytes).ljust(HANDLE_BYTES, b"\0")

    def vacate(self) -> None:
        """Releases the memory but keeps its addresses reserved, so that a late access faults."""
        if _mmap(self.address, self.nbytes, _PROT_NONE, _RESERVED, -1, 0) != self.address:
            raise DeviceError(Cause.REFUSED, os.strerror(ctypes.get_errno()))
        os.close(self._fd)
        self._fd = -1

    def close(self) -> None:
        self._map.close()
        if self._fd >= 0:
            os.close(self._fd)


class HostEvent:
    """An event as two shared counters: the number of records, and the last record reached."""

    def __init__(self, memory: SharedBytes) -> None:
        self.memory = memory
        self._counters = (ctypes.c_uint64 * 2).from_address(memory.address)
        self._lock = threading.Lock()
        self._users = 1
        """Number of uses: the owner, and each record not reached yet.

        A stream writes to the counters even after `destroy_event`, so the memory stays open until
        the last use has ended.
        """

    def record(self, stream: HostStream) -> None:
        with self._lock:
            self._users += 1
            self._counters[0] += 1
            ticket = self._counters[0]
        stream.submit(lambda: self._reach(ticket), self.close)

    def _reach(self, ticket: int) -> None:
        self._counters[1] = ticket
        self.close()

    def reached(self) -> bool:
        return bool(self._counters[1] >= self._counters[0])

    def close(self) -> None:
        """Ends one use. The end of the last use closes the memory."""
        with self._lock:
            self._users -= 1
            if not self._users:
                self.memory.close()


class HostStream:
    """Runs actions in order on a thread. After an error calls ``failed`` and runs no others."""

    def __init__(self, failed: Callable[[Exception], None]) -> None:
        self._todo: queue.SimpleQueue[tuple[Callable[[], None], Callable[[], None]] | None] = queue.SimpleQueue()
        self._failed = failed
        self._thread = threading.Thread(target=self._work, name="kvtier-host-stream", daemon=True)
        self._thread.start()

    def submit(self, action: Callable[[], None], on_failure: Callable[[], None] = lambda: None) -> None:
        """Runs ``action`` after all earlier actions, or ``on_failure`` if one has failed."""
        self._todo.put((action, on_failure))

    def end(self) -> None:
        """Ends the thread after all submitted actions; does not wait."""
        self._todo.put(None)

    @property
    def over(self) -> bool:
        return not self._thread.is_alive()

    def join(self) -> None:
        self._thread.join()

    def _work(self) -> None:
        has_failed = False
        while (todo := self._todo.get()) is not None:
            action, on_failure = todo
            if has_failed:
                on_failure()
                continue
            try:
                action()
            except Exception as error:  # noqa: BLE001  every error breaks the context
                has_failed = True
                on_failure()
                self._failed(error)
