"""What a server tells the service manager that started it (sd_notify), and that it needs none."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.launch import launch

from kvtier.server.process.systemd import ServiceManager


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[socket.socket]:
    """The socket on which a service manager listens."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(f"{tmp_path}/notify")
        listener.settimeout(60)
        yield listener


def _heard(manager: socket.socket) -> str:
    return manager.recv(256).decode()


def test_the_manager_hears_when_a_server_serves_and_when_it_ends(
    manager: socket.socket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """READY=1 comes from a server that answers; then word of its loop, and of its end."""
    monkeypatch.setenv("NOTIFY_SOCKET", f"{tmp_path}/notify")
    monkeypatch.setenv("WATCHDOG_USEC", "400000")
    with launch(tmp_path, "--cpu-only") as server:
        assert _heard(manager) == "READY=1"
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(f"{tmp_path}/s")
        assert [_heard(manager) for _ in range(3)] == ["WATCHDOG=1"] * 3
        assert server.end() == 0
        manager.setblocking(False)
        rest = []
        while True:
            try:
                rest.append(_heard(manager))
            except BlockingIOError:
                break
        assert [text for text in rest if text != "WATCHDOG=1"] == ["STOPPING=1"]


def test_a_manager_that_is_gone_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody listens at NOTIFY_SOCKET: the server serves and ends in order."""
    monkeypatch.setenv("NOTIFY_SOCKET", f"{tmp_path}/nobody")
    with launch(tmp_path, "--cpu-only") as server:
        server.wait_ready()
        assert server.end() == 0


def test_an_abstract_socket_is_one_too() -> None:
    """A path that begins with @ is in the kernel's own name space."""
    name = f"kvtier-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(f"\0{name}")
        listener.settimeout(60)
        ServiceManager({"NOTIFY_SOCKET": f"@{name}"}).ready()
        assert _heard(listener) == "READY=1"


@pytest.mark.parametrize(
    ("environment", "seconds"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "3000000"}, 3.0),
        ({"WATCHDOG_USEC": "3000000", "WATCHDOG_PID": f"{os.getpid()}"}, 3.0),
        ({"WATCHDOG_USEC": "3000000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
    ],
)
def test_only_who_is_watched_says_so(environment: dict[str, str], seconds: float | None) -> None:
    """What the manager set for another process, or what is no time, is nothing."""
    assert ServiceManager(environment).watchdog_seconds == seconds
