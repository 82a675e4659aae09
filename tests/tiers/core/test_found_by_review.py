"""Regressions: defects of the core that reviews found."""

from collections.abc import Iterator

import pytest
from core_rig import HIT, MISS, PENDING, SPEC, Rig, keys
from harness.operations import run_to_end
from simulation import EXTENT, ModelTier

from kvtier.tiers.base import NamespaceId, OffloadPolicy, Outcome, RequestInfo, Vote
from kvtier.tiers.core.call_specs import LookupSpec, StoreSpec
from kvtier.tiers.core.catalog import Catalog, CatalogEntry, EntryState
from kvtier.tiers.core.commands import LoadFromTier, StoreInTier
from kvtier.tiers.core.manager import TierManager
from kvtier.tiers.errors import InvalidNamespace, LeaseNotFound, LimitExceeded, NotOwner
from kvtier.tiers.eviction import LRU
from kvtier.tiers.eviction.queues import EvictionQueues
from kvtier.tiers.eviction.quotas import Quotas, Tenant
from kvtier.tiers.stats.eviction_history import EvictionHistory
from kvtier.tiers.stats.request_log import MAX_OUTCOME_RUNS
from kvtier.tiers.types import MAX_PART_SIZES, TENANT_TAG_BYTES, MissReason, NamespaceSpec


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


def test_a_repeated_key_is_retained_once() -> None:
    """A budget that was charged twice would never be freed."""
    core = TierManager(EXTENT, EXTENT, [ModelTier("near", 1 << 20)])
    core.add_memory(0, EXTENT)
    session = core.open_session(b"s", "engine", None, SPEC)
    answer = run_to_end(core.prepare_store(session, keys(0), StoreSpec(lease_seconds=60), now=0))
    run_to_end(core.complete_store(session, answer.store_id))
    for command in core.take_commands():
        if isinstance(command, StoreInTier):
            core.job_finished(command.job_id, [Outcome.DONE])
    lookup = run_to_end(core.lookup(session, keys(0) * 5, LookupSpec(lease_seconds=60, retain_for=30.0), now=0))
    core.release(session, lookup.lease.id)
    assert [share.retained_bytes for tier in core.stats().tiers for share in tier.shares] == [4096, 4096]
    core.tick(31)
    assert [share.retained_bytes for tier in core.stats().tiers for share in tier.shares] == [0, 0]


def test_equal_engine_ids_of_two_namespaces_are_separate() -> None:
    """Engines choose their ids: two tenants with the same id reach none of each other's blocks."""
    rig = Rig()
    rig.store(keys(0))
    lease = run_to_end(rig.core.lookup(rig.session, keys(0), LookupSpec(request_id="1", lease_seconds=60), now=0)).lease
    theirs = NamespaceSpec(NamespaceId(b"t" * 32), world_size=1, part_bytes=(4096,))
    stranger = rig.core.open_session(b"stranger", "engine", None, theirs, tenant="other")
    with pytest.raises(LeaseNotFound):  # as if there were no such lease
        rig.core.lease(stranger, lease.id)
    colleague = rig.core.open_session(b"colleague", "another engine", None, SPEC)
    with pytest.raises(NotOwner):
        rig.core.lease(colleague, lease.id)
    rig.core.finish_request(stranger, "1")
    assert rig.core.lease(rig.session, lease.id) is lease


def test_a_refused_request_is_not_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    """B3.12: no tier sees its begin; the end of an unannounced request is always accepted."""
    monkeypatch.setattr("kvtier.tiers.core.requests.MAX_REQUESTS", 1)
    near = ModelTier("near", 1 << 20)
    rig = Rig(near)
    begin(rig, "a")
    with pytest.raises(LimitExceeded):
        begin(rig, "b")
    assert near.begun == ["a"]
    rig.core.finish_request(rig.session, "c")
    assert (near.begun, near.finished) == (["a", "c"], ["c"])


def test_finishing_twice_keeps_the_explanation() -> None:
    """The client repeats the call because the first answer was lost."""
    rig = Rig()
    run_to_end(rig.core.lookup(rig.session, keys(0), LookupSpec(request_id="r", lease_seconds=60), now=0))
    for _ in range(2):
        rig.core.finish_request(rig.session, "r")
    [record] = rig.core.explain("r")
    assert len(record.lookups) == 1


def test_the_record_of_a_lookup_is_bounded() -> None:
    """Also for mixed answers; the counts are exact."""
    rig = Rig(extents=64)
    rig.store(keys(*range(0, 1000, 2)))
    run_to_end(
        rig.core.lookup(
            rig.session, keys(*range(1000)), LookupSpec(prefix=False, request_id="mixed", lease_seconds=60), now=0
        )
    )
    [record] = rig.core.explain("mixed")
    spans = record.lookups[-1].outcomes()
    assert len(spans) <= MAX_OUTCOME_RUNS + 2
    assert sum(span.count for span in spans) == 1000
    assert sum(span.count for span in spans if span.outcome == 0) == 500


def test_blocks_behind_a_miss_of_a_prefix_are_misses() -> None:
    """B3.16: if a block finds no room, later blocks are misses, not pinned and not fetched."""
    rig = Rig(ModelTier("near", 1 << 20), queue=1 << 20)
    rig.store_in_all_tiers(keys(0, 1))
    rig.core.reset(rig.session)
    rig.store_in_all_tiers(keys(*range(100, 115)))
    full = run_to_end(rig.core.lookup(rig.session, keys(*range(100, 115)), LookupSpec(lease_seconds=60), now=0)).lease
    assert full is not None
    found = run_to_end(rig.core.lookup(rig.session, keys(100, 0, 1, 101), LookupSpec(lease_seconds=60), now=0))
    assert found.statuses() == HIT + PENDING + MISS * 2


def test_part_sizes_of_a_namespace_are_bounded() -> None:
    """Each size has its own eviction queue, which a search for room may have to visit."""
    NamespaceSpec(NamespaceId(bytes(32)), 1, tuple(range(1, MAX_PART_SIZES + 1)))
    with pytest.raises(InvalidNamespace, match="sizes at most"):
        NamespaceSpec(NamespaceId(bytes(32)), 1, tuple(range(1, MAX_PART_SIZES + 2)))


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


@pytest.mark.parametrize("capacity", [500, 5000], ids=["the tier is full", "its tenant is at its limit"])
def test_refused_stores_do_not_walk_over_queued_blocks(capacity: int) -> None:
    """B3.7: a store of many blocks without room ends fast, also with a long queue."""
    looked = 0

    class CountingLRU(LRU[CatalogEntry]):
        def victims(self) -> Iterator[CatalogEntry]:
            nonlocal looked
            for entry in super().victims():
                looked += 1
                yield entry

    space = NamespaceId(b"t" * 32)
    tenant = Tenant("t", space[:TENANT_TAG_BYTES], {}, {"disk": 500})
    catalog = Catalog(capacity, EvictionQueues(Quotas("disk", capacity, [tenant]), CountingLRU), EvictionHistory())
    for number in range(500):
        assert catalog.begin_store(space, b"%d" % number, 1) == []
    entries = [entry for number in range(500) if (entry := catalog.get(space, b"%d" % number))]
    catalog.use(entries, "request")
    assert [catalog.begin_store(space, b"new %d" % number, 1) for number in range(500)] == [None] * 500
    assert catalog.make_room(space, 1) == []
    assert looked == 0
    entries[7].state = EntryState.HELD
    catalog.recount(entries[7])
    assert catalog.begin_store(space, b"new", 1) == [entries[7]], "the only one that may go"
    assert catalog.begin_store(space, b"newer", 1) is None
    assert 0 < looked <= 500
