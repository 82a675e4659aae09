"""Reconnection: the client opens a new session after a server restart; old grants are invalid."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from harness.delay_proxy import delay_proxy
from harness.payloads import assert_serves, filled, is_payload, key_of, namespace_of, payload
from harness.polling import wait_until
from harness.server_process import ServerProcess

from kvtier.client import AsyncClient, Client, KVTierError, LeaseLost, NotConnected, SessionLost, Timeouts, Unavailable

PART_BYTES = 64 << 10
NAMESPACE = namespace_of(PART_BYTES)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server that restarts quickly, shared by the tests."""
    with ServerProcess(tmp_path_factory.mktemp("reconnect")) as process:
        yield process.start()


@pytest.fixture
def keys(request: pytest.FixtureRequest) -> list[bytes]:
    return [key_of(number, salt=request.node.name) for number in range(8)]


@pytest.fixture
def blocks(keys: list[bytes]) -> list[np.ndarray]:
    return [payload(key, PART_BYTES) for key in keys]


def is_back(server: ServerProcess, client: Client | AsyncClient) -> bool:
    """Returns whether the client's session is of the server's current epoch."""
    return client.epoch == server.status().epoch


def serves(client: Client, keys: list[bytes]) -> bool:
    """Returns whether the client reads these blocks within its deadlines."""
    with contextlib.suppress(Unavailable):
        assert_serves(client, keys)
        return True
    return False


@pytest.mark.parametrize("transport", ["shm", "grpc"])
def test_client_registers_again_by_itself(
    server: ServerProcess, transport: str, keys: list[bytes], blocks: list[np.ndarray]
) -> None:
    """After a SIGKILL of the server the client opens a new session and finds durable blocks."""
    with Client(server.endpoint, namespace=NAMESPACE, transport=transport) as client:
        client.store(keys, blocks)
        assert set(client.flush(keys)) == {1}
        first = server.status()
        server.restart()
        wait_until(lambda: is_back(server, client))
        second = server.status()
        assert client.epoch == second.epoch != first.epoch
        assert client.transport == transport
        assert [session.client_name for session in second.sessions] == ["python"]
        assert_serves(client, keys)


def test_client_started_before_the_server(tmp_path: Path, keys: list[bytes], blocks: list[np.ndarray]) -> None:
    """Its calls fail at once until the server is up; then it connects."""
    with ServerProcess(tmp_path) as server, Client(server.endpoint, namespace=NAMESPACE) as client:
        with pytest.raises(Unavailable):
            client.wait_until_connected(1)
        began = time.monotonic()
        with pytest.raises(NotConnected):
            client.lookup(keys)
        assert time.monotonic() - began < 25
        server.start()
        wait_until(lambda: client.connected)
        client.store(keys, blocks)
        assert_serves(client, keys)


def test_lease_from_before_the_restart_is_refused(
    server: ServerProcess, keys: list[bytes], blocks: list[np.ndarray]
) -> None:
    """Reading with it raises; releasing it has no effect."""
    with Client(server.endpoint, namespace=NAMESPACE) as client:
        client.store(keys, blocks)
        assert set(client.flush(keys)) == {1}
        old = client.lookup(keys)
        assert old.prefix_hits == len(keys)
        server.restart()
        wait_until(lambda: is_back(server, client))
        new = client.lookup(keys, wait=30)
        assert new.id != old.id
        with pytest.raises(LeaseLost) as refusal, client.read(old, range(8)):
            pytest.fail("gave access with a lease of an earlier life")
        assert refusal.value.reason == "LEASE_NOT_FOUND"
        assert client.touch(old.id, new.id) == [old.id]
        old.release()
        with client.read(new, range(8)) as batch:
            assert all(bytes(view) == block.tobytes() for view, block in zip(batch.views(), blocks, strict=True))


def test_read_across_a_restart_is_refused(server: ServerProcess, keys: list[bytes], blocks: list[np.ndarray]) -> None:
    """A read during which the server restarted raises at its end: the copied bytes are invalid.

    The new session is not affected.
    """
    with Client(server.endpoint, namespace=NAMESPACE, transport="shm") as client:
        client.store(keys, blocks)
        assert set(client.flush(keys)) == {1}
        lease = client.lookup(keys)
        with pytest.raises(SessionLost), client.read(lease, range(8)) as batch:  # noqa: PT012 - it is the end that raises
            server.restart()
            # The mapping outlives the server: no SIGBUS, and the bytes are still there.
            assert bytes(batch.views()[0]) == blocks[0].tobytes()
            wait_until(lambda: is_back(server, client))
        assert_serves(client, keys)


def test_write_across_a_restart_is_refused_and_not_published(
    server: ServerProcess, keys: list[bytes], blocks: list[np.ndarray]
) -> None:
    """A store prepared before the restart raises, and publishes nothing (B4.5)."""
    with Client(server.endpoint, namespace=NAMESPACE, transport="shm") as client:
        with pytest.raises(SessionLost), client.write(keys) as batch:  # noqa: PT012 - as above
            for view, block in zip(batch.views(), blocks, strict=True):
                view[:] = block.data
            server.restart()
            wait_until(lambda: is_back(server, client))
        assert client.lookup(keys, prefix=False).prefix_hits == 0
        status = server.status()
        assert (status.leases, status.stores, status.quarantined_bytes) == (0, 0, 0)


@pytest.mark.slow
def test_a_server_with_a_slow_handshake(server: ServerProcess, keys: list[bytes], blocks: list[np.ndarray]) -> None:
    """The handshake takes longer than a call may: a client that retried would never connect.

    The delay stands for a busy or distant host.
    """
    with delay_proxy(server.path, delay=3.0) as address:
        with Client(address, namespace=NAMESPACE, transport="grpc", timeouts=Timeouts(call=1.0)) as hasty:
            hasty.wait_until_connected(60)
        with Client(address, namespace=NAMESPACE, transport="grpc") as client:
            client.store(keys, blocks)
            assert_serves(client, keys)


@pytest.mark.slow
def test_calls_end_in_time_while_the_server_hangs(
    server: ServerProcess, keys: list[bytes], blocks: list[np.ndarray]
) -> None:
    """Calls to a stopped server (SIGSTOP) end at their deadline; after SIGCONT the client works."""
    timeouts = Timeouts(connect=1.5, call=1.5, transfer=1.5)
    buffers = filled(8, PART_BYTES)
    with Client(server.endpoint, namespace=NAMESPACE, timeouts=timeouts) as client:
        client.wait_until_connected(60)
        with Client(server.endpoint, namespace=NAMESPACE) as other:
            other.store(keys, blocks)
        server.suspend()
        try:
            for call in (
                lambda: client.lookup(keys),
                lambda: client.load(keys, buffers, wait=0.2),
                lambda: client.store(keys, blocks),
                lambda: client.flush(keys, wait=0.2),
                client.status,
            ):
                began = time.monotonic()
                with pytest.raises(Unavailable):
                    call()
                assert time.monotonic() - began < 25
            wait_until(lambda: not client.connected)
        finally:
            server.resume()
        wait_until(lambda: serves(client, keys))
        client.close()
    server.wait_for(lambda status: not status.sessions and not status.leases and not status.stores)


def test_refused_calls_leave_nothing_behind(tmp_path: Path, keys: list[bytes]) -> None:
    """Without a server each failing call raises a new exception with its own traceback."""
    with Client(f"unix:{tmp_path / 'absent'}", namespace=NAMESPACE) as client:
        errors = []
        for _ in range(20):
            try:
                client.lookup(keys)
            except KVTierError as error:
                errors.append(error)
        assert len(set(map(id, errors))) == 20
        lengths = [len(traceback.extract_tb(error.__traceback__)) for error in errors]
        assert lengths[-1] == lengths[1]


@pytest.mark.usefixtures("no_leaks")
def test_close_in_the_middle_of_connecting(server: ServerProcess) -> None:
    """Closed at any point of its connecting, a client ends its threads and its session."""
    for number in range(25):
        client = Client(server.endpoint, namespace=NAMESPACE)
        time.sleep(number * 0.0006)
        closer = threading.Thread(target=client.close)
        closer.start()
        closer.join(60)
        assert not closer.is_alive(), "close hangs"
    server.wait_for(lambda status: not status.sessions)


async def test_async_client_registers_again_by_itself(
    server: ServerProcess, keys: list[bytes], blocks: list[np.ndarray]
) -> None:
    """As for the synchronous client: new epoch, old leases invalid, durable blocks found."""
    async with AsyncClient(server.endpoint, namespace=NAMESPACE) as client:
        await client.store(keys, blocks)
        assert set(await client.flush(keys)) == {1}
        old = await client.lookup(keys)
        first = server.status().epoch
        await asyncio.to_thread(server.restart)
        await asyncio.to_thread(wait_until, lambda: is_back(server, client))
        assert server.status().epoch == client.epoch != first
        with pytest.raises(LeaseLost):
            async with client.read(old, range(8)):
                pytest.fail("gave access with a lease of an earlier life")
        await old.release()
        buffers = filled(8, PART_BYTES)
        assert await client.load(keys, buffers, wait=30) == 8
        assert all(map(is_payload, keys, buffers))


def test_a_server_that_ends_during_the_attach(tmp_path: Path) -> None:
    """A client with transport "shm" is disconnected and retries; this is no invalid request."""
    with ServerProcess(tmp_path).start() as server, socket.socket(socket.AF_UNIX) as broken:
        path, aside = tmp_path / "s.shm", tmp_path / "aside"
        path.rename(aside)
        broken.bind(str(path))  # refuses connections: it does not listen
        with Client(server.endpoint, namespace=namespace_of(4096), transport="shm") as client:
            with pytest.raises(NotConnected, match="transport shm"):
                client.lookup([key_of(1)])
            aside.replace(path)
            client.wait_until_connected(60)
            assert client.transport == "shm"
