"""Intervals between attempts to open a session."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from unittest import mock

import pytest

from kvtier.client.errors import KVTierError, NotConnected
from kvtier.client.session import reconnect
from kvtier.client.session.reconnect import SessionConnection
from kvtier.protos.credentials import Credentials
from kvtier.protos.endpoint import client_endpoint


def intervals(monkeypatch: pytest.MonkeyPatch, *outcomes: Exception | None) -> list[float]:
    """Returns the seconds before each further attempt. None: the session has ended."""
    left, waits = iter(outcomes), list[float]()

    class Closing(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waits.append(timeout or 0.0)
            if len(waits) == len(outcomes):
                self.set()
            return self.is_set()

    def run_session(_: SessionConnection) -> None:
        if (error := next(left)) is not None:
            raise error

    monkeypatch.setattr(SessionConnection, "_run_session", run_session)
    monkeypatch.setattr(reconnect, "_random", SimpleNamespace(uniform=lambda _, high: high))
    names = SimpleNamespace(Event=Closing, Condition=threading.Condition, Thread=threading.Thread)
    monkeypatch.setattr(reconnect, "threading", names)
    made = SessionConnection(mock.Mock(), client_endpoint("unix:/none"), mock.Mock(), 1.0, Credentials())
    made._thread.join()
    made.close()
    return waits


def test_attempts_become_rarer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that is down for long is asked once per second. After a session it starts anew."""
    down = NotConnected("down")
    waits = intervals(monkeypatch, *[down] * 6, None, down)
    assert waits == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 0.05, 0.1]


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), OSError("too many open files")])
def test_a_defect_ends_no_retries(
    monkeypatch: pytest.MonkeyPatch, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    """If a process lacks threads or descriptors, the client tries again, after a second."""
    assert intervals(monkeypatch, error, KVTierError("down"), error) == [1.0, 1.0, 1.0]
    assert "cannot open a session" in caplog.text
