"""What may share blocks, and how blocks are named."""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..protos.v1 import common_pb2

__all__ = ["Group", "GroupKind", "Namespace", "is_hold_key", "make_hold_key", "make_key"]


_HOLD_PREFIX = b"kvtier.hold."


class GroupKind(enum.Enum):
    """Kinds of KV cache groups, as far as their reuse differs."""

    FULL_ATTENTION = common_pb2.GROUP_KIND_FULL_ATTENTION
    SLIDING_WINDOW = common_pb2.GROUP_KIND_SLIDING_WINDOW
    STATE = common_pb2.GROUP_KIND_STATE


@dataclass(frozen=True, slots=True)
class Group:
    """Layers whose blocks are keyed and sized alike.

    Attributes:
        part_bytes: one rank's bytes of one block.
        block_tokens: tokens that one block covers.
    """

    part_bytes: int
    block_tokens: int
    name: str = "default"
    kind: GroupKind = GroupKind.FULL_ATTENTION


@dataclass(frozen=True, slots=True)
class Namespace:
    """Everything that changes the meaning of a block's bytes; equal namespaces share blocks, others never.

    Attributes:
        model: name of the model as the engine knows it.
        dtype: element type of the cache.
        groups: the KV cache groups; a key ends in an index into them.
        layout: order of the dimensions in one part.
        hash_scheme: how block hashes are made; clients that hash differently must not meet.
        world_size: ranks that each hold one part of every block.
        attributes: whatever else belongs to the fingerprint.
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
            ValueError: the key names a group that there is not.
        """
        index = int.from_bytes(key[-4:], "big")
        if len(key) < 5 or index >= len(self.groups):
            raise ValueError(f"key {key.hex()} names no group of this namespace; see make_key")
        return self.groups[index].part_bytes

    def to_proto(self) -> common_pb2.Namespace:
        """Returns the wire form."""
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
    """Returns the key of a block: its content hash and its KV cache group's index, 4 bytes big-endian."""
    return block_hash + group.to_bytes(4, "big")


def is_hold_key(key: bytes) -> bool:
    """Whether a key was made by `make_hold_key`."""
    return key.startswith(_HOLD_PREFIX)


def make_hold_key(engine_id: str, request_id: str, group: int, position: int, content: bytes = b"") -> bytes:
    """Returns the key of a block that has no content hash, the last one of a request that is handed over.

    Only who claims the request finds it; it goes to no tier below, and disappears with the hold (`kvtier/v1/handoff.proto`).
    With `content`, of which both sides make it (the hash of the block before and the tokens of this one), who claims it can
    tell from the key that it is about its own tokens. Without, engine and request must never come again: a block that is there
    under such a name, from another life of the engine say, is taken for this one.
    """
    digest = hashlib.sha256()
    for part in (engine_id.encode(), request_id.encode(), position.to_bytes(8, "big"), content):
        digest.update(len(part).to_bytes(8, "big") + part)
    return make_key(_HOLD_PREFIX + digest.digest(), group)
