"""Check of who owns a Unix socket, before a client sends a token there or maps memory from there.

Any user can create `/tmp/kvtier-<uid>` before the server does. So in the default directory, and for
a path that a server named, a client trusts only its own user and root. If the operator chose the
directory, the server may belong to any user.
"""

from __future__ import annotations

import os
import socket
import stat
import struct

from .endpoint import Endpoint, default_endpoint

__all__ = ["ForeignSocketError", "check_connected", "check_path", "is_chosen"]

_CREDENTIALS = struct.Struct("3i")
_ROOT = 0
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class ForeignSocketError(ConnectionError):
    """Another user can answer at this socket. The message is one line."""


def is_chosen(path: str, endpoint: Endpoint) -> bool:
    """Returns whether the operator chose the directory of a socket by giving this endpoint.

    The default directory is never chosen, even if the endpoint names it.
    """
    directory = _directory(path)
    defaults = (default_endpoint(), default_endpoint({}))
    if endpoint.path is None or directory != _directory(endpoint.path):
        return False
    return all(directory != _directory(default.path or "") for default in defaults)


def check_path(path: str) -> None:
    """Checks that the socket at `path` is of this user or root, and only they can replace it.

    Raises `ForeignSocketError`, or `OSError` if there is no socket.
    """
    directory = _directory(path)
    above = os.path.dirname(directory)  # noqa: PTH120 - once per call of gRPC: a fifth of Path's time
    status = os.stat(above)  # noqa: PTH116
    if not _is_ours(status) or (status.st_mode & _OTHERS_WRITE and not status.st_mode & stat.S_ISVTX):
        raise ForeignSocketError(f"other users can replace {directory}, because they can write to {above}")
    status = os.lstat(directory)
    if not stat.S_ISDIR(status.st_mode):
        raise ForeignSocketError(f"{directory} is not a directory")
    if not _is_ours(status):
        raise ForeignSocketError(_not_ours(f"the directory {directory} belongs to", status.st_uid))
    if status.st_mode & _OTHERS_WRITE:
        raise ForeignSocketError(f"other users can write to the directory {directory}")
    status = os.lstat(path)
    if not _is_ours(status):
        raise ForeignSocketError(_not_ours(f"the socket {path} belongs to", status.st_uid))
    if not stat.S_ISSOCK(status.st_mode):
        raise ForeignSocketError(f"{path} is not a socket")


def check_connected(connection: socket.socket, path: str) -> None:
    """Does `check_path`, and checks the user of the process at the other end. Raises `OSError`."""
    check_path(path)
    _, uid, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    if uid not in (_ROOT, os.geteuid()):
        raise ForeignSocketError(f"the server at {path} runs as user {uid}, not as user {os.geteuid()} or root")


def _directory(path: str) -> str:
    return os.path.dirname(os.path.normpath(path))  # noqa: PTH120


def _is_ours(status: os.stat_result) -> bool:
    return status.st_uid in (_ROOT, os.geteuid())


def _not_ours(what: str, uid: int) -> str:
    return f"{what} user {uid}, not to user {os.geteuid()} or root"
