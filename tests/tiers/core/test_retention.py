"""`retain_for`: blocks that a request wants to keep for a time, up to a limit."""

import pytest
from harness.operations import run_to_end
from simulation import EXTENT, ModelTier
from tenants import PAGE, Rig, keys, spec, tenant

from kvtier.tiers.base import RequestInfo


def test_retained_blocks_survive_a_flood_until_their_time() -> None:
    """The eviction policy does not matter; then they are ordinary blocks."""
    rig = Rig()
    rig.store("alice", range(16), retain_until=60)
    rig.tick(59)
    rig.store("alice", range(100, 740))
    assert set(keys(range(16))) <= rig.visible("alice")
    rig.tick(61)
    rig.store("alice", range(1000, 1640))
    assert not set(keys(range(16))) & rig.visible("alice")


def test_retained_blocks_stay_in_secondary_tiers() -> None:
    """From the cascade on."""
    rig = Rig(tiers=[ModelTier("disk", 64 * PAGE)])
    rig.store("alice", range(16), retain_until=60)
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
        rig.store("alice", range(8), retain_until=60)
    else:
        assert rig.look_up("alice", range(8), retain_until=60) == 8
    rig.store("alice", range(100, 740))
    assert set(keys(range(8))) <= rig.visible("alice") & rig.below("alice")


def test_the_latest_time_counts() -> None:
    """A request never shortens the retention of another."""
    rig = Rig()
    rig.store("alice", range(8), retain_until=30)
    rig.look_up("alice", range(8), retain_until=60)
    rig.look_up("alice", range(8), retain_until=10)
    rig.look_up("alice", range(8))
    rig.tick(50)
    rig.store("alice", range(100, 740))
    assert set(keys(range(8))) <= rig.visible("alice")


def test_at_most_half_of_a_tier_is_retained() -> None:
    """The head of the blocks is retained; the rest is counted and follows the policy."""
    rig = Rig(tiers=[ModelTier("disk", 32 * PAGE)])
    assert rig.store("alice", range(64), retain_until=60) == 32
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
    assert rig.store("alice", range(32), retain_until=60) == 16
    assert rig.store("bob", range(32), retain_until=60) == 16
    assert rig.store("carol", range(32), retain_until=60) == 32
    rig.store("alice", range(100, 132))
    assert rig.share("alice").used >= 2 * EXTENT


def test_ended_retention_frees_its_budget() -> None:
    """By expiry, by a reset, and by a failed store."""
    rig = Rig()
    rig.store("alice", range(32), retain_until=60)
    rig.tick(60)
    assert rig.store("alice", range(100, 132), retain_until=90) == 0
    rig.core.reset(rig.session(spec("alice")))
    assert rig.share("alice").retained == 0
    session = rig.session(spec("alice"))
    answer = run_to_end(
        rig.core.prepare_store(session, keys(range(4)), request_id="", now=0, lease_seconds=1e9, retain_until=90)
    )
    assert rig.share("alice").retained == 4 * PAGE
    run_to_end(rig.core.complete_store(session, answer.store_id, failed=range(4)))
    assert rig.share("alice").retained == 0


def test_retention_does_not_pin() -> None:
    """A reset does not wait for it, nor does the end of its session."""
    rig = Rig()
    rig.store("alice", range(8), retain_until=60)
    session = rig.session(spec("alice"))
    assert rig.core.reset(session) == 0
    rig.core.close_session(session.id)
    assert not rig.visible("alice")


def test_a_request_sets_its_retention_once() -> None:
    """The service passes it with each call."""
    rig = Rig()
    session = rig.session(spec("alice"))
    rig.core.begin_request(session, RequestInfo("r", session.namespace.id, retain_for=30))
    assert rig.core.retention_of(session, "r") == 30
    assert rig.core.retention_of(session, "another") == 0


def test_expired_retention_makes_room_at_once() -> None:
    """A store finds the room without a tick in between."""
    rig = Rig()
    rig.store("alice", range(32), retain_until=60)
    queues = rig.core._cpu_tier.queues
    rig.store("alice", range(100, 132))
    held = run_to_end(
        rig.core.lookup(
            rig.session(spec("alice")), keys(range(100, 132)), prefix=False, request_id="", now=0, lease_seconds=1e9
        )
    )
    assert held.lease is not None
    queues.now = 61.0
    rig.store("alice", range(200, 208))
    assert set(keys(range(200, 208))) <= rig.visible("alice")


def test_a_jumping_clock_does_no_harm() -> None:
    """Backward jumps have no effect; after a forward jump every retention has ended."""
    rig = Rig(now=1000)
    rig.store("alice", range(16), retain_until=1060)
    rig.tick(10)
    rig.store("alice", range(100, 740))
    assert set(keys(range(16))) <= rig.visible("alice")
    rig.tick(1e9)
    rig.store("alice", range(1000, 1640))
    assert not set(keys(range(16))) & rig.visible("alice")
    assert rig.share("alice").retained == 0
