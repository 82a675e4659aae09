"""Pinning of host memory with the GPU's driver, so that copies use DMA and overlap with compute.

A region is pinned chunk by chunk on a background thread, because one call for 94 GB would delay an
engine by 12 seconds. Until a chunk is pinned, copies to and from this chunk are slower.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Protocol, TypeAlias

__all__ = [
    "PIN_CHUNK_BYTES",
    "CudaRegistrar",
    "Pin",
    "PinError",
    "Pinnable",
    "Pinning",
    "RefusedRegistrar",
    "Registrar",
    "split_at_chunks",
]

_log = logging.getLogger(__name__)

PIN_CHUNK_BYTES = 64 << 20
"""Bytes that one call pins, in about 10 ms. A copy must not cross a boundary of chunks."""


class PinError(Exception):
    """The driver cannot pin this memory; the message is for operators."""


class Pinnable(Protocol):
    """Page-aligned memory: a region or a staging buffer."""

    @property
    def address(self) -> int: ...

    @property
    def size_bytes(self) -> int: ...


class Registrar(Protocol):
    """A driver's calls for pinning; they may take milliseconds."""

    def register(self, address: int, nbytes: int) -> None:
        """Pins whole pages. Raises PinError."""

    def unregister(self, address: int) -> None:
        """Undoes ``register(address, …)``. Never raises."""


class RefusedRegistrar:
    """Registrar of a process whose driver cannot be used: refuses all memory with the cause."""

    def __init__(self, cause: PinError) -> None:
        self._cause = str(cause)

    def register(self, address: int, nbytes: int) -> None:
        raise PinError(self._cause)

    def unregister(self, address: int) -> None:
        """Does nothing, because no memory is registered."""


class Pinning:
    """The pinned chunks of one mapping of a region, or of other memory.

    ``allowed()`` tells whether the driver may be called now. It is false while the engine captures
    CUDA graphs, because a call would abort the capture.
    """

    def __init__(self, memory: Pinnable, registrar: Registrar, allowed: Callable[[], bool]) -> None:
        self._memory = memory
        self._registrar = registrar
        self._allowed = allowed
        self._lock = threading.Lock()
        self._pinned: dict[int, int] = {}
        self._refused = False
        self._closed = False

    def pin(self, offset: int, length: int) -> bool:
        """Pins a range that crosses no multiple of PIN_CHUNK_BYTES. Allocates missing pages.

        Returns False if the range cannot be pinned now and the caller must try again, else True.
        Raises PinError if the driver refuses, and ValueError if the range is not in one chunk.
        """
        end = offset + length
        if not 0 <= offset < end <= min(self._memory.size_bytes, (offset // PIN_CHUNK_BYTES + 1) * PIN_CHUNK_BYTES):
            raise ValueError(f"offset {offset} and length {length} are not in one chunk of the memory")
        with self._lock:
            if offset not in self._pinned and not self._refused:
                if self._closed or not self._allowed():
                    return False
                self._registrar.register(self._memory.address + offset, length)
                self._pinned[offset] = length
            return True

    def abandon(self) -> None:
        """Pins no more chunks, because the driver refused one. Pinned chunks stay pinned."""
        self._refused = True

    def close(self) -> None:
        """Unpins all chunks. Call this before the memory is unmapped, when no copy uses it."""
        with self._lock:
            self._closed = True
            for offset in self._pinned:
                self._registrar.unregister(self._memory.address + offset)
            self._pinned.clear()


Pin: TypeAlias = Callable[[Pinnable], Pinning]
"""Makes the `Pinning` of mapped regions and staging buffers in a process that has a GPU."""


def split_at_chunks(offset: int, nbytes: int) -> Iterator[tuple[int, int]]:
    """Splits a transfer at chunk boundaries; yields (offset, bytes)."""
    end = offset + nbytes
    while offset < end:
        stop = min(end, (offset // PIN_CHUNK_BYTES + 1) * PIN_CHUNK_BYTES)
        yield offset, stop - offset
        offset = stop


class CudaRegistrar:
    """Pins with the CUDA driver (cuMemHostRegister), in the primary context of one device.

    The calling thread switches to relaxed capture mode, so the call does not abort a graph capture
    that begins meanwhile. Raises PinError if there is no driver or no such device.
    """

    _PORTABLE = 1
    _RELAXED = 2

    def __init__(self, device: int) -> None:
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
        self._enter()
        # "Already registered" is an error too: it means that an earlier mapping is still registered
        # at this address.
        self._check(self._cuda.cuMemHostRegister_v2(address, nbytes, self._PORTABLE), "cuMemHostRegister")

    def unregister(self, address: int) -> None:
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
