"""Listening sockets: exclusive claim of a Unix socket, stale sockets, and free TCP ports.

gRPC replaces an existing socket at the path that it binds, even if another server listens on that
socket. So a server first locks a file next to the socket. When the server's process ends, the
kernel releases the lock.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
from pathlib import Path

from ...protos.endpoint import Endpoint, default_endpoint

__all__ = ["SocketClaim", "SocketError", "port_error"]

_ATTEMPTS = 10


class SocketError(Exception):
    """A server cannot listen on this socket; the message is one line."""


class SocketClaim:
    """Exclusive right to listen on a Unix socket, from construction to `release`.

    The constructor creates missing directories (mode 0700) and removes the socket of a server that
    has ended. It raises `SocketError`, for example if the default directory belongs to another
    user.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        if endpoint.path is None:
            raise SocketError(f"{endpoint} is not a Unix socket")
        self.path = Path(endpoint.path)
        self._lock_path = self.path.with_name(self.path.name + ".lock")
        self._lock: int | None = None
        try:
            _prepare_directory(self.path.parent)
            self._lock = _lock(self._lock_path, endpoint)
            _remove_stale(self.path)
        except OSError as error:
            self._unlock()
            raise SocketError(f"{endpoint}: {error.filename or self.path}: {error.strerror}") from None
        except SocketError:
            self._unlock()
            raise

    def restrict(self) -> None:
        """Restricts the socket to its owner (0600), after gRPC has bound it."""
        with contextlib.suppress(FileNotFoundError):
            self.path.chmod(0o600)

    def release(self) -> None:
        """Removes the socket and releases the path. Idempotent."""
        if self._lock is not None:
            # This process still holds the lock, so the socket cannot belong to another server.
            with contextlib.suppress(OSError):
                self.path.unlink()
            self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            with contextlib.suppress(OSError):
                self._lock_path.unlink()
            os.close(self._lock)
            self._lock = None


def port_error(endpoint: Endpoint) -> OSError | None:
    """Returns the error that listening on this TCP address causes now; None if it is possible."""
    try:
        family, kind, number, _, where = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, number) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where)
    except UnicodeError:  # a label of the name is empty or too long
        return OSError(errno.EINVAL, "not the name of a host")
    except OSError as error:
        return error
    return None


def _prepare_directory(directory: Path) -> None:
    """Creates the directory. If it is the default, protects it against other users."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    if directory != Path(default_endpoint().path or "").parent:
        return  # the operator chose this directory and may share it on purpose
    status = directory.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise SocketError(f"{directory} is not a directory")
    if status.st_uid != os.getuid():
        raise SocketError(f"{directory} belongs to user {status.st_uid}, who could answer instead of the server")
    if stat.S_IMODE(status.st_mode) & 0o077:
        directory.chmod(0o700)


def _lock(path: Path, endpoint: Endpoint) -> int:
    """Returns the descriptor of the locked file. Raises `SocketError` if it is locked."""
    for _ in range(_ATTEMPTS):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            break
        # If another server ended between `open` and `flock`, it has removed the file. Then the lock
        # has no effect, and the next attempt creates a new file.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
        os.close(descriptor)
    raise SocketError(f"{endpoint} is in use: another server listens there")


def _remove_stale(path: Path) -> None:
    """Removes the socket of a killed server. Raises `SocketError` for any other file."""
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise SocketError(f"unix:{path}: the file is not a socket")
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        # A program that does not use this lock may listen there.
        if probe.connect_ex(str(path)) not in (errno.ECONNREFUSED, errno.ENOENT):
            raise SocketError(f"unix:{path} is in use: another program listens there")
    path.unlink(missing_ok=True)
