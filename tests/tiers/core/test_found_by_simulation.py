"""Regressions: defects of the core that `make simulate` found."""

from core_rig import Rig, keys, ready_blocks
from harness.operations import run_to_end
from simulation import EXTENT, ModelTier

from kvtier.tiers.base import NamespaceId
from kvtier.tiers.core.call_specs import LookupSpec
from kvtier.tiers.core.commands import ContinueWork, StoreInTier
from kvtier.tiers.core.manager import TierManager
from kvtier.tiers.core.settings import TierSettings
from kvtier.tiers.types import MissReason, NamespaceSpec


def test_a_block_that_was_read_during_a_reset_is_missed_as_reset() -> None:
    """Seed 10073: its miss was explained as never stored."""
    rig = Rig()
    rig.store(keys(0))
    lease = run_to_end(rig.core.lookup(rig.session, keys(0), LookupSpec(lease_seconds=60), now=0)).lease
    assert rig.core.reset(rig.session) == 1
    rig.core.release(rig.session, lease.id)
    assert rig.core.resetting(rig.session) == 0
    run_to_end(rig.core.lookup(rig.session, keys(0), LookupSpec(request_id="r", lease_seconds=60), now=0))
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
        run_to_end(rig.core.lookup(rig.session, keys(number), LookupSpec(request_id="second", lease_seconds=60), now=0))
        (store,) = [command for command in rig.finish_jobs() if isinstance(command, StoreInTier)]
        assert [block.key for block in store.blocks] == keys(number)


def test_spare_room_for_two_block_sizes_stays_within_its_part_of_the_memory() -> None:
    """Seed 2371: one slice evicted the full spare part for each of two size classes."""
    rig = Rig()
    spec = NamespaceSpec(NamespaceId(b"s" * 32), world_size=1, part_bytes=(4096, 8192, 12288))
    rig.core = TierManager(5 * EXTENT, EXTENT, [], settings=TierSettings(spare_part=0.25))
    rig.core.add_memory(0, 5 * EXTENT)
    rig.session = rig.open("engine", spec)
    rig.store(keys(*range(80)))
    for group, count in ((1, 8), (2, 10)):
        rig.store(keys(*range(count), group=group))
    evicted = []
    while any(isinstance(command, ContinueWork) for command in rig.core.take_commands()):
        before = len(ready_blocks(rig.core))
        rig.core.work()
        evicted.append(before - len(ready_blocks(rig.core)))
    assert any(evicted)
    assert max(evicted) <= EXTENT // 4096
