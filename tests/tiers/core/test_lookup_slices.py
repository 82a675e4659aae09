"""Lookups in slices: they answer as a lookup in one piece, and count as one use of the blocks."""

import random
from typing import ClassVar

import pytest
from core_rig import HIT, MISS, PENDING, Rig, keys
from harness.operations import Steps, run_to_end
from simulation import ModelTier

from kvtier.tiers.core.block_matcher import OTHER_COST
from kvtier.tiers.core.call_specs import LookupSpec, StoreSpec
from kvtier.tiers.core.commands import LookupInTier
from kvtier.tiers.core.running_lookup import LookupAnswer
from kvtier.tiers.core.settings import TierSettings
from kvtier.tiers.secondary_tier import Outcome, TierFilter
from kvtier.tiers.stats.request_log import LookupRecord, OutcomeRun
from kvtier.tiers.types import MissReason

FAR = 1e9


def begin(
    rig: Rig, names: list[bytes], most: int, *, prefix: bool = True, request_id: str = "", min_hits: int = 0
) -> Steps[LookupAnswer]:
    """Begins a lookup with `most` keys per slice."""
    options = {"prefix": prefix, "request_id": request_id, "min_hits": min_hits}
    operation = rig.core.lookup(rig.session, names, LookupSpec(lease_seconds=FAR, **options), now=0, slice_keys=most)
    lookup = Steps(operation, "lookup")
    if len(names) > most:
        assert step(lookup)
        assert (lookup.state.position, lookup.state.counted) == (0, 0), "also the first slice waits for its turn"
    return lookup


def step(lookup: Steps[LookupAnswer]) -> bool:
    state = lookup.state
    before = state.position + state.counted
    more = lookup.step()
    assert state.position + state.counted <= before + state.slice_keys or not more
    return more


def mixed_rig() -> Rig:
    """Blocks 0 to 9 only in the tier below, 10 to 19 also in memory, 20 to 29 being stored."""
    rig = Rig(ModelTier("near", 1 << 20), extents=8, queue=1 << 20)
    rig.store_in_all_tiers(keys(*range(20)))
    rig.core.reset(rig.session)
    while rig.core.resetting(rig.session):
        rig.core.work()
    rig.store_in_all_tiers(keys(*range(10, 20)))
    run_to_end(rig.core.prepare_store(rig.session, keys(*range(20, 30)), StoreSpec(lease_seconds=FAR), now=0))
    rig.core.take_commands()
    return rig


def names_of(seed: int) -> list[bytes]:
    """Returns runs of blocks of all kinds; 30 to 39 are unknown."""
    rng = random.Random(seed)
    numbers: list[int] = []
    for _ in range(rng.randint(1, 6)):
        start = rng.choice([0, 4, 10, 12, 20, 25, *([30] if rng.random() < 0.3 else [])])
        numbers += range(start, start + rng.randint(1, 9))
    return keys(*numbers)


def result_of(rig: Rig, lookup: Steps[LookupAnswer]) -> tuple[object, ...]:
    answer = lookup.answer
    [record] = rig.core.explain("r")
    asked: LookupRecord = record.lookups[-1]
    stats = rig.core.stats()
    counts = [(tier.hits, tier.misses, tier.used_bytes) for tier in stats.tiers]
    sources = answer.lease.sources.ljust(answer.keys, b"\0") if answer.lease is not None else None
    return answer.statuses(), sources, asked.outcomes(), asked.first_miss, counts, stats.misses_by_reason


@pytest.mark.parametrize("most", [1, 3 * OTHER_COST, 7 * OTHER_COST])
@pytest.mark.parametrize("seed", range(20))
def test_slices_answer_as_one_piece(seed: int, most: int) -> None:
    """Statuses, sources, explanation and counters are equal; also with `min_hits`."""
    names = names_of(seed)
    for prefix in (True, False):
        for min_hits in (0, 2, len(names), len(names) + 1):
            whole, sliced = mixed_rig(), mixed_rig()
            results = []
            for rig, size in ((whole, len(names) * OTHER_COST), (sliced, most)):
                lookup = begin(rig, names, size, prefix=prefix, request_id="r", min_hits=min_hits)
                lookup.finish()
                results.append(result_of(rig, lookup))
            assert results[0] == results[1], (prefix, min_hits)


@pytest.mark.parametrize(("stored", "min_hits"), [(16, 16), (16, 13), (12, 12), (14, 0)])
@pytest.mark.parametrize("most", [4, 5, 11])
def test_hits_that_are_evicted_after_they_were_counted(most: int, stored: int, min_hits: int) -> None:
    """Two stores evict the tail between the slices that count hits and the slices that pin them.

    The answer and all figures are those of a lookup in one piece after the eviction.
    """
    results = []
    for others in (most, stored):
        rig = Rig(eviction={"cpu": "lru"})
        rig.store(keys(*range(stored)))
        rig.store(keys(*range(200, 216 - stored)))
        lookup = begin(rig, keys(*range(stored)), others * OTHER_COST, request_id="r", min_hits=min_hits)
        while others < min_hits > lookup.state.counted:
            assert step(lookup)
        rig.store(keys(100, 101))
        lookup.finish()
        curves = rig.core._miss_ratio_curves
        assert curves is not None
        results.append((result_of(rig, lookup), curves._answered, curves._keys, len(rig.core.leases())))
    assert results[0] == results[1]
    if min_hits == 16:
        found = result_of(rig, lookup)[2]
        assert found == (OutcomeRun(14, MissReason.BELOW_THRESHOLD), OutcomeRun(2, MissReason.EVICTED))


def test_hits_without_room_are_below_the_threshold() -> None:
    """Leases pin all but two slots, and a lookup of four blocks of the disk wants four hits."""
    rig = Rig(ModelTier("near", 1 << 20), eviction={"cpu": "lru"}, queue=1 << 20)
    rig.store_in_all_tiers(keys(*range(4)))
    rig.store_in_all_tiers(keys(*range(100, 116)))
    assert run_to_end(rig.core.lookup(rig.session, keys(*range(100, 114)), LookupSpec(lease_seconds=FAR), now=0)).lease
    for min_hits, wanted in ((2, PENDING * 2 + MISS * 2), (4, MISS * 4)):
        lookup = begin(rig, keys(*range(4)), 4 * OTHER_COST, request_id="r", min_hits=min_hits)
        answer = lookup.finish()
        assert answer.statuses() == wanted
        if answer.lease is not None:
            rig.core.release(rig.session, answer.lease.id)
        rig.finish_jobs()
    assert result_of(rig, lookup)[2] == (OutcomeRun(2, MissReason.BELOW_THRESHOLD), OutcomeRun(2, MissReason.NO_ROOM))
    stats = rig.core.stats()
    assert [tier.hits for tier in stats.tiers] == [14, 2], "those of the leased blocks and of the first lookup"
    assert (stats.lookup_misses, stats.lookup_keys) == (2 + 4, 14 + 4 + 4)


def test_unknown_keys_are_not_searched_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """They still count as misses of each tier that the lookup does not exclude."""
    rig = Rig(ModelTier("near", 1 << 20), ModelTier("far", 1 << 20), extents=8, queue=1 << 20)
    rig.store_in_all_tiers(keys(0))
    residency, searched = rig.core._tier_jobs.residency, list[bytes]()
    monkeypatch.setattr(residency, "find", lambda _, key, __: searched.append(key))
    names, tiers = keys(0, *range(100, 200)), TierFilter(names=frozenset(["far"]))
    found = run_to_end(
        rig.core.lookup(rig.session, names, LookupSpec(prefix=False, lease_seconds=FAR, tiers=tiers), now=0)
    )
    assert (found.statuses(), searched) == (HIT + MISS * 100, [])
    assert [tier.misses for tier in rig.core.stats().tiers] == [100, 100, 0]


def test_the_head_of_a_sliced_lookup_is_evicted_last() -> None:
    """Without a request id, the slices still count as one use: the tail is evicted first (B4.9)."""
    rig = Rig(eviction={"cpu": "lru"})
    rig.store(keys(*range(16)))
    lease = begin(rig, keys(*range(16)), 4).finish().lease
    assert lease is not None
    rig.core.release(rig.session, lease.id)
    rig.store(keys(100, 101))
    assert rig.look_up(keys(*range(16))) == HIT * 14 + MISS * 2


def test_an_abandoned_lookup_leaves_no_pin() -> None:
    rig = mixed_rig()
    lookup = begin(rig, keys(*range(10, 30)), 15, prefix=False, request_id="r")
    assert step(lookup)
    assert len(rig.core.leases()) == 1
    lookup.operation.close()
    assert not rig.core.leases()
    assert not rig.core._lookups.leases.waiters._by_block
    assert sum(block.pins for block in rig.core._cpu_tier._index if block.ready) == 0
    assert [tier.hits for tier in rig.core.stats().tiers] == [0, 0], "no hits were delivered"
    [record] = rig.core.explain("r")
    assert all(isinstance(run.outcome, MissReason) for run in record.lookups[-1].outcomes())


@pytest.mark.parametrize("slices", [1, 2, 3])
@pytest.mark.parametrize("prefix", [True, False])
def test_a_lookup_whose_lease_ends_has_no_hits(slices: int, prefix: bool) -> None:  # noqa: FBT001
    """Here the engine finishes the request between two slices. Figures and explanation say so."""
    rig = mixed_rig()
    names = keys(*range(10, 30))
    lookup = begin(rig, names, 5, prefix=prefix, request_id="r")
    for _ in range(slices):
        assert step(lookup)
    rig.core.finish_request(rig.session, "r")
    assert not step(lookup)
    rig.finish_jobs()
    assert lookup.answer.statuses() == MISS * 20
    assert sum(block.pins for block in rig.core._cpu_tier._index if block.ready) == 0
    stats = rig.core.stats()
    assert ([tier.hits for tier in stats.tiers], stats.misses_by_reason) == ([0, 0], {MissReason.PENDING: 20})
    [record] = rig.core.explain("r")
    found: LookupRecord = record.lookups[-1]
    assert (found.outcomes(), found.first_miss) == ((OutcomeRun(20, MissReason.PENDING),), names[0])


def test_a_lookup_whose_lease_expires_during_its_wait_has_no_hits() -> None:
    """The call waits for the blocks that are being loaded; then it answers that all are misses."""
    rig = mixed_rig()
    lease = begin(rig, keys(*range(5, 15)), 10, request_id="r").finish().lease
    assert lease is not None
    assert lease.pending == 5
    rig.core.tick(2 * FAR)
    rig.core._lookups.take_back_hits(lease, MissReason.PENDING)
    rig.finish_jobs()
    stats = rig.core.stats()
    assert ([tier.hits for tier in stats.tiers], stats.misses_by_reason) == ([0, 0], {MissReason.PENDING: 10})


def test_a_reset_ends_a_lookup_in_slices() -> None:
    """Keys behind the last slice before the reset are misses (B3.19)."""
    rig = mixed_rig()
    lookup = begin(rig, keys(*range(10, 20)), 5, prefix=False, request_id="r")
    assert step(lookup)
    rig.core.reset(rig.session)
    assert lookup.finish().statuses() == HIT * 5 + MISS * 5
    [record] = rig.core.explain("r")
    assert record.lookups[-1].outcomes()[-1].outcome is MissReason.RESET


def test_a_block_that_settles_between_slices_is_a_hit() -> None:
    """A lease knows its pending blocks by their position in the whole lookup."""
    rig = mixed_rig()
    lookup = begin(rig, keys(*range(30, 36), *range(10)), 7 * OTHER_COST, prefix=False)
    assert step(lookup)
    rig.finish_jobs()
    assert step(lookup)
    assert lookup.state.answer().statuses() == MISS * 6 + HIT + PENDING * 7 + MISS * 2
    rig.finish_jobs()
    assert lookup.finish().statuses() == MISS * 6 + HIT * 8 + PENDING * 2


def test_a_load_that_fails_between_slices_does_not_undo_the_others() -> None:
    """The lookup has found `min_hits` blocks, and keeps those that can be loaded."""
    rig = mixed_rig()
    lookup = begin(rig, keys(*range(10)), 5 * OTHER_COST, request_id="r", min_hits=10)
    while lookup.state.position == 0:
        assert step(lookup)
    rig.finish_jobs(Outcome.FAILED)
    assert lookup.finish().statuses() == MISS * 5 + PENDING * 5
    found = result_of(rig, lookup)[2]
    assert found == (OutcomeRun(5, MissReason.LOAD_FAILED), OutcomeRun(5, 1))


def test_slices_that_only_count_hits_send_their_queries() -> None:
    """The call may be abandoned next, and other lookups of the keys wait for the answers."""

    class Shared(ModelTier):
        shared: ClassVar[bool] = True

    rig = Rig(Shared("far", 1 << 20))
    lookup = begin(rig, keys(*range(8)), 4, min_hits=8)
    assert lookup.step()
    assert [type(command) for command in rig.core.take_commands()] == [LookupInTier]


def test_leases_that_lose_their_blocks_leave_no_entry() -> None:
    """The load of the first block fails, and then the lookup adds a miss to its lease."""
    rig = mixed_rig()
    lookup = begin(rig, keys(0, 30), 1, prefix=False)
    assert step(lookup)
    rig.finish_jobs(Outcome.FAILED)
    lease = lookup.finish().lease
    assert lease is not None
    rig.core.release(rig.session, lease.id)
    assert not rig.core._lookups.leases.leased_bytes


def test_a_repeated_lookup_counts_once_in_the_curves() -> None:
    """A lookup with RETRY keys is not counted, also if its first slices have none."""

    class Shared(ModelTier):
        shared: ClassVar[bool] = True

    names = keys(*range(10))
    counts = []
    for most in (3, len(names)):
        rig = Rig(Shared("far", 1 << 20))
        rig.store(keys(*range(8)))
        begin(rig, names, most).finish()
        curves = rig.core._miss_ratio_curves
        assert curves is not None
        assert curves._keys == 0, "the client repeats the lookup"
        for command in rig.core.take_commands():
            if isinstance(command, LookupInTier):
                rig.core.lookup_finished(command.job_id, [False] * len(command.keys))
        begin(rig, names, most).finish()
        counts.append((curves._keys, curves._answered))
    assert counts[0] == counts[1]
    assert counts[0][0] == len(names)


@pytest.mark.parametrize(("most", "expected"), [(1, 4), (40, 32)], ids=["one block per request", "one request"])
def test_a_slice_has_fewer_keys_if_their_blocks_come_from_many_requests(most: int, expected: int) -> None:
    """The use of each run takes the eviction policy as long as several blocks of one run."""
    rig = Rig(extents=16)
    names = keys(*range(40))
    for start in range(0, len(names), most):
        rig.store(names[start : start + most])
    lookup = begin(rig, names, 4 * OTHER_COST)
    sizes = []
    while step(lookup):
        sizes.append(lookup.state.position - sum(sizes))
    assert max(sizes) == expected
    assert lookup.state.answer().statuses() == HIT * 40


def test_a_slice_has_few_keys_that_are_not_ready() -> None:
    rig = mixed_rig()
    lookup = begin(rig, keys(*range(10, 20), *range(10), *range(20, 30)), 4 * OTHER_COST - 3)
    sizes = []
    while step(lookup):
        sizes.append(lookup.state.position - sum(sizes))
    assert sizes[0] == 10 + 3
    assert set(sizes[1:]) == {3}


def test_a_repeated_key_needs_room_once() -> None:
    """The leases of a tenant may pin 12 of 16 blocks. A block that occurs twice is one block."""
    rig = Rig(settings=TierSettings(eviction={"cpu": "lru"}, leased_part=0.75))
    rig.store(keys(*range(14)))
    assert rig.look_up(keys(0) * 40) == HIT * 40
    assert rig.look_up(keys(*range(11), *range(11)) * 2) == HIT * 44
    assert rig.look_up(keys(*range(11), *range(14))) == HIT * 23 + MISS * 2, "three more blocks"
