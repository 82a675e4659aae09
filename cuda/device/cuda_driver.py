"""Driver of an NVIDIA GPU.

**Unproven: not yet run on a GPU** (evidence: docs/decisions/0013-cuda-ipc.md). All calls use the
device's primary context, which torch uses too. The context is current only during a call. During a
call the thread is in relaxed capture mode, because in other modes CUDA would refuse the call while
another thread captures a graph. No call uses a stream that is being captured.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import uuid
from array import array
from collections.abc import Iterator, Sequence
from typing import Any, Final

from ..host.pinning import PinError
from .cuda_library import BatchCopy, CudaLibrary
from .device_errors import Cause, DeviceError
from .driver_contract import HANDLE_BYTES, Allocation, EventId, MemoryKind, StreamId

__all__ = ["CudaDriver"]

_log = logging.getLogger(__name__)

_REGISTER: Final = 1 | 2  # CU_MEMHOSTREGISTER_PORTABLE, _DEVICEMAP


class CudaDriver:
    """`Driver` of one GPU; ``device`` is a UUID or an ordinal among the visible devices.

    Raises DeviceError (NO_BINDINGS, NO_DRIVER, NO_DEVICE).
    """

    def __init__(self, device: str | int = 0) -> None:
        self._cuda = CudaLibrary()
        self._api = self._cuda.api
        self._number, self.device = self._find(device)
        self._context = self._cuda.call("cuDevicePrimaryCtxRetain", self._number)
        self._closed = False
        self._relaxed = self._api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        self._batch: BatchCopy | None = None
        with contextlib.suppress(DeviceError):
            self._batch = BatchCopy(self._cuda)

    def _find(self, wanted: str | int) -> tuple[Any, str]:
        seen = {}
        for ordinal in range(self._cuda.call("cuDeviceGetCount")):
            number = self._cuda.call("cuDeviceGet", ordinal)
            # Only _v2 returns a UUID per MIG instance. In newer bindings cuDeviceGetUuid is _v2.
            name = "cuDeviceGetUuid_v2" if hasattr(self._api, "cuDeviceGetUuid_v2") else "cuDeviceGetUuid"
            device = str(uuid.UUID(bytes=bytes(self._cuda.call(name, number).bytes)))
            if wanted in (ordinal, device):
                return number, device
            seen[ordinal] = device
        raise DeviceError(Cause.NO_DEVICE, f"{wanted} is not among {list(seen.values())}")

    @contextlib.contextmanager
    def in_context(self) -> Iterator[CudaLibrary]:
        """Enters the context and relaxed capture mode; raises DeviceError (CLOSED) if closed."""
        if self._closed:
            raise DeviceError(Cause.CLOSED)
        self._cuda.call("cuCtxPushCurrent", self._context)
        try:
            before = self._cuda.call("cuThreadExchangeStreamCaptureMode", self._relaxed)
            try:
                yield self._cuda
            finally:
                self._cuda.call("cuThreadExchangeStreamCaptureMode", before)
        finally:
            self._cuda.call("cuCtxPopCurrent")

    def allocation_of(self, address: int) -> Allocation:
        with self.in_context() as cuda:
            code, results = cuda.attempt("cuMemGetAddressRange", address)
            if code == "CUDA_SUCCESS":
                return Allocation(int(results[0]), int(results[1]), self._kind(cuda, address))
        raise DeviceError(Cause.UNKNOWN_MEMORY, f"cuMemGetAddressRange of {address:#x}: {code}")

    def _kind(self, cuda: CudaLibrary, address: int) -> MemoryKind:
        def ask(name: str) -> int:
            attribute = getattr(self._api.CUpointer_attribute, f"CU_POINTER_ATTRIBUTE_{name}")
            return int(cuda.call("cuPointerGetAttribute", attribute, address))

        if ask("IS_MANAGED"):
            return MemoryKind.MANAGED
        if ask("MEMORY_TYPE") == int(self._api.CUmemorytype.CU_MEMORYTYPE_HOST):
            return MemoryKind.HOST
        if ask("MEMPOOL_HANDLE"):
            return MemoryKind.POOL
        return MemoryKind.SHAREABLE if ask("IS_LEGACY_CUDA_IPC_CAPABLE") else MemoryKind.VMM

    def export_memory(self, base: int) -> bytes:
        with self.in_context() as cuda:
            return ctypes.string_at(cuda.call("cuIpcGetMemHandle", base).getPtr(), HANDLE_BYTES)

    def open_memory(self, handle: bytes) -> int:
        lazily = self._api.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        return int(self._open("cuIpcOpenMemHandle", self._api.CUipcMemHandle(), handle, int(lazily)))

    def _open(self, function: str, empty: Any, handle: bytes, *flags: int) -> Any:
        """Opens a handle. Raises CANNOT_OPEN for every error of the driver except BROKEN."""
        if len(handle) != HANDLE_BYTES:
            raise DeviceError(Cause.CANNOT_OPEN, f"the handle has {len(handle)} bytes, not {HANDLE_BYTES}")
        ctypes.memmove(empty.getPtr(), handle, HANDLE_BYTES)
        with self.in_context() as cuda:
            code, results = cuda.attempt(function, empty, *flags)
        if code == "CUDA_SUCCESS":
            return results[0]
        error = cuda.error(function, code)
        raise error if error.cause is Cause.BROKEN else DeviceError(Cause.CANNOT_OPEN, error.detail)

    def close_memory(self, address: int) -> None:
        with self.in_context() as cuda:
            cuda.call("cuIpcCloseMemHandle", address)

    def create_event(self, *, shared: bool = False) -> EventId:
        flags = self._api.CUevent_flags
        kind = flags.CU_EVENT_INTERPROCESS if shared else flags.CU_EVENT_BLOCKING_SYNC
        with self.in_context() as cuda:
            return EventId(int(cuda.call("cuEventCreate", int(flags.CU_EVENT_DISABLE_TIMING) | int(kind))))

    def export_event(self, event: EventId) -> bytes:
        with self.in_context() as cuda:
            return ctypes.string_at(cuda.call("cuIpcGetEventHandle", event).getPtr(), HANDLE_BYTES)

    def open_event(self, handle: bytes) -> EventId:
        return EventId(int(self._open("cuIpcOpenEventHandle", self._api.CUipcEventHandle(), handle)))

    def destroy_event(self, event: EventId) -> None:
        with self.in_context() as cuda:
            cuda.call("cuEventDestroy", event)

    def record(self, event: EventId, stream: StreamId) -> None:
        with self.in_context() as cuda:
            self._require_no_capture(cuda, stream)
            cuda.call("cuEventRecord", event, stream)

    def _require_no_capture(self, cuda: CudaLibrary, stream: StreamId) -> None:
        """Raises CAPTURING in a graph capture, when CUDA records the event only at each replay."""
        status = cuda.call("cuStreamIsCapturing", stream)
        if status != self._api.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE:
            raise DeviceError(Cause.CAPTURING, status.name)

    def reached(self, event: EventId) -> bool:
        with self.in_context() as cuda:
            code, _ = cuda.attempt("cuEventQuery", event)
        if code in {"CUDA_SUCCESS", "CUDA_ERROR_NOT_READY"}:
            return code == "CUDA_SUCCESS"
        raise cuda.error("cuEventQuery", code)

    def wait(self, event: EventId) -> None:
        with self.in_context() as cuda:
            cuda.call("cuEventSynchronize", event)

    def create_stream(self) -> StreamId:
        flags = self._api.CUstream_flags.CU_STREAM_NON_BLOCKING
        with self.in_context() as cuda:
            lowest, _ = cuda.call("cuCtxGetStreamPriorityRange")
            return StreamId(int(cuda.call("cuStreamCreateWithPriority", int(flags), lowest)))

    def destroy_stream(self, stream: StreamId) -> None:
        with self.in_context() as cuda:
            cuda.call("cuStreamDestroy", stream)

    def copy(self, stream: StreamId, destinations: Sequence[int], sources: Sequence[int], sizes: Sequence[int]) -> None:
        if not len(destinations) == len(sources) == len(sizes):
            raise ValueError("destinations, sources and sizes differ in number")
        with self.in_context() as cuda:
            if self._batch is not None and sizes:
                self._batch(stream, *(_as_array(part) for part in (destinations, sources, sizes)))
                return
            for destination, source, size in zip(destinations, sources, sizes, strict=True):
                cuda.call("cuMemcpyAsync", destination, source, size, stream)

    def register(self, address: int, nbytes: int) -> None:
        try:
            with self.in_context() as cuda:
                cuda.call("cuMemHostRegister", address, nbytes, _REGISTER)
        except DeviceError as error:
            raise PinError(str(error)) from error

    def unregister(self, address: int) -> None:
        try:
            with self.in_context() as cuda:
                cuda.call("cuMemHostUnregister", address)
        except DeviceError as error:
            _log.warning("kvtier: host memory stays pinned: %s", error)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._cuda.call("cuDevicePrimaryCtxRelease", self._number)


def _as_array(numbers: Sequence[int]) -> array[int]:
    return numbers if isinstance(numbers, array) and numbers.typecode == "Q" else array("Q", numbers)
