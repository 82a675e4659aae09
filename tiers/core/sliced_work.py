"""Incremental work: runs unpins, resets, expiry and undone actions in slices.

A slice that leaves work behind requests the next one with a `ContinueWork` command. At most one
such command is outstanding.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..secondary_tier import NamespaceId
from ..types import tenant_of
from .block import Block
from .commands import Command, ContinueWork
from .cpu_tier import CpuTier
from .operations import Operation
from .tier_jobs import TierJobs

__all__ = ["IncrementalWork", "UnpinQueue"]

SLICE = 2048
"""Cost of a slice: about 1 ms. The pin of a lease costs 1."""
_ENTRY_COST = 16
"""To end a lease, hold or store takes as long as this number of pins."""


@dataclass(slots=True)
class _Entry:
    remove: Callable[[list[Block]], object]
    blocks: Sequence[Block | None]
    left: int
    """Number of leading blocks that are still pinned."""
    cost: int


class UnpinQueue:
    """Blocks that ended leases and stores, or ended holds, leave pinned.

    A call pays for pins of its own tenant, as many as it leaves: the latest entry of the tenant is
    first. The tenants take turns in the other slices.
    """

    def __init__(self, continue_if: Callable[[bool], None]) -> None:
        """`continue_if`: if its argument is True, `unpin_slice` is called later."""
        self.continue_if = continue_if
        self._entries: dict[bytes, list[_Entry]] = {}
        """Per tenant, the next one first."""
        self._latest: bytes | None = None
        """Tenant of the latest blocks; None if there were none."""
        self._added = 0
        """Cost of the blocks that were added since the last `start`."""

    def __bool__(self) -> bool:
        return bool(self._entries)

    def add(
        self,
        namespace: NamespaceId,
        remove: Callable[[list[Block]], object],
        blocks: Sequence[Block | None],
        cost: int = 1,
    ) -> None:
        """Adds blocks. `remove` removes a pin of each block that it gets, and is called tail first.

        `cost`: of each block.
        """
        self._latest = tenant_of(namespace) if blocks else None
        if self._latest is not None:
            self._entries.setdefault(self._latest, []).append(_Entry(remove, blocks, len(blocks), cost))
            self._added += _ENTRY_COST + cost * len(blocks)

    def start(self) -> None:
        """Removes pins of the latest blocks' tenant now, and the others later.

        Removes as many as were added since the last call, but at most a slice.
        """
        room, self._added = min(SLICE, self._added), 0
        self.continue_if(self._unpin(self._latest, room))

    def unpin_first(self, tenant: bytes) -> bool:
        """Removes a slice of the pins of a tenant; returns False if the tenant has none here."""
        if tenant not in self._entries:
            return False
        self.continue_if(self._unpin(tenant))
        return True

    def unpin_slice(self) -> bool:
        """Removes a slice of the pins; returns whether pins are left."""
        return self._unpin(None)

    def entries(self) -> list[_Entry]:
        return [entry for own in self._entries.values() for entry in own]

    def _unpin(self, tenant: bytes | None, room: int | None = None) -> bool:
        """Removes a slice of the pins, of this tenant first."""
        room = SLICE if room is None else room
        while self._entries and room > 0:
            if tenant is None or tenant not in self._entries:
                tenant = next(iter(self._entries))
            own = self._entries[tenant] = self._entries.pop(tenant)  # behind the others
            room = self._unpin_of(own, room)
            if not own and self._entries.get(tenant) is own:
                del self._entries[tenant]
        return bool(self._entries)

    def _unpin_of(self, entries: list[_Entry], room: int) -> int:
        """Removes pins of a tenant; returns the cost that is left of the slice."""
        while entries and room > 0:
            entry = entries[-1]
            end, entry.left = entry.left, max(0, entry.left - max(1, room // entry.cost))
            if not entry.left:
                entries.pop()
            room -= _ENTRY_COST + entry.cost * (end - entry.left)
            entry.remove([block for block in entry.blocks[entry.left : end] if block is not None])
        return room


class IncrementalWork:
    """Unfinished resets, unpins, expiries and undone actions."""

    def __init__(
        self,
        *,
        cpu_tier: CpuTier,
        tier_jobs: TierJobs,
        commands: list[Command],
    ) -> None:
        self._cpu_tier = cpu_tier
        self._tier_jobs = tier_jobs
        self.unpins = UnpinQueue(self.continue_if)
        self.hold_unpins = UnpinQueue(self.continue_if)
        """Those of ended holds. A publication that lacks room waits only for these."""
        self._operations: dict[bytes, deque[Operation[Any]]] = {}
        """Per tenant. The tenants take turns, and so do the operations of one tenant."""
        self._commands = commands
        self.is_requested = False
        """Whether a `ContinueWork` command is outstanding."""

    def continue_if(self, more: bool) -> None:  # noqa: FBT001 - the return value of a slice
        if more and not self.is_requested:
            self.is_requested = True
            self._commands.append(ContinueWork())

    def perform(self, operation: Operation[Any], tenant: bytes = b"") -> None:
        """Performs an operation that no call waits for, and that waits for nothing.

        The first slice runs now, the others run later. `tenant`: b"" if it is for several tenants.
        """
        try:
            next(operation)
        except StopIteration:
            return
        self.perform_later(operation, tenant)

    def perform_later(self, operation: Operation[Any], tenant: bytes) -> None:
        """As `perform`, but the first slice runs later, too."""
        self._operations.setdefault(tenant, deque()).append(operation)
        self.continue_if(True)

    def _operation_slice(self) -> bool:
        if self._operations:
            tenant = next(iter(self._operations))
            own = self._operations.pop(tenant)
            operation = own.popleft()
            if own:
                self._operations[tenant] = own
            self.perform(operation, tenant)
        return bool(self._operations)

    def work(self, now: float) -> None:
        """Runs the next slice of every operation. Called once for each `ContinueWork`.

        If one operation raises, the others still run, and the next slice is requested. Then the
        error is raised.
        """
        self.is_requested = False
        slices: tuple[Callable[[], bool], ...] = (
            self._cpu_tier.make_spare_room,
            self._retire_extents,
            self._cpu_tier.reset_slice,
            self.unpins.unpin_slice,
            self.hold_unpins.unpin_slice,
            self._operation_slice,
            partial(self._drop_expired, now),
        )
        errors: list[Exception] = []
        more = [_run(slice_, errors) for slice_ in slices]
        self.continue_if(any(more))
        if len(errors) > 1:
            raise ExceptionGroup("several slices", errors)
        if errors:
            raise errors[0]

    def _retire_extents(self) -> bool:
        if not self._cpu_tier.retiring.has_work:
            return False
        self._cpu_tier.has_more_room = True  # an extent without pins is free at once
        return self._cpu_tier.retiring.work()

    def expire(self, now: float) -> None:
        self.continue_if(self._drop_expired(now))

    def _drop_expired(self, now: float) -> bool:
        """Drops expired blocks, one slice per tier; returns whether expired blocks are left."""
        more = [self._cpu_tier.tick(now), self._tier_jobs.tick(now, self._cpu_tier.used_at)]
        return any(more)


def _run(slice_: Callable[[], bool], errors: list[Exception]) -> bool:
    """Returns whether a slice left work. Adds an exception to `errors` and then returns True."""
    try:
        return slice_()
    except Exception as error:  # noqa: BLE001 - the other operations must run
        errors.append(error)
        return True
