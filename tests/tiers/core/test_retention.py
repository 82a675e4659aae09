"""`retain_for`: blocks that a request wants to keep for a time, up to a limit."""

import pytest
from core_rig import SPEC
from harness.operations import Steps, run_to_end
from simulation import EXTENT, ModelTier
from tenants import PAGE, Rig, keys, spec, tenant

from kvtier.tiers.core.call_specs import LookupSpec, StoreSpec
from kvtier.tiers.core.commands import StoreInTier
from kvtier.tiers.core.manager import TierManager
from kvtier.tiers.secondary_tier import Outcome, RequestInfo


def test_retained_blocks_survive_a_flood_until_their_time() -> None:
    """The eviction policy does not matter; then they are ordinary blocks."""
    rig = Rig()
    rig.store("alice", range(16), retain_for=60)
    rig.tick(59)
    rig.store("alice", range(100, 740))
    assert set(keys(range(16))) <= rig.visible("alice")
    rig.tick(61)
    rig.store("alice", range(1000, 1640))
    assert not set(keys(range(16))) & rig.visible("alice")


def test_retained_blocks_stay_in_secondary_tiers() -> None:
    """From the cascade on."""
    rig = Rig(tiers=[ModelTier("disk", 64 * PAGE)])
    rig.store("alice", range(16), retain_for=60)
    rig.store("alice", range(100, 740))
    assert set(keys(range(16))) <= rig.below("alice")
    rig.tick(61)
    rig.store("alice", range(1000, 1640))
    assert not set(keys(range(16))) & rig.below("alice")


@pytest.mark.parametrize("use", ["hit", "store of a present block", "promotion"])
def test_used_blocks_are_retained_in_both_tiers(use: str) -> None:
    """In every tier that has them, independent of the request that wrote them."""
    rig = Rig(tiers=[ModelTier("disk", 64 * PAGE)])
    rig.store("alice", range(8))
    if use == "promotion":
        rig.core.reset(rig.session(spec("alice")))
    if use == "store of a present block":
        rig.store("alice", range(8), retain_for=60)
    else:
        assert rig.look_up("alice", range(8), retain_for=60) == 8
    rig.store("alice", range(100, 740))
    assert set(keys(range(8))) <= rig.visible("alice") & rig.below("alice")


def test_the_latest_time_counts() -> None:
    """A request never shortens the retention of another."""
    rig = Rig()
    rig.store("alice", range(8), retain_for=30)
    rig.look_up("alice", range(8), retain_for=60)
    rig.look_up("alice", range(8), retain_for=10)
    rig.look_up("alice", range(8))
    rig.tick(50)
    rig.store("alice", range(100, 740))
    assert set(keys(range(8))) <= rig.visible("alice")


def test_at_most_half_of_a_tier_is_retained() -> None:
    """The head of the blocks is retained; the rest is counted and follows the policy."""
    rig = Rig(tiers=[ModelTier("disk", 32 * PAGE)])
    assert rig.store("alice", range(64), retain_for=60) == 32
    rig.store("alice", range(100, 740))
    assert rig.visible("alice") >= set(keys(range(32)))
    assert rig.below("alice") >= set(keys(range(16)))
    assert not rig.visible("alice") & set(keys(range(32, 64)))
    cpu, disk = rig.core.stats().tiers
    assert [tier.shares[0].retained_bytes for tier in (cpu, disk)] == [32 * PAGE, 16 * PAGE]
    assert (cpu.not_retained, disk.not_retained) == (32, 48)


def test_at_most_half_of_a_quota_is_retained() -> None:
    """Tenants without a quota retain half of the capacity outside quotas."""
    rig = Rig(tenant("alice", quota=2 * EXTENT))
    assert rig.store("alice", range(32), retain_for=60) == 16
    assert rig.store("bob", range(32), retain_for=60) == 16
    assert rig.store("carol", range(32), retain_for=60) == 32
    rig.store("alice", range(100, 132))
    assert rig.share("alice").used >= 2 * EXTENT


def test_ended_retention_frees_its_budget() -> None:
    """By expiry, by a reset, and by a failed store."""
    rig = Rig()
    rig.store("alice", range(32), retain_for=60)
    rig.tick(60)
    assert rig.store("alice", range(100, 132), retain_for=90) == 0
    rig.core.reset(rig.session(spec("alice")))
    assert rig.share("alice").retained == 0
    session = rig.session(spec("alice"))
    answer = run_to_end(
        rig.core.prepare_store(session, keys(range(4)), StoreSpec(lease_seconds=1e9, retain_for=90), now=0)
    )
    assert rig.share("alice").retained == 4 * PAGE
    run_to_end(rig.core.complete_store(session, answer.store_id, failed=range(4)))
    assert rig.share("alice").retained == 0


def test_retention_does_not_pin() -> None:
    """A reset does not wait for it, nor does the end of its session."""
    rig = Rig()
    rig.store("alice", range(8), retain_for=60)
    session = rig.session(spec("alice"))
    assert rig.core.reset(session) == 0
    rig.core.close_session(session.id)
    assert not rig.visible("alice")


def test_a_request_sets_the_retention_of_its_calls() -> None:
    """The retention that a call names comes first."""
    rig = Rig()
    session = rig.session(spec("alice"))
    rig.core.begin_request(session, RequestInfo("r", session.namespace.id, retain_for=30))
    for request_id, own, expected in (("r", 0.0, 47), ("r", 5.0, 22), ("another", 0.0, 0), ("another", 5.0, 22)):
        options = LookupSpec(request_id=request_id, retain_for=own)
        for begin in (rig.core.lookup, rig.core.prefetch, rig.core.prepare_store):
            kind = "preparation" if begin == rig.core.prepare_store else "lookup"
            steps = Steps(begin(session, keys(range(4)), options, now=17), kind)
            assert steps.state.retain_until == expected, (begin, options)


def test_expired_retention_makes_room_at_once() -> None:
    """A store finds the room without a tick in between."""
    rig = Rig()
    rig.store("alice", range(32), retain_for=60)
    queues = rig.core._cpu_tier.queues
    rig.store("alice", range(100, 132))
    held = run_to_end(
        rig.core.lookup(
            rig.session(spec("alice")), keys(range(100, 132)), LookupSpec(prefix=False, lease_seconds=1e9), now=0
        )
    )
    assert held.lease is not None
    queues.now = 61.0
    rig.store("alice", range(200, 208))
    assert set(keys(range(200, 208))) <= rig.visible("alice")


def test_a_jumping_clock_does_no_harm() -> None:
    """Backward jumps have no effect; after a forward jump every retention has ended."""
    rig = Rig(now=1000)
    rig.store("alice", range(16), retain_for=1060)
    rig.tick(10)
    rig.store("alice", range(100, 740))
    assert set(keys(range(16))) <= rig.visible("alice")
    rig.tick(1e9)
    rig.store("alice", range(1000, 1640))
    assert not set(keys(range(16))) & rig.visible("alice")
    assert rig.share("alice").retained == 0


def test_a_repeated_key_is_retained_once() -> None:
    """A budget that was charged twice would never be freed."""
    core = TierManager(EXTENT, EXTENT, [ModelTier("near", 1 << 20)])
    core.add_memory(0, EXTENT)
    session = core.open_session(b"s", "engine", None, SPEC)
    answer = run_to_end(core.prepare_store(session, keys([0]), StoreSpec(lease_seconds=60), now=0))
    run_to_end(core.complete_store(session, answer.store_id))
    for command in core.take_commands():
        if isinstance(command, StoreInTier):
            core.job_finished(command.job_id, [Outcome.DONE])
    lookup = run_to_end(core.lookup(session, keys([0]) * 5, LookupSpec(lease_seconds=60, retain_for=30.0), now=0))
    core.release(session, lookup.lease.id)
    assert [share.retained_bytes for tier in core.stats().tiers for share in tier.shares] == [4096, 4096]
    core.tick(31)
    assert [share.retained_bytes for tier in core.stats().tiers for share in tier.shares] == [0, 0]
