"""Model of holds: which are open, until when, and which blocks have arrived."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvtier.tiers.core.block import Block
from kvtier.tiers.core.holds import Hold
from kvtier.tiers.types import EngineKey, HoldName

__all__ = ["HoldBook", "HoldRecord"]


@dataclass(eq=False, slots=True)
class HoldRecord:
    """An open hold."""

    hold: Hold
    duration: float
    expires_at: float
    is_known: bool = False
    """Whether claims were told that it is open."""
    was_awaited: bool = True
    prepared: int = 0
    """Number of items that the publication has prepared."""
    orphaned: bool = False
    """Whether its engine had no session at some time."""
    told_at: int | None = None
    """Number of settled blocks at which a claim that waits must be told; None if none waits."""
    at: dict[int, tuple[Block, tuple[int | None, ...]]] = field(default_factory=dict)
    """Per arrived item, the block and its slots when it was first seen."""

    @property
    def is_preparing(self) -> bool:
        return self.prepared < len(self.hold.items)

    @property
    def settled(self) -> int:
        """Number of prepared blocks that are ready or were given up."""
        return sum(block is None or block.ready for block in self.hold.items[: self.prepared])


class HoldBook:
    """The holds of one run of a server."""

    def __init__(self) -> None:
        self.open: dict[HoldName, HoldRecord] = {}
        self.over: set[HoldName] = set()
        """Expired holds."""
        self.ended: list[HoldRecord] = []
        """Holds that ended in this event."""
        self.late: list[HoldRecord] = []
        """Expired holds that slices have not ended yet."""

    def end(self, name: HoldName) -> None:
        self.ended.append(self.open.pop(name))

    def reset(self, namespace: bytes) -> None:
        for name in [name for name in self.open if name[0] == namespace]:
            self.end(name)

    def expire(self, now: float) -> int:
        """Ends expired holds; returns their number."""
        late = [name for name, record in self.open.items() if record.expires_at <= now]
        for name in late:
            self.end(name)
            self.over.add(name)
        return len(late)

    def update_engines(self, alive: set[EngineKey]) -> None:
        """Records which engines have a session now."""
        for name, record in self.open.items():
            record.orphaned = record.orphaned or name[:2] not in alive
