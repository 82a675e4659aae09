"""Digests of parts: what a writer stored under which name, for readers to verify.

A digest is the xxh3-64 of the bytes of a part (a block of one rank), seeded with the namespace, the
key and the rank. So it also detects intact bytes of another block or rank. 0 stands for no digest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import xxhash

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

__all__ = ["SAMPLE", "is_sampled", "part_digest", "sampled"]

SAMPLE = 32
"""A sample has about one of this number of keys."""

_HASH_END = -5
"""Position in a key of the last byte before the index of its group."""


def part_digest(namespace_id: bytes, key: bytes, rank: int, part: ReadableBuffer) -> int:
    """Returns the digest of a part, 1 to 2^64-1. Releases the GIL for large parts."""
    seed = xxhash.xxh3_64_intdigest(b"%b%b%d" % (namespace_id, key, rank))
    return xxhash.xxh3_64_intdigest(part, seed) or 1


def is_sampled(key: bytes) -> bool:
    """Returns whether the sample has a key. All clients and servers have the same sample."""
    return not key[_HASH_END] % SAMPLE


def sampled(keys: Sequence[bytes]) -> list[int]:
    """Returns the positions of the keys of the sample."""
    return [number for number, key in enumerate(keys) if not key[_HASH_END] % SAMPLE]
