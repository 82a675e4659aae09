"""What every driver promises, between two processes: on a GPU where there is one, and on the host back end everywhere."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import pytest
from devices.backends import Backend, HostBackend
from devices.engine import Engine
from devices.kv import LAYOUTS, Kv
from harness.long_timeouts import wait_until

from kvtier.cuda.device.device_errors import Cause, DeviceError
from kvtier.cuda.device.driver import HANDLE_BYTES, MemoryKind
from kvtier.cuda.host.region import PAGE_BYTES, HostRegion

StartEngine = Callable[[Kv], Engine]

JOINED = LAYOUTS["all layers of a block together"]
SIZE = JOINED.tensors(0)[0].nbytes


@pytest.fixture
def host() -> HostBackend:
    """The back end that can be made to fail."""
    return HostBackend()


def test_opened_memory_is_the_engines(backend: Backend, start_engine: StartEngine) -> None:
    """What one process has on the device another one reads and writes."""
    engine = start_engine(JOINED)
    assert engine.export.device == backend.driver.device
    at = backend.driver.open_memory(engine.export.allocations[0].handle)
    assert backend.read(at, SIZE) == engine.expected(0)
    backend.write(at, engine.expected(1))
    assert engine.contents() == engine.expected(1)
    backend.driver.close_memory(at)


def test_opened_memory_is_an_allocation(backend: Backend, start_engine: StartEngine) -> None:
    """The driver knows how large what it opened is: an engine's word is not needed."""
    export = start_engine(JOINED).export
    at = backend.driver.open_memory(export.allocations[0].handle)
    found = backend.driver.allocation_of(at + 100)
    assert (found.base, found.nbytes) == (at, export.allocations[0].nbytes)
    backend.driver.close_memory(at)


def test_a_handle_that_is_open_is_mapped_once(backend: Backend, start_engine: StartEngine) -> None:
    """Opened twice it is in one place, and stays there until it was closed twice."""
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
    """SIGKILL of the engine takes nothing away from who has its memory open."""
    engine = start_engine(JOINED)
    at = backend.driver.open_memory(engine.export.allocations[0].handle)
    engine.kill()
    assert backend.read(at, SIZE) == engine.expected(0)
    backend.driver.close_memory(at)


def test_a_dead_processs_handle_cannot_be_opened(backend: Backend, start_engine: StartEngine) -> None:
    """What nobody has open is gone with its process."""
    engine = start_engine(JOINED)
    engine.kill()
    with pytest.raises(DeviceError) as caught:
        backend.driver.open_memory(engine.export.allocations[0].handle)
    assert caught.value.cause is Cause.CANNOT_OPEN


def test_freed_memory_cannot_be_opened(backend: Backend, start_engine: StartEngine) -> None:
    """A handle is for one allocation, and not for what comes to its place."""
    engine = start_engine(JOINED)
    engine.tell("free", 0)
    with pytest.raises(DeviceError) as caught:
        backend.driver.open_memory(engine.export.allocations[0].handle)
    assert caught.value.cause is Cause.CANNOT_OPEN


@pytest.mark.parametrize("handle", [bytes(HANDLE_BYTES), b"short"])
def test_nonsense_cannot_be_opened(backend: Backend, handle: bytes) -> None:
    """Bytes that are no handle are refused, as memory and as event."""
    for open_it in (backend.driver.open_memory, backend.driver.open_event):
        with pytest.raises(DeviceError) as caught:
            open_it(handle)
        assert caught.value.cause is Cause.CANNOT_OPEN


def test_a_process_cannot_open_its_own_memory(backend: Backend) -> None:
    """The driver refuses it, and whoever exports and opens in one process learns so at once."""
    at = backend.allocate(PAGE_BYTES)
    assert backend.driver.export_memory(at) == backend.driver.export_memory(at)
    with pytest.raises(DeviceError) as caught:
        backend.driver.open_memory(backend.driver.export_memory(at))
    assert caught.value.cause is Cause.CANNOT_OPEN
    backend.free(at)


def test_allocations_are_found_by_any_address_in_them(backend: Backend) -> None:
    """Base and size of an allocation are found from inside of it, and nothing is found outside."""
    at = backend.allocate(PAGE_BYTES)
    found = backend.driver.allocation_of(at + 17)
    assert (found.base, found.kind) == (at, MemoryKind.SHAREABLE)
    assert found.nbytes >= PAGE_BYTES
    backend.free(at)
    with pytest.raises(DeviceError) as caught:
        backend.driver.allocation_of(at)
    assert caught.value.cause is Cause.UNKNOWN_MEMORY


def test_events_are_reached_in_the_order_of_their_stream(backend: Backend) -> None:
    """An event counts as reached until it is recorded, and then once the stream has come so far."""
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
    """As an engine does that ends behind its last mark: the stream goes on, and writes nowhere."""
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
    """As by a test that has failed: what it says must not be lost with the process."""
    backend.hold(backend.driver.create_stream())
    backend.close()


def test_an_engines_event_is_seen(backend: Backend, start_engine: StartEngine) -> None:
    """An event that the engine records behind its compute is reached here when the compute is over; and again."""
    engine = start_engine(JOINED)
    event = backend.driver.open_event(engine.export.events[0])
    for seed in (1, 2):
        engine.tell("compute", 0)
        assert not backend.driver.reached(event)
        engine.tell("finish", seed)
        wait_until(lambda: backend.driver.reached(event))
    backend.driver.destroy_event(event)


def test_copies_are_made_in_both_directions(backend: Backend, region: HostRegion) -> None:
    """A batch moves each of its pieces, in and out, whether the memory is pinned or not."""
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
    """Lists of different lengths are a mistake of the caller's."""
    stream = backend.driver.create_stream()
    with pytest.raises(ValueError, match="differ"):
        backend.driver.copy(stream, [1], [1, 2], [1])
    backend.driver.destroy_stream(stream)


def test_closing_twice_is_harmless(backend: Backend) -> None:
    """A driver may be closed again."""
    backend.driver.close()
    backend.driver.close()


@pytest.mark.parametrize("kind", [kind for kind in MemoryKind if kind.obstacle])
def test_memory_that_cannot_be_shared(host: HostBackend, kind: MemoryKind) -> None:
    """The driver does not export it, and says what kind of memory it is."""
    at = host.driver.allocate(PAGE_BYTES, kind)
    assert host.driver.allocation_of(at).kind is kind
    with pytest.raises(DeviceError):
        host.driver.export_memory(at)
    host.close()


@pytest.mark.usefixtures("no_leaks")
def test_memory_used_after_it_was_closed_breaks_the_context(host: HostBackend, region: HostRegion) -> None:
    """As a GPU would: the copy fails, and with it everything after it. What is never reached goes with the driver all the same."""
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
    """Neither threads nor descriptors nor mappings."""
    host = HostBackend()
    engine = Engine("host", JOINED)
    host.driver.open_memory(engine.export.allocations[0].handle)
    host.driver.close_memory(host.driver.open_memory(engine.export.allocations[0].handle))
    host.driver.open_event(engine.export.events[0])
    host.driver.create_stream()
    host.driver.allocate(PAGE_BYTES)
    engine.kill()
    host.close()
    assert "kvtier-device" not in Path("/proc/self/maps").read_text()
