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
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ...protos.endpoint import Endpoint, default_endpoint

__all__ = ["SocketClaim", "SocketError", "bind_tcp", "port_error"]

_ATTEMPTS = 10
_WILDCARDS = ("0.0.0.0", "::", "*")  # noqa: S104 - addresses that an operator may configure
_NO_SUCH_FAMILY = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL, errno.ENODEV, errno.EPROTONOSUPPORT)
_BACKLOG = 128


class SocketError(Exception):
    """A server cannot listen on this socket; the message is one line."""


class SocketClaim:
    """Exclusive right to listen on a Unix socket, from construction to `release`.

    The constructor creates missing directories (mode 0700) and removes the socket of a server that
    has ended. It raises `SocketError`, for example if the default directory belongs to another
    user.
    """

    def __init__(self, endpoint: Endpoint, holder: str = "another server listens there") -> None:
        """`holder`: text of the error if another process has claimed the socket."""
        if endpoint.path is None:
            raise SocketError(f"{endpoint} is not a Unix socket")
        self.path = Path(endpoint.path)
        self._lock_path = self.path.with_name(self.path.name + ".lock")
        self._lock: int | None = None
        try:
            _prepare_directory(self.path.parent)
            self._lock = _lock(self._lock_path, endpoint, holder)
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
        for listener in bind_tcp([endpoint.host], endpoint.port):
            listener.close()
    except OSError as error:
        return error
    return None


def bind_tcp(hosts: Iterable[str], port: int) -> list[socket.socket]:
    """Returns listening sockets with one port for all addresses of the hosts. Raises `OSError`.

    Port 0 means any. As with gRPC, a wildcard address accepts IPv4 and IPv6, and a name stands for
    all of its addresses.
    """
    for attempt in range(_ATTEMPTS):
        try:
            return _bind_addresses(hosts, port)
        except OSError as error:
            # The port that the kernel chose for one address is in use for another one.
            if port or error.errno != errno.EADDRINUSE or attempt == _ATTEMPTS - 1:
                raise
    return []


def _bind_addresses(hosts: Iterable[str], port: int) -> list[socket.socket]:
    with contextlib.ExitStack() as opened:
        found: list[socket.socket] = []
        for host in _without_duplicates(hosts):
            missing, before = OSError(errno.EADDRNOTAVAIL, "no address"), len(found)
            for family, where in _addresses(host, port):
                try:
                    listener = opened.enter_context(socket.socket(family, socket.SOCK_STREAM))
                    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    if family == socket.AF_INET6:
                        listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, host not in _WILDCARDS)
                    listener.bind((where[0], port, *where[2:]))
                    listener.listen(_BACKLOG)
                except OSError as error:
                    if error.errno not in _NO_SUCH_FAMILY:
                        raise
                    missing = error  # for example, IPv6 is off, and the name has addresses of both
                    continue
                port = listener.getsockname()[1]
                found.append(listener)
                if host in _WILDCARDS:
                    break  # the first one accepts both families
            if len(found) == before:
                raise missing
        opened.pop_all()
        return found


def _without_duplicates(hosts: Iterable[str]) -> list[str]:
    """Returns the hosts, only the wildcard if there is one: it includes the others."""
    names = list(dict.fromkeys(hosts))
    return next(([name] for name in names if name in _WILDCARDS), names)


def _addresses(host: str, port: int) -> Iterator[tuple[socket.AddressFamily, Any]]:
    if host in _WILDCARDS:
        yield socket.AF_INET6, ("::", port)
        yield socket.AF_INET, ("0.0.0.0", port)  # noqa: S104
        return
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError:  # a label of the name is empty or too long
        raise OSError(errno.EINVAL, "not the name of a host") from None
    yield from dict.fromkeys((family, where) for family, _, _, _, where in found)


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


def _lock(path: Path, endpoint: Endpoint, holder: str) -> int:
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
    raise SocketError(f"{endpoint} is in use: {holder}")


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
