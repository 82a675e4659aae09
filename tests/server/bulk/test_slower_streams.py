"""Downgrades of streams and accepted connections: the status shows each with its cause."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from harness.polling import wait_until

from kvtier.server.bulk.broker_client import BrokerClient
from kvtier.server.bulk.messages import Listening, encode
from kvtier.server.bulk.streams import StreamServer
from kvtier.server.bulk.supervisor import BulkProcess
from kvtier.server.config.schema import LimitConfig
from kvtier.server.process.child_main import Channel
from kvtier.server.rpc.attach_socket import AttachServer
from kvtier.server.telemetry.downgrades import Downgrades

FULL = OSError(24, "Too many open files")


class _Child(Channel):
    """The bulk process, with the server's end of its messages."""

    def __init__(self) -> None:
        connection: Any = None
        super().__init__(connection)
        self.sent: list[dict[str, Any]] = []
        self.handover: Any = SimpleNamespace()
        broker = BrokerClient(self)
        region: Any = None
        self.server = StreamServer(broker, region, LimitConfig(), self.handover)

    def send(self, header: dict[str, Any], payload: bytes = b"") -> None:
        assert not payload
        self.sent.append(header)

    def __iter__(self) -> Any:
        return iter(())


def _slower(subject: str, cause: str) -> dict[str, str]:
    return {"slower": cause, "subject": subject}


class _Failing:
    """Listening socket whose `accept` fails twice, gives a connection, and then waits."""

    def __init__(self) -> None:
        self.ours, self.theirs = socket.socketpair()
        self._answers = iter([FULL, FULL, self.theirs])

    def setblocking(self, _: bool) -> None: ...  # noqa: FBT001 - as a socket has it

    def accept(self) -> tuple[socket.socket, str]:
        answer = next(self._answers, None)
        if isinstance(answer, OSError):
            raise answer
        if answer is None:
            threading.Event().wait()  # the daemon thread ends with the process
        assert isinstance(answer, socket.socket)
        return answer, ""


def test_a_failed_accept_of_the_bulk_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """One report for many failures, and one for the end."""
    child, listener = _Child(), _Failing()
    monkeypatch.setattr(child.server, "_start", lambda sock, _: sock.close())
    child.server.serve(listener)  # type: ignore[arg-type]
    wait_until(lambda: len(child.sent) == 2)
    listener.ours.close()
    cause = f"connections for streams and calls over TCP are not accepted: {FULL}"
    assert child.sent == [_slower("accept", cause), _slower("accept", "")]


def test_a_connection_without_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    child = _Child()

    def refuse(_: object) -> None:
        raise RuntimeError("can't start new thread")

    for fails in (True, True, False):
        ours, theirs = socket.socketpair()
        with monkeypatch.context() as patched, ours:
            patched.setattr(threading.Thread, "start", refuse if fails else lambda _: None)
            child.server._start(theirs, b"")
            assert (theirs.fileno() == -1) == fails
            theirs.close()
    cause = "a connection for streams is closed, because no thread can start: can't start new thread"
    assert child.sent == [_slower("thread", cause), _slower("thread", "")]


def test_a_connection_for_calls_that_cannot_be_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    child, ours = _Child(), SimpleNamespace(fileno=lambda: 7)
    monkeypatch.setattr("kvtier.server.bulk.streams._is_for_calls", lambda *_, **__: True)
    monkeypatch.setattr(
        "kvtier.server.bulk.streams.Connection", lambda *_: SimpleNamespace(set_deadline=lambda _: None)
    )
    for fails in (True, False):

        def send(*_: object, fails: bool = fails) -> None:
            if fails:
                raise FULL

        monkeypatch.setattr(socket, "send_fds", send)
        with contextlib.suppress(OSError):
            child.server._accept_client(ours)  # type: ignore[arg-type]
    cause = f"a connection for calls cannot be passed to the server: {FULL}"
    assert child.sent == [_slower("calls", cause), _slower("calls", "")]


def _bulk() -> tuple[BulkProcess, Downgrades]:
    anything: Any = SimpleNamespace(limits=None, bulk=None, endpoints=(), tls=SimpleNamespace(cert=None))
    downgrades = Downgrades()
    return BulkProcess(anything, anything, anything, lambda sock: sock.close(), (), downgrades), downgrades


def _causes(downgrades: Downgrades) -> list[str]:
    assert all(each.feature == "streams" and each.remedy for each in downgrades.all())
    return [each.cause for each in downgrades.all()]


def test_what_the_child_reports_is_shown_until_it_ends() -> None:
    """Also until the next child serves."""
    process, downgrades = _bulk()
    handover: Any = None

    def take(header: dict[str, str], payload: bytes = b"") -> list[str]:
        process._take(handover, header, payload)
        return _causes(downgrades)

    for subject in ("priority", "accept", "thread", "calls"):
        assert take(_slower(subject, "why")) == ["why"]
        assert take(_slower(subject, "")) == []
    for count, subject in enumerate(("priority", "accept", "thread", "calls"), 1):
        assert len(take(_slower(subject, "why"))) == count
    assert take({}, encode(Listening())) == []


def test_a_connection_that_the_server_cannot_pass_or_take(monkeypatch: pytest.MonkeyPatch) -> None:
    process, downgrades = _bulk()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process._handover = ours
        with monkeypatch.context() as patched:
            for name in ("send_fds", "recv_fds"):
                patched.setattr(socket, name, lambda *_: (_ for _ in ()).throw(FULL))
            assert not process.serve_streams(theirs, b"hello")
            assert _causes(downgrades) == [
                f"a client's streams use the server, because it cannot pass a connection: {FULL}"
            ]
            process._take_over(ours)
            assert len(_causes(downgrades)) == 2
        assert process.serve_streams(theirs, b"hello")
        assert _causes(downgrades) == [
            f"a client's calls use gRPC, because the server cannot take a connection: {FULL}"
        ]
        socket.send_fds(theirs, [b"calls"], [theirs.fileno()])
        process._take_over(ours)
        assert _causes(downgrades) == []


async def test_a_failed_accept_of_the_unix_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reported until the next connection is accepted."""
    reports: list[str] = []
    listener, anything = _Failing(), SimpleNamespace()
    attach = AttachServer(anything, anything, anything, anything, anything, reports.append)  # type: ignore[arg-type]
    served, accepted = asyncio.Event(), []

    async def serve(connection: socket.socket) -> None:
        connection.close()
        served.set()

    async def accept(_: object) -> tuple[socket.socket, str]:
        if accepted:
            await asyncio.Event().wait()
        answer = listener.accept()
        accepted.append(answer)
        return answer

    monkeypatch.setattr(attach, "_serve", serve)
    monkeypatch.setattr(asyncio.get_running_loop(), "sock_accept", accept)
    attach._spawn(attach._accept(listener))  # type: ignore[arg-type]
    await asyncio.wait_for(served.wait(), 60)
    await attach.close()
    listener.ours.close()
    cause = f"clients on this host cannot map the memory, because accept fails: {FULL}"
    assert reports == [cause, cause, ""]
