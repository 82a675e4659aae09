"""CUDA's driver over a fake libcuda (needs cuda-bindings) and on a GPU."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
from devices.backends import GpuBackend, make_backend

from kvtier.cuda.device.cuda_driver import CudaDriver
from kvtier.cuda.device.device_errors import Cause, DeviceError
from kvtier.cuda.device.driver_contract import MemoryKind
from kvtier.cuda.host.pinning import PIN_CHUNK_BYTES, PinError, Pinning
from kvtier.cuda.host.region import PAGE_BYTES, HostRegion


@pytest.fixture(params=["fake", pytest.param("gpu", marks=pytest.mark.gpu)])
def backend(request: pytest.FixtureRequest) -> Iterator[GpuBackend]:
    try:
        made = make_backend(request.param)
    except DeviceError as error:
        if request.param != "gpu" and error.cause is not Cause.NO_BINDINGS:
            raise  # the fake needs the package, and nothing else
        pytest.skip(str(error))
    assert isinstance(made, GpuBackend)
    yield made
    made.close()


def call(backend: GpuBackend, name: str, *arguments: object) -> int:
    """Calls one function of the driver in its context."""
    with backend.driver.in_context() as cuda:
        result = cuda.call(name, *arguments)
        return 0 if result is None else int(result)


def test_without_a_driver_there_is_a_reason() -> None:
    """The error names the cause, also if this repository's `cuda` hides NVIDIA's package."""
    program = (
        "from kvtier.cuda.device.cuda_driver import CudaDriver\n"
        "from kvtier.cuda.device.device_errors import Cause, DeviceError\n"
        "try:\n    CudaDriver()\n"
        "except DeviceError as error:\n    assert error.cause in {Cause.NO_BINDINGS, Cause.NO_DRIVER}, error.cause\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_devices_are_found_by_uuid(backend: GpuBackend) -> None:
    """The UUID of a device finds it. The error for an unknown device names it."""
    device = backend.driver.device
    again = CudaDriver(device)
    assert again.device == device
    again.close()
    for wanted in ("00000000-0000-0000-0000-000000000000", 1000):
        with pytest.raises(DeviceError, match=str(wanted)) as caught:
            CudaDriver(wanted)
        assert caught.value.cause is Cause.NO_DEVICE


def test_no_context_is_left_behind(backend: GpuBackend) -> None:
    """Between calls no context of the driver is current, so an engine's threads keep their own."""
    before = backend.driver._cuda.attempt("cuMemAlloc", 8)[0]
    backend.driver.destroy_stream(backend.driver.create_stream())
    assert backend.driver._cuda.attempt("cuMemAlloc", 8)[0] == before == "CUDA_ERROR_INVALID_CONTEXT"


def test_the_threads_capture_mode_is_restored(backend: GpuBackend) -> None:
    """B4.16 A call restores the thread's capture mode."""
    modes = backend.driver._api.CUstreamCaptureMode
    exchange = "cuThreadExchangeStreamCaptureMode"
    before = backend.driver._cuda.call(exchange, modes.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
    backend.driver.destroy_stream(backend.driver.create_stream())
    after = backend.driver._cuda.call(exchange, before)
    assert (before, after) == (modes.CU_STREAM_CAPTURE_MODE_GLOBAL, modes.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)


def test_a_closed_driver_does_nothing(backend: GpuBackend) -> None:
    """A closed driver raises CLOSED; other drivers of the same device still work."""
    other = CudaDriver(backend.driver.device)
    other.close()
    with pytest.raises(DeviceError) as caught:
        other.create_stream()
    assert caught.value.cause is Cause.CLOSED
    backend.driver.destroy_stream(backend.driver.create_stream())


def test_nothing_is_recorded_into_a_graph(backend: GpuBackend) -> None:
    """B4.16 During a capture of the stream, `record` raises CAPTURING and the capture continues."""
    driver = backend.driver
    stream, event = driver.create_stream(), driver.create_event(shared=True)
    mode = driver._api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
    call(backend, "cuStreamBeginCapture", stream, mode)
    with pytest.raises(DeviceError) as caught:
        driver.record(event, stream)
    assert caught.value.cause is Cause.CAPTURING
    assert driver.reached(event)
    call(backend, "cuStreamEndCapture", stream)
    driver.record(event, stream)
    driver.wait(event)
    driver.destroy_event(event)
    driver.destroy_stream(stream)


@pytest.mark.parametrize(
    ("name", "arguments", "kind"),
    [
        ("cuMemAlloc", (4096,), MemoryKind.SHAREABLE),
        ("cuMemAllocManaged", (4096, 1), MemoryKind.MANAGED),
        ("cuMemAllocAsync", (4096, 0), MemoryKind.POOL),
        ("cuMemAllocHost", (4096,), MemoryKind.HOST),
    ],
)
def test_kinds_of_memory_are_told_apart(
    backend: GpuBackend, name: str, arguments: tuple[int, ...], kind: MemoryKind
) -> None:
    """The driver reports the kind of an allocation, which decides whether it can be shared."""
    at = call(backend, name, *arguments)
    assert backend.driver.allocation_of(at + 8).kind is kind
    call(backend, "cuMemFreeHost" if kind is MemoryKind.HOST else "cuMemFree", at)


def copied(backend: GpuBackend, copy: Callable[..., None]) -> bytes:
    """The device's bytes after a copy of three pieces in another order."""
    driver = backend.driver
    at, stream, event = backend.allocate(PAGE_BYTES), driver.create_stream(), driver.create_event()
    source = ctypes.create_string_buffer(b"abcdefghijklmnopqrstuvwx", 24)
    start = ctypes.addressof(source)
    copy(stream, [at + 16, at, at + 8], [start, start + 8, start + 16], [8, 8, 8])
    driver.record(event, stream)
    driver.wait(event)
    found = backend.read(at, 24)
    driver.destroy_event(event)
    driver.destroy_stream(stream)
    backend.free(at)
    return found


def test_copies_are_the_same_without_batches(backend: GpuBackend) -> None:
    """A driver before CUDA 12.8 copies the pieces one by one."""
    assert backend.driver._batch is not None
    assert copied(backend, backend.driver.copy) == b"ijklmnopqrstuvwxabcdefgh"
    backend.driver._batch = None
    assert copied(backend, backend.driver.copy) == b"ijklmnopqrstuvwxabcdefgh"


@pytest.mark.parametrize("backend", ["fake"], indirect=True)
def test_a_refused_batch_says_which_copy(backend: GpuBackend) -> None:
    """The error of a driver names the call, the failed copy (if known) and the code."""
    at, stream, event = backend.allocate(PAGE_BYTES), backend.driver.create_stream(), backend.driver.create_event()
    with pytest.raises(DeviceError, match=r"cuMemcpyBatchAsync \(copy 1 of 2\): CUDA_ERROR_INVALID_VALUE") as caught:
        backend.driver.copy(stream, [at, at], [at + 64, at + 128], [1, 0])
    assert caught.value.cause is Cause.REFUSED
    backend.driver.record(event, stream)
    backend.driver.wait(event)  # copy 0 was started
    backend.driver.destroy_event(event)
    backend.driver.destroy_stream(stream)
    backend.free(at)


def test_pinning_with_the_driver(backend: GpuBackend) -> None:
    """A driver pins a region by chunks.

    Pinning twice is refused; unpinning an unpinned chunk does nothing.
    """
    with HostRegion.create(PIN_CHUNK_BYTES + PAGE_BYTES) as region:
        pinning = Pinning(region, backend.driver, allowed=lambda: True)
        assert pinning.pin(PIN_CHUNK_BYTES, PAGE_BYTES)
        with pytest.raises(PinError):
            backend.driver.register(region.address + PIN_CHUNK_BYTES, PAGE_BYTES)
        pinning.close()
        backend.driver.unregister(region.address)
