"""`retain_for`: what a request wants to stay does, for a while, as far as there is room for such wishes."""

from simulation import EXTENT, ModelTier
from tenants import PAGE, Rig, keys, spec, tenant

from kvtier.tiers.base import RequestInfo


def test_retained_blocks_stay_through_a_flood_and_go_after_their_time() -> None:
    """Whatever the policy thinks of them; then they are blocks like any other."""
    rig = Rig()
    rig.store("alice", range(16), retain_until=60)
    rig.tick(59)
    rig.store("alice", range(100, 740))
    assert set(keys(range(16))) <= rig.visible("alice")
    rig.tick(61)
    rig.store("alice", range(1000, 1640))
    assert not set(keys(range(16))) & rig.visible("alice")


def test_the_same_holds_in_the_tiers_below() -> None:
    """From the cascade on."""
    rig = Rig(tiers=[ModelTier("disk", 64 * PAGE)])
    rig.store("alice", range(16), retain_until=60)
    rig.store("alice", range(100, 740))
    assert set(keys(range(16))) <= rig.below("alice")
    rig.tick(61)
    rig.store("alice", range(1000, 1640))
    assert not set(keys(range(16))) & rig.below("alice")


def test_what_is_used_can_be_retained_as_well() -> None:
    """A lookup's hits, in every tier that has them; those that are read back too."""
    rig = Rig(tiers=[ModelTier("disk", 64 * PAGE)])
    rig.store("alice", range(8))
    assert rig.look_up("alice", range(8), retain_until=60) == 8
    rig.store("alice", range(100, 740))
    assert set(keys(range(8))) <= rig.visible("alice") & rig.below("alice")


def test_what_is_stored_again_is_retained_though_it_is_present() -> None:
    """In the tiers below as well: the request wants its blocks, whoever wrote them."""
    rig = Rig(tiers=[ModelTier("disk", 64 * PAGE)])
    rig.store("alice", range(8))
    rig.store("alice", range(8), retain_until=60)
    rig.store("alice", range(100, 740))
    assert set(keys(range(8))) <= rig.visible("alice") & rig.below("alice")


def test_what_is_read_back_is_retained_where_it_came_from_too() -> None:
    """A promotion on behalf of a request is a use of both tiers."""
    rig = Rig(tiers=[ModelTier("disk", 64 * PAGE)])
    rig.store("alice", range(8))
    rig.core.reset(rig.session(spec("alice")))
    assert rig.look_up("alice", range(8), retain_until=60) == 8
    rig.store("alice", range(100, 740))
    assert set(keys(range(8))) <= rig.visible("alice") & rig.below("alice")


def test_a_later_time_counts_and_an_earlier_one_does_not() -> None:
    """A wish of one request never takes anything from another's."""
    rig = Rig()
    rig.store("alice", range(8), retain_until=30)
    rig.look_up("alice", range(8), retain_until=60)
    rig.look_up("alice", range(8), retain_until=10)
    rig.look_up("alice", range(8))
    rig.tick(50)
    rig.store("alice", range(100, 740))
    assert set(keys(range(8))) <= rig.visible("alice")


def test_no_more_than_half_of_a_tier_is_retained() -> None:
    """The head of what was asked for; the rest is counted, and said, and lives as long as the policy wants."""
    rig = Rig(tiers=[ModelTier("disk", 32 * PAGE)])
    assert rig.store("alice", range(64), retain_until=60) == 32
    rig.store("alice", range(100, 740))
    assert rig.visible("alice") >= set(keys(range(32)))
    assert rig.below("alice") >= set(keys(range(16)))
    assert not rig.visible("alice") & set(keys(range(32, 64)))
    cpu, disk = rig.core.stats().tiers
    assert [tier.shares[0].retained_bytes for tier in (cpu, disk)] == [32 * PAGE, 16 * PAGE]
    assert (cpu.not_retained, disk.not_retained) == (32, 48)


def test_no_more_than_half_of_a_quota_is_retained() -> None:
    """And by those without one, of what is nobody's: retention never takes a quota from anybody."""
    rig = Rig(tenant("alice", quota=2 * EXTENT))
    assert rig.store("alice", range(32), retain_until=60) == 16
    assert rig.store("bob", range(32), retain_until=60) == 16
    assert rig.store("carol", range(32), retain_until=60) == 32
    rig.store("alice", range(100, 132))
    assert rig.share("alice").used >= 2 * EXTENT


def test_what_goes_makes_room_for_other_wishes() -> None:
    """Time is over, the tier is reset, a store fails: the account is right."""
    rig = Rig()
    rig.store("alice", range(32), retain_until=60)
    rig.tick(60)
    assert rig.store("alice", range(100, 132), retain_until=90) == 0
    rig.core.reset(rig.session(spec("alice")))
    assert rig.share("alice").retained == 0
    session = rig.session(spec("alice"))
    answer = rig.core.prepare_store(session, keys(range(4)), request_id="", expires_at=1e9, retain_until=90)
    assert answer.store_id is not None
    assert rig.share("alice").retained == 4 * PAGE
    rig.core.complete_store(session, answer.store_id, failed=range(4))
    assert rig.share("alice").retained == 0


def test_a_retained_block_is_no_pin() -> None:
    """A reset does not wait for it, nor does the end of its session."""
    rig = Rig()
    rig.store("alice", range(8), retain_until=60)
    session = rig.session(spec("alice"))
    assert rig.core.reset(session) == 0
    rig.core.close_session(session.id)
    assert not rig.visible("alice")


def test_a_request_can_say_it_once_for_all_that_it_does() -> None:
    """The shell asks for how long, call by call."""
    rig = Rig()
    session = rig.session(spec("alice"))
    rig.core.begin_request(session, RequestInfo("r", session.namespace.id, retain_for=30))
    assert rig.core.retention_of(session, "r") == 30
    assert rig.core.retention_of(session, "another") == 0


def test_when_nothing_else_is_left_those_whose_time_is_over_come_back_at_once() -> None:
    """Not a second later: a store finds room."""
    rig = Rig()
    rig.store("alice", range(32), retain_until=60)
    queues = rig.core._cpu_tier.queues
    rig.store("alice", range(100, 132))
    held = rig.core.lookup(
        rig.session(spec("alice")), keys(range(100, 132)), prefix=False, request_id="", expires_at=1e9
    )
    assert held.lease is not None
    queues.now = 61.0
    rig.store("alice", range(200, 208))
    assert set(keys(range(200, 208))) <= rig.visible("alice")


def test_a_clock_that_jumps_harms_nothing() -> None:
    """Backwards it stands still; forwards everything's time is over."""
    rig = Rig(now=1000)
    rig.store("alice", range(16), retain_until=1060)
    rig.tick(10)
    rig.store("alice", range(100, 740))
    assert set(keys(range(16))) <= rig.visible("alice")
    rig.tick(1e9)
    rig.store("alice", range(1000, 1640))
    assert not set(keys(range(16))) & rig.visible("alice")
    assert rig.share("alice").retained == 0
