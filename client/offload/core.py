"""The scheduler's half of offloading, for any engine: what to load and what to save, decided once per step.

A state machine without I/O, clock or threads. What happens in the engine, in its workers and at the server comes in as method
calls, with the time where it matters (seconds, of any clock that does not go back); what to move goes out once per step as a
StepPlan; what the server is to do goes out through ``OffloadServer``. In the order of one request's life:

    arrived -> match (until it is known) -> allocated -> [loads_ended] -> plan_saves, take_plan (every step) -> finished

and besides: ``lookup_ended``, ``saves_ended``, ``preempted``, ``server_changed``, ``reset`` and ``emptied``. Requests that the core
does not know are computed and not stored: an engine goes on whatever happened to its connector.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from enum import Enum
from typing import NamedTuple

from .lazy import LazyWalk
from .loads import Found, LoadPlanner, OffloadRequest, Phase
from .model import (
    BlockPool,
    BlockTables,
    CacheGeometry,
    EngineRequest,
    FreeBlock,
    LoadJob,
    LookupId,
    Mode,
    OffloadOptions,
    OffloadServer,
    SaveJob,
    StepPlan,
)
from .saves import EndedSave, SavePlanner

__all__ = ["Computed", "OffloadCore"]


class Computed(NamedTuple):
    """A request of the step that is being planned: its tokens when the step is over, and its blocks.

    ``drafts``: whether some of the tokens may be rejected.
    """

    request_id: str
    tokens: int
    read_table: Callable[[], BlockTables | None]
    drafts: bool = False


class _Reset(Enum):
    """DRAINING: transfers from before it are in flight. EMPTYING: the server was asked to forget them."""

    NONE = "none"
    DRAINING = "draining"
    EMPTYING = "emptying"


class OffloadCore:
    """One engine's. It never waits; every method is called on the scheduler's thread."""

    def __init__(
        self, geometry: CacheGeometry, world_size: int, options: OffloadOptions, pool: BlockPool, server: OffloadServer
    ) -> None:
        self._server = server
        self._loads = LoadPlanner(geometry, options, pool, server)
        self._saves = SavePlanner(geometry, world_size, options.max_held_fraction, options.save_lost_after_s, pool)
        self._walk = LazyWalk(geometry, options.batched_tokens, pool) if options.mode is Mode.LAZY else None
        self._requests: dict[str, OffloadRequest] = {}
        self._loading: set[str] = set()
        # Whose preemption was seen in this step, before it was told of.
        self._restarted: set[str] = set()
        # Whose save jobs are in flight: the server hears of a request's end after the last of them.
        self._saving: dict[int, OffloadRequest] = {}
        self._plan = StepPlan()
        self._reset = _Reset.NONE

    # ---- loads

    def arrived(self, request: EngineRequest, engine_tokens: int | None, now: float) -> bool:
        """A request is new: begin to look up what comes after the ``engine_tokens`` that the engine probably has itself.

        Guessing too little costs a few keys, too much a second lookup; None is for later, when it is matched. Returns whether a
        lookup was begun.
        """
        state = self._requests[request.request_id] = OffloadRequest(request)
        if engine_tokens is None or not self._may_look_up(state):
            return False
        return self._loads.begin(state, engine_tokens, now) is not None

    def match(self, request_id: str, computed_tokens: int, now: float) -> int | None:
        """How many tokens after ``computed_tokens`` can be loaded; None while that is not known: ask again in the next step.

        Asked each time a waiting request is considered. What was found stays pinned until the request takes it or ends (B4.3).
        """
        state = self._requests.get(request_id)
        if state is None:
            return 0
        if state.phase is Phase.RUNNING:
            # It was preempted: an engine asks only before it computes anything.
            self._restart(state)
            self._restarted.add(request_id)
        if state.compute_only or not self._may_look_up(state):
            return 0
        return self._loads.match(state, computed_tokens, now)

    def lookup_ended(self, lookup: LookupId, found: Found, now: float) -> None:
        """The server's answer to ``OffloadServer.start_lookup``; ``now`` is when it came. What was dropped meanwhile is ignored."""
        self._loads.answered(lookup, found, now)

    def allocated(self, request_id: str, tables: BlockTables, external_tokens: int) -> None:
        """The engine gave a request blocks, for ``external_tokens`` of the hit (fewer than offered, or none) and what it computes.

        If there are external tokens the request waits for their load; it is in the step's plan whatever is wrong with it.
        """
        state = self._requests.get(request_id)
        if external_tokens > 0:
            if state is not None:
                # First of all: until its load has ended, nothing of it may be stored.
                state.phase = Phase.LOADING
                self._loading.add(request_id)
            job = self._loads.take(state, tables, external_tokens) if state is not None else LoadJob(request_id)
            self._plan.loads.append(job)
        elif state is not None:
            state.phase = Phase.RUNNING
            self._loads.drop(state)

    def sources(self, request_id: str) -> Mapping[str, int]:
        """The tokens of the request's last load by the tier that had them."""
        state = self._requests.get(request_id)
        return state.sources if state is not None else {}

    def loads_ended(self, ended: Iterable[str], failed: Iterable[str]) -> None:
        """Loads that all workers have ended, each once. Of ``failed`` ones the blocks hold anything: the engine computes them."""
        for request_id in failed:
            state = self._requests.get(request_id)
            if state is not None:
                self._loads.failed(state)
        for request_id in ended:
            state = self._requests.get(request_id)
            self._loading.discard(request_id)
            if state is not None:
                self._load_ended(state)
        self._empty_when_drained()

    # ---- saves

    def plan_saves(self, computed: Iterable[Computed], now: float) -> list[EndedSave]:
        """Called once per step, after the engine has decided what it computes: offer what is full when the step is over.

        Returns the jobs that are lost: nobody has reported them for too long.
        """
        lost = self._saves.expire(now)
        self._took_end(lost, now)
        if self._reset is _Reset.NONE:
            self._offer(computed, now)
        return lost

    def take_plan(self, now: float) -> StepPlan:
        """Returns what the step's workers are to move, given to them now; each job is in one plan."""
        plan, self._plan = self._plan, StepPlan()
        self._restarted.clear()
        self._saves.sent(plan.saves, now)
        return plan

    def saves_ended(
        self, ended: Mapping[int, int], not_stored: Mapping[int, Collection[int]], now: float
    ) -> list[EndedSave]:
        """Workers have ended these jobs, so many of them each; ``not_stored``: positions in a job's keys that one did not store.

        Returns the jobs that all of them have ended now. A block is stored when all of them stored it (B4.5).
        """
        complete = self._saves.report(ended, not_stored, now)
        self._took_end(complete, now)
        return complete

    def preempted(self, request_ids: Iterable[str]) -> None:
        """These lost their blocks, and will be matched and computed anew (B4.12).

        Blocks of saves in flight are held: they are not reused, so workers need not flush first.
        """
        for request_id in request_ids:
            state = self._requests.get(request_id)
            # One that has been considered again already may be running again, on other blocks.
            if state is not None and state.phase is Phase.RUNNING and request_id not in self._restarted:
                self._restart(state)

    def finished(
        self,
        request_id: str,
        tables: BlockTables,
        confirmed_tokens: int,
        now: float,
        held: Collection[FreeBlock] = (),
    ) -> None:
        """The request has ended, in whatever way, and its blocks may be freed: offer what its last step filled (B4.14).

        ``held`` are blocks that somebody waits for: those that were not stored, and are not being stored, are stored now, under the
        names given here.
        """
        state = self._requests.get(request_id)
        if state is None:
            return
        self._loads.drop(state)
        if state.phase is Phase.LOADING:
            # Workers are still writing to its blocks; the engine keeps them until the load is reported.
            state.phase = Phase.ENDING
            return
        try:
            if confirmed_tokens > 0 and self._reset is _Reset.NONE and self._stores_eagerly(state):
                job = self._saves.plan(state.engine, state.progress, confirmed_tokens, lambda: tables, now, last=True)
                self._add_save(state, job)
            if held and self._reset is _Reset.NONE:
                self._store_held(held, self._saves.offered(state.progress, tables, confirmed_tokens))
        finally:
            self._end(state)

    # ---- the whole

    @property
    def pending(self) -> bool:
        """Whether the engine must keep stepping for jobs to be sent or reported (B4.8)."""
        return bool(self._loading or self._plan.loads or self._plan.saves) or self._saves.pending

    def frees_pending(self, now: float) -> bool:
        """Whether waiting for saves would free blocks, so that no request needs to be preempted; not if they take long already."""
        return self._saves.pending and self._saves.holds_only_reference(now)

    def reset(self) -> bool:
        """What is stored is not to be used any more; False while transfers from before are in flight (B4.13).

        Their references are kept until they end. Then the server is asked to forget all; until it has, every request is a miss and
        nothing is saved.
        """
        for state in self._requests.values():
            self._loads.drop(state)
        self._reset = _Reset.DRAINING
        return self._empty_when_drained()

    def emptied(self) -> None:
        """The server has forgotten all that it was asked to: running requests store from their start again (B3.19)."""
        if self._reset is _Reset.EMPTYING:
            self._reset = _Reset.NONE
            self._store_anew()

    def server_changed(self) -> None:
        """Another server, or another life of it, answers from now on: it may have nothing of what was stored or found before.

        Every request is looked up anew, and running requests store from their start again, so that no hole is left (B4.15). What
        is in flight counts for nothing that the new server has.
        """
        self._saves.doubt()
        for state in self._requests.values():
            self._loads.drop(state)
            state.arriving = []
        self._store_anew()

    # ---- details

    def _offer(self, computed: Iterable[Computed], now: float) -> None:
        for request_id, tokens, read_table, drafts in computed:
            state = self._requests.get(request_id)
            if state is not None and self._stores_eagerly(state):
                if not drafts:
                    self._saves.step_ends(state.progress, tokens)
                self._add_save(state, self._saves.plan(state.engine, state.progress, tokens, read_table, now))
        if self._walk is not None and (blocks := self._walk.choose(self._saves.room, now)):
            job = self._saves.plan_free(blocks)
            if job is not None:
                self._plan.saves.append(job)

    def _may_look_up(self, state: OffloadRequest) -> bool:
        return self._reset is _Reset.NONE and state.engine.may_load

    def _stores_eagerly(self, state: OffloadRequest) -> bool:
        """Lazy mode is about when ordinary requests are stored: who is to read a whole request's blocks will not wait for that."""
        return state.engine.may_save and (self._walk is None or state.engine.whole)

    def _store_held(self, blocks: Collection[FreeBlock], offered: Collection[int]) -> None:
        job = self._saves.plan_named([block for block in blocks if block.block_id not in offered])
        if job is not None:
            self._plan.saves.append(job)

    def _store_anew(self) -> None:
        for state in self._requests.values():
            state.progress.restart()
        if self._walk is not None:
            self._walk.restart()

    def _restart(self, state: OffloadRequest) -> None:
        self._loads.drop(state)
        state.progress.restart()
        state.phase = Phase.WAITING

    def _load_ended(self, state: OffloadRequest) -> None:
        arrived = self._loads.ended(state)
        if self._walk is not None:
            self._walk.loaded(arrived)
        if state.phase is Phase.ENDING:
            self._end(state)
        elif state.phase is Phase.LOADING:
            state.phase = Phase.WAITING

    def _add_save(self, state: OffloadRequest, job: SaveJob | None) -> None:
        if job is not None:
            self._plan.saves.append(job)
            self._saving[job.job_id] = state
            state.saves_in_flight += 1

    def _took_end(self, complete: Iterable[EndedSave], now: float) -> None:
        for save in complete:
            if self._walk is not None:
                self._walk.ended(save, now)
            state = self._saving.pop(save.job.job_id, None)
            if state is not None:
                state.saves_in_flight -= 1
                self._tell_end(state)
        self._empty_when_drained()

    def _end(self, state: OffloadRequest) -> None:
        state.phase = Phase.ENDED
        del self._requests[state.engine.request_id]
        self._tell_end(state)

    def _tell_end(self, state: OffloadRequest) -> None:
        if state.phase is Phase.ENDED and not state.saves_in_flight:
            self._server.end_request(state.engine)

    def _empty_when_drained(self) -> bool:
        """Whether all transfers from before a reset have ended; if so, the server is asked once to forget them."""
        if self.pending:
            return False
        if self._reset is _Reset.DRAINING:
            self._reset = _Reset.EMPTYING
            self._server.empty()
        return True
