"""What `make simulate` found in the core, event by event."""

from core_rig import Rig, keys
from simulation import EXTENT, ModelTier

from kvtier.tiers.core.commands import StoreInTier
from kvtier.tiers.core.manager import TierManager
from kvtier.tiers.core.settings import TierSettings
from kvtier.tiers.types import MissReason


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


def test_what_a_tier_admits_later_can_be_evicted_again() -> None:
    """Seed 3: what its second use brought into a tier stood in no line, and so the tier was full for good."""
    rig = Rig()
    tier = ModelTier("disk", 4096)
    rig.core = TierManager(EXTENT, EXTENT, [tier], settings=TierSettings(admission={"disk": "second_use"}))
    rig.core.add_memory(0, EXTENT)
    rig.session = rig.open("engine")
    rig.store(keys(0, 1))
    for number in (0, 1):
        rig.core.lookup(rig.session, keys(number), prefix=True, request_id="second", expires_at=60)
        (store,) = [command for command in rig.finish_jobs() if isinstance(command, StoreInTier)]
        assert [block.key for block in store.blocks] == keys(number)
