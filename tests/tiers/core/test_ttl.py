"""`ttl`: unused blocks expire from their tier."""

import pytest
from harness.operations import run_to_end
from simulation import ModelTier
from tenants import PAGE, ROOMY, Rig, keys, spec

from kvtier.tiers.core.call_specs import LookupSpec, StoreSpec
from kvtier.tiers.core.settings import CPU_TIER
from kvtier.tiers.types import KeyStatus, MissReason


def why(rig: Rig, number: int) -> MissReason | None:
    """Returns the reason of the miss of a block of alice's."""
    return rig.core._history.reason_for(spec("alice").id, keys([number])[0])


def test_an_unused_block_expires() -> None:
    """From the CPU tier; a use restarts the time. The miss names the reason."""
    rig = Rig(ttl={CPU_TIER: 60})
    rig.store("alice", range(4))
    rig.tick(40)
    rig.look_up("alice", [0])
    rig.tick(61)
    assert rig.visible("alice") == set(keys([0]))
    assert why(rig, 1) is MissReason.EXPIRED
    rig.tick(101)
    assert rig.visible("alice") == set()
    stats = rig.core.stats().tiers[0]
    assert (stats.expired, stats.evictions, stats.used_bytes) == (4, 0, 0)


def test_each_tier_has_its_own_ttl() -> None:
    """An expired block of a secondary tier is removed there."""
    near, far = ModelTier("near", ROOMY), ModelTier("far", ROOMY)
    rig = Rig(tiers=[near, far], ttl={CPU_TIER: 5, "near": 10})
    rig.store("alice", range(4))
    rig.tick(6)
    assert (len(rig.visible("alice")), len(near.blocks), len(far.blocks)) == (0, 4, 4)
    rig.tick(11)
    assert (len(near.blocks), len(far.blocks)) == (0, 4)
    assert rig.core.stats().tiers[1].expired == 4
    assert rig.look_up("alice", range(4)) == 4


def test_a_promotion_is_a_use() -> None:
    """Of the tier that had the block."""
    near = ModelTier("near", ROOMY)
    rig = Rig(tiers=[near], ttl={CPU_TIER: 5, "near": 60})
    rig.store("alice", range(2))
    rig.tick(50)
    assert rig.look_up("alice", [0]) == 1
    rig.tick(70)
    assert {key for _, key in near.blocks} == set(keys([0]))


def test_a_hit_in_the_cpu_tier_counts_in_other_tiers() -> None:
    """A block that is hit in memory does not expire on disk; an unused one does."""
    near = ModelTier("near", ROOMY)
    rig = Rig(tiers=[near], ttl={"near": 60})
    rig.store("alice", range(2))
    for now in range(10, 200, 10):
        rig.look_up("alice", [0])
        rig.tick(now)
    assert {key for _, key in near.blocks} == set(keys([0]))
    assert rig.visible("alice") == set(keys(range(2)))
    for now in range(200, 300, 10):
        rig.tick(now)
    assert near.blocks == {}


def test_leased_and_retained_blocks_do_not_expire() -> None:
    """A leased block is in use until the lease ends, a retained block until its time."""
    rig = Rig(ttl={CPU_TIER: 60})
    rig.store("alice", range(4))
    rig.look_up("alice", [3], retain_for=100)
    held = run_to_end(rig.core.lookup(rig.session(spec("alice")), keys([0]), LookupSpec(lease_seconds=1e9), now=0))
    rig.tick(70)
    assert rig.visible("alice") == set(keys([0, 3]))
    rig.core.release(rig.session(spec("alice")), held.lease.id)
    rig.tick(131)
    assert rig.visible("alice") == set()


def test_blocks_of_running_jobs_do_not_expire() -> None:
    """A block that is being written to a tier, or read from it, is in use."""
    near = ModelTier("near", ROOMY)
    rig = Rig(tiers=[near], ttl={CPU_TIER: 60, "near": 60})
    session = rig.session(spec("alice"))
    answer = run_to_end(rig.core.prepare_store(session, keys([0]), StoreSpec(lease_seconds=1e9), now=0))
    run_to_end(rig.core.complete_store(session, answer.store_id))
    rig.core.tick(61)
    rig.core.tick(122)
    rig.work()
    assert (len(near.blocks), rig.visible("alice")) == (1, set(keys([0])))
    rig.core.reset(session)
    found = run_to_end(rig.core.lookup(session, keys([0]), LookupSpec(lease_seconds=1e9), now=0))
    assert found.lease is not None
    rig.core.tick(190)
    rig.core.tick(260)
    rig.work()
    assert found.statuses() == bytes([KeyStatus.HIT])
    assert len(near.blocks) == 1


@pytest.mark.parametrize("start", [0.0, 1e6])
def test_a_restart_restarts_the_ttl(start: float) -> None:
    """The last use is not stored; the clock at the start does not matter."""
    near = ModelTier("near", ROOMY)
    Rig(tiers=[near], ttl={"near": 60}).store("alice", range(4))
    rig = Rig(tiers=[near], ttl={"near": 60}, now=start)
    rig.tick(start + 59)
    assert len(near.blocks) == 4
    rig.tick(start + 62)
    assert near.blocks == {}


def test_a_jumping_clock_does_no_harm() -> None:
    """Backward jumps have no effect; after a forward jump all blocks expire, and the tier works."""
    near = ModelTier("near", 64 * PAGE)
    rig = Rig(tiers=[near], ttl={CPU_TIER: 60, "near": 60}, now=1000)
    rig.store("alice", range(16))
    rig.tick(1)
    assert len(rig.visible("alice")) == len(near.blocks) == 16
    rig.tick(1e9)
    assert len(rig.visible("alice")) == len(near.blocks) == 0
    rig.store("alice", range(16))
    rig.tick(1e9 + 1)
    assert len(rig.visible("alice")) == len(near.blocks) == 16


def test_the_work_of_a_tick_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole tier that expires at once does not block the loop."""
    monkeypatch.setattr("kvtier.tiers.eviction.queues.MAX_AT_ONCE", 10)
    rig = Rig(ttl={CPU_TIER: 60})
    rig.store("alice", range(16))
    rig.store("alice", range(100, 120), retain_for=60)
    rig.tick(61)
    assert len(rig.visible("alice")) == 26
    assert rig.core._cpu_tier.queues.stats()[0].retained_bytes == 10 * PAGE
    for now in range(62, 130):
        rig.tick(now)
    assert rig.visible("alice") == set()
