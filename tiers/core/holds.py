"""Holds: named leases over the blocks of a finished request, for another engine to claim (B2.17, B2.19).

A hold pins its blocks from its publication on, those that are still on their way included. It outlives the session that
published it, and never its expiry.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ..stats.request_log import HoldRecord
from ..types import EngineKey, HandoffDirection, HoldName
from .block import Block
from .leases import BlockLease

__all__ = ["Hold", "HoldClaim", "HoldTable"]


@dataclass(slots=True, eq=False)
class Hold:
    """A request that is held.

    Attributes:
        keys: of its blocks, as published.
        positions: of its blocks, each within its group.
        items: per key the pinned block; None for one that will not come.
        num_tokens: tokens that the blocks back.
        duration: for how many seconds it was published.
        awaited: items whose block is not there yet.
        orphaned: whether its engine has no session any more: what nobody else is writing will not come.
        record: what the journal keeps of it.
    """

    name: HoldName
    tenant: str
    direction: HandoffDirection
    keys: Sequence[bytes]
    positions: Sequence[int]
    items: list[Block | None]
    num_tokens: int
    duration: float
    published_at: float
    expires_at: float
    awaited: int = 0
    claims: int = 0
    orphaned: bool = False
    record: HoldRecord | None = None

    @property
    def engine(self) -> EngineKey:
        """The engine that published it."""
        return self.name[:2]

    @property
    def nbytes(self) -> int:
        """Size of its blocks, of all ranks."""
        return sum(block.nbytes for block in self.items if block is not None)


@dataclass(frozen=True, slots=True)
class HoldClaim:
    """What a claim was granted: a lease on the hits, None where there are none, and a status per key (0: not wanted)."""

    hold: Hold
    lease: BlockLease | None
    statuses: bytes


class HoldTable:
    """The holds that are open, by name, and who waits for which block."""

    def __init__(self, unpin: Callable[[Sequence[Block]], None]) -> None:
        """`let_go` is told of the pins of an open hold that fall."""
        self._unpin = unpin
        self._holds: dict[HoldName, Hold] = {}
        self._waiting: dict[Block, dict[Hold, list[int]]] = {}
        """Per block that is not there yet the holds that it is in, and which of their items it is."""
        self._per_name: dict[tuple[str, str], int] = defaultdict(int)
        """Engine and request, of whatever namespace."""
        self._per_tenant: dict[str, int] = defaultdict(int)
        self._items: dict[str, int] = defaultdict(int)

    def __len__(self) -> int:
        return len(self._holds)

    def __iter__(self) -> Iterator[Hold]:
        """Iterates over all holds, the oldest first."""
        return iter(self._holds.values())

    def get(self, name: HoldName) -> Hold | None:
        """Returns a hold that is open."""
        return self._holds.get(name)

    def is_elsewhere(self, name: HoldName) -> bool:
        """Returns whether there is a hold of this engine and request, though in another namespace."""
        return name not in self._holds and name[1:] in self._per_name

    def count(self, tenant: str) -> int:
        """Returns how many holds a tenant has."""
        return self._per_tenant.get(tenant, 0)

    def items_of(self, tenant: str) -> int:
        """Returns how many items the holds of a tenant add up to; what several hold counts for each."""
        return self._items.get(tenant, 0)

    def add(self, hold: Hold) -> None:
        """Opens a hold whose blocks are pinned already; the pins are the hold's from now on."""
        for item, block in enumerate(hold.items):
            if block is not None and not block.ready:
                hold.awaited += 1
                self._waiting.setdefault(block, {}).setdefault(hold, []).append(item)
        self._holds[hold.name] = hold
        self._per_name[hold.name[1:]] += 1
        self._per_tenant[hold.tenant] += 1
        self._items[hold.tenant] += len(hold.keys)

    def remove(self, hold: Hold) -> None:
        """Closes a hold; its pins are the caller's from now on."""
        del self._holds[hold.name]
        self._per_name[hold.name[1:]] -= 1
        if not self._per_name[hold.name[1:]]:
            del self._per_name[hold.name[1:]]
        self._per_tenant[hold.tenant] -= 1
        self._items[hold.tenant] -= len(hold.keys)
        if not self._per_tenant[hold.tenant]:
            del self._per_tenant[hold.tenant], self._items[hold.tenant]
        for block in dict.fromkeys(hold.items) if hold.awaited else ():
            waiting = self._waiting.get(block) if block is not None else None
            if block is not None and waiting is not None:
                waiting.pop(hold, None)
                if not waiting:
                    del self._waiting[block]

    def awaited(self, blocks: Sequence[Block]) -> list[Block]:
        """Returns those of these blocks that a hold waits for."""
        return [block for block in blocks if block in self._waiting] if self._waiting else []

    def settle(self, block: Block) -> list[Hold]:
        """Takes note that nobody writes a block any more; returns the holds that nothing is awaited for since.

        One that did not become ready may be written by somebody else; but not where it was taken out of the index, or for a hold
        whose engine is gone: there it will not come.
        """
        waiting = self._waiting.get(block, {})
        hopeless = [hold for hold in waiting if block.ready or block.invalidated or hold.orphaned]
        for hold in hopeless:
            items = waiting.pop(hold)
            hold.awaited -= len(items)
            if not block.ready:
                self._lose(hold, items)
        if not waiting:
            self._waiting.pop(block, None)
        return [hold for hold in hopeless if not hold.awaited]

    def orphan(self, hold: Hold) -> None:
        """Takes note that the engine of a hold is gone: what nobody is writing now will not come."""
        hold.orphaned = True
        for block in dict.fromkeys(hold.items) if hold.awaited else ():
            waiting = self._waiting.get(block) if block is not None else None
            if block is None or waiting is None or block.pending:
                continue
            items = waiting.pop(hold)
            hold.awaited -= len(items)
            if not waiting:
                del self._waiting[block]
            self._lose(hold, items)

    def _lose(self, hold: Hold, items: Sequence[int]) -> None:
        lost = [block for item in items if (block := hold.items[item]) is not None]
        for item in items:
            hold.items[item] = None
        self._unpin(lost)
