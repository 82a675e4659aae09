"""Retiring extents: extents that another size class gets although some of their blocks are pinned.

A pinned block keeps its extent in its size class. So a few leases could keep all extents from the
blocks of another size. If a class finds neither a free slot nor an idle extent, an extent retires
for it: its unpinned blocks are evicted, it gives no slot, and its pinned blocks leave the index.
Readers keep their leases on these blocks, and lookups do not find them any more. When the last pin
has ended, the class gets the extent. Pins that are left after `GRACE_SECONDS` are ended
(`retiring_pins.py`), unless the class does not want the extent any more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat

from ..eviction.quotas import TenantShare
from .block import Block
from .pin_budget import affordable
from .slot_allocator import Extent, SlotAllocator
from .victim_selection import SlotReclaimer

__all__ = ["GRACE_SECONDS", "RetiringExtents"]

GRACE_SECONDS = 30.0
"""Time for the pins of a retiring extent to end. The extent stays with its class if pins are left
after twice this time. A class that gets an extent has this time to use it, and so does the tenant
that wanted it before it may let a further one retire."""

SLICE = 512
"""Number of blocks of a retiring extent that are evicted at once: 1 ms."""

_MOST_PART = 4
"""The extents of a pool that retire at a time are at most this part of all. A tenant gets at most
as many as are then left, so one tenant alone gets a half of them."""


@dataclass(slots=True)
class _Retirement:
    """An extent that retires, or has retired a short time ago.

    Attributes:
        tenant: tag of the tenant that wanted the extent.
        is_wanted: whether the class has lacked a slot again.
        ended_at: when the class got the extent; None before.
    """

    extent: Extent
    size_class: int
    tenant: bytes
    begun_at: float
    is_wanted: bool = False
    ended_at: float | None = None


class RetiringExtents:
    def __init__(
        self,
        memory: SlotAllocator,
        reclaimer: SlotReclaimer,
        *,
        owner_of: Callable[[int], Block | None],
        evict: Callable[[Sequence[Block]], None],
        evict_pinned: Callable[[Sequence[Block]], None],
    ) -> None:
        self._memory = memory
        self._reclaimer = reclaimer
        self._owner_of = owner_of
        self._evict = evict
        self._evict_pinned = evict_pinned
        self._all: dict[Extent, _Retirement] = {}
        self._wanted: dict[bytes, tuple[TenantShare, int]] = {}
        """The share and size class that each tenant lacks an extent for."""
        self._in_vain: set[bytes] = set()
        """Tenants for which no extent was found since the last tick."""
        self._left: dict[Block, None] = {}
        """Blocks of the latest retiring extent, which are evicted in slices."""
        self._now = 0.0

    def __bool__(self) -> bool:
        return bool(self._all)

    @property
    def has_work(self) -> bool:
        """Whether to call `work`."""
        return bool(self._wanted or self._left)

    def want(self, tenant: bytes, share: TenantShare, size_class: int, slots: int) -> None:
        """Called when a tenant lacks this number of slots, and no block can be evicted for them."""
        coming = 0
        for each in self._all.values():
            extent = each.extent
            if (extent.pool, each.size_class) == (share.pool, size_class) and (extent.next_class or not extent.used):
                each.is_wanted = True
                coming += self._memory.extent_bytes // size_class
        has_others = self._memory.extents_per_class(share.pool).keys() - {size_class}
        if coming < slots and has_others and self._may_begin(tenant, share.pool):
            self._wanted[tenant] = (share, size_class)

    def work(self) -> bool:
        """Evicts blocks of a retiring extent, or lets one retire; returns whether work is left."""
        if not self._left and self._wanted:
            self._begin(*self._wanted.popitem())
        blocks = [self._left.popitem()[0] for _ in range(min(SLICE, len(self._left)))]
        self._clear([block for block in blocks if self.retires(block)])
        return self.has_work

    def _begin(self, tenant: bytes, wanted: tuple[TenantShare, int]) -> None:
        extent = self._reclaimer.extent_to_retire(*wanted, self._all)
        if extent is None:
            self._in_vain.add(tenant)
        elif self._may_begin(tenant, extent.pool):
            self._all[extent] = _Retirement(extent, wanted[1], tenant, self._now)
            self._memory.retire(extent, wanted[1])
            self._left = dict.fromkeys(self.blocks_in(extent))

    def unpinned(self, blocks: Iterable[Block]) -> None:
        """Called after pins of blocks have ended: their writes and loads may have ended, too."""
        different = dict.fromkeys(blocks)  # a hold may have pinned a block twice
        self._clear([block for block in different if block not in self._left and self.retires(block)])

    def tick(self, now: float) -> None:
        """Ends retirements."""
        self._now = now
        self._in_vain.clear()
        for each in list(self._all.values()):
            extent, age = each.extent, now - each.begun_at
            if not extent.next_class:
                each.ended_at = now if each.ended_at is None else each.ended_at
                if now - each.ended_at >= GRACE_SECONDS:
                    del self._all[extent]
                    self._memory.give_back_unused(extent)
            elif age >= 2 * GRACE_SECONDS or (age >= GRACE_SECONDS and not each.is_wanted):
                del self._all[extent]
                self._memory.restore(extent)

    def overdue(self) -> list[Extent]:
        """Returns the extents whose pins must be ended."""
        return [
            each.extent
            for each in self._all.values()
            if each.extent.next_class and self._now - each.begun_at >= GRACE_SECONDS
        ]

    def overdue_among(self, blocks: Iterable[Block]) -> set[Block]:
        """Returns those of these blocks that have a slot in an extent whose pins must be ended."""
        extents, extent_at = set(self.overdue()), self._memory.extent_at
        return {
            block for block in blocks if any(slot is not None and extent_at(slot) in extents for slot in block.slots)
        }

    def blocks_in(self, extent: Extent) -> list[Block]:
        """Returns the blocks with a slot in an extent."""
        owners = map(self._owner_of, sorted(self._memory.in_use(extent)))
        return [block for block in dict.fromkeys(owners) if block is not None]

    def retires(self, block: Block) -> bool:
        """Whether a slot of a block is in a retiring extent."""
        return any(slot is not None and self._memory.extent_at(slot).next_class for slot in block.slots)

    def _may_begin(self, tenant: bytes, pool: int) -> bool:
        if tenant in self._in_vain:
            return False
        most = max(1, self._memory.extents_in(pool) // _MOST_PART)
        mine = [each.tenant == tenant for each in self._all.values() if each.extent.pool == pool]
        return affordable(repeat(1, 1), free=most - len(mine), own=sum(mine)) > 0

    def _clear(self, blocks: Sequence[Block]) -> None:
        """Evicts blocks. A block that is being written or loaded stays until that has ended."""
        self._evict([block for block in blocks if not block.pins])
        self._evict_pinned([block for block in blocks if block.pins and block.ready and not block.invalidated])
