"""The scheduler's half: what to load and what to save, decided once per step. Every method runs on the scheduler's thread.

No method makes a remote call, waits, or raises for what a server does.
"""

# vLLM is not in the environment that is checked:
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import functools
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ... import Client
from .announcements import Announcement, server_name
from .background import LimitedLog
from .compat import CacheHitSource, resolve_block_hashes
from .config import ConnectorConfig
from .groups import CacheGeometry
from .hits import usable_limit
from .lookup import Lookup, LookupService, LookupState
from .metadata import LoadJob, SaveJob, StepMetadata, WorkerReport
from .reads import count_sources, plan_reads
from .resets import CacheReset
from .saves import SavePlanner, SaveProgress

__all__ = ["SchedulerSide"]

# A hit that waited longer than this for room in the engine is looked up again: its lease may be about to end.
_HIT_LIFETIME_S = 10.0


@dataclass
class _RequestState:
    """What is remembered of a request between its arrival and its end.

    ``loading``: its blocks are being written by workers. ``compute_only``: a load or lookup of it failed; it is not tried again.
    """

    request: Any
    announcement: Announcement
    progress: SaveProgress = field(default_factory=SaveProgress)
    lookup: Lookup | None = None
    offered_from: int = 0
    loading: Lookup | None = None
    compute_only: bool = False
    finished: bool = False
    hit_sources: dict[CacheHitSource, int] = field(default_factory=dict)


class SchedulerSide:
    """Behind KVTierConnector in the scheduler's process."""

    def __init__(
        self,
        client: Client,
        geometry: CacheGeometry,
        namespace_digest: str,
        config: ConnectorConfig,
        world_size: int,
        *,
        may_load: bool,
        may_save: bool,
        log: LimitedLog,
    ) -> None:
        self._client = client
        self._geometry = geometry
        self._digest = namespace_digest
        self._log = log
        self._may_load = may_load
        self._may_save = may_save
        self._lookups = LookupService(client, geometry, config.lookup_timeout_s, log)
        self._resets = CacheReset(client, log)
        self._saves = SavePlanner(geometry, world_size, config.max_held_fraction)
        self._pool: Any = None
        self._requests: dict[str, _RequestState] = {}
        self._next_loads: list[LoadJob] = []
        self._next_saves: list[SaveJob] = []
        # Whose save jobs are in flight: the server hears of a request's end after the last of them.
        self._saving: dict[int, Announcement] = {}
        self._not_stored_blocks = 0

    def bind_pool(self, block_pool: Any) -> None:
        """Take note of the engine's block pool, once."""
        self._pool = block_pool
        self._saves.bind_pool(block_pool)

    # ---- loads

    def new_request(self, request: Any) -> None:
        """A request arrived: begin to look up what the engine does not have itself."""
        state, lookup = self._state(request), None
        if self._may_look_up(request):
            lookup = self._begin_lookup(state, self._local_tokens(request))
        if lookup is None and self._may_save and self._serves(request):
            self._lookups.announce(state.announcement)

    def matched_tokens(self, request: Any, computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens after ``computed_tokens`` can be loaded; None while that is not known yet."""
        state = self._state(request)
        step = self._geometry.step_tokens
        if state.compute_only or not self._may_look_up(request):
            return 0, False
        if computed_tokens % step or usable_limit(request.num_tokens, step) <= computed_tokens:
            return 0, False
        lookup = state.lookup
        if lookup is not None and (lookup.start > computed_tokens or self._is_stale(lookup)):
            self._drop_lookup(state)
            lookup = None
        if lookup is None:
            lookup = self._begin_lookup(state, computed_tokens)
            if lookup is None:
                return 0, False
        if lookup.state is LookupState.PENDING:
            if time.monotonic() < lookup.deadline:
                return None, False
            state.lookup, state.compute_only = None, True
            self._lookups.timed_out(lookup)
            return 0, False
        state.offered_from = computed_tokens
        hit = lookup.hit_tokens - computed_tokens
        return (hit, True) if hit > 0 else (0, False)

    def blocks_allocated(self, request: Any, block_ids: Sequence[Sequence[int]], external_tokens: int) -> None:
        """The engine took ``external_tokens`` of the hit (possibly fewer than offered, possibly none)."""
        state = self._state(request)
        if external_tokens <= 0:
            self._drop_lookup(state)
            return
        lookup, state.lookup = state.lookup, None
        job = LoadJob(request.request_id)
        # Whatever is wrong from here on, the engine now waits for this load: a job without reads is reported as failed.
        self._next_loads.append(job)
        if lookup is None:
            return
        state.loading = lookup
        end = state.offered_from + external_tokens
        if not state.announcement.wants_all:
            state.progress.loaded = range(state.offered_from, end)
        state.hit_sources = count_sources(self._geometry, lookup, state.offered_from, end)
        job.reads = plan_reads(self._geometry, lookup, block_ids, state.offered_from, end)

    def hit_sources(self, request: Any, external_tokens: int) -> dict[CacheHitSource, int] | None:
        """The hit's tokens by kind of tier, or None where that is not known."""
        state = self._requests.get(request.request_id)
        sources = state.hit_sources if state is not None else {}
        return sources if sum(sources.values()) == external_tokens else None

    # ---- once per step

    def build_step(self, scheduler_output: Any) -> StepMetadata:
        """Hand the step's jobs to the workers."""
        if self._resets.take_done():
            for state in self._requests.values():
                state.progress.restart()
        if self._may_save and not self._resets.pending:
            try:
                self._plan_saves(scheduler_output)
            except Exception as error:  # noqa: BLE001 - as the comment says
                # The step's loads must reach the workers all the same: requests wait for them.
                self._log.warn("plan", f"planning saves failed: {error!r}", exc_info=True)
        step = StepMetadata(
            loads=self._next_loads,
            saves=self._next_saves,
            namespace_digest=self._digest,
            idle=scheduler_output.total_num_scheduled_tokens == 0,
        )
        self._next_loads, self._next_saves = [], []
        return step

    def loads_reported(self, finished_loads: Iterable[str], failed_loads: Iterable[str]) -> None:
        """Loads that all workers have ended since the last step."""
        for request_id in failed_loads:
            state = self._requests.get(request_id)
            if state is not None:
                state.compute_only = True
                state.progress.loaded = range(0)
        for request_id in finished_loads:
            state = self._requests.get(request_id)
            if state is not None:
                self._load_ended(state)

    def saves_reported(self, report: object) -> None:
        """Saves that workers have ended since the last step."""
        if isinstance(report, WorkerReport):
            ended = self._saves.report(report.ended_saves, report.not_stored)
            for job_id in ended:
                self._lookups.let_go(self._saving.pop(job_id))
            missed = sum(ended.values())
            self._not_stored_blocks += missed
            if missed:
                self._log.warn("missed", f"{missed} blocks were not stored; requests that still run offer them again")
            self._start_reset()

    def request_finished(self, request: Any, block_ids: Sequence[Sequence[int]]) -> None:
        """The request has ended: offer the blocks that its last step filled (B4.14), give everything else back."""
        state = self._requests.get(request.request_id)
        if state is None:
            return
        self._drop_lookup(state)
        state.finished = True
        if state.loading is not None:
            # Workers are still writing to its blocks; vLLM keeps them until the load is reported.
            return
        try:
            confirmed = request.num_computed_tokens - request.num_output_placeholders
            if self._may_save and confirmed > 0 and self._serves(request) and not self._resets.pending:
                self._add_save(
                    state, self._saves.plan(request, state.progress, confirmed, lambda: block_ids, last=True)
                )
        finally:
            self._forget(state)

    def take_not_stored(self) -> int:
        """Returns how many blocks were offered and not stored since the last call."""
        count, self._not_stored_blocks = self._not_stored_blocks, 0
        return count

    def has_pending_work(self) -> bool:
        """Whether the engine must keep stepping for saves to be sent or reported (B4.8)."""
        return bool(self._next_saves) or self._saves.pending

    def has_pending_block_frees(self) -> bool:
        """Whether waiting for saves would free blocks, so that no request needs to be preempted."""
        return self._saves.pending and self._saves.holds_only_reference()

    def reset(self) -> bool:
        """Forget all lookups, and have the server empty its CPU tier; True when no save is in flight (B4.13).

        The server is not waited for: until it has done so every request is a miss, and nothing is saved.
        """
        for state in self._requests.values():
            self._drop_lookup(state)
        self._resets.ask()
        return self._start_reset()

    def close(self) -> None:
        """End the threads and the session."""
        self._resets.close()
        self._lookups.close()
        self._client.close()

    # ---- details

    def _state(self, request: Any) -> _RequestState:
        state = self._requests.get(request.request_id)
        if state is None:
            name = server_name(request.request_id)
            announcement = Announcement(name, request.num_prompt_tokens, request.kv_transfer_params)
            state = self._requests[request.request_id] = _RequestState(request, announcement)
        return state

    def _may_look_up(self, request: Any) -> bool:
        may = self._may_load and not self._resets.pending and not request.skip_reading_prefix_cache
        return may and self._serves(request)

    def _serves(self, request: Any) -> bool:
        """Whether the request's KV may be shared: that of an adapter may not, its name does not say which weights it has."""
        if request.lora_request is None:
            return True
        self._log.warn("lora", "requests with a LoRA adapter are neither loaded nor saved", interval_s=float("inf"))
        return False

    def _plan_saves(self, scheduler_output: Any) -> None:
        tables = scheduler_output.kv_connector_block_state
        if tables is None:
            return
        for request_id, new_tokens in scheduler_output.num_scheduled_tokens.items():
            state = self._requests.get(request_id)
            if state is None or state.announcement.voting or not self._serves(state.request):
                continue
            computed = state.request.num_computed_tokens + new_tokens
            job = self._saves.plan(
                state.request, state.progress, computed, functools.partial(tables.get_block_ids, request_id)
            )
            self._add_save(state, job)

    def _start_reset(self) -> bool:
        drained = not self.has_pending_work()
        if drained:
            self._resets.start()
        return drained

    def _add_save(self, state: _RequestState, job: SaveJob | None) -> None:
        if job is not None:
            self._next_saves.append(job)
            self._saving[job.job_id] = state.announcement
            self._lookups.hold(state.announcement)

    def _begin_lookup(self, state: _RequestState, start: int) -> Lookup | None:
        request = state.request
        limit = usable_limit(request.num_tokens, self._geometry.step_tokens)
        if limit <= start:
            return None
        hashes = {}
        for group in self._geometry.groups:
            all_hashes = resolve_block_hashes(request.block_hashes, self._geometry.hash_tokens, group.block_tokens)
            limit = min(
                limit, len(all_hashes) * group.block_tokens // self._geometry.step_tokens * self._geometry.step_tokens
            )
            hashes[group.index] = all_hashes[start // group.block_tokens : limit // group.block_tokens]
        if limit <= start:
            return None
        state.lookup = self._lookups.start(state.announcement, hashes, start, limit)
        return state.lookup

    def _local_tokens(self, request: Any) -> int:
        """A guess, from the block pool, of how much of the prefix the engine has itself: not worth a promotion from disk.

        Guessing too little costs a few keys, too much a second lookup.
        """
        group = self._geometry.groups[0]
        hashes = resolve_block_hashes(request.block_hashes, self._geometry.hash_tokens, group.block_tokens)
        count = 0
        if self._pool is not None:
            while count < len(hashes) and self._pool.get_cached_block(hashes[count], [group.index]):
                count += 1
        return count * group.block_tokens // self._geometry.step_tokens * self._geometry.step_tokens

    def _is_stale(self, lookup: Lookup) -> bool:
        found = lookup.state is LookupState.DONE and lookup.hit_tokens > lookup.start
        return found and time.monotonic() - lookup.done_at > _HIT_LIFETIME_S

    def _drop_lookup(self, state: _RequestState) -> None:
        if state.lookup is not None:
            self._lookups.drop(state.lookup)
            state.lookup = None

    def _load_ended(self, state: _RequestState) -> None:
        lookup, state.loading = state.loading, None
        if lookup is not None:
            self._lookups.drop(lookup)
        if state.finished:
            self._forget(state)

    def _forget(self, state: _RequestState) -> None:
        self._requests.pop(state.request.request_id, None)
        self._lookups.finish_request(state.announcement)
