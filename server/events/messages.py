"""Encoder of event messages, in the format of vLLM's KV event publisher (msgpack).

A message is an array of time in seconds, events, and data-parallel rank. An event is a map, or an
array of the same fields in this order. If the server knows the tokens of blocks, one event has a
run of consecutive blocks. See `docs/events.md`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import msgspec

from ...protos.wire.block_contents import unpack_tokens
from ...tiers.core.block_contents import BlockContent
from ..config.events import EventConfig

__all__ = ["ContentOf", "MessageEncoder", "PublishedEvent"]

ContentOf: TypeAlias = Callable[[bytes], BlockContent | None]
"""Returns what the server knows of the tokens of a key's block."""

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


class _Run(NamedTuple):
    """Consecutive blocks of one group: each is the parent of the next one."""

    hashes: list[bytes | int]
    parent: bytes | int | None
    token_ids: list[int]
    lora_name: str | None


class MessageEncoder:
    def __init__(self, config: EventConfig) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._is_map = config.format == "map"
        self._is_int = config.hashes == "int"

    def encode(self, event: PublishedEvent, block_tokens: Sequence[int], content_of: ContentOf) -> bytes | None:
        """Returns the payload for an event; None if no key names a group of the namespace.

        `block_tokens`: number of tokens of a block, for each group.
        """
        by_group: dict[int, list[bytes]] = {}
        for key in event.keys:
            group = int.from_bytes(key[-_GROUP_BYTES:], "big")
            if group < len(block_tokens):
                by_group.setdefault(group, []).append(key)
        events: list[Any] = []
        for group, keys in by_group.items():
            if event.is_stored:
                runs = self._runs(keys, content_of)
                events += (self._stored(run, event.medium, group, block_tokens[group]) for run in runs)
            else:
                events.append(self._removed([self._hash_of(key) for key in keys], event.medium, group))
        return self._encoder.encode([time.time(), events, None]) if events else None

    def _runs(self, keys: Sequence[bytes], content_of: ContentOf) -> Iterator[_Run]:
        """Yields the keys in runs. A key whose tokens are not known is a run of its own.

        The reason: readers take a block of an event as the parent of the next block.
        """
        run: _Run | None = None
        last = b""
        for key in keys:
            content = content_of(key)
            if run is not None and content is not None and content[0] == last and content[2] == (run.lora_name or ""):
                run.hashes.append(self._hash_of(key))
                run.token_ids.extend(unpack_tokens(content[1]))
            else:
                if run is not None:
                    yield run
                parent_key, token_ids, lora_name = content or (None, b"", "")
                parent = None if parent_key is None else self._hash_of(parent_key)
                run = _Run([self._hash_of(key)], parent, unpack_tokens(token_ids), lora_name or None)
            last = key if content is not None else b""
        if run is not None:
            yield run

    def _hash_of(self, key: bytes) -> bytes | int:
        block_hash = key[:-_GROUP_BYTES][:_HASH_BYTES]
        return int.from_bytes(block_hash[-8:], "big") if self._is_int else block_hash

    def _stored(self, run: _Run, medium: str, group: int, block_tokens: int) -> Any:
        hashes, parent, token_ids, lora_name = run
        if not self._is_map:
            return ["BlockStored", hashes, parent, token_ids, block_tokens, None, medium, lora_name, None, group]
        return {
            "type": "BlockStored",
            "block_hashes": hashes,
            "parent_block_hash": parent,
            "token_ids": token_ids,
            "block_size": block_tokens,
            "lora_id": None,
            "medium": medium,
            "lora_name": lora_name,
            "group_idx": group,
        }

    def _removed(self, hashes: Sequence[bytes | int], medium: str, group: int) -> Any:
        if not self._is_map:
            return ["BlockRemoved", hashes, medium, group]
        return {"type": "BlockRemoved", "block_hashes": hashes, "medium": medium, "group_idx": group}
