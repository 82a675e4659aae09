"""A core that gets only the requests that are due plans the same jobs as one that gets all."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from stand_ins import FULL, STATE, WINDOW, FakePool, RecordingServer, Request

from kvtier.client.offload import (
    BlockTables,
    CacheGeometry,
    EndedSave,
    OffloadCore,
    OffloadMode,
    OffloadOptions,
    SaveJob,
    ScheduledRequest,
    StepPlan,
)

DRAFTS = 3
LENGTH = 24
"""Blocks of a request, per group."""
SEEDS = range(25)


@dataclass
class Running(Request):
    """A request whose tokens become final some steps after the step that computes them."""

    computed: int = 0
    final: int = 0
    tables: BlockTables = field(default_factory=list)

    def final_blocks(self, group: object) -> int:
        return self.final // 4


class Pair:
    """Two cores that get the same events. Each has its own block pool."""

    def __init__(self, geometry: CacheGeometry, options: OffloadOptions) -> None:
        self.pools = [FakePool(4096), FakePool(4096)]
        self.cores = [OffloadCore(geometry, 1, options, pool, RecordingServer()) for pool in self.pools]

    def plan(self, step: list[tuple[Running, int, bool]], now: float, usual: int) -> StepPlan:
        """Plans a step of requests, their new tokens, and whether some of these are drafts."""
        new_tokens = {request.request_id: tokens for request, tokens, _ in step}
        plans = []
        due = set(self.cores[1].due(new_tokens, usual))
        for core, names in zip(self.cores, (new_tokens.keys(), due), strict=True):
            core.plan_saves(
                [
                    ScheduledRequest(
                        request.request_id, request.computed + tokens, lambda request=request: request.tables, drafts
                    )
                    for request, tokens, drafts in step
                    if request.request_id in names
                ],  # type: ignore[misc]
                now,
            )
            plans.append(core.take_plan(now))
        assert plans[0] == plans[1]
        return plans[0]

    def tell(self, method: str, *arguments: object) -> list[EndedSave]:
        answers = [getattr(core, method)(*arguments) for core in self.cores]
        assert answers[0] == answers[1]
        return answers[0]  # type: ignore[no-any-return]


class World:
    """Requests that run in random steps, with random events between the steps."""

    def __init__(self, seed: int, *groups: object, mode: OffloadMode = OffloadMode.EAGER) -> None:
        self.random, self.now, self.arrivals = random.Random(seed), 0.0, 0
        held = self.random.choice((0.5, 0.005))
        options = OffloadOptions(mode=mode, batched_tokens=64, max_held_fraction=held, save_lost_after_s=40.0)
        self.groups = groups
        self.pair = Pair(CacheGeometry(groups, 4, 4), options)  # type: ignore[arg-type]
        self.usual = self.random.randint(1, 1 + DRAFTS)
        self.running: list[Running] = []
        self.saves: list[SaveJob] = []
        self.saved = 0
        self.next_block = 1

    def arrive(self) -> None:
        self.arrivals += 1
        request = Running(LENGTH, f"r{self.arrivals}", may_load=False, may_save=self.random.random() < 0.9)
        request.request_level = self.random.random() < 0.3
        self.pair.tell("arrived", request, None, self.now)
        self.start(request)
        self.running.append(request)

    def start(self, request: Running) -> None:
        first = self.next_block % 4000 + 1
        self.next_block += LENGTH
        request.tables = [[(first + position) % 4000 + 1 for position in range(LENGTH)] for _ in range(3)]
        request.computed = 4 * self.random.choice((0, 0, 3))  # as after a hit in the engine's cache
        request.final = max(request.final, request.computed)
        self.pair.tell("allocated", request.request_id, request.tables, 0)

    def step(self) -> None:
        work = []
        for request in self.running:
            left = 4 * LENGTH - request.computed
            tokens = self.random.choice((0, 1, 1, 1, 1, 1, 1 + DRAFTS, 17))
            if 0 < tokens <= left:
                work.append((request, tokens, tokens == 1 + DRAFTS))
        plan = self.pair.plan(work, self.now, self.usual)
        self.saves += plan.saves
        self.saved += sum(len(job.keys) for job in plan.saves)
        for request, tokens, drafts in work:
            request.computed += tokens - (self.random.randrange(DRAFTS + 1) if drafts else 0)
        for request in self.running:
            if self.random.random() < 0.7:  # otherwise the step is still in flight
                request.final = max(request.final, request.computed)

    def event(self) -> None:
        what = self.random.choices(
            ("report", "fail", "arrive", "preempt", "finish", "change", "reset", "flip"), (30, 6, 8, 2, 4, 1, 1, 2)
        )[0]
        if what in {"report", "fail"} and self.saves:
            job = self.saves.pop(self.random.randrange(len(self.saves)))
            missed = {job.job_id: {0}} if what == "fail" else {}
            self.pair.tell("saves_ended", {job.job_id: 1}, missed, self.now)
        elif what == "arrive" and len(self.running) < 8:
            self.arrive()
        elif what == "change":
            self.pair.tell("server_changed")
        elif what == "reset":
            self.pair.tell("reset")
        elif what in {"preempt", "finish", "flip"} and self.running:
            self.change(what, self.random.choice(self.running))
        self.pair.tell("emptied")
        self.now += self.random.choice((0.01, 0.01, 0.5, 3.0))

    def change(self, what: str, request: Running) -> None:
        if what == "preempt":
            self.pair.tell("preempted", [request.request_id])
            self.start(request)
        elif what == "flip":  # the server's tiers voted, or the request's LoRA adapter was replaced
            request.request_level, request.may_save = True, request.may_save and self.random.random() < 0.9
        else:
            self.running.remove(request)
            self.pair.tell("finished", request.request_id, request.tables, request.final, self.now)


@pytest.mark.parametrize("mode", list(OffloadMode))
@pytest.mark.parametrize("groups", [(FULL,), (FULL, WINDOW, STATE)])
def test_requests_that_are_not_due_have_nothing_to_save(groups: tuple[object, ...], mode: OffloadMode) -> None:
    """B4.6 Each block is offered in the same step as by a core that looks at every request."""
    saved = 0
    for seed in SEEDS:
        world = World(seed, *groups, mode=mode)
        for _ in range(150):
            world.step()
            world.event()
        saved += world.saved
    assert saved > 400, "the world is too quiet"
