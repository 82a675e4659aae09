"""TOML files with credentials: reading, and reading again when they have changed."""

from __future__ import annotations

import os
import re
import stat
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from ...protos.trusted_files import open_trusted
from ..telemetry.downgrades import Report
from ..telemetry.logs import get_logger
from .roles import Role

__all__ = ["FileError", "ReloadedFile", "read_toml"]

_log = get_logger(__name__)

T = TypeVar("T")

_MAX_BYTES = 4 << 20
_FORBIDDEN_MODE = stat.S_IWGRP | stat.S_IRWXO
"""A group may read the file: Kubernetes gives mode 0440 to the secrets of a pod with `fsGroup`."""
_TOML_TYPES = {"bool": "boolean", "datetime": "date and time", "int": "integer", "object": "table", "str": "string"}


class FileError(Exception):
    """A file cannot be used; the message is one line and contains no secret."""


def read_toml(path: Path, kind: type[T], *, private: str = "", trusted: bool = True) -> T:
    """Reads a file. Raises `FileError`, with `trusted` also if other users can write it.

    `private`: what other users may not use, such as "the keys".
    """
    try:
        with open_trusted(path) if trusted else path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            text = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise FileError(f"{path}: cannot be read: {error.strerror}") from None
    if private and mode & _FORBIDDEN_MODE:
        raise FileError(f"{path}: has mode {mode:04o}, so other users can use {private}: chmod 0600")
    if len(text) > _MAX_BYTES:
        raise FileError(f"{path}: is larger than {_MAX_BYTES} bytes")
    try:
        return msgspec.convert(tomllib.loads(text.decode()), kind)
    except msgspec.ValidationError as error:
        raise FileError(f"{path}: {_explain(f'{error}')}") from None
    except (ValueError, RecursionError) as error:  # an integer of over 4,300 digits
        raise FileError(f"{path}: is not TOML: {error}") from None


class ReloadedFile(Generic[T]):
    """Content of a file. If the file changes and cannot be used, the previous content stays."""

    def __init__(self, path: Path, read: Callable[[Path], T], failure: str, report: Report = lambda _: None) -> None:
        """Raises `FileError` as `read` does. `report`: why the content is not that of the file.

        `failure`: what that means, for the log and `report`.
        """
        self.path = path
        self._read = read
        self._failure = failure
        self._report = report
        self._version = _version_of(path)
        self._refusal = ""
        """Error of the last reading, which is logged once."""
        self.content = read(path)

    def refresh(self) -> bool:
        """Reads the file if it has changed; returns whether `content` is new."""
        if (version := _version_of(self.path)) == self._version:
            return False
        try:
            self.content = self._read(self.path)
        except FileError as error:
            if str(error) != self._refusal:
                _log.error(self._failure, error=str(error))
            self._refusal = str(error)
            self._report(f"{self._failure}: {error}")
            self._version = ()  # read again, because a directory's mode may be the fault
            return False
        self._version, self._refusal = version, ""
        self._report("")
        return True


def _version_of(path: Path) -> tuple[int, ...] | None:
    """Returns a value that changes with the file's contents, owner or mode."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino


def _explain(problem: str) -> str:
    """Converts a message of msgspec to TOML terms. Tables are counted from 1."""
    what, _, where = problem.partition(" - at `$.")
    place = re.fullmatch(r"(\w+)(?:\[(\d+)\])?\.?([\w\[\].]*)`", where)
    if "matching regex" in what:
        what = "must be sha256: and 64 hexadecimal digits, as `kvtier token new` prints it"
    elif what.startswith("Invalid enum value"):
        what = f"{what}; valid roles are {', '.join(role.value for role in Role)}"
    elif what.startswith("Expected"):
        what = re.sub(r"`(\w+)( \| null)?`", lambda found: f"`{_TOML_TYPES.get(found[1], found[1])}`", what)
    what = re.sub(r"^Object (contains )?", "", what)
    what = what[:1].lower() + what[1:]
    if not place:
        return what
    table, number, key = place.groups()
    numbered = f", number {int(number) + 1}" if number else ""
    return f"{table}{numbered}: {key}{': ' if key else ''}{what}"
