"""State machine of the write-back queues, compared with a list of waiting and running blocks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from itertools import chain, compress
from typing import ClassVar, cast

from core_rig import SPEC
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from simulation import ModelTier

from kvtier.tiers.core.block import Block, NamespaceIndex
from kvtier.tiers.core.catalog import EntryState
from kvtier.tiers.core.commands import Command, RemoveFromTier, StoreInTier
from kvtier.tiers.core.cpu_tier import CpuTier
from kvtier.tiers.core.requests import Request
from kvtier.tiers.core.secondary_state import GATHER_SECONDS
from kvtier.tiers.core.settings import CPU_TIER, TierSettings
from kvtier.tiers.core.tier_jobs import JOB_BYTES, TierJobs
from kvtier.tiers.secondary_tier import OffloadPolicy, Outcome
from kvtier.tiers.stats.eviction_history import EvictionHistory
from kvtier.tiers.types import EngineSession, JobId, Negotiation

SMALL, LARGE = 4096, JOB_BYTES // 4
"""Four large blocks fill a job exactly."""
QUEUE = 8 * LARGE
CAPACITY = 24 * LARGE
SMALL_ONES = st.lists(st.sampled_from(range(0, 40, 2)), min_size=1, max_size=3, unique=True)
NUMBERS = SMALL_ONES | st.lists(st.integers(0, 39), min_size=1, max_size=8, unique=True)


class Tier(ModelTier):
    parallel_stores: ClassVar[int] = 2


class CountedPins:
    """Stands for the CPU tier: the scheduler only removes pins in it."""

    def unpin(self, blocks: list[Block]) -> None:
        for block in blocks:
            block.pins -= 1


class WriteBackMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.commands: list[Command] = []
        self.scheduler = TierJobs(
            tiers=[Tier("disk", CAPACITY)],
            settings=TierSettings(),
            now=0.0,
            max_queued_bytes=QUEUE,
            cpu_tier=cast("CpuTier", CountedPins()),
            history=EvictionHistory(),
            commands=self.commands,
        )
        [self.secondary] = self.scheduler.secondaries
        queue = TierSettings().new_queues(CPU_TIER, CAPACITY, 0.0).queue_for(SPEC.id)
        sizes = [(SMALL, LARGE)[number % 2] for number in range(40)]
        names = [b"%03d" % number + bytes(4) for number in range(40)]
        index = NamespaceIndex()
        self.blocks = [Block(SPEC, name, size, queue, index) for name, size in zip(names, sizes, strict=True)]
        self.waiting: list[Block] = []
        self.running: dict[JobId, list[Block]] = {}
        self.held: set[Block] = set()
        self.removals: list[Block] = []
        """Blocks of failed stores, which the tier may have written in part."""
        self.awaited: dict[Block, list[Request]] = {}
        """Per block that is queued or being stored: the requests that wait for it."""
        self.requests: list[Request] = []
        self.incomplete: Counter[str] = Counter()
        self.stalled = self.urgent = False
        self.now = self.gathers_until = 0.0
        self.dropped = 0

    def storing(self) -> list[Block]:
        return [*self.waiting, *chain.from_iterable(self.running.values())]

    def known(self, block: Block) -> bool:
        return block in self.held or block in self.storing()

    def take(self, block: Block, limit: float) -> bool:
        """Returns whether the tier queues a block that it lacks. It has room for all."""
        if self.stalled or bytes_of(self.storing()) + block.nbytes > limit:
            return False
        if not self.waiting:
            self.gathers_until = self.now + GATHER_SECONDS
        self.waiting.append(block)
        return True

    def is_gathering(self) -> bool:
        enough = min(self.secondary.tier.gather_bytes, QUEUE // 2)
        return bytes_of(self.waiting) < enough and not (self.awaited or self.urgent) and self.now < self.gathers_until

    def end_waits(self, block: Block, *, stored: bool) -> list[Request]:
        ended = self.awaited.pop(block, [])
        self.incomplete.update(request.id for request in ended if not stored)
        return ended

    def follow(self) -> None:
        """Compares the commands with the queue."""
        for command in self.commands:
            if isinstance(command, RemoveFromTier):
                assert sorted(command.keys) == sorted(block.name for block in self.removals)
                self.removals.clear()
                continue
            assert isinstance(command, StoreInTier)
            assert not self.removals
            assert not self.stalled
            assert not self.is_gathering()
            batch = list(command.blocks)
            assert batch == self.waiting[: len(batch)], "blocks are stored in the order of the queue"
            assert len(batch) == 1 or bytes_of(batch) <= JOB_BYTES
            rest = self.waiting[len(batch) : len(batch) + 1]
            assert not rest or bytes_of(batch + rest) > JOB_BYTES, "a job takes as many blocks as it may"
            del self.waiting[: len(batch)]
            self.urgent &= bool(self.waiting)
            self.running[command.job_id] = batch
        self.commands.clear()

    @initialize(gather=st.sampled_from([0, 3 * SMALL, 3 * LARGE]))
    def choose(self, gather: int) -> None:
        self.secondary.tier.gather_bytes = gather

    @rule(numbers=NUMBERS, even_if_busy=st.booleans())
    def cascade(self, numbers: list[int], *, even_if_busy: bool) -> None:
        blocks = [self.blocks[number] for number in numbers]
        limit = math.inf if even_if_busy else QUEUE
        refused = [block for block in blocks if not self.known(block) and not self.take(block, limit)]
        self.dropped += len(refused)
        self.scheduler.write_back.cascade(blocks, None, even_if_busy=even_if_busy)
        assert [block for block in blocks if block.skip_reason] == refused
        self.follow()

    @rule(numbers=NUMBERS, new=st.booleans())
    def cascade_for_a_request(self, numbers: list[int], *, new: bool) -> None:
        if new or not self.requests:
            session = EngineSession(b"s", "engine", None, SPEC)
            negotiation = Negotiation(OffloadPolicy.REQUEST_LEVEL, ())
            self.requests.append(Request(session, f"r{len(self.requests)}", negotiation, frozenset({1})))
        request, blocks = self.requests[-1], [self.blocks[number] for number in numbers]
        for block in blocks:
            is_new = not self.known(block)
            if block in self.held:
                continue
            if self.stalled or (is_new and not self.take(block, 2 * QUEUE)):
                self.dropped += is_new
                self.incomplete[request.id] += 1
            elif request not in self.awaited.setdefault(block, []):
                self.awaited[block].append(request)
        self.scheduler.write_back.cascade_for(request, blocks)
        self.follow()

    @rule(numbers=NUMBERS)
    def replay_skipped(self, numbers: list[int]) -> None:
        blocks = [self.blocks[number] for number in numbers]
        for block in blocks:
            if not self.known(block) and not self.take(block, QUEUE):
                break
        self.scheduler.write_back.replay_skipped(1, blocks)
        self.follow()

    @rule(number=st.integers(0, 1), failed=st.sets(st.integers(0, 8)), short=st.booleans())
    def finish(self, number: int, failed: set[int], *, short: bool) -> None:
        """The blocks without an outcome count as failed."""
        if number >= len(self.running):
            assert self.scheduler.finish(JobId(-1), []) is None
            return
        job = list(self.running)[number]
        batch = self.running.pop(job)
        outcomes = [Outcome.FAILED if item in failed else Outcome.DONE for item in range(len(batch) - short)]
        done = [item < len(outcomes) and item not in failed for item in range(len(batch))]
        self.held.update(compress(batch, done))
        self.removals += [block for block, stored in zip(batch, done, strict=True) if not stored]
        ended = [self.end_waits(block, stored=stored) for block, stored in zip(batch, done, strict=True)]
        finished = self.scheduler.finish(job, outcomes)
        assert finished is not None
        assert finished.results == list(zip(batch, done, strict=True))
        assert finished.acknowledged == list(chain.from_iterable(ended))
        assert all(block.skip_reason for block, stored in finished.results if not stored)
        self.follow()

    @rule(stalled=st.booleans())
    def stall(self, *, stalled: bool) -> None:
        is_back, lost = self.stalled and not stalled, list[Block]()
        ended: list[Request] = []
        if stalled and not self.stalled:
            lost, self.waiting, self.urgent = self.waiting, [], False
            self.dropped += len(lost)
            ended = [request for block in list(self.awaited) for request in self.end_waits(block, stored=False)]
        self.stalled = stalled
        change = self.scheduler.stall(1, stalled=stalled)
        assert (change.is_back, change.abandoned) == (is_back, [])
        assert Counter(request.id for request in change.acknowledged) == Counter(request.id for request in ended)
        assert all(block.skip_reason for block in lost)
        self.follow()

    @rule(seconds=st.sampled_from([0.5, GATHER_SECONDS]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.scheduler.tick(self.now, lambda *_: None)
        self.follow()

    @rule()
    def flush(self) -> None:
        self.urgent = bool(self.waiting)
        self.scheduler.write_back.flush_queues()
        self.follow()

    @invariant()
    def nothing_waits_without_a_reason(self) -> None:
        assert len(self.running) <= Tier.parallel_stores
        if not self.stalled and len(self.running) < Tier.parallel_stores:
            assert not self.removals
            assert not self.waiting or self.is_gathering()

    @invariant()
    def books(self) -> None:
        storing = self.storing()
        assert {block for block in self.blocks if block.pins} == set(storing)
        assert all(block.pins == 1 for block in storing)
        assert self.secondary.queued_bytes == bytes_of(storing)
        assert self.secondary.waiting_bytes == bytes_of(self.waiting)
        assert self.secondary.stores == self.secondary.jobs == len(self.running)
        assert self.secondary.dropped == self.dropped
        assert len(self.secondary.catalog) == len(self.held) + len(storing)
        for block in self.blocks:
            entry = self.secondary.catalog.get(*block.name)
            state = EntryState.HELD if block in self.held else EntryState.STORING if block in storing else None
            assert (entry and entry.state) is state
        for request in self.requests:
            assert request.incomplete == self.incomplete[request.id]
            assert request.pending_stores == sum(request in waiting for waiting in self.awaited.values())


def bytes_of(blocks: Iterable[Block]) -> int:
    return sum(block.nbytes for block in blocks)


def test_the_write_back_queue_of_a_tier() -> None:
    run_state_machine_as_test(WriteBackMachine, settings=settings(max_examples=60, stateful_step_count=40))


def test_a_flush_concerns_only_the_blocks_that_wait_then() -> None:
    machine = WriteBackMachine()
    machine.choose(gather=3 * SMALL)
    machine.cascade([0], even_if_busy=False)
    machine.flush()
    machine.cascade([2], even_if_busy=False)
    assert [block.key for block in machine.waiting] == [machine.blocks[2].key]


def test_a_later_block_does_not_prolong_the_wait_of_an_earlier_one() -> None:
    machine = WriteBackMachine()
    machine.choose(gather=3 * SMALL)
    machine.cascade([0], even_if_busy=False)
    machine.wait(GATHER_SECONDS / 2)
    machine.cascade([2], even_if_busy=False)
    assert len(machine.waiting) == 2
    machine.wait(GATHER_SECONDS / 2)
    assert not machine.waiting
