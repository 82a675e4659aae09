"""Names and content of packs: objects that each hold the values of many blocks of one namespace.

A name is `kvtier/packFORMAT/TENANT/NAMESPACE/HOUR/TIME-WRITER-INDEX`, for example
`kvtier/pack3/0001…0e0f/1011…1e1f/2026-11-25T03/1730250-0f1e2d3c4b5a6978-2c4`:

| part | meaning |
|---|---|
| FORMAT | format of the values: 3, or 4 if they are encrypted |
| TENANT | tag of the tenant, so permissions and lifecycle rules can be given per tenant |
| HOUR, TIME | UTC time of the store: hour; minutes, seconds and milliseconds |
| WRITER | random number, because two servers can store at the same time |
| INDEX | size of the index in bytes, hexadecimal |

So names sort by time, and one ranged read fetches the index. A pack is an index followed by the
values of its blocks (`value_codec`, `encryption`) without gaps. An index is:

| bytes | meaning |
|---|---|
| 4 | magic number with the format of the index |
| 4 | number of entries |
| 8 | checksum of the entries, seeded with the namespace |
| per entry | 2 bytes size of the key, 8 bytes size of the value, key |

All numbers are little-endian.
"""

from __future__ import annotations

import re
import secrets
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Self

import xxhash

from ..base import NamespaceId
from ..types import TENANT_TAG_BYTES

__all__ = [
    "FORMATS",
    "ROOT",
    "PackName",
    "PackedValue",
    "decode_index",
    "encode_index",
    "folder_of",
    "format_folder",
    "format_of",
    "hour_of",
    "mark_of",
    "start_of",
]

FORMATS = (3, 4)
"""Formats of packs that a server of this version writes."""
ROOT = "kvtier/"
MAX_INDEX_BYTES = 4 << 20
"""More than an index of the largest batch with the longest keys."""
_MAGIC = b"kvp\x01"
_HEADER = struct.Struct("<4sIQ")
_ENTRY = struct.Struct("<HQ")
_NAME = re.compile(r"(.+/)(\d{4}-\d\d-\d\dT\d\d)/(\d{7})-([0-9a-f]{16})-([0-9a-f]{1,6})", re.ASCII)
_FORMAT = re.compile(rf"{ROOT}pack(\d{{1,6}})/", re.ASCII)


@dataclass(frozen=True, slots=True, order=True)
class PackName:
    """Name of a pack. Names of one folder sort by time."""

    path: str
    written_at: float
    """Time of the store in seconds since 1970, by the clock of the server that stored it."""
    index_bytes: int

    @classmethod
    def new(cls, folder: str, written_at: float, index_bytes: int) -> Self:
        """Returns a new, unique name."""
        return cls(f"{mark_of(folder, written_at)}-{secrets.token_hex(8)}-{index_bytes:x}", written_at, index_bytes)

    @classmethod
    def parse(cls, path: str) -> Self | None:
        """Returns None if the path is not the name of a pack."""
        match = _NAME.fullmatch(path)
        if match is None:
            return None
        _, hour, time, _, size = match.groups()
        try:
            start = datetime.strptime(f"{hour}{time[:4]}+0000", "%Y-%m-%dT%H%M%S%z")
        except ValueError:
            return None
        nbytes = int(size, 16)
        if not _HEADER.size <= nbytes <= MAX_INDEX_BYTES:
            return None
        return cls(path, start.timestamp() + int(time[4:]) / 1000, nbytes)


@dataclass(frozen=True, slots=True)
class PackedValue:
    """Place of a block's value in its pack."""

    key: bytes
    offset_bytes: int
    nbytes: int


def format_folder(value_format: int) -> str:
    """Returns the folder of all packs of a format."""
    return f"{ROOT}pack{value_format}/"


def folder_of(namespace: NamespaceId, value_format: int = FORMATS[0]) -> str:
    """Returns the folder of a namespace's packs."""
    return f"{format_folder(value_format)}{namespace[:TENANT_TAG_BYTES].hex()}/{namespace[TENANT_TAG_BYTES:].hex()}/"


def hour_of(written_at: float) -> str:
    """Returns the folder, below the namespace's, of packs of this time."""
    return f"{datetime.fromtimestamp(written_at, UTC):%Y-%m-%dT%H}"


def mark_of(folder: str, written_at: float) -> str:
    """Returns a path that sorts before all packs of this time and after all earlier ones."""
    milliseconds = int(written_at * 1000)
    time = datetime.fromtimestamp(milliseconds // 1000, UTC)
    return f"{folder}{time:%Y-%m-%dT%H}/{time:%M%S}{milliseconds % 1000:03}"


def start_of(folder: str, hour: str) -> str:
    """Returns a path that sorts before all packs of an hour.

    After the path of a folder, with or without the slash, SeaweedFS lists nothing of the folder.
    """
    return f"{folder}{hour}/0"


def format_of(path: str) -> int | None:
    """Returns the format of the packs in a folder of `ROOT`; None if it is not a pack folder."""
    match = _FORMAT.match(path)
    return int(match.group(1)) if match else None


def encode_index(namespace: NamespaceId, keys: Sequence[bytes], sizes: Sequence[int]) -> bytes:
    """Returns the index of values of these sizes, in this order."""
    entries = b"".join(_ENTRY.pack(len(key), size) + key for key, size in zip(keys, sizes, strict=True))
    return _HEADER.pack(_MAGIC, len(keys), _checksum(namespace, entries)) + entries


def decode_index(namespace: NamespaceId, index: bytes) -> list[PackedValue]:
    """Returns the places of the values. Raises ValueError if the index is damaged."""
    if len(index) < _HEADER.size:
        raise ValueError("the index is too short")
    magic, count, checksum = _HEADER.unpack_from(index)
    if magic != _MAGIC or _checksum(namespace, index[_HEADER.size :]) != checksum:
        raise ValueError("the index is damaged")
    places: list[PackedValue] = []
    at, offset = _HEADER.size, len(index)
    try:
        for _ in range(count):
            key_bytes, nbytes = _ENTRY.unpack_from(index, at)
            at += _ENTRY.size + key_bytes
            places.append(PackedValue(index[at - key_bytes : at], offset, nbytes))
            offset += nbytes
    except struct.error as error:
        raise ValueError("the index is damaged") from error
    return places


def _checksum(namespace: NamespaceId, entries: bytes) -> int:
    return xxhash.xxh3_64_intdigest(entries, xxhash.xxh3_64_intdigest(namespace))
