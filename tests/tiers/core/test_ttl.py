"""`ttl`: what is not used for so long goes from its tier."""

import pytest
from simulation import ModelTier
from tenants import PAGE, ROOMY, Rig, keys, spec

from kvtier.tiers.core.settings import CPU_TIER
from kvtier.tiers.types import KeyStatus, MissReason


def why(rig: Rig, number: int) -> MissReason | None:
    """Returns why a block of alice's is gone."""
    return rig.core._history.reason_for(spec("alice").id, keys([number])[0])


def test_a_block_that_is_not_used_goes() -> None:
    """From the CPU tier; a use begins the time anew. The miss says why."""
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


def test_each_tier_has_a_ttl_of_its_own() -> None:
    """What goes from a tier below is removed there."""
    near, far = ModelTier("near", ROOMY), ModelTier("far", ROOMY)
    rig = Rig(tiers=[near, far], ttl={CPU_TIER: 5, "near": 10})
    rig.store("alice", range(4))
    rig.tick(6)
    assert (len(rig.visible("alice")), len(near.blocks), len(far.blocks)) == (0, 4, 4)
    rig.tick(11)
    assert (len(near.blocks), len(far.blocks)) == (0, 4)
    assert rig.core.stats().tiers[1].expired == 4
    assert rig.look_up("alice", range(4)) == 4


def test_reading_back_is_a_use() -> None:
    """Of the tier that it was read from."""
    near = ModelTier("near", ROOMY)
    rig = Rig(tiers=[near], ttl={CPU_TIER: 5, "near": 60})
    rig.store("alice", range(2))
    rig.tick(50)
    assert rig.look_up("alice", [0]) == 1
    rig.tick(70)
    assert {key for _, key in near.blocks} == set(keys([0]))


def test_what_the_cpu_tier_serves_is_used_below_as_well() -> None:
    """A block that every request hits in memory is not lost on disk for it; one that merely lies there is."""
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


def test_what_is_in_use_does_not_expire() -> None:
    """What a lease pins is used until it ends; what is retained, until its time is over."""
    rig = Rig(ttl={CPU_TIER: 60})
    rig.store("alice", range(4))
    rig.look_up("alice", [3], retain_until=100)
    held = rig.core.lookup(rig.session(spec("alice")), keys([0]), prefix=True, request_id="", expires_at=1e9)
    assert held.lease is not None
    rig.tick(70)
    assert rig.visible("alice") == set(keys([0, 3]))
    rig.core.release(rig.session(spec("alice")), held.lease.id)
    rig.tick(131)
    assert rig.visible("alice") == set()


def test_what_is_on_its_way_does_not_expire() -> None:
    """A block that is being written to a tier, or read from it, is in use."""
    near = ModelTier("near", ROOMY)
    rig = Rig(tiers=[near], ttl={CPU_TIER: 60, "near": 60})
    session = rig.session(spec("alice"))
    answer = rig.core.prepare_store(session, keys([0]), request_id="", expires_at=1e9)
    assert answer.store_id is not None
    rig.core.complete_store(session, answer.store_id)
    rig.core.tick(61)
    rig.core.tick(122)
    rig.work()
    assert (len(near.blocks), rig.visible("alice")) == (1, set(keys([0])))
    rig.core.reset(session)
    found = rig.core.lookup(session, keys([0]), prefix=True, request_id="", expires_at=1e9)
    assert found.lease is not None
    rig.core.tick(190)
    rig.core.tick(260)
    rig.work()
    assert found.statuses() == bytes([KeyStatus.HIT])
    assert len(near.blocks) == 1


@pytest.mark.parametrize("start", [0.0, 1e6])
def test_a_restart_begins_the_count_anew(start: float) -> None:
    """Nobody knows how long ago a block was used; whatever the clock says at the start."""
    near = ModelTier("near", ROOMY)
    Rig(tiers=[near], ttl={"near": 60}).store("alice", range(4))
    rig = Rig(tiers=[near], ttl={"near": 60}, now=start)
    rig.tick(start + 59)
    assert len(near.blocks) == 4
    rig.tick(start + 62)
    assert near.blocks == {}


def test_a_clock_that_jumps_harms_nothing() -> None:
    """Backwards it stands still; forwards all of it expires, and the tier goes on."""
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


def test_a_tick_does_a_bounded_amount_of_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop is not held up by a whole tier that expires at once."""
    monkeypatch.setattr("kvtier.tiers.eviction.queues.MAX_AT_ONCE", 10)
    rig = Rig(ttl={CPU_TIER: 60})
    rig.store("alice", range(16))
    rig.store("alice", range(100, 120), retain_until=60)
    rig.tick(61)
    assert len(rig.visible("alice")) == 26
    assert rig.core._cpu_tier.queues.stats()[0].retained_bytes == 10 * PAGE
    for now in range(62, 130):
        rig.tick(now)
    assert rig.visible("alice") == set()
