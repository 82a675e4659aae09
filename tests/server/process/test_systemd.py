"""Messages to the service manager (sd_notify); the server also runs without one."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.launch import launch

from kvtier.server.process.systemd import ServiceManager
from kvtier.server.telemetry.downgrades import Downgrades


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[socket.socket]:
    """Yields the socket on which a service manager listens."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(f"{tmp_path}/notify")
        listener.settimeout(60)
        yield listener


def _heard(manager: socket.socket) -> str:
    return manager.recv(256).decode()


def test_the_manager_is_told_of_start_and_end(
    manager: socket.socket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A serving server sends READY=1, then watchdog messages of its loop, then STOPPING=1."""
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


def test_a_missing_manager_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With no listener at NOTIFY_SOCKET the server serves and ends normally."""
    monkeypatch.setenv("NOTIFY_SOCKET", f"{tmp_path}/none")
    with launch(tmp_path, "--cpu-only") as server:
        server.wait_ready()
        assert server.end() == 0


def test_an_abstract_socket_is_supported() -> None:
    """A path that begins with @ names a socket in the kernel's abstract namespace."""
    name = f"kvtier-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(f"\0{name}")
        listener.settimeout(60)
        ServiceManager(Downgrades(), {"NOTIFY_SOCKET": f"@{name}"}).ready()
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
def test_watchdog_settings_of_another_process_are_ignored(environment: dict[str, str], seconds: float | None) -> None:
    """An invalid interval is ignored, too."""
    assert ServiceManager(Downgrades(), environment).watchdog_seconds == seconds
