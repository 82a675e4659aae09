"""Devices end to end: engines, a real server, copy workers and gRPC, over the host back end."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import Iterator
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from devices.backends import Backend
from devices.kv import BLOCKS, JOINED, LAYOUTS
from devices.service import Engine, Service, keys_of, namespace_of
from harness.polling import wait_until
from harness.server_process import MIB, ServerProcess

from kvtier.client import AsyncClient, Client, DeviceUnavailable, KeyStatus, KvBuffers, LeaseLost, StoreStatus, Timeouts
from kvtier.cuda.device.driver_contract import MemoryKind
from kvtier.cuda.testing.host_driver import HostDriver

KEYS = keys_of(BLOCKS)
GRANTED = bytes([StoreStatus.GRANTED]) * BLOCKS


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """One server for those tests of this file that leave it running."""
    with Service(tmp_path_factory.mktemp("devices"), region=32 * MIB) as service:
        yield service


@pytest.fixture
def service(running: Service) -> Iterator[Service]:
    """The server, with its gate open and without sessions of earlier tests."""
    running.gate.open()
    running.server.wait_for(lambda status: not status.sessions)
    yield running
    running.gate.open()


@pytest.mark.parametrize("transport", ["cuda_ipc", "grpc"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_round_trips_are_identical(service: Service, name: str, transport: str) -> None:
    """Slots hold what a NumPy gather returns; blocks are restored, with and without shm."""
    kv, keys = LAYOUTS[name], keys_of(BLOCKS, f"{name} {transport}")
    with Engine(service.server.endpoint, kv, transport=transport).register() as engine:
        order = [3, 4, 0, 5, 1, 2]
        assert engine.client.store_from_device(keys, order) == GRANTED
        parts = kv.parts(0)
        assert engine.stored(keys) == [parts[block] for block in order]
        engine.clear()
        assert engine.client.load_to_device(keys, order) == BLOCKS
        assert engine.contents() == engine.expected(0)


DRIVERS = {"host": "devices.gated_driver:make", "fake": "devices.gated_driver:make_cuda", "gpu": "auto"}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_driver_keeps_the_contract(tmp_path: Path, backend: Backend, name: str) -> None:
    """The same over CUDA's driver with a fake or real libcuda.

    Registration, pinning, order, copies, close.
    """
    kv = LAYOUTS[name]
    with Service(tmp_path, driver=DRIVERS[backend.name]) as service:
        with Engine(service.server.endpoint, kv, backend=backend).register() as engine:
            release = engine.backend.hold(engine.stream)
            with engine.buffers.mark(engine.stream) as mark, ThreadPoolExecutor(1) as executor:
                storing = executor.submit(engine.client.store_from_device, KEYS, range(BLOCKS), after=mark)
                service.server.wait_for(lambda status: status.stores == 1)
                engine.fill(1)
                release()
                assert storing.result(60) == GRANTED
            assert engine.stored(KEYS) == kv.parts(1)
            engine.clear()
            assert engine.client.load_to_device(KEYS, range(BLOCKS)) == BLOCKS
            assert engine.contents() == engine.expected(1)
        service.server.wait_for(lambda status: not status.sessions and not status.quarantined_bytes)
        assert "worker has ended" not in service.server.log


def test_an_engine_with_a_shm_of_its_own(service: Service) -> None:
    """B4.11: without shared events the client waits instead of the server."""
    keys = keys_of(BLOCKS, "its own shm")
    with Engine(service.server.endpoint) as engine:
        export = engine.buffers.export
        engine.buffers.export = dataclasses.replace(export, origin=dataclasses.replace(export.origin, shm_device=1))
        engine.register()
        release = engine.backend.hold(engine.stream)
        with engine.buffers.mark(engine.stream) as mark, ThreadPoolExecutor(1) as executor:
            storing = executor.submit(engine.client.store_from_device, keys, range(BLOCKS), after=mark)
            assert not futures.wait([storing], 0.1).done
            assert set(engine.client.lookup(keys, prefix=False).statuses) == {KeyStatus.MISS}
            engine.fill(6)
            release()
            assert storing.result(60) == GRANTED
        assert engine.stored(keys) == JOINED.parts(6)


def test_blocks_are_shared_between_engines(service: Service) -> None:
    """Blocks of a device store can be loaded by other transports, and vice versa."""
    keys = keys_of(BLOCKS, "two engines")
    with (
        Engine(service.server.endpoint).register() as one,
        Client(service.server.endpoint, namespace=namespace_of(JOINED)) as other,
    ):
        other.store(keys[:3], JOINED.parts(7)[:3])
        assert one.client.store_from_device(keys, range(BLOCKS)) == bytes([StoreStatus.PRESENT]) * 3 + GRANTED[3:]
        one.clear()
        assert one.client.load_to_device(keys, range(BLOCKS)) == BLOCKS
        one.client.reset(wait=30)
        keys = keys_of(BLOCKS, "as they are now")
        one.client.store_from_device(keys, range(BLOCKS))
        assert one.stored(keys) == [*JOINED.parts(7)[:3], *JOINED.parts(0)[3:]]


def test_leading_hits_are_loaded(service: Service) -> None:
    """The leading hits of a list of keys are loaded; other blocks stay unchanged."""
    keys = keys_of(BLOCKS, "prefix")
    with Engine(service.server.endpoint).register() as engine:
        engine.client.store_from_device(keys[:2], [5, 4])
        engine.fill(1)
        assert engine.client.load_to_device(keys, range(BLOCKS)) == 2
        engine.client.reset(wait=30)
        engine.client.store_from_device(keys, range(BLOCKS))
        assert engine.stored(keys) == [JOINED.parts(0)[5], JOINED.parts(0)[4], *JOINED.parts(1)[2:]]
        assert engine.client.load_to_device(keys_of(2, "never"), [0, 1]) == 0


def test_items_of_a_lease_go_to_any_blocks(service: Service) -> None:
    """A worker loads items of a lease that its engine's scheduler acquired, in any order."""
    keys = keys_of(BLOCKS, "lease")
    with Engine(service.server.endpoint).register() as engine:
        engine.client.store_from_device(keys, range(BLOCKS))
        with engine.client.lookup(keys) as lease:
            engine.clear()
            engine.client.read_to_device(lease, [5, 0], [1, 3])
            assert engine.client.lookup(keys).prefix_hits == BLOCKS
        with pytest.raises(LeaseLost):
            engine.client.read_to_device(lease, [1], [1])
        again = keys_of(2, "read back")
        engine.client.store_from_device(again, [1, 3])
        assert engine.stored(again) == [JOINED.parts(0)[5], JOINED.parts(0)[0]]


def test_a_store_waits_for_the_engines_compute(service: Service) -> None:
    """B4.11: nothing is read before a mark's compute has ended, and the call returns after it."""
    keys = keys_of(BLOCKS, "after compute")
    with Engine(service.server.endpoint).register() as engine:
        release = engine.backend.hold(engine.stream)
        with engine.buffers.mark(engine.stream) as mark:
            statuses: list[bytes] = []
            storing = threading.Thread(
                target=lambda: statuses.append(engine.client.store_from_device(keys, range(BLOCKS), after=mark))
            )
            storing.start()
            wait_until(lambda: service.server.status().stores == 1)
            assert set(engine.client.lookup(keys, prefix=False).statuses) == {KeyStatus.HIT_PENDING}
            engine.fill(2)
            release()
            storing.join(60)
        assert statuses == [GRANTED]
        assert engine.stored(keys) == JOINED.parts(2)


def test_more_marks_than_events(service: Service) -> None:
    """If all shared events are in use, the client waits itself."""
    with Engine(service.server.endpoint).register() as engine:
        marks = [engine.buffers.mark(engine.stream) for _ in range(6)]
        assert [mark.index for mark in marks] == [0, 1, 2, 3, None, None]
        keys = keys_of(6, "marks")
        for number, mark in enumerate(marks):
            engine.client.store_from_device(keys[number : number + 1], [number], after=mark)
            mark.release()
        assert engine.stored(keys) == JOINED.parts(0)
        assert engine.buffers.mark(engine.stream).index == 0


def test_the_asyncio_client(service: Service) -> None:
    """The asyncio client has the same calls."""
    keys = keys_of(BLOCKS, "asyncio")

    async def round_trip(engine: Engine) -> None:
        namespace = namespace_of(JOINED)
        timeouts = Timeouts(connect=60, call=60)
        async with AsyncClient(service.server.endpoint, namespace=namespace, timeouts=timeouts) as client:
            await client.register_kv_buffers(engine.buffers)
            assert await client.store_from_device(keys, range(BLOCKS)) == GRANTED
            engine.clear()
            assert await client.load_to_device(keys, range(BLOCKS)) == BLOCKS
            async with await client.lookup(keys[:1]) as lease:
                await client.read_to_device(lease, [0], [0])

    with Engine(service.server.endpoint) as engine:
        asyncio.run(round_trip(engine))
        assert engine.contents() == engine.expected(0)


def test_status_shows_the_last_transport_of_a_session(service: Service) -> None:
    """The status shows the transport that a session used last."""
    keys = keys_of(BLOCKS, "shown")

    def shown() -> set[str]:
        return {session.transport for session in service.server.status().sessions}

    with Engine(service.server.endpoint, transport="grpc").register() as engine:
        engine.client.store(keys[:1], JOINED.parts(0)[:1])
        assert shown() == {"grpc"}
        engine.client.store_from_device(keys, range(BLOCKS))
        assert shown() == {"cuda_ipc"}
        engine.stored(keys)
        assert shown() == {"grpc"}
        engine.client.load_to_device(keys, range(BLOCKS))
        assert shown() == {"cuda_ipc"}


def test_memory_is_unmapped_after_the_session(service: Service) -> None:
    """An engine's memory is mapped once for several registrations, until its session ends."""
    with Engine(service.server.endpoint).register() as engine:
        [worker] = service.copy_workers
        wait_until(lambda: service.open_allocations(worker) == JOINED.count + 4)
        engine.register()
        assert service.open_allocations(worker) == JOINED.count + 4
        assert {session.transport for session in service.server.status().sessions} == {"cuda_ipc"}
    wait_until(lambda: service.open_allocations(worker) == 0)
    assert service.copy_workers == [worker]


def test_an_unknown_device(service: Service) -> None:
    """The refusal names the cause, repeats at once, and the shm transport still works."""
    with Engine(service.server.endpoint) as engine:
        engine.backend.driver.device = "missing"
        buffers = KvBuffers(engine.backend.driver, {0: (JOINED.layout(), engine.addresses)})
        for _ in range(3):
            with pytest.raises(DeviceUnavailable, match="no_device") as caught:
                engine.client.register_kv_buffers(buffers)
            assert caught.value.reason == "DEVICE_UNAVAILABLE"
        with pytest.raises(DeviceUnavailable, match="no_device"):
            engine.client.store_from_device(KEYS, range(BLOCKS))
        keys = keys_of(BLOCKS, "the ordinary way")
        engine.client.store(keys, JOINED.parts(0))
        assert engine.stored(keys) == JOINED.parts(0)


@pytest.mark.parametrize(("config", "cause"), [('[devices]\ndriver = "off"', "switched_off"), ("", "no_driver: ")])
def test_a_server_without_devices_gives_the_reason(tmp_path: Path, config: str, cause: str) -> None:
    """A server without devices logs the reason, tells it to clients, and starts no process."""
    if not config and Path("/dev/nvidiactl").exists():
        pytest.skip("there is an NVIDIA device here")
    with ServerProcess(tmp_path, region=8 * MIB, config=config).start() as server, Engine(server.endpoint) as engine:
        with pytest.raises(DeviceUnavailable, match=cause):
            engine.register()
        wait_until(lambda: "device copies are not offered" in server.log)
        engine.client.store(KEYS, JOINED.parts(0))
        assert engine.stored(KEYS) == JOINED.parts(0)


def test_memory_that_cannot_be_shared() -> None:
    """The engine's side refuses memory that cannot be shared, before any call to the server."""
    driver = HostDriver()
    for kind, cause in ((MemoryKind.VMM, "vmm_memory"), (MemoryKind.POOL, "pool_memory")):
        addresses = [driver.allocate(tensor.nbytes, kind) for tensor in JOINED.tensors(0)]
        with pytest.raises(DeviceUnavailable) as caught:
            KvBuffers(driver, {0: (JOINED.layout(), addresses)})
        assert caught.value.reason == cause
    assert driver.in_use["events"] == 0
    driver.close()
