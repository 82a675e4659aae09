"""Connector to the socket for streams: which session and which connection its streams use."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
from harness.polling import wait_until
from harness.signals import interrupted_at

from kvtier.client.errors import NotConnected
from kvtier.client.session.session import ClientSession
from kvtier.client.session.socket_calls import SocketCalls, SocketTarget
from kvtier.client.transport import socket_connector
from kvtier.client.transport.socket_connector import GrpcStreams, SocketConnector
from kvtier.protos.credentials import Credentials
from kvtier.protos.endpoint import client_endpoint
from kvtier.protos.v1 import common_pb2, session_pb2


def session_of() -> ClientSession:
    return ClientSession(common_pb2.SessionRef(session_id=bytes(16)), session_pb2.CapabilitiesResponse(), None, "")


@pytest.fixture
def searched(monkeypatch: pytest.MonkeyPatch) -> list[ClientSession]:
    """Sessions for which a search was started. No search finds a socket."""
    sessions: list[ClientSession] = []
    monkeypatch.setattr(SocketConnector, "_find", lambda _, session: sessions.append(session))
    return sessions


@pytest.fixture
def connector() -> Iterator[SocketConnector]:
    made = SocketConnector(mock.Mock(), client_endpoint("unix:/none"), Credentials(), enabled=True)
    yield made
    made.close()


def connected(connector: SocketConnector, session: ClientSession) -> Any:
    """Connects as a search that has found the socket."""
    streams = mock.Mock()
    connector._streams, connector._session = streams, session
    return streams


def test_streams_of_an_ended_session_are_not_used(connector: SocketConnector, searched: list[ClientSession]) -> None:
    """A new session searches anew. Its streams use gRPC meanwhile."""
    old, new = session_of(), session_of()
    streams = connected(connector, old)
    assert connector.stream(old, lambda used: used) is streams
    assert isinstance(connector.stream(new, lambda used: used), GrpcStreams)
    connector.close()
    assert searched == [new]
    streams.close.assert_called_once_with()


def test_a_broken_connection_is_searched_again(connector: SocketConnector, searched: list[ClientSession]) -> None:
    """The stream that notices the end fails. The session names the downgrade."""
    session = session_of()
    streams = connected(connector, session)
    with pytest.raises(NotConnected):
        connector.stream(session, mock.Mock(side_effect=NotConnected("broken")))
    streams.close.assert_called_once_with()
    assert not connector.found
    assert session.transport == "grpc"
    assert list(session.downgrades) == ["kvtier: streams do not use the socket"]
    assert isinstance(connector.stream(session, lambda used: used), GrpcStreams)
    connector.close()
    assert searched == [session]


def test_a_late_failure_does_not_end_a_newer_connection(connector: SocketConnector) -> None:
    """A stream over the earlier connection fails after the connector has found another one."""
    session = session_of()
    connected(connector, session)
    newer = mock.Mock()

    def fail_late(_: Any) -> None:
        connector._streams = newer
        raise NotConnected("broken")

    with pytest.raises(NotConnected):
        connector.stream(session, fail_late)
    assert connector.stream(session, lambda used: used) is newer
    newer.close.assert_not_called()
    assert not session.downgrades


class Searches:
    """Searches that last until `end`."""

    def __init__(self) -> None:
        self.begun = 0
        self.end = threading.Event()

    def __call__(self, _: ClientSession) -> None:
        self.begun += 1
        self.end.wait()


@pytest.mark.parametrize("is_running", [False, True])
def test_an_interruption_at_any_line_leaves_one_search(*, is_running: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """KeyboardInterrupt in `Thread.is_alive` makes Python forget that a thread runs."""
    session = session_of()
    for line in range(1000):
        searches = Searches()
        connector = SocketConnector(mock.Mock(), client_endpoint("unix:/none"), Credentials(), enabled=True)
        monkeypatch.setattr(connector, "_find", searches)
        if is_running:
            connector.search(session)
        with interrupted_at(line, socket_connector, threading) as lines:
            connector.search(session)
        for _ in range(3):
            connector.search(session)
        wait_until(lambda: searches.begun)  # noqa: B023 - used at once
        found = searches.begun
        searches.end.set()
        connector.close()
        assert (found, searches.begun) == (1, 1), line
        if len(lines) <= line:
            break
    # `Thread.start` executes 12 lines less if the new thread has set its event before.
    assert line > (2 if is_running else 15)


def test_a_second_search_keeps_the_sockets_of_calls_in_progress() -> None:
    session, target = session_of(), SocketTarget("/unused", common_pb2.SessionRef(), Credentials())
    used, second = SocketCalls(target), SocketCalls(target)
    session.use_calls(used)
    session.use_calls(second)
    assert session.calls is used
    assert not used._closed
    assert second._closed
