"""Trust check of files: whether users other than root and this process's user can change them.

A configuration, token or key that another user can write gives that user the rights of the server.
So the check covers the file, each directory on its path, and each symbolic link on it with the path
of its target:

| object | is refused if |
|---|---|
| each | it belongs to another user than root and the user of this process |
| file | other users, or a group with other members, may write to it |
| directory | the same, unless its sticky bit protects its entries, or its mount is read-only |

The check trusts the owner of "/", because this user can replace every program. In a user namespace
without root, this is the overflow user 65534. Kubernetes mounts secrets below a directory of mode
0777, read-only.
"""

from __future__ import annotations

import contextlib
import grp
import os
import pwd
import stat
from errno import EAGAIN, ELOOP, EPERM
from pathlib import Path
from typing import BinaryIO

__all__ = ["UntrustedFileError", "check_trusted", "mode_of_readable", "open_trusted", "read_trusted"]

_ACL = "system.posix_acl_access"
_ATTEMPTS = 10
_MAX_LINKS = 40
"""Links on a path, as in the kernel."""


class UntrustedFileError(PermissionError):
    """Another user can change a file. `strerror` is one line that names the object at fault."""

    def __init__(self, problem: str, path: str | os.PathLike[str]) -> None:
        super().__init__(EPERM, problem, os.fspath(path))


def open_trusted(path: str | os.PathLike[str]) -> BinaryIO:
    """Opens a file for reading. Raises `UntrustedFileError`, other `OSError`.

    The check concerns the opened file, so a change of the path between check and reading has no
    effect.
    """
    for _ in range(_ATTEMPTS):
        with contextlib.ExitStack() as refused:
            file = refused.enter_context(open(path, "rb"))  # noqa: PTH123 - accepts what `open` accepts
            opened = os.fstat(file.fileno())
            if _is_anonymous(path, opened):
                _check(os.fspath(path), opened)
            elif not os.path.samestat(opened, check_trusted(path)):
                continue  # the owner has replaced the file since it was opened
            refused.pop_all()
            return file
    raise OSError(EAGAIN, "changes while it is read", os.fspath(path))


def read_trusted(path: str | os.PathLike[str], limit_bytes: int = -1) -> bytes:
    """Returns at most `limit_bytes` of a file, which `open_trusted` opens."""
    with open_trusted(path) as file:
        return file.read(limit_bytes)


def check_trusted(path: str | os.PathLike[str]) -> os.stat_result:
    """Returns the status of a file or directory. Raises `UntrustedFileError`, other `OSError`."""
    place = "/"
    status = os.lstat(place)
    _check(place, status)
    left = _parts(os.path.abspath(path))  # noqa: PTH100
    links = 0
    while left:
        name = left.pop()
        if name == "..":
            place = os.path.dirname(place)  # noqa: PTH120
            status = os.lstat(place)
            continue
        here = os.path.join(place, name)  # noqa: PTH118
        status = os.lstat(here)
        _check(here, status)
        if not stat.S_ISLNK(status.st_mode):
            place = here
            continue
        links += 1
        if links > _MAX_LINKS:
            raise OSError(ELOOP, os.strerror(ELOOP), os.fspath(path))
        target = os.readlink(here)  # noqa: PTH115
        left += _parts(target)
        if target.startswith("/"):
            place = "/"
    return status


def mode_of_readable(path: str | os.PathLike[str]) -> int | None:
    """Returns the mode of a file that every user may read; None of another or missing file."""
    try:
        mode = stat.S_IMODE(Path(path).stat().st_mode)
    except OSError:
        return None
    return mode if mode & stat.S_IROTH else None


def _parts(path: str) -> list[str]:
    """Returns the names of a path, the last one first."""
    return [name for name in reversed(path.split("/")) if name not in ("", ".")]


def _is_anonymous(path: str | os.PathLike[str], opened: os.stat_result) -> bool:
    """Returns whether this is a pipe without a name, such as `/dev/fd/63` of `<(command)`."""
    return not stat.S_ISREG(opened.st_mode) and os.path.realpath(path).startswith("/proc/")


def _check(place: str, status: os.stat_result) -> None:
    owners = {0, os.geteuid(), os.lstat("/").st_uid}
    if status.st_uid not in owners:
        raise UntrustedFileError(f"{place} belongs to user {status.st_uid}, who can change it: chown {place}", place)
    if stat.S_ISLNK(status.st_mode) or not (writers := _writers(place, status)):
        return
    if stat.S_ISDIR(status.st_mode) and (status.st_mode & stat.S_ISVTX or _is_read_only(place)):
        return
    mode = stat.S_IMODE(status.st_mode)
    raise UntrustedFileError(f"{place} has mode {mode:04o}, so {writers} can change it: chmod go-w {place}", place)


def _writers(place: str, status: os.stat_result) -> str:
    """Returns which other users may write, as text; "" if none may."""
    if status.st_mode & stat.S_IWOTH:
        return "every user"
    if not status.st_mode & stat.S_IWGRP:
        return ""
    # With an access list, the bits of the group are the mask of all listed users.
    if _has_access_list(place):
        return "users of its access list"
    group = status.st_gid
    # A further group of the process is for example that of a volume in Kubernetes (fsGroup).
    if group == 0 or (group in {os.getegid(), *os.getgroups()} and _is_private(group)):
        return ""
    return f"group {group}"


def _is_private(group: int) -> bool:
    """Returns whether no user except root and the user of this process is in a group."""
    own = os.geteuid()
    try:
        members = {pwd.getpwnam(name).pw_uid for name in grp.getgrgid(group).gr_mem}
    except KeyError:  # the group has no name, or an unknown member
        members = set()
    members |= {user.pw_uid for user in pwd.getpwall() if user.pw_gid == group}
    return members <= {0, own}


def _has_access_list(place: str) -> bool:
    try:
        return bool(os.getxattr(place, _ACL, follow_symlinks=False))
    except OSError:  # none, or not supported
        return False


def _is_read_only(place: str) -> bool:
    return bool(os.statvfs(place).f_flag & os.ST_RDONLY)
