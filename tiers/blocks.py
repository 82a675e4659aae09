"""Blocks in the CPU tier, and the namespaces that they belong to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .base import NamespaceId
from .errors import InvalidKey, InvalidNamespace

if TYPE_CHECKING:
    from .history import MissReason
    from .lines import Line

__all__ = ["GROUP_INDEX_BYTES", "PRIVATE_KEY_PREFIX", "SLOT_ALIGNMENT", "Block", "NamespaceSpec"]

GROUP_INDEX_BYTES = 4
"""A key ends in its KV cache group's index, big-endian."""

PRIVATE_KEY_PREFIX = b"kvtier.hold."
"""So begin the keys of blocks that only a hold names (`kvtier/v1/handoff.proto`): they have no content hash."""

SLOT_ALIGNMENT = 4096
"""Slots start and end on pages, as direct I/O wants it."""

MAX_WORLD_SIZE = 4096
MAX_PART_SIZES = 64
"""Each size is a line of eviction of its own; engines have a handful."""


@dataclass(frozen=True, slots=True)
class NamespaceSpec:
    """What the core needs to know of a namespace.

    Attributes:
        id: digest of everything that must agree for blocks to be shared.
        world_size: ranks, each with one part of every block.
        part_bytes: per KV cache group, the size of one rank's part of a block.
    """

    id: NamespaceId
    world_size: int
    part_bytes: tuple[int, ...]

    def __post_init__(self) -> None:
        if not 1 <= self.world_size <= MAX_WORLD_SIZE:
            raise InvalidNamespace(f"world size {self.world_size} is not within 1..{MAX_WORLD_SIZE}")
        if not self.part_bytes:
            raise InvalidNamespace("a namespace needs at least one KV cache group")
        if len(set(self.part_bytes)) > MAX_PART_SIZES:
            raise InvalidNamespace(f"a namespace has parts of {MAX_PART_SIZES} sizes at most")
        if min(self.part_bytes) < 1:
            raise InvalidNamespace("part_bytes of every group must be positive")

    def part_bytes_of(self, key: bytes) -> int:
        """Returns the size of one part of the block with this key.

        Raises:
            InvalidKey: the key names a group that the namespace lacks.
        """
        group = int.from_bytes(key[-GROUP_INDEX_BYTES:], "big")
        if group >= len(self.part_bytes):
            raise InvalidKey(f"key names group {group}, the namespace has {len(self.part_bytes)}")
        return self.part_bytes[group]


class Block:
    """One block in the CPU tier: its slots, and how far they are filled.

    A block is visible when every rank's part is written (`ready`). Whoever needs it to stay (a lease, a store, a job of
    a secondary tier) holds a pin; a block without pins may be evicted, whether it is ready or was left incomplete.
    """

    __slots__ = (
        "_all_written",
        "fleeting",
        "key",
        "last_use",
        "left_out",
        "line",
        "namespace",
        "part_bytes",
        "pins",
        "private",
        "promoting",
        "ready",
        "retain_until",
        "retained",
        "retired",
        "slots",
        "stuck",
        "writers",
        "written",
    )

    def __init__(self, spec: NamespaceSpec, key: bytes, part_bytes: int, line: Line[Block]) -> None:
        self.namespace = spec.id
        self.key = key
        self.part_bytes = part_bytes
        self.line = line
        """Where it stands to be evicted: with its size class and its tenant's share."""
        self.slots: list[int | None] = [None] * spec.world_size
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
        self.left_out: MissReason | None = None
        """Why a tier that should have got it did not, if there is one."""
        self.retired = False
        """Whether it has been taken out of the index, by a reset say: it goes as soon as nobody pins it."""
        self.private = key.startswith(PRIVATE_KEY_PREFIX)
        """Whether only a hold names it: it goes to no tier below."""
        self.fleeting = False
        """Whether it goes as soon as nobody pins it, because its hold has ended."""
        self.stuck = False
        """Whether a tier is at work on it that does not come back."""
        self.last_use = 0
        """Logical time of the last store or lookup."""
        self.retain_until = 0.0
        """Until when a request wants it to stay, in seconds; tiers may be asked for it later."""
        self.retained = False
        """Whether it does stay: it is out of its line meanwhile."""
        self._all_written = (1 << spec.world_size) - 1

    @property
    def name(self) -> tuple[NamespaceId, bytes]:
        """What it is known by when it has gone and comes again."""
        return self.namespace, self.key

    @property
    def pending(self) -> bool:
        """Whether somebody is at work to make it ready."""
        return not self.ready and (self.promoting or self.writers > 0)

    @property
    def nbytes(self) -> int:
        """Size of all parts together."""
        return self.part_bytes * len(self.slots)

    @property
    def footprint(self) -> int:
        """What its slots take when it has them all, in bytes."""
        return self.line.size_class * len(self.slots)

    def part_written(self, rank: int) -> None:
        """Takes note that one part is complete."""
        self.written |= 1 << rank
        self.ready = self.written == self._all_written

    def promoted(self) -> None:
        """Takes note that all parts have been filled from a secondary tier."""
        self.written = self._all_written
        self.ready = True
        self.promoting = False

    def __repr__(self) -> str:
        state = "ready" if self.ready else "pending" if self.pending else "partial"
        return f"Block({self.key.hex()[:12]}…, {state}, pins={self.pins})"
