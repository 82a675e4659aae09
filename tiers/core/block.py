"""Block of the CPU tier (slots, pins, state), and the index of a namespace's blocks by key."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from ..secondary_tier import NamespaceId
from ..types import HOLD_ONLY_KEY_PREFIX, NamespaceSpec

if TYPE_CHECKING:
    from ..eviction.queues import EvictionQueue
    from ..types import MissReason, StoreOrigin


__all__ = [
    "Block",
    "NamespaceIndex",
    "parts_written",
    "put_slots",
    "without_hold_only",
]


class NamespaceIndex:
    """Index of the blocks of one namespace by key. A reset invalidates the whole index.

    Attributes:
        number: number of the namespace in the records of the slots; 0 for none.
        spec: the namespace; None before its first block.
    """

    __slots__ = ("blocks", "invalidated", "number", "spec")

    def __init__(self, *, invalidated: bool = False) -> None:
        self.blocks: dict[bytes, Block] = {}
        self.invalidated = invalidated
        self.number = 0
        self.spec: NamespaceSpec | None = None


class Block:
    """One block in the CPU tier: its slots, and which of them are written.

    A block is a hit when the parts of all ranks are written (`ready`). Leases, stores, holds
    and tier jobs pin the block. Without pins it may be evicted, even if parts are missing.
    """

    __slots__ = (
        "evict_on_unpin",
        "held",
        "key",
        "last_use",
        "leases",
        "namespace",
        "namespace_index",
        "origin",
        "part_bytes",
        "pins",
        "policy_node",
        "promoting",
        "queue",
        "ready",
        "retain_until",
        "retained",
        "skip_reason",
        "slots",
        "stalled",
        "writers",
        "written",
    )

    busy = False
    """Always False, because the CPU tier does not count pinned bytes."""

    def __init__(
        self,
        spec: NamespaceSpec,
        key: bytes,
        part_bytes: int,
        queue: EvictionQueue[Block],
        namespace_index: NamespaceIndex,
    ) -> None:
        self.namespace = spec.id
        self.key = key
        self.part_bytes = part_bytes
        self.queue = queue
        """The eviction queue of the block's size class and tenant share."""
        self.policy_node: Any = None
        self.slots: tuple[int | None, ...] = spec.no_slots
        """Per rank, the offset of the part's slot in the region, or None."""
        self.written = 0
        """Bit r is set when rank r's part is complete."""
        self.ready = False
        self.writers = 0
        """Number of parts that clients are writing now."""
        self.promoting = False
        """Whether a job is loading all parts from a secondary tier."""
        self.pins = 0
        self.leases = 0
        """Number of pins that belong to leases."""
        self.held = 0
        """Number of stores that keep the block pinned between slices, and 1 if holds pin it."""
        self.skip_reason: MissReason | None = None
        """Why a tier did not store the block; None if no tier refused it."""
        self.namespace_index = namespace_index
        self.evict_on_unpin = False
        """Whether to evict the block when its last pin ends, because its hold has ended."""
        self.stalled = False
        """Whether the block is in a job of a stalled tier."""
        self.last_use = 0
        """Logical time of the last store or lookup."""
        self.origin: StoreOrigin | None = None
        """The last store of a part; None if a tier has loaded the block."""
        self.retain_until = 0.0
        """Time until which clients want the block retained, in seconds of the core's clock. All
        tiers use this time."""
        self.retained = False
        """Whether the block is retained now. A retained block is in no eviction queue."""

    @property
    def name(self) -> tuple[NamespaceId, bytes]:
        return self.namespace, self.key

    @property
    def invalidated(self) -> bool:
        """Whether a reset or a stall removed the index entry. The last unpin drops the block."""
        return self.namespace_index.invalidated

    @property
    def hold_only(self) -> bool:
        """Whether the key is no content hash. Only holds use such blocks; no tier stores them."""
        return self.key.startswith(HOLD_ONLY_KEY_PREFIX)

    @property
    def pending(self) -> bool:
        return not self.ready and (self.promoting or self.writers > 0)

    @property
    def nbytes(self) -> int:
        return self.part_bytes * len(self.slots)

    @property
    def allocated_bytes(self) -> int:
        """Size of all slots of the block, allocated or not."""
        return self.queue.size_class * len(self.slots)

    def promoted(self) -> None:
        self.written = (1 << len(self.slots)) - 1
        self.ready = True
        self.promoting = False
        self.origin = None

    def fill_slots(self, offsets: Iterator[int]) -> None:
        """Gives the parts without a slot the next offsets, as far as there are any."""
        if None in self.slots:
            self.slots = tuple(next(offsets, None) if slot is None else slot for slot in self.slots)

    def clear(self) -> None:
        self.slots = (None,) if len(self.slots) == 1 else (None,) * len(self.slots)
        self.written = 0
        self.ready = False

    def __repr__(self) -> str:
        state = "ready" if self.ready else "pending" if self.pending else "partial"
        return f"Block({self.key.hex()[:12]}…, {state}, pins={self.pins})"


# Functions of many blocks, because a call per block takes longer than what it does.


def without_hold_only(blocks: Iterable[Block]) -> list[Block]:
    """Returns the blocks that tiers may store (`Block.hold_only`)."""
    return [block for block in blocks if not block.key.startswith(HOLD_ONLY_KEY_PREFIX)]


def parts_written(blocks: Iterable[Block], rank: int) -> list[Block]:
    """Records that the parts of a rank are complete; returns the blocks with all parts complete."""
    complete, part = [], 1 << rank
    for block in blocks:
        block.written = written = block.written | part
        block.ready = ready = written == (1 << len(block.slots)) - 1
        if ready:
            complete.append(block)
    return complete


def put_slots(blocks: Iterable[Block], rank: int, offsets: Iterable[int | None]) -> None:
    """Gives the parts of a rank their slots, or None. Blocks beyond the offsets keep theirs."""
    for block, offset in zip(blocks, offsets, strict=False):
        slots = block.slots
        block.slots = (offset,) if len(slots) == 1 else (*slots[:rank], offset, *slots[rank + 1 :])
