"""Offload core: one event after another."""

from __future__ import annotations

import pytest
from stand_ins import FULL, WINDOW, FakePool, RecordingServer, Request

from kvtier.client.offload import (
    BlockRead,
    CacheGeometry,
    CacheGroup,
    LoadJob,
    LookupId,
    OffloadCore,
    OffloadMode,
    OffloadOptions,
    PrefixHit,
    SaveJob,
    ScheduledRequest,
)

TABLES = [[1, 2, 3, 4, 5]]
FOUND = PrefixHit(12, {0: {0: (9, 0), 1: (9, 1), 2: (9, 2)}}, {0: "cpu", 1: "cpu", 2: "lmdb"})


class Engine:
    """The core with fakes, and one request "r" of four blocks and a token that has arrived."""

    options = OffloadOptions()

    def __init__(self, world_size: int = 1) -> None:
        self.pool, self.server = FakePool(), RecordingServer()
        geometry = CacheGeometry((FULL,), 4, 4)
        self.core = OffloadCore(geometry, world_size, self.options, self.pool, self.server)
        self.request = Request(4)
        self.core.arrived(self.request, 0, 0.0)

    def answer(self, now: float = 0.1) -> None:
        number = self.server.asked[-1][0]
        self.core.lookup_ended(LookupId(number), FOUND, now)

    def save(self, tokens: int, now: float = 0.2) -> list[list[int]]:
        self.core.plan_saves([ScheduledRequest("r", tokens, lambda: TABLES)], now)
        return [job.block_ids for job in self.core.take_plan(0.0).saves]

    def load(self, tokens: int = 12) -> None:
        """Plans the load of the request; the engine waits for it."""
        self.answer()
        assert self.core.match("r", 0, 0.1) == 12
        self.core.allocated("r", TABLES, tokens)


def test_a_lookup_starts_at_the_arrival_and_the_match_waits_for_it() -> None:
    """B4.2, B4.3: 16 of 17 tokens can hit; until the answer the engine must ask again."""
    engine = Engine()
    assert engine.server.asked == [(1, "r", 0, 16)]
    assert engine.core.match("r", 0, 0.1) is None
    engine.answer()
    assert engine.core.match("r", 0, 0.2) == 12
    assert engine.core.match("r", 8, 0.2) == 4
    assert engine.core.match("r", 12, 0.2) == 0
    assert len(engine.server.asked) == 1


class Drafting(Request):
    """A request whose last two full blocks have no key yet."""

    def final_blocks(self, group: CacheGroup) -> int:
        return super().final_blocks(group) - (2 if group.index == 0 else 1)


@pytest.mark.parametrize(("groups", "limit"), [((FULL,), 8), ((WINDOW,), 12), ((FULL, WINDOW), 8)])
def test_blocks_without_a_key_are_not_looked_up(groups: tuple[CacheGroup, ...], limit: int) -> None:
    """B4.6: the group with the fewest keys ends the lookup."""
    server = RecordingServer()
    core = OffloadCore(CacheGeometry(groups, 4, 4), 1, OffloadOptions(), FakePool(), server)
    core.arrived(Drafting(4), 0, 0.0)
    assert server.asked == [(1, "r", 0, limit)]


def test_a_lookup_times_out() -> None:
    """B4.3: the engine computes the request, ignores the late answer and starts no other lookup."""
    engine = Engine()
    assert engine.core.match("r", 0, 1.0) == 0
    assert (engine.server.abandoned, engine.server.dropped) == ([1], [])
    engine.answer()
    assert engine.core.match("r", 0, 1.1) == 0
    assert len(engine.server.asked) == 1


def test_pins_are_dropped_when_they_are_stale() -> None:
    """B4.3: a hit that waited too long, or starts too late, is looked up again."""
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


def test_each_end_of_a_match_drops_its_pin() -> None:
    """B4.3: finish, abort, preemption, and an engine that takes nothing of the hit."""
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
    """B4.4, B4.8: the plan has it, the engine keeps stepping, and the pin ends with it."""
    engine = Engine()
    engine.load()
    assert engine.core.take_plan(0.0).loads == [LoadJob("r", [BlockRead(9, [0, 1, 2], [0, 0, 0], [1, 2, 3])])]
    assert not engine.core.take_plan(0.0).loads
    assert engine.core.sources("r") == {"cpu": 8, "lmdb": 4}
    assert engine.core.pending
    assert not engine.server.dropped
    engine.core.loads_ended(["r"], [])
    assert (engine.core.pending, engine.server.dropped) == (False, [1])
    assert engine.save(16) == [[4]], "loaded blocks are not offered"


def test_the_engine_may_take_fewer_tokens_than_offered() -> None:
    """B4.3: only these are loaded; the others are computed and stored."""
    engine = Engine()
    engine.load(4)
    (job,) = engine.core.take_plan(0.0).loads
    assert [read.block_ids for read in job.reads] == [[1]]
    engine.core.loads_ended(["r"], [])
    assert engine.save(16) == [[2, 3, 4]]


def test_a_load_that_fails_is_computed_and_stored() -> None:
    """B4.15: its blocks may be missing in the store; no second load is tried."""
    engine = Engine()
    engine.load()
    engine.core.loads_ended(["r"], ["r"])
    assert engine.core.match("r", 0, 0.2) == 0
    engine.core.allocated("r", TABLES, 0)
    assert engine.save(16) == [[1, 2, 3, 4]]


def test_the_load_of_an_unknown_request_fails() -> None:
    """The engine waits for every load, so the plan has it, without reads."""
    engine = Engine()
    engine.core.allocated("unknown", TABLES, 8)
    engine.core.allocated("r", TABLES, 8)
    assert engine.core.take_plan(0.0).loads == [LoadJob("unknown"), LoadJob("r")]


def test_all_requests_of_a_step_are_in_one_plan() -> None:
    """B4.4: one plan per step; loads use the engine's request ids, saves the server's."""
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


def test_a_request_aborted_during_its_load_ends_with_the_load() -> None:
    """B4.3, B3.12: workers still write into its blocks: the pin stays until they end."""
    engine = Engine()
    engine.load()
    engine.core.finished("r", TABLES, 12, 0.2)
    assert (engine.server.dropped, engine.server.ended, engine.core.pending) == ([], [], True)
    engine.core.take_plan(0.0)
    engine.core.loads_ended(["r"], [])
    assert (engine.server.dropped, engine.server.ended, engine.core.pending) == ([1], ["r"], False)


def test_the_last_steps_blocks_are_stored_and_then_the_request_ends() -> None:
    """B4.14, B3.12: the server is told after all workers have reported the last store."""
    engine = Engine(world_size=2)
    assert engine.save(8) == [[1, 2]]
    engine.core.finished("r", TABLES, 16, 0.3)
    (last,) = engine.core.take_plan(0.0).saves
    assert last.block_ids == [3, 4]
    engine.core.saves_ended({1: 0b11, last.job_id: 0b01}, {}, 0.4)
    assert (engine.server.ended, engine.core.pending) == ([], True)
    engine.core.saves_ended({last.job_id: 0b10}, {}, 0.5)
    assert (engine.server.ended, engine.core.pending) == (["r"], False)


def test_a_preemption_resets_the_cursors() -> None:
    """B4.12: recomputed blocks are offered, and blocks in flight stay held without a flush."""
    engine = Engine()
    engine.core.allocated("r", TABLES, 0)
    assert engine.save(16) == [[1, 2, 3, 4]]
    engine.pool.release([1, 2, 3, 4])
    engine.core.preempted(["r", "unknown"])
    assert engine.pool.refs[1] == 1
    engine.core.plan_saves([ScheduledRequest("r", 16, lambda: [[5, 6, 7, 8]])], 0.4)
    assert [job.block_ids for job in engine.core.take_plan(0.0).saves] == [[5, 6, 7, 8]]


def test_a_second_match_means_a_preemption() -> None:
    """B4.12: a request resumed in the step of its preemption is matched before the plan has it."""
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


def test_a_preemption_seen_by_match_is_not_applied_again() -> None:
    """B4.12: resumed at once, the request runs when `preempted` is called; the next one counts."""
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
    """B4.13, B5.7: until both have ended, every request is a miss and nothing is saved."""
    engine = Engine(world_size=2)
    assert engine.save(8) == [[1, 2]]
    assert not engine.core.reset()
    assert engine.core.match("r", 0, 0.3) == 0
    engine.core.saves_ended({1: 1}, {}, 0.3)
    assert (engine.server.emptied, engine.pool.refs[1]) == (0, 2)
    engine.core.saves_ended({1: 0b10}, {}, 0.4)
    assert (engine.server.emptied, engine.pool.refs[1]) == (1, 1)
    assert engine.save(12) == []
    engine.core.emptied()
    assert engine.save(12) == [[1, 2, 3]], "B3.19: from its start"
    assert engine.core.match("r", 0, 0.5) is None


def test_a_reset_waits_for_loads_too() -> None:
    """B4.13: a load pins its blocks in the server."""
    engine = Engine()
    engine.load()
    assert not engine.core.reset()
    engine.core.take_plan(0.0)
    engine.core.loads_ended(["r"], [])
    assert engine.server.emptied == 1


def test_request_level_storage_offers_loaded_blocks() -> None:
    """B1.1, B1.6: a load does not advance the cursor of a request that a tier wants completely."""
    engine = Engine()
    engine.request.request_level = True
    engine.load()
    engine.core.loads_ended(["r"], [])
    assert engine.save(16) == [[1, 2, 3, 4]]


def test_each_group_is_offered_separately() -> None:
    """B4.10: each group has its own keys and blocks."""
    pool = FakePool()
    core = OffloadCore(CacheGeometry((FULL, WINDOW), 4, 4), 1, OffloadOptions(), pool, RecordingServer())
    core.arrived(Request(2, may_load=False), 0, 0.0)
    core.plan_saves([ScheduledRequest("r", 8, lambda: [[1, 2], [0, 4]])], 0.1)
    assert core.take_plan(0.0).saves == [SaveJob(1, "server's r", [b"1.1", b"0.0", b"1.0"], [1, 0, 0], [4, 1, 2])]


def test_a_request_without_permissions_neither_loads_nor_saves() -> None:
    """The server is told of its end."""
    engine = Engine()
    engine.core.arrived(Request(4, "r", may_load=False, may_save=False), 0, 0.0)
    assert engine.core.match("r", 0, 0.1) == 0
    assert engine.save(16) == []
    engine.core.finished("r", TABLES, 16, 0.3)
    assert engine.server.ended == ["r"]


class Auditing(Engine):
    """An engine that audits every second hit."""

    options = OffloadOptions(audit_every=2)


def test_one_of_several_hits_is_audited() -> None:
    """The last step of its hit is computed. The lookup of the shorter hit is not counted again."""
    engine = Auditing()
    engine.answer()
    assert [engine.core.match("r", 0, 0.2), engine.core.match("r", 0, 0.2)] == [12, 12]
    engine.core.arrived(Request(4, "s"), 0, 0.3)
    engine.core.lookup_ended(LookupId(2), FOUND, 0.3)
    assert engine.core.match("s", 0, 0.4) is None
    assert engine.server.dropped == [2]
    assert engine.server.asked[-1] == (3, "s", 0, 8)
    engine.core.lookup_ended(LookupId(3), PrefixHit(8, FOUND.items), 0.5)
    assert [engine.core.match("s", 0, 0.5), engine.core.match("s", 4, 0.5)] == [8, 4]


def test_workers_compare_the_blocks_of_an_audited_hit() -> None:
    """Blocks behind the hit are stored as usual."""
    engine = Auditing()
    engine.core.arrived(Request(4, "first"), 0, 0.0)
    engine.core.lookup_ended(LookupId(2), FOUND, 0.1)
    assert engine.core.match("first", 0, 0.1) == 12
    engine.core.lookup_ended(LookupId(1), FOUND, 0.1)
    assert engine.core.match("r", 0, 0.2) is None
    engine.core.lookup_ended(LookupId(3), PrefixHit(8, FOUND.items), 0.3)
    assert engine.core.match("r", 0, 0.3) == 8
    engine.core.allocated("r", TABLES, 8)
    engine.core.take_plan(0.0)
    engine.core.loads_ended(["r"], [])
    engine.core.allocated("r", TABLES, 0)
    engine.core.plan_saves([ScheduledRequest("r", 16, lambda: TABLES)], 0.4)
    (job,) = engine.core.take_plan(0.0).saves
    assert (job.block_ids, job.audits) == ([3, 4], [0])


def test_a_hit_of_one_step_is_audited() -> None:
    engine = Auditing()
    engine.core.arrived(Request(4, "first"), 0, 0.0)
    engine.core.lookup_ended(LookupId(2), FOUND, 0.1)
    engine.core.match("first", 0, 0.1)
    engine.core.lookup_ended(LookupId(1), PrefixHit(4, FOUND.items), 0.1)
    assert engine.core.match("r", 0, 0.2) == 0
    engine.core.allocated("r", TABLES, 0)
    engine.core.plan_saves([ScheduledRequest("r", 8, lambda: TABLES)], 0.4)
    (job,) = engine.core.take_plan(0.0).saves
    assert (job.block_ids, job.audits) == ([1, 2], [0])


@pytest.mark.parametrize("kind", ["lazy", "reader", "off"])
def test_a_request_whose_blocks_are_not_stored_is_not_audited(kind: str) -> None:
    mode = OffloadMode.LAZY if kind == "lazy" else OffloadMode.EAGER
    options = OffloadOptions(mode, batched_tokens=16, audit_every=kind != "off")
    core = OffloadCore(CacheGeometry((FULL,), 4, 4), 1, options, FakePool(), RecordingServer())
    core.arrived(Request(4, may_save=kind != "reader"), 0, 0.0)
    core.lookup_ended(LookupId(1), FOUND, 0.1)
    assert core.match("r", 0, 0.2) == 12
