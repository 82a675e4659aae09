"""Blocks in the CPU tier, and the namespaces that they belong to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..base import NamespaceId
from ..types import HOLD_ONLY_KEY_PREFIX, NamespaceSpec

if TYPE_CHECKING:
    from ..eviction.queues import EvictionQueue
    from ..types import MissReason


__all__ = ["Block", "NamespaceIndex"]


class NamespaceIndex:
    """Where the blocks of a namespace are found by their keys, until a reset takes all of it away at once."""

    __slots__ = ("blocks", "invalidated")

    def __init__(self, *, invalidated: bool = False) -> None:
        self.blocks: dict[bytes, Block] = {}
        self.invalidated = invalidated


class Block:
    """One block in the CPU tier: its slots, and how far they are filled.

    A block is visible when every rank's part is written (`ready`). Whoever needs it to stay (a lease, a store, a job of
    a secondary tier) holds a pin; a block without pins may be evicted, whether it is ready or was left incomplete.
    """

    __slots__ = (
        "evict_on_unpin",
        "key",
        "last_use",
        "namespace",
        "namespace_index",
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
        """Where it stands to be evicted: with its size class and its tenant's share."""
        self.policy_node: Any = None
        """What that line's eviction policy keeps with it."""
        self.slots: tuple[int | None, ...] = spec.no_slots
        """Per rank the offset of its slot in the region, or None where it has none."""
        self.written = 0
        """Bit r is set when rank r's part is complete."""
        self.ready = False
        """Whether every part is written: only then is the block visible."""
        self.writers = 0
        """Parts that clients are writing now."""
        self.promoting = False
        """Whether a job is filling all parts from a secondary tier."""
        self.pins = 0
        self.skip_reason: MissReason | None = None
        """Why a tier that should have got it did not, if there is one."""
        self.namespace_index = namespace_index
        self.evict_on_unpin = False
        """Whether it goes as soon as nobody pins it, because its hold has ended."""
        self.stalled = False
        """Whether a tier is at work on it that does not come back."""
        self.last_use = 0
        """Logical time of the last store or lookup."""
        self.retain_until = 0.0
        """Until when a request wants it to stay, in seconds; tiers may be asked for it later."""
        self.retained = False
        """Whether it does stay: it is out of its line meanwhile."""

    @property
    def name(self) -> tuple[NamespaceId, bytes]:
        """What it is known by when it has gone and comes again."""
        return self.namespace, self.key

    @property
    def invalidated(self) -> bool:
        """Whether it has been taken out of the index, by a reset say: it goes as soon as nobody pins it."""
        return self.namespace_index.invalidated

    @property
    def busy(self) -> bool:
        """Never: whether blocks are pinned is not counted."""
        return False

    @property
    def hold_only(self) -> bool:
        """Whether only a hold names it: it goes to no tier below."""
        return self.key.startswith(HOLD_ONLY_KEY_PREFIX)

    @property
    def pending(self) -> bool:
        """Whether somebody is at work to make it ready."""
        return not self.ready and (self.promoting or self.writers > 0)

    @property
    def nbytes(self) -> int:
        """Size of all parts together."""
        return self.part_bytes * len(self.slots)

    @property
    def allocated_bytes(self) -> int:
        """What its slots take when it has them all, in bytes."""
        return self.queue.size_class * len(self.slots)

    def part_written(self, rank: int) -> bool:
        """Takes note that one part is complete; returns whether all are."""
        self.written |= 1 << rank
        self.ready = self.written == (1 << len(self.slots)) - 1
        return self.ready

    def promoted(self) -> None:
        """Takes note that all parts have been filled from a secondary tier."""
        self.written = (1 << len(self.slots)) - 1
        self.ready = True
        self.promoting = False

    def put_slot(self, rank: int, offset: int | None) -> None:
        """Gives a rank's part a slot, or none."""
        slots = self.slots
        self.slots = (offset,) if len(slots) == 1 else (*slots[:rank], offset, *slots[rank + 1 :])

    def clear(self) -> None:
        """Lets go of all slots, and of what was written to them."""
        self.slots = (None,) if len(self.slots) == 1 else (None,) * len(self.slots)
        self.written = 0
        self.ready = False

    def __repr__(self) -> str:
        state = "ready" if self.ready else "pending" if self.pending else "partial"
        return f"Block({self.key.hex()[:12]}…, {state}, pins={self.pins})"
