"""The claim on a Unix socket: one server at a time, cleanup, and files of other programs."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier.protos.endpoint import Endpoint
from kvtier.server.rpc import attach_socket
from kvtier.server.rpc.listening_sockets import SocketClaim, SocketError

CLAIM_AND_WAIT = """
import socket, sys
from kvtier.protos.endpoint import Endpoint
from kvtier.server.rpc.listening_sockets import SocketClaim
claim = SocketClaim(Endpoint(path=sys.argv[1]))
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1]); listener.listen()
print("ready", flush=True)
sys.stdin.read()
"""


def listen(path: Path) -> socket.socket:
    """Listens on a Unix socket, as gRPC does."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()
    return listener


@pytest.mark.usefixtures("no_leaks")
def test_release_removes_socket_and_lock(tmp_path: Path) -> None:
    """New directories are accessible to the owner only."""
    path = tmp_path / "a" / "b" / "k.sock"
    claim = SocketClaim(Endpoint(path=str(path)))
    with listen(path):
        claim.restrict()
        assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    claim.release()
    claim.release()
    assert list(path.parent.iterdir()) == []


@pytest.mark.usefixtures("no_leaks")
def test_a_second_claim_is_refused(tmp_path: Path) -> None:
    """The first claim is unaffected, also before it listens."""
    endpoint = Endpoint(path=str(tmp_path / "k.sock"))
    first = SocketClaim(endpoint)
    for _ in range(2):
        with pytest.raises(SocketError, match=r"^unix:.*/k.sock is in use: another server listens there$"):
            SocketClaim(endpoint)
    first.release()
    SocketClaim(endpoint).release()


def test_files_of_a_killed_server_are_replaced(tmp_path: Path) -> None:
    path = tmp_path / "k.sock"
    command = [sys.executable, "-c", CLAIM_AND_WAIT, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"ready\n"
        with pytest.raises(SocketError, match="in use"):
            SocketClaim(Endpoint(path=str(path)))
        process.send_signal(signal.SIGKILL)
        process.wait(60)
    assert path.exists()
    claim = SocketClaim(Endpoint(path=str(path)))
    assert not path.exists()
    claim.release()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("no_leaks")
def test_files_of_other_programs_stay(tmp_path: Path) -> None:
    """A claim is refused if another program listens there, or if the path is not a socket."""
    path = tmp_path / "k.sock"
    with listen(path), pytest.raises(SocketError, match="another program listens there"):
        SocketClaim(Endpoint(path=str(path)))
    assert path.exists()
    path.unlink()
    path.write_text("precious")
    with pytest.raises(SocketError, match="the file is not a socket"):
        SocketClaim(Endpoint(path=str(path)))
    assert path.read_text() == "precious"


def test_the_default_directory_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A symbolic link in its place is refused."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    directory = tmp_path / "kvtier"
    directory.mkdir(mode=0o755)
    endpoint = Endpoint(path=str(directory / "kvtier.sock"))
    SocketClaim(endpoint).release()
    assert directory.stat().st_mode & 0o777 == 0o700
    directory.rename(tmp_path / "elsewhere")
    directory.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SocketError, match="is not a directory"):
        SocketClaim(endpoint)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give directories away")
def test_a_directory_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the other user could answer in place of the server."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    directory = tmp_path / "kvtier"
    directory.mkdir()
    os.chown(directory, 12345, 12345)
    with pytest.raises(SocketError, match="belongs to user 12345"):
        SocketClaim(Endpoint(path=str(directory / "kvtier.sock")))


def test_an_unusable_path_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SocketError, match=r"Not a directory|File exists"):
        SocketClaim(Endpoint(path=str(tmp_path / "file" / "k.sock")))
    with pytest.raises(SocketError, match="is not a Unix socket"):
        SocketClaim(Endpoint(host="h", port=1))


def test_only_root_and_the_user_of_the_server_may_attach(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel tells the peer's user, independently of the mode of the socket's directory."""

    def peer(uid: int) -> Any:
        return SimpleNamespace(getsockopt=lambda *_: struct.pack("3i", 1, uid, 1))

    monkeypatch.setattr(attach_socket.os, "getuid", lambda: 1000)  # type: ignore[attr-defined]
    assert [attach_socket._is_ours(peer(uid)) for uid in (0, 1000, 1001)] == [True, True, False]
