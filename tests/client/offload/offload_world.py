"""Seeded simulation of the offload core: a model engine, a restarting server, failing workers.

Checked after every step: no token was computed from wrong KV, no wrong block was stored, no block
of a transfer was reused, the in-flight set matches the jobs, and every job was planned once. At the
end nothing is left.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

from cached_state import check_cached_state
from model_engine import NULL, ModelRequest, Pool, Script, Status
from model_scheduler import ModelScheduler
from model_server import CALM, ModelServer, ModelWorker

from kvtier.client.offload import (
    CacheGeometry,
    CacheGroup,
    LoadJob,
    LookupId,
    OffloadMode,
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
    CacheGeometry((CacheGroup(0, 8, None, is_state=True), CacheGroup(1, 4, None)), 8, 4),
    CacheGeometry((CacheGroup(0, 4, None, is_state=True),), 4, 4),
)
TIMEOUT_S = 2.0
LOST_S = 40.0
STEPS_TO_SETTLE = 5000


class World(ModelScheduler):
    """One simulated engine; `rng` makes every decision."""

    def __init__(self, seed: int, mode: OffloadMode | None = None) -> None:
        rng = random.Random(seed)
        geometry, script, ranks = rng.choice(GEOMETRIES), Script(), rng.choice((1, 1, 2, 3))
        options = OffloadOptions(
            mode or rng.choice(list(OffloadMode)),
            TIMEOUT_S,
            10.0,
            rng.choice((0.2, 0.5, 1.0)),
            LOST_S,
            rng.choice((6, 16, 64)),
        )
        block_tokens = max(group.block_tokens for group in geometry.groups)
        pool = Pool(len(geometry.groups) * rng.choice((16, 22, 60)), block_tokens, ranks)
        server = ModelServer(rng, geometry, script, ranks, rng.choice((10, 60, 1000)))
        workers = [ModelWorker(rng, rank, pool, server, LOST_S / 2) for rank in range(ranks)]
        super().__init__(rng, geometry, options, server, workers, pool, script, pipelined=rng.random() < 0.5)
        self.picky = 0.1
        self.chains = [[rng.randrange(1000, 2000) for _ in range(40)] for _ in range(5)]
        self.saves: dict[int, SaveJob] = {}
        """Jobs that the core has not seen end."""
        self.job_ids: set[int] = set()
        self.load_reports: Counter[str] = Counter()
        self.failed_loads: set[str] = set()
        self.noticed_life = server.life
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
            self.crash: 0.3,
            self.notice: 2,
            self.lose_report: 2,
            self.wipe: 2,
        }
        # Each run has other weights: in some the workers are slow, in others the engine.
        self.actions = {action: weight * rng.choice((0.3, 1, 3)) for action, weight in actions.items()}

    # ---- actions

    def arrive(self) -> None:
        chain = self.rng.choice(self.chains)
        prompt = chain[: self.rng.randint(1, len(chain))] + [
            self.rng.randrange(3) for _ in range(self.rng.randrange(4))
        ]
        self.submit(prompt, self.rng.randint(1, 12), load=self.rng.random() < 0.95, save=self.rng.random() < 0.95)

    def act(self) -> None:
        self.rng.choices(list(self.actions), list(self.actions.values()))[0]()

    def run_worker(self) -> None:
        self.rng.choice(self.workers).run(self.now)

    def report(self) -> None:
        """Some workers report the jobs that they ended since their last report."""
        ended: dict[int, int] = {}
        not_stored: dict[int, set[int]] = {}
        for number, worker in enumerate(self.workers):
            if self.rng.random() < 0.7:
                for job_id, missed in worker.saved:
                    ended[job_id] = ended.get(job_id, 0) | 1 << number
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
        """Empties the engine's prefix cache."""
        self.pool.wipe()

    def tick(self) -> None:
        # A plan reaches the workers long before its saves expire; that takes minutes in real
        # engines.
        self.now += self.rng.choice((0.1, 0.2, 1.0, 15.0)[: 2 if self.submitted else 4])

    def crash(self) -> None:
        """The server restarts empty; transfers in flight fail, or reach the restarted server."""
        self.server.crash()

    def notice(self) -> None:
        """The engine notices one or more restarts of the server."""
        if self.noticed_life != self.server.life:
            self.noticed_life = self.server.life
            self.core.server_changed()
            assert not self.server.asked.keys() - self.loading_lookups(), "a pin from before the restart"

    def lose_report(self) -> None:
        """Loses the first worker's report of some jobs, so that they never complete."""
        lost = [job_id for job_id in self.saves if self.rng.random() < self.server.faults.report_lost]
        self.workers[0].lost.update(lost)

    # ---- invariants

    def check_plan(self, loads: list[LoadJob], saves: list[SaveJob]) -> None:
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
        unsent = {job.job_id: job for job in core._plan.saves}
        jobs = self.saves | unsent
        assert core._saves._jobs.keys() == jobs.keys()
        names = Counter(name for job in jobs.values() for name in zip(job.block_ids, job.keys, strict=True))
        assert not names or max(names.values()) == 1, "a block is saved twice at once"
        assert core._saves._in_flight.keys() == names.keys(), "the in-flight set does not match the jobs"
        in_use = Counter(block for job in jobs.values() for block in job.block_ids)
        unheld = [block for block, _ in names.keys() - self.held]
        assert len(unheld) == len(set(unheld)), "a block is saved under two names at once"
        assert len(unheld) <= self.pool.num_blocks * core._saves._max_held_fraction, "saves hold too much"
        users = in_use + Counter(
            block for request in self.requests.values() for table in request.tables for block in table if block != NULL
        )
        assert users == Counter({block: refs for block, refs in enumerate(self.pool.refs) if refs}), (
            "references do not add up"
        )
        assert core._loading == {r.request_id for r in self.requests.values() if self.is_loading(r)}
        wanted = {state.lookup.number for state in core._requests.values() if state.lookup is not None}
        wanted |= {state.loading.number for state in core._requests.values() if state.loading is not None}
        assert wanted == self.server.asked.keys(), "a leaked or a lost pin"
        assert core._requests.keys() == self.requests.keys()
        if self.noticed_life == self.server.life and not self.server.empties and self.rng.random() < 0.2:
            check_cached_state(core, self.geometry, self.server)

    def loading_lookups(self) -> set[LookupId]:
        return {state.loading.number for state in self.core._requests.values() if state.loading is not None}

    def is_loading(self, request: ModelRequest) -> bool:
        return request.status is Status.LOADING or (request.status is Status.FINISHED and bool(request.tables))

    def calm(self) -> None:
        """Turns off all faults and limits."""
        self.server.faults = CALM
        self.picky = 0
        self.server.capacity = 1_000_000

    def settle(self) -> None:
        """Runs until all requests and transfers have ended."""
        for _ in range(STEPS_TO_SETTLE):
            if not (self.requests or self.core.pending or self.server.empties):
                break
            self.step_calmly()
        assert not self.requests, f"requests that never end: {list(self.requests.values())}"

    def step_calmly(self) -> None:
        self.now += 0.3
        self.step()
        while self.answer_lookup():
            pass
        self.emptied()
        self.notice()
        for worker in self.workers:
            worker.run(self.now)
        self.report()
        self.check()

    def rest(self) -> None:
        """A minute without work, then idle steps: lazy mode reaches every free block."""
        self.now += 60
        for _ in range(self.pool.num_blocks):
            self.step_calmly()

    def check_settled(self) -> None:
        self.check()
        assert not self.core.pending
        assert not any(self.pool.refs), "a reference was not given back"
        left = [self.server.leases, self.server.asked, self.core._loads._lookups]
        left += [self.core._requests, self.core._saving, self.core._loading]
        assert not any(left), f"something is left: {left}"
        assert Counter(self.server.ended) == Counter(f"r{number + 1}" for number in range(self.arrivals))


def run(seed: int, steps: int, mode: OffloadMode | None = None) -> World:
    """Runs one simulation; raises AssertionError if an invariant is violated."""
    world = World(seed, mode)
    for _ in range(steps):
        world.act()
        world.check()
    world.calm()
    world.settle()
    world.check_settled()
    return world


def refill(seed: int, steps: int, mode: OffloadMode) -> None:
    """After a simulation, prompts that are computed again are found completely (B4.15).

    This may take several rounds: a block that is delayed by the limit of held blocks may leave its
    window first. With a low limit short requests would end before their turn each time, so it is
    raised here. In lazy mode a request could reuse blocks before the lookahead sees them, so
    requests run one by one.
    """
    world = run(seed, steps, mode)
    world.core._saves._max_held_fraction = 1.0
    if world.core._lookahead is not None:
        world.core._lookahead.target = world.pool.num_blocks  # so that every free block is stored
    step = world.geometry.step_tokens
    whole = (len(world.chains[0]) - 1) // step * step - step * world.geometry.drop_last_block
    for _ in range(10):
        world.pool.wipe()
        requests = []
        for chain in world.chains:
            requests.append(world.submit(chain, 1))
            if mode is OffloadMode.LAZY:
                world.settle()
                world.rest()
        world.settle()
        if all(world.hits[request.request_id] >= whole for request in requests):
            return
    raise AssertionError("a block that is never stored again")
