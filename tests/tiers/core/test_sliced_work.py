"""Large work in slices, and other calls between them."""

import subprocess
import sys

import pytest
from harness.operations import run_to_end
from simulation import EXTENT

from kvtier.tiers.core import cpu_tier, sliced_work
from kvtier.tiers.core.block import Block
from kvtier.tiers.core.call_specs import LookupSpec, StoreSpec
from kvtier.tiers.core.commands import ContinueWork
from kvtier.tiers.core.manager import TierManager
from kvtier.tiers.core.settings import CPU_TIER, TierSettings
from kvtier.tiers.eviction import queues
from kvtier.tiers.secondary_tier import NamespaceId
from kvtier.tiers.types import MissReason, NamespaceSpec

MANY = 100_000
SLOT = 4096


class Rig:
    """A core with room for many blocks, and one session."""

    def __init__(self, blocks: int, settings: TierSettings | None = None) -> None:
        region = -(-blocks * SLOT // EXTENT) * EXTENT
        self.core = TierManager(region, EXTENT, [], settings=settings)
        self.core.add_memory(0, region)
        spec = NamespaceSpec(NamespaceId(b"n" * 32), world_size=1, part_bytes=(SLOT,))
        self.session = self.core.open_session(b"s", "engine", 0, spec)

    def store(self, keys: list[bytes]) -> bytes:
        answer = run_to_end(
            self.core.prepare_store(self.session, keys, StoreSpec(lease_seconds=60), now=0, slice_keys=len(keys))
        )
        if answer.store_id is not None:
            run_to_end(self.core.complete_store(self.session, answer.store_id, slice_blocks=len(keys)))
        return answer.statuses

    def hits(self, keys: list[bytes]) -> int:
        """Returns the number of hits; the lease is released at once."""
        lease = run_to_end(
            self.core.lookup(self.session, keys, LookupSpec(prefix=False, lease_seconds=60), now=0)
        ).lease
        if lease is None:
            return 0
        self.core.release(self.session, lease.id)
        return lease.statuses().count(1)

    def asked_for_work(self) -> bool:
        return ContinueWork() in self.core.take_commands()

    @property
    def used(self) -> int:
        return self.core.stats().tiers[0].used_bytes // SLOT


def names(first: int, count: int) -> list[bytes]:
    return [b"%08d" % number + bytes(4) for number in range(first, first + count)]


def test_a_large_reset_runs_in_slices() -> None:
    """B4.13: between slices lookups miss.

    Blocks stored meanwhile are found after the last slice.
    """
    rig = Rig(MANY + 1000)
    for first in range(0, MANY, 8192):
        rig.store(names(first, min(8192, MANY - first)))
    being_written = run_to_end(rig.core.prepare_store(rig.session, names(MANY, 10), StoreSpec(lease_seconds=60), now=0))
    before = rig.used
    waited_for = rig.core.reset(rig.session)
    assert rig.used == before - cpu_tier.SLICE + 10, "a slice at once, except blocks that are being written"
    assert waited_for == rig.used
    assert rig.store(names(0, 64)) == b"\x01" * 64, "granted: the old blocks are not found"
    slices = 0
    while rig.asked_for_work():
        assert rig.hits(names(0, 64)) == 0
        assert rig.hits(names(MANY - 64, 64)) == 0
        used = rig.used
        rig.core.work()
        slices += 1
        assert 0 <= used - rig.used <= cpu_tier.SLICE, "at most a slice at a time"
    assert slices == pytest.approx(MANY / cpu_tier.SLICE, rel=0.05)
    assert rig.core.resetting(rig.session) == 10, "the blocks that are being written"
    run_to_end(rig.core.complete_store(rig.session, being_written.store_id))
    assert rig.core.resetting(rig.session) == 0
    assert rig.hits(names(MANY, 10)) == 0, "never published"
    assert rig.hits(names(0, 64)) == 64
    assert rig.used == 64
    assert rig.core.stats().misses_by_reason[MissReason.RESET] >= 128 * slices


def test_between_slices_a_block_is_freed_with_its_last_pin() -> None:
    """B4.13: a block that the reset has not reached is freed once, when its reader is done."""
    rig = Rig(2 * cpu_tier.SLICE)
    rig.store(names(0, 2 * cpu_tier.SLICE))
    lease = run_to_end(rig.core.lookup(rig.session, names(0, 8), LookupSpec(lease_seconds=60), now=0)).lease
    left = rig.core.reset(rig.session)
    assert left == cpu_tier.SLICE
    rig.core.release(rig.session, lease.id)
    assert rig.core.resetting(rig.session) == left - 8
    assert rig.used == left - 8
    while rig.asked_for_work():
        rig.core.work()
    assert rig.used == 0
    assert rig.store(names(0, 2 * cpu_tier.SLICE)).count(1) == 2 * cpu_tier.SLICE, "every slot is free again"


def test_blocks_of_an_unfinished_reset_make_room() -> None:
    """A store between two slices is not refused because of blocks that cannot be found."""
    rig = Rig(4 * cpu_tier.SLICE)
    rig.store(names(0, 4 * cpu_tier.SLICE))
    rig.core.reset(rig.session)
    assert rig.store(names(0, 4 * cpu_tier.SLICE)).count(1) == 4 * cpu_tier.SLICE
    while rig.asked_for_work():
        rig.core.work()
    assert rig.hits(names(0, 4 * cpu_tier.SLICE)) == 4 * cpu_tier.SLICE


def test_pins_of_an_ended_session_are_dropped_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """All its leases end at once; their blocks become evictable soon after."""
    monkeypatch.setattr(sliced_work, "SLICE", 2 * (50 + sliced_work._ENTRY_COST))
    rig = Rig(1000)
    rig.store(names(0, 1000))
    for first in range(0, 1000, 50):
        run_to_end(rig.core.lookup(rig.session, names(first, 50), LookupSpec(lease_seconds=60), now=0))
    other = rig.core.open_session(b"t", "other", 0, rig.session.namespace)
    rig.core.close_session(rig.session.id)
    rig.session = other
    assert rig.core.stats().leases == 0
    assert sum(block.pins for block in rig.core._cpu_tier._index) == 900
    slices = 0
    while rig.asked_for_work():
        rig.core.work()
        slices += 1
    assert slices == 9
    assert rig.store(names(2000, 500)).count(1) == 500


def test_simultaneous_expiries_run_in_slices() -> None:
    """A tick drops a bounded number of blocks; the rest follows before the next tick."""
    rig = Rig(3 * queues.MAX_AT_ONCE, TierSettings(ttl={CPU_TIER: 10.0}))
    rig.store(names(0, 3 * queues.MAX_AT_ONCE))
    full = rig.used
    rig.core.tick(60.0)
    assert rig.used == full - queues.MAX_AT_ONCE
    while rig.asked_for_work():
        rig.core.work()
    assert rig.used == 0


def test_a_failed_slice_does_not_stop_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its exception is raised after the others have run, and its rest is requested once."""
    monkeypatch.setattr(cpu_tier, "SLICE", 100)
    monkeypatch.setattr(sliced_work, "SLICE", 100)
    rig = Rig(2000)
    rig.store(names(0, 2000))
    run_to_end(rig.core.lookup(rig.session, names(0, 1000), LookupSpec(lease_seconds=60), now=0))
    other = rig.core.open_session(b"t", "other", 0, rig.session.namespace)
    rig.core.close_session(rig.session.id)
    rig.session = other
    rig.core.reset(rig.session)
    falling = rig.core._sliced_work.unpins.entries()
    left = sum(entry.left for entry in falling)
    with monkeypatch.context() as broken:
        broken.setattr(cpu_tier.CpuTier, "reset_slice", lambda _: fail())
        assert rig.asked_for_work()
        with pytest.raises(RuntimeError):
            rig.core.work()
        assert sum(entry.left for entry in falling) == left - 100
        broken.setattr(sliced_work.UnpinQueue, "unpin_slice", lambda _: fail())
        assert rig.core.take_commands() == [ContinueWork()]
        with pytest.raises(ExceptionGroup):
            rig.core.work()
    while rig.asked_for_work():
        rig.core.work()
    assert rig.core.resetting(rig.session) == rig.used == 0


def fail() -> bool:
    raise RuntimeError("a defect")


def test_collections_skip_stored_blocks() -> None:
    """A collection over all blocks would block the event loop."""
    script = """
import gc
from kvtier.server.process.gc_tuning import disable_full_gc
disable_full_gc()
walks = []
gc.callbacks.append(lambda phase, info: walks.append(info["generation"]))
kept = [[number] for number in range(300_000)]
print(sorted(set(walks)), gc.get_freeze_count() > 0)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[0, 1] True\n"


def test_a_call_removes_as_many_pins_as_it_leaves() -> None:
    """Else each of 481 releases in one turn would remove a slice of an earlier backlog."""
    tier, done = Rig(1).core._cpu_tier, [0, 0]
    space = NamespaceSpec(NamespaceId(b"n" * 32), world_size=1, part_bytes=(SLOT,))
    queue = sliced_work.UnpinQueue(lambda _: None)

    def remove(blocks: list[Block]) -> None:
        done[len(blocks) == 1] += len(blocks)

    queue.add(space.id, remove, tier.find_or_add(space, names(0, 4 * sliced_work.SLICE)))
    queue.start()
    assert done == [sliced_work.SLICE, 0]
    for _ in range(10):
        queue.add(space.id, remove, tier.find_or_add(space, names(0, 1)))
        queue.start()
    assert done == [sliced_work.SLICE, 10]


def test_tenants_take_turns_in_the_unpin_queue() -> None:
    """Else one that ends many holds in turn would keep the blocks of another one pinned."""
    tenants = [NamespaceSpec(NamespaceId(tag * 32), world_size=1, part_bytes=(SLOT,)) for tag in (b"z", b"a")]
    tier, done = Rig(1).core._cpu_tier, [0, 0]
    queue = sliced_work.UnpinQueue(lambda _: None)

    def end(tenant: int, count: int) -> None:
        def remove(blocks: list[Block]) -> None:
            done[tenant] += len(blocks)

        queue.add(tenants[tenant].id, remove, tier.find_or_add(tenants[tenant], names(0, count)))
        queue.start()

    end(0, 3 * sliced_work.SLICE)
    assert done == [sliced_work.SLICE, 0], "a call pays for its own pins"
    for number in range(1, 4):
        end(1, 3 * sliced_work.SLICE)
        assert done[1] >= number * sliced_work.SLICE
        queue.unpin_slice()
    assert done[0] >= 3 * sliced_work.SLICE - 2 * 16
    while queue:
        queue.unpin_slice()
    assert done == [3 * sliced_work.SLICE, 9 * sliced_work.SLICE]
