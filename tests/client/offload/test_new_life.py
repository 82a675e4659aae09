"""Offload core after a restart of the server, which may have lost every block."""

from __future__ import annotations

from stand_ins import FULL, FakePool, RecordingServer, Request

from kvtier.client.offload import (
    CacheGeometry,
    FreeBlock,
    LookupId,
    OffloadCore,
    OffloadMode,
    OffloadOptions,
    PrefixHit,
    ScheduledRequest,
)

TABLES = [[1, 2, 3, 4, 5]]
FOUND = PrefixHit(8, {0: {0: (9, 0), 1: (9, 1)}})
FREE = [FreeBlock(number, 0, b"k%d" % number) for number in (5, 6)]


class Engine:
    """A core, its block pool and its server."""

    def __init__(self, mode: OffloadMode = OffloadMode.EAGER) -> None:
        self.pool, self.server = FakePool(), RecordingServer()
        options = OffloadOptions(mode, batched_tokens=16)
        self.core = OffloadCore(CacheGeometry((FULL,), 4, 4), 1, options, self.pool, self.server)

    def start(self, tokens: int = 0) -> None:
        """Starts a request of four blocks, with ``tokens`` loaded tokens."""
        self.core.arrived(Request(4), 0, 0.0)
        self.core.lookup_ended(LookupId(1), FOUND, 0.0)
        assert self.core.match("r", 0, 0.0) == 8
        self.core.allocated("r", TABLES, tokens)

    def plan(self, now: float = 0.0, tokens: int | None = None) -> dict[int, list[int]]:
        computed = [ScheduledRequest("r", tokens, lambda: TABLES)] if tokens is not None else []
        self.core.plan_saves(computed, now)
        return {job.job_id: job.block_ids for job in self.core.take_plan(now).saves}

    def stored(self, jobs: dict[int, list[int]], now: float = 0.0) -> None:
        self.core.saves_ended(dict.fromkeys(jobs, 1), {}, now)


def test_running_requests_offer_their_blocks_again() -> None:
    """B4.15: the restarted server lacks all blocks before the cursor, loaded ones included."""
    engine = Engine()
    engine.start(8)
    engine.core.loads_ended(["r"], [])
    engine.core.allocated("r", TABLES, 0)
    engine.stored(engine.plan(tokens=16))
    assert engine.plan(tokens=17) == {}
    engine.core.server_changed()
    assert list(engine.plan(tokens=17).values()) == [[1, 2, 3, 4]]


def test_a_save_across_the_restart_does_not_count() -> None:
    """B4.5, B4.15: the old server may have stored it; its blocks are offered again."""
    engine = Engine()
    engine.start()
    jobs = engine.plan(tokens=16)
    engine.core.server_changed()
    assert engine.plan(tokens=17) == {}, "the blocks are being copied"
    engine.stored(jobs, now=1.0)
    assert engine.pool.refs[1:5] == [1, 1, 1, 1]
    again = engine.plan(now=2.0, tokens=17)
    assert list(again.values()) == [[1, 2, 3, 4]]
    engine.stored(again, now=2.0)
    assert engine.plan(now=99.0, tokens=17) == {}


def test_hits_from_before_the_restart_are_looked_up_again() -> None:
    """B4.3: a lease of the old server is not used; its request is looked up again."""
    engine = Engine()
    engine.core.arrived(Request(4), 0, 0.0)
    engine.core.arrived(Request(4, "unanswered"), 0, 0.0)
    engine.core.lookup_ended(LookupId(1), FOUND, 0.0)
    engine.core.server_changed()
    assert engine.server.dropped == [1, 2]
    engine.core.lookup_ended(LookupId(2), FOUND, 0.0)  # a late answer of the old server
    assert [engine.core.match(name, 0, 0.1) for name in ("r", "unanswered")] == [None, None]
    assert [name for _, name, _, _ in engine.server.asked] == ["r", "unanswered"] * 2


def test_a_load_continues_across_the_restart() -> None:
    """B4.4: the workers report whether it was copied; until then its pin stays."""
    engine = Engine()
    engine.start(8)
    assert engine.core.take_plan(0.0).loads
    engine.core.server_changed()
    assert (engine.core.pending, engine.server.dropped) == (True, [])
    engine.core.loads_ended(["r"], ["r"])
    assert (engine.core.pending, engine.server.dropped) == (False, [1])


def test_lazy_mode_stores_all_blocks_again() -> None:
    """B4.7: free blocks are stored again, including a block whose save was in flight."""
    engine = Engine(OffloadMode.LAZY)
    engine.pool.free(*FREE)
    engine.stored(engine.plan())
    engine.pool.free(*FREE)
    assert engine.plan() == {}
    engine.core.server_changed()
    jobs = engine.plan()
    assert list(jobs.values()) == [[5, 6]]
    engine.core.server_changed()
    engine.stored(jobs)
    engine.pool.free(*FREE)
    assert list(engine.plan().values()) == [[5, 6]]


def test_lazy_mode_forgets_blocks_stored_a_minute_before_the_restart() -> None:
    """B4.7: they count as stored for one to two minutes, in two tables."""
    engine = Engine(OffloadMode.LAZY)
    engine.pool.free(*FREE)
    engine.stored(engine.plan())
    engine.pool.free(*FREE)
    assert engine.plan(now=61.0) == {}
    engine.core.server_changed()
    assert list(engine.plan(now=62.0).values()) == [[5, 6]]


def test_lazy_mode_forgets_blocks_loaded_before_the_restart() -> None:
    """B4.7: the restarted server may not have them."""
    engine = Engine(OffloadMode.LAZY)
    engine.start(8)
    engine.core.server_changed()
    engine.core.loads_ended(["r"], [])
    engine.pool.free(FreeBlock(1, 0, b"0.0"), FreeBlock(2, 0, b"1.0"))
    assert list(engine.plan().values()) == [[1, 2]]


def test_a_reset_continues_with_the_restarted_server() -> None:
    """B3.19, B4.13: the restarted server may have restored invalidated blocks from a lower tier."""
    engine = Engine()
    engine.start()
    jobs = engine.plan(tokens=16)
    assert not engine.core.reset()
    engine.core.server_changed()
    assert (engine.plan(tokens=17), engine.server.emptied) == ({}, 0)
    engine.stored(jobs)
    assert engine.server.emptied == 1
    engine.core.emptied()
    assert list(engine.plan(tokens=17).values()) == [[1, 2, 3, 4]]
