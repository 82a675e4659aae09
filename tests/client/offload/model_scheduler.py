"""Scheduler of the model engine. It calls the offload core as engines do, in the same order."""

from __future__ import annotations

import random

from model_engine import NULL, Layout, ModelRequest, Pool, Script, Status, Work
from model_server import ModelServer, ModelWorker

from kvtier.client.offload import (
    CacheGeometry,
    FreeBlock,
    LoadJob,
    OffloadCore,
    OffloadOptions,
    SaveJob,
    ScheduledRequest,
)

UNALIGNED = 0.1
# Probability that a request's blocks are held at its end.
HELD = 0.2


class ModelScheduler:
    """Chunked prefill, at most four running requests, preemption of the last one.

    ``pipelined``: a step is scheduled before the previous one was computed.
    ``picky``: probability that the engine takes less than was offered.
    """

    picky = 0.0

    def __init__(
        self,
        rng: random.Random,
        geometry: CacheGeometry,
        options: OffloadOptions,
        server: ModelServer,
        workers: list[ModelWorker],
        pool: Pool,
        script: Script,
        *,
        pipelined: bool,
    ) -> None:
        self.rng, self.geometry, self.server, self.workers = rng, geometry, server, workers
        self.pool, self.script, self.pipelined, self.sparse = pool, script, pipelined, rng.random() < 0.5
        self.usual = rng.randint(1, 3)
        self.now = 100.0
        self.budget = options.batched_tokens
        self.layout = Layout(geometry)
        self.core = OffloadCore(geometry, len(workers), options, pool, server)
        self.requests: dict[str, ModelRequest] = {}
        self.waiting: list[ModelRequest] = []
        self.running: list[ModelRequest] = []
        self.submitted: list[tuple[list[Work], list[LoadJob], list[SaveJob]]] = []
        self.to_process: list[list[Work]] = []
        self.preempted: list[str] = []
        self.arrivals = 0
        self.held: set[tuple[int, bytes | None]] = set()
        """Blocks held for a peer, which do not count for the limit of held blocks."""
        self.takes_all: set[str] = set()
        """Requests that took the whole offer: it must be loadable."""
        self.hits: dict[str, int] = {}

    def check_plan(self, loads: list[LoadJob], saves: list[SaveJob]) -> None:
        """Checks the plan of a step before it runs."""

    def submit(self, prompt: list[int], output: int, *, load: bool = True, save: bool = True) -> ModelRequest:
        self.arrivals += 1
        name, length = f"r{self.arrivals}", len(prompt)
        request = ModelRequest(
            name,
            self.script,
            list(prompt),
            length,
            length + output,
            length,
            self.geometry.groups,
            may_load=load,
            may_save=save,
        )
        request.request_level = self.rng.random() < 0.1
        self.requests[name] = request
        self.waiting.append(request)
        self.core.arrived(request, self.layout.local_hit(self.pool, request), self.now)
        return request

    def step(self) -> None:
        """One step of the engine: schedules, plans, computes (if pipelined a step later)."""
        works = self.schedule()
        self.core.preempted(self.preempted)
        self.preempted.clear()
        new_tokens = {work.request.request_id: work.end - work.start for work in works}
        due = set(self.core.due(new_tokens, self.usual))
        computed = [
            ScheduledRequest(w.request.request_id, w.end, lambda w=w: w.request.tables, drafts=bool(w.drafts))
            for w in works
            if w.request.request_id in due
        ]  # type: ignore[misc]
        self.core.plan_saves(computed, self.now)
        plan = self.core.take_plan(self.now)
        self.check_plan(plan.loads, plan.saves)
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
            count = self.chunk(request, request.computed, min(todo, budget)) + drafts
            if count <= 0 or (request.placeholders and request.known + request.placeholders > request.max_tokens):
                continue
            granted, stall = self.make_room(request, request.computed + count, drafts)
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

    def chunk(self, request: ModelRequest, start: int, count: int) -> int:
        """With state groups most steps end at a block end, where the state can be used again."""
        step, end = self.geometry.step_tokens, start + count
        last = (request.known - 1) // step * step
        if not any(group.is_state for group in self.geometry.groups) or self.rng.random() < UNALIGNED:
            return count
        if end < request.known:
            return max(end // step * step, start) - start or count
        return (last if start < last < end else end) - start

    def work(self, request: ModelRequest, count: int, drafts: int) -> Work:
        end = request.computed + count
        samples = end - drafts == request.known + request.placeholders
        tables = [list(table) for table in request.tables]
        return Work(request, request.computed, end, drafts, samples, request.preemptions, tables)

    def make_room(self, request: ModelRequest, tokens: int, drafts: int) -> tuple[bool, bool]:
        """Returns whether the request has the blocks; if not, whether to wait for saves."""
        while not self.grow(request, tokens, drafts):
            if self.core.frees_pending(self.now):
                return False, True
            victim = self.running[-1]
            self.preempt(victim)
            if victim is request:
                return False, False
        if not drafts:
            request.ends.add(tokens)
        self.name_blocks(request, tokens)
        return True, False

    def grow(self, request: ModelRequest, tokens: int, drafts: int = 0) -> bool:
        self.drop_unneeded(request)
        new: list[tuple[int, bool]] = []
        for group in self.geometry.groups:
            size = group.block_tokens
            # State groups need only the blocks where the state may be, for any number of accepted
            # drafts.
            first = (tokens - drafts - 1) // size if group.is_state else 0
            positions = range(len(request.tables[group.index]), -(-tokens // size))
            new += [(group.index, position >= first) for position in positions]
        blocks = self.pool.allocate(sum(wanted for _, wanted in new))
        if blocks is None:
            return False
        for index, wanted in new:
            request.tables[index].append(blocks.pop() if wanted else NULL)
        return True

    def drop_unneeded(self, request: ModelRequest) -> None:
        """Frees blocks outside their window that the workers do not need any more."""
        for group in self.geometry.groups:
            table, first = request.tables[group.index], self.layout.needed(group, request.executed).start
            for position in range(min(first // group.block_tokens, len(table))):
                if table[position] != NULL:
                    self.pool.release([table[position]])
                    table[position] = NULL

    def name_blocks(self, request: ModelRequest, tokens: int) -> None:
        """Adds blocks full of final tokens to the prefix cache before their compute, as vLLM."""
        for group in self.geometry.groups:
            for position in range(min(tokens // group.block_tokens, request.final_blocks(group))):
                block = request.tables[group.index][position]
                if group.is_state and not self.keeps_state(request, (position + 1) * group.block_tokens):
                    continue
                if block != NULL:
                    self.pool.name(block, group.index, request.key(group, position))

    def keeps_state(self, request: ModelRequest, end: int) -> bool:
        """Whether the prefix cache keeps the state at ``end``: not of every block, as in vLLM."""
        step = self.geometry.step_tokens
        return end in request.ends and not (self.sparse and end != (request.prompt - 1) // step * step)

    def admit(self, request: ModelRequest, budget: int) -> list[Work] | None:
        """Schedules a waiting request; returns its work (none for a load), None without room."""
        shared = self.layout.local_hit(self.pool, request) if request.may_load else 0
        local = self.layout.hopeful_hit(self.pool, request) if request.may_load else 0
        if request.computed:  # its load has ended
            local, external = request.computed, 0
        else:
            answer = self.core.match(request.request_id, local, self.now)
            if answer is None:
                return []
            assert answer == 0 or request.may_load
            assert local + answer < request.known, "nothing left to compute"
            external = self.accept(answer)
            whole = external == answer and local == shared
            (self.takes_all.add if whole else self.takes_all.discard)(request.request_id)
            # Without a load only the tokens count that all groups have.
            local = local if external else shared
        self.hits[request.request_id] = local + external
        count = self.chunk(request, local, min(request.known - local, budget)) if not external else 0
        # A load allocates blocks for all known tokens: a waiting request must not need more later.
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
        request.ends.add(request.computed + count)
        self.name_blocks(request, request.computed + count)
        return [self.work(request, count, 0)]

    def accept(self, offered: int) -> int:
        """Takes the offer or, rarely, a part of it."""
        step = self.geometry.step_tokens
        return self.rng.randrange(0, offered + 1, step) if offered and self.rng.random() < self.picky else offered

    def place(self, request: ModelRequest, local: int, external: int, tokens: int) -> bool:
        """Builds the block tables: cached blocks, blocks to load, blocks to compute."""
        tables: list[list[int]] = []
        shared = []
        new: list[tuple[int, int]] = []
        for group in self.geometry.groups:
            first = group.first_needed_block(local + external) if local + external else 0
            table = [NULL] * (local // group.block_tokens)
            for position in range(first, local // group.block_tokens):
                block = self.pool.find(request.key(group, position))
                assert block is not None or external
                if block is None:
                    new.append((group.index, position))
                else:
                    table[position] = block
                    shared.append(block)
            tables.append(table)
        self.pool.hold(shared)
        for group in self.geometry.groups:
            first = group.first_needed_block(local + external) if local + external else 0
            for position in range(len(tables[group.index]), -(-tokens // group.block_tokens)):
                tables[group.index].append(NULL)
                last = position == (tokens - 1) // group.block_tokens
                if position >= first and (last or external or not group.is_state):
                    new.append((group.index, position))
        blocks = self.pool.allocate(len(new))
        if blocks is None:
            self.pool.release(shared)
            return False
        for (index, position), block in zip(new, blocks, strict=True):
            tables[index][position] = block
        request.tables = tables
        request.ends = {local + external}
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
                request.ends.add(request.computed)
                self.name_blocks(request, min(request.computed - request.placeholders, request.known))
            if request.known >= request.max_tokens:
                self.finish(request)

    def held_blocks(self, request: ModelRequest, tokens: int) -> list[FreeBlock]:
        """Blocks that a peer needs to continue; partial ones get a key of the hold.

        None with states.
        """
        held = []
        for group in self.geometry.groups if not any(group.is_state for group in self.geometry.groups) else ():
            size, table = group.block_tokens, request.tables[group.index] if request.tables else []
            for position in range(group.first_needed_block(tokens), min(-(-tokens // size), len(table))):
                if (position + 1) * size <= tokens:
                    key = request.key(group, position)
                else:
                    key = b"hold %s %d" % (request.request_id.encode(), group.index)
                    self.script.meaning[key] = request.all_labels()[position * size : tokens]
                if table[position] != NULL:
                    held.append(FreeBlock(table[position], group.index, key))
        return held

    def finish(self, request: ModelRequest) -> None:
        """Ends a request in any state; it keeps its blocks until its load has ended."""
        loading = request.status is Status.LOADING
        request.status = Status.FINISHED
        confirmed = max(0, request.computed - request.placeholders)
        held = [] if loading or self.rng.random() > HELD else self.held_blocks(request, min(confirmed, request.known))
        self.held.update((block.block_id, block.key) for block in held)
        self.core.finished(request.request_id, request.tables, confirmed, self.now, held)
        if request in self.running:
            self.running.remove(request)
        if request in self.waiting:
            self.waiting.remove(request)
        if not loading:
            self.free(request)
            del self.requests[request.request_id]
