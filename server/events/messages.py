"""Encoder of event messages, in the format of vLLM's KV event publisher (msgpack).

A message is an array of time in seconds, events, and data-parallel rank. An event is a map, or an
array of the same fields in this order. See `docs/events.md`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from ..config.events import EventConfig

__all__ = ["MessageEncoder", "PublishedEvent"]

_GROUP_BYTES = 4
"""Length of the group index at the end of a key."""
_HASH_BYTES = 32
"""Longest block hash. In keys of vLLM, a tag of the LoRA adapter may follow the hash."""


@dataclass(frozen=True, slots=True)
class PublishedEvent:
    """Blocks that a medium has got, or that no tier of the medium has any more."""

    is_stored: bool
    medium: str
    keys: Sequence[bytes]


class MessageEncoder:
    def __init__(self, config: EventConfig) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._is_map = config.format == "map"
        self._is_int = config.hashes == "int"

    def encode(self, event: PublishedEvent, block_tokens: Sequence[int]) -> bytes | None:
        """Returns the payload for an event; None if no key names a group of the namespace.

        `block_tokens`: number of tokens of a block, for each group.
        """
        by_group: dict[int, list[bytes | int]] = {}
        for key in event.keys:
            group = int.from_bytes(key[-_GROUP_BYTES:], "big")
            if group < len(block_tokens):
                by_group.setdefault(group, []).append(self._hash_of(key))
        if not by_group:
            return None
        make = self._stored if event.is_stored else self._removed
        events = [
            each
            for group, hashes in by_group.items()
            for each in make(hashes, event.medium, group, block_tokens[group])
        ]
        return self._encoder.encode([time.time(), events, None])

    def _hash_of(self, key: bytes) -> bytes | int:
        block_hash = key[:-_GROUP_BYTES][:_HASH_BYTES]
        return int.from_bytes(block_hash[-8:], "big") if self._is_int else block_hash

    def _stored(self, hashes: Sequence[bytes | int], medium: str, group: int, block_tokens: int) -> Iterator[Any]:
        # One event per block: readers take a block of an event as the parent of the next block.
        for block_hash in hashes:
            if self._is_map:
                yield {
                    "type": "BlockStored",
                    "block_hashes": [block_hash],
                    "parent_block_hash": None,
                    "token_ids": [],
                    "block_size": block_tokens,
                    "lora_id": None,
                    "medium": medium,
                    "lora_name": None,
                    "group_idx": group,
                }
            else:
                yield ["BlockStored", [block_hash], None, [], block_tokens, None, medium, None, None, group]

    def _removed(self, hashes: Sequence[bytes | int], medium: str, group: int, _: int) -> Iterator[Any]:
        if self._is_map:
            yield {"type": "BlockRemoved", "block_hashes": hashes, "medium": medium, "group_idx": group}
        else:
            yield ["BlockRemoved", hashes, medium, group]
