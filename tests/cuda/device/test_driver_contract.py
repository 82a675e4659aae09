"""Contract of every driver, between two processes: the host driver, and a GPU if there is one."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import pytest
from devices.backends import Backend, HostBackend
from devices.engine import Engine
from devices.kv import LAYOUTS, Kv
from harness.polling import wait_until

from kvtier.cuda.device.device_errors import Cause, DeviceError
from kvtier.cuda.device.driver_contract import HANDLE_BYTES, MemoryKind
from kvtier.cuda.host.region import PAGE_BYTES, HostRegion

StartEngine = Callable[[Kv], Engine]

JOINED = LAYOUTS["all layers of a block together"]
SIZE = JOINED.tensors(0)[0].nbytes


@pytest.fixture
def host() -> HostBackend:
    return HostBackend()


def test_opened_memory_is_the_engines(backend: Backend, start_engine: StartEngine) -> None:
    """Each process reads what the other writes to the device."""
    engine = start_engine(JOINED)
    assert engine.export.device == backend.driver.device
    at = backend.driver.open_memory(engine.export.allocations[0].handle)
    assert backend.read(at, SIZE) == engine.expected(0)
    backend.write(at, engine.expected(1))
    assert engine.contents() == engine.expected(1)
    backend.driver.close_memory(at)


def test_opened_memory_is_an_allocation(backend: Backend, start_engine: StartEngine) -> None:
    """The driver knows the size of opened memory, so the engine's claim is not needed."""
    export = start_engine(JOINED).export
    at = backend.driver.open_memory(export.allocations[0].handle)
    found = backend.driver.allocation_of(at + 100)
    assert (found.base, found.nbytes) == (at, export.allocations[0].nbytes)
    backend.driver.close_memory(at)


def test_a_handle_that_is_open_is_mapped_once(backend: Backend, start_engine: StartEngine) -> None:
    """A handle that is opened twice is mapped once, until it is closed twice."""
    engine = start_engine(JOINED)
    handle = engine.export.allocations[0].handle
    at = backend.driver.open_memory(handle)
    assert backend.driver.open_memory(handle) == at
    backend.driver.close_memory(at)
    assert backend.read(at, SIZE) == engine.expected(0)
    backend.driver.close_memory(at)
    with pytest.raises(DeviceError):
        backend.driver.close_memory(at)


def test_a_mapping_outlives_its_exporter(backend: Backend, start_engine: StartEngine) -> None:
    """Opened memory stays mapped after SIGKILL of the engine."""
    engine = start_engine(JOINED)
    at = backend.driver.open_memory(engine.export.allocations[0].handle)
    engine.kill()
    assert backend.read(at, SIZE) == engine.expected(0)
    backend.driver.close_memory(at)


def test_a_dead_processs_handle_cannot_be_opened(backend: Backend, start_engine: StartEngine) -> None:
    """A handle of a dead process cannot be opened."""
    engine = start_engine(JOINED)
    engine.kill()
    with pytest.raises(DeviceError) as caught:
        backend.driver.open_memory(engine.export.allocations[0].handle)
    assert caught.value.cause is Cause.CANNOT_OPEN


def test_freed_memory_cannot_be_opened(backend: Backend, start_engine: StartEngine) -> None:
    """A handle is for one allocation, not for a later one at its address."""
    engine = start_engine(JOINED)
    engine.tell("free", 0)
    with pytest.raises(DeviceError) as caught:
        backend.driver.open_memory(engine.export.allocations[0].handle)
    assert caught.value.cause is Cause.CANNOT_OPEN


@pytest.mark.parametrize("handle", [bytes(HANDLE_BYTES), b"short"])
def test_nonsense_cannot_be_opened(backend: Backend, handle: bytes) -> None:
    """Invalid handles are refused, for memory and for events."""
    for open_it in (backend.driver.open_memory, backend.driver.open_event):
        with pytest.raises(DeviceError) as caught:
            open_it(handle)
        assert caught.value.cause is Cause.CANNOT_OPEN


def test_a_process_cannot_open_its_own_memory(backend: Backend) -> None:
    at = backend.allocate(PAGE_BYTES)
    assert backend.driver.export_memory(at) == backend.driver.export_memory(at)
    with pytest.raises(DeviceError) as caught:
        backend.driver.open_memory(backend.driver.export_memory(at))
    assert caught.value.cause is Cause.CANNOT_OPEN
    backend.free(at)


def test_allocations_are_found_by_any_address_in_them(backend: Backend) -> None:
    """Any address inside of an allocation finds its base and size; others find nothing."""
    at = backend.allocate(PAGE_BYTES)
    found = backend.driver.allocation_of(at + 17)
    assert (found.base, found.kind) == (at, MemoryKind.SHAREABLE)
    assert found.nbytes >= PAGE_BYTES
    backend.free(at)
    with pytest.raises(DeviceError) as caught:
        backend.driver.allocation_of(at)
    assert caught.value.cause is Cause.UNKNOWN_MEMORY


def test_events_are_reached_in_the_order_of_their_stream(backend: Backend) -> None:
    """An event counts as reached until recorded, and again when its stream reaches the record."""
    driver = backend.driver
    stream, event = driver.create_stream(), driver.create_event()
    assert driver.reached(event)
    release = backend.hold(stream)
    driver.record(event, stream)
    assert not driver.reached(event)
    release()
    driver.wait(event)
    assert driver.reached(event)
    driver.destroy_event(event)
    driver.destroy_stream(stream)


def test_an_event_is_destroyed_before_it_is_reached(backend: Backend) -> None:
    """An engine may end after its last mark: the stream continues and writes nowhere."""
    driver = backend.driver
    stream, event, other = driver.create_stream(), driver.create_event(), driver.create_event()
    release = backend.hold(stream)
    for _ in range(2):
        driver.record(event, stream)
    driver.record(other, stream)
    driver.destroy_event(event)
    release()
    driver.wait(other)
    driver.destroy_event(other)
    driver.destroy_stream(stream)


def test_a_back_end_is_closed_while_a_stream_is_held_up(backend: Backend) -> None:
    """After a failed test a stream may still be held; closing must not hang."""
    backend.hold(backend.driver.create_stream())
    backend.close()


def test_an_engines_event_is_seen(backend: Backend, start_engine: StartEngine) -> None:
    """An event that the engine records after its compute is reached when the compute ends."""
    engine = start_engine(JOINED)
    event = backend.driver.open_event(engine.export.events[0])
    for seed in (1, 2):
        engine.tell("compute", 0)
        assert not backend.driver.reached(event)
        engine.tell("finish", seed)
        wait_until(lambda: backend.driver.reached(event))
    backend.driver.destroy_event(event)


def test_copies_are_made_in_both_directions(backend: Backend, region: HostRegion) -> None:
    """A batch copies each piece, out and in, with pinned and with unpinned memory."""
    driver = backend.driver
    at, stream, event = backend.allocate(PAGE_BYTES), driver.create_stream(), driver.create_event()
    driver.register(region.address, PAGE_BYTES)
    for start in (region.address, region.address + PAGE_BYTES):
        ctypes.memmove(start, b"0123456789abcdef", 16)
        driver.copy(stream, [at + 8, at], [start, start + 8], [8, 8])
        driver.copy(stream, [start + 32, start + 40], [at, at + 8], [4, 8])
        driver.record(event, stream)
        driver.wait(event)
        assert ctypes.string_at(start + 32, 16) == b"89ab" + bytes(4) + b"01234567"
    driver.unregister(region.address)
    driver.destroy_event(event)
    driver.destroy_stream(stream)
    backend.free(at)


def test_a_batch_is_of_one_length(backend: Backend) -> None:
    stream = backend.driver.create_stream()
    with pytest.raises(ValueError, match="differ"):
        backend.driver.copy(stream, [1], [1, 2], [1])
    backend.driver.destroy_stream(stream)


def test_closing_twice_is_harmless(backend: Backend) -> None:
    backend.driver.close()
    backend.driver.close()


@pytest.mark.parametrize("kind", [kind for kind in MemoryKind if kind.obstacle])
def test_memory_that_cannot_be_shared(host: HostBackend, kind: MemoryKind) -> None:
    """The driver refuses to export it and reports its kind."""
    at = host.driver.allocate(PAGE_BYTES, kind)
    assert host.driver.allocation_of(at).kind is kind
    with pytest.raises(DeviceError):
        host.driver.export_memory(at)
    host.close()


@pytest.mark.usefixtures("no_leaks")
def test_memory_used_after_it_was_closed_breaks_the_context(host: HostBackend, region: HostRegion) -> None:
    """As on a GPU, the copy and all later calls fail.

    Closing the driver ends events that are never reached.
    """
    kv = LAYOUTS["all layers of a block together"]
    engine = Engine("host", kv)
    at = host.driver.open_memory(engine.export.allocations[0].handle)
    engine.kill()
    stream, event, destroyed = host.driver.create_stream(), host.driver.create_event(), host.driver.create_event()
    release = host.hold(stream)
    host.driver.copy(stream, [region.address], [at], [8])
    for recorded in (event, destroyed):
        host.driver.record(recorded, stream)
    host.driver.destroy_event(destroyed)
    host.driver.close_memory(at)
    release()
    with pytest.raises(DeviceError, match="illegal address") as caught:
        host.driver.wait(event)
    assert caught.value.cause is Cause.BROKEN
    with pytest.raises(DeviceError):
        host.driver.create_stream()
    host.close()


@pytest.mark.usefixtures("no_leaks")
def test_the_host_back_end_leaves_nothing_behind() -> None:
    mapped = _mapped_devices()
    host = HostBackend()
    engine = Engine("host", JOINED)
    host.driver.open_memory(engine.export.allocations[0].handle)
    host.driver.close_memory(host.driver.open_memory(engine.export.allocations[0].handle))
    host.driver.open_event(engine.export.events[0])
    host.driver.create_stream()
    host.driver.allocate(PAGE_BYTES)
    engine.kill()
    host.close()
    assert _mapped_devices() <= mapped


def _mapped_devices() -> set[str]:
    """The mappings of host devices; other tests of this process may have some."""
    return {line for line in Path("/proc/self/maps").read_text().splitlines() if "kvtier-device" in line}
