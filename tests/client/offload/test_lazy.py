"""Lazy mode: blocks are stored shortly before the engine evicts them."""

from __future__ import annotations

import pytest
from stand_ins import FULL, STATE, WINDOW, FakePool, RecordingServer, Request

from kvtier.client.offload import (
    CacheGeometry,
    CacheGroup,
    FreeBlock,
    LookupId,
    OffloadCore,
    OffloadMode,
    OffloadOptions,
    PrefixHit,
    SaveJob,
    ScheduledRequest,
)


def _core(pool: FakePool, batched_tokens: int = 4, held: float = 1.0, world_size: int = 1) -> OffloadCore:
    """Returns a core that looks two blocks ahead for each four batched tokens."""
    options = OffloadOptions(OffloadMode.LAZY, max_held_fraction=held, batched_tokens=batched_tokens)
    return OffloadCore(CacheGeometry((FULL,), 4, 4), world_size, options, pool, RecordingServer())


def _free(*numbers: int) -> list[FreeBlock]:
    return [FreeBlock(number, 0, b"k%d" % number) for number in numbers]


def _step(core: OffloadCore, now: float = 0.0) -> list[int]:
    """Returns the blocks that a step saves, all of which are stored at once."""
    core.plan_saves((), now)
    saves = core.take_plan(0.0).saves
    core.saves_ended({job.job_id: 1 for job in saves}, {}, now)
    return [block for job in saves for block in job.block_ids]


@pytest.mark.parametrize(
    ("groups", "target"),
    [
        ((FULL,), 2 * 4),
        ((FULL, WINDOW), 2 * (4 + 3)),
        ((FULL, CacheGroup(1, 4, 8)), 2 * (4 + 4)),
        ((FULL, CacheGroup(1, 8, 7), STATE), 2 * (4 + 2 + 2)),
    ],
)
def test_the_lookahead_is_two_steps(groups: tuple[CacheGroup, ...], target: int) -> None:
    """B4.7: cdiv(batched tokens, block), cdiv(window, block) + 1, and 2 for states; times two."""
    pool = FakePool()
    core = OffloadCore(
        CacheGeometry(groups, 8, 4), 1, OffloadOptions(OffloadMode.LAZY, batched_tokens=16), pool, RecordingServer()
    )
    pool.free(*_free(*range(1, 60)))
    assert len(_step(core)) == target


def test_blocks_are_stored_from_the_eviction_end() -> None:
    """B4.7: the next two first; blocks without a key, or stored ones, count and are not stored."""
    pool = FakePool()
    core = _core(pool)
    pool.free(*_free(5, 3), FreeBlock(8, 0, None), *_free(4))
    assert _step(core) == [5, 3]
    assert _step(core) == []
    pool.hold([5, 3])  # the engine allocates them
    assert _step(core) == [4]
    assert _step(core) == []


def test_a_block_with_other_content_is_another_block() -> None:
    """B4.7: a block counts as stored only with the content that was stored."""
    pool = FakePool()
    core = _core(pool)
    pool.free(*_free(5))
    assert _step(core) == [5]
    pool.free(FreeBlock(5, 0, b"other"))
    assert _step(core) == [5]


def test_blocks_freed_at_the_eviction_end_are_stored_soon() -> None:
    """B4.7: each scan starts at the eviction end, also behind the last one."""
    pool = FakePool()
    core = _core(pool)
    pool.free(*_free(5))
    assert _step(core) == [5]
    pool.free(*_free(6, 7))
    assert _step(core) == [6]
    pool.queue = [FreeBlock(9, 0, b"k9"), *pool.queue]
    pool.refs[9] = 0
    assert [block for _ in range(20) for block in _step(core)] == [9]


def test_only_blocks_of_the_next_steps_are_stored() -> None:
    """B4.7: others may be used again before their eviction, so an idle engine waits."""
    pool = FakePool()
    core = _core(pool)
    pool.free(*_free(*range(1, 60)))
    assert _step(core) == [1, 2]
    for now in range(50):
        assert _step(core, float(now)) == []
    assert [block.block_id for block in pool.queue[:3]] == [1, 2, 3], "the eviction order stays the same"
    pool.hold([1])  # the engine allocates a block
    assert _step(core, 50.0) == [3]


def test_blocks_that_are_being_stored_count() -> None:
    """B4.7: while their saves run, no blocks are stored that are further from their eviction."""
    pool = FakePool()
    core = _core(pool)
    pool.free(*_free(*range(1, 60)))
    for _ in range(3):
        core.plan_saves((), 0.0)
    assert [job.block_ids for job in core.take_plan(0.0).saves] == [[1, 2]]


def test_stored_blocks_keep_their_eviction_order() -> None:
    """B4.9: oldest first; a store does not make a block's eviction earlier or later."""
    pool = FakePool()
    core = _core(pool, batched_tokens=24)
    for first in (1, 4, 7):
        pool.free(*_free(first, first + 1, first + 2))
        assert _step(core) == [first, first + 1, first + 2]
        assert [block.block_id for block in pool.queue] == list(range(1, first + 3))


def test_blocks_that_leave_from_the_middle_are_replaced() -> None:
    """B4.7: after a prefix hit removed blocks, some steps later others are stored."""
    pool = FakePool()
    core = _core(pool, batched_tokens=16)
    pool.free(*_free(*range(1, 60)))
    assert _step(core) == list(range(1, 9))
    pool.hold([2, 3, 4])
    assert [block for _ in range(20) for block in _step(core)] == [9, 10, 11]


def test_held_blocks_are_limited() -> None:
    """B4.6: saves in flight hold at most their share of the blocks."""
    pool = FakePool(10)
    core = _core(pool, batched_tokens=100, held=0.3)
    pool.free(*_free(1, 2, 3, 4, 5))
    core.plan_saves((), 0.0)
    (job,) = core.take_plan(0.0).saves
    assert job.block_ids == [1, 2, 3]
    core.plan_saves((), 0.0)
    assert not core.take_plan(0.0).saves


def test_stores_in_a_full_server_back_off() -> None:
    """B3.5: blocks that were not stored are offered again later, as long as they are free."""
    pool = FakePool()
    core = _core(pool)
    pool.free(*_free(5))
    core.plan_saves((), 0.0)
    (job,) = core.take_plan(0.0).saves
    (ended,) = core.saves_ended({job.job_id: 1}, {job.job_id: {0}}, 0.0)
    assert ended.not_stored == {0}
    pool.free(*_free(5))
    assert _step(core, 1.0) == []
    assert _step(core, 60.0) == [5]


def test_stored_blocks_count_as_stored_for_a_limited_time() -> None:
    """B4.15: the server may evict it; a block freed minutes later is offered again."""
    pool = FakePool()
    core = _core(pool)
    pool.free(*_free(5))
    assert _step(core) == [5]
    for now, offered in ((50.0, []), (100.0, []), (200.0, [5]), (201.0, [])):
        pool.queue.clear()
        assert _step(core, now) == []
        pool.free(*_free(5))
        assert _step(core, now) == offered, now


def test_lazy_mode_finds_no_block_in_flight() -> None:
    """B5.8: a block that is being stored is held, so it is not in the free queue."""
    pool = FakePool()
    core = _core(pool, world_size=2)
    pool.free(*_free(5, 6))
    core.plan_saves((), 0.0)
    (job,) = core.take_plan(0.0).saves
    assert (job.request_id, job.block_ids, pool.queue) == ("", [5, 6], [])
    core._saves._in_flight.clear()
    core.plan_saves((), 0.0)
    assert not core.take_plan(0.0).saves
    assert core.pending


def test_only_request_level_storage_is_eager() -> None:
    """B1.1, B4.7: its readers must not wait for evictions; other requests are lazy."""
    core = _core(FakePool())
    for name, request_level in (("r", False), ("w", True)):
        core.arrived(Request(2, name, may_load=False, request_level=request_level), 0, 0.0)
        core.allocated(name, [[1, 2]], 0)
    core.plan_saves([ScheduledRequest("r", 8, lambda: [[1, 2]]), ScheduledRequest("w", 8, lambda: [[3, 4]])], 0.0)
    assert core.take_plan(0.0).saves == [SaveJob(1, "server's w", [b"0.0", b"1.0"], [0, 0], [3, 4])]


def test_after_a_reset_nothing_counts_as_stored() -> None:
    """B4.13: the server is empty, so free blocks are stored again."""
    pool = FakePool()
    core = _core(pool)
    pool.free(*_free(5))
    assert _step(core) == [5]
    pool.free(*_free(5))
    assert core.reset()
    assert _step(core) == []
    core.emptied()
    assert _step(core) == [5]


def test_loaded_blocks_count_as_stored() -> None:
    """B4.7: loaded blocks are skipped; those of a failed load are stored."""
    for failed, saved in (([], []), (["r"], [1, 2])):
        pool = FakePool()
        core = _core(pool)
        core.arrived(Request(2), 0, 0.0)
        core.lookup_ended(LookupId(1), PrefixHit(8, {0: {0: (9, 0), 1: (9, 1)}}), 0.0)
        assert core.match("r", 0, 0.0) == 8
        core.allocated("r", [[1, 2, 3]], 8)
        core.loads_ended(["r"], failed)
        pool.free(FreeBlock(1, 0, b"0.0"), FreeBlock(2, 0, b"1.0"))
        core.take_plan(0.0)
        assert _step(core) == saved
