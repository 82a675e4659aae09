"""Emptying the CPU tier while it is in use."""

from core_rig import GRANTED, HIT, MISS, PENDING, Rig, keys
from simulation import ModelTier

from kvtier.tiers.base import Outcome, RequestInfo
from kvtier.tiers.core.commands import LoadFromTier
from kvtier.tiers.types import MissReason


def test_the_tiers_below_keep_what_they_have() -> None:
    """B3.19: the CPU tier is empty at once where nothing is in use; a tier below serves on."""
    rig = Rig(ModelTier("near", 1 << 20))
    rig.store(keys(0, 1))
    rig.finish_jobs()
    assert rig.core.reset(rig.session) == 0
    assert rig.core.stats().tiers[0].used_bytes == 0
    assert rig.core.stats().tiers[1].blocks == 2
    assert rig.look_up(keys(0, 1)) == PENDING * 2
    rig.finish_jobs()
    assert rig.look_up(keys(0, 1)) == HIT * 2


def test_it_waits_for_jobs_of_the_tiers() -> None:
    """B3.19: what is being written to a tier stays until that is done, and arrives there; lookups miss until then."""
    rig = Rig(ModelTier("near", 1 << 20))
    rig.store(keys(0, 1))
    assert rig.core.reset(rig.session) == 2
    assert rig.look_up(keys(0, 1)) == MISS * 2
    assert rig.core.stats().misses_by_reason[MissReason.RESET] == 2
    rig.finish_jobs()
    assert rig.core.reset(rig.session) == 0
    assert rig.core.stats().tiers[1].blocks == 2
    assert rig.core.stats().tiers[0].used_bytes == 0


def test_what_is_being_written_is_never_published() -> None:
    """B4.13: a store in flight keeps its slots until its writer is done; its late report publishes nothing."""
    rig = Rig(ModelTier("near", 1 << 20))
    before = rig.core.prepare_store(rig.session, keys(0, 1), request_id="", expires_at=60)
    assert before.store_id is not None
    assert rig.core.reset(rig.session) == 2, "not yet"
    after = rig.core.prepare_store(rig.session, keys(0, 1), request_id="", expires_at=60)
    assert after.store_id is not None
    assert not set(before.slots) & set(after.slots), "the writer of before still writes there"
    rig.core.complete_store(rig.session, before.store_id)
    assert rig.core.resetting(rig.session) == 0
    assert rig.finish_jobs() == [], "nothing to cascade"
    assert rig.look_up(keys(0, 1)) == PENDING * 2, "the store of after is on its way"
    rig.core.complete_store(rig.session, after.store_id)
    assert rig.look_up(keys(0, 1)) == HIT * 2


def test_what_is_being_promoted_is_never_published() -> None:
    """B3.19: a promotion that comes in late is ignored; whoever waited for it gets a miss."""
    rig = Rig(ModelTier("near", 1 << 20))
    rig.store(keys(0))
    rig.finish_jobs()
    rig.core.reset(rig.session)
    lease = rig.core.lookup(rig.session, keys(0), prefix=True, request_id="", expires_at=60).lease
    assert lease is not None
    [job] = [command for command in rig.core.take_commands() if isinstance(command, LoadFromTier)]
    assert rig.core.reset(rig.session) == 1
    rig.core.job_finished(job.job_id, [Outcome.DONE])
    assert lease.statuses() == MISS
    assert rig.core.resetting(rig.session) == 0
    assert rig.look_up(keys(0)) == PENDING, "the tier below has it still"


def test_a_reader_keeps_what_it_reads() -> None:
    """B4.13: the reset waits for leases; their slots are given to nobody meanwhile."""
    rig = Rig()
    rig.store(keys(*range(16)))
    lease = rig.core.lookup(rig.session, keys(*range(16)), prefix=True, request_id="", expires_at=60).lease
    assert lease is not None
    slots = lease.slots(range(16), 0)
    assert rig.core.reset(rig.session) == 16
    assert lease.statuses() == HIT * 16
    assert rig.store(keys(50)) == b"\x04", "no room"
    assert lease.slots(range(16), 0) == slots
    rig.core.release(rig.session, lease.id)
    assert rig.core.resetting(rig.session) == 0
    assert rig.store(keys(50)) == b"\x01", "granted"


def test_asking_again_does_not_reset_again() -> None:
    """B4.13: who polls until it is done does not empty what others have stored meanwhile."""
    rig = Rig()
    rig.store(keys(0))
    lease = rig.core.lookup(rig.session, keys(0), prefix=True, request_id="", expires_at=60).lease
    assert lease is not None
    assert rig.core.reset(rig.session) == 1
    rig.store(keys(7))
    assert rig.core.reset(rig.session) == 1
    rig.core.release(rig.session, lease.id)
    assert rig.look_up(keys(7)) == HIT


def test_requests_are_finalised_or_go_on() -> None:
    """B3.19: one that has finished is told to the tiers when its blocks are through; an active one stores from the start."""
    near = ModelTier("near", 1 << 20)
    rig = Rig(near)
    for request_id in ("done", "goes on"):
        info = RequestInfo(request_id, rig.session.namespace.id, kv_transfer_params={"do_remote_decode": True})
        rig.core.begin_request(rig.session, info)
    stores = [
        rig.core.prepare_store(rig.session, keys(number), request_id=request_id, expires_at=60)
        for number, request_id in ((0, "done"), (1, "goes on"), (2, "done"))
    ]
    written, under_way, in_flight = (store.store_id for store in stores)
    assert written is not None
    assert under_way is not None
    assert in_flight is not None
    rig.core.complete_store(rig.session, written)
    rig.core.finish_request(rig.session, "done")
    assert rig.core.reset(rig.session) == 3
    rig.core.complete_store(rig.session, under_way)
    rig.core.complete_store(rig.session, in_flight)
    assert near.finished == [], "a block of it is on its way to the tier"
    rig.finish_jobs()
    assert near.finished == ["done"]
    assert rig.core.resetting(rig.session) == 0
    again = rig.core.prepare_store(rig.session, keys(1), request_id="goes on", expires_at=60)
    assert again.statuses == GRANTED
    assert again.store_id is not None
    rig.core.complete_store(rig.session, again.store_id)
    rig.core.finish_request(rig.session, "goes on")
    rig.finish_jobs()
    assert near.finished == ["done", "goes on"]


def test_other_namespaces_are_left_alone() -> None:
    """B3.19: whoever resets empties what it shares, and nothing else."""
    rig = Rig()
    rig.store(keys(0))
    mine, rig.session = (
        rig.session,
        rig.core.open_session(
            b"b",
            "other",
            None,
            type(rig.session.namespace)(b"z" * 16, 1, (4096,)),  # type: ignore[arg-type]
        ),
    )
    rig.store(keys(0))
    rig.core.reset(mine)
    assert rig.look_up(keys(0)) == HIT
