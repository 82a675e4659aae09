"""Values of the wire contract as Python types. Loads no protobuf, so the core can use them.

The numbers of each enum are those of the enum of `kvtier.v1` with the same name.
"""

from __future__ import annotations

import enum
from collections.abc import Collection
from dataclasses import dataclass

__all__ = [
    "HOLD_ONLY_KEY_PREFIX",
    "DurableStatus",
    "HandoffDirection",
    "KeyStatus",
    "Medium",
    "NotClaimedReason",
    "OffloadPolicy",
    "PublishStatus",
    "StoreStatus",
    "TierFilter",
]


HOLD_ONLY_KEY_PREFIX = b"kvtier.hold."
"""Key prefix of hold-only blocks, which have no content hash (`kvtier/v1/handoff.proto`)."""


class KeyStatus(enum.IntEnum):
    """Status of one key of a lookup.

    HIT_PENDING: the block is being written or promoted. RETRY: a tier does not know yet whether it
    has the block, so look the key up again.
    """

    HIT = 1
    MISS = 2
    HIT_PENDING = 3
    RETRY = 4


class StoreStatus(enum.IntEnum):
    """Status of one key of a store.

    GRANTED: the caller may write the block. PRESENT: the block is stored already. IN_PROGRESS:
    another session writes the block. NO_ROOM: no block can be evicted now, so try again later.
    """

    GRANTED = 1
    PRESENT = 2
    IN_PROGRESS = 3
    NO_ROOM = 4


class DurableStatus(enum.IntEnum):
    """Whether a block survives a restart of the server.

    PENDING: the block is still being stored in a durable tier. VOLATILE: no durable tier has the
    block or is storing it.
    """

    DURABLE = 1
    PENDING = 2
    VOLATILE = 3


class PublishStatus(enum.IntEnum):
    """Status of a publication. Only PUBLISHED means that the server holds the blocks.

    NO_ROOM: holds already pin as much memory as allowed. TOO_MANY: the tenant has too many holds.
    """

    PUBLISHED = 1
    NO_ROOM = 2
    TOO_MANY = 3


class HandoffDirection(enum.IntEnum):
    """Direction in which a request is handed over."""

    PREFILL_TO_DECODE = 1
    DECODE_TO_PREFILL = 2


class NotClaimedReason(enum.IntEnum):
    """Why an engine computes a request without a claim.

    PEER_NOT_LISTED: no setting names the server of the hold. NOTHING_HELD: the other engine holds
    no blocks of the request, for example because it had to evict a state of the prompt.
    """

    PEER_NOT_LISTED = 5
    NOTHING_HELD = 6


class OffloadPolicy(enum.IntEnum):
    """Which blocks of a request the tiers receive.

    BLOCK_LEVEL: only newly computed blocks. REQUEST_LEVEL: all blocks, also prefix hits.
    """

    BLOCK_LEVEL = 1
    REQUEST_LEVEL = 2


class Medium(enum.IntEnum):
    """Storage medium of a tier, as in `kvtier.v1.TierMedium`."""

    MEMORY = 1
    DISK = 2
    NETWORK = 3


@dataclass(frozen=True, slots=True)
class TierFilter:
    """Selects tiers that a lookup skips: secondary tiers that match at least one attribute.

    The CPU tier is never skipped, because all reads go through it.

    Attributes:
        names: names of tiers; the server refuses an unknown name.
        media: storage media of tiers.
        remote: whether to skip tiers that store blocks on another host than the server's.
    """

    names: Collection[str] = ()
    media: Collection[Medium] = ()
    remote: bool = False

    def __bool__(self) -> bool:
        return bool(self.names or self.media or self.remote)
