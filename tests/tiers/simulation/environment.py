"""Simulated environment of the core: outcomes of jobs, memory, crashes and the clock."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kvtier.tiers.core.block import Block
from kvtier.tiers.core.commands import RemoveFromTier
from kvtier.tiers.secondary_tier import Outcome

from . import inspect as inside
from .ledger import JobRecord
from .model import CHAINS, EXTENT, SPECS, Invariant, ModelTier, Name
from .tier_calls import Eviction

if TYPE_CHECKING:
    from .world import World

__all__ = ["Environment"]

HOUR = 3600.0
BAD = (Outcome.FAILED, Outcome.FAILED, Outcome.NO_SPACE)


class Environment:
    """Events of tiers, memory and time. Every choice comes from the world's seed."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.rng = world.rng
        self.hanging: set[int] = set()
        """Tiers that hang."""
        self.stalled: set[int] = set()
        """Hanging tiers that the core knows of."""
        self.latest = 0.0
        """The latest time that the core has seen; it treats a clock that goes back as stopped."""

    def actions(self) -> dict[Callable[[], None], float]:
        """Returns the possible events, with weights."""
        return {
            self.run_work: 24,
            self.answer: 4,
            self.next_slice: 4,
            self.report_again: 0.8,
            self.store_elsewhere: 0.8,
            self.hang: 0.25,
            self.recover: 0.5,
            self.lose_a_block: 0.3,
            self.find_damage: 0.3,
            self.add_memory: 1,
            self.tick: 1.5,
            self.outlast_pins: 8,
            self.stop_clock: 0.4,
            self.jump_forward: 0.15,
            self.jump_back: 0.25,
            self.final_flush: 0.2,
            self.evict: 0.6,
            self.crash: 0.12,
        }

    def next_slice(self) -> None:
        """Runs the next slice of large work in the core."""
        if self.world.work_left:
            self.world.work_left = False
            self.world.core.work()
            self.world.saw("slices of work")

    def run_work(self) -> None:
        """Ends a job. Stores and removals of a tier end in order, loads in any order."""
        secondaries = [number for number in range(1, len(self.world.tiers) + 1) if number not in self.hanging]
        heads = [self.world.work.written[number][0] for number in secondaries if self.world.work.written[number]]
        loads = [job for number in secondaries for job in self.world.ledger.running(number, loads=True)]
        if not heads and not loads:
            return
        work = self.rng.choice([*heads, *loads])
        if isinstance(work, RemoveFromTier):
            self.world.work.written[work.tier].popleft()
            self.world.tiers[work.tier - 1].remove(work.keys)
            return
        if not work.is_load:
            self.world.work.written[work.command.tier].popleft()
        self._end(work)

    def _end(self, job: JobRecord) -> None:
        tier = self.world.tiers[job.command.tier - 1]
        full_from = self.rng.randrange(len(job.names)) if not job.is_load and self.rng.random() < 0.07 else None
        outcomes = [
            Outcome.NO_SPACE if full_from is not None and number >= full_from else self._move(tier, job, block)
            for number, block in enumerate(job.command.blocks)
        ]
        self.world.saw("disks full during a batch", bool(full_from))
        if not job.is_load:
            self._check_capacity(tier)
        reported = self._misreport(outcomes)
        for name, outcome in zip(job.names[len(reported) :], outcomes[len(reported) :], strict=True):
            if outcome is Outcome.CORRUPT:  # the block is gone, and the core is not told
                self.world.lost.add((tier.name, name))
        self._report(job, reported)

    def _check_capacity(self, tier: ModelTier) -> None:
        """Checks a tier's capacity, except for sizes it misreports and blocks of other servers."""
        if not (tier.lies or tier.shared):
            fits = tier.used_bytes <= tier.capacity_bytes
            self.world.must(Invariant.CAPACITY, fits, f"{tier.name} holds {tier.used_bytes} bytes")

    def _misreport(self, outcomes: list[Outcome]) -> list[Outcome]:
        """Simulates a defect of a tier: too few or too many outcomes."""
        luck = self.rng.random()
        if luck < 0.04:
            self.world.saw("too few outcomes")
            return outcomes[: self.rng.randrange(len(outcomes))]
        if luck < 0.08:
            self.world.saw("too many outcomes")
            return [*outcomes, *[Outcome.DONE] * self.rng.randint(1, 3)]
        return outcomes

    def _report(self, job: JobRecord, outcomes: list[Outcome]) -> None:
        self.world.ledger.job_ended(job)
        padded = [*outcomes, *[Outcome.FAILED] * len(job.names)][: len(job.names)]
        kind = "promotions" if job.is_load else "cascades"
        for block, outcome in zip(job.command.blocks, padded, strict=True):
            self.world.saw(f"{kind} {'done' if outcome is Outcome.DONE else 'failed'}")
            if not job.is_load:
                stored = outcome is Outcome.DONE and block not in self.world.wrong
                self.world.ledger.requests.paid(job.command.tier, block.name, stored=stored)
        self.world.core.job_finished(job.command.job_id, outcomes)

    def _move(self, tier: ModelTier, job: JobRecord, block: Block) -> Outcome:
        name, slots = block.name, [slot for slot in block.slots if slot is not None]
        luck, memory = self.rng.random(), self.world.memory
        if not job.is_load:
            if luck < 0.95:  # some failed stores are complete in the tier
                tier.remove([name])
                tier.blocks[name] = (block.nbytes, tuple(memory[slot] for slot in slots))
                self.world.lost.discard((tier.name, name))
            return self.rng.choice(BAD) if luck > 0.9 else Outcome.DONE
        if luck > 0.9 or name not in tier.blocks or name in tier.lies:
            memory.update(dict.fromkeys(slots, "torn"))
            return self._failed_load(tier, block)
        memory.update(zip(slots, tier.blocks[name][1], strict=True))
        core = inside.secondaries(self.world.core)[job.command.tier - 1]
        self.world.saw("blocks of other servers found", core.catalog.get(*name) is None)
        return Outcome.DONE

    def _failed_load(self, tier: ModelTier, block: Block) -> Outcome:
        if block.name not in tier.blocks:
            return Outcome.MISSING
        if block.name in tier.lies or self.rng.random() < 0.5:
            self.world.saw("wrong sizes detected", block.name in tier.lies)
            tier.remove([block.name])
            return Outcome.CORRUPT
        return Outcome.FAILED

    def answer(self) -> None:
        """Answers a query of a shared tier: correctly, wrongly or not at all."""
        asked = [job for job in self.world.ledger.queries.values() if job.tier not in self.hanging]
        if not asked:
            return
        question = self.rng.choice(asked)
        tier, luck = self.world.tiers[question.tier - 1], self.rng.random()
        answers = [name in tier.blocks for name in question.keys]
        if luck < 0.1:
            answers = answers[: self.rng.randrange(len(answers))]
        elif luck < 0.2:
            answers += [True, False]
        self.world.saw("answers missing", len(answers) < len(question.keys))
        self.world.saw("tiers asked")
        del self.world.ledger.queries[question.job_id]
        self.world.core.lookup_finished(question.job_id, answers)

    def store_elsewhere(self) -> None:
        """Another server writes to a shared tier, or the tier's store evicts blocks."""
        shared = [tier for tier in self.world.tiers if tier.shared]
        if shared:
            spec, tier = self.rng.choice(SPECS), self.rng.choice(shared)
            if self.rng.random() < 0.3:
                tier.remove(self.rng.sample(sorted(tier.blocks), len(tier.blocks) // 2))
                self.world.saw("blocks evicted by a shared store")
                return
            group = self.rng.randrange(len(spec.part_bytes))
            for key in self.rng.choice(CHAINS[group])[: self.rng.randint(1, 10)]:
                tier.put(spec, key, spec.part_bytes[group])

    def report_again(self) -> None:
        """Simulates a defect of a tier: an ended or unknown job is reported and must be ignored."""
        ended = self.world.ledger.ended_jobs
        if ended:
            job_id = self.rng.choice(ended).command.job_id
            before = self.world.core.stats()
            for unknown in (job_id, 10**9):
                self.world.core.job_finished(unknown, [Outcome.DONE] * self.rng.randrange(12))
                self.world.core.lookup_finished(unknown, [True])
            self.world.must(Invariant.JOBS, self.world.core.stats() == before, f"job {job_id} ended twice")
            self.world.saw("ended jobs reported again")

    def hang(self) -> None:
        """A tier hangs, and the server may notice; the rest continues."""
        if self.world.tiers:
            number = self.rng.randint(1, len(self.world.tiers))
            self.hanging.add(number)
            self.world.saw("tiers hung")
            if number not in self.stalled and self.rng.random() < 0.5:
                self._stall(number)

    def _stall(self, number: int) -> None:
        """The server stops waiting for a tier and drops its queue."""
        self.stalled.add(number)
        for block in list(inside.secondaries(self.world.core)[number - 1].write_back_queue):
            self.world.ledger.requests.paid(number, block.name, stored=False)
        self.world.ledger.requests.abandoned(number)
        self.world.core.tier_stalled(number, stalled=True)
        self.world.saw("tiers stalled")

    def recover(self) -> None:
        """A hanging tier recovers; some never do."""
        if self.hanging and self.rng.random() < 0.5:
            self._recover(self.rng.choice(sorted(self.hanging)))

    def recover_all(self) -> None:
        """All hanging tiers recover."""
        for number in sorted(self.hanging):
            self._recover(number)

    def _recover(self, number: int) -> None:
        self.hanging.remove(number)
        if number in self.stalled:
            self.stalled.remove(number)
            self.world.core.tier_stalled(number, stalled=False)

    def lose_a_block(self) -> None:
        """A tier loses a block, for example a removed file, without the core's knowledge."""
        if self.world.tiers:
            tier = self.rng.choice(self.world.tiers)
            if tier.blocks:
                name = self.rng.choice(list(tier.blocks))
                tier.remove([name])
                self.world.lost.add((tier.name, name))
                self.world.saw("blocks lost by a tier")

    def find_damage(self) -> None:
        """Blocks of the CPU tier turn out to be damaged or wrong: pinned or not, ready or not.

        The tiers below have whole bytes of a damaged block, but the same bytes of a wrong one.
        """
        blocks = list(self.world.core_view.blocks)
        if not blocks:
            return
        named = self.rng.sample(blocks, self.rng.randint(1, min(4, len(blocks))))
        there = [b for b in named if b.ready and inside.block(self.world.core, *b.name) is b]
        self.world.deleted = {block.name for block in there}
        self.world.damaged.update(there)
        pinned = [block for block in there if block.pins]
        held = [set(tier) for tier in self.world.core_view.held]
        is_wrong = self.rng.random() < 0.5
        self.world.wrong.update(there if is_wrong else ())
        removed = self.world.core.remove_wrong(named) if is_wrong else self.world.core.remove_damaged(named)
        left = [block for block in there if inside.block(self.world.core, *block.name) is block]
        self.world.must(Invariant.DAMAGE, removed == there, f"{there} were damaged, {removed} are removed")
        self.world.must(Invariant.DAMAGE, not left, f"{left} are damaged, and readers still find them")
        for number, (before, after) in enumerate(zip(held, inside.CoreView(self.world.core).held, strict=True)):
            tier = inside.secondaries(self.world.core)[number]
            gone = {name for name in self.world.deleted if not inside.is_storing(tier, name)} if is_wrong else set()
            self.world.must(
                Invariant.DAMAGE, after == before - gone, f"{gone} are wrong, the tier lost {before - after}"
            )
            self.world.saw("wrong blocks in a tier", not before.isdisjoint(gone))
        self.world.saw("damaged blocks", bool(there))
        self.world.saw("damaged blocks with pins", bool(pinned))

    def add_memory(self) -> None:
        """A further part of the region is backed."""
        self.world.saw("memory came late", self.back(self.rng.randint(1, 3)))

    def back(self, extents: int) -> bool:
        """Backs up to `extents` extents; returns whether any were left."""
        nbytes = min(self.world.region_bytes - self.world.backed_bytes, extents * EXTENT)
        if nbytes:
            self.world.core.add_memory(self.world.backed_bytes, nbytes)
            self.world.backed_bytes += nbytes
        return bool(nbytes)

    def tick(self) -> None:
        """Advances the time."""
        self._tick(self.rng.choice((0.5, 2, 40)))

    def outlast_pins(self) -> None:
        """Advances the time until the pins of a retiring extent must end."""
        if self.world.core_view.retiring:
            self._tick(inside.GRACE_SECONDS)

    def stop_clock(self) -> None:
        """Advances the time while the clock stands."""
        self._tick(0)
        self.world.saw("clock stopped")

    def jump_forward(self) -> None:
        """The clock jumps forward by hours: everything expires at once."""
        self._tick(self.rng.choice((1, 3, 1000)) * HOUR)
        self.world.saw("clock jumped ahead")

    def jump_back(self) -> None:
        """The clock jumps back: nothing expires, and no grant is shortened."""
        self._tick(-self.rng.choice((5, 60, 2 * HOUR)))
        self.world.saw("clock jumped back")

    def _tick(self, seconds: float) -> None:
        self.world.now += seconds
        self.latest = max(self.latest, self.world.now)
        self.world.settings_model.ticking(self.world.core, self.latest)
        self.world.core.tick(self.world.now)
        for what, number in self.world.ledger.expired(self.latest).items():
            self.world.saw(what, bool(number))

    def final_flush(self) -> None:
        """Flushes, as the server does before its end."""
        self.world.core.store_skipped()

    def evict(self) -> None:
        self.world.calls.begin(Eviction(self.world.calls))

    def crash(self) -> None:
        """The server is killed: queued writes are lost, and a part of a running one is complete."""
        for number, tier in enumerate(self.world.tiers, 1):
            head = self.world.work.written[number][0] if self.world.work.written[number] else None
            if isinstance(head, JobRecord):
                for block in head.command.blocks[: self.rng.randint(0, len(head.names))]:
                    self._move(tier, head, block)
            if tier.blocks and self.rng.random() < 0.15:
                tier.lies[self.rng.choice(list(tier.blocks))] = self.rng.choice((1, 4096, 1 << 30))
                self.world.saw("wrong sizes reported")
        self.world.saw("crashes")
        self.world.start_core()
        for tier, held in zip(self.world.tiers, self.world.core_view.held, strict=True):
            self._check_recovery(tier, held)

    def _check_recovery(self, tier: ModelTier, known: set[Name]) -> None:
        """Checks that the core has all blocks that a tier kept, if they fit."""
        entries = list(tier.entries())
        fits = sum(entry.nbytes for entry in entries) <= tier.capacity_bytes
        kept = {(entry.namespace, entry.key) for entry in entries}
        limited = any(tier.name in tenant.limits for tenant in self.world.settings_model.settings.tenants)
        right = known == kept if fits and not limited else known <= kept
        self.world.must(Invariant.DURABLE, right, f"{tier.name}: not the blocks that it kept")
        self.world.saw("tiers recovered", bool(known))
