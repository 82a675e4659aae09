"""Namespaces and keys of blocks. Clients share blocks only within a namespace."""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..protos.v1 import common_pb2
from ..protos.values import HOLD_ONLY_KEY_PREFIX

__all__ = ["Group", "GroupKind", "Namespace", "is_hold_key", "make_hold_key", "make_key"]


class GroupKind(enum.Enum):
    """Kind of a KV cache group: which cached blocks an engine needs to continue a request."""

    FULL_ATTENTION = common_pb2.GROUP_KIND_FULL_ATTENTION
    SLIDING_WINDOW = common_pb2.GROUP_KIND_SLIDING_WINDOW
    STATE = common_pb2.GROUP_KIND_STATE


@dataclass(frozen=True, slots=True)
class Group:
    """KV cache group: layers whose blocks have the same keys and the same number of tokens.

    Attributes:
        part_bytes: bytes of one rank's part of a block.
        block_tokens: number of tokens per block.
    """

    part_bytes: int
    block_tokens: int
    name: str = "default"
    kind: GroupKind = GroupKind.FULL_ATTENTION

    def __post_init__(self) -> None:
        """Raises `ValueError` if `kind` is not a `GroupKind`."""
        if not isinstance(self.kind, GroupKind):
            choices = ", ".join(f"GroupKind.{kind.name}" for kind in GroupKind)
            raise ValueError(f"kind must be one of {choices}, not {self.kind!r}")  # noqa: TRY004 - one kind for all


@dataclass(frozen=True, slots=True)
class Namespace:
    """Properties that define the meaning of blocks. Engines with equal namespaces share blocks.

    Attributes:
        model: name of the model in the engine.
        dtype: element type of the cache.
        groups: the KV cache groups; the last 4 bytes of a key are an index in this tuple.
        layout: order of the dimensions in one part.
        hash_scheme: how the engine computes block hashes.
        world_size: number of ranks; each holds one part of every block.
        attributes: other properties that must be equal.
    """

    model: str
    dtype: str
    groups: tuple[Group, ...]
    layout: str = ""
    hash_scheme: str = ""
    revision: str = ""
    world_size: int = 1
    tenant: str = ""
    attributes: Mapping[str, str] = field(default_factory=dict)

    def part_bytes_of(self, key: bytes) -> int:
        """Returns the size of one rank's part of the block with this key.

        Raises:
            ValueError: the key is too short, or its group does not exist.
        """
        index = int.from_bytes(key[-4:], "big")
        if len(key) < 5 or index >= len(self.groups):
            raise ValueError(f"key {key.hex()} must end in a group index of this namespace; see make_key")
        return self.groups[index].part_bytes

    def to_proto(self) -> common_pb2.Namespace:
        """Returns the protobuf message."""
        return common_pb2.Namespace(
            model=self.model,
            revision=self.revision,
            dtype=self.dtype,
            layout=self.layout,
            hash_scheme=self.hash_scheme,
            world_size=self.world_size,
            groups=[
                common_pb2.Group(
                    name=group.name, kind=group.kind.value, block_tokens=group.block_tokens, part_bytes=group.part_bytes
                )
                for group in self.groups
            ],
            tenant=self.tenant,
            attributes=self.attributes,
        )


def make_key(block_hash: bytes, group: int = 0) -> bytes:
    """Returns the key of a block: content hash and group index (4 bytes, big-endian).

    Raises:
        TypeError: `block_hash` is not bytes.
        ValueError: `block_hash` is empty, or `group` does not fit into 4 bytes.
    """
    if not isinstance(block_hash, bytes):
        raise TypeError(f"block_hash must be bytes, not {type(block_hash).__name__}")
    if not block_hash:
        raise ValueError("block_hash must not be empty: it tells the blocks of a group apart")
    if not 0 <= group < 1 << 32:
        raise ValueError(f"group must be an index of 0 or more that fits into 4 bytes, not {group}")
    return block_hash + group.to_bytes(4, "big")


def is_hold_key(key: bytes) -> bool:
    """Whether a key was made by `make_hold_key`."""
    return key.startswith(HOLD_ONLY_KEY_PREFIX)


def make_hold_key(engine_id: str, request_id: str, group: int, position: int, content: bytes = b"") -> bytes:
    """Returns the key of a block without content hash: the last, partial block of a hand-off.

    Only a claim of the hold finds the block. The block is not written to secondary tiers and is
    removed with the hold (`kvtier/v1/handoff.proto`). If both engines know the hash of the previous
    block and the tokens of this block, pass hash and tokens as `content`. Then equal keys prove
    equal tokens. If you pass no `content`, never reuse a pair of `engine_id` and `request_id`,
    because two blocks with different tokens would then have the same key.
    """
    digest = hashlib.sha256()
    for part in (engine_id.encode(), request_id.encode(), position.to_bytes(8, "big"), content):
        digest.update(len(part).to_bytes(8, "big") + part)
    return make_key(HOLD_ONLY_KEY_PREFIX + digest.digest(), group)
