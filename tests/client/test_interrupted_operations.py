"""Interrupted operations: each ends only itself, and returns what the server granted it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from harness.auth_site import make_site
from harness.bulk import Route, tls_route, wait_for_bulk
from harness.payloads import filled, is_payload, key_of, namespace_of, payload
from harness.polling import async_wait_until, wait_until
from harness.server_process import MIB, ServerProcess

from kvtier.client import (
    AsyncClient,
    Client,
    DeadlineExceeded,
    HoldName,
    KVTierError,
    NotClaimedReason,
    StoreStatus,
    Timeouts,
)
from kvtier.protos.credentials import Credentials

NAMESPACE = namespace_of(MIB)
KEPT, STORED, NEW = key_of(0), key_of(1), [key_of(number) for number in range(8, 12)]
PATIENT = Timeouts(connect=60.0, call=60.0, transfer=60.0)
HASTY = Timeouts(connect=60.0, call=0.3, transfer=0.3)
ROUTES = {
    "shm": ("unix", "shm"),
    "unix": ("unix", "tcp"),
    "tcp": ("tcp", "tcp"),
    "tls": ("tls", "tcp"),
    "grpc": ("tcp", "grpc"),
    "grpc over tls": ("tls", "grpc"),
}
"""Per name the kind of server, and the transport of the client."""


@pytest.fixture(
    params=[pytest.param(name, marks=() if name in ("shm", "tcp") else pytest.mark.slow) for name in ROUTES]
)
def route(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Route, str]]:
    kind, transport = ROUTES[request.param]
    if kind == "tls":
        site = make_site(tmp_path, region=64 * MIB)
        with site.server.start():
            yield tls_route(site), transport
        return
    with ServerProcess(tmp_path, tcp=True, config="[sessions]\nheartbeat_interval = 4.0").start() as server:
        yield Route(kind, server, server.tcp if kind == "tcp" else server.endpoint, Credentials()), transport


def options(route: tuple[Route, str], timeouts: Timeouts) -> dict[str, Any]:
    where, transport = route
    return {
        "endpoint": where.endpoint,
        "namespace": NAMESPACE,
        "credentials": where.credentials,
        "transport": transport,
        "timeouts": timeouts,
    }


class Bystander:
    """A session with a lease, which no interrupted operation may cost."""

    def __init__(self, client: Any, server: ServerProcess) -> None:
        self.client, self.server = client, server

    async def begin(self) -> None:
        await self.client.wait_until_connected(60)
        await self.client.store([KEPT, STORED], [payload(key, MIB) for key in (KEPT, STORED)])
        self.lease = await self.client.lookup([KEPT], lease=600)
        self.session = self.client._transport.session
        if self.session.region is None and self.client._transport._sockets._enabled:
            await asyncio.to_thread(wait_for_bulk, self.client)

    async def check(self) -> None:
        """The session and its lease live, and the server has everything back."""
        assert self.client._transport.session is self.session, "the session has ended"
        async with self.client.read(self.lease, [0]) as batch:
            assert is_payload(KEPT, batch.views()[0])
        await asyncio.to_thread(
            self.server.wait_for,
            lambda status: (status.leases, status.stores, status.quarantined_bytes) == (1, 0, 0),
            20,
        )
        assert self.client._transport.session is self.session, "the session has ended"


@contextlib.asynccontextmanager
async def bystander(route: tuple[Route, str], timeouts: Timeouts = PATIENT) -> AsyncIterator[Bystander]:
    async with AsyncClient(**options(route, PATIENT)) as client:
        made = Bystander(client, route[0].server)
        await made.begin()
        client._operations._timeouts = timeouts
        yield made


async def _write(client: AsyncClient) -> None:
    async with client.write(NEW) as batch:
        for view in batch.views():
            view[:] = bytes(len(view))


async def _read(client: AsyncClient, lease: Any) -> None:
    async with client.read(lease, [0]):
        pass


def operations(client: AsyncClient, lease: Any) -> dict[str, Callable[[], Awaitable[object]]]:
    hold = HoldName("other", "request")
    return {
        "lookup": lambda: client.lookup([STORED], wait=20),
        "begin_request": lambda: client.begin_request("r", [STORED], wait=20),
        "prefetch": lambda: client.prefetch([STORED], wait=20),
        "load": lambda: client.load([STORED], filled(1, MIB), wait=20),
        "store": lambda: client.store(NEW, [payload(key, MIB) for key in NEW]),
        "write": lambda: _write(client),
        "read": lambda: _read(client, lease),
        "read by id": lambda: _read(client, lease.id),
        "flush": lambda: client.flush([STORED], wait=20),
        "publish": lambda: client.publish("r", [STORED], [0], num_tokens=16, hold_for=1),
        "claim": lambda: client.claim(hold, wait=20),
        "touch": lambda: client.touch(lease.id, lease=600),
        "renew_holds": lambda: client.renew_holds(hold),
        "release_holds": lambda: client.release_holds(hold),
        "report": lambda: client.report_not_claimed(hold, request_id="r", reason=next(iter(NotClaimedReason))),
        "finish_request": lambda: client.finish_request("r"),
        "status": client.status,
    }


async def test_cancelled_while_the_server_is_stopped(route: tuple[Route, str]) -> None:
    """Each operation is cancelled before the server has read it; the server then serves it."""
    async with bystander(route) as kept:
        for name, begin in operations(kept.client, kept.lease).items():
            kept.server.suspend()
            task = asyncio.ensure_future(begin())
            await asyncio.wait([task], timeout=0.05)
            assert not task.done(), name
            task.cancel()
            done, _ = await asyncio.wait([task], timeout=5)
            kept.server.resume()
            assert done, f"{name} does not end while the server is stopped"
            assert task.cancelled(), name
            await kept.check()


async def test_without_an_answer_in_time(route: tuple[Route, str]) -> None:
    """Each operation raises after its timeout, and a later one of the session succeeds."""
    async with bystander(route, HASTY) as kept:
        kept.server.suspend()
        begun = operations(kept.client, kept.lease)
        for name in ("lookup", "begin_request", "prefetch", "load", "flush", "claim"):
            del begun[name]  # they wait for longer; see the next test
        errors = await asyncio.gather(*(begin() for begin in begun.values()), return_exceptions=True)
        kept.server.resume()
        assert all(isinstance(error, KVTierError) for error in errors), errors
        kept.client._operations._timeouts = PATIENT
        await kept.check()


async def test_lookups_without_an_answer_in_time(route: tuple[Route, str]) -> None:
    """The leases that the server grants to them later end."""
    async with bystander(route, HASTY) as kept:
        kept.server.suspend()
        calls = [kept.client.lookup([STORED]), kept.client.begin_request("r", [STORED])]
        calls.append(kept.client.load([STORED], filled(1, MIB)))
        errors = await asyncio.gather(*calls, return_exceptions=True)
        kept.server.resume()
        assert all(isinstance(error, DeadlineExceeded) for error in errors), errors
        kept.client._operations._timeouts = PATIENT
        await kept.check()


async def test_leases_are_renewed_after_a_stop(route: tuple[Route, str]) -> None:
    """Renewals that get no answer cost nothing; one after the stop extends the lease."""
    async with bystander(route, HASTY) as kept:
        kept.server.suspend()
        for _ in range(2):
            with pytest.raises(DeadlineExceeded):
                await kept.client.touch(kept.lease.id, lease=300)
        kept.server.resume()
        kept.client._operations._timeouts = PATIENT
        assert await kept.client.touch(kept.lease.id, lease=300) == []
        await kept.check()


async def test_the_end_of_one_connection(route: tuple[Route, str]) -> None:
    """If the connection of a call breaks, the call raises, and the session lives."""
    async with bystander(route) as kept:
        calls = kept.client._transport._current_socket_calls()
        if calls is None:
            pytest.skip("calls over gRPC share one connection with the session")
        task = asyncio.ensure_future(kept.client.claim(HoldName("other", "request"), wait=60))
        await async_wait_until(lambda: bool(calls._busy))
        for connection in calls._busy:
            connection.writer.transport.abort()
        with pytest.raises(KVTierError):
            await asyncio.wait_for(task, 60)
        await kept.check()


async def test_cancelled_at_any_moment(route: tuple[Route, str]) -> None:
    """Stores and loads are cancelled between their calls, and while their bytes move."""
    async with bystander(route) as kept:
        calls = operations(kept.client, kept.lease)
        names = ("lookup", "begin_request", "load", "store", "write", "read", "claim")
        for number, name in zip(range(140), itertools.cycle(names), strict=False):
            task = asyncio.ensure_future(calls[name]())
            await asyncio.wait([task], timeout=number % 20 / 2000)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, KVTierError):
                if (found := await task) is not None and hasattr(found, "release"):
                    await found.release()
        await kept.check()


async def test_many_cancelled_at_once(route: tuple[Route, str]) -> None:
    """Hundreds of stores and lookups of a stopped server leave nothing behind."""
    async with bystander(route) as kept:
        kept.server.suspend()
        keys = [key_of(number, salt="many") for number in range(16)]
        calls: list[Any] = [kept.client.store([key], [payload(key, MIB)]) for key in keys]
        calls += [kept.client.lookup([STORED]) for _ in range(100)]
        tasks = [asyncio.ensure_future(call) for call in calls]
        await asyncio.wait(tasks, timeout=0.3)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=10)
        kept.server.resume()
        assert all(task.cancelled() for task in tasks)
        await kept.check()
        assert (await kept.client.store(keys, [payload(key, MIB) for key in keys])) == bytes([1]) * len(keys)


def test_failed_bodies_of_writes(route: tuple[Route, str]) -> None:
    """The blocks can be stored again at once, over the same session."""
    with Client(**options(route, PATIENT)) as client:
        client.wait_until_connected(60)
        session = client._transport.session
        for error in (ValueError("the engine's"), MemoryError(), KVTierError("of another server")):
            with pytest.raises(type(error)):
                _write_and_raise(client, error)
        assert set(client.store(NEW, [payload(key, MIB) for key in NEW])) == {StoreStatus.GRANTED}
        assert client._transport.session is session


def _write_and_raise(client: Client, error: Exception) -> None:
    with client.write(NEW) as batch:
        assert set(batch.statuses) == {StoreStatus.GRANTED}
        raise error


@pytest.mark.parametrize("place", ["lookups.lookup_result", "loads.Reading", "stores.Writing", "stores.WriteBatch"])
def test_an_interruption_between_two_steps_leaves_no_grant(
    route: tuple[Route, str], place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interruption comes after the server's answer, before the operation uses it."""
    with Client(**options(route, PATIENT)) as client:
        client.wait_until_connected(60)
        client.store([STORED], [payload(STORED, MIB)])
        buffers = filled(1, MIB)
        interrupted = []

        def interrupt(*_: object, **__: object) -> None:
            interrupted.append(place)
            raise KeyboardInterrupt

        def write() -> None:
            with client.write([NEW[1]]) as batch:
                batch.views()[0][:] = payload(NEW[1], MIB)

        calls = (
            lambda: client.load([STORED], buffers),
            lambda: client.store(NEW[:1], [payload(NEW[0], MIB)]),
            write,
        )
        with monkeypatch.context() as patch:
            patch.setattr(f"kvtier.client.operations.{place}", interrupt)
            for call in calls:
                with contextlib.suppress(KeyboardInterrupt):
                    call()
        assert interrupted or (place, route[1] != "shm") == ("loads.Reading", True)
        route[0].server.wait_for(lambda status: (status.leases, status.stores) == (0, 0), 20)


class _Alarm:
    """Raises KeyboardInterrupt in the main thread after some milliseconds."""

    def __init__(self) -> None:
        self.armed = False

    def __call__(self, _: int, __: FrameType | None) -> None:
        if self.armed:
            self.armed = False
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def after(self, seconds: float) -> Iterator[None]:
        self.armed = True
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            yield
        finally:
            self.armed = False
            signal.setitimer(signal.ITIMER_REAL, 0)


# Python ignores a KeyboardInterrupt within a destructor, and pytest warns of it.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_keyboard_interrupts(route: tuple[Route, str]) -> None:
    """The synchronous client is interrupted at any moment of a store or a load."""
    server = route[0].server
    alarm = _Alarm()
    before = signal.signal(signal.SIGALRM, alarm)
    try:
        with Client(**options(route, PATIENT)) as client:
            client.wait_until_connected(60)
            client.store([KEPT, STORED], [payload(key, MIB) for key in (KEPT, STORED)])
            lease = client.lookup([KEPT], lease=600)
            session = client._transport.session
            new, buffers = [payload(key, MIB) for key in NEW], filled(1, MIB)
            calls = (lambda: client.store(NEW, new), lambda: client.load([STORED], buffers))
            for number in range(60):
                with contextlib.suppress(KeyboardInterrupt), alarm.after((number + 1) / 5000):
                    calls[number % 2]()
            server.suspend()
            for call in calls:
                with pytest.raises(KeyboardInterrupt), alarm.after(0.2):
                    call()
            server.resume()
            wait_until(lambda: server.status().stores == 0)
            server.wait_for(lambda status: (status.leases, status.quarantined_bytes) == (1, 0), 20)
            assert client._transport.session is session
            with client.read(lease, [0]) as batch:
                assert is_payload(KEPT, batch.views()[0])
    finally:
        signal.signal(signal.SIGALRM, before)
