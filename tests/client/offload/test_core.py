"""The offload core, one event after another."""

from __future__ import annotations

from stand_ins import FULL, WINDOW, References, Request, Wishes

from kvtier.client.offload import (
    BlockRead,
    CacheGeometry,
    LoadJob,
    LookupId,
    OffloadCore,
    OffloadOptions,
    PrefixHit,
    SaveJob,
    ScheduledRequest,
)

TABLES = [[1, 2, 3, 4, 5]]
FOUND = PrefixHit(12, {0: {0: (9, 0), 1: (9, 1), 2: (9, 2)}}, {0: "cpu", 1: "cpu", 2: "lmdb"})


class Engine:
    """The core with its surroundings, and one request "r" of four blocks and a token that has arrived."""

    def __init__(self, world_size: int = 1) -> None:
        self.pool, self.server = References(), Wishes()
        geometry = CacheGeometry((FULL,), 4, 4)
        self.core = OffloadCore(geometry, world_size, OffloadOptions(), self.pool, self.server)
        self.request = Request(4)
        self.core.arrived(self.request, 0, 0.0)

    def answer(self, now: float = 0.1) -> None:
        number = self.server.asked[-1][0]
        self.core.lookup_ended(LookupId(number), FOUND, now)

    def save(self, tokens: int, now: float = 0.2) -> list[list[int]]:
        """Returns the blocks that a step saves."""
        self.core.plan_saves([ScheduledRequest("r", tokens, lambda: TABLES)], now)
        return [job.block_ids for job in self.core.take_plan(0.0).saves]

    def load(self, tokens: int = 12) -> None:
        """Has the request loaded, up to where the engine waits for it."""
        self.answer()
        assert self.core.match("r", 0, 0.1) == 12
        self.core.allocated("r", TABLES, tokens)


def test_a_lookup_begins_when_the_request_arrives_and_is_waited_for() -> None:
    """B4.2, B4.3 Of 17 tokens 16 can be found; until that is known the engine is told to ask again."""
    engine = Engine()
    assert engine.server.asked == [(1, "r", 0, 16)]
    assert engine.core.match("r", 0, 0.1) is None
    engine.answer()
    assert engine.core.match("r", 0, 0.2) == 12
    assert engine.core.match("r", 8, 0.2) == 4
    assert engine.core.match("r", 12, 0.2) == 0
    assert len(engine.server.asked) == 1


def test_a_lookup_that_takes_too_long_is_given_up() -> None:
    """B4.3 The request computes, its late answer is ignored, and it does not ask again."""
    engine = Engine()
    assert engine.core.match("r", 0, 1.0) == 0
    assert (engine.server.given_up, engine.server.dropped) == ([1], [])
    engine.answer()
    assert engine.core.match("r", 0, 1.1) == 0
    assert len(engine.server.asked) == 1


def test_pins_are_dropped_when_they_are_stale() -> None:
    """B4.3 A hit that waited long, or that begins behind what the engine still has, is looked up again."""
    engine = Engine()
    engine.answer()
    assert engine.core.match("r", 0, 10.0) == 12
    assert engine.core.match("r", 0, 11.0) is None
    assert (engine.server.dropped, len(engine.server.asked)) == ([1], 2)
    late = Engine()
    late.core.arrived(Request(4, "s"), 8, 0.0)
    assert late.core.match("s", 4, 0.1) is None
    assert late.server.dropped == [2]
    assert late.server.asked[-1] == (3, "s", 4, 16)


def test_whatever_ends_a_match_drops_its_pin() -> None:
    """B4.3 Finish and abort, preemption, and an engine that takes nothing of the hit."""
    for end in (
        lambda core: core.finished("r", TABLES, 0, 1.0),
        lambda core: core.allocated("r", TABLES, 0),
        lambda core: core.reset(),
    ):
        engine = Engine()
        engine.answer()
        end(engine.core)
        assert engine.server.dropped == [1]


def test_a_load_is_planned_once_and_pinned_until_it_ends() -> None:
    """B4.4, B4.8 The plan has it; the engine keeps stepping; when workers are done the pin goes, and not before."""
    engine = Engine()
    engine.load()
    assert engine.core.take_plan(0.0).loads == [LoadJob("r", [BlockRead(9, [0, 1, 2], [0, 0, 0], [1, 2, 3])])]
    assert not engine.core.take_plan(0.0).loads
    assert engine.core.sources("r") == {"cpu": 8, "lmdb": 4}
    assert engine.core.pending
    assert not engine.server.dropped
    engine.core.loads_ended(["r"], [])
    assert (engine.core.pending, engine.server.dropped) == (False, [1])
    assert engine.save(16) == [[4]], "what came from the server is not offered to it"


def test_the_engine_may_take_fewer_tokens_than_offered() -> None:
    """B4.3 Only those are loaded; the others are computed, and stored."""
    engine = Engine()
    engine.load(4)
    (job,) = engine.core.take_plan(0.0).loads
    assert [read.block_ids for read in job.reads] == [[1]]
    engine.core.loads_ended(["r"], [])
    assert engine.save(16) == [[2, 3, 4]]


def test_a_load_that_fails_is_computed_and_stored() -> None:
    """B4.15 Its blocks are no more in the store for sure than any others, and it is not loaded a second time."""
    engine = Engine()
    engine.load()
    engine.core.loads_ended(["r"], ["r"])
    assert engine.core.match("r", 0, 0.2) == 0
    engine.core.allocated("r", TABLES, 0)
    assert engine.save(16) == [[1, 2, 3, 4]]


def test_a_load_of_what_nobody_knows_is_one_that_fails() -> None:
    """The engine waits for every load, so every one is in the plan: without reads, workers report it as failed."""
    engine = Engine()
    engine.core.allocated("unknown", TABLES, 8)
    engine.core.allocated("r", TABLES, 8)
    assert engine.core.take_plan(0.0).loads == [LoadJob("unknown"), LoadJob("r")]


def test_all_requests_of_a_step_are_in_one_plan() -> None:
    """B4.4 At most one load event and one store event per step: loads by the engine's ids, saves as the server knows them."""
    engine = Engine()
    engine.load()
    for name in ("s", "t"):
        engine.core.arrived(Request(2, name), 0, 0.0)
    engine.core.plan_saves(
        [ScheduledRequest("s", 8, lambda: [[11, 12]]), ScheduledRequest("t", 8, lambda: [[21, 22]])], 0.1
    )
    plan = engine.core.take_plan(0.0)
    assert [job.request_id for job in plan.loads] == ["r"]
    assert [job.request_id for job in plan.saves] == ["server's s", "server's t"]
    assert engine.core.take_plan(0.0) == type(plan)()


def test_a_request_that_ends_while_it_is_loaded_ends_when_the_load_does() -> None:
    """B4.3, B3.12 Workers write into its blocks: the pin stays, and the server hears of the end once."""
    engine = Engine()
    engine.load()
    engine.core.finished("r", TABLES, 12, 0.2)
    assert (engine.server.dropped, engine.server.ended, engine.core.pending) == ([], [], True)
    engine.core.take_plan(0.0)
    engine.core.loads_ended(["r"], [])
    assert (engine.server.dropped, engine.server.ended, engine.core.pending) == ([1], ["r"], False)


def test_the_last_steps_blocks_are_stored_and_then_the_request_ends() -> None:
    """B4.14, B3.12 The server hears of the end after the last store, when all workers have reported it."""
    engine = Engine(world_size=2)
    assert engine.save(8) == [[1, 2]]
    engine.core.finished("r", TABLES, 16, 0.3)
    (last,) = engine.core.take_plan(0.0).saves
    assert last.block_ids == [3, 4]
    engine.core.saves_ended({1: 2, last.job_id: 1}, {}, 0.4)
    assert (engine.server.ended, engine.core.pending) == ([], True)
    engine.core.saves_ended({last.job_id: 1}, {}, 0.5)
    assert (engine.server.ended, engine.core.pending) == (["r"], False)


def test_a_preemption_resets_the_cursors() -> None:
    """B4.12 The recomputed blocks are offered, and blocks in flight stay held: nobody has to flush."""
    engine = Engine()
    engine.core.allocated("r", TABLES, 0)
    assert engine.save(16) == [[1, 2, 3, 4]]
    engine.pool.release([1, 2, 3, 4])
    engine.core.preempted(["r", "unknown"])
    assert engine.pool.refs[1] == 1
    engine.core.plan_saves([ScheduledRequest("r", 16, lambda: [[5, 6, 7, 8]])], 0.4)
    assert [job.block_ids for job in engine.core.take_plan(0.0).saves] == [[5, 6, 7, 8]]


def test_an_engine_that_asks_again_has_preempted() -> None:
    """B4.12 A request that is resumed in the step in which it was preempted is matched before the plan says so."""
    engine = Engine()
    engine.core.allocated("r", TABLES, 0)
    assert engine.save(8) == [[1, 2]]
    assert engine.core.match("r", 0, 0.3) is None
    engine.answer(0.4)
    assert engine.core.match("r", 0, 0.4) == 12
    engine.core.allocated("r", [[5, 6, 7, 8]], 4)
    engine.core.preempted(["r"])
    engine.core.loads_ended(["r"], [])
    engine.core.plan_saves([ScheduledRequest("r", 16, lambda: [[5, 6, 7, 8]])], 0.5)
    assert [job.block_ids for job in engine.core.take_plan(0.0).saves] == [[6, 7, 8]], (
        "from the start, but for the load"
    )


def test_a_preemption_that_was_seen_is_not_applied_again() -> None:
    """B4.12 Resumed at once without a load, the request runs when its preemption is told of; the next one counts again."""
    engine = Engine()
    engine.core.allocated("r", TABLES, 0)
    assert engine.save(8) == [[1, 2]]
    assert engine.core.match("r", 0, 0.3) is None
    engine.answer(0.4)
    engine.core.match("r", 0, 0.4)
    engine.core.allocated("r", [[5, 6, 7, 8]], 0)
    engine.core.preempted(["r"])
    engine.core.plan_saves([ScheduledRequest("r", 8, lambda: [[5, 6, 7, 8]])], 0.5)
    assert [job.block_ids for job in engine.core.take_plan(0.5).saves] == [[5, 6]]
    engine.core.preempted(["r"])
    engine.core.plan_saves([ScheduledRequest("r", 8, lambda: [[9, 10, 11, 12]])], 0.6)
    assert [job.block_ids for job in engine.core.take_plan(0.6).saves] == [[9, 10]]


def test_a_reset_waits_for_transfers_then_for_the_server() -> None:
    """B4.13, B5.7 "Not yet" while copies run, whose blocks stay held; then misses, and no saves, until the server is empty."""
    engine = Engine(world_size=2)
    assert engine.save(8) == [[1, 2]]
    assert not engine.core.reset()
    assert engine.core.match("r", 0, 0.3) == 0
    engine.core.saves_ended({1: 1}, {}, 0.3)
    assert (engine.server.emptied, engine.pool.refs[1]) == (0, 2)
    engine.core.saves_ended({1: 1}, {}, 0.4)
    assert (engine.server.emptied, engine.pool.refs[1]) == (1, 1)
    assert engine.save(12) == []
    engine.core.emptied()
    assert engine.save(12) == [[1, 2, 3]], "B3.19 from its start"
    assert engine.core.match("r", 0, 0.5) is None


def test_a_reset_waits_for_loads_too() -> None:
    """B4.13 What is being read from the server pins it there."""
    engine = Engine()
    engine.load()
    assert not engine.core.reset()
    engine.core.take_plan(0.0)
    engine.core.loads_ended(["r"], [])
    assert engine.server.emptied == 1


def test_whole_requests_offer_what_was_loaded() -> None:
    """B1.1, B1.6 Loading a prefix does not advance the cursor of a request that a tier wants whole."""
    engine = Engine()
    engine.request.request_level = True
    engine.load()
    engine.core.loads_ended(["r"], [])
    assert engine.save(16) == [[1, 2, 3, 4]]


def test_groups_are_offered_each_on_its_own() -> None:
    """B4.10 Each group has its own keys, and its own blocks."""
    pool = References()
    core = OffloadCore(CacheGeometry((FULL, WINDOW), 4, 4), 1, OffloadOptions(), pool, Wishes())
    core.arrived(Request(2, may_load=False), 0, 0.0)
    core.plan_saves([ScheduledRequest("r", 8, lambda: [[1, 2], [0, 4]])], 0.1)
    assert core.take_plan(0.0).saves == [SaveJob(1, "server's r", [b"1.1", b"0.0", b"1.0"], [1, 0, 0], [4, 1, 2])]


def test_who_may_not_does_not() -> None:
    """A request that may neither load nor save does neither, and the server hears of its end."""
    engine = Engine()
    engine.core.arrived(Request(4, "r", may_load=False, may_save=False), 0, 0.0)
    assert engine.core.match("r", 0, 0.1) == 0
    assert engine.save(16) == []
    engine.core.finished("r", TABLES, 16, 0.3)
    assert engine.server.ended == ["r"]
