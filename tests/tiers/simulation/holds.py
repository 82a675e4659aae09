"""A second opinion on holds: which are open, until when, and what has come to them."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvtier.tiers.core.block import Block
from kvtier.tiers.core.holds import Hold
from kvtier.tiers.types import EngineKey, HoldName

__all__ = ["HoldBook", "HoldRecord"]


@dataclass(eq=False, slots=True)
class HoldRecord:
    """A hold that was published and must be open still."""

    hold: Hold
    duration: float
    expires_at: float
    was_awaited: bool = True
    orphaned: bool = False
    """Whether its engine has had no session at some time since."""
    at: dict[int, tuple[Block, tuple[int | None, ...]]] = field(default_factory=dict)
    """Per item that has come, the block and its slots when it was first seen."""


class HoldBook:
    """The holds of one life of a server."""

    def __init__(self) -> None:
        self.open: dict[HoldName, HoldRecord] = {}
        self.over: set[HoldName] = set()
        """Those whose time was over."""
        self.ended: list[HoldRecord] = []
        """Those that have ended in this event."""

    def end(self, name: HoldName) -> None:
        """A hold has ended."""
        self.ended.append(self.open.pop(name))

    def reset(self, namespace: bytes) -> None:
        """All holds of a namespace have ended."""
        for name in [name for name in self.open if name[0] == namespace]:
            self.end(name)

    def expire(self, now: float) -> int:
        """Ends what has expired; returns how many."""
        late = [name for name, record in self.open.items() if record.expires_at <= now]
        for name in late:
            self.end(name)
            self.over.add(name)
        return len(late)

    def mourn(self, alive: set[EngineKey]) -> None:
        """Takes note of which engines have a session now."""
        for name, record in self.open.items():
            record.orphaned = record.orphaned or name[:2] not in alive
