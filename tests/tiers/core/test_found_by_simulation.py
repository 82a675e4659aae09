"""Regressions: defects of the core that `make simulate` found."""

from core_rig import Rig, keys
from simulation import EXTENT, ModelTier

from kvtier.tiers.core.commands import StoreInTier
from kvtier.tiers.core.manager import TierManager
from kvtier.tiers.core.settings import TierSettings
from kvtier.tiers.types import MissReason


def test_a_block_that_was_read_during_a_reset_is_missed_as_reset() -> None:
    """Seed 10073: its miss was explained as never stored."""
    rig = Rig()
    rig.store(keys(0))
    lease = rig.core.lookup(rig.session, keys(0), prefix=True, request_id="", expires_at=60).lease
    assert lease is not None
    assert rig.core.reset(rig.session) == 1
    rig.core.release(rig.session, lease.id)
    assert rig.core.resetting(rig.session) == 0
    rig.core.lookup(rig.session, keys(0), prefix=True, request_id="r", expires_at=60)
    assert rig.core.stats().misses_by_reason == {MissReason.RESET: 1}


def test_a_later_admitted_block_can_be_evicted() -> None:
    """Seed 3: a block admitted at its second use was in no eviction queue."""
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
