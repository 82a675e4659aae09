"""What the load is made of: namespaces, documents of blocks, and which bytes each part must have."""

from __future__ import annotations

import random
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from harness.payloads import POISON, key_of, namespace_of, payload

from kvtier.client import Namespace

__all__ = ["FIELDS", "KIB", "LEDGER", "MIB", "PAIR", "Field", "difference", "universe_bytes"]

KIB = 1 << 10
MIB = 1 << 20


@dataclass(frozen=True)
class Field:
    """A namespace and its documents. Keys are the same in all namespaces; the bytes are not.

    Attributes:
        parts: sizes of a part in bytes, per group; blocks of a document take turns.
        documents: how many there are, the first ones hot.
        length: blocks of a document.
    """

    name: str
    parts: tuple[int, ...]
    documents: int
    length: int
    world_size: int = 1

    @property
    def namespace(self) -> Namespace:
        """What clients open a session with."""
        return namespace_of(*self.parts, model=self.name, world_size=self.world_size)

    @property
    def total_bytes(self) -> int:
        """Size of all documents."""
        return self.documents * self.length * sum(self.parts) // len(self.parts) * self.world_size

    def keys(self, document: int | str, start: int, count: int) -> list[bytes]:
        """Returns the keys of a run of a document's blocks."""
        numbers = range(start, min(start + count, self.length))
        return [key_of(number, number % len(self.parts), salt=f"{document}") for number in numbers]

    def hot_document(self, rng: random.Random) -> int:
        """Returns a document: a few of them nearly always, so that clients meet, all of them some time."""
        return int(self.documents * rng.random() ** 3)

    def payload(self, key: bytes, rank: int) -> np.ndarray:
        """Returns what one rank's part of a block must be."""
        return payload(self.name.encode() + key, self.namespace.part_bytes_of(key), rank)


FIELDS = MappingProxyType(
    {
        field.name: field
        for field in (
            Field("small", (4 * KIB,), documents=16, length=64),
            Field("mixed", (16 * KIB, 40_000), documents=24, length=64),
            Field("twin", (16 * KIB, 40_000), documents=16, length=64),
            Field("large", (512 * KIB,), documents=16, length=12),
        )
    }
)
"""What everybody shares. With what follows it is six times the region; so few blocks that a server soon knows all of them."""

PAIR = Field("pair", (24 * KIB,), documents=24, length=32, world_size=2)
"""Where two processes are the ranks of one engine."""

LEDGER = Field("durable_ledger", (8 * KIB,), documents=1, length=1 << 20)
"""Blocks that are stored once, and never may be lost once they are acknowledged: all of them fit the large tier."""


def universe_bytes(deposits: int) -> int:
    """Returns the size of everything that can ever be stored, with so many deposits."""
    return sum(field.total_bytes for field in (*FIELDS.values(), PAIR)) + deposits * LEDGER.parts[0]


def difference(expected: np.ndarray, found: np.ndarray) -> dict[str, object] | None:
    """Returns None for equal bytes, else what tells one kind of damage from another."""
    if np.array_equal(expected, found):
        return None
    wrong = np.flatnonzero(expected != found)
    first, last = int(wrong[0]), int(wrong[-1])
    return {
        "bytes": len(expected),
        "wrong": len(wrong),
        "first": first,
        "last": last,
        "expected": expected[first : first + 16].tobytes().hex(),
        "found": found[first : first + 16].tobytes().hex(),
        "untouched": bool((found[wrong] == POISON).all()),
    }
