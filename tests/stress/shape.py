"""The load's data: namespaces, documents of blocks, and the expected bytes of each part."""

from __future__ import annotations

import random
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from harness.payloads import POISON, key_of, namespace_of, payload

from kvtier.client import Namespace

__all__ = ["DATASETS", "KIB", "LEDGER", "MIB", "PAIR", "STRANGER", "Dataset", "difference", "universe_bytes"]

KIB = 1 << 10
MIB = 1 << 20


@dataclass(frozen=True)
class Dataset:
    """A namespace and its documents. Keys are equal in all namespaces, their bytes differ.

    Attributes:
        parts: sizes of a part in bytes, per group; blocks of a document take turns.
        documents: number of documents; the first ones are hot.
        length: blocks of a document.
    """

    name: str
    parts: tuple[int, ...]
    documents: int
    length: int
    world_size: int = 1

    @property
    def namespace(self) -> Namespace:
        return namespace_of(*self.parts, model=self.name, world_size=self.world_size)

    @property
    def total_bytes(self) -> int:
        """Size of all documents."""
        return self.documents * self.length * sum(self.parts) // len(self.parts) * self.world_size

    def keys(self, document: int | str, start: int, count: int) -> list[bytes]:
        """Keys of a run of a document's blocks."""
        numbers = range(start, min(start + count, self.length))
        return [key_of(number, number % len(self.parts), salt=f"{document}") for number in numbers]

    def hot_document(self, rng: random.Random) -> int:
        """A document: usually one of a few hot ones, so that clients share blocks."""
        return int(self.documents * rng.random() ** 3)

    def payload(self, key: bytes, rank: int) -> np.ndarray:
        """The expected bytes of one rank's part of a block."""
        return payload(self.name.encode() + key, self.namespace.part_bytes_of(key), rank)


DATASETS = MappingProxyType(
    {
        dataset.name: dataset
        for dataset in (
            Dataset("small", (4 * KIB,), documents=16, length=64),
            Dataset("mixed", (16 * KIB, 40_000), documents=24, length=64),
            Dataset("twin", (16 * KIB, 40_000), documents=16, length=64),
            Dataset("large", (512 * KIB,), documents=16, length=12),
        )
    }
)
"""Shared by all clients. With PAIR and LEDGER they are six times the region."""

PAIR = Dataset("pair", (24 * KIB,), documents=24, length=32, world_size=2)
"""For two processes that are the ranks of one engine."""

LEDGER = Dataset("durable_ledger", (8 * KIB,), documents=1, length=1 << 20)
"""Blocks that are stored once and must not be lost after the acknowledgement.

The large tier holds all of them.
"""

STRANGER = Dataset("stranger", LEDGER.parts, documents=1, length=LEDGER.length)
"""Has the keys of LEDGER in another namespace. No client stores blocks in it."""


def universe_bytes(deposits: int) -> int:
    """Size of all blocks that can be stored, with this many deposits."""
    return sum(dataset.total_bytes for dataset in (*DATASETS.values(), PAIR)) + deposits * LEDGER.parts[0]


def difference(expected: np.ndarray, found: np.ndarray) -> dict[str, object] | None:
    """None for equal bytes, else a description of the damage."""
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
