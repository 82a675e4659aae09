"""Downgrades of a client: each is logged once as a warning with its cause, and can be read."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from harness.auth_site import make_site
from harness.bulk import wait_for_bulk
from harness.delay_proxy import delay_proxy
from harness.payloads import key_of, namespace_of, payload
from harness.polling import wait_until
from harness.server_process import ServerProcess
from harness.traffic import PART, wait_connected

from kvtier.client import AsyncClient, Client, InvalidRequest
from kvtier.client.session import reconnect as reconnect_module
from kvtier.client.session import session as session_module
from kvtier.cuda.host import copy
from kvtier.cuda.host.pinning import PinError, Pinning
from kvtier.cuda.host.region import RegionError
from kvtier.protos.v1 import common_pb2, session_pb2

NAMESPACE = namespace_of(PART)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path, tcp=True) as process:
        yield process.start()


def warnings_of(caplog: pytest.LogCaptureFixture, text: str) -> list[str]:
    return [
        each.getMessage() for each in caplog.records if each.levelno == logging.WARNING and text in each.getMessage()
    ]


def reconnect(client: Client, times: int = 2) -> None:
    for _ in range(times):
        session = client._transport.session
        client._transport.invalidate(session)
        wait_until(lambda: client._transport.session not in (None, session))  # noqa: B023 - called here


@pytest.mark.parametrize("endpoint", ["endpoint", "tcp"])
def test_a_hidden_socket_of_the_region(server: ServerProcess, caplog: pytest.LogCaptureFixture, endpoint: str) -> None:
    """As in another container. The remedy is named; a reconnection does not repeat the warning."""
    shutil.move(f"{server.path}.shm", f"{server.path}.hidden")
    with Client(getattr(server, endpoint), namespace=NAMESPACE) as client:
        wait_connected(client)
        reconnect(client)
        [cause] = [each for each in client.downgrades if each.startswith("shared memory is not used")]
        assert "mount its directory at the same path" in cause
        assert warnings_of(caplog, "shared memory is not used") == [f"kvtier: {cause}"]
        shutil.move(f"{server.path}.hidden", f"{server.path}.shm")
        reconnect(client, 1)
        assert client.transport == "shm"
        assert client.downgrades == ()


def test_a_region_of_another_user(
    server: ServerProcess, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The warning names the remedy, and `shm` is refused with it."""

    def stat(path: str) -> os.stat_result:
        raise PermissionError(path)

    names = SimpleNamespace(stat=stat, getpid=os.getpid)
    monkeypatch.setattr(reconnect_module, "os", names)
    with Client(server.endpoint, namespace=NAMESPACE) as client:
        wait_connected(client)
        assert "run the engine as the server's user" in client.downgrades[0]
        assert warnings_of(caplog, "shared memory is not used") == [f"kvtier: {client.downgrades[0]}"]
    with (
        Client(server.endpoint, namespace=NAMESPACE, transport="shm") as client,
        pytest.raises(InvalidRequest, match="run the engine as the server's user"),
    ):
        client.wait_until_connected(60)


def test_a_region_that_cannot_be_mapped(
    server: ServerProcess, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For lack of address space, for example. The server's status names the session."""

    def refuse(*_: object) -> None:
        raise RegionError("no address space")

    monkeypatch.setattr(session_module.HostRegion, "attach", refuse)  # type: ignore[attr-defined]
    with Client(server.endpoint, namespace=NAMESPACE) as client:
        wait_connected(client)
        reconnect(client)
        [said] = warnings_of(caplog, "shared memory is not used")
        assert said.endswith("no address space")
        assert any(said.endswith(cause) for cause in client.downgrades)

        def shown() -> list[str]:
            return [each.cause for each in server.status().downgrades if each.feature == "shared_memory"]

        wait_until(shown, 60, interval=0.5)
        assert f"pid {os.getpid()}" in shown()[0]


def test_credentials_without_shared_memory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    site = make_site(tmp_path)
    with (
        site.server.start(),
        Client(site.server.tcp, namespace=NAMESPACE, credentials=site.credentials("acme-far")) as client,
    ):
        wait_connected(client)
        assert "the server does not share its memory with these credentials" in client.downgrades[0]
        assert len(warnings_of(caplog, "shared memory is not used")) == 1


def test_a_port_behind_a_firewall(server: ServerProcess, caplog: pytest.LogCaptureFixture) -> None:
    """The client reaches the port of gRPC only: one warning with the address, for many streams."""
    with (
        delay_proxy(server.tcp, host="127.0.0.2") as through,
        Client(through, namespace=NAMESPACE, transport="tcp") as client,
    ):
        wait_connected(client)
        key = key_of(1)

        def known() -> tuple[str, ...]:
            client.store([key], [payload(key, PART)])
            return client.downgrades

        [cause] = wait_until(known, 60)
        assert "Connection refused" in cause
        assert "127.0.0.2" in cause
        for number in range(2, 40):
            client.store([key_of(number)], [payload(key_of(number), PART)])
        assert warnings_of(caplog, "streams do not use the socket") == [f"kvtier: {cause}"]


def test_a_socket_that_is_removed_later(server: ServerProcess, caplog: pytest.LogCaptureFixture) -> None:
    """As by a cleaner of temporary files: a call that needs a new connection uses gRPC."""
    with Client(server.endpoint, namespace=NAMESPACE) as client:
        wait_connected(client)
        calls = client._transport.session.calls
        taken = calls.take(5.0)  # another thread calls meanwhile
        shutil.move(f"{server.path}.shm", f"{server.path}.hidden")
        for number in range(3):
            assert not client.lookup([key_of(number)]).prefix_hits
        [cause] = client.downgrades
        assert cause.startswith("calls do not use the socket: [Errno 2]")
        assert warnings_of(caplog, "calls do not use the socket") == [f"kvtier: {cause}"]
        shutil.move(f"{server.path}.hidden", f"{server.path}.shm")
        calls.put(taken, intact=True)
        client.lookup([key_of(0)])
        assert client.downgrades == ()


async def test_a_socket_that_is_removed_later_asyncio(server: ServerProcess) -> None:
    async with AsyncClient(server.endpoint, namespace=NAMESPACE) as client:
        await client.wait_until_connected(60)
        shutil.move(f"{server.path}.shm", f"{server.path}.hidden")
        await client.lookup([key_of(0)])
        [cause] = client.downgrades
        assert cause.startswith("calls do not use the socket: [Errno 2]")
        shutil.move(f"{server.path}.hidden", f"{server.path}.shm")
        await client.lookup([key_of(0)])
        assert client.downgrades == ()


def test_memory_that_cannot_be_pinned(server: ServerProcess, caplog: pytest.LogCaptureFixture) -> None:
    """The region and staging buffers: one warning each, also after a reconnection."""

    class Refusal:
        def register(self, address: int, nbytes: int) -> None:
            raise PinError("no locked memory")

        def unregister(self, address: int) -> None:
            raise AssertionError

    for endpoint, transport, words in (
        (server.endpoint, "auto", "the region is not pinned"),
        (server.tcp, "tcp", "staging buffers are not pinned"),
    ):
        with Client(
            endpoint,
            namespace=NAMESPACE,
            transport=transport,
            pin=lambda memory: Pinning(memory, Refusal(), allowed=lambda: True),
        ) as client:
            wait_connected(client)
            client.store([key_of(1)], [payload(key_of(1), PART)])
            with client.read(client.lookup([key_of(1)]), [0]):
                pass
            reconnect(client)
            [cause] = wait_until(lambda: [each for each in client.downgrades if words in each])  # noqa: B023
            assert cause.endswith("no locked memory")
            assert warnings_of(caplog, words) == [f"kvtier: {cause}"]


def test_copies_with_one_thread(server: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cause is that of the process, so each of its clients shows it."""
    monkeypatch.setattr(copy, "_helper", SimpleNamespace(refusal="copies are slower"))
    with Client(server.endpoint, namespace=NAMESPACE) as client:
        wait_connected(client)
        assert client.downgrades == ("copies are slower",)


def test_a_client_without_a_downgrade(server: ServerProcess, caplog: pytest.LogCaptureFixture) -> None:
    for endpoint, transport in ((server.endpoint, "auto"), (server.tcp, "tcp"), (server.endpoint, "grpc")):
        with Client(endpoint, namespace=NAMESPACE, transport=transport) as client:
            wait_connected(client)
            if transport == "tcp":
                wait_for_bulk(client)
            assert client.downgrades == ()
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]


def test_a_downgrade_after_a_recovery_is_logged_again(caplog: pytest.LogCaptureFixture) -> None:
    """Also in a later session of the client. Another cause is another warning."""
    what: session_module.Slower = "kvtier: streams do not use the socket"
    warned: dict[session_module.Slower, str] = {}

    def new_session() -> session_module.ClientSession:
        return session_module.ClientSession(
            common_pb2.SessionRef(), session_pb2.CapabilitiesResponse(), None, "", warned=warned
        )

    session = new_session()
    for cause in ("refused", "refused", "timed out"):
        session.downgraded(what, cause)
    assert session.downgrades == {what: "timed out"}
    session.recovered(what)
    assert session.downgrades == {}
    session.downgraded(what, "timed out")
    new_session().downgraded(what, "timed out")
    causes = ["refused", "timed out", "timed out"]
    assert warnings_of(caplog, what) == [f"{what}: {cause}" for cause in causes]
