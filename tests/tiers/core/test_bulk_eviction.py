"""Eviction on demand: what goes, what stays, how much that was, and that nobody waits for it."""

from collections.abc import Iterable

import pytest
from core_rig import HIT, MISS, Rig, keys
from simulation import EXTENT, ModelTier

from kvtier.tiers.base import NamespaceId
from kvtier.tiers.core import bulk_eviction
from kvtier.tiers.core.bulk_eviction import EvictionRequest, EvictionTask
from kvtier.tiers.core.commands import ContinueWork, RemoveFromTier
from kvtier.tiers.types import MissReason, NamespaceSpec

SLOT = 4096
OTHER = NamespaceSpec(NamespaceId(b"o" * 16), world_size=1, part_bytes=(SLOT,))
CPU, BELOW = 0, 1


def run(rig: Rig, wanted: EvictionRequest) -> EvictionTask:
    """Has it done to the end."""
    cleared = rig.core.evict(wanted)
    while not cleared.done:
        rig.core.work()
    return cleared


def figures(cleared: EvictionTask) -> list[tuple[int, int]]:
    """Returns what has gone and what was kept, in blocks, per tier."""
    return [(tier.blocks, tier.kept_blocks) for tier in cleared.tiers]


def there(rig: Rig, names: Iterable[bytes]) -> int:
    """Returns how many of these are in the CPU tier, without using any."""
    return sum(rig.core._cpu_tier.used_at(rig.session.namespace.id, name) is not None for name in names)


def used(rig: Rig) -> list[int]:
    """Returns the bytes in use, per tier."""
    return [tier.used_bytes for tier in rig.core.stats().tiers]


def stocked(*seconds: float, tier: ModelTier | None = None) -> Rig:
    """Returns a core with a block stored at each of these times; they are numbered."""
    rig = Rig(*([tier] if tier else []), extents=4)
    for number, second in enumerate(seconds):
        rig.core.tick(second)
        rig.store(keys(number))
        rig.finish_jobs()
    return rig


def test_all_of_a_tier_goes_and_the_answer_says_how_much() -> None:
    """The CPU tier is emptied, the tier below is left alone, and what went is explained as evicted."""
    rig = stocked(1, 2, 3, tier=ModelTier("near", 1 << 20))
    cleared = run(rig, EvictionRequest([CPU]))
    [cpu] = cleared.tiers
    assert (cpu.blocks, cpu.nbytes, cpu.kept_blocks, cpu.looked_at, cpu.total) == (3, 3 * SLOT, 0, 3, 3)
    assert used(rig) == [0, 3 * SLOT]
    assert rig.core.stats().tiers[0].evictions == 3
    assert there(rig, keys(0, 1, 2)) == 0


def test_a_tier_below_removes_what_has_gone() -> None:
    """Its catalog forgets the blocks at once, and the tier is told to remove them."""
    rig = stocked(1, 2, tier=ModelTier("near", 1 << 20))
    assert figures(run(rig, EvictionRequest([CPU, BELOW]))) == [(2, 0), (2, 0)]
    removed = [command for command in rig.core.take_commands() if isinstance(command, RemoveFromTier)]
    assert sorted(name for command in removed for name in command.keys) == [
        (rig.session.namespace.id, key) for key in keys(0, 1)
    ]
    assert used(rig) == [0, 0]
    assert rig.look_up(keys(0, 1)) == MISS * 2
    assert rig.core.stats().misses_by_reason == {MissReason.EVICTED: 2}


def test_what_is_pinned_stays() -> None:
    """A lease, a store in flight and a job of a tier below keep their blocks; they are counted as kept."""
    rig = stocked(1, 2, 3)
    lease = rig.core.lookup(rig.session, keys(1), prefix=True, request_id="", expires_at=60).lease
    assert lease is not None
    being_written = rig.core.prepare_store(rig.session, keys(9), request_id="", expires_at=60)
    assert being_written.store_id is not None
    [cpu] = run(rig, EvictionRequest([CPU], retained=True)).tiers
    assert (cpu.blocks, cpu.kept_blocks, cpu.kept_nbytes) == (2, 2, 2 * SLOT)
    assert lease.statuses() == HIT
    rig.core.complete_store(rig.session, being_written.store_id)
    assert rig.look_up(keys(9)) == HIT


def test_what_is_on_its_way_to_a_tier_stays_there_and_here() -> None:
    """The block of a job is pinned above and busy below until the job has ended."""
    rig = Rig(ModelTier("near", 1 << 20))
    rig.store(keys(0))
    assert figures(run(rig, EvictionRequest([CPU, BELOW]))) == [(0, 1), (0, 1)]
    rig.finish_jobs()
    assert figures(run(rig, EvictionRequest([CPU, BELOW]))) == [(1, 0), (1, 0)]


def test_what_is_being_loaded_stays() -> None:
    """A promotion that runs keeps its block, here and below, until it has ended."""
    rig = stocked(1, 2, tier=ModelTier("near", 1 << 20))
    run(rig, EvictionRequest([CPU]))
    lease = rig.core.lookup(rig.session, keys(0), prefix=True, request_id="", expires_at=60).lease
    assert lease is not None
    assert figures(run(rig, EvictionRequest([CPU, BELOW]))) == [(0, 1), (1, 1)]
    rig.finish_jobs()
    assert lease.statuses() == HIT


def test_what_is_retained_goes_only_where_that_is_asked_for() -> None:
    """A request's wish is kept unless who runs the server overrules it."""
    rig = Rig()
    answer = rig.core.prepare_store(rig.session, keys(0), request_id="", expires_at=60, retain_until=1000)
    assert answer.store_id is not None
    rig.core.complete_store(rig.session, answer.store_id)
    rig.store(keys(1))
    assert figures(run(rig, EvictionRequest([CPU]))) == [(1, 1)]
    assert figures(run(rig, EvictionRequest([CPU], retained=True))) == [(1, 0)]
    assert [share.retained_bytes for share in rig.core.stats().tiers[0].shares] == [0]


def test_of_one_namespace_or_tenant_only() -> None:
    """Others lose nothing."""
    rig = stocked(1, 2)
    other = rig.open("other", OTHER)
    store = rig.core.prepare_store(other, keys(0, 1, 2), request_id="", expires_at=60)
    assert store.store_id is not None
    rig.core.complete_store(other, store.store_id)
    assert figures(run(rig, EvictionRequest([CPU], namespace=OTHER.id, dry_run=True))) == [(3, 0)]
    assert figures(run(rig, EvictionRequest([CPU], tenant_tag=OTHER.id[:4]))) == [(3, 0)]
    assert figures(run(rig, EvictionRequest([CPU], namespace=OTHER.id))) == [(0, 0)]
    assert there(rig, keys(0, 1)) == 2


def test_a_dry_run_counts_and_changes_nothing() -> None:
    """The same figures as the run itself, before it."""
    rig = stocked(1, 2, 3, tier=ModelTier("near", 1 << 20))
    before = rig.core.stats()
    dry = run(rig, EvictionRequest([CPU, BELOW], max_bytes=2 * SLOT, dry_run=True))
    assert rig.core.stats() == before
    assert run(rig, EvictionRequest([CPU, BELOW], max_bytes=2 * SLOT)).tiers == dry.tiers
    assert figures(dry) == [(2, 0), (2, 0)]


@pytest.mark.parametrize("tier", [CPU, BELOW])
def test_the_least_recently_used_go_first(tier: int) -> None:
    """As few as make up so many bytes; a lookup in the CPU tier counts as a use for the tiers below as well."""
    rig = stocked(10, 20, 30, 40, tier=ModelTier("near", 1 << 20))
    rig.core.tick(50)
    rig.look_up(keys(0))
    rig.core.tick(60)
    cleared = run(rig, EvictionRequest([tier], max_bytes=SLOT + 1))
    assert [(each.blocks, each.nbytes) for each in cleared.tiers] == [(2, 2 * SLOT)]
    held = {key for _, key in _held(rig, tier)}
    assert held == {*keys(0), *keys(3)}


@pytest.mark.parametrize("tier", [CPU, BELOW])
def test_what_was_used_since_stays(tier: int) -> None:
    """Only what was not used for so long goes."""
    rig = stocked(10, 20, 30, 4000, tier=ModelTier("near", 1 << 20))
    rig.core.tick(5000)
    cleared = run(rig, EvictionRequest([tier], unused_since=25))
    assert figures(cleared) == [(2, 0)]
    assert {key for _, key in _held(rig, tier)} == {*keys(2), *keys(3)}


def test_what_cannot_go_is_not_counted_towards_what_is_wanted() -> None:
    """The oldest is pinned: as many bytes go of what is younger."""
    rig = stocked(10, 20, 30)
    assert rig.core.lookup(rig.session, keys(0), prefix=True, request_id="", expires_at=60).lease is not None
    rig.core._cpu_tier.find_or_add(rig.session.namespace, keys(0))[
        0
    ].last_use = 0  # as if it were the oldest all the same
    cleared = run(rig, EvictionRequest([CPU], max_bytes=SLOT))
    assert figures(cleared) == [(1, 1)]
    assert there(rig, keys(1)) == 0


def test_a_use_counts_below_when_the_cpu_tier_has_the_block_no_more() -> None:
    """A tier below remembers by itself when a block of its own was used."""
    rig = stocked(10, 20, tier=ModelTier("near", 1 << 20))
    run(rig, EvictionRequest([CPU]))
    rig.core.tick(50)
    rig.look_up(keys(0))
    rig.finish_jobs()
    run(rig, EvictionRequest([CPU]))
    run(rig, EvictionRequest([BELOW], max_bytes=SLOT))
    assert {key for _, key in _held(rig, BELOW)} == {*keys(0)}


def test_more_than_there_is() -> None:
    """All of it goes, and no more is said to have gone."""
    rig = stocked(1, 2, 3)
    [cpu] = run(rig, EvictionRequest([CPU], max_bytes=1 << 30)).tiers
    assert (cpu.blocks, cpu.nbytes) == (3, 3 * SLOT)
    [cpu] = run(rig, EvictionRequest([CPU], max_bytes=1 << 30)).tiers
    assert (cpu.blocks, cpu.total) == (0, 0)


@pytest.mark.parametrize("tier", [CPU, BELOW])
def test_what_goes_meanwhile_is_not_evicted_again(monkeypatch: pytest.MonkeyPatch, tier: int) -> None:
    """It was there when the walk began, and went for another reason: it is neither counted nor taken off the books twice."""
    monkeypatch.setattr(bulk_eviction, "SLICE", 1)
    rig = stocked(1, 2, 3, tier=ModelTier("near", 1 << 20))
    cleared = rig.core.evict(EvictionRequest([tier]))
    rig.core.work()
    if tier == CPU:
        rig.core._cpu_tier.evict([block for block in rig.core._cpu_tier.ready_blocks() if block.key in keys(0)])
    else:
        rig.core.entries_lost(BELOW, [(rig.session.namespace.id, key) for key in keys(0)])
    while not cleared.done:
        rig.core.work()
    assert figures(cleared) == [(2, 0)]
    assert used(rig)[tier] == 0


def test_what_comes_meanwhile_does_not_go_beyond_what_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """There was less than was wanted when it was counted, and more by the time it goes: no more than was wanted goes."""
    monkeypatch.setattr(bulk_eviction, "SLICE", 1)
    rig = stocked(1, 2, 3)
    cleared = rig.core.evict(EvictionRequest([CPU], max_bytes=4 * SLOT))
    for _ in range(3):  # the first walk
        rig.core.work()
    rig.store(keys(*range(10, 20)))
    while not cleared.done:
        rig.core.work()
    assert cleared.tiers[0].nbytes == 4 * SLOT


def test_what_the_cpu_tier_forgets_meanwhile_does_not_make_more_go_below(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was used in the CPU tier looks unused below as soon as it has left the CPU tier: no more than was wanted goes."""
    monkeypatch.setattr(bulk_eviction, "SLICE", 1)
    rig = stocked(*[1] * 8, tier=ModelTier("near", 1 << 20))
    rig.core.tick(100)
    rig.look_up(keys(4, 5, 6, 7), prefix=False)
    cleared = rig.core.evict(EvictionRequest([BELOW], max_bytes=4 * SLOT))
    for _ in range(8):  # the first walk
        rig.core.work()
    rig.core._cpu_tier.evict(rig.core._cpu_tier.ready_blocks())
    while not cleared.done:
        rig.core.work()
    assert cleared.tiers[0].nbytes == 4 * SLOT


def test_very_much_goes_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Little at a time; what is stored or used meanwhile is none of its business; two wishes wait for each other."""
    monkeypatch.setattr(bulk_eviction, "SLICE", 10)
    rig = Rig(extents=2)
    names = keys(*range(EXTENT // SLOT))
    rig.store(names)
    rig.core.take_commands()
    first, second = rig.core.evict(EvictionRequest([CPU])), rig.core.evict(EvictionRequest([CPU]))
    assert rig.core.take_commands() == [ContinueWork()]
    before, left = used(rig)[0], []
    while not first.done:
        rig.core.work()
        assert before - used(rig)[0] <= 10 * SLOT
        before = used(rig)[0]
        left.append(before)
        if len(left) == 1:
            lease = rig.core.lookup(rig.session, names[:1], prefix=True, request_id="", expires_at=60).lease
            assert lease is not None
            rig.store(keys(900))
    assert len(left) >= len(names) / 10
    assert (first.tiers[0].blocks, first.tiers[0].kept_blocks) == (len(names) - 1, 1)
    assert there(rig, keys(900)) == 1
    assert not second.done
    while ContinueWork() in rig.core.take_commands():
        rig.core.work()
    assert second.done
    assert figures(second) == [(1, 1)]


def test_it_can_be_left_at_what_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who asked goes away: what has not gone stays, and the next wish is heard."""
    monkeypatch.setattr(bulk_eviction, "SLICE", 2)
    rig = stocked(*range(1, 7))
    cleared = rig.core.evict(EvictionRequest([CPU]))
    rig.core.work()
    cleared.cancel()
    assert (cleared.done, cleared.tiers[0].blocks) == (True, 2)
    rig.core.work()
    assert used(rig) == [4 * SLOT]
    assert figures(run(rig, EvictionRequest([CPU]))) == [(4, 0)]


def test_one_that_fails_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is over, counts what has gone and nothing else, and the next wish is heard."""
    monkeypatch.setattr(bulk_eviction, "SLICE", 2)
    rig = stocked(*range(1, 7))
    cleared = rig.core.evict(EvictionRequest([CPU]))
    rig.core.work()
    with monkeypatch.context() as broken:
        broken.setattr(rig.core._cpu_tier, "evict", fail)
        with pytest.raises(RuntimeError):
            rig.core.work()
    assert (cleared.done, type(cleared.error)) == (True, RuntimeError)
    assert (cleared.tiers[0].blocks, cleared.tiers[0].nbytes) == (2, 2 * SLOT)
    rig.core.work()
    assert used(rig) == [4 * SLOT]
    assert figures(run(rig, EvictionRequest([CPU]))) == [(4, 0)]


def fail(_: object) -> None:
    """Stands for what may have a defect."""
    raise RuntimeError("a defect")


def _held(rig: Rig, tier: int) -> list[tuple[bytes, bytes]]:
    if tier == CPU:
        return [block.name for block in rig.core._cpu_tier.ready_blocks()]
    catalog = rig.core._transfers.secondaries[tier - 1].catalog
    return [entry.name for namespace, _ in catalog.counts() for entry in catalog.all_of(namespace)]
