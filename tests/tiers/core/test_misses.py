"""Why a block was not there: one reason per miss, and what is remembered of a request's lookups."""

from collections.abc import Sequence

import pytest
from core_rig import SPEC, Rig, keys
from simulation import ModelTier

from kvtier.tiers.base import NamespaceId, Outcome, RequestInfo, TierFilter
from kvtier.tiers.core.commands import LoadFromTier
from kvtier.tiers.stats.eviction_history import EvictionHistory
from kvtier.tiers.stats.request_log import OutcomeRun
from kvtier.tiers.types import MissReason, NamespaceSpec

OTHER_FORMAT = NamespaceSpec(NamespaceId(b"o" * 16), world_size=1, part_bytes=(4096, 16384))
FIRST_TICK = 100.0


def spans(rig: Rig, names: Sequence[bytes], *, prefix: bool = True, **more: object) -> tuple[OutcomeRun, ...]:
    """Looks up on behalf of a request of its own; returns what `explain` says of it."""
    found = rig.core.lookup(rig.session, names, prefix=prefix, request_id="asks", expires_at=1e9, **more)  # type: ignore[arg-type]
    [record] = rig.core.explain("asks")
    if found.lease is not None and not found.lease.pending:
        rig.core.release(rig.session, found.lease.id)
    return record.lookups[-1].outcomes()


def check_sum(rig: Rig) -> None:
    """Hits over all tiers and misses by reason make up the keys that were asked."""
    stats = rig.core.stats()
    assert sum(stats.misses_by_reason.values()) == stats.lookup_misses
    assert sum(tier.hits for tier in stats.tiers) + stats.lookup_misses == stats.lookup_keys


def test_never_stored() -> None:
    """What nobody stored, and what follows it in the chain."""
    rig = Rig()
    rig.store(keys(0, 1))
    assert spans(rig, keys(0, 1, 2, 3)) == (OutcomeRun(2, 0), OutcomeRun(2, MissReason.NEVER_STORED))
    check_sum(rig)


def test_evicted() -> None:
    """What had to make room, also where it was found in its place behind a hit."""
    rig = Rig()
    rig.store(keys(*range(16)))
    rig.store(keys(100, 101))
    assert spans(rig, keys(*range(16))) == (OutcomeRun(14, 0), OutcomeRun(2, MissReason.EVICTED))
    check_sum(rig)


def test_evicted_from_the_last_tier_that_had_it() -> None:
    """A tier below keeps what the CPU tier evicts; the miss comes when that one evicts it as well."""
    rig = Rig(ModelTier("near", 24 * 4096), queue=1 << 20)
    rig.store(keys(*range(16)))
    rig.finish_jobs()
    rig.store(keys(*range(100, 116)))
    rig.finish_jobs()
    assert {span.outcome for span in spans(rig, keys(*range(16)), prefix=False)} == {1, MissReason.EVICTED}
    check_sum(rig)


@pytest.mark.parametrize("how", ["failed", "expired", "fell", "no room"])
def test_store_failed(how: str) -> None:
    """What was offered and could not be written, whatever the reason."""
    rig = Rig()
    answer = rig.core.prepare_store(rig.session, keys(*range(16)), request_id="", expires_at=60)
    assert answer.store_id is not None
    wanted = keys(3)
    if how == "failed":
        rig.core.complete_store(rig.session, answer.store_id, [3])
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
    """What the CPU tier evicts after a tier could not take it was lost to that tier, not to the lack of room."""
    rig = Rig(ModelTier("near", 1 << 20))
    rig.store(keys(*range(16)))
    rig.finish_jobs(Outcome.FAILED)
    rig.store(keys(100))
    assert spans(rig, keys(15), prefix=False) == (OutcomeRun(1, MissReason.STORE_FAILED),)


def test_policy() -> None:
    """B3.15: what only a tier has that the lookup leaves out."""
    rig = Rig(ModelTier("near", 1 << 20))
    rig.store(keys(0))
    rig.finish_jobs()
    rig.store(keys(*range(100, 116)))
    without = TierFilter(names=frozenset({"near"}))
    assert spans(rig, keys(0), tiers=without) == (OutcomeRun(1, MissReason.POLICY),)
    assert rig.core.stats().tiers[1].misses == 0, "it was not asked"
    check_sum(rig)


def test_below_threshold() -> None:
    """A prefix that is too short to be worth having: nothing is pinned, nothing is promoted."""
    rig = Rig(ModelTier("near", 1 << 20))
    rig.store(keys(0, 1))
    rig.finish_jobs()
    rig.store(keys(*range(100, 116)))
    rig.core.take_commands()
    expected = (OutcomeRun(2, MissReason.BELOW_THRESHOLD), OutcomeRun(1, MissReason.NEVER_STORED))
    assert spans(rig, keys(0, 1, 2), min_hits=3) == expected
    assert not any(isinstance(command, LoadFromTier) for command in rig.core.take_commands())
    assert rig.core.stats().leases == 0
    assert spans(rig, keys(0, 1, 2), min_hits=2)[0] == OutcomeRun(2, 1)


def test_format_mismatch() -> None:
    """The same tokens are there with another dtype, say; of another tenant's one is told nothing."""
    rig = Rig()
    rig.store(keys(0, 1))
    rig.session = rig.open("other", OTHER_FORMAT)
    assert spans(rig, keys(0, 1)) == (OutcomeRun(2, MissReason.FORMAT_MISMATCH),)
    stranger = NamespaceSpec(NamespaceId(b"s" * 16), world_size=1, part_bytes=(4096,))
    rig.session = rig.core.open_session(b"stranger", "stranger", None, stranger, tenant="somebody else")
    assert [record.lookups[-1].outcomes() for record in rig.core.explain("asks")] == [
        (OutcomeRun(2, MissReason.FORMAT_MISMATCH),)
    ]
    rig.core.lookup(rig.session, keys(0, 1), prefix=True, request_id="theirs", expires_at=60)
    [record] = rig.core.explain("theirs")
    assert record.lookups[-1].outcomes() == (OutcomeRun(2, MissReason.NEVER_STORED),)


def test_load_failed_is_said_of_the_lookup_that_waited() -> None:
    """B3.18: a hit on its way counts when it has arrived, or has not."""
    rig = Rig(ModelTier("near", 1 << 20))
    rig.store(keys(0, 1))
    rig.finish_jobs()
    rig.store(keys(*range(100, 116)))
    rig.finish_jobs()
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
    """B3.16: a tier has it, and everything in the CPU tier is in use."""
    rig = Rig(ModelTier("near", 1 << 20))
    rig.store(keys(0))
    rig.finish_jobs()
    rig.store(keys(*range(100, 116)))
    rig.finish_jobs()
    assert rig.core.lookup(rig.session, keys(*range(100, 116)), prefix=True, request_id="", expires_at=60).lease
    assert spans(rig, keys(0)) == (OutcomeRun(1, MissReason.NO_ROOM),)
    check_sum(rig)


def test_a_lease_that_ends_early_leaves_no_key_uncounted() -> None:
    """What was on its way when its reader lost interest was there: a hit."""
    rig = Rig(ModelTier("near", 1 << 20))
    rig.store(keys(0))
    rig.finish_jobs()
    rig.store(keys(*range(100, 116)))
    found = rig.core.lookup(rig.session, keys(0, 0), prefix=True, request_id="", expires_at=60)
    assert found.lease is not None
    rig.core.release(rig.session, found.lease.id)
    assert rig.core.stats().tiers[1].hits == 1
    assert rig.core.stats().lookup_keys == 2
    check_sum(rig)


def test_explain_keeps_the_last_lookups_and_what_was_negotiated() -> None:
    """It knows the votes, whether the request has finished, and how often it asked; after a quarter of an hour, nothing."""
    rig = Rig(ModelTier("near", 1 << 20))
    rig.core.tick(FIRST_TICK)
    rig.core.begin_request(rig.session, RequestInfo("r", SPEC.id, kv_transfer_params={"do_remote_decode": True}))
    for number in range(6):
        rig.core.lookup(rig.session, keys(*range(number + 1)), prefix=True, request_id="r", expires_at=1e9)
    [record] = rig.core.explain("r")
    assert record.negotiation is not None
    assert record.negotiation.votes[0][1].why == "do_remote_decode: another engine will decode it"
    assert (record.asked, [lookup.outcomes()[0].count for lookup in record.lookups]) == (6, [3, 4, 5, 6])
    assert not record.finished
    rig.core.finish_request(rig.session, "r")
    assert record.finished
    rig.core.tick(FIRST_TICK + 899)
    assert rig.core.explain("r") == [record]
    rig.core.tick(FIRST_TICK + 901)
    assert rig.core.explain("r") == []


def test_requests_of_two_engines_by_one_name() -> None:
    """Both are known, the later one first."""
    rig = Rig()
    other = rig.open("other")
    for session in (rig.session, other):
        rig.core.lookup(session, keys(0), prefix=True, request_id="r", expires_at=60)
    assert [record.engine_id for record in rig.core.explain("r")] == ["other", "engine"]


def test_what_is_remembered_is_bounded() -> None:
    """Names of departed blocks, and requests."""
    history = EvictionHistory(most=100)
    for number in range(1000):
        history.record(SPEC.id, b"%d" % number, MissReason.EVICTED)
    known = [number for number in range(1000) if history.reason_for(SPEC.id, b"%d" % number)]
    assert 50 <= len(known) <= 100
    assert known[-1] == 999
    rig = Rig()
    for number in range(5000):
        rig.core.lookup(rig.session, keys(0), prefix=True, request_id=f"r{number}", expires_at=60)
    assert rig.core.explain("r0") == []
    assert len(rig.core.explain("r4999")) == 1
