"""Reset of the CPU tier while it is in use."""

import dataclasses

from core_rig import GRANTED, HIT, MISS, PENDING, SPEC, Rig, keys
from harness.operations import run_to_end
from simulation import ModelTier

from kvtier.tiers.core.call_specs import LookupSpec, StoreSpec
from kvtier.tiers.core.commands import LoadFromTier
from kvtier.tiers.secondary_tier import NamespaceId, Outcome, RequestInfo
from kvtier.tiers.types import MissReason


def test_a_reset_keeps_secondary_tiers() -> None:
    """B3.19: without leases the CPU tier is empty at once; a secondary tier still serves."""
    rig = Rig(ModelTier("near", 1 << 20))
    rig.store_in_all_tiers(keys(0, 1))
    assert rig.core.reset(rig.session) == 0
    assert rig.core.stats().tiers[0].used_bytes == 0
    assert rig.core.stats().tiers[1].blocks == 2
    assert rig.look_up(keys(0, 1)) == PENDING * 2
    rig.finish_jobs()
    assert rig.look_up(keys(0, 1)) == HIT * 2


def test_a_reset_waits_for_jobs_of_tiers() -> None:
    """B3.19: blocks of a running cascade stay until it has ended; lookups miss until then."""
    rig = Rig(ModelTier("near", 1 << 20))
    rig.store(keys(0, 1))
    assert rig.core.reset(rig.session) == 2
    assert rig.look_up(keys(0, 1)) == MISS * 2
    assert rig.core.stats().misses_by_reason[MissReason.RESET] == 2
    rig.finish_jobs()
    assert rig.core.reset(rig.session) == 0
    assert rig.core.stats().tiers[1].blocks == 2
    assert rig.core.stats().tiers[0].used_bytes == 0


def test_a_running_store_is_never_published_after_a_reset() -> None:
    """B4.13: it keeps its slots until the writer is done; its late completion publishes nothing."""
    rig = Rig(ModelTier("near", 1 << 20))
    before = run_to_end(rig.core.prepare_store(rig.session, keys(0, 1), StoreSpec(lease_seconds=60), now=0))
    assert rig.core.reset(rig.session) == 2, "not yet"
    after = run_to_end(rig.core.prepare_store(rig.session, keys(0, 1), StoreSpec(lease_seconds=60), now=0))
    assert not set(before.slots) & set(after.slots), "the old writer still writes there"
    run_to_end(rig.core.complete_store(rig.session, before.store_id))
    assert rig.core.resetting(rig.session) == 0
    assert rig.finish_jobs() == [], "nothing to cascade"
    assert rig.look_up(keys(0, 1)) == PENDING * 2, "the new store is running"
    run_to_end(rig.core.complete_store(rig.session, after.store_id))
    assert rig.look_up(keys(0, 1)) == HIT * 2


def test_a_running_promotion_is_never_published_after_a_reset() -> None:
    """B3.19: its late end is ignored; waiting lookups get a miss."""
    rig = Rig(ModelTier("near", 1 << 20))
    rig.store_in_all_tiers(keys(0))
    rig.core.reset(rig.session)
    lease = run_to_end(rig.core.lookup(rig.session, keys(0), LookupSpec(lease_seconds=60), now=0)).lease
    [job] = [command for command in rig.core.take_commands() if isinstance(command, LoadFromTier)]
    assert rig.core.reset(rig.session) == 1
    rig.core.job_finished(job.job_id, [Outcome.DONE])
    assert lease.statuses() == MISS
    assert rig.core.resetting(rig.session) == 0
    assert rig.look_up(keys(0)) == PENDING, "the tier below still has it"


def test_a_reader_keeps_its_blocks_during_a_reset() -> None:
    """B4.13: the reset waits for leases; their slots are not reused meanwhile."""
    rig = Rig()
    rig.store(keys(*range(16)))
    lease = run_to_end(rig.core.lookup(rig.session, keys(*range(16)), LookupSpec(lease_seconds=60), now=0)).lease
    slots = lease.slots(range(16), 0)
    assert rig.core.reset(rig.session) == 16
    assert lease.statuses() == HIT * 16
    assert rig.store(keys(50)) == b"\x04", "no room"
    assert lease.slots(range(16), 0) == slots
    rig.core.release(rig.session, lease.id)
    assert rig.core.resetting(rig.session) == 0
    assert rig.store(keys(50)) == b"\x01", "granted"


def test_polling_a_reset_does_not_reset_again() -> None:
    """B4.13: blocks that others stored meanwhile stay."""
    rig = Rig()
    rig.store(keys(0))
    lease = run_to_end(rig.core.lookup(rig.session, keys(0), LookupSpec(lease_seconds=60), now=0)).lease
    assert rig.core.reset(rig.session) == 1
    rig.store(keys(7))
    assert rig.core.reset(rig.session) == 1
    rig.core.release(rig.session, lease.id)
    assert rig.look_up(keys(7)) == HIT


def test_requests_end_or_continue_after_a_reset() -> None:
    """B3.19: a finished request ends when its blocks are done.

    An active one stores from the start.
    """
    near = ModelTier("near", 1 << 20)
    rig = Rig(near)
    for request_id in ("done", "goes on"):
        info = RequestInfo(request_id, rig.session.namespace.id, kv_transfer_params={"do_remote_decode": True})
        rig.core.begin_request(rig.session, info)
    stores = [
        run_to_end(
            rig.core.prepare_store(rig.session, keys(number), StoreSpec(request_id=request_id, lease_seconds=60), now=0)
        )
        for number, request_id in ((0, "done"), (1, "goes on"), (2, "done"))
    ]
    written, under_way, in_flight = (store.store_id for store in stores)
    run_to_end(rig.core.complete_store(rig.session, written))
    rig.core.finish_request(rig.session, "done")
    assert rig.core.reset(rig.session) == 3
    run_to_end(rig.core.complete_store(rig.session, under_way))
    run_to_end(rig.core.complete_store(rig.session, in_flight))
    assert near.finished == [], "a block of it is being cascaded"
    rig.finish_jobs()
    assert near.finished == ["done"]
    assert rig.core.resetting(rig.session) == 0
    again = run_to_end(
        rig.core.prepare_store(rig.session, keys(1), StoreSpec(request_id="goes on", lease_seconds=60), now=0)
    )
    assert again.statuses == GRANTED
    run_to_end(rig.core.complete_store(rig.session, again.store_id))
    rig.core.finish_request(rig.session, "goes on")
    rig.finish_jobs()
    assert near.finished == ["done", "goes on"]


def test_other_namespaces_are_left_alone() -> None:
    """B3.19: a reset drops only blocks of its namespace."""
    rig = Rig()
    rig.store(keys(0))
    mine, rig.session = (
        rig.session,
        rig.core.open_session(
            b"b",
            "other",
            None,
            type(rig.session.namespace)(b"z" * 32, 1, (4096,)),  # type: ignore[arg-type]
        ),
    )
    rig.store(keys(0))
    rig.core.reset(mine)
    assert rig.look_up(keys(0)) == HIT


def test_a_full_tier_evicts_the_blocks_of_a_retired_namespace_first() -> None:
    """B3.19: they stay until the tier needs room; then they go before older and unused blocks."""
    near = ModelTier("near", 4 * 4096)
    rig = Rig(near, extents=2)
    other = rig.open("other", dataclasses.replace(SPEC, id=NamespaceId(b"o" * 32)))
    old, rig.session = rig.session, other
    rig.store_in_all_tiers(keys(0, 1))
    rig.session = old
    rig.store_in_all_tiers(keys(2, 3))
    assert rig.core.reset(old, retire=True) == 0
    assert rig.core.stats().tiers[1].blocks == 4
    rig.session = other
    for number in (4, 5):
        rig.store_in_all_tiers(keys(number))
    catalog = rig.core._tier_jobs.secondaries[0].catalog
    assert dict(catalog.counts()) == {other.namespace.id: 4}
    rig.store_in_all_tiers(keys(6))
    assert dict(catalog.counts()) == {other.namespace.id: 4}, "then the policy decides again"


def test_a_retired_block_that_is_read_is_not_evicted() -> None:
    """B3.19: an engine that still uses the namespace reads it; the next retired block goes."""
    rig = Rig(ModelTier("near", 2 * 4096), extents=2)
    rig.store_in_all_tiers(keys(0, 1))
    rig.core.reset(rig.session, retire=True)
    run_to_end(rig.core.lookup(rig.session, keys(1), LookupSpec(lease_seconds=60), now=0))
    (load,) = rig.core.take_commands()
    assert isinstance(load, LoadFromTier)
    rig.session = rig.open("other", dataclasses.replace(SPEC, id=NamespaceId(b"o" * 32)))
    rig.store(keys(2))
    catalog = rig.core._tier_jobs.secondaries[0].catalog
    assert catalog.get(SPEC.id, keys(1)[0]) is not None
    assert catalog.get(SPEC.id, keys(0)[0]) is None


def test_a_block_that_was_read_during_a_reset_is_missed_as_reset() -> None:
    """Its miss was explained as never stored."""
    rig = Rig()
    rig.store(keys(0))
    lease = run_to_end(rig.core.lookup(rig.session, keys(0), LookupSpec(lease_seconds=60), now=0)).lease
    assert rig.core.reset(rig.session) == 1
    rig.core.release(rig.session, lease.id)
    assert rig.core.resetting(rig.session) == 0
    run_to_end(rig.core.lookup(rig.session, keys(0), LookupSpec(request_id="r", lease_seconds=60), now=0))
    assert rig.core.stats().misses_by_reason == {MissReason.RESET: 1}
