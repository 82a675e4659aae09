"""Blocks held for a peer at a request's end: stored with the keys of the hold, and none twice."""

from __future__ import annotations

import pytest
from stand_ins import FULL, FakePool, RecordingServer, Request

from kvtier.client.offload import (
    BlockTables,
    CacheGeometry,
    EndedSave,
    FreeBlock,
    OffloadCore,
    OffloadMode,
    OffloadOptions,
    ScheduledRequest,
)

TABLES = [[1, 2, 3, 4, 5]]
TAIL = b"tail"


def held(*positions: int, tail: int | None = None) -> list[FreeBlock]:
    """Returns these blocks of the table with their content keys, and one with another key."""
    blocks = [FreeBlock(TABLES[0][position], 0, b"%d.0" % position) for position in positions]
    return blocks + ([FreeBlock(TABLES[0][tail], 0, TAIL)] if tail is not None else [])


class Engine:
    def __init__(self, mode: OffloadMode = OffloadMode.EAGER, fraction: float = 1.0) -> None:
        self.pool, self.server = FakePool(), RecordingServer()
        options = OffloadOptions(mode, max_held_fraction=fraction, batched_tokens=16)
        self.core = OffloadCore(CacheGeometry((FULL,), 4, 4), 1, options, self.pool, self.server)

    def start(self, request_id: str = "r", *, request_level: bool = False) -> None:
        self.core.arrived(Request(4, request_id, may_load=False, request_level=request_level), 0, 0.0)
        self.core.allocated(request_id, TABLES, 0)

    def save(
        self, tokens: int = 0, request_id: str = "r", *, tables: BlockTables = TABLES, now: float = 0.0
    ) -> dict[int, list[tuple[int, bytes]]]:
        """Returns the blocks that a step saves, with their keys, by job."""
        computed = [ScheduledRequest(request_id, tokens, lambda: tables)] if tokens else []
        self.core.plan_saves(computed, now)
        jobs = self.core.take_plan(now).saves
        return {job.job_id: list(zip(job.block_ids, job.keys, strict=True)) for job in jobs}

    def finish(self, tokens: int, blocks: list[FreeBlock], request_id: str = "r") -> dict[int, list[tuple[int, bytes]]]:
        """Ends a request; returns the blocks that are saved then."""
        self.core.finished(request_id, TABLES, tokens, 0.0, blocks)
        return self.save()

    def stored(self, *jobs: int, failed: tuple[int, ...] = ()) -> list[EndedSave]:
        """All workers have ended these jobs; blocks at the ``failed`` indices were not stored."""
        return self.core.saves_ended(dict.fromkeys(jobs, 1), dict.fromkeys(jobs, failed), 0.0)


def test_blocks_stored_before_are_saved_again_for_the_peer() -> None:
    """B2.17 B4.15: the server may have evicted them, and a hold with a hole is of little use."""
    engine = Engine()
    engine.start()
    engine.stored(*engine.save(8))
    saves = engine.finish(17, held(0, 1, 2, 3, tail=4))
    assert list(saves.values()) == [[(3, b"2.0"), (4, b"3.0")], [(1, b"0.0"), (2, b"1.0"), (5, TAIL)]]
    engine.stored(*saves)
    assert (engine.server.ended, engine.core.pending) == (["r"], False)


def test_blocks_that_were_not_stored_are_stored_now() -> None:
    """B2.17 B3.5: even above the limit, because the pulling peer waits for all held blocks."""
    engine = Engine(fraction=0.02)
    engine.start()
    engine.stored(*engine.save(8), failed=(0,))
    engine.start("other")
    engine.save(8, "other", tables=[[11, 12]])
    saves = engine.finish(14, held(0, 1, 2, tail=3))
    assert list(saves.values()) == [[(1, b"0.0"), (2, b"1.0"), (3, b"2.0"), (4, TAIL)]]


@pytest.mark.parametrize("mode", OffloadMode)
def test_all_held_blocks_are_stored_if_none_was_offered(mode: OffloadMode) -> None:
    """B2.17 B4.7: in lazy mode too, because the peer does not wait for an eviction."""
    engine = Engine(mode)
    engine.start()
    saves = engine.finish(0 if mode is OffloadMode.EAGER else 14, held(0, 1, 2, tail=3))
    assert list(saves.values()) == [[(1, b"0.0"), (2, b"1.0"), (3, b"2.0"), (4, TAIL)]]


@pytest.mark.parametrize("mode", OffloadMode)
def test_blocks_stored_for_a_peer_are_held_until_then(mode: OffloadMode) -> None:
    """B5.3: by their own reference, which is released; they are not put back as free blocks are."""
    engine = Engine(mode)
    engine.start()
    (job,) = engine.finish(0, held(0, 1, tail=2))
    assert engine.pool.refs[1:4] == [2, 2, 2]
    engine.pool.release([1, 2, 3])
    engine.pool.released.clear()
    (ended,) = engine.stored(job)
    assert not ended.was_free
    assert (engine.pool.refs[1:4], engine.pool.released) == ([0, 0, 0], [3, 2, 1])
    assert not engine.core.pending


def test_a_block_in_flight_with_the_same_key_is_not_stored_twice() -> None:
    """B5.2 B5.4: both requests that offered it learn that it was not stored."""
    engine = Engine(OffloadMode.LAZY)
    engine.start("whole", request_level=True)
    engine.start()
    (job,) = engine.save(8, "whole")
    saves = engine.finish(10, held(0, 1, tail=2))
    assert list(saves.values()) == [[(3, TAIL)]]
    engine.stored(*saves)
    assert engine.pool.refs[1:4] == [2, 2, 1]
    engine.stored(job, failed=(1,))
    assert list(engine.save(8, "whole", now=9.0).values()) == [[(2, b"1.0")]]


@pytest.mark.parametrize("first", ["content", TAIL])
def test_a_block_in_flight_with_another_key_is_stored_with_this_one(first: str | bytes) -> None:
    """B2.6 B5.4: it is held until both jobs have ended; each result counts for its key."""
    engine = Engine()
    engine.start("other")
    engine.start()
    (content,) = engine.save(8, "other")
    (tail,) = saves = engine.finish(6, held(0, tail=1))
    assert saves[tail] == [(2, TAIL)]
    for job in (content, tail) if first == "content" else (tail, content):
        assert engine.pool.refs[2] > 1
        engine.stored(job, failed=(1,) if job == content else ())
    assert engine.pool.refs[2] == 1
    assert list(engine.save(8, "other", now=9.0).values()) == [[(2, b"1.0")]]


def test_a_block_with_unconfirmed_tokens_is_stored_with_the_key_of_the_hold() -> None:
    """B2.6 B4.6: it was offered as full, but the request ended inside the block."""
    engine = Engine()
    engine.start()
    saves = engine.save(8)
    assert list(saves.values()) == [[(1, b"0.0"), (2, b"1.0")]]
    assert list(engine.finish(6, held(0, tail=1)).values()) == [[(2, TAIL)]]


@pytest.mark.parametrize("emptying", [False, True])
def test_nothing_is_stored_while_the_server_is_to_forget(emptying: bool) -> None:  # noqa: FBT001 - a table
    """B4.13: otherwise invalidated blocks would be stored again after the reset."""
    engine = Engine()
    engine.start()
    engine.start("other")
    jobs = engine.save(4, "other", tables=[[11]])
    engine.core.reset()
    if emptying:
        engine.stored(*jobs)
        assert engine.server.emptied == 1
    assert engine.finish(14, held(0, 1, 2, tail=3)) == {}
    assert engine.pool.refs[1:5] == [1, 1, 1, 1]
