"""Offload core: decides once per step what an engine loads from the server and what it saves there.

The core is a state machine without I/O, clock or threads, for any engine. The adapter reports
events of the engine, the workers and the server as method calls. ``now`` is in seconds of a
monotonic clock. Once per step the adapter fetches all new loads and saves as one ``StepPlan``. The
core sends requests to the server through ``OffloadServer``. Calls for one request:

    arrived -> match (repeated while it returns None) -> allocated -> [loads_ended]
    -> due, plan_saves (every step) -> take_plan (every step) -> finished

Other events: ``lookup_ended``, ``saves_ended``, ``preempted``, ``server_changed``, ``reset`` and
``emptied``. For a request without a call of ``arrived`` the core loads and saves nothing; the
engine computes the request.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from enum import Enum
from typing import NamedTuple

from .lazy import EvictionLookahead
from .loads import LoadPlanner, OffloadRequest, PrefixHit, RequestPhase
from .model import (
    BlockPool,
    BlockTables,
    CacheGeometry,
    ContentOf,
    EngineRequest,
    FreeBlock,
    LoadJob,
    LookupId,
    OffloadMode,
    OffloadOptions,
    OffloadServer,
    SaveJob,
    StepPlan,
)
from .saves import DueRequests, EndedSave, SavePlanner, SaveProgress

__all__ = ["OffloadCore", "ScheduledRequest"]


class ScheduledRequest(NamedTuple):
    """A request that the engine computes in this step.

    ``tokens``: number of its computed tokens after the step.
    ``read_table``: returns its blocks after the step; None if they are not known.
    """

    request_id: str
    tokens: int
    read_table: Callable[[], BlockTables | None]
    drafts: bool = False  # some of the tokens are drafts, which the engine may reject


class _Reset(Enum):
    """State of a cache reset. DRAINING: transfers from before the reset are in flight.

    EMPTYING: the core asked the server to empty its CPU tier and waits for ``emptied``.
    """

    NONE = "none"
    DRAINING = "draining"
    EMPTYING = "emptying"


class OffloadCore:
    """Offload decisions of one engine. Methods run on the scheduler's thread and never block."""

    def __init__(
        self,
        geometry: CacheGeometry,
        world_size: int,
        options: OffloadOptions,
        pool: BlockPool,
        server: OffloadServer,
        content_of: ContentOf | None = None,
    ) -> None:
        self._server = server
        self._loads = LoadPlanner(geometry, options, pool, server)
        self._saves = SavePlanner(
            geometry, world_size, options.max_held_fraction, options.save_lost_after_s, pool, content_of
        )
        self._lookahead: EvictionLookahead | None = None
        if options.mode is OffloadMode.LAZY:
            self._lookahead = EvictionLookahead(geometry, options.batched_tokens, pool)
        self._requests: dict[str, OffloadRequest] = {}
        self._due = DueRequests()
        self._loading: set[str] = set()
        # Requests whose preemption `match` has handled in this step. `preempted` skips them.
        self._restarted: set[str] = set()
        # The request of each save job in flight, by job id. The core reports a request's end to the
        # server after the request's last save job.
        self._saving: dict[int, OffloadRequest] = {}
        self._plan = StepPlan()
        self._reset = _Reset.NONE

    # ---- loads

    def arrived(self, request: EngineRequest, engine_tokens: int | None, now: float) -> bool:
        """Registers a new request. Returns whether the core has started a lookup for it.

        ``engine_tokens``: estimated number of the request's leading tokens in the engine's own
        prefix cache. If the estimate is too low, the lookup asks for a few keys too many. If it is
        too high, ``match`` needs a second lookup. If it is None, ``match`` starts the lookup.
        """
        state = self._requests[request.request_id] = OffloadRequest(request)
        self._due.add(request.request_id)
        if engine_tokens is None or not self._may_look_up(state):
            return False
        return self._loads.begin(state, engine_tokens, now) is not None

    def match(self, request_id: str, computed_tokens: int, now: float) -> int | None:
        """Returns how many tokens after ``computed_tokens`` can be loaded.

        The adapter calls this each time that the scheduler considers a waiting request. If the
        server has not answered yet, returns None; the adapter asks again in the next step. The
        blocks of the hit stay pinned until the load ends. If the engine does not load the hit, they
        stay pinned until it starts to compute the request or the request ends (B4.3). Of an audited
        hit (see ``audit_every``) the last step is not offered.
        """
        state = self._requests.get(request_id)
        if state is None:
            return 0
        if state.phase is RequestPhase.RUNNING:
            # An engine calls `match` only before it starts a request. So a RUNNING request that is
            # matched again has been preempted.
            self._restart(state)
            self._restarted.add(request_id)
        if state.compute_only or not self._may_look_up(state):
            return 0
        return self._loads.match(state, computed_tokens, now, may_audit=self._stores_eagerly(state))

    def lookup_ended(self, lookup: LookupId, found: PrefixHit, now: float) -> None:
        """Records the result of ``OffloadServer.start_lookup``, unless the lookup was dropped."""
        self._loads.answered(lookup, found, now)

    def allocated(self, request_id: str, tables: BlockTables, external_tokens: int) -> None:
        """The engine allocated blocks to load ``external_tokens`` of the hit: all, some or none.

        If ``external_tokens`` is above 0, the engine lets the request wait for a load. Therefore
        the core always plans a ``LoadJob`` for it. If nothing can be read, this job is empty;
        workers report it as failed, and the engine computes the request.
        """
        state = self._requests.get(request_id)
        if external_tokens > 0:
            if state is not None:
                # Set first, so that the request's blocks are not stored before the load has ended,
                # even if `take` raises.
                state.phase = RequestPhase.LOADING
                self._loading.add(request_id)
            job = self._loads.take(state, tables, external_tokens) if state is not None else LoadJob(request_id)
            self._plan.loads.append(job)
        elif state is not None:
            state.phase = RequestPhase.RUNNING
            self._loads.drop(state)

    def sources(self, request_id: str) -> Mapping[str, int]:
        """Returns how many tokens of the request's latest load came from each tier."""
        state = self._requests.get(request_id)
        return state.sources if state is not None else {}

    def loads_ended(self, ended: Iterable[str], failed: Iterable[str]) -> None:
        """Records ended loads, by request id.

        ``ended``: loads that all workers have ended. ``failed``: loads that failed in some worker;
        the engine computes their blocks.
        """
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

    def due(self, new_tokens: Mapping[str, int], usual: int = 1) -> list[str]:
        """Returns the requests of a step that ``plan_saves`` must get, in the order of the step.

        The adapter calls this once per step. Most decode steps fill no block, so the list is empty.
        A request that ``plan_saves`` does not get remains due.

        ``new_tokens``: number of tokens that the engine computes in this step, by request.
        ``usual``: number of tokens up to which a request is not looked at in every step.
        """
        return self._due.of_step(new_tokens, usual)

    def all_due(self) -> None:
        """Makes every request due. The adapter calls this if ``due`` was not called for a step."""
        for request_id in self._requests:
            self._due.add(request_id)

    def plan_saves(self, computed: Iterable[ScheduledRequest], now: float) -> list[EndedSave]:
        """Plans this step's saves. Returns the saves that are lost (see ``save_lost_after_s``).

        The adapter calls this once per step, after the engine has scheduled the step. ``computed``
        contains at least the requests that are ``due``.
        """
        lost = self._saves.expire(now)
        if lost or self._reset is not _Reset.NONE:
            self._saves_ended(lost, now)
        if self._reset is _Reset.NONE:
            self._offer(computed, now)
        return lost

    def take_plan(self, now: float) -> StepPlan:
        """Returns the jobs of this step. The adapter must send them to the workers at once."""
        plan, self._plan = self._plan, StepPlan()
        self._restarted.clear()
        if plan.saves:
            self._saves.sent(plan.saves, now)
        return plan

    def saves_ended(
        self, ended: Mapping[int, int], not_stored: Mapping[int, Collection[int]], now: float
    ) -> list[EndedSave]:
        """Records workers' reports. Returns the jobs that all workers have ended.

        ``ended``: per job id, one bit per worker that has reported the job since the last call.
        ``not_stored``: per job id, the indices of the keys that some worker could not store. A
        block counts as stored only if every worker stored its part (B4.5).
        """
        complete = self._saves.report(ended, not_stored, now)
        self._saves_ended(complete, now)
        return complete

    def preempted(self, request_ids: Iterable[str]) -> None:
        """These requests lost their blocks; they will be matched and computed again (B4.12).

        Blocks of saves in flight stay referenced, so the adapter need not wait for these saves.
        """
        for request_id in request_ids:
            state = self._requests.get(request_id)
            # A request that was matched again in this step may already run on other blocks.
            if state is not None and state.phase is RequestPhase.RUNNING and request_id not in self._restarted:
                self._restart(state)

    def finished(
        self,
        request_id: str,
        tables: BlockTables,
        confirmed_tokens: int,
        now: float,
        held: Collection[FreeBlock] = (),
    ) -> None:
        """The request has ended. Saves the blocks that the request's last step filled (B4.14).

        ``confirmed_tokens``: number of computed tokens without draft tokens.
        ``held``: blocks that a peer will pull. The core saves all of them that are not in flight
            with the same key, because the server may have evicted blocks that it had before.
        """
        state = self._requests.get(request_id)
        if state is None:
            return
        self._loads.drop(state)
        if state.phase is RequestPhase.LOADING:
            # Workers still write to the request's blocks. The engine frees them after the load.
            state.phase = RequestPhase.ENDING
            return
        try:
            if confirmed_tokens > 0 and self._reset is _Reset.NONE and self._stores_eagerly(state):
                job = self._saves.plan(state.engine, state.progress, confirmed_tokens, lambda: tables, now, last=True)
                self._add_save(job, state)
            if held and self._reset is _Reset.NONE:
                self._add_save(self._saves.plan_named(held))
        finally:
            self._end(state)

    # ---- the engine's state

    @property
    def pending(self) -> bool:
        """Whether the engine must run further steps to send jobs or receive reports (B4.8)."""
        return bool(self._loading or self._plan.loads or self._plan.saves) or self._saves.pending

    def frees_pending(self, now: float) -> bool:
        """Whether to wait instead of preempting a request, because a save will free blocks soon."""
        return self._saves.blocks_awaiting_save_only(now)

    def reset(self) -> bool:
        """Starts a cache reset. Returns False if transfers are still in flight (B4.13).

        The core waits for these transfers, then asks the server to empty its CPU tier. Until
        ``emptied`` is called, ``match`` returns 0 and nothing is saved.
        """
        for state in self._requests.values():
            self._loads.drop(state)
        self._reset = _Reset.DRAINING
        return self._empty_when_drained()

    def emptied(self) -> None:
        """Ends a reset: the CPU tier is empty. Stores running requests' blocks again (B3.19)."""
        if self._reset is _Reset.EMPTYING:
            self._reset = _Reset.NONE
            self._store_again()

    def server_changed(self) -> None:
        """The server was restarted or replaced, and may lack blocks that it stored or found before.

        Each request is looked up again at its next ``match``. All blocks of running requests are
        stored again, so that no stored prefix has a gap (B4.15). Blocks of saves in flight do not
        count as stored.
        """
        self._saves.mark_suspect()
        for state in self._requests.values():
            self._loads.drop(state)
            state.loading_blocks = []
        self._store_again()

    # ---- details

    def _offer(self, computed: Iterable[ScheduledRequest], now: float) -> None:
        for request_id, tokens, read_table, drafts in computed:
            state = self._requests.get(request_id)
            if state is not None and self._stores_eagerly(state):
                if not drafts:
                    self._saves.step_ends(state.progress, tokens)
                self._add_save(self._saves.plan(state.engine, state.progress, tokens, read_table, now), state)
                self._set_due(request_id, state.progress, tokens)
            elif state is None or not state.engine.may_save:
                self._due.discard(request_id)
        if self._lookahead is not None and (blocks := self._lookahead.choose(self._saves.hold_budget, now)):
            self._add_save(self._saves.plan_named(blocks, was_free=True))

    def _set_due(self, request_id: str, progress: SaveProgress, tokens: int) -> None:
        """Sets when the request is offered again. ``tokens``: number of its computed tokens."""
        if tokens < progress.next_full_at and not progress.missed:
            self._due.postpone(request_id, progress.next_full_at - tokens)
        else:
            self._due.add(request_id)

    def _may_look_up(self, state: OffloadRequest) -> bool:
        return self._reset is _Reset.NONE and state.engine.may_load

    def _stores_eagerly(self, state: OffloadRequest) -> bool:
        """Whether the request's blocks are stored as soon as they are full.

        With the REQUEST_LEVEL policy this holds in lazy mode too, because another process may read
        the blocks before this engine evicts them.
        """
        return state.engine.may_save and (self._lookahead is None or state.engine.request_level)

    def _store_again(self) -> None:
        self.all_due()
        for state in self._requests.values():
            state.progress.restart()
        if self._lookahead is not None:
            self._lookahead.restart()

    def _restart(self, state: OffloadRequest) -> None:
        self._loads.drop(state)
        state.progress.restart()
        self._due.add(state.engine.request_id)
        state.phase = RequestPhase.WAITING

    def _load_ended(self, state: OffloadRequest) -> None:
        loaded = self._loads.ended(state)
        if self._lookahead is not None:
            self._lookahead.loaded(loaded)
        if state.phase is RequestPhase.ENDING:
            self._end(state)
        elif state.phase is RequestPhase.LOADING:
            state.phase = RequestPhase.WAITING

    def _add_save(self, job: SaveJob | None, state: OffloadRequest | None = None) -> None:
        if job is not None:
            self._plan.saves.append(job)
            if state is not None:
                self._saving[job.job_id] = state
                state.saves_in_flight += 1

    def _saves_ended(self, complete: Iterable[EndedSave], now: float) -> None:
        for save in complete:
            if self._lookahead is not None:
                self._lookahead.ended(save, now)
            if save.not_stored or save.suspect:
                self._missed()
            state = self._saving.pop(save.job.job_id, None)
            if state is not None:
                state.saves_in_flight -= 1
                self._end_at_server(state)
        self._empty_when_drained()

    def _missed(self) -> None:
        """Makes requests due whose blocks were not stored. A block may belong to several."""
        for request_id, state in self._requests.items():
            if state.progress.missed:
                self._due.add(request_id)

    def _end(self, state: OffloadRequest) -> None:
        state.phase = RequestPhase.ENDED
        self._due.discard(state.engine.request_id)
        del self._requests[state.engine.request_id]
        self._end_at_server(state)

    def _end_at_server(self, state: OffloadRequest) -> None:
        """Reports the end of a request to the server, unless a save of the request is in flight."""
        if state.phase is RequestPhase.ENDED and not state.saves_in_flight:
            self._server.end_request(state.engine)

    def _empty_when_drained(self) -> bool:
        """Returns True if no transfer is in flight.

        If a reset waits for this, the core then asks the server to empty its CPU tier.
        """
        if self.pending:
            return False
        if self._reset is _Reset.DRAINING:
            self._reset = _Reset.EMPTYING
            self._server.empty()
        return True
