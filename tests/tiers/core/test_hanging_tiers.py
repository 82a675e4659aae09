"""Hanging tiers: requests, resets and stores end without them, and a recovered tier continues."""

from core_rig import HIT, MISS, PENDING, Rig, keys
from harness.operations import run_to_end
from simulation import ModelTier

from kvtier.tiers.core.call_specs import LookupSpec, StoreSpec
from kvtier.tiers.core.commands import LoadFromTier, StoreInTier
from kvtier.tiers.secondary_tier import OffloadPolicy, Outcome, RequestInfo, Vote
from kvtier.tiers.types import MissReason


class RequestLevelTier(ModelTier):
    """Votes for every block of every request."""

    def on_new_request(self, request: RequestInfo) -> Vote:
        self.begun.append(request.request_id)
        return Vote(OffloadPolicy.REQUEST_LEVEL, "always")


def begin(rig: Rig, request_id: str) -> None:
    rig.core.begin_request(rig.session, RequestInfo(request_id, rig.session.namespace.id))


def promoting(rig: Rig) -> LoadFromTier:
    """Starts a promotion of block 0 that no lease waits for; returns the job."""
    rig.store_in_all_tiers(keys(0))
    rig.core.reset(rig.session)
    assert rig.look_up(keys(0)) == PENDING
    [job] = [command for command in rig.core.take_commands() if isinstance(command, LoadFromTier)]
    return job


def test_blocks_of_a_hanging_load_can_be_stored_again() -> None:
    """Waiting lookups get a miss, a new store works, and the late end of the load is ignored."""
    rig = Rig(ModelTier("near", 1 << 20))
    job = promoting(rig)
    lease = run_to_end(rig.core.lookup(rig.session, keys(0), LookupSpec(lease_seconds=60), now=0)).lease
    rig.core.tier_stalled(1, stalled=True)
    assert lease.statuses() == MISS
    assert rig.core.stats().misses_by_reason[MissReason.LOAD_FAILED] == 1
    assert rig.store(keys(0)) == b"\x01", "granted"
    assert rig.look_up(keys(0)) == HIT
    rig.core.job_finished(job.job_id, [Outcome.DONE])
    rig.core.tier_stalled(1, stalled=False)
    assert rig.look_up(keys(0)) == HIT
    assert rig.core.stats().tiers[0].used_bytes == 4096, "the slot of the late load is free"


def test_a_reset_does_not_wait_for_a_hanging_tier() -> None:
    """B3.19: blocks of a running job are neither found nor counted; newer blocks are found."""
    rig = Rig(ModelTier("near", 1 << 20))
    rig.store(keys(0))
    [job] = [command for command in rig.core.take_commands() if isinstance(command, StoreInTier)]
    rig.core.tier_stalled(1, stalled=True)
    assert rig.core.reset(rig.session) == 0
    rig.store(keys(1))
    assert rig.look_up(keys(1)) == HIT
    assert rig.look_up(keys(0)) == MISS
    rig.core.job_finished(job.job_id, [Outcome.DONE])
    assert rig.core.stats().tiers[0].used_bytes == 4096


def test_a_recovered_tier_gets_its_missed_blocks() -> None:
    """A short interruption must not leave blocks volatile for good."""
    rig = Rig(ModelTier("near", 1 << 20), queue=1 << 20)
    rig.store(keys(0))
    [job] = [command for command in rig.core.take_commands() if isinstance(command, StoreInTier)]
    rig.core.tier_stalled(1, stalled=True)
    rig.store(keys(1, 2))
    rig.core.job_finished(job.job_id, [Outcome.DONE])
    rig.core.tier_stalled(1, stalled=False)
    rig.finish_jobs()
    assert rig.core.stats().tiers[1].blocks == 3


def test_requests_end_while_a_tier_hangs() -> None:
    """B3.10, B3.12: they are reported as incomplete and forgotten."""
    hanging, well = RequestLevelTier("hanging", 1 << 20), RequestLevelTier("well", 1 << 20)
    rig = Rig(hanging, well)
    begin(rig, "before")
    answer = run_to_end(
        rig.core.prepare_store(rig.session, keys(0), StoreSpec(request_id="before", lease_seconds=60), now=0)
    )
    run_to_end(rig.core.complete_store(rig.session, answer.store_id))
    jobs = [command for command in rig.core.take_commands() if isinstance(command, StoreInTier)]
    rig.core.job_finished(jobs[1].job_id, [Outcome.DONE])
    rig.core.tier_stalled(1, stalled=True)
    assert rig.core.finish_request(rig.session, "before").incomplete == 1
    begin(rig, "after")
    run_to_end(rig.core.prepare_store(rig.session, keys(0), StoreSpec(request_id="after", lease_seconds=60), now=0))
    assert rig.core.finish_request(rig.session, "after").settled
    assert hanging.finished == well.finished == ["before", "after"]
    assert not rig.core._requests._requests


def test_a_tier_has_one_job_per_block() -> None:
    """Also if a hanging tier recovers before its abandoned job has ended."""
    rig = Rig(ModelTier("near", 1 << 20))
    job = promoting(rig)
    rig.core.tier_stalled(1, stalled=True)
    rig.core.tier_stalled(1, stalled=False)
    assert rig.look_up(keys(0)) == MISS
    assert rig.core.take_commands() == []
    rig.core.job_finished(job.job_id, [Outcome.DONE])
    assert rig.look_up(keys(0)) == PENDING
