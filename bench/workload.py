"""Workload of the measured clients: keys, block sizes and connections."""

from __future__ import annotations

import hashlib
from typing import Literal

from kvtier.client import Client, Credentials, Group, Namespace, make_key

from .pool import BATCH

__all__ = ["SIZES", "Keys", "batch_name", "connect", "keys_of"]

SIZES = (64 << 10, 256 << 10, 2 << 20)
"""Sizes of blocks in bytes."""


class Keys:
    """Source of new keys. Keys of different series differ."""

    def __init__(self, series: str) -> None:
        self._series = series
        self._count = 0

    def take(self, count: int) -> list[bytes]:
        first = self._count
        self._count += count
        return keys_of(self._series, first, count)


def keys_of(series: str, first: int, count: int) -> list[bytes]:
    numbers = range(first, first + count)
    return [make_key(hashlib.sha256(f"{series} {number}".encode()).digest(), 0) for number in numbers]


def connect(
    endpoint: str,
    transport: Literal["shm", "tcp", "grpc"],
    block_bytes: int,
    credentials: Credentials | None = None,
    tenant: str = "",
) -> Client:
    """Returns a connected client with blocks of this size and only this transport."""
    group = Group(name="full", block_tokens=16, part_bytes=block_bytes)
    namespace = Namespace(
        model=f"bench-{block_bytes}",
        dtype="uint8",
        layout="bytes",
        hash_scheme="sha256",
        tenant=tenant,
        groups=(group,),
    )
    client = Client(endpoint, namespace=namespace, transport=transport, name="bench", rank=0, credentials=credentials)
    client.wait_until_connected(10.0)
    return client


def batch_name(what: str, block_bytes: int, blocks: int = BATCH) -> str:
    """Returns the name of a row about batches of `blocks` blocks."""
    size = f"{block_bytes >> 20} MiB" if block_bytes >= 1 << 20 else f"{block_bytes >> 10} KiB"
    return f"{what}, {blocks:,} x {size}"
