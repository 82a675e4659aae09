"""A kernel for copies too small for the copy engines: warps read and write pinned host memory themselves.

**Unproven: no GPU has run this yet, and nothing uses it unless it is configured.** vLLM's measurements (H100, PCIe 5) have such a
kernel ahead below some 28 KiB per copy, in batches of 16 or more. Against it: a kernel of this process and those of the engine take
turns on the device, a time slice each, unless both run under MPS; copies of the copy engines do not. So: measure, then configure.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

from .cuda_driver import CudaDriver
from .cuda_library import CudaLibrary, import_bindings
from .device_errors import Cause, DeviceError
from .driver import EventId, StreamId

__all__ = ["KERNEL_SOURCE", "KernelCopier"]

KERNEL_SOURCE: Final = r"""
struct Copy { unsigned long long destination, source, bytes; };

template <typename Word>
__device__ void move(const Copy &copy) {
    const Word *source = reinterpret_cast<const Word *>(copy.source);
    Word *destination = reinterpret_cast<Word *>(copy.destination);
    for (unsigned long long word = threadIdx.x; word < copy.bytes / sizeof(Word); word += blockDim.x)
        destination[word] = source[word];
}

extern "C" __global__ void kvtier_copy(const Copy *copies, unsigned int count) {
    for (unsigned int index = blockIdx.x; index < count; index += gridDim.x) {
        const Copy copy = copies[index];
        const unsigned long long odd = copy.destination | copy.source | copy.bytes;
        if (odd % 16 == 0) move<uint4>(copy);
        else if (odd % 4 == 0) move<unsigned int>(copy);
        else move<unsigned char>(copy);
    }
}
"""

_NAME: Final = b"kvtier_copy"
_THREADS: Final = 256
_BLOCKS: Final = 12
"""How many multiprocessors it takes from the engine at most; vLLM found 12 of an H100's 132 within 5 % of the best."""
_ROW_BYTES: Final = 24


class KernelCopier:
    """A `device_copies.Method`. Raises DeviceError where the kernel cannot be compiled, or the device cannot use host addresses.

    ``region`` is where host memory is: (address, bytes). ``pinned`` says whether a piece of it is pinned (`Pinning.covers`): for a
    kernel any other address is the end of the context, so a batch that is not pinned throughout goes the driver's way.
    """

    def __init__(self, driver: CudaDriver, region: tuple[int, int], pinned: Callable[[int, int], bool]) -> None:
        self._driver = driver
        self._host = range(region[0], region[0] + region[1])
        self._pinned = pinned
        self._lock = threading.Lock()
        self._tables: list[tuple[int, int, EventId]] = []  # address, rows, the end of the last launch that reads it
        with driver.entered() as cuda:
            self._demand_host_addresses(cuda)
            self._module = cuda.call("cuModuleLoadData", _compiled(cuda))
            self._function = cuda.call("cuModuleGetFunction", self._module, _NAME)

    def _demand_host_addresses(self, cuda: CudaLibrary) -> None:
        attribute = cuda.api.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM
        if not cuda.call("cuDeviceGetAttribute", attribute, cuda.call("cuCtxGetDevice")):
            raise DeviceError(Cause.REFUSED, "the device cannot use the host's addresses")

    def copy(self, stream: StreamId, destinations: Sequence[int], sources: Sequence[int], sizes: Sequence[int]) -> None:
        """See `Driver.copy`."""
        rows = list(zip(destinations, sources, sizes, strict=True))
        if not all(self._usable(to, size) and self._usable(start, size) for to, start, size in rows):
            self._driver.copy(stream, destinations, sources, sizes)
            return
        with self._lock, self._driver.entered() as cuda:
            address, capacity, event = self._table(cuda, len(rows))
            words = [word for row in rows for word in row]
            ctypes.memmove(address, (ctypes.c_uint64 * len(words))(*words), _ROW_BYTES * len(rows))
            arguments = ((address, len(rows)), (ctypes.c_void_p, ctypes.c_uint))
            shape = (min(_BLOCKS, len(rows)), 1, 1, _THREADS, 1, 1, 0)
            cuda.call("cuLaunchKernel", self._function, *shape, stream, arguments, 0)
            self._driver.record(event, stream)
            # Not after an error: then nobody knows whether a launch still reads the table.
            self._tables.append((address, capacity, event))

    def _usable(self, address: int, nbytes: int) -> bool:
        return address not in self._host or self._pinned(address, nbytes)

    def _table(self, cuda: CudaLibrary, rows: int) -> tuple[int, int, EventId]:
        """Pinned memory for the list of copies: one that no launch reads any more, or a new one."""
        for index, (_, capacity, event) in enumerate(self._tables):
            if capacity >= rows and self._driver.reached(event):
                return self._tables.pop(index)
        capacity = max(1024, 1 << (rows - 1).bit_length())
        address = int(cuda.call("cuMemAllocHost", capacity * _ROW_BYTES))
        return address, capacity, self._driver.create_event()

    def close(self) -> None:
        """Gives up kernel and tables; when nothing is under way."""
        with self._lock, self._driver.entered() as cuda:
            for address, _, event in self._tables:
                self._driver.wait(event)
                self._driver.destroy_event(event)
                cuda.call("cuMemFreeHost", address)
            self._tables.clear()
            cuda.call("cuModuleUnload", self._module)


def _compiled(cuda: CudaLibrary) -> bytes:
    """The kernel's machine code for the current device, by NVRTC (a package of its own, which torch brings along)."""
    nvrtc = import_bindings("nvrtc")
    attributes = cuda.api.CUdevice_attribute
    device = cuda.call("cuCtxGetDevice")
    major, minor = (
        cuda.call("cuDeviceGetAttribute", getattr(attributes, f"CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_{part}"), device)
        for part in ("MAJOR", "MINOR")
    )
    program = _ask(nvrtc.nvrtcCreateProgram, KERNEL_SOURCE.encode(), b"kvtier_copy.cu", 0, [], [])
    try:
        _ask(nvrtc.nvrtcCompileProgram, program, 1, [f"--gpu-architecture=sm_{major}{minor}".encode()])
        code = bytes(_ask(nvrtc.nvrtcGetCUBINSize, program))
        _ask(nvrtc.nvrtcGetCUBIN, program, code)  # which fills the bytes that it is given
        return code
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _ask(function: Callable[..., tuple[Any, ...]], *arguments: object) -> Any:
    try:
        code, *results = function(*arguments)
    except RuntimeError as error:  # NVRTC is a library of its own
        raise DeviceError(Cause.REFUSED, f"no NVRTC: {error}") from error
    if int(code):
        raise DeviceError(Cause.REFUSED, f"NVRTC: {code.name}")
    return results[0] if results else None
