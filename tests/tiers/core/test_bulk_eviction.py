"""Eviction on demand: which blocks go, the counts, and bounded work per slice."""

from collections.abc import Iterable

import pytest
from core_rig import HIT, MISS, Rig, keys, ready_blocks
from harness.operations import Steps, run_to_end
from simulation import EXTENT, ModelTier

from kvtier.tiers.core import bulk_eviction
from kvtier.tiers.core.bulk_eviction import Eviction, EvictionRequest
from kvtier.tiers.core.call_specs import LookupSpec, StoreSpec
from kvtier.tiers.core.commands import ContinueWork, RemoveFromTier, StoreInTier
from kvtier.tiers.core.manager import TierManager
from kvtier.tiers.core.settings import TierSettings
from kvtier.tiers.secondary_tier import NamespaceId
from kvtier.tiers.types import MissReason, NamespaceSpec

SLOT = 4096
OTHER = NamespaceSpec(NamespaceId(b"o" * 32), world_size=1, part_bytes=(SLOT,))
CPU, BELOW = 0, 1


def run(rig: Rig, wanted: EvictionRequest) -> Eviction:
    eviction = rig.core.evict(wanted)
    run_to_end(eviction.run())
    return eviction


def figures(cleared: Eviction) -> list[tuple[int, int]]:
    """Returns the evicted and the kept blocks per tier."""
    return [(tier.blocks, tier.kept_blocks) for tier in cleared.tiers]


def count_present(rig: Rig, names: Iterable[bytes]) -> int:
    """Returns how many of these are in the CPU tier, without using any."""
    return sum(rig.core._cpu_tier.used_at(rig.session.namespace.id, name) is not None for name in names)


def used(rig: Rig) -> list[int]:
    """Returns the bytes in use, per tier."""
    return [tier.used_bytes for tier in rig.core.stats().tiers]


def stocked(*seconds: float, tier: ModelTier | None = None) -> Rig:
    """Returns a core with a numbered block stored at each of these times."""
    rig = Rig(*([tier] if tier else []), extents=4)
    for number, second in enumerate(seconds):
        rig.core.tick(second)
        rig.store_in_all_tiers(keys(number))
    return rig


def test_a_whole_tier_is_evicted() -> None:
    """Other tiers keep their blocks, the answer has the bytes, and misses say "evicted"."""
    rig = stocked(1, 2, 3, tier=ModelTier("near", 1 << 20))
    cleared = run(rig, EvictionRequest([CPU]))
    [cpu] = cleared.tiers
    assert (cpu.blocks, cpu.nbytes, cpu.kept_blocks, cpu.looked_at, cpu.total) == (3, 3 * SLOT, 0, 3, 3)
    assert used(rig) == [0, 3 * SLOT]
    assert rig.core.stats().tiers[0].evictions == 3
    assert count_present(rig, keys(0, 1, 2)) == 0


def test_a_secondary_tier_removes_evicted_blocks() -> None:
    """Its catalog drops the blocks at once, and the tier is told to remove them."""
    rig = stocked(1, 2, tier=ModelTier("near", 1 << 20))
    assert figures(run(rig, EvictionRequest([CPU, BELOW]))) == [(2, 0), (2, 0)]
    removed = [command for command in rig.core.take_commands() if isinstance(command, RemoveFromTier)]
    assert sorted(name for command in removed for name in command.keys) == [
        (rig.session.namespace.id, key) for key in keys(0, 1)
    ]
    assert used(rig) == [0, 0]
    assert rig.look_up(keys(0, 1)) == MISS * 2
    assert rig.core.stats().misses_by_reason == {MissReason.EVICTED: 2}


def test_pinned_blocks_stay() -> None:
    """Leases, running stores and jobs of a tier keep their blocks; they are counted as kept."""
    rig = stocked(1, 2, 3)
    lease = run_to_end(rig.core.lookup(rig.session, keys(1), LookupSpec(lease_seconds=60), now=0)).lease
    being_written = run_to_end(rig.core.prepare_store(rig.session, keys(9), StoreSpec(lease_seconds=60), now=0))
    [cpu] = run(rig, EvictionRequest([CPU], retained=True)).tiers
    assert (cpu.blocks, cpu.kept_blocks, cpu.kept_nbytes) == (2, 2, 2 * SLOT)
    assert lease.statuses() == HIT
    run_to_end(rig.core.complete_store(rig.session, being_written.store_id))
    assert rig.look_up(keys(9)) == HIT


def test_a_block_of_a_running_cascade_stays_in_both_tiers() -> None:
    """Until the job ends it is pinned in the CPU tier and busy in the other."""
    rig = Rig(ModelTier("near", 1 << 20))
    rig.store(keys(0))
    assert figures(run(rig, EvictionRequest([CPU, BELOW]))) == [(0, 1), (0, 1)]
    rig.finish_jobs()
    assert figures(run(rig, EvictionRequest([CPU, BELOW]))) == [(1, 0), (1, 0)]


def test_a_block_of_a_running_promotion_stays_in_both_tiers() -> None:
    """Until the job ends."""
    rig = stocked(1, 2, tier=ModelTier("near", 1 << 20))
    run(rig, EvictionRequest([CPU]))
    lease = run_to_end(rig.core.lookup(rig.session, keys(0), LookupSpec(lease_seconds=60), now=0)).lease
    assert figures(run(rig, EvictionRequest([CPU, BELOW]))) == [(0, 1), (1, 1)]
    rig.finish_jobs()
    assert lease.statuses() == HIT


def test_retained_blocks_need_an_explicit_flag() -> None:
    """An operator can override the retention of a request."""
    rig = Rig()
    answer = run_to_end(
        rig.core.prepare_store(rig.session, keys(0), StoreSpec(lease_seconds=60, retain_for=1000), now=0)
    )
    run_to_end(rig.core.complete_store(rig.session, answer.store_id))
    rig.store(keys(1))
    assert figures(run(rig, EvictionRequest([CPU]))) == [(1, 1)]
    assert figures(run(rig, EvictionRequest([CPU], retained=True))) == [(1, 0)]
    assert [share.retained_bytes for share in rig.core.stats().tiers[0].shares] == [0]


def test_one_namespace_or_tenant_can_be_selected() -> None:
    """Others keep their blocks."""
    rig = stocked(1, 2)
    other = rig.open("other", OTHER)
    store = run_to_end(rig.core.prepare_store(other, keys(0, 1, 2), StoreSpec(lease_seconds=60), now=0))
    run_to_end(rig.core.complete_store(other, store.store_id))
    assert figures(run(rig, EvictionRequest([CPU], namespace=OTHER.id, dry_run=True))) == [(3, 0)]
    assert figures(run(rig, EvictionRequest([CPU], tenant_tag=OTHER.id[:16]))) == [(3, 0)]
    assert figures(run(rig, EvictionRequest([CPU], namespace=OTHER.id))) == [(0, 0)]
    assert count_present(rig, keys(0, 1)) == 2


@pytest.mark.parametrize("part", [None, 16])
def test_all_namespaces_of_a_tier_or_a_tenant_are_evicted(part: int | None) -> None:
    """The order of the namespaces does not matter."""
    rig = stocked(1, 2)
    for number in range(2):
        spec = NamespaceSpec(NamespaceId(b"o" * 31 + bytes([number])), world_size=1, part_bytes=(SLOT,))
        other = rig.open(f"other {number}", spec)
        store = run_to_end(rig.core.prepare_store(other, keys(0, 1, 2), StoreSpec(lease_seconds=60), now=0))
        run_to_end(rig.core.complete_store(other, store.store_id))
    tag = OTHER.id[:part] if part else None
    assert figures(run(rig, EvictionRequest([CPU], tenant_tag=tag))) == [(6 if part else 8, 0)]


def test_a_dry_run_only_counts() -> None:
    """Its figures equal those of the run itself."""
    rig = stocked(1, 2, 3, tier=ModelTier("near", 1 << 20))
    before = rig.core.stats()
    dry = run(rig, EvictionRequest([CPU, BELOW], max_bytes=2 * SLOT, dry_run=True))
    assert rig.core.stats() == before
    assert run(rig, EvictionRequest([CPU, BELOW], max_bytes=2 * SLOT)).tiers == dry.tiers
    assert figures(dry) == [(2, 0), (2, 0)]


@pytest.mark.parametrize("tier", [CPU, BELOW])
def test_the_least_recently_used_go_first(tier: int) -> None:
    """As few blocks as make up the bytes.

    A hit in the CPU tier counts as a use in other tiers as well.
    """
    rig = stocked(10, 20, 30, 40, tier=ModelTier("near", 1 << 20))
    rig.core.tick(50)
    rig.look_up(keys(0))
    rig.core.tick(60)
    cleared = run(rig, EvictionRequest([tier], max_bytes=SLOT + 1))
    assert [(each.blocks, each.nbytes) for each in cleared.tiers] == [(2, 2 * SLOT)]
    held = {key for _, key in _held(rig, tier)}
    assert held == {*keys(0), *keys(3)}


@pytest.mark.parametrize("tier", [CPU, BELOW])
def test_recently_used_blocks_stay(tier: int) -> None:
    """Only blocks go that were unused for the given time."""
    rig = stocked(10, 20, 30, 4000, tier=ModelTier("near", 1 << 20))
    rig.core.tick(5000)
    cleared = run(rig, EvictionRequest([tier], unused_since=25))
    assert figures(cleared) == [(2, 0)]
    assert {key for _, key in _held(rig, tier)} == {*keys(2), *keys(3)}


def test_pinned_blocks_do_not_count_as_evicted() -> None:
    """The oldest is pinned, so younger blocks make up the bytes."""
    rig = stocked(10, 20, 30)
    assert run_to_end(rig.core.lookup(rig.session, keys(0), LookupSpec(lease_seconds=60), now=0)).lease is not None
    rig.core._cpu_tier.find_or_add(rig.session.namespace, keys(0))[0].last_use = 0  # makes it the oldest
    cleared = run(rig, EvictionRequest([CPU], max_bytes=SLOT))
    assert figures(cleared) == [(1, 1)]
    assert count_present(rig, keys(1)) == 0


def test_secondary_tiers_remember_the_last_use() -> None:
    """Also after the block has left the CPU tier."""
    rig = stocked(10, 20, tier=ModelTier("near", 1 << 20))
    run(rig, EvictionRequest([CPU]))
    rig.core.tick(50)
    rig.look_up(keys(0))
    rig.finish_jobs()
    run(rig, EvictionRequest([CPU]))
    run(rig, EvictionRequest([BELOW], max_bytes=SLOT))
    assert {key for _, key in _held(rig, BELOW)} == {*keys(0)}


def test_more_bytes_than_stored() -> None:
    """All blocks go, and the answer has their bytes only."""
    rig = stocked(1, 2, 3)
    [cpu] = run(rig, EvictionRequest([CPU], max_bytes=1 << 30)).tiers
    assert (cpu.blocks, cpu.nbytes) == (3, 3 * SLOT)
    [cpu] = run(rig, EvictionRequest([CPU], max_bytes=1 << 30)).tiers
    assert (cpu.blocks, cpu.total) == (0, 0)


@pytest.mark.parametrize("tier", [CPU, BELOW])
def test_blocks_that_leave_during_the_walk_are_not_counted(monkeypatch: pytest.MonkeyPatch, tier: int) -> None:
    """A block that left for another reason is subtracted from the used bytes only once."""
    monkeypatch.setattr(bulk_eviction, "SLICE", 1)
    rig = stocked(1, 2, 3, tier=ModelTier("near", 1 << 20))
    cleared = rig.core.evict(EvictionRequest([tier]))
    steps = Steps(cleared.run())
    assert steps.step()
    if tier == CPU:
        rig.core._cpu_tier.evict([block for block in ready_blocks(rig.core) if block.key in keys(0)])
    else:
        rig.core.entries_lost(BELOW, [(rig.session.namespace.id, key) for key in keys(0)])
    steps.finish()
    assert figures(cleared) == [(2, 0)]
    assert used(rig)[tier] == 0


def test_blocks_stored_during_the_walk_do_not_exceed_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Later blocks raise the total above the wanted bytes: no more than wanted goes."""
    monkeypatch.setattr(bulk_eviction, "SLICE", 1)
    rig = stocked(1, 2, 3)
    cleared = rig.core.evict(EvictionRequest([CPU], max_bytes=4 * SLOT))
    steps = Steps(cleared.run())
    assert [steps.step() for _ in range(3)] == [True] * 3  # the first walk
    rig.store(keys(*range(10, 20)))
    steps.finish()
    assert cleared.tiers[0].nbytes == 4 * SLOT


def test_evictions_from_the_cpu_tier_do_not_exceed_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block that leaves the CPU tier looks unused in the other tier; no more than wanted goes."""
    monkeypatch.setattr(bulk_eviction, "SLICE", 1)
    rig = stocked(*[1] * 8, tier=ModelTier("near", 1 << 20))
    rig.core.tick(100)
    rig.look_up(keys(4, 5, 6, 7), prefix=False)
    cleared = rig.core.evict(EvictionRequest([BELOW], max_bytes=4 * SLOT))
    steps = Steps(cleared.run())
    assert [steps.step() for _ in range(8)] == [True] * 8  # the first walk
    rig.core._cpu_tier.evict(ready_blocks(rig.core))
    steps.finish()
    assert cleared.tiers[0].nbytes == 4 * SLOT


def test_a_large_eviction_runs_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """New or used blocks are not affected."""
    monkeypatch.setattr(bulk_eviction, "SLICE", 10)
    rig = Rig(extents=2)
    names = keys(*range(EXTENT // SLOT))
    rig.store(names)
    first = rig.core.evict(EvictionRequest([CPU]))
    steps = Steps(first.run())
    before, left = used(rig)[0], []
    while steps.step():
        assert before - used(rig)[0] <= 10 * SLOT
        before = used(rig)[0]
        left.append(before)
        if len(left) == 1:
            lease = run_to_end(rig.core.lookup(rig.session, names[:1], LookupSpec(lease_seconds=60), now=0)).lease
            assert lease is not None
            rig.store(keys(900))
    assert len(left) >= len(names) / 10
    assert (first.tiers[0].blocks, first.tiers[0].kept_blocks) == (len(names) - 1, 1)
    assert count_present(rig, keys(900)) == 1
    assert figures(run(rig, EvictionRequest([CPU]))) == [(1, 1)]


def test_a_cancelled_eviction_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remaining blocks stay, and the next eviction runs."""
    monkeypatch.setattr(bulk_eviction, "SLICE", 2)
    rig = stocked(*range(1, 7))
    cleared = rig.core.evict(EvictionRequest([CPU]))
    steps = Steps(cleared.run())
    assert steps.step()
    steps.operation.close()
    assert cleared.tiers[0].blocks == 2
    assert used(rig) == [4 * SLOT]
    assert figures(run(rig, EvictionRequest([CPU]))) == [(4, 0)]


def test_a_failed_eviction_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """It counts only evicted blocks, and the next eviction runs."""
    monkeypatch.setattr(bulk_eviction, "SLICE", 2)
    rig = stocked(*range(1, 7))
    cleared = rig.core.evict(EvictionRequest([CPU]))
    steps = Steps(cleared.run())
    assert steps.step()
    with monkeypatch.context() as broken:
        broken.setattr(rig.core._cpu_tier, "evict", fail)
        with pytest.raises(RuntimeError):
            steps.step()
    assert (cleared.tiers[0].blocks, cleared.tiers[0].nbytes) == (2, 2 * SLOT)
    assert used(rig) == [4 * SLOT]
    assert figures(run(rig, EvictionRequest([CPU]))) == [(4, 0)]


def fail(_: object) -> None:
    raise RuntimeError("a defect")


def _held(rig: Rig, tier: int) -> list[tuple[bytes, bytes]]:
    if tier == CPU:
        return [block.name for block in ready_blocks(rig.core)]
    catalog = rig.core._tier_jobs.secondaries[tier - 1].catalog
    return [entry.name for namespace, _ in catalog.counts() for entry in catalog.all_of(namespace)]


def test_a_later_admitted_block_can_be_evicted() -> None:
    """A block admitted at its second use was in no eviction queue."""
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
    """One slice evicted the full spare part for each of two size classes."""
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
