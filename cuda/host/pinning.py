"""Pinning: telling the GPU's driver that host memory stays where it is, so that copies are DMA and overlap compute.

A region is registered in chunks, on a background thread: one call for 94 GB would hold up an engine for 12 seconds, and nothing
can be used before it returns. Until a chunk is pinned, and wherever pinning fails, copies are slower and just as right.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Protocol, TypeAlias

__all__ = ["PIN_CHUNK_BYTES", "CudaRegistrar", "Pin", "PinError", "Pinnable", "Pinning", "Registrar", "split_at_chunks"]

_log = logging.getLogger(__name__)

PIN_CHUNK_BYTES = 64 << 20
"""What is registered in one call: 10 ms or so. A transfer may not cross from one registration into the next."""


class PinError(Exception):
    """The driver does not pin memory here; the message says why, for people."""


class Pinnable(Protocol):
    """Whole pages of memory: a region, or a staging buffer."""

    @property
    def address(self) -> int:
        """Where they begin."""
        ...

    @property
    def size_bytes(self) -> int:
        """How much it is."""
        ...


class Registrar(Protocol):
    """What pins memory. Called on threads that warm a region up, stage bytes or close; either call may take milliseconds."""

    def register(self, address: int, nbytes: int) -> None:
        """Pin whole pages. Raises PinError."""

    def unregister(self, address: int) -> None:
        """Undo ``register(address, …)``. Never raises."""


class Pinning:
    """What is pinned of one mapping of a region, or of other memory.

    ``allowed`` says whether the driver may be called now: not while the engine captures CUDA graphs, which such a call would end.
    """

    def __init__(self, memory: Pinnable, registrar: Registrar, allowed: Callable[[], bool]) -> None:
        self._memory = memory
        self._registrar = registrar
        self._allowed = allowed
        self._lock = threading.Lock()
        self._pinned: dict[int, int] = {}
        self._refused = False
        self._closed = False

    @property
    def pinned_bytes(self) -> int:
        """How much is pinned."""
        return sum(self._pinned.values())

    def covers(self, offset: int, nbytes: int) -> bool:
        """Whether bytes of the memory, which do not cross from one chunk into the next, are pinned."""
        start = offset - offset % PIN_CHUNK_BYTES
        return offset + nbytes <= start + self._pinned.get(start, 0)

    def pin(self, offset: int, length: int) -> bool:
        """Pin one chunk, which starts at a multiple of PIN_CHUNK_BYTES; its pages that are not backed become so.

        Returns whether nothing is left to do; False: not at this moment. Raises PinError where the driver refuses, and ValueError
        for what is not one chunk.
        """
        if offset % PIN_CHUNK_BYTES or not 0 < length <= PIN_CHUNK_BYTES or offset + length > self._memory.size_bytes:
            raise ValueError(f"{length} bytes at {offset} are not one chunk of the memory")
        with self._lock:
            if offset not in self._pinned and not self._refused:
                if self._closed or not self._allowed():
                    return False
                self._registrar.register(self._memory.address + offset, length)
                self._pinned[offset] = length
            return True

    def give_up(self) -> None:
        """Pin nothing more: what the driver refused once, it will refuse again. What is pinned stays so."""
        self._refused = True

    def close(self) -> None:
        """Unpin everything; before the memory is unmapped, and when no copy uses it."""
        with self._lock:
            self._closed = True
            for offset in self._pinned:
                self._registrar.unregister(self._memory.address + offset)
            self._pinned.clear()


Pin: TypeAlias = Callable[[Pinnable], Pinning]
"""How a process that has a GPU pins memory: regions that it has mapped, and its staging buffers."""


def split_at_chunks(offset: int, nbytes: int) -> Iterator[tuple[int, int]]:
    """Yields (offset, bytes) of the pieces of a transfer, none of which crosses from one registration into the next."""
    end = offset + nbytes
    while offset < end:
        stop = min(end, (offset // PIN_CHUNK_BYTES + 1) * PIN_CHUNK_BYTES)
        yield offset, stop - offset
        offset = stop


class CudaRegistrar:
    """Pins with the CUDA driver (cuMemHostRegister), in the primary context of one device.

    Its threads are taken out of what a capture forbids (relaxed mode), so that not even a capture that begins during a call is
    disturbed by it.
    """

    _PORTABLE = 1
    _RELAXED = 2

    def __init__(self, device: int) -> None:
        """Raises PinError where there is no driver or no such device."""
        try:
            self._cuda = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise PinError(f"there is no CUDA driver: {error}") from error
        self._cuda.cuMemHostRegister_v2.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint]
        self._cuda.cuMemHostUnregister.argtypes = [ctypes.c_void_p]
        number, self._context = ctypes.c_int(), ctypes.c_void_p()
        self._check(self._cuda.cuInit(0), "cuInit")
        self._check(self._cuda.cuDeviceGet(ctypes.byref(number), device), "cuDeviceGet")
        self._check(
            self._cuda.cuDevicePrimaryCtxRetain(ctypes.byref(self._context), number), "cuDevicePrimaryCtxRetain"
        )

    def register(self, address: int, nbytes: int) -> None:
        """See Registrar."""
        self._enter()
        # "Already registered" is a refusal too: it would be what was mapped here before, and its pages are others.
        self._check(self._cuda.cuMemHostRegister_v2(address, nbytes, self._PORTABLE), "cuMemHostRegister")

    def unregister(self, address: int) -> None:
        """See Registrar."""
        self._enter()
        code = self._cuda.cuMemHostUnregister(address)
        if code:
            _log.warning("kvtier: cuMemHostUnregister failed with CUDA error %d", code)

    def _enter(self) -> None:
        mode = ctypes.c_int(self._RELAXED)
        self._cuda.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
        self._cuda.cuCtxSetCurrent(self._context)

    @staticmethod
    def _check(code: int, what: str) -> None:
        if code:
            raise PinError(f"{what} failed with CUDA error {code}")
