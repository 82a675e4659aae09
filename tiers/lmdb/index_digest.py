"""Tally of a store: number and digest of the names that its index should have.

A transaction that adds or removes blocks also changes the tally. So blocks that disappear without a
transaction, because a page of the index is damaged or lost, make index and tally differ.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Any, NamedTuple

import xxhash

__all__ = ["Tally", "change_tally", "count_reachable", "read_tally", "tally_of", "write_tally"]

_KEY = b"tally"
_FIELDS = struct.Struct("<QQ")
_CHECK = struct.Struct("<Q")
_MASK = (1 << 64) - 1


class Tally(NamedTuple):
    blocks: int
    digest: int
    """Sum of the xxh3-64 of all names, modulo 2**64: the order of changes does not matter."""

    def lost(self, found: Tally) -> int:
        """Returns how many blocks `found` lacks; at least 1 if the tallies differ."""
        return 0 if found == self else max(1, self.blocks - found.blocks)


def tally_of(names: Iterable[bytes]) -> Tally:
    blocks = digest = 0
    for name in names:
        blocks += 1
        digest += xxhash.xxh3_64_intdigest(name)
    return Tally(blocks, digest & _MASK)


def read_tally(txn: Any, meta: Any) -> Tally | None:
    """Returns the stored tally; None without a tally, or if it is damaged."""
    packed = bytes(txn.get(_KEY, b"", meta))
    if len(packed) != _FIELDS.size + _CHECK.size:
        return None
    body = packed[: _FIELDS.size]
    if _CHECK.unpack_from(packed, _FIELDS.size)[0] != xxhash.xxh3_64_intdigest(body):
        return None
    return Tally(*_FIELDS.unpack(body))


def write_tally(txn: Any, meta: Any, tally: Tally) -> None:
    body = _FIELDS.pack(*tally)
    txn.put(_KEY, body + _CHECK.pack(xxhash.xxh3_64_intdigest(body)), db=meta)


def change_tally(txn: Any, meta: Any, added: Iterable[bytes], removed: Iterable[bytes]) -> Tally | None:
    """Changes the tally together with the index; returns the new one, None without a valid tally.

    `added` are names that the index did not have before, `removed` are names that it had.
    """
    before = read_tally(txn, meta)
    if before is None:
        return None
    more, fewer = tally_of(added), tally_of(removed)
    tally = Tally(
        max(0, before.blocks + more.blocks - fewer.blocks), (before.digest + more.digest - fewer.digest) & _MASK
    )
    write_tally(txn, meta, tally)
    return tally


def count_reachable(txn: Any, index: Any) -> Tally:
    """Returns the tally of the names that a search in the index finds. Raises `lmdb.Error`."""
    names = txn.cursor(index).iternext(values=False)
    return tally_of(name for name in names if txn.get(name, None, index) is not None)
