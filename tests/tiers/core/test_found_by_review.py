"""Defects that reviewers of the core have found."""

from collections.abc import Iterator

import pytest
from core_rig import HIT, MISS, PENDING, SPEC, Rig, keys
from simulation import EXTENT, ModelTier

from kvtier.tiers.base import NamespaceId, OffloadPolicy, Outcome, RequestInfo, Vote
from kvtier.tiers.core.catalog import Catalog, CatalogEntry, EntryState
from kvtier.tiers.core.commands import LoadFromTier, StoreInTier
from kvtier.tiers.core.manager import TierManager
from kvtier.tiers.errors import InvalidNamespace, LimitExceeded, NotOwner
from kvtier.tiers.eviction import LRU
from kvtier.tiers.eviction.queues import EvictionQueues
from kvtier.tiers.eviction.quotas import Quotas, Tenant
from kvtier.tiers.stats.eviction_history import EvictionHistory
from kvtier.tiers.stats.request_log import MAX_OUTCOME_RUNS
from kvtier.tiers.types import MAX_PART_SIZES, TENANT_TAG_BYTES, MissReason, NamespaceSpec


class Insisting(ModelTier):
    """Asks for every block of every request."""

    def on_new_request(self, request: RequestInfo) -> Vote:
        self.begun.append(request.request_id)
        return Vote(OffloadPolicy.REQUEST_LEVEL, "always")


def begin(rig: Rig, request_id: str) -> None:
    """Announces a request."""
    rig.core.begin_request(rig.session, RequestInfo(request_id, rig.session.namespace.id))


def promoting(rig: Rig) -> LoadFromTier:
    """Brings it about that block 0 is being read from the tier, on behalf of nobody; returns the job."""
    rig.store(keys(0))
    rig.finish_jobs()
    rig.core.reset(rig.session)
    assert rig.look_up(keys(0)) == PENDING
    [job] = [command for command in rig.core.take_commands() if isinstance(command, LoadFromTier)]
    return job


def test_a_load_that_hangs_does_not_keep_its_blocks_from_being_stored_anew() -> None:
    """Whoever waits gets a miss; the block can be computed, stored and found; the late return harms nobody."""
    rig = Rig(ModelTier("near", 1 << 20))
    job = promoting(rig)
    lease = rig.core.lookup(rig.session, keys(0), prefix=True, request_id="", expires_at=60).lease
    assert lease is not None
    rig.core.tier_stalled(1, stalled=True)
    assert lease.statuses() == MISS
    assert rig.core.stats().misses_by_reason[MissReason.LOAD_FAILED] == 1
    assert rig.store(keys(0)) == b"\x01", "granted"
    assert rig.look_up(keys(0)) == HIT
    rig.core.job_finished(job.job_id, [Outcome.DONE])
    rig.core.tier_stalled(1, stalled=False)
    assert rig.look_up(keys(0)) == HIT
    assert rig.core.stats().tiers[0].used_bytes == 4096, "the slot of the late load is free"


def test_a_reset_does_not_wait_for_a_tier_that_hangs() -> None:
    """B3.19: what such a tier is at work on is not found, and counts no more; blocks stored since are found."""
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


def test_a_tier_that_is_back_gets_what_it_missed() -> None:
    """One hiccup must not leave blocks volatile for good."""
    rig = Rig(ModelTier("near", 1 << 20), queue=1 << 20)
    rig.store(keys(0))
    [job] = [command for command in rig.core.take_commands() if isinstance(command, StoreInTier)]
    rig.core.tier_stalled(1, stalled=True)
    rig.store(keys(1, 2))
    rig.core.job_finished(job.job_id, [Outcome.DONE])
    rig.core.tier_stalled(1, stalled=False)
    rig.finish_jobs()
    assert rig.core.stats().tiers[1].blocks == 3


def test_requests_end_though_a_tier_hangs() -> None:
    """B3.10, B3.12: they are said to be incomplete, and are not remembered for ever."""
    hanging, well = Insisting("hanging", 1 << 20), Insisting("well", 1 << 20)
    rig = Rig(hanging, well)
    begin(rig, "before")
    answer = rig.core.prepare_store(rig.session, keys(0), request_id="before", expires_at=60)
    assert answer.store_id is not None
    rig.core.complete_store(rig.session, answer.store_id)
    jobs = [command for command in rig.core.take_commands() if isinstance(command, StoreInTier)]
    rig.core.job_finished(jobs[1].job_id, [Outcome.DONE])
    rig.core.tier_stalled(1, stalled=True)
    assert rig.core.finish_request(rig.session, "before").incomplete == 1
    begin(rig, "after")
    rig.core.prepare_store(rig.session, keys(0), request_id="after", expires_at=60)
    assert rig.core.finish_request(rig.session, "after").settled
    assert hanging.finished == well.finished == ["before", "after"]
    assert len(rig.core._requests) == 0


def test_a_key_that_is_named_twice_is_retained_once() -> None:
    """What is charged to the budget twice would never be given back."""
    core = TierManager(EXTENT, EXTENT, [ModelTier("near", 1 << 20)])
    core.add_memory(0, EXTENT)
    session = core.open_session(b"s", "engine", None, SPEC)
    answer = core.prepare_store(session, keys(0), request_id="", expires_at=60)
    assert answer.store_id is not None
    core.complete_store(session, answer.store_id)
    for command in core.take_commands():
        if isinstance(command, StoreInTier):
            core.job_finished(command.job_id, [Outcome.DONE])
    lookup = core.lookup(session, keys(0) * 5, prefix=True, request_id="", expires_at=60, retain_until=30.0)
    assert lookup.lease is not None
    core.release(session, lookup.lease.id)
    assert [share.retained_bytes for tier in core.stats().tiers for share in tier.shares] == [4096, 4096]
    core.tick(31)
    assert [share.retained_bytes for tier in core.stats().tiers for share in tier.shares] == [0, 0]


def test_an_engine_of_another_namespace_is_another_engine() -> None:
    """Ids of engines are chosen by engines: two tenants that choose the same reach nothing of one another's."""
    rig = Rig()
    rig.store(keys(0))
    lease = rig.core.lookup(rig.session, keys(0), prefix=True, request_id="1", expires_at=60).lease
    assert lease is not None
    theirs = NamespaceSpec(NamespaceId(b"t" * 16), world_size=1, part_bytes=(4096,))
    stranger = rig.core.open_session(b"stranger", "engine", None, theirs, tenant="other")
    with pytest.raises(NotOwner):
        rig.core.lease(stranger, lease.id)
    rig.core.finish_request(stranger, "1")
    assert rig.core.lease(rig.session, lease.id) is lease


def test_a_request_too_many_is_unheard_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """B3.12: no tier hears of the beginning of what is refused; the end of an unannounced one is never refused."""
    monkeypatch.setattr("kvtier.tiers.core.requests.MAX_REQUESTS", 1)
    near = ModelTier("near", 1 << 20)
    rig = Rig(near)
    begin(rig, "a")
    with pytest.raises(LimitExceeded):
        begin(rig, "b")
    assert near.begun == ["a"]
    rig.core.finish_request(rig.session, "c")
    assert (near.begun, near.finished) == (["a", "c"], ["c"])


def test_finishing_twice_leaves_the_explanation_as_it_was() -> None:
    """A retry whose first answer was lost."""
    rig = Rig()
    rig.core.lookup(rig.session, keys(0), prefix=True, request_id="r", expires_at=60)
    for _ in range(2):
        rig.core.finish_request(rig.session, "r")
    [record] = rig.core.explain("r")
    assert len(record.lookups) == 1


def test_what_is_remembered_of_a_lookup_is_bounded() -> None:
    """However mixed its answer; the counts are right all the same."""
    rig = Rig(extents=64)
    rig.store(keys(*range(0, 1000, 2)))
    rig.core.lookup(rig.session, keys(*range(1000)), prefix=False, request_id="mixed", expires_at=60)
    [record] = rig.core.explain("mixed")
    spans = record.lookups[-1].outcomes()
    assert len(spans) <= MAX_OUTCOME_RUNS + 2
    assert sum(span.count for span in spans) == 1000
    assert sum(span.count for span in spans if span.outcome == 0) == 500


def test_nothing_hits_behind_a_miss_in_a_prefix() -> None:
    """B3.16: where a block finds no room, what follows is a miss too, is not pinned and is not fetched."""
    rig = Rig(ModelTier("near", 1 << 20), queue=1 << 20)
    rig.store(keys(0, 1))
    rig.finish_jobs()
    rig.core.reset(rig.session)
    rig.store(keys(*range(100, 115)))
    rig.finish_jobs()
    full = rig.core.lookup(rig.session, keys(*range(100, 115)), prefix=True, request_id="", expires_at=60).lease
    assert full is not None
    found = rig.core.lookup(rig.session, keys(100, 0, 1, 101), prefix=True, request_id="", expires_at=60)
    assert found.statuses() == HIT + PENDING + MISS * 2


def test_part_sizes_of_a_namespace_are_bounded() -> None:
    """Each is a line of eviction of its own, that every search for room may have to look at."""
    NamespaceSpec(NamespaceId(bytes(16)), 1, tuple(range(1, MAX_PART_SIZES + 1)))
    with pytest.raises(InvalidNamespace, match="sizes at most"):
        NamespaceSpec(NamespaceId(bytes(16)), 1, tuple(range(1, MAX_PART_SIZES + 2)))


def test_a_block_that_was_given_up_is_not_loaded_beside_that() -> None:
    """A tier hears of one job at a time on a block, also where a tier that stood still is back before its job."""
    rig = Rig(ModelTier("near", 1 << 20))
    job = promoting(rig)
    rig.core.tier_stalled(1, stalled=True)
    rig.core.tier_stalled(1, stalled=False)
    assert rig.look_up(keys(0)) == MISS
    assert rig.core.take_commands() == []
    rig.core.job_finished(job.job_id, [Outcome.DONE])
    assert rig.look_up(keys(0)) == PENDING


@pytest.mark.parametrize("capacity", [500, 5000], ids=["the tier is full", "its tenant is at its limit"])
def test_what_a_tier_refuses_is_worth_no_walk_over_what_is_on_its_way(capacity: int) -> None:
    """B3.7: a store of very many blocks that find no room is over soon, however much waits already."""
    looked = 0

    class Counted(LRU[CatalogEntry]):
        def victims(self) -> Iterator[CatalogEntry]:
            nonlocal looked
            for entry in super().victims():
                looked += 1
                yield entry

    space = NamespaceId(b"t" * 16)
    tenant = Tenant("t", space[:TENANT_TAG_BYTES], {}, {"disk": 500})
    catalog = Catalog(capacity, EvictionQueues(Quotas("disk", capacity, [tenant]), Counted), EvictionHistory())
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
