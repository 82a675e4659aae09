"""Blocks whose bytes are computed from their keys, so that loaded bytes can be verified."""

from __future__ import annotations

import hashlib

import numpy as np

from kvtier.client import Client, Group, Namespace, make_key

__all__ = ["assert_serves", "correct_hits", "filled", "is_payload", "key_of", "namespace_of", "payload"]

_STEP = np.uint64(0x9E3779B97F4A7C15)
POISON = 0xA5


def key_of(number: int, group: int = 0, *, salt: str = "") -> bytes:
    return make_key(hashlib.blake2b(f"{salt}:{number}".encode(), digest_size=16).digest(), group)


def payload(key: bytes, nbytes: int, rank: int = 0) -> np.ndarray:
    """The bytes of one rank's part; every aligned 8 bytes are unique among all blocks."""
    seed = int.from_bytes(hashlib.blake2b(key + bytes([rank]), digest_size=8).digest(), "little")
    words = np.arange(-(-nbytes // 8), dtype=np.uint64) * _STEP + np.uint64(seed)
    return words.view(np.uint8)[:nbytes]


def is_payload(key: bytes, found: np.ndarray, rank: int = 0) -> bool:
    """Whether these are exactly the bytes of this key's part."""
    return bool(np.array_equal(found, payload(key, found.nbytes, rank)))


def filled(count: int, nbytes: int) -> list[np.ndarray]:
    """Buffers to load into, filled with bytes that no block has."""
    return list(np.full((count, nbytes), POISON, np.uint8))


def namespace_of(*part_bytes: int, model: str = "test", world_size: int = 1, tenant: str = "") -> Namespace:
    """A namespace with a group for each of these sizes."""
    groups = tuple(Group(nbytes, 16, f"group.{number}") for number, nbytes in enumerate(part_bytes))
    return Namespace(model, "uint8", groups, "bytes", "test", world_size=world_size, tenant=tenant)


def correct_hits(client: Client, keys: list[bytes], *, wait: float = 5.0) -> int:
    """Loads these blocks, checks those that hit bit by bit, and returns how many hit."""
    buffers = [filled(1, client.namespace.part_bytes_of(key))[0] for key in keys]
    hits = client.load(keys, buffers, wait=wait)
    wrong = [key.hex() for key, found in zip(keys[:hits], buffers, strict=False) if not is_payload(key, found)]
    assert not wrong, f"wrong bytes for {wrong}"
    return hits


def assert_serves(client: Client, keys: list[bytes], *, wait: float = 5.0, step: int = 64) -> None:
    """Loads all of these blocks and checks them bit by bit."""
    for start in range(0, len(keys), step):
        batch = keys[start : start + step]
        hits = correct_hits(client, batch, wait=wait)
        assert hits == len(batch), f"{hits} of {len(batch)} blocks from {start} are there"
