"""Engines, copy workers and servers that end in mid-copy.

Others continue; slots return after the last write.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from devices.caller import Caller
from devices.kv import BLOCKS, JOINED
from devices.service import Engine, KilledEngine, Service, keys_of, namespace_of
from harness.polling import stays, wait_until
from harness.server_process import MIB

from kvtier.client import Client, DeviceUnavailable, KeyStatus, KVTierError, StoreStatus, Unavailable
from kvtier.protos.v1 import cache_pb2, transfer_pb2
from kvtier.protos.wire.packed_keys import pack_keys

PART = JOINED.layout().part_bytes
KEYS = keys_of(BLOCKS)
GRANTED = bytes([StoreStatus.GRANTED]) * BLOCKS


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    with Service(tmp_path) as running:
        yield running


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


def assert_no_slot_is_lost(service: Service, client: Client) -> None:
    """The CPU tier can store as much as in a new server: no slot is lost."""
    client.reset(wait=30)
    service.server.wait_for(lambda status: not status.quarantined_bytes and not status.stores)
    fitting = service.server.status().tiers[0].capacity_bytes // PART * 9 // 10
    keys = keys_of(fitting, "all of it")
    for start in range(0, fitting, 64):
        some = keys[start : start + 64]
        assert set(client.store(some, [bytes(PART)] * len(some))) == {StoreStatus.GRANTED}


def test_an_engine_killed_in_mid_copy(service: Service) -> None:
    """The store is lost at once, its slots wait for the copy.

    Then its memory is closed and the slots are reused.
    """
    endpoint = service.server.endpoint
    with Engine(endpoint).register() as other:
        [worker] = service.copy_workers
        service.gate.close()
        with KilledEngine(endpoint, "store_from_device") as engine:
            service.gate.wait_reached()
            assert set(other.client.lookup(KEYS, prefix=False).statuses) == {KeyStatus.HIT_PENDING}
            engine.kill()
        service.server.wait_for(lambda status: len(status.sessions) == 1 and status.stores == 0)
        assert service.server.status().quarantined_bytes == BLOCKS * PART
        again = keys_of(BLOCKS, "meanwhile")
        assert other.client.store_from_device(again, range(BLOCKS)) == GRANTED
        assert other.client.load_to_device(again, range(BLOCKS)) == BLOCKS
        assert service.server.status().quarantined_bytes == BLOCKS * PART
        service.gate.open()
        service.server.wait_for(lambda status: not status.quarantined_bytes)
        wait_until(lambda: service.open_allocations(worker) == JOINED.count + 4)
        assert set(other.client.lookup(KEYS, prefix=False).statuses) == {KeyStatus.MISS}
        assert other.contents() == other.expected(0)
        assert service.copy_workers == [worker]
        assert_no_slot_is_lost(service, other.client)


def test_an_engine_killed_in_mid_load(service: Service) -> None:
    """Nothing of it stays pinned or open."""
    endpoint = service.server.endpoint
    with Engine(endpoint).register() as other:
        [worker] = service.copy_workers
        other.client.store_from_device(KEYS, range(BLOCKS))
        service.gate.close()
        with KilledEngine(endpoint, "load_to_device") as engine:
            service.gate.wait_reached()
            engine.kill()
        service.server.wait_for(lambda status: len(status.sessions) == 1 and status.leases == 0)
        service.gate.open()
        wait_until(lambda: service.open_allocations(worker) == JOINED.count + 4)
        other.clear()
        assert other.client.load_to_device(KEYS, range(BLOCKS)) == BLOCKS
        assert other.contents() == other.expected(0)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_copy_worker_that_ends_in_mid_copy(
    service: Service, executor: ThreadPoolExecutor, number: signal.Signals
) -> None:
    """The call fails, the slots return; the next call registers again with another copy worker."""
    with Engine(service.server.endpoint).register() as engine:
        [worker] = service.copy_workers
        service.gate.close()
        storing = executor.submit(engine.client.store_from_device, KEYS, range(BLOCKS))
        service.gate.wait_reached()
        os.kill(worker, number)
        with pytest.raises(DeviceUnavailable) as caught:
            storing.result(60)
        assert caught.value.reason == "DEVICE_LOST"
        service.gate.open()
        status = service.server.wait_for(lambda status: not status.stores)
        assert (status.quarantined_bytes, len(status.sessions)) == (0, 1)
        assert set(engine.client.lookup(KEYS, prefix=False).statuses) == {KeyStatus.MISS}
        assert engine.client.store_from_device(KEYS, range(BLOCKS)) == GRANTED
        [another] = service.copy_workers
        assert another != worker
        engine.clear()
        assert engine.client.load_to_device(KEYS, range(BLOCKS)) == BLOCKS
        assert engine.contents() == engine.expected(0)
        wait_until(lambda: "device copy worker has ended" in service.server.log)
        assert_no_slot_is_lost(service, engine.client)


def test_a_copy_worker_that_is_killed_repeatedly(service: Service) -> None:
    """Calls fail while the copy worker is restarted.

    All other calls work, and in the end device calls do.
    """
    with Engine(service.server.endpoint).register() as engine:
        for number in range(3):
            for pid in service.copy_workers:
                os.kill(pid, signal.SIGKILL)
            keys = keys_of(BLOCKS, f"ordinary {number}")
            assert engine.client.store(keys, JOINED.parts(0)) == GRANTED

            def stored(salt: str = f"again {number}") -> bool:
                try:
                    engine.client.store_from_device(keys_of(BLOCKS, salt), range(BLOCKS))
                except DeviceUnavailable:
                    return False
                return True

            wait_until(stored)


def test_a_server_that_is_killed(service: Service) -> None:
    """Copy workers die with the server.

    After a restart engines register again; lost blocks are misses.
    """
    with Engine(service.server.endpoint).register() as engine:
        [worker] = service.copy_workers
        engine.client.store_from_device(KEYS, range(BLOCKS))
        service.server.restart()
        wait_until(lambda: not Path(f"/proc/{worker}").exists())
        engine.client.wait_until_connected(60)

        def stored() -> bool:
            try:
                return bool(engine.client.store_from_device(KEYS, range(BLOCKS)))
            except (DeviceUnavailable, Unavailable):
                return False

        wait_until(stored)
        assert len(service.copy_workers) == 1
        engine.clear()
        assert engine.client.load_to_device(KEYS, range(BLOCKS)) == BLOCKS
        assert engine.contents() == engine.expected(0)


def test_a_server_killed_in_mid_load(service: Service, executor: ThreadPoolExecutor) -> None:
    """The call raises only after the last write to the engine's blocks."""
    with Engine(service.server.endpoint, device=2).register() as engine:
        engine.client.store_from_device(KEYS, range(BLOCKS))
        service.gate.close()
        loading = executor.submit(engine.client.load_to_device, KEYS, range(BLOCKS))
        service.gate.wait_reached()
        service.server.kill()
        assert isinstance(loading.exception(30), KVTierError)
        engine.fill(3)
        service.gate.open()
        stays(lambda: engine.contents() == engine.expected(3), 0.1)


def test_a_session_lost_in_mid_load(service: Service, executor: ThreadPoolExecutor) -> None:
    """A load without an answer returns after its started batches.

    Bytes the engine writes later stay.
    """
    with Engine(service.server.endpoint, device=2).register() as engine:
        engine.client.store_from_device(KEYS, range(BLOCKS))
        service.gate.close()
        loading = executor.submit(engine.client.load_to_device, KEYS, range(BLOCKS))
        service.gate.wait_reached()
        engine.client._transport.invalidate(engine.client._transport.session)  # type: ignore[arg-type]
        opening = threading.Timer(0.3, service.gate.open)
        opening.start()
        assert isinstance(loading.exception(30), KVTierError)
        engine.fill(3)
        opening.join()
        stays(lambda: engine.contents() == engine.expected(3), 0.3)


@pytest.mark.parametrize("call", ["store_from_device", "load_to_device"])
def test_a_client_that_gives_up(service: Service, call: str) -> None:
    """After the call's deadline no copy starts.

    No block and no slot changes when the awaited compute ends.
    """
    with Engine(service.server.endpoint, device=2).register() as engine:
        if call == "load_to_device":
            engine.client.store_from_device(KEYS, range(BLOCKS))
            engine.fill(1)
        release = engine.backend.hold(engine.stream)
        with engine.buffers.mark(engine.stream) as mark:
            with pytest.raises(DeviceUnavailable, match="cancelled"):
                getattr(engine.client, call)(KEYS, range(BLOCKS), after=mark)
            release()
            status = service.server.wait_for(lambda status: not status.stores and not status.leases)
        assert not status.quarantined_bytes
        assert engine.contents() == engine.expected(int(call == "load_to_device"))
        assert engine.client.lookup(KEYS).prefix_hits == (BLOCKS if call == "load_to_device" else 0)
        assert engine.client.store_from_device(keys_of(BLOCKS, "later"), range(BLOCKS)) == GRANTED


@pytest.mark.slow
def test_a_copy_that_takes_too_long(service: Service, executor: ThreadPoolExecutor) -> None:
    """The call ends although its batch hangs; the store keeps its slots until the worker ends."""
    with Engine(service.server.endpoint, device=2).register() as engine:
        service.gate.close()
        storing = executor.submit(engine.client.store_from_device, KEYS, range(BLOCKS))
        service.gate.wait_reached()
        assert isinstance(storing.exception(60), Unavailable)
        assert service.server.status().stores == 1
        status = service.server.wait_for(lambda status: not status.stores)
        assert "device copy worker hangs and is killed" in service.server.log
        assert (status.quarantined_bytes, len(status.sessions)) == (0, 1)
        service.gate.open()


def test_a_session_that_ends_in_mid_copy(service: Service, executor: ThreadPoolExecutor) -> None:
    """The session ends, its process lives: slots stay in quarantine until the copy ends."""
    with (
        Engine(service.server.endpoint).register() as engine,
        Client(service.server.endpoint, namespace=namespace_of(JOINED)) as other,
    ):
        other.wait_until_connected(60)
        service.gate.close()
        storing = executor.submit(engine.client.store_from_device, KEYS, range(BLOCKS))
        service.gate.wait_reached()
        engine.client._transport.invalidate(engine.client._transport.session)  # type: ignore[arg-type]
        service.server.wait_for(lambda status: len(status.sessions) <= 2 and status.stores == 0)
        assert service.server.status().quarantined_bytes == BLOCKS * PART
        service.gate.open()
        assert isinstance(storing.exception(60), KVTierError)
        service.server.wait_for(lambda status: not status.quarantined_bytes)
        engine.client.wait_until_connected(60)
        assert_no_slot_is_lost(service, other)


def test_a_store_is_not_discarded_under_its_copy(service: Service, executor: ThreadPoolExecutor) -> None:
    """The discard of a store is answered after the server's copy for it has ended."""
    with closing(Caller(service, "raw")) as caller:
        caller.register()
        store_id = caller.prepare(KEYS)
        request = transfer_pb2.StoreFromDeviceRequest(
            session=caller.raw.ref, buffers_id=caller.buffers_id, store_id=store_id, blocks=range(BLOCKS)
        )
        service.gate.close()
        storing = caller.calls.StoreFromDevice.future(request, timeout=60)
        service.gate.wait_reached()
        storing.cancel()
        ending = executor.submit(caller.discard, store_id, BLOCKS)
        assert not futures.wait([ending], 0.2).done
        assert service.server.status().stores == 1
        service.gate.open()
        ending.result(60)
        service.server.wait_for(lambda status: not status.stores and not status.quarantined_bytes)


def test_a_lease_that_ends_in_mid_load(service: Service, executor: ThreadPoolExecutor) -> None:
    """The copied bytes may be of another block.

    The call reports the lost lease, and the load is a miss.
    """
    with closing(Caller(service, "raw")) as caller:
        caller.register()
        caller.engine.client.store(KEYS, JOINED.parts(1))
        found = caller.raw.cache.Lookup(
            cache_pb2.LookupRequest(session=caller.raw.ref, keys=pack_keys(KEYS)), timeout=60
        )
        service.gate.close()
        loading = executor.submit(caller.load, found.lease_id, blocks=range(BLOCKS), items=range(BLOCKS))
        service.gate.wait_reached()
        release = cache_pb2.ReleaseLeaseRequest(session=caller.raw.ref, lease_ids=[found.lease_id])
        caller.raw.cache.ReleaseLease(release, timeout=60)
        service.gate.open()
        assert loading.result(60) == "LEASE_NOT_FOUND"


def test_a_server_that_ends_in_mid_copy(service: Service, executor: ThreadPoolExecutor) -> None:
    """SIGTERM: the server and its copy workers end within the drain time."""
    with Engine(service.server.endpoint, device=2).register() as engine:
        service.gate.close()
        storing = executor.submit(engine.client.store_from_device, KEYS, range(BLOCKS))
        service.gate.wait_reached()
        [worker] = service.copy_workers
        opening = threading.Timer(1.0, service.gate.open)
        opening.start()
        assert service.server.terminate() == 0
        assert not Path(f"/proc/{worker}").exists()
        assert isinstance(storing.exception(60), KVTierError) or storing.result() == GRANTED
        opening.join()


def kill_at_random(service: Service, random_part: Callable[[], float], rounds: int) -> None:
    """Engines that store and load, killed at random moments."""
    for number in range(rounds):
        with KilledEngine(service.server.endpoint, ("store_from_device", "load_to_device")[number % 2]) as engine:
            time.sleep(0.15 + 0.25 * random_part())
            engine.kill()


def test_engines_killed_at_any_moment(tmp_path: Path) -> None:
    """Killed while they register, copy and end.

    The server lives, nothing stays open, pinned or in quarantine.
    """
    with Service(tmp_path, region=8 * MIB) as service, Engine(service.server.endpoint).register() as other:
        kill_at_random(service, random.Random(4).random, 8)
        [worker] = service.copy_workers
        service.server.wait_for(lambda status: len(status.sessions) == 1 and not status.stores and not status.leases)
        wait_until(lambda: service.open_allocations(worker) == JOINED.count + 4)
        assert_no_slot_is_lost(service, other.client)
