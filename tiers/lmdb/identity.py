"""Identity of a store: whether kvtier wrote the files in a directory, and for how many blocks.

A store has three marks: the marker file next to `data.mdb`, the names of its databases, and the key
of its format version. Two of them identify a store, so that damage to one mark does not matter.
"""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from .format import DATA_FILE

__all__ = [
    "MARKER_FILE",
    "Layout",
    "Marker",
    "MarkerFile",
    "guarded",
    "is_ours",
    "newer_format_is_damage",
    "read_marker",
]

MARKER_FILE = "kvtier.store"
_MARKER_BYTES = 80
_MARKER = re.compile(r"kvtier ([\w ]+), format (\d+), (\d+) blocks *\n", re.ASCII)
_SEARCHED_BYTES = 1 << 30
"""Limit of the search for names and keys in a file. Each transaction writes them again, so an
intact copy is near the start of the file."""
_PIECE_BYTES = 1 << 20
_LAST_FORMAT = 255
"""A version beyond this value is damage."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Databases, format and growth of an environment, and the name that messages use for it."""

    what: str
    databases: tuple[bytes, ...]
    """Names of the databases: first the metadata with the format version, then the index."""
    format_key: bytes
    format_version: int
    guarded_key: bytes = b""
    """Key of the metadata whose value is a u64 and its complement."""
    block_files: str = ""
    """Pattern of other files with blocks. If there are any, `data.mdb` must not be empty."""


class Marker(NamedTuple):
    """Content of the marker file."""

    what: str
    format: int
    blocks: int
    """Number of blocks in the store. It may be too low after a crash of the server.

    It is never too high after the event that `durability` names. Only a power failure with
    `durability = "process"` can make it too high.
    """


def read_marker(directory: Path) -> Marker | None:
    """Returns the marker; None if the file is missing, unreadable or damaged."""
    with contextlib.suppress(OSError, UnicodeDecodeError), (directory / MARKER_FILE).open("rb") as file:
        if match := _MARKER.fullmatch(file.read(_MARKER_BYTES + 1).decode("ascii")):
            return Marker(match[1], int(match[2]), int(match[3]))
    return None


class MarkerFile:
    """The open marker file of a store: one line, overwritten in place."""

    def __init__(self, directory: Path, layout: Layout, before: int, *, create: bool, sync: bool) -> None:
        """Opens the file. Without `create`, a missing file stays missing. Raises `OSError`.

        With `sync`, a lower number is on the disk when `write` returns.
        """
        self.before = before
        """Number of blocks when the file was opened; 0 once a number is written."""
        self._layout = layout
        self._sync = sync
        self._blocks: int | None = None
        """The number that was written last."""
        self._fd: int | None = None
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT if create else 0)
        with contextlib.nullcontext() if create else contextlib.suppress(FileNotFoundError):
            self._fd = os.open(directory / MARKER_FILE, flags, 0o600)

    def write(self, blocks: int) -> None:
        """Records the number of blocks. An error has no effect except an outdated number."""
        self.before = 0
        if self._fd is None:
            return
        text = f"kvtier {self._layout.what}, format {self._layout.format_version}, {blocks} blocks"
        with contextlib.suppress(OSError):
            os.pwrite(self._fd, f"{text:<{_MARKER_BYTES - 1}}\n".encode("ascii"), 0)
            if self._sync and (self._blocks is None or blocks < self._blocks):
                os.fdatasync(self._fd)
        self._blocks = blocks

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)


def is_ours(directory: Path, layout: Layout) -> bool:
    """Returns whether at least two marks show that kvtier wrote this store. Raises `OSError`."""
    marker = read_marker(directory)
    names = any(_is_in_file(directory, _node(name, _SUB_DATABASE)) for name in layout.databases[1:])
    key = _is_in_file(directory, _node(layout.format_key, _PLAIN))
    return (marker is not None and marker.what == layout.what) + names + key >= 2


def guarded(number: int) -> bytes:
    """Returns the value of a `guarded_key`."""
    return number.to_bytes(8, "little") + (2**64 - 1 - number).to_bytes(8, "little")


def newer_format_is_damage(version: int, layout: Layout, marker: Marker | None) -> bool:
    """Returns whether a version that this release does not know was written by no release.

    The marker then has another version. The versions differ in one bit, or the version is absurd.
    """
    if marker is None or marker.what != layout.what or marker.format == version:
        return False
    return (version ^ marker.format).bit_count() == 1 or version > _LAST_FORMAT


_PLAIN, _SUB_DATABASE = 0, 2
"""Flags of a node of LMDB's tree."""


def _node(key: bytes, flags: int) -> bytes:
    """Returns the bytes in a tree page of LMDB before the value: flags, key length, key."""
    return flags.to_bytes(2, "little") + len(key).to_bytes(2, "little") + key


def _is_in_file(directory: Path, wanted: bytes) -> bool:
    """Searches a file with reads: the pages of a map can cause SIGBUS."""
    window = bytearray()
    with (directory / DATA_FILE).open("rb", buffering=0) as file:
        for _ in range(0, _SEARCHED_BYTES, _PIECE_BYTES):
            piece = file.read(_PIECE_BYTES)
            if not piece:
                return False
            window += piece
            if wanted in window:
                return True
            del window[: -len(wanted)]
    return False
