"""Codec of `BlockContents`: token ids, parent and LoRA adapter of blocks."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ..v1 import common_pb2, events_pb2
from .packed_keys import unpack_keys

__all__ = ["TOKEN_BYTES", "BlockContent", "pack_contents", "pack_tokens", "unpack_contents", "unpack_tokens"]

TOKEN_BYTES = 4


class BlockContent(NamedTuple):
    """Tokens of one block, and what else an indexer needs to find the block.

    Attributes:
        parent_key: key of the block before; None for the first block of a prompt.
        token_ids: little-endian uint32 each.
        lora_name: name of the LoRA adapter; empty for none.
    """

    parent_key: bytes | None
    token_ids: bytes
    lora_name: str = ""


def pack_tokens(token_ids: Iterable[int]) -> bytes:
    """Raises OverflowError for a number that is no uint32."""
    numbers = array("I", token_ids)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()


def unpack_tokens(packed: bytes) -> list[int]:
    numbers = array("I", packed)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tolist()


def pack_contents(contents: Sequence[tuple[bytes | None, bytes, str]], key_bytes: int) -> events_pb2.BlockContents:
    """Returns a message for blocks with equally many tokens and the same adapter.

    `key_bytes`: length of the blocks' keys. Raises ValueError if lengths or adapters differ.
    """
    no_parent = bytes(key_bytes)
    parents = [no_parent if parent is None else parent for parent, _, _ in contents]
    shapes = {(len(tokens), lora_name) for _, tokens, lora_name in contents}
    if len(shapes) > 1 or any(len(parent) != key_bytes for parent in parents):
        raise ValueError("the blocks of one message must have equally many tokens, keys of one length and one adapter")
    return events_pb2.BlockContents(
        token_ids=b"".join(tokens for _, tokens, _ in contents),
        parent_keys=common_pb2.PackedKeys(keys=b"".join(parents), key_bytes=key_bytes),
        lora_name=contents[0][2] if contents else "",
    )


def unpack_contents(message: events_pb2.BlockContents, number: int, key_bytes: int) -> list[BlockContent]:
    """Returns the contents of `number` blocks with keys of `key_bytes`. Raises ValueError."""
    tokens, parents, lora_name = message.token_ids, message.parent_keys, message.lora_name
    if not number or parents.key_bytes != key_bytes or len(parents.keys) != number * key_bytes:
        raise ValueError(f"parent_keys: must be as many and as long as the keys: {number} of {key_bytes} bytes")
    size, rest = divmod(len(tokens), number)
    if rest or not size or size % TOKEN_BYTES:
        raise ValueError(f"token_ids: {len(tokens)} bytes for {number} blocks; each token has {TOKEN_BYTES} bytes")
    no_parent = bytes(key_bytes)
    return [
        BlockContent(None if parent == no_parent else parent, tokens[start : start + size], lora_name)
        for parent, start in zip(unpack_keys(parents.keys, key_bytes), range(0, len(tokens), size), strict=True)
    ]
