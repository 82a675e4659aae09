"""A seeded world around the offload core: an engine that preempts, aborts and resets, a server that forgets, workers that fail.

After every step: no token was computed from wrong KV, nothing wrong was stored, no block that a transfer uses was given away, the
in-flight set is what is in flight, every job was handed out once. In the end nothing is left.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

from model_engine import NULL, Layout, ModelRequest, Pool, Script, Status, Work
from model_server import CALM, ModelServer, ModelWorker

from kvtier.client.offload import (
    CacheGeometry,
    CacheGroup,
    Computed,
    LoadJob,
    Mode,
    OffloadCore,
    OffloadOptions,
    SaveJob,
)

FULL = CacheGroup(0, 4, None)
GEOMETRIES = (
    CacheGeometry((FULL,), 4, 4),
    CacheGeometry((FULL,), 8, 4),
    CacheGeometry((FULL,), 4, 4, drop_last_block=True),
    CacheGeometry((FULL, CacheGroup(1, 4, 7)), 4, 4),
    CacheGeometry((CacheGroup(0, 4, 5), CacheGroup(1, 8, None)), 8, 4),
    CacheGeometry((FULL, CacheGroup(1, 4, 7), CacheGroup(2, 4, None, is_state=True)), 4, 4),
)
TIMEOUT_S = 2.0
LOST_S = 40.0
STEPS_TO_SETTLE = 5000


class World:
    """One engine's life; `rng` decides everything."""

    def __init__(self, seed: int, mode: Mode | None = None) -> None:
        self.rng = rng = random.Random(seed)
        self.now = 100.0
        self.geometry = rng.choice(GEOMETRIES)
        self.layout, self.script = Layout(self.geometry), Script()
        self.mode = mode or rng.choice((Mode.EAGER, Mode.EAGER, Mode.LAZY))
        self.pipelined = rng.random() < 0.5
        self.budget = rng.choice((6, 16, 64))
        ranks = rng.choice((1, 1, 2, 3))
        block_tokens = max(group.block_tokens for group in self.geometry.groups)
        self.pool = Pool(len(self.geometry.groups) * rng.choice((16, 22, 60)), block_tokens, ranks)
        self.server = ModelServer(rng, self.geometry, self.script, ranks, rng.choice((10, 60, 1000)))
        self.workers = [ModelWorker(rng, rank, self.pool, self.server, LOST_S / 2) for rank in range(ranks)]
        options = OffloadOptions(
            self.mode, TIMEOUT_S, 10.0, rng.choice((0.2, 0.5, 1.0)), LOST_S, batched_tokens=self.budget
        )
        self.core = OffloadCore(self.geometry, ranks, options, self.pool, self.server)
        self.chains = [[rng.randrange(1000, 2000) for _ in range(40)] for _ in range(5)]
        self.requests: dict[str, ModelRequest] = {}
        self.waiting: list[ModelRequest] = []
        self.running: list[ModelRequest] = []
        self.submitted: list[tuple[list[Work], list[LoadJob], list[SaveJob]]] = []
        self.to_process: list[list[Work]] = []
        self.preempted: list[str] = []
        self.arrivals = 0
        self.saves: dict[int, SaveJob] = {}
        """Jobs that the core waits for."""
        self.load_reports: Counter[str] = Counter()
        self.failed_loads: set[str] = set()
        self.job_ids: set[int] = set()
        self.picky = 0.1
        self.takes_all: set[str] = set()
        """Requests that took all that was offered to them: that must be loadable."""
        self.hits: dict[str, int] = {}
        actions: dict[Callable[[], object], float] = {
            self.step: 30,
            self.arrive: 8,
            self.run_worker: 40,
            self.report: 20,
            self.answer_lookup: 25,
            self.abort: 1,
            self.reset: 0.4,
            self.emptied: 4,
            self.evict: 2,
            self.tick: 4,
            self.crash: 0.1,
            self.lose_report: 2,
            self.wipe: 2,
        }
        # No two lives are alike: here the workers are slow, there the engine is.
        self.actions = {action: weight * rng.choice((0.3, 1, 3)) for action, weight in actions.items()}

    # ---- the engine

    def arrive(self) -> None:
        chain = self.rng.choice(self.chains)
        prompt = chain[: self.rng.randint(1, len(chain))] + [
            self.rng.randrange(3) for _ in range(self.rng.randrange(4))
        ]
        self.submit(prompt, self.rng.randint(1, 12), load=self.rng.random() < 0.95, save=self.rng.random() < 0.95)

    def submit(self, prompt: list[int], output: int, *, load: bool = True, save: bool = True) -> ModelRequest:
        self.arrivals += 1
        name, length = f"r{self.arrivals}", len(prompt)
        request = ModelRequest(
            name, self.script, list(prompt), length, length + output, self.geometry.groups, may_load=load, may_save=save
        )
        request.whole = self.rng.random() < 0.1
        self.requests[name] = request
        self.waiting.append(request)
        self.core.arrived(request, self.layout.local_hit(self.pool, request), self.now)
        return request

    def step(self) -> None:
        """One step of the engine: schedule, plan, compute (one step later when pipelined), take in what workers report."""
        works = self.schedule()
        self.core.preempted(self.preempted)
        self.preempted.clear()
        computed = [Computed(w.request.request_id, w.end, lambda w=w: w.request.tables) for w in works]  # type: ignore[misc]
        in_flight = {block for job in self.saves.values() for block in job.block_ids}
        self.core.plan_saves(computed, self.now)
        plan = self.core.take_plan(self.now)
        self.check_plan(plan.loads, plan.saves, in_flight)
        for work in works:
            work.request.computed = work.end
            work.request.placeholders += work.samples + work.drafts
        self.submitted.append((works, plan.loads, plan.saves))
        while len(self.submitted) > self.pipelined:
            self.execute(*self.submitted.pop(0))
        while self.to_process:
            self.process(self.to_process.pop(0))

    def schedule(self) -> list[Work]:
        budget, works = self.budget, []
        preempted = False
        for request in list(self.running):
            if request not in self.running or budget <= 0:
                continue
            todo = request.known + request.placeholders - request.computed
            drafts = self.rng.randrange(3) if todo == 1 and not self.pipelined and budget > 3 else 0
            if request.known + request.placeholders >= request.max_tokens:
                todo = min(todo, request.known + request.placeholders - request.computed)
                drafts = 0
            count = min(todo, budget) + drafts
            if count <= 0 or (request.placeholders and request.known + request.placeholders > request.max_tokens):
                continue
            granted, stall = self.make_room(request, request.computed + count)
            preempted = preempted or (not granted and not stall)
            if granted:
                budget -= count
                works.append(self.work(request, count, drafts))
        for request in list(self.waiting):
            if preempted or budget <= 0 or len(self.running) >= 4 or (admitted := self.admit(request, budget)) is None:
                break
            budget -= sum(work.end - work.start for work in admitted)
            works += admitted
        return works

    def work(self, request: ModelRequest, count: int, drafts: int) -> Work:
        end = request.computed + count
        samples = end - drafts == request.known + request.placeholders
        tables = [list(table) for table in request.tables]
        return Work(request, request.computed, end, drafts, samples, request.preemptions, tables)

    def make_room(self, request: ModelRequest, tokens: int) -> tuple[bool, bool]:
        """Returns whether the request has blocks for `tokens`, and if not whether it may wait for saves."""
        while not self.grow(request, tokens):
            if self.core.frees_pending:
                return False, True
            victim = self.running[-1]
            self.preempt(victim)
            if victim is request:
                return False, False
        self.name_blocks(request, tokens)
        return True, False

    def grow(self, request: ModelRequest, tokens: int) -> bool:
        self.drop_unneeded(request)
        sizes = {g.index: -(-tokens // g.block_tokens) - len(request.tables[g.index]) for g in self.geometry.groups}
        blocks = self.pool.allocate(sum(max(0, size) for size in sizes.values()))
        if blocks is None:
            return False
        for index, size in sizes.items():
            request.tables[index] += [blocks.pop() for _ in range(size)]
        return True

    def drop_unneeded(self, request: ModelRequest) -> None:
        """Frees what has fallen out of a window, as far as the workers have come."""
        for group in self.geometry.groups:
            table, first = request.tables[group.index], self.layout.needed(group, request.executed).start
            for position in range(min(first // group.block_tokens, len(table))):
                if table[position] != NULL:
                    self.pool.release([table[position]])
                    table[position] = NULL

    def name_blocks(self, request: ModelRequest, tokens: int) -> None:
        """Enters the blocks that are full of final tokens into the prefix cache, before they are computed (as vLLM does)."""
        for group in self.geometry.groups:
            for position in range(min(tokens // group.block_tokens, request.final_blocks(group))):
                block = request.tables[group.index][position]
                if block != NULL:
                    self.pool.name(block, group.index, request.key(group, position))

    def admit(self, request: ModelRequest, budget: int) -> list[Work] | None:
        """Tries a waiting request; returns its work, none when it is being looked up or loaded. None: there is no room."""
        local = self.layout.local_hit(self.pool, request) if request.may_load else 0
        if request.computed:  # its load has ended
            local, external = request.computed, 0
        else:
            answer = self.core.match(request.request_id, local, self.now)
            if answer is None:
                return []
            assert answer == 0 or request.may_load
            assert local + answer < request.known, "nothing left to compute"
            external = self.accept(answer)
            (self.takes_all.add if external == answer else self.takes_all.discard)(request.request_id)
        self.hits[request.request_id] = local + external
        count = min(request.known - local - external, budget) if not external else 0
        # Room for all that is known, where it is loaded: nobody who waits with blocks may be stuck for more of them.
        if not request.computed and not self.place(
            request, local, external, request.known if external else local + count
        ):
            return None
        if request.computed and not self.grow(request, request.computed + count):
            return None
        self.waiting.remove(request)
        request.computed = request.executed = local + external
        self.core.allocated(request.request_id, request.tables, external)
        if external:
            request.status = Status.LOADING
            return []
        request.status = Status.RUNNING
        self.running.append(request)
        self.name_blocks(request, request.computed + count)
        return [self.work(request, count, 0)]

    def accept(self, offered: int) -> int:
        """The engine may take less than was offered."""
        step = self.geometry.step_tokens
        return self.rng.randrange(0, offered + 1, step) if offered and self.rng.random() < self.picky else offered

    def place(self, request: ModelRequest, local: int, external: int, tokens: int) -> bool:
        """Builds the block tables: what the engine has, room for what is loaded, room for what is computed."""
        tables: list[list[int]] = []
        shared = []
        for group in self.geometry.groups:
            first = group.first_needed_block(local + external) if local + external else 0
            table = [NULL] * (local // group.block_tokens)
            for position in range(first, local // group.block_tokens):
                block = self.pool.find(request.key(group, position))
                assert block is not None
                table[position] = block
                shared.append(block)
            tables.append(table)
        self.pool.hold(shared)
        new: list[tuple[int, int]] = []
        for group in self.geometry.groups:
            first = group.first_needed_block(local + external) if local + external else 0
            for position in range(len(tables[group.index]), -(-tokens // group.block_tokens)):
                tables[group.index].append(NULL)
                if position >= first:
                    new.append((group.index, position))
        blocks = self.pool.allocate(len(new))
        if blocks is None:
            self.pool.release(shared)
            return False
        for (index, position), block in zip(new, blocks, strict=True):
            tables[index][position] = block
        request.tables = tables
        return True

    def preempt(self, request: ModelRequest) -> None:
        self.running.remove(request)
        self.free(request)
        request.status = Status.WAITING
        request.computed = request.executed = request.placeholders = 0
        request.preemptions += 1
        self.waiting.insert(sum(1 for other in self.waiting if other.computed), request)
        self.preempted.append(request.request_id)

    def free(self, request: ModelRequest) -> None:
        for table in request.tables:
            self.pool.release([block for block in reversed(table) if block != NULL])
        request.tables = []

    def execute(self, works: list[Work], loads: list[LoadJob], saves: list[SaveJob]) -> None:
        for worker in self.workers:
            worker.take(loads, self.now)
        for work in works:
            work.accepted = self.rng.randint(0, work.drafts) if work.samples else 0
            self.layout.compute(self.pool, work)
            if work.request.preemptions == work.preemptions:
                work.request.executed = work.right_end
        for worker in self.workers:
            worker.take(saves, self.now)
        self.to_process.append(works)

    def process(self, works: list[Work]) -> None:
        for work in works:
            request = work.request
            if request.preemptions != work.preemptions or request.status is not Status.RUNNING:
                continue
            request.placeholders -= work.samples + work.drafts
            request.computed -= work.drafts - work.accepted
            if work.samples:
                request.known = max(request.known, work.right_end + 1)
                self.name_blocks(request, min(request.computed - request.placeholders, request.known))
            if request.known >= request.max_tokens:
                self.finish(request)

    def finish(self, request: ModelRequest) -> None:
        """Ends a request, in whatever state; one that is being loaded keeps its blocks until that is over."""
        loading = request.status is Status.LOADING
        request.status = Status.FINISHED
        confirmed = max(0, request.computed - request.placeholders)
        self.core.finished(request.request_id, request.tables, confirmed, self.now)
        if request in self.running:
            self.running.remove(request)
        if request in self.waiting:
            self.waiting.remove(request)
        if not loading:
            self.free(request)
            del self.requests[request.request_id]

    # ---- what happens besides

    def act(self) -> None:
        """Does one random thing."""
        self.rng.choices(list(self.actions), list(self.actions.values()))[0]()

    def run_worker(self) -> None:
        self.rng.choice(self.workers).run(self.now)

    def report(self) -> None:
        """Some workers tell what they have done since they last told."""
        ended: Counter[int] = Counter()
        not_stored: dict[int, set[int]] = {}
        for worker in self.workers:
            if self.rng.random() < 0.7:
                for job_id, missed in worker.saved:
                    ended[job_id] += 1
                    not_stored.setdefault(job_id, set()).update(missed)
                for request_id, failed in worker.loaded:
                    self.load_reports[request_id] += 1
                    if failed:
                        self.failed_loads.add(request_id)
                worker.saved, worker.loaded = [], []
        self.core.saves_ended(ended, not_stored, self.now)
        self.forget_ended_saves()
        done = [name for name, count in self.load_reports.items() if count == len(self.workers)]
        failed = [name for name in done if name in self.failed_loads]
        self.core.loads_ended(done, failed)
        for request_id in done:
            del self.load_reports[request_id]
            self.failed_loads.discard(request_id)
            self.loaded(self.requests[request_id], failed=request_id in failed)

    def loaded(self, request: ModelRequest, *, failed: bool) -> None:
        if request.status is Status.FINISHED:
            self.free(request)
            del self.requests[request.request_id]
            return
        assert request.status is Status.LOADING
        request.status = Status.WAITING
        if failed:
            self.free(request)
            request.computed = request.executed = 0
        else:
            self.name_blocks(request, request.computed)
        self.waiting.insert(0, request)

    def forget_ended_saves(self) -> None:
        self.saves = {job_id: job for job_id, job in self.saves.items() if job_id in self.core._saves._jobs}

    def answer_lookup(self) -> bool:
        open_lookups = [number for number, asked in self.server.asked.items() if not asked.answered]
        if open_lookups and self.rng.random() >= self.server.faults.lookup_hangs:
            number = self.rng.choice(open_lookups)
            self.core.lookup_ended(number, self.server.answer(number), self.now)
        return bool(open_lookups)

    def abort(self) -> None:
        alive = [request for request in self.requests.values() if request.status is not Status.FINISHED]
        if alive:
            self.finish(self.rng.choice(alive))

    def reset(self) -> None:
        drained = self.core.reset()
        assert drained == (not self.core.pending)

    def emptied(self) -> None:
        if self.server.empties:
            assert not self.saves
            self.server.empties = 0
            self.server.forget_all()
            self.core.emptied()

    def evict(self) -> None:
        self.server.evict()

    def wipe(self) -> None:
        """The engine's own prefix cache is emptied."""
        self.pool.wipe()

    def tick(self) -> None:
        # A plan reaches the workers long before its saves are given up: that takes minutes, in the world outside.
        self.now += self.rng.choice((0.1, 0.2, 1.0, 15.0)[: 2 if self.submitted else 4])

    def crash(self) -> None:
        """The server loses all; transfers in flight fail, or go to the one that comes after it."""
        self.server.crash()

    def lose_report(self) -> None:
        """No worker will say what became of a job (the report of the first is lost; the others' are not enough)."""
        lost = [job_id for job_id in self.saves if self.rng.random() < self.server.faults.report_lost]
        self.workers[0].lost.update(lost)

    # ---- what must hold

    def check_plan(self, loads: list[LoadJob], saves: list[SaveJob], in_flight: set[int]) -> None:
        for job in saves:
            assert job.job_id not in self.job_ids, "a job was handed out twice"
            self.job_ids.add(job.job_id)
            self.saves[job.job_id] = job
            assert len(set(job.block_ids)) == len(job.block_ids) == len(job.keys) == len(job.groups) > 0
        self.forget_ended_saves()
        for load in loads:
            assert self.requests[load.request_id].status in {Status.LOADING, Status.FINISHED}
            assert load.reads or load.request_id not in self.takes_all, "what was offered cannot be loaded"
            self.takes_all.discard(load.request_id)

    def check(self) -> None:
        core = self.core
        in_use = Counter(block for job in self.saves.values() for block in job.block_ids)
        assert not in_use or max(in_use.values()) == 1, "a block is saved twice at once"
        unsent = {job.job_id: job for job in core._plan.saves}
        jobs = self.saves | unsent
        assert core._saves._jobs.keys() == jobs.keys()
        in_use = Counter(block for job in jobs.values() for block in job.block_ids)
        assert core._saves._in_flight.keys() == in_use.keys(), "the in-flight set is not what is in flight"
        assert len(in_use) <= self.pool.num_blocks * core._saves._max_held_fraction, "saves hold too much"
        users = in_use + Counter(
            block for request in self.requests.values() for table in request.tables for block in table if block != NULL
        )
        assert users == Counter({block: refs for block, refs in enumerate(self.pool.refs) if refs}), (
            "references do not add up"
        )
        assert core._loading == {r.request_id for r in self.requests.values() if self.is_loading(r)}
        wanted = {state.lookup.number for state in core._requests.values() if state.lookup is not None}
        wanted |= {state.loading.number for state in core._requests.values() if state.loading is not None}
        assert wanted == self.server.asked.keys(), "a pin that nobody wants, or one that was lost"
        assert core._requests.keys() == self.requests.keys()

    def is_loading(self, request: ModelRequest) -> bool:
        return request.status is Status.LOADING or (request.status is Status.FINISHED and bool(request.tables))

    def calm(self) -> None:
        """From now on nothing goes wrong, and there is room for all."""
        self.server.faults = CALM
        self.picky = 0
        self.server.capacity = 1_000_000

    def settle(self) -> None:
        """Lets everything come to its end."""
        for _ in range(STEPS_TO_SETTLE):
            if not (self.requests or self.core.pending or self.server.empties):
                break
            self.now += 0.3
            self.step()
            while self.answer_lookup():
                pass
            self.emptied()
            for worker in self.workers:
                worker.run(self.now)
            self.report()
            self.check()
        assert not self.requests, f"requests that never end: {list(self.requests.values())}"

    def check_settled(self) -> None:
        self.check()
        assert not self.core.pending
        assert not any(self.pool.refs), "a reference was not given back"
        left = [self.server.leases, self.server.asked, self.core._loads._lookups]
        left += [self.core._requests, self.core._saving, self.core._loading]
        assert not any(left), f"something is left: {left}"
        assert Counter(self.server.ended) == Counter(f"r{number + 1}" for number in range(self.arrivals))


def run(seed: int, steps: int, mode: Mode | None = None) -> World:
    """Lives one life from a seed; raises AssertionError where something did not hold."""
    world = World(seed, mode)
    for _ in range(steps):
        world.act()
        world.check()
    world.calm()
    world.settle()
    world.check_settled()
    return world


def refill(seed: int, steps: int) -> None:
    """After any life, prompts that are computed again are found whole, whatever the server had lost of them (B4.15).

    Not always at the second time: what is put off, because saves hold too many blocks, may have fallen out of its window before.
    And with few enough blocks to hold, short requests end before it is their turn, each time: so there is no such limit here.
    """
    world = run(seed, steps, Mode.EAGER)
    world.core._saves._max_held_fraction = 1.0
    step = world.geometry.step_tokens
    whole = (len(world.chains[0]) - 1) // step * step - step * world.geometry.drop_last_block
    for _ in range(10):
        world.pool.wipe()
        requests = [world.submit(chain, 1) for chain in world.chains]
        world.settle()
        if all(world.hits[request.request_id] >= whole for request in requests):
            return
    raise AssertionError("a hole that is never filled")
