"""The decision core with tiers that lose blocks, hang or report wrong values."""

from __future__ import annotations

import pytest
from harness.operations import run_to_end
from simulation import EXTENT, ModelTier

from kvtier.tiers.core.block import Block
from kvtier.tiers.core.call_specs import LookupSpec, StoreSpec
from kvtier.tiers.core.commands import Command, LoadFromTier, RemoveFromTier, StoreInTier
from kvtier.tiers.core.leases import BlockLease
from kvtier.tiers.core.manager import TierManager
from kvtier.tiers.errors import InvalidItem, NotReady
from kvtier.tiers.secondary_tier import NamespaceId, Outcome, RequestInfo
from kvtier.tiers.stats.snapshots import TierStats
from kvtier.tiers.types import DurableStatus, JobId, KeyStatus, MissReason, NamespaceSpec, StoreStatus

SPACE = NamespaceId(b"n" * 32)
SPEC = NamespaceSpec(SPACE, world_size=1, part_bytes=(4096,))
HIT, MISS, PENDING = (bytes([status]) for status in (KeyStatus.HIT, KeyStatus.MISS, KeyStatus.HIT_PENDING))
GRANTED = bytes([StoreStatus.GRANTED])


def keys(*numbers: int) -> list[bytes]:
    """Returns keys that sort like their numbers."""
    return [b"%03d" % number + bytes(4) for number in numbers]


class Rig:
    """A core of 16 slots over one tier that holds the blocks 0 to 3; the CPU tier is empty."""

    def __init__(self, tier: ModelTier | None = None) -> None:
        self.tier = tier or ModelTier("near", 1 << 20)
        if tier is None:
            self.tier.blocks = {(SPACE, key): (4096, ("",)) for key in keys(0, 1, 2, 3)}
        self.core = TierManager(EXTENT, EXTENT, [self.tier])
        self.core.add_memory(0, EXTENT)
        self.session = self.core.open_session(b"s", "engine", None, SPEC)

    @property
    def stats(self) -> TierStats:
        return self.core.stats().tiers[1]

    def look_up(self, *numbers: int) -> BlockLease | None:
        return run_to_end(
            self.core.lookup(self.session, keys(*numbers), LookupSpec(prefix=False, lease_seconds=60), now=0)
        ).lease

    def store(self, *numbers: int) -> bytes:
        answer = run_to_end(self.core.prepare_store(self.session, keys(*numbers), StoreSpec(lease_seconds=60), now=0))
        if answer.store_id is not None:
            run_to_end(self.core.complete_store(self.session, answer.store_id))
        return answer.statuses

    def lose(self, *numbers: int) -> None:
        self.core.entries_lost(1, [(SPACE, key) for key in keys(*numbers)])

    def finish(self, commands: list[Command], outcome: Outcome = Outcome.DONE) -> None:
        for command in commands:
            if isinstance(command, StoreInTier | LoadFromTier):
                self.core.job_finished(command.job_id, [outcome] * len(command.blocks))

    def jobs(self) -> list[Command]:
        """Passes the commands to the tier; returns its jobs."""
        wanted = StoreInTier | LoadFromTier | RemoveFromTier
        return [command for command in self.core.take_commands() if isinstance(command, wanted)]


def removed(commands: list[Command]) -> list[bytes]:
    return [key for command in commands if isinstance(command, RemoveFromTier) for _, key in command.keys]


def test_blocks_that_a_tier_lost_are_misses() -> None:
    """They use no capacity, are counted as lost, and may be stored again."""
    rig = Rig()
    rig.lose(1, 2, 99)
    assert (rig.stats.blocks, rig.stats.used_bytes, rig.stats.damaged) == (2, 2 * 4096, 3)
    lease = rig.look_up(0, 1, 2, 3)
    assert lease.statuses() == PENDING + MISS * 2 + PENDING
    rig.finish(rig.jobs())
    assert lease.statuses() == HIT + MISS * 2 + HIT
    assert rig.store(1) == GRANTED
    rig.finish(rig.jobs())
    assert rig.stats.blocks == 3


def test_a_lost_block_is_removed_before_it_is_stored_again() -> None:
    """The tier may have another block of that name by then, so it is told to remove it."""
    rig = Rig()
    rig.lose(1)
    rig.store(1)
    commands = rig.jobs()
    assert [type(command) for command in commands] == [RemoveFromTier, StoreInTier]
    assert removed(commands) == keys(1)


@pytest.mark.parametrize("outcome", [Outcome.DONE, Outcome.MISSING, Outcome.CORRUPT, Outcome.FAILED])
def test_a_block_lost_during_its_load(outcome: Outcome) -> None:
    """The load ends normally.

    The removal follows it, the loss counts once, and pins are dropped.
    """
    rig = Rig()
    lease = rig.look_up(1)
    jobs = rig.jobs()
    rig.lose(1)
    assert rig.look_up(1) is not None, "its promotion runs"
    assert rig.jobs() == []
    rig.finish(jobs, outcome)
    assert removed(rig.jobs()) == keys(1)
    assert lease.statuses() == (HIT if outcome is Outcome.DONE else MISS)
    assert (rig.stats.blocks, rig.stats.damaged) == (3, 1)
    rig.core.close_session(b"s")
    rig.session = rig.core.open_session(b"s", "engine", None, SPEC)
    assert rig.store(*range(100, 116)) == GRANTED * 16, "nothing is pinned"


def test_a_hit_whose_load_has_failed_is_not_an_invalid_item() -> None:
    """The lookup has promised it. Clients treat a lost hit as they treat a lost lease."""
    rig = Rig()
    lease = rig.look_up(1, 9)
    assert lease is not None
    assert lease.statuses() == PENDING + MISS
    rig.finish(rig.jobs(), Outcome.FAILED)
    assert lease.statuses() == MISS * 2
    with pytest.raises(NotReady):
        lease.slots([0], 0)
    with pytest.raises(InvalidItem):
        lease.slots([1], 0)


def test_a_loss_does_not_affect_a_newer_store() -> None:
    """The new block, queued or in a job, is not the lost one."""
    rig = Rig()
    rig.lose(1)
    rig.store(1)
    jobs = rig.jobs()
    rig.lose(1)
    rig.finish(jobs)
    assert rig.stats.blocks == 4
    assert removed(rig.jobs()) == []
    rig.store(*range(100, 116))
    rig.finish(rig.jobs())
    lease = rig.look_up(1)
    assert lease.statuses() == PENDING


def test_a_block_that_a_load_finds_corrupt_is_lost() -> None:
    """It is counted and leaves the catalog."""
    rig = Rig()
    rig.look_up(0, 1)
    rig.finish(rig.jobs(), Outcome.CORRUPT)
    assert (rig.stats.blocks, rig.stats.damaged) == (2, 2)
    assert rig.look_up(0, 1) is None
    assert rig.core.stats().misses_by_reason == {MissReason.LOAD_FAILED: 4}


def test_a_lost_block_is_a_miss_by_a_failed_load() -> None:
    """The reason also holds for a block that a check found damaged."""
    rig = Rig()
    rig.lose(1)
    rig.look_up(1)
    assert rig.core.stats().misses_by_reason == {MissReason.LOAD_FAILED: 1}


def test_a_hanging_tier_is_bypassed() -> None:
    """Its queued blocks lose their pins, it gets no new jobs, and its blocks are misses."""
    rig = Rig()
    rig.store(*range(100, 108))
    running = rig.jobs()
    rig.core.tier_stalled(1, stalled=True)
    assert rig.look_up(0) is None, "no load is asked for"
    assert rig.core.stats().misses_by_reason == {MissReason.LOAD_FAILED: 1}
    rig.store(*range(200, 208))
    assert run_to_end(rig.core.flush(rig.session.namespace.id, keys(200))) == bytes([DurableStatus.VOLATILE]), (
        "no flush waits for it"
    )
    assert rig.jobs() == []
    assert rig.store(*range(300, 308)) == GRANTED * 8, "only what the running job reads is pinned"
    rig.core.tier_stalled(1, stalled=False)
    rig.finish(running)
    assert rig.look_up(0) is not None
    rig.finish(rig.jobs())
    rig.store(400)
    assert any(isinstance(command, StoreInTier) for command in rig.jobs())


def test_the_queue_of_a_hanging_tier_is_dropped() -> None:
    """Queued blocks lose pins and places; requests that need them are incomplete."""
    rig = Rig()
    info = RequestInfo("r", SPACE, kv_transfer_params={"do_remote_decode": True})
    rig.core.begin_request(rig.session, info)
    rig.store(100)
    running = rig.jobs()
    answer = run_to_end(
        rig.core.prepare_store(rig.session, keys(101, 102), StoreSpec(request_id="r", lease_seconds=60), now=0)
    )
    run_to_end(rig.core.complete_store(rig.session, answer.store_id))
    before = rig.stats.used_bytes
    rig.core.tier_stalled(1, stalled=True)
    rig.core.tier_stalled(1, stalled=True)
    assert rig.stats.used_bytes == before - 2 * 4096
    assert rig.stats.dropped == 2
    request = rig.core.finish_request(rig.session, "r")
    assert (request.incomplete, rig.tier.finished) == (2, ["r"]), "B3.10: reported without waiting"
    rig.core.tier_stalled(1, stalled=False)
    rig.finish(running)
    assert rig.stats.used_bytes == 7 * 4096, "its missed blocks are being stored after its recovery"


def test_removals_wait_for_a_hanging_tier() -> None:
    """They precede all stores once the tier answers again."""
    rig = Rig()
    rig.core.tier_stalled(1, stalled=True)
    rig.lose(1)
    assert rig.jobs() == []
    rig.core.tier_stalled(1, stalled=False)
    assert removed(rig.jobs()) == keys(1)


def test_a_block_of_another_size_than_listed() -> None:
    """The block is a miss, and is removed from the tier."""
    tier = ModelTier("near", 1 << 20)
    tier.blocks = {(SPACE, key): (8192, ("",)) for key in keys(0, 1)}
    rig = Rig(tier)
    assert rig.stats.used_bytes == 4 * 4096
    lease = rig.look_up(0)
    rig.finish(rig.jobs())
    assert lease.statuses() == MISS
    assert removed(rig.jobs()) == keys(0)
    assert (rig.stats.blocks, rig.stats.used_bytes, rig.stats.damaged) == (1, 2 * 4096, 1)


def test_listed_blocks_beyond_the_capacity_are_removed() -> None:
    """The oldest go first, at the start."""
    tier = ModelTier("near", 3 * 4096)
    tier.blocks = {(SPACE, key): (4096, ("",)) for key in keys(*range(8))}
    rig = Rig(tier)
    assert rig.stats.blocks == 3
    assert removed(rig.jobs()) == keys(*range(5))


def test_unknown_and_repeated_ends_of_jobs_are_ignored() -> None:
    rig = Rig()
    rig.look_up(0, 1)
    jobs = rig.jobs()
    rig.finish(jobs)
    before = rig.stats
    rig.finish(jobs, Outcome.CORRUPT)
    rig.core.job_finished(JobId(12345), [Outcome.DONE])
    assert rig.stats == before
    assert rig.jobs() == []


def _block(rig: Rig, number: int) -> Block:
    return rig.core._cpu_tier.blocks_of(SPACE)[keys(number)[0]]


@pytest.mark.parametrize("running", [True, False])
def test_a_wrong_block_that_is_being_stored_is_removed_after_the_store(*, running: bool) -> None:
    """B4.20 The tier has its bytes by then. A new block with its key stays."""
    rig = Rig(ModelTier("near", 1 << 20))
    assert rig.store(5, 6) == GRANTED * 2
    stores = rig.jobs() if running else []
    removed_blocks = rig.core.remove_wrong([_block(rig, 5)])
    assert [block.key for block in removed_blocks] == keys(5)
    rig.core.flush_queues()
    rig.finish(stores or rig.jobs())
    assert removed(rig.jobs()) == keys(5)
    assert (rig.stats.blocks, rig.stats.damaged) == (1, 0)
    assert rig.look_up(5) is None
    assert rig.store(5) == GRANTED
    rig.core.flush_queues()
    rig.finish(rig.jobs())
    assert rig.stats.blocks == 2


def test_a_wrong_block_that_is_being_loaded_again_is_removed() -> None:
    """B4.20 Its entry in the tier is gone, and the tier removes it after the load."""
    rig = Rig()
    rig.look_up(0)
    rig.finish(rig.jobs())
    assert rig.core.remove_wrong([_block(rig, 0)])
    assert removed(rig.jobs()) == keys(0)
    assert rig.look_up(0) is None
