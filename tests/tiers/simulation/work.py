"""Jobs, queries and removals that the core has requested, in the order of their execution."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from kvtier.tiers.core.commands import Command, LoadFromTier, LookupInTier, RemoveFromTier, StoreInTier

from .ledger import JobRecord
from .model import Invariant, Name

if TYPE_CHECKING:
    from .world import World

__all__ = ["Work", "spell"]


class Work:
    """Work that tiers have not done yet."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.written: dict[int, deque[JobRecord | RemoveFromTier]] = {n + 1: deque() for n in range(len(world.tiers))}
        """Stores and removals, in order per tier."""

    def take(self, command: Command) -> None:
        """Adds a command and checks that it does not conflict with another."""
        match command:
            case LookupInTier(job_id):
                questions = self.world.ledger.queries
                self.world.must(Invariant.JOBS, job_id not in questions, f"query {job_id} was sent twice")
                questions[job_id] = command
            case RemoveFromTier(tier, keys):
                shared = self.world.tiers[tier - 1].shared
                self.world.must(Invariant.APART, not shared, "a block that other servers may use is removed")
                hurt = self._loading(tier) & set(keys)
                self.world.must(Invariant.APART, not hurt, "a block is removed while it is loaded")
                self.written[tier].append(command)
            case StoreInTier() | LoadFromTier():
                self._begin(command)

    def _loading(self, tier: int) -> set[Name]:
        return {name for job in self.world.ledger.running(tier, loads=True) for name in job.names}

    def _busy(self, tier: int, *, loads: bool) -> set[Name]:
        """Returns the blocks that a new job must avoid.

        In a shared tier other servers write as well.
        """
        if self.world.tiers[tier - 1].shared:
            return set()
        busy = self._loading(tier)
        for job in self.world.ledger.running(tier, loads=False):
            busy.update(job.names)
        for work in self.written[tier] if loads else ():
            if isinstance(work, RemoveFromTier):
                busy.update(work.keys)
        return busy

    def _begin(self, command: StoreInTier | LoadFromTier) -> None:
        names = [block.name for block in command.blocks]
        job = JobRecord(command, [tuple(block.slots) for block in command.blocks], names)
        must, ledger, tier = self.world.must, self.world.ledger, command.tier
        must(Invariant.JOBS, command.job_id not in ledger.jobs, f"job {command.job_id} began twice")
        must(Invariant.PINS, not any(None in slots for slots in job.slots), "a job on a block without its slots")
        hurt = self._busy(tier, loads=job.is_load) & set(names)
        must(Invariant.APART, not hurt, "two jobs of a tier on one block")
        must(Invariant.APART, len(set(names)) == len(names), "a block twice in a job")
        if job.is_load:
            self.world.memory.update((slot, "loading") for slots in job.slots for slot in slots if slot is not None)
        else:
            room = len(ledger.running(tier, loads=False)) < self.world.tiers[tier - 1].parallel_stores
            must(Invariant.APART, room, "too many stores of a tier at a time")
            self.written[tier].append(job)
        ledger.jobs[command.job_id] = job

    def done(self) -> bool:
        return not (self.world.ledger.jobs or self.world.ledger.queries or any(self.written.values()))


def spell(command: Command) -> str:
    """Returns all fields of a command as text."""
    if isinstance(command, StoreInTier | LoadFromTier):
        return f"{command.job_id} {command.tier} {[(block.name, block.slots) for block in command.blocks]}"
    return repr(command)
