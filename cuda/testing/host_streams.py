"""Streams and events of the host back end: a thread per stream, and counters in shared memory."""

from __future__ import annotations

import ctypes
import mmap
import os
import queue
import struct
import threading
from collections.abc import Callable
from typing import Final

from ..device.device_errors import Cause, DeviceError
from ..device.driver import HANDLE_BYTES
from ..host.copy import address_of

__all__ = ["HostEvent", "HostStream", "SharedBytes"]

_MAGIC: Final = b"kvtier-h"
_HANDLE = struct.Struct("<8sIIQQ")  # magic, pid, descriptor, inode, size

_PROT_NONE = 0
_RESERVED = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x10 | 0x4000  # MAP_FIXED, MAP_NORESERVE
_mmap = ctypes.CDLL(None, use_errno=True)["mmap"]
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]


class SharedBytes:
    """Shared memory without a name: another process of the same user opens it through /proc, and it goes with its last user."""

    def __init__(self, fd: int, nbytes: int) -> None:
        """Takes over the descriptor. Use `create` or `open`."""
        self._fd = fd
        self.nbytes = nbytes
        self._map = mmap.mmap(fd, nbytes)
        self.address, _ = address_of(self._map)

    @classmethod
    def create(cls, nbytes: int) -> SharedBytes:
        """New memory, all zero."""
        fd = os.memfd_create("kvtier-device", os.MFD_CLOEXEC)
        os.ftruncate(fd, nbytes)
        return cls(fd, nbytes)

    @classmethod
    def open(cls, handle: bytes) -> SharedBytes:
        """What another process exported. Raises DeviceError (CANNOT_OPEN)."""
        if len(handle) != HANDLE_BYTES:
            raise DeviceError(Cause.CANNOT_OPEN, f"a handle of {len(handle)} bytes")
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
        """What `open` takes in another process, as long as this one has the memory."""
        inode = os.fstat(self._fd).st_ino
        return _HANDLE.pack(_MAGIC, os.getpid(), self._fd, inode, self.nbytes).ljust(HANDLE_BYTES, b"\0")

    def vacate(self) -> None:
        """Gives up the memory, but not its addresses: whoever still uses them must not find something else there."""
        if _mmap(self.address, self.nbytes, _PROT_NONE, _RESERVED, -1, 0) != self.address:
            raise DeviceError(Cause.REFUSED, os.strerror(ctypes.get_errno()))
        os.close(self._fd)
        self._fd = -1

    def close(self) -> None:
        """Unmaps; the other processes keep theirs."""
        self._map.close()
        if self._fd >= 0:
            os.close(self._fd)


class HostEvent:
    """Two counters: how often it was recorded, and the last record that was reached. One process records."""

    def __init__(self, memory: SharedBytes) -> None:
        self.memory = memory
        self._counters = (ctypes.c_uint64 * 2).from_address(memory.address)
        self._lock = threading.Lock()
        self._users = 1
        """Whoever has the event, and each record that is not reached yet: streams write to it after it was destroyed."""

    def record(self, stream: HostStream) -> None:
        """See Driver."""
        with self._lock:
            self._users += 1
            self._counters[0] += 1
            ticket = self._counters[0]
        stream.submit(lambda: self._reach(ticket), self.close)

    def _reach(self, ticket: int) -> None:
        self._counters[1] = ticket
        self.close()

    def reached(self) -> bool:
        """See Driver."""
        return bool(self._counters[1] >= self._counters[0])

    def close(self) -> None:
        """Gives up the memory as soon as every record is reached, or never will be."""
        with self._lock:
            self._users -= 1
            if not self._users:
                self.memory.close()


class HostStream:
    """Does one thing after the other on a thread of its own. After one that raises it does nothing more: ``failed`` hears of it."""

    def __init__(self, failed: Callable[[Exception], None]) -> None:
        self._todo: queue.SimpleQueue[tuple[Callable[[], None], Callable[[], None]] | None] = queue.SimpleQueue()
        self._failed = failed
        self._thread = threading.Thread(target=self._work, name="kvtier-host-stream", daemon=True)
        self._thread.start()

    def submit(self, action: Callable[[], None], give_up: Callable[[], None] = lambda: None) -> None:
        """Does it after all that was submitted before; where something of that has failed, ``give_up`` instead."""
        self._todo.put((action, give_up))

    def end(self) -> None:
        """Ends the thread when all is done; does not wait for it."""
        self._todo.put(None)

    @property
    def over(self) -> bool:
        """Whether the thread has ended."""
        return not self._thread.is_alive()

    def join(self) -> None:
        """Returns when the thread has ended."""
        self._thread.join()

    def _work(self) -> None:
        has_failed = False
        while (todo := self._todo.get()) is not None:
            action, give_up = todo
            if has_failed:
                give_up()
                continue
            try:
                action()
            except Exception as error:  # noqa: BLE001  whatever it is, the device is lost with it
                has_failed = True
                give_up()
                self._failed(error)
