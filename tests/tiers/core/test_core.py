"""The decision core, event by event."""

from dataclasses import replace

import pytest
from core_rig import GRANTED, HIT, MISS, NO_ROOM, PENDING, PRESENT, SPEC, Rig, keys, ready_blocks
from harness.operations import Steps, run_to_end
from simulation import EXTENT, ModelTier

from kvtier.tiers.core.call_specs import LookupSpec, StoreSpec
from kvtier.tiers.core.commands import ContinueWork, LeaseSettled, LoadFromTier, RemoveFromTier, StoreInTier
from kvtier.tiers.core.handlers import cpu_stats
from kvtier.tiers.core.leases import LEASE_COST, PENDING_COST
from kvtier.tiers.core.lookups import MAX_LEASED_ITEMS
from kvtier.tiers.core.manager import TierManager
from kvtier.tiers.errors import (
    InvalidItem,
    InvalidKey,
    InvalidNamespace,
    LeaseNotFound,
    LimitExceeded,
    StoreNotFound,
    UnknownSession,
)
from kvtier.tiers.secondary_tier import NamespaceId, OffloadPolicy, Outcome, RequestInfo, Vote
from kvtier.tiers.stats.snapshots import TierStats
from kvtier.tiers.types import DurableStatus, NamespaceSpec


def test_slots_are_evicted_ahead_of_the_next_store() -> None:
    """After the first eviction, and not before, the loop keeps slots free for the next store."""
    small = NamespaceSpec(NamespaceId(b"n" * 32), world_size=1, part_bytes=(4096,))
    rig = Rig(extents=16, eviction={"cpu": "lru"})  # 256 slots, of which four may be kept free
    rig.session = rig.open("other", small)
    for number in range(0, 256, 4):
        rig.store(keys(*range(number, number + 4)))
    assert rig.core.take_commands() == []
    assert rig.look_up(keys(*range(256)), prefix=False) == HIT * 256
    rig.store(keys(256, 257, 258))
    assert rig.core.stats().tiers[0].evictions == 3
    assert rig.core.take_commands() == [ContinueWork()]
    rig.core.work()
    assert rig.core.stats().tiers[0].evictions == 6
    assert rig.store(keys(259, 260, 261)) == GRANTED * 3
    assert rig.core.stats().tiers[0].evictions == 6, "no eviction was needed at once"
    assert rig.core.take_commands() == [ContinueWork()]
    rig.core.work()
    assert rig.core.stats().tiers[0].evictions == 9
    assert rig.look_up(keys(*range(256, 262))) == HIT * 6


def test_recent_blocks_are_not_evicted_ahead() -> None:
    """After a store that uses much of the memory, nothing is evicted without need."""
    small = NamespaceSpec(NamespaceId(b"n" * 32), world_size=1, part_bytes=(4096,))
    rig = Rig(extents=16, eviction={"cpu": "lru"})
    rig.session = rig.open("other", small)
    for start in (0, 256):
        assert rig.store(keys(*range(start, start + 256))) == GRANTED * 256
        assert rig.core.take_commands() == []
    assert rig.look_up(keys(*range(256, 512)), prefix=False) == HIT * 256


@pytest.mark.parametrize("touch", ["lookup", "store"])
def test_the_least_recently_used_block_goes_first(touch: str) -> None:
    """B4.9: a lookup counts as a use, and so does a store that finds the block present."""
    rig = Rig(eviction={"cpu": "lru"})
    for number in range(16):
        assert rig.store(keys(number)) == GRANTED
    assert (rig.look_up(keys(0)) == HIT) if touch == "lookup" else (rig.store(keys(0)) == PRESENT)
    assert rig.store(keys(100, 101)) == GRANTED * 2
    found = rig.look_up(keys(*range(16)), prefix=False)
    assert found == HIT + MISS * 2 + HIT * 13, "1 and 2 are the oldest that were not touched"


def test_the_tail_of_a_prefix_goes_before_its_head() -> None:
    """Without its head the rest of a prefix is useless."""
    rig = Rig()
    rig.store(keys(*range(16)))
    rig.store(keys(*range(100, 104)))
    assert rig.look_up(keys(*range(16))) == HIT * 12 + MISS * 4


def test_a_pinned_block_is_never_evicted() -> None:
    """B4.9: leased blocks stay; if all are leased, the store reports NO_ROOM."""
    rig = Rig()
    rig.store(keys(*range(16)))
    lease = run_to_end(
        rig.core.lookup(rig.session, keys(*range(16)), LookupSpec(request_id="r", lease_seconds=60), now=0)
    ).lease
    assert rig.store(keys(100, 101)) == NO_ROOM * 2
    assert lease.statuses() == HIT * 16
    rig.core.release(rig.session, lease.id)
    assert rig.store(keys(100, 101)) == GRANTED * 2


def test_size_classes_share_the_region() -> None:
    """An idle size class gives its extents to an active one."""
    rig = Rig(extents=2)
    rig.store(keys(*range(32)))
    assert rig.store(keys(*range(4), group=1)) == GRANTED * 4, "an extent was taken over"
    assert rig.look_up(keys(*range(4), group=1)) == HIT * 4
    assert rig.store(keys(*range(50, 82))) == GRANTED * 32, "and taken back: the other class is idle since"
    assert rig.core.stats().tiers[0].used_bytes == 2 * EXTENT


def test_pinned_blocks_keep_the_extent_of_their_class() -> None:
    rig = Rig(extents=1)
    rig.store(keys(0))
    lease = run_to_end(rig.core.lookup(rig.session, keys(0), LookupSpec(request_id="r", lease_seconds=60), now=0)).lease
    assert lease is not None
    assert rig.store(keys(0, group=1)) == NO_ROOM


def test_a_pinned_extent_does_not_block_other_extents() -> None:
    """The oldest block is pinned or in quarantine; its extent stays, and another one is freed."""
    rig = Rig(extents=4)
    rig.store(keys(*range(64)))
    pinned = run_to_end(rig.core.lookup(rig.session, keys(0), LookupSpec(lease_seconds=60), now=0)).lease
    assert pinned is not None
    rig.store(keys(*range(1, 64)))
    assert rig.store(keys(*range(12), group=1)) == GRANTED * 12
    assert rig.store(keys(12, group=1)) == GRANTED, "within its own class from now on"
    assert rig.look_up(keys(0)) == HIT


def test_a_store_does_not_evict_its_own_prefix() -> None:
    """B4.15: PRESENT blocks of a store are its head; other blocks make room for its tail."""
    rig = Rig(extents=2)
    rig.store(keys(*range(16)))
    rig.store(keys(*range(100, 116)))
    assert rig.store(keys(*range(32))) == PRESENT * 16 + GRANTED * 16
    assert rig.look_up(keys(*range(32))) == HIT * 32
    assert rig.look_up(keys(100)) == MISS


def test_leases_of_one_session_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that releases none gets no more; after a release it does."""
    monkeypatch.setattr("kvtier.tiers.core.lookups.MAX_LEASED_ITEMS", 2 * (2 + LEASE_COST))
    rig = Rig()
    rig.store(keys(0, 1))
    leases = [
        run_to_end(rig.core.lookup(rig.session, keys(0, 1), LookupSpec(lease_seconds=60), now=0)).lease
        for _ in range(2)
    ]
    with pytest.raises(LimitExceeded):
        run_to_end(rig.core.lookup(rig.session, keys(0, 1), LookupSpec(lease_seconds=60), now=0))
    rig.core.release(rig.session, leases[0].id)
    assert rig.look_up(keys(0, 1)) == HIT * 2


def test_leases_of_single_blocks_have_a_limit() -> None:
    """Each tick examines all leases, so a client with very many short ones would stop others."""
    rig = Rig()
    rig.store(keys(0))
    for _ in range(MAX_LEASED_ITEMS // (LEASE_COST + 1) + 1):
        run_to_end(rig.core.lookup(rig.session, keys(0), LookupSpec(lease_seconds=60), now=0))
    with pytest.raises(LimitExceeded):
        run_to_end(rig.core.lookup(rig.session, keys(0), LookupSpec(lease_seconds=60), now=0))


def test_pins_of_long_leases_end_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of a session touches no block of its leases; the slices then remove all pins."""
    monkeypatch.setattr("kvtier.tiers.core.sliced_work.SLICE", 5)
    monkeypatch.setattr("kvtier.tiers.core.sliced_work._ENTRY_COST", 0)
    rig = Rig()
    other = rig.open("other")
    rig.store(keys(*range(4)))
    for names in (keys(0, 1, 2), keys(99, 3, 0), keys(1)):
        run_to_end(rig.core.lookup(other, names, LookupSpec(prefix=False, lease_seconds=60), now=0))
    blocks = ready_blocks(rig.core)
    rig.core.close_session(other.id)
    assert sum(block.pins for block in blocks) == 2, "one slice of 5 items is done, of which 1 is a miss"
    rig.core.work()
    assert sum(block.pins for block in blocks) == 0


def test_refused_stores_are_counted() -> None:
    """B3.5: the block is not cascaded, and a counter rises."""
    rig = Rig(ModelTier("near", 1 << 20))
    assert run_to_end(
        rig.core.prepare_store(rig.session, keys(*range(20)), StoreSpec(lease_seconds=60), now=0)
    ).statuses == (GRANTED * 16 + NO_ROOM * 4)
    assert rig.core.stats().tiers[0].dropped == 4
    assert rig.core.take_commands() == []
    assert rig.store(keys(16, 17)) == NO_ROOM * 2, "tried again"
    assert rig.core.stats().tiers[0].dropped == 6
    assert rig.core.take_commands() == []


def test_a_running_store_can_be_renewed() -> None:
    """A slow stream keeps its slots while bytes arrive."""
    rig = Rig()
    answer = run_to_end(rig.core.prepare_store(rig.session, keys(0), StoreSpec(lease_seconds=5), now=0))
    rig.core.renew_store(rig.session, answer.store_id, 20)
    rig.core.tick(10)
    run_to_end(rig.core.complete_store(rig.session, answer.store_id))
    assert rig.look_up(keys(0)) == HIT


def test_memory_is_used_once_it_is_backed() -> None:
    """Before the first page is backed, stores report NO_ROOM without an error."""
    core = TierManager(2 * EXTENT, EXTENT, ())
    session = core.open_session(b"s", "e", None, SPEC)
    assert run_to_end(core.prepare_store(session, keys(0), StoreSpec(lease_seconds=60), now=0)).statuses == NO_ROOM
    core.add_memory(0, EXTENT)
    assert run_to_end(core.prepare_store(session, keys(0), StoreSpec(lease_seconds=60), now=0)).statuses == GRANTED
    tier = core.stats().tiers[0]
    assert (tier.capacity_bytes, tier.available_bytes) == (2 * EXTENT, EXTENT)


def test_stored_blocks_cascade_and_are_pinned_meanwhile() -> None:
    """B3.7, B3.8: a completed store goes to every tier.

    Its blocks cannot be evicted until the jobs end.
    """
    near, far = ModelTier("near", 1 << 20), ModelTier("far", 1 << 20)
    rig = Rig(near, far, queue=EXTENT)
    rig.store(keys(*range(16)))
    jobs = [command for command in rig.core.take_commands() if isinstance(command, StoreInTier)]
    assert [job.tier for job in jobs] == [1, 2]
    assert rig.store(keys(100)) == NO_ROOM
    for job in jobs:
        rig.core.job_finished(job.job_id, [Outcome.DONE] * 16)
    assert rig.store(keys(100)) == GRANTED


def test_a_failed_store_cascades_nothing() -> None:
    """B3.7: its slot is free again."""
    rig = Rig(ModelTier("near", 1 << 20))
    answer = run_to_end(rig.core.prepare_store(rig.session, keys(0, 1), StoreSpec(lease_seconds=60), now=0))
    run_to_end(rig.core.complete_store(rig.session, answer.store_id, failed=[0, 1]))
    assert rig.core.take_commands() == []
    assert rig.core.stats().tiers[0].used_bytes == 0


def test_a_hit_in_a_secondary_tier_is_promoted_once() -> None:
    """B3.16: the slot is reserved at once, so that a second lookup waits for the same promotion."""
    rig = Rig(ModelTier("near", 1 << 20))
    rig.store_in_all_tiers(keys(*range(16)))
    rig.store_in_all_tiers(keys(*range(100, 116)))
    first = run_to_end(rig.core.lookup(rig.session, keys(0, 1), LookupSpec(lease_seconds=60), now=0)).lease
    second = run_to_end(rig.core.lookup(rig.session, keys(0, 1), LookupSpec(lease_seconds=60), now=0)).lease
    assert first.statuses() == second.statuses() == PENDING * 2
    assert set(first.sources[:2]) == {1}
    commands = rig.finish_jobs()
    assert len([command for command in commands if isinstance(command, LoadFromTier)]) == 1
    assert {command.lease_id for command in rig.core.take_commands() if isinstance(command, LeaseSettled)} == {
        first.id,
        second.id,
    }
    assert first.statuses() == HIT * 2


def test_a_partly_failed_promotion_keeps_loaded_blocks() -> None:
    """B3.18: failed keys become misses, and a corrupt block is not requested again."""
    rig = Rig(ModelTier("near", 1 << 20))
    rig.store_in_all_tiers(keys(0, 1, 2))
    rig.store_in_all_tiers(keys(*range(100, 116)))
    lease = run_to_end(rig.core.lookup(rig.session, keys(0, 1, 2), LookupSpec(lease_seconds=60), now=0)).lease
    (job,) = (command for command in rig.core.take_commands() if isinstance(command, LoadFromTier))
    rig.core.job_finished(job.job_id, [Outcome.DONE, Outcome.CORRUPT, Outcome.DONE])
    assert lease.statuses() == HIT + MISS + HIT
    assert rig.look_up(keys(1)) == MISS
    assert rig.core.take_commands() == [LeaseSettled(lease.id)], "no second promotion of it"


@pytest.mark.parametrize("ends", [0, 1, 2])
def test_items_of_a_lease_are_counted_while_it_lasts(ends: int) -> None:
    """`ends`: the lease ends before its loads, after them or when it expires."""
    rig = Rig(ModelTier("near", 1 << 20))
    rig.store_in_all_tiers(keys(0, 1, 2))
    rig.store_in_all_tiers(keys(*range(100, 116)))
    lease = run_to_end(rig.core.lookup(rig.session, keys(0, 1, 2), LookupSpec(lease_seconds=60), now=0)).lease
    (job,) = (command for command in rig.core.take_commands() if isinstance(command, LoadFromTier))
    counted = rig.core._lookups.leases
    assert lease is not None
    assert counted.items_of(rig.session)[1] == LEASE_COST + (1 + PENDING_COST) * 3
    if ends == 0:
        rig.core.release(rig.session, lease.id)
    rig.core.job_finished(job.job_id, [Outcome.DONE, Outcome.CORRUPT, Outcome.FAILED])
    if ends == 1:
        assert counted.items_of(rig.session)[1] == LEASE_COST + 3
        assert (lease.hits, lease.found) == (1, 3)
        rig.core.release(rig.session, lease.id)
    elif ends == 2:
        rig.core.tick(61)
    assert not counted.items_of(rig.session)[1]


def test_a_promotion_without_space_is_a_miss() -> None:
    """B3.16: the CPU tier is full of pinned blocks."""
    rig = Rig(ModelTier("near", 1 << 20))
    rig.store_in_all_tiers(keys(0))
    rig.store_in_all_tiers(keys(*range(100, 116)))
    lease = run_to_end(rig.core.lookup(rig.session, keys(*range(100, 116)), LookupSpec(lease_seconds=60), now=0)).lease
    assert lease is not None
    before = rig.core.stats().tiers[0].dropped
    assert rig.look_up(keys(0)) == MISS
    assert rig.core.stats().tiers[0].dropped == before + 1, "counted"


def test_a_tier_never_exceeds_its_capacity() -> None:
    """The oldest blocks go; the removal precedes the store."""
    tier = ModelTier("near", 4 * 4096)
    rig = Rig(tier)
    rig.store_in_all_tiers(keys(0, 1, 2, 3))
    rig.store(keys(4, 5))
    kinds = [type(command) for command in rig.core.take_commands()]
    assert kinds == [RemoveFromTier, StoreInTier]
    assert rig.core.stats().tiers[1].used_bytes == 4 * 4096


def test_a_tier_without_disk_space_evicts() -> None:
    """The disk has less space than the tier's capacity: the oldest blocks make room."""
    rig = Rig(ModelTier("near", 1 << 20))
    rig.store_in_all_tiers(keys(0, 1, 2, 3))
    rig.store(keys(4, 5))
    rig.finish_jobs(Outcome.NO_SPACE)
    removed = [command.keys for command in rig.core.take_commands() if isinstance(command, RemoveFromTier)]
    assert [key for names in removed for _, key in names] == [*keys(4), *keys(3), *keys(5), *keys(2)], "tails first"
    assert rig.core.stats().tiers[1].blocks == 2
    assert rig.core.stats().tiers[1].dropped == 2


def test_evictions_that_make_no_space_end() -> None:
    """A tier that refuses every block keeps most of its blocks; it evicts again once it stores."""
    rig = Rig(ModelTier("near", 1 << 20))
    for number in range(0, 40, 4):
        rig.store(keys(*range(number, number + 4)))
        rig.finish_jobs()
    for number in range(100, 200, 4):
        rig.store(keys(*range(number, number + 4)))
        rig.finish_jobs(Outcome.NO_SPACE)
    assert 25 < rig.core.stats().tiers[1].blocks <= 30
    assert rig.core.stats().tiers[1].dropped == 100
    rig.store(keys(300))
    rig.finish_jobs()
    before = rig.core.stats().tiers[1].blocks
    rig.store(keys(301))
    rig.finish_jobs(Outcome.NO_SPACE)
    assert rig.core.stats().tiers[1].blocks == before - 1


def test_a_slow_tier_drops_cascades() -> None:
    """B3.10: a dropped block-level cascade is counted, and a flush stores its blocks later."""
    rig = Rig(ModelTier("near", 1 << 20), extents=1)
    rig.store(keys(*range(16)))
    job = next(command for command in rig.core.take_commands() if isinstance(command, StoreInTier))
    assert len(job.blocks) == 4, "a quarter of the region"
    assert rig.core.stats().tiers[1].dropped == 12
    statuses = run_to_end(rig.core.flush(rig.session.namespace.id, keys(0, 15)))
    assert statuses == bytes([DurableStatus.PENDING] * 2)
    rig.core.job_finished(job.job_id, [Outcome.DONE] * 4)
    rig.finish_jobs()
    assert run_to_end(rig.core.flush(rig.session.namespace.id, keys(0, 15, 99))) == bytes(
        [DurableStatus.DURABLE, DurableStatus.DURABLE, DurableStatus.VOLATILE]
    )


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 5])
def test_a_flush_answers_each_key_once(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """In the order of the keys, also if the answer is made in slices, and for keys that recur."""
    monkeypatch.setattr("kvtier.tiers.core.completions._ANSWER_SLICE", 2)
    rig = Rig(ModelTier("near", 1 << 20), extents=1)
    rig.store_in_all_tiers(keys(0, 2))
    names = keys(2, 1, 0, 1, 2)[:count]
    expected = {key: DurableStatus.DURABLE if key in keys(0, 2) else DurableStatus.VOLATILE for key in names}
    assert run_to_end(rig.core.flush(SPEC.id, names)) == bytes(expected[key] for key in names)


def test_the_final_flush_stores_dropped_blocks() -> None:
    """The most recently used first, because time may be short."""
    rig = Rig(ModelTier("near", 1 << 20), extents=1)
    rig.store(keys(*range(8)))
    rig.store_in_all_tiers(keys(*range(100, 108)))
    rig.core.store_skipped()
    (job,) = (command for command in rig.core.take_commands() if isinstance(command, StoreInTier))
    assert [block.key for block in job.blocks[:8]] == keys(*range(100, 108))
    assert {block.key for block in job.blocks[8:]} == set(keys(*range(4, 8)))


def test_the_final_flush_does_not_restore_evicted_blocks() -> None:
    """Older blocks of a larger CPU tier must not evict newer ones of the tier below."""
    rig = Rig(ModelTier("near", 4 * 4096), queue=EXTENT)
    rig.store_in_all_tiers(keys(0, 1, 2, 3))
    rig.store_in_all_tiers(keys(4, 5, 6, 7))
    rig.core.store_skipped()
    assert rig.core.take_commands() == []
    assert run_to_end(rig.core.flush(SPEC.id, keys(7))) == bytes([DurableStatus.DURABLE])


def test_unfinished_requests_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """They end with their session."""
    monkeypatch.setattr("kvtier.tiers.core.requests.MAX_REQUESTS", 2)
    rig = Rig()
    for number in range(2):
        rig.core.begin_request(rig.session, RequestInfo(f"{number}", SPEC.id))
    with pytest.raises(LimitExceeded):
        rig.core.begin_request(rig.session, RequestInfo("2", SPEC.id))
    rig.core.finish_request(rig.session, "0")
    rig.core.begin_request(rig.session, RequestInfo("2", SPEC.id))
    rig.core.close_session(rig.session.id)
    assert not rig.core._requests._requests


def test_queued_stores_are_merged_into_one_job() -> None:
    """A tier has one job at a time; merging makes larger transactions."""
    rig = Rig(ModelTier("near", 1 << 20), queue=EXTENT)
    for number in range(5):
        rig.store(keys(number))
    (first,) = (command for command in rig.core.take_commands() if isinstance(command, StoreInTier))
    assert len(first.blocks) == 1
    rig.core.job_finished(first.job_id, [Outcome.DONE])
    (second,) = (command for command in rig.core.take_commands() if isinstance(command, StoreInTier))
    assert len(second.blocks) == 4


def test_a_job_has_a_limit_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The event loop handles the end of a job in one piece, so small blocks are in several jobs."""
    monkeypatch.setattr("kvtier.tiers.core.tier_jobs.JOB_BLOCKS", 3)
    rig = Rig(ModelTier("near", 1 << 20), queue=EXTENT)
    rig.store(keys(*range(8)))
    sizes = []
    while jobs := [command for command in rig.core.take_commands() if isinstance(command, StoreInTier)]:
        [job] = jobs
        sizes.append(len(job.blocks))
        rig.core.job_finished(job.job_id, [Outcome.DONE] * len(job.blocks))
    assert sizes == [3, 3, 2]


def test_a_restart_finds_the_blocks_of_tiers() -> None:
    """Blocks beyond the capacity are removed, the oldest first."""
    tier = ModelTier("near", 1 << 20)
    tier.blocks = {(SPEC.id, key): (4096, ()) for key in keys(*range(4))}
    tier.capacity_bytes = 3 * 4096
    rig = Rig(tier)
    assert rig.core.take_commands() == [RemoveFromTier(1, [(SPEC.id, keys(0)[0])])]
    assert rig.look_up(keys(1, 2)) == PENDING * 2


def test_slots_of_an_ended_session_wait_for_its_writers() -> None:
    """A slot is reused only when no process can still write to it (B4.5)."""
    rig = Rig()
    other = rig.open("other")
    answer = run_to_end(rig.core.prepare_store(other, keys(*range(16)), StoreSpec(lease_seconds=60), now=0))
    assert len(answer.slots) == 16
    rig.core.close_session(other.id)
    assert rig.core.stats().quarantined_bytes == 16 * 4096
    assert rig.store(keys(100)) == NO_ROOM
    rig.core.writer_gone(other.id, hash("other") & 0xFFFF)
    assert rig.core.stats().quarantined_bytes == 0
    assert rig.store(keys(100)) == GRANTED
    assert rig.look_up(keys(0)) == MISS, "an unfinished block is never published"


def test_a_late_completion_frees_and_publishes_nothing() -> None:
    """B5.6: its store ended with the lease; the completion only says that the write has ended."""
    rig = Rig()
    answer = run_to_end(rig.core.prepare_store(rig.session, keys(0), StoreSpec(lease_seconds=5), now=0))
    rig.core.tick(6)
    assert rig.core.stats().quarantined_bytes == 4096
    with pytest.raises(StoreNotFound):
        run_to_end(rig.core.complete_store(rig.session, answer.store_id))
    rig.core.writer_done(rig.session, answer.store_id)
    assert rig.core.stats().quarantined_bytes == 0
    assert rig.look_up(keys(0)) == MISS


@pytest.mark.parametrize(("engine", "space"), [("other", SPEC.id), ("engine", NamespaceId(b"another tenant: " * 2))])
def test_another_engine_cannot_end_a_quarantine(engine: str, space: NamespaceId) -> None:
    """The owner may still write to the slots, although another engine says that it has ended."""
    rig = Rig()
    other = rig.open(engine, replace(SPEC, id=space))
    answer = run_to_end(rig.core.prepare_store(rig.session, keys(0), StoreSpec(lease_seconds=5), now=0))
    rig.core.tick(6)
    assert answer.store_id is not None
    assert not rig.core.is_quarantined(answer.store_id, other.engine)
    rig.core.writer_done(other, answer.store_id)
    assert rig.core.stats().quarantined_bytes == 4096
    rig.core.writer_done(rig.session, answer.store_id)
    assert rig.core.stats().quarantined_bytes == 0


def test_a_second_completion_is_refused() -> None:
    """B3.14: exactly once; the block stays unchanged."""
    rig = Rig()
    answer = run_to_end(rig.core.prepare_store(rig.session, keys(0), StoreSpec(lease_seconds=5), now=0))
    run_to_end(rig.core.complete_store(rig.session, answer.store_id))
    with pytest.raises(StoreNotFound):
        run_to_end(rig.core.complete_store(rig.session, answer.store_id, failed=[0]))
    assert rig.look_up(keys(0)) == HIT


def test_a_completion_in_slices_is_not_begun_again() -> None:
    """Between two slices a second completion cannot change which blocks have failed."""
    rig = Rig()
    answer = run_to_end(rig.core.prepare_store(rig.session, keys(0, 1), StoreSpec(lease_seconds=5), now=0))
    assert answer.store_id is not None
    completion = Steps(rig.core.complete_store(rig.session, answer.store_id, slice_blocks=1))
    assert completion.step()
    assert completion.step()
    with pytest.raises(StoreNotFound):
        run_to_end(rig.core.complete_store(rig.session, answer.store_id, failed=[0]))
    completion.finish()
    assert rig.look_up(keys(0, 1)) == HIT * 2


def test_leases_expire_unless_renewed() -> None:
    """A silent owner loses its pins; a renewal never shortens a lease."""
    rig = Rig()
    rig.store(keys(0))
    kept, lost = (
        run_to_end(rig.core.lookup(rig.session, keys(0), LookupSpec(lease_seconds=10), now=0)).lease for _ in range(2)
    )
    rig.core.renew(rig.session, kept.id, 30)
    rig.core.renew(rig.session, kept.id, 20)
    rig.core.tick(25)
    assert rig.core.lease(rig.session, kept.id) is kept
    with pytest.raises(LeaseNotFound):
        rig.core.lease(rig.session, lost.id)


def test_tiers_vote_once_per_request_and_see_one_end() -> None:
    """B3.2, B3.3: one vote for REQUEST_LEVEL suffices; every tier is told of the end."""

    class RequestLevelTier(ModelTier):
        def on_new_request(self, request: RequestInfo) -> Vote:
            return Vote(OffloadPolicy.REQUEST_LEVEL, "always")

    calm, eager = ModelTier("calm", 1 << 20), RequestLevelTier("eager", 1 << 20)
    rig = Rig(calm, eager)
    request = RequestInfo("r", SPEC.id)
    negotiation = rig.core.begin_request(rig.session, request)
    assert negotiation.policy is OffloadPolicy.REQUEST_LEVEL
    assert [(name, vote.policy) for name, vote in negotiation.votes] == [
        ("calm", OffloadPolicy.BLOCK_LEVEL),
        ("eager", OffloadPolicy.REQUEST_LEVEL),
    ]
    assert rig.core.begin_request(rig.session, request) is negotiation
    rig.core.finish_request(rig.session, "r")
    assert calm.finished == eager.finished == ["r"]


def test_refusals_change_nothing() -> None:
    """The core checks its input before it grants anything."""
    rig = Rig()
    with pytest.raises(InvalidKey):
        run_to_end(rig.core.prepare_store(rig.session, keys(0) + keys(1, group=2), StoreSpec(lease_seconds=60), now=0))
    assert rig.core.stats().tiers[0].blocks == 0
    for spec in ({"world_size": 0}, {"part_bytes": ()}, {"part_bytes": (0,)}):
        with pytest.raises(InvalidNamespace):
            NamespaceSpec(**{"id": SPEC.id, "world_size": 1, "part_bytes": (1,), **spec})  # type: ignore[arg-type]
    with pytest.raises(InvalidNamespace):
        rig.open("big", NamespaceSpec(SPEC.id, 1, (EXTENT + 1,)))
    with pytest.raises(InvalidNamespace):
        rig.open("rank", SPEC, rank=1)
    scheduler = rig.open("tp", NamespaceSpec(NamespaceId(b"w" * 32), 2, (4096,)))
    with pytest.raises(InvalidItem):
        run_to_end(rig.core.prepare_store(scheduler, keys(0), StoreSpec(lease_seconds=60), now=0))
    answer = run_to_end(rig.core.prepare_store(rig.session, keys(0), StoreSpec(lease_seconds=60), now=0))
    with pytest.raises(InvalidItem):
        run_to_end(rig.core.complete_store(rig.session, answer.store_id, failed=[1]))
    run_to_end(rig.core.complete_store(rig.session, answer.store_id))
    with pytest.raises(UnknownSession):
        rig.core.close_session(b"unknown")


def test_each_figure_of_a_tier_has_its_own_source() -> None:
    """The figures differ here, so that none of them stands for another one."""
    rig = Rig(ModelTier("near", 1 << 20), queue=1 << 20)
    rig.store_in_all_tiers(keys(*range(3)))
    below = rig.core._tier_jobs.secondaries[0]
    queues = below.catalog.queues
    names = ("misses", "dropped", "damaged", "declined", "queued_bytes", "jobs", "stored_bytes", "loaded_bytes")
    wanted = {name: 100 + number for number, name in enumerate(names)}
    for name, number in wanted.items():
        setattr(below, name, number)
    queues.expired, queues.not_retained, below.catalog.evictions = 201, 202, 203
    below.tier.last_error = "full"
    assert below.stats(hits=300) == TierStats(
        name="near",
        type="model",
        capacity_bytes=1 << 20,
        available_bytes=1 << 20,
        used_bytes=3 * 4096,
        blocks=3,
        hits=300,
        expired=201,
        not_retained=202,
        evictions=203,
        shares=queues.stats(),
        healthy=False,
        last_error="full",
        **wanted,  # type: ignore[arg-type]
    )
    cpu = rig.core._cpu_tier
    cpu.evictions, cpu.no_room, cpu.stored_bytes, cpu.loaded_bytes, cpu.declines = 1, 2, 3, 4, 5
    cpu.queues.expired, cpu.queues.not_retained = 6, 7
    assert cpu_stats(cpu, 8, hits=9, misses=10) == TierStats(
        name="cpu",
        type="cpu",
        capacity_bytes=8,
        available_bytes=EXTENT,
        used_bytes=3 * 4096,
        blocks=3,
        hits=9,
        misses=10,
        evictions=1,
        dropped=2,
        stored_bytes=3,
        loaded_bytes=4,
        declined=5,
        expired=6,
        not_retained=7,
        shares=cpu.queues.stats(),
    )
