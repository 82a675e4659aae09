"""Reasons of misses, one per miss, and the records of a request's lookups."""

from collections.abc import Sequence

import pytest
from core_rig import HIT, MISS, PENDING, SPEC, Rig, keys
from harness.operations import run_to_end
from simulation import ModelTier

from kvtier.tiers.core.call_specs import LookupSpec, StoreSpec
from kvtier.tiers.core.commands import LoadFromTier
from kvtier.tiers.secondary_tier import NamespaceId, Outcome, RequestInfo, TierFilter
from kvtier.tiers.stats.eviction_history import EvictionHistory
from kvtier.tiers.stats.request_log import OutcomeRun
from kvtier.tiers.types import MissReason, NamespaceSpec

OTHER_FORMAT = NamespaceSpec(NamespaceId(b"o" * 32), world_size=1, part_bytes=(4096, 16384))
FIRST_TICK = 100.0


def spans(rig: Rig, names: Sequence[bytes], *, prefix: bool = True, **more: object) -> tuple[OutcomeRun, ...]:
    """Looks up for a new request; returns what `explain` says of it."""
    found = run_to_end(
        rig.core.lookup(
            rig.session, names, LookupSpec(prefix=prefix, request_id="asks", lease_seconds=1e9, **more), now=0
        )
    )  # type: ignore[arg-type]
    [record] = rig.core.explain("asks")
    if found.lease is not None and not found.lease.pending:
        rig.core.release(rig.session, found.lease.id)
    return record.lookups[-1].outcomes()


def check_sum(rig: Rig) -> None:
    """Hits of all tiers and misses by reason add up to the keys of lookups."""
    stats = rig.core.stats()
    assert sum(stats.misses_by_reason.values()) == stats.lookup_misses
    assert sum(tier.hits for tier in stats.tiers) + stats.lookup_misses == stats.lookup_keys


def test_never_stored() -> None:
    """The reason also holds for later blocks of the chain."""
    rig = Rig()
    rig.store(keys(0, 1))
    assert spans(rig, keys(0, 1, 2, 3)) == (OutcomeRun(2, 0), OutcomeRun(2, MissReason.NEVER_STORED))
    check_sum(rig)


@pytest.mark.parametrize("size", [1, 2, 8])
def test_keys_behind_a_miss_have_its_reason(size: int) -> None:
    """The eviction history explains the first miss of a prefix, or each miss without a prefix."""
    rig = Rig()
    rig.store(keys(*range(16)))
    rig.store(keys(100, 101))
    names = keys(0, 50, 14, 1, 15)
    found = {}
    for prefix in (True, False):
        spec = LookupSpec(prefix=prefix, request_id=f"{prefix}", lease_seconds=60)
        run_to_end(rig.core.lookup(rig.session, names, spec, now=0, slice_keys=size))
        [record] = rig.core.explain(f"{prefix}")
        found[prefix] = record.lookups[-1].outcomes()
        assert record.lookups[-1].first_miss == names[1]
    evicted, unknown = OutcomeRun(1, MissReason.EVICTED), OutcomeRun(1, MissReason.NEVER_STORED)
    assert found[True] == (OutcomeRun(1, 0), OutcomeRun(4, MissReason.NEVER_STORED))
    assert found[False] == (OutcomeRun(1, 0), unknown, evicted, OutcomeRun(1, 0), evicted)
    assert rig.core.stats().misses_by_reason == {MissReason.NEVER_STORED: 5, MissReason.EVICTED: 2}
    check_sum(rig)


def test_evicted() -> None:
    """The reason also holds for a block that is evicted behind a hit."""
    rig = Rig()
    rig.store(keys(*range(16)))
    rig.store(keys(100, 101))
    assert spans(rig, keys(*range(16))) == (OutcomeRun(14, 0), OutcomeRun(2, MissReason.EVICTED))
    check_sum(rig)


def test_evicted_from_the_last_tier_that_had_it() -> None:
    """A tier below keeps what the CPU tier evicts.

    The miss comes when that tier evicts the block, too.
    """
    rig = Rig(ModelTier("near", 24 * 4096), queue=1 << 20)
    rig.store_in_all_tiers(keys(*range(16)))
    rig.store_in_all_tiers(keys(*range(100, 116)))
    assert {span.outcome for span in spans(rig, keys(*range(16)), prefix=False)} == {1, MissReason.EVICTED}
    check_sum(rig)


@pytest.mark.parametrize("how", ["failed", "expired", "fell", "no room"])
def test_store_failed(how: str) -> None:
    """Every failed store has this reason."""
    rig = Rig()
    answer = run_to_end(rig.core.prepare_store(rig.session, keys(*range(16)), StoreSpec(lease_seconds=60), now=0))
    wanted = keys(3)
    if how == "failed":
        run_to_end(rig.core.complete_store(rig.session, answer.store_id, [3]))
    elif how == "expired":
        rig.core.tick(61)
    elif how == "fell":
        rig.core.close_session(rig.session.id)
        rig.session = rig.open("engine")
    else:
        wanted = keys(50)
        rig.store(wanted)
    assert spans(rig, wanted) == (OutcomeRun(1, MissReason.STORE_FAILED),)


def test_store_failed_in_the_tier_below() -> None:
    """The CPU tier evicts a block that the tier could not store: the failed store is the reason."""
    rig = Rig(ModelTier("near", 1 << 20))
    rig.store(keys(*range(16)))
    rig.finish_jobs(Outcome.FAILED)
    rig.store(keys(100))
    assert spans(rig, keys(15), prefix=False) == (OutcomeRun(1, MissReason.STORE_FAILED),)


def test_policy() -> None:
    """B3.15: only a tier that the lookup leaves out has the block."""
    rig = Rig(ModelTier("near", 1 << 20))
    rig.store_in_all_tiers(keys(0))
    rig.store(keys(*range(100, 116)))
    without = TierFilter(names=frozenset({"near"}))
    assert spans(rig, keys(0), tiers=without) == (OutcomeRun(1, MissReason.POLICY),)
    assert rig.core.stats().tiers[1].misses == 0, "the tier was not asked"
    check_sum(rig)


def test_below_threshold() -> None:
    """The prefix is too short to be worth a load: nothing is pinned or promoted."""
    rig = Rig(ModelTier("near", 1 << 20))
    rig.store_in_all_tiers(keys(0, 1))
    rig.store(keys(*range(100, 116)))
    rig.core.take_commands()
    expected = (OutcomeRun(2, MissReason.BELOW_THRESHOLD), OutcomeRun(1, MissReason.NEVER_STORED))
    assert spans(rig, keys(0, 1, 2), min_hits=3) == expected
    assert not any(isinstance(command, LoadFromTier) for command in rig.core.take_commands())
    assert rig.core.stats().leases == 0
    assert spans(rig, keys(0, 1, 2), min_hits=2)[0] == OutcomeRun(2, 1)


def test_format_mismatch() -> None:
    """Another dtype of the tenant has the same tokens; other tenants' blocks are not revealed."""
    rig = Rig()
    rig.store(keys(0, 1))
    rig.session = rig.open("other", OTHER_FORMAT)
    assert spans(rig, keys(0, 1)) == (OutcomeRun(2, MissReason.FORMAT_MISMATCH),)
    stranger = NamespaceSpec(NamespaceId(b"s" * 32), world_size=1, part_bytes=(4096,))
    rig.session = rig.core.open_session(b"stranger", "stranger", None, stranger, tenant="another tenant")
    assert [record.lookups[-1].outcomes() for record in rig.core.explain("asks")] == [
        (OutcomeRun(2, MissReason.FORMAT_MISMATCH),)
    ]
    run_to_end(rig.core.lookup(rig.session, keys(0, 1), LookupSpec(request_id="theirs", lease_seconds=60), now=0))
    [record] = rig.core.explain("theirs")
    assert record.lookups[-1].outcomes() == (OutcomeRun(2, MissReason.NEVER_STORED),)


def test_load_failed_is_recorded_for_the_waiting_lookup() -> None:
    """B3.18: a pending hit counts when its load has succeeded or failed."""
    rig = Rig(ModelTier("near", 1 << 20))
    rig.store_in_all_tiers(keys(0, 1))
    rig.store_in_all_tiers(keys(*range(100, 116)))
    before = rig.core.stats()
    assert spans(rig, keys(0, 1)) == (OutcomeRun(2, 1),)
    assert rig.core.stats().lookup_keys == before.lookup_keys, "not answered yet"
    [job] = [command for command in rig.core.take_commands() if isinstance(command, LoadFromTier)]
    rig.core.job_finished(job.job_id, [Outcome.DONE, Outcome.CORRUPT])
    [record] = rig.core.explain("asks")
    assert record.lookups[-1].outcomes() == (OutcomeRun(1, 1), OutcomeRun(1, MissReason.LOAD_FAILED))
    after = rig.core.stats()
    assert (after.tiers[1].hits - before.tiers[1].hits, after.lookup_misses - before.lookup_misses) == (1, 1)
    check_sum(rig)


def test_no_room() -> None:
    """B3.16: a tier has the block, and all of the CPU tier is pinned."""
    rig = Rig(ModelTier("near", 1 << 20))
    rig.store_in_all_tiers(keys(0))
    rig.store_in_all_tiers(keys(*range(100, 116)))
    assert run_to_end(rig.core.lookup(rig.session, keys(*range(100, 116)), LookupSpec(lease_seconds=60), now=0)).lease
    assert spans(rig, keys(0)) == (OutcomeRun(1, MissReason.NO_ROOM),)
    check_sum(rig)


def test_pending_keys_of_a_released_lease_count_as_hits() -> None:
    rig = Rig(ModelTier("near", 1 << 20))
    rig.store_in_all_tiers(keys(0))
    rig.store(keys(*range(100, 116)))
    found = run_to_end(rig.core.lookup(rig.session, keys(0, 0), LookupSpec(lease_seconds=60), now=0))
    rig.core.release(rig.session, found.lease.id)
    assert rig.core.stats().tiers[1].hits == 1
    assert rig.core.stats().lookup_keys == 2
    check_sum(rig)


def test_explain_keeps_the_last_lookups_and_the_votes() -> None:
    """Also whether the request has finished, and its number of lookups.

    All expires after 15 minutes.
    """
    rig = Rig(ModelTier("near", 1 << 20))
    rig.core.tick(FIRST_TICK)
    rig.core.begin_request(rig.session, RequestInfo("r", SPEC.id, kv_transfer_params={"do_remote_decode": True}))
    for number in range(6):
        run_to_end(
            rig.core.lookup(
                rig.session, keys(*range(number + 1)), LookupSpec(request_id="r", lease_seconds=1e9), now=FIRST_TICK
            )
        )
    [record] = rig.core.explain("r")
    assert record.negotiation.votes[0][1].why == "do_remote_decode: another engine will decode the request"
    assert (record.asked, [lookup.outcomes()[0].count for lookup in record.lookups]) == (6, [3, 4, 5, 6])
    assert not record.finished
    rig.core.finish_request(rig.session, "r")
    assert record.finished
    rig.core.tick(FIRST_TICK + 899)
    assert rig.core.explain("r") == [record]
    rig.core.tick(FIRST_TICK + 901)
    assert rig.core.explain("r") == []


def test_equal_request_ids_of_two_engines() -> None:
    """Both are recorded, the later one first."""
    rig = Rig()
    other = rig.open("other")
    for session in (rig.session, other):
        run_to_end(rig.core.lookup(session, keys(0), LookupSpec(request_id="r", lease_seconds=60), now=0))
    assert [record.engine_id for record in rig.core.explain("r")] == ["other", "engine"]


def test_records_are_bounded() -> None:
    """Names of evicted blocks, and requests."""
    history = EvictionHistory(most=100)
    for number in range(1000):
        history.record(SPEC.id, b"%d" % number, MissReason.EVICTED)
    known = [number for number in range(1000) if history.reason_for(SPEC.id, b"%d" % number)]
    assert 50 <= len(known) <= 100
    assert known[-1] == 999
    rig = Rig()
    for number in range(5000):
        run_to_end(rig.core.lookup(rig.session, keys(0), LookupSpec(request_id=f"r{number}", lease_seconds=60), now=0))
    assert rig.core.explain("r0") == []
    assert len(rig.core.explain("r4999")) == 1


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


@pytest.mark.parametrize("event", ["the store fails", "a reset"])
def test_a_pending_block_that_ends_has_the_reason_of_its_end(event: str) -> None:
    """The lookup counted it as pending. It is a failed load only if a tier has failed."""
    rig = Rig()
    store = run_to_end(rig.core.prepare_store(rig.session, keys(0), StoreSpec(lease_seconds=60), now=0))
    assert store.store_id is not None
    found = run_to_end(rig.core.lookup(rig.session, keys(0), LookupSpec(lease_seconds=60), now=0))
    assert found.statuses() == PENDING
    if event == "a reset":
        rig.core.reset(rig.session)
        expected = MissReason.RESET
    else:
        expected = MissReason.STORE_FAILED
    run_to_end(rig.core.complete_store(rig.session, store.store_id, failed=[0]))
    assert rig.core.stats().misses_by_reason == {expected: 1}
    check_sum(rig)


def test_a_single_block_without_room_is_the_only_miss() -> None:
    """Blocks behind it that the CPU tier has are hits, unless the lookup is of a prefix."""
    rig = Rig(ModelTier("near", 1 << 20), queue=1 << 20)
    rig.store_in_all_tiers(keys(0))
    held = keys(*range(100, 116))
    rig.store_in_all_tiers(held)
    run_to_end(rig.core.lookup(rig.session, held, LookupSpec(lease_seconds=1e9), now=0))
    names = keys(100, 0, 101)
    assert spans(rig, names, prefix=False) == (OutcomeRun(1, 0), OutcomeRun(1, MissReason.NO_ROOM), OutcomeRun(1, 0))
    assert spans(rig, names) == (OutcomeRun(1, 0), OutcomeRun(2, MissReason.NO_ROOM))
    check_sum(rig)
