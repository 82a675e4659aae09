"""Cancelled calls and ended sessions: no torn block, no leaked slot, thread or descriptor."""

import asyncio
import threading
import time
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from harness.payloads import assert_serves, filled, key_of, namespace_of, payload
from harness.polling import async_wait_until, wait_until
from harness.server_process import MIB, ServerProcess

from kvtier.client import AsyncClient, Client, KVTierError, NotConnected, SessionLost, Timeouts
from kvtier.client.session.reconnect import TransportName
from kvtier.client.transport import aio_transport

NAMESPACE = namespace_of(MIB)


async def test_a_store_cancelled_during_its_copy_is_aborted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy ends before the memory is released; then the slots are released."""
    copying, go_on, ended = threading.Event(), threading.Event(), threading.Event()
    real = aio_transport._run_to_end

    async def slow(work: object) -> None:
        async def with_pause() -> None:
            copying.set()
            await asyncio.to_thread(go_on.wait, 60)
            await work  # type: ignore[misc]
            ended.set()

        await real(with_pause())

    monkeypatch.setattr(aio_transport, "_run_to_end", slow)
    keys = [key_of(number) for number in range(4)]
    with ServerProcess(tmp_path).start() as server:
        async with AsyncClient(server.endpoint, namespace=NAMESPACE) as client:
            store = asyncio.create_task(client.store(keys, [payload(key, MIB) for key in keys]))
            await asyncio.to_thread(copying.wait, 60)
            store.cancel()
            await asyncio.wait([store], timeout=0.05)
            assert not store.done(), "the copy has not ended yet"
            go_on.set()
            with pytest.raises(asyncio.CancelledError):
                await store
            assert ended.is_set()
            await asyncio.to_thread(server.wait_for, lambda status: (status.stores, status.quarantined_bytes) == (0, 0))
            assert (await client.lookup(keys)).id == 0


def test_a_completion_without_an_answer_keeps_no_slots(tmp_path: Path) -> None:
    """B5.6: a client that does not know whether its store ended withdraws the store."""
    keys = [key_of(number) for number in range(4)]
    config = "[leases]\ndefault = 3\n"
    with (
        ServerProcess(tmp_path, config=config).start() as server,
        Client(server.endpoint, namespace=NAMESPACE, timeouts=Timeouts(call=1.5)) as client,
    ):
        client.wait_until_connected(60)
        # The completion may arrive late: then the right bytes are published.
        with pytest.raises(KVTierError):
            _write_to_the_end_of_a_server(client, server, keys)
        server.resume()
        wait_until(lambda: client.connected)
        server.wait_for(lambda status: not (status.quarantined_bytes or status.stores))
        with Client(server.endpoint, namespace=NAMESPACE) as other:
            other.store(keys, [payload(key, MIB) for key in keys])
            assert_serves(other, keys)


def test_a_stream_ends_with_its_session(tmp_path: Path) -> None:
    """A load from a hanging server ends with the session, long before the stream's deadline."""
    keys, timeouts = [key_of(number) for number in range(32)], Timeouts(connect=60, call=5, transfer=60)
    with (
        ServerProcess(tmp_path, config="[sessions]\nheartbeat_interval = 1.0").start() as server,
        Client(server.endpoint, namespace=NAMESPACE, transport="grpc", timeouts=timeouts) as client,
    ):
        client.store(keys, [payload(key, MIB) for key in keys])
        lease = client.lookup(keys)
        session = lease.session
        stopper = threading.Timer(0.0, server.suspend)
        started = time.monotonic()
        stopper.start()
        with pytest.raises(KVTierError):
            _read_again_and_again(client, lease.id)
        assert time.monotonic() - started < timeouts.transfer / 2
        server.resume()
        assert session.transport == "grpc"


def _write_to_the_end_of_a_server(client: Client, server: ServerProcess, keys: list[bytes]) -> None:
    with client.write(keys) as batch:
        for key, view in zip(keys, batch.views(), strict=True):
            view[:] = payload(key, MIB).data
        server.suspend()


def _read_again_and_again(client: Client, lease_id: int) -> None:
    for _ in range(1000):
        with client.read(lease_id, range(32)):
            pass


def test_a_push_ends_with_its_session(tmp_path: Path) -> None:
    """It is cancelled from another thread, and raises the reason."""
    with (
        ServerProcess(tmp_path).start() as server,
        Client(server.endpoint, namespace=NAMESPACE, transport="grpc") as client,
    ):
        client.wait_until_connected(60)
        keys = [key_of(number) for number in range(8)]
        session = client._transport.session
        assert session is not None
        with pytest.raises(SessionLost), client.write(keys):
            client._transport.invalidate(session)
        client.wait_until_connected(60)


def test_calls_of_a_closed_client(tmp_path: Path) -> None:
    """Every call raises that the client is closed."""
    with ServerProcess(tmp_path).start() as server:
        client = Client(server.endpoint, namespace=NAMESPACE)
        lease = client.lookup([key_of(1)])
        client.close()
        for call in (client.status, lambda: client.load([key_of(1)], filled(1, MIB)), lambda: client.release(1)):
            with pytest.raises(NotConnected):
                call()
        lease.release()


TRANSPORTS: tuple[TransportName, ...] = ("shm", "tcp", "grpc")
PATIENT = Timeouts(connect=60.0, call=600.0, transfer=600.0)
"""With these a call ends only because its client is closed."""


async def test_calls_in_progress_of_a_closed_client(tmp_path: Path) -> None:
    """They raise a `KVTierError`, not a `CancelledError`, which would end tasks not cancelled.

    This includes calls that still wait for a connection, which the server may grant later.
    """
    with ServerProcess(tmp_path).start() as server:
        for transport in TRANSPORTS:
            client = AsyncClient(server.endpoint, namespace=NAMESPACE, transport=transport, timeouts=PATIENT)
            await client.wait_until_connected(60)
            server.suspend()
            keys = [key_of(1)]
            calls = [client.status(), client.lookup(keys), client.store(keys, [payload(keys[0], MIB)])]
            tasks = [asyncio.ensure_future(call) for call in calls]
            done, _ = await asyncio.wait(tasks, timeout=0.1)
            assert not done, "the server is stopped"
            await client.close()
            errors = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)
            server.resume()
            for error in errors:
                assert isinstance(error, NotConnected), repr(error)


def test_calls_in_progress_of_a_closed_synchronous_client(tmp_path: Path) -> None:
    """The same for the synchronous client, with one thread per call."""
    with ServerProcess(tmp_path).start() as server, ThreadPoolExecutor(3) as threads:
        for transport in TRANSPORTS:
            client = Client(server.endpoint, namespace=NAMESPACE, transport=transport, timeouts=PATIENT)
            client.wait_until_connected(60)
            server.suspend()
            keys = [key_of(1)]
            calls = [
                threads.submit(client.status),
                threads.submit(client.lookup, keys),
                threads.submit(client.store, keys, [payload(keys[0], MIB)]),
            ]
            assert not futures.wait(calls, 0.1).done, "the server is stopped"
            client.close()
            errors = [call.exception(60) for call in calls]  # type: ignore[attr-defined]
            server.resume()
            for error in errors:
                assert isinstance(error, NotConnected), repr(error)


async def test_a_write_that_ends_after_the_close(tmp_path: Path) -> None:
    """Its blocks can be sent no more, which is a `KVTierError` too."""
    with ServerProcess(tmp_path).start() as server:
        client = AsyncClient(server.endpoint, namespace=NAMESPACE, transport="grpc", timeouts=PATIENT)
        with pytest.raises(NotConnected):  # noqa: PT012 - the end of the context raises it
            async with client.write([key_of(1)]) as batch:
                for view in batch.views():
                    view[:] = bytes(len(view))
                await client.close()


@pytest.mark.usefixtures("no_leaks")
async def test_a_close_that_is_cancelled_closes(tmp_path: Path) -> None:
    """A cancelled close leaks neither threads nor descriptors of the client."""
    with ServerProcess(tmp_path).start() as server:
        clients = [AsyncClient(server.endpoint, namespace=NAMESPACE) for _ in range(3)]
        for client in clients:
            await client.wait_until_connected(60)
            closing = asyncio.ensure_future(client.close())
            await asyncio.wait([closing], timeout=0)
            closing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await closing
        await asyncio.to_thread(server.wait_for, lambda status: not status.sessions)
        await asyncio.get_running_loop().shutdown_default_executor()


async def test_cancelled_loads_leak_nothing(tmp_path: Path) -> None:
    """Loads over gRPC end at once when they are cancelled, at any moment."""
    keys = [key_of(number) for number in range(4)]
    with ServerProcess(tmp_path).start() as server:
        async with AsyncClient(server.endpoint, namespace=NAMESPACE, transport="grpc", timeouts=PATIENT) as client:
            await client.store(keys, [payload(key, MIB) for key in keys])
            buffers = filled(len(keys), MIB)
            for number in range(300):
                load = asyncio.ensure_future(client.load(keys, buffers))
                await asyncio.wait([load], timeout=number % 30 / 1000)
                load.cancel()
                await asyncio.wait([load])
            await async_wait_until(lambda: asyncio.all_tasks() == {asyncio.current_task()})
