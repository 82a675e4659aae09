"""Names and content of packs: objects that each hold the values of many blocks of one namespace.

A name is `kvtier/packFORMAT/TENANT/NAMESPACE/HOUR/TIME-WRITER-INDEX`, for example
`kvtier/pack3/0001…0e0f/1011…1e1f/2026-11-25T03/1730250-0f1e2d3c4b5a6978-2c4`:

| part | meaning |
|---|---|
| FORMAT | 3, or 4 if index and values are encrypted |
| TENANT | tag of the tenant, so permissions and lifecycle rules can be given per tenant |
| HOUR, TIME | UTC time of the store: hour; minutes, seconds and milliseconds |
| WRITER | random number, because two servers can store at the same time |
| INDEX | size of the index in bytes, hexadecimal |

So names sort by time, and one ranged read fetches the index. A pack is an index followed by the
values of its blocks (`value_codec`, `encryption`) without gaps. The entries of the index follow
each other without gaps, too:

| bytes | meaning |
|---|---|
| 2 | size of the key |
| 8 | size of the value |
| rest | key |

All numbers are little-endian. The codec of the values seals the entries (`ValueCodec.seal_index`).
The seal covers the name of the pack, which has the tenant, the namespace, the time and the size of
the index.
"""

from __future__ import annotations

import re
import secrets
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Self

from ..secondary_tier import NamespaceId
from ..types import TENANT_TAG_BYTES
from .value_codec import MAX_KEY_BYTES

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
    "is_hour",
    "mark_of",
    "start_of",
]

FORMATS = (3, 4)
"""Formats of packs that a server of this version writes."""
ROOT = "kvtier/"
MAX_INDEX_BYTES = 4 << 20
"""More than an index of the largest batch with the longest keys."""
MAX_ENTRIES = 1 << 16
"""More blocks than a job has. The directory needs 9 MiB for these."""
_ENTRY = struct.Struct("<HQ")
_NAME = re.compile(r"(.+/)(\d{4}-\d\d-\d\dT\d\d)/(\d{7})-([0-9a-f]{16})-([0-9a-f]{1,6})", re.ASCII)
_HOUR = re.compile(r"\d{4}-\d\d-\d\dT\d\d", re.ASCII)
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
    def parse(cls, path: str, folder: str | None = None) -> Self | None:
        """Returns None if the path is not the name of a pack, or not of one in this folder."""
        match = _NAME.fullmatch(path)
        if match is None or folder not in (None, match.group(1)):
            return None
        _, hour, time, _, size = match.groups()
        try:
            start = datetime.strptime(f"{hour}{time[:4]}+0000", "%Y-%m-%dT%H%M%S%z")
        except ValueError:
            return None
        nbytes = int(size, 16)
        if not 0 < nbytes <= MAX_INDEX_BYTES:
            return None
        return cls(path, start.timestamp() + int(time[4:]) / 1000, nbytes)


@dataclass(frozen=True, slots=True)
class PackedValue:
    """Place of a block's value in its pack."""

    key: bytes
    offset_bytes: int
    nbytes: int


def format_folder(pack_format: int) -> str:
    """Returns the folder of all packs of a format."""
    return f"{ROOT}pack{pack_format}/"


def folder_of(namespace: NamespaceId, pack_format: int = FORMATS[0]) -> str:
    """Returns the folder of a namespace's packs."""
    return f"{format_folder(pack_format)}{namespace[:TENANT_TAG_BYTES].hex()}/{namespace[TENANT_TAG_BYTES:].hex()}/"


def hour_of(written_at: float) -> str:
    """Returns the folder, below the namespace's, of packs of this time."""
    return f"{datetime.fromtimestamp(written_at, UTC):%Y-%m-%dT%H}"


def is_hour(folder: str) -> bool:
    """Returns whether a folder of a namespace can have packs."""
    return _HOUR.fullmatch(folder) is not None


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


def encode_index(keys: Sequence[bytes], sizes: Sequence[int]) -> bytes:
    """Returns the entries of values of these sizes, in this order."""
    return b"".join(_ENTRY.pack(len(key), size) + key for key, size in zip(keys, sizes, strict=True))


def decode_index(entries: bytes, index_bytes: int, pack_bytes: int) -> list[PackedValue]:
    """Returns the places of the values in a pack of this size. Raises ValueError.

    All places are within the pack, and each key occurs once.
    """
    places: dict[bytes, PackedValue] = {}
    at, offset = 0, index_bytes
    while at < len(entries):
        if len(entries) - at < _ENTRY.size:
            raise ValueError("its index has an incomplete entry")
        key_bytes, nbytes = _ENTRY.unpack_from(entries, at)
        at += _ENTRY.size
        key = entries[at : at + key_bytes]
        at += key_bytes
        if len(key) != key_bytes or not 0 < key_bytes <= MAX_KEY_BYTES or key in places:
            raise ValueError("its index has an invalid key")
        if not 0 < nbytes <= pack_bytes - offset:
            raise ValueError(f"its index has a value of {nbytes} bytes, which is outside of its {pack_bytes} bytes")
        if len(places) == MAX_ENTRIES:
            raise ValueError(f"its index has more than {MAX_ENTRIES} entries")
        places[key] = PackedValue(key, offset, nbytes)
        offset += nbytes
    return list(places.values())
