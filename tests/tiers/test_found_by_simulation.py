"""What `make simulate` found in the core, event by event."""

from test_core import Rig, keys

from kvtier.tiers.history import MissReason


def test_a_block_that_was_read_during_a_reset_is_remembered_as_reset() -> None:
    """Seed 10073: it went when its reader let go, and was then said never to have been stored."""
    rig = Rig()
    rig.store(keys(0))
    lease = rig.core.lookup(rig.session, keys(0), prefix=True, request_id="", expires_at=60).lease
    assert lease is not None
    assert rig.core.reset(rig.session) == 1
    rig.core.release(rig.session, lease.id)
    assert rig.core.resetting(rig.session) == 0
    rig.core.lookup(rig.session, keys(0), prefix=True, request_id="r", expires_at=60)
    assert rig.core.stats().misses_by_reason == {MissReason.RESET: 1}
