"""Back ends for tests: a driver, device memory, and streams that can be held."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any, Protocol

from devices import fake_cuda
from kvtier.cuda.device.cuda_driver import CudaDriver
from kvtier.cuda.device.device_errors import Cause, DeviceError
from kvtier.cuda.device.driver_contract import Driver, StreamId
from kvtier.cuda.testing.host_driver import HostDriver

__all__ = ["Backend", "GpuBackend", "HostBackend", "make_backend"]


class Backend(Protocol):
    """A driver, with the calls of engines and kernels."""

    name: str
    driver: Driver

    def allocate(self, nbytes: int) -> int: ...

    def free(self, address: int) -> None: ...

    def write(self, address: int, data: bytes) -> None: ...

    def read(self, address: int, nbytes: int) -> bytes: ...

    def hold(self, stream: StreamId) -> Callable[[], None]:
        """Keeps a stream busy, as a kernel does, until the returned function is called."""
        ...

    def close(self) -> None:
        """Releases held streams and closes the driver."""


class HostBackend:
    name = "host"

    def __init__(self) -> None:
        self.pace: Callable[[], None] = lambda: None
        self.driver = HostDriver(pace=self._keep_pace)
        self._held: list[threading.Event] = []

    def _keep_pace(self) -> None:
        self.pace()  # its value at the time of the call

    def allocate(self, nbytes: int) -> int:
        return self.driver.allocate(nbytes)

    def free(self, address: int) -> None:
        self.driver.free(address)

    def write(self, address: int, data: bytes) -> None:
        ctypes.memmove(address, data, len(data))

    def read(self, address: int, nbytes: int) -> bytes:
        return ctypes.string_at(address, nbytes)

    def hold(self, stream: StreamId) -> Callable[[], None]:
        done = threading.Event()
        self._held.append(done)
        self.driver._streams[stream].submit(lambda: assert_true(done.wait(60)))
        return done.set

    def close(self) -> None:
        for done in self._held:
            done.set()
        self.driver.close()


def assert_true(value: bool) -> None:  # noqa: FBT001
    assert value


class GpuBackend:
    """CUDA.

    A device, or the stand-in for one. A stream is held up by making it wait for a word in pinned
    host memory.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        if name == "fake":
            fake_cuda.load()
        elif fake_cuda.is_loaded():
            raise DeviceError(Cause.NO_DRIVER, "this process has the stand-in")
        self.driver = CudaDriver()
        self._words: list[tuple[int, Any]] = []

    def _call(self, name: str, *arguments: object) -> Any:
        with self.driver.in_context() as cuda:
            return cuda.call(name, *arguments)

    def allocate(self, nbytes: int) -> int:
        return int(self._call("cuMemAlloc", nbytes))

    def free(self, address: int) -> None:
        self._call("cuMemFree", address)

    def write(self, address: int, data: bytes) -> None:
        self._call("cuMemcpyHtoD", address, data, len(data))

    def read(self, address: int, nbytes: int) -> bytes:
        buffer = ctypes.create_string_buffer(nbytes)
        self._call("cuMemcpyDtoH", ctypes.addressof(buffer), address, nbytes)
        return buffer.raw

    def hold(self, stream: StreamId) -> Callable[[], None]:
        at = int(self._call("cuMemAllocHost", 8))
        word = ctypes.c_uint64.from_address(at)
        word.value = 0
        self._words.append((at, word))
        device = int(self._call("cuMemHostGetDevicePointer", at, 0))
        self._call("cuStreamWaitValue64", stream, device, 1, 0)  # until the word is 1 or more
        return lambda: setattr(word, "value", 1)

    def close(self) -> None:
        for _, word in self._words:
            word.value = 1
        for at, _ in self._words:
            self._call("cuMemFreeHost", at)
        self._words.clear()
        self.driver.close()


def make_backend(name: str) -> Backend:
    """The back end of that name. Raises DeviceError if it is unavailable."""
    return HostBackend() if name == "host" else GpuBackend(name)
