"""The scheduler's half: vLLM's events translated for the core of offloading, and its plans for vLLM's workers.

No method makes a remote call, waits, or raises for what a server does. Every one runs on the scheduler's thread.
"""

# vLLM is not in the environment that is checked:
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import functools
import time
from collections.abc import Iterable, Sequence
from typing import Any

from .... import Client
from ....handoff import EngineIdentity, FinishedRequest
from ....offload import CacheGeometry, EndedSave, LoadJob, OffloadCore, OffloadMode, OffloadOptions, ScheduledRequest
from ..background import LimitedLog
from ..compat import CacheHitSource, KVCacheEvent
from ..config import ConnectorConfig
from ..peers import Peers
from ..request_settings import RequestSettings
from ..stats import TransferCounters
from ..worker.reports import SAVE_LOST_AFTER_S, StepMetadata, WorkerReport
from .events import KVEvents
from .handoff_scheduler import HandoffScheduler
from .requests import RequestRegistration, VllmBlockPool, VllmRequest, server_name
from .server import ServerGateway

__all__ = ["SchedulerSide"]

_SOURCES = {"cpu": CacheHitSource.HOST, "lmdb": CacheHitSource.DISK, "disk": CacheHitSource.DISK}


class SchedulerSide:
    """Behind KVTierConnector in the scheduler's process.

    ``batched_tokens``: the most that a step computes. ``publish_events``: whether vLLM publishes KV events.
    """

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
        tally: TransferCounters | None = None,
        batched_tokens: int = 0,
        publish_events: bool = False,
        identity: EngineIdentity,
        peers: Peers,
    ) -> None:
        self._geometry = geometry
        self._digest = namespace_digest
        self._log = log
        self._may_load = may_load
        self._may_save = may_save
        self._pool = VllmBlockPool(geometry)
        self._tally = tally or TransferCounters()
        self._events = KVEvents(geometry.groups, enabled=publish_events)
        self._remote = ServerGateway(client, geometry, config.lookup_timeout_s, log, self._tally)
        options = OffloadOptions(
            mode=OffloadMode.LAZY if config.lazy_offload and may_save else OffloadMode.EAGER,
            lookup_timeout_s=config.lookup_timeout_s,
            max_held_fraction=config.max_held_fraction,
            save_lost_after_s=SAVE_LOST_AFTER_S,
            batched_tokens=batched_tokens,
        )
        self._core = OffloadCore(geometry, world_size, options, self._pool, self._remote)
        self._handoffs = HandoffScheduler(geometry, identity, config.handoff, peers, log, self._tally)
        self._requests: dict[str, VllmRequest] = {}
        # Loads that workers are at, each with its blocks; and whether what is saved is about to be forgotten.
        self._loading: dict[str, int] = {}
        self._forgetting = False

    def bind_pool(self, block_pool: Any) -> None:
        """Take note of the engine's block pool, once."""
        self._pool.bind(block_pool)

    # ---- loads

    def new_request(self, request: Any) -> None:
        """A request arrived: begin to look up what the engine does not have itself."""
        self._hear()
        view = self._view(request)
        # What a peer holds is asked for first, and makes a lookup needless.
        pulls = self._handoffs.arrived(view)
        own_tokens = None if pulls or not view.may_load else self._pool.cached_tokens(view)
        looked_up = self._core.arrived(view, own_tokens, time.monotonic())
        if not looked_up and view.may_save:
            self._remote.announce(view.announcement)

    def matched_tokens(self, request: Any, computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens after ``computed_tokens`` can be loaded; None while that is not known yet."""
        if request.request_id not in self._requests:
            self.new_request(request)
        self._hear()
        # What is held may be of weights that are about to be forgotten: until the server has done so, nothing is pulled (B4.13).
        hit = 0 if self._forgetting else self._handoffs.match(request.request_id, computed_tokens)
        if hit == 0:
            hit = self._core.match(request.request_id, computed_tokens, time.monotonic())
        return hit, bool(hit)

    def blocks_allocated(self, request: Any, block_ids: Sequence[Sequence[int]], external_tokens: int) -> None:
        """The engine took ``external_tokens`` of the hit (possibly fewer than offered, possibly none)."""
        if self._handoffs.allocated(request.request_id, block_ids, external_tokens):
            external_tokens = 0
        self._core.allocated(request.request_id, block_ids, external_tokens)

    def hit_sources(self, request: Any, external_tokens: int) -> dict[CacheHitSource, int] | None:
        """The hit's tokens by kind of tier, or None where that is not known."""
        sources: dict[CacheHitSource, int] = {}
        for tier, tokens in self._core.sources(request.request_id).items():
            source = _SOURCES.get(tier, CacheHitSource.EXTERNAL_UNSPECIFIED)
            sources[source] = sources.get(source, 0) + tokens
        return sources if sum(sources.values()) == external_tokens else None

    # ---- once per step

    def build_step(self, scheduler_output: Any) -> StepMetadata:
        """Hand the step's jobs to the workers."""
        self._hear()
        try:
            self._core.preempted(scheduler_output.preempted_req_ids or ())
            if lost := self._core.plan_saves(self._computed(scheduler_output), time.monotonic()):
                self._count_saves(lost)
        except Exception as error:  # noqa: BLE001 - as the comment says
            # The step's loads must reach the workers all the same: requests wait for them.
            self._log.warn("plan", f"planning saves failed: {error!r}", exc_info=True)
        plan = self._core.take_plan(time.monotonic())
        self._loading.update((job.request_id, _blocks_of(job)) for job in plan.loads)
        return StepMetadata(
            loads=plan.loads + self._handoffs.take_pulls(),
            saves=plan.saves,
            namespace_digest=self._digest,
            idle=scheduler_output.total_num_scheduled_tokens == 0,
            sent_at=time.time(),
        )

    def loads_reported(self, finished_loads: Iterable[str], failed_loads: Iterable[str]) -> None:
        """Loads that all workers have ended since the last step."""
        finished_loads, failed_loads = set(finished_loads), set(failed_loads)
        finished_loads -= self._handoffs.pulls_ended(finished_loads, failed_loads)
        failed_loads &= finished_loads
        for request_id in finished_loads:
            outcome = "failed" if request_id in failed_loads else "loaded"
            self._tally.count(f"load_blocks:{outcome}", self._loading.pop(request_id, 0))
        self._core.loads_ended(finished_loads, failed_loads)

    def saves_reported(self, report: object) -> None:
        """Saves that workers have ended since the last step."""
        if isinstance(report, WorkerReport):
            self._count_saves(self._core.saves_ended(report.ended_saves, report.not_stored, time.monotonic()))

    def request_finished(self, request: Any, block_ids: Sequence[Sequence[int]]) -> dict[str, Any] | None:
        """The request has ended: offer the blocks that its last step filled (B4.14), give everything else back.

        Returns the parameters for the engine that is to go on with it, where one is.
        """
        self._requests.pop(request.request_id, None)
        # Of drafts that were accepted behind the request's end nothing is known but that they were computed.
        confirmed = min(request.num_computed_tokens - request.num_output_placeholders, request.num_tokens)
        handed_on = FinishedRequest(drop_saves=True)
        try:
            handed_on = self._handoffs.finished(request, block_ids, confirmed, may_hold=not self._forgetting)
        finally:
            # Whatever goes wrong with that: the request has ended.
            if handed_on.drop_saves:
                confirmed = 0
            self._core.finished(request.request_id, block_ids, confirmed, time.monotonic(), handed_on.blocks)
        return handed_on.params

    def take_events(self) -> Iterable[KVCacheEvent]:
        """Returns the KV events since the last call."""
        return self._events.take()

    def has_pending_work(self) -> bool:
        """Whether the engine must keep stepping for jobs to be sent or reported (B4.8)."""
        return self._core.pending or self._handoffs.pending

    def has_pending_block_frees(self) -> bool:
        """Whether waiting for saves would soon free blocks, so that no request needs to be preempted."""
        return self._core.frees_pending(time.monotonic())

    def reset(self) -> bool:
        """Forget all lookups, and have the server empty its CPU tier; True when no transfer is in flight (B4.13).

        The server is not waited for: until it has done so every request is a miss, and nothing is saved.
        """
        self._forgetting = True
        self._events.cleared()
        pulls_nothing = self._handoffs.reset()
        return self._core.reset() and pulls_nothing

    def close(self) -> None:
        """End the threads and the session."""
        self._handoffs.close()
        self._remote.close()

    # ---- details

    def _hear(self) -> None:
        """Tell the core what the server has answered, and whether it still is the one that was asked."""
        if self._remote.has_changed():
            self._core.server_changed()
        for lookup, found, at in self._remote.answers():
            self._core.lookup_ended(lookup, found, at)
        if self._remote.resets.take_done():
            self._core.emptied()
            self._forgetting = False

    def _count_saves(self, ended: Iterable[EndedSave]) -> None:
        """Save jobs have ended; those from before a reset count, but nothing of them is there."""
        missed = 0
        for save in ended:
            missed += len(save.not_stored)
            self._tally.count("save_blocks:stored", len(save.job.keys) - len(save.not_stored))
            if not self._forgetting and not save.suspect:
                self._events.stored(save)
        self._tally.count("save_blocks:not_stored", missed)
        if missed:
            self._log.warn("missed", f"{missed} blocks were not stored; requests that still run offer them again")

    def _view(self, request: Any) -> VllmRequest:
        served = self._serves(request)
        reads = served and not request.skip_reading_prefix_cache
        handed_on = served and self._handoffs.holds_at_end(request.kv_transfer_params)
        settings = RequestSettings.parse(request.kv_transfer_params, functools.partial(self._log.warn, "settings"))
        view = self._requests[request.request_id] = VllmRequest(
            request,
            RequestRegistration(
                server_name(request.request_id),
                request.num_prompt_tokens,
                settings.passed_on(request.kv_transfer_params),
                settings,
                # Of vLLM's numbers the lowest is the most urgent.
                priority=-getattr(request, "priority", 0),
            ),
            self._geometry,
            may_load=self._may_load and reads and not settings.skip_load,
            # The role is about the cache; who is asked to hand a request on does, whatever it is.
            may_save=(self._may_save or handed_on) and served and not settings.skip_save,
            may_pull=reads and not settings.skip_load,
            may_hold=handed_on and settings.hold and not settings.skip_save,
        )
        return view

    def _serves(self, request: Any) -> bool:
        """Whether the request's KV may be shared: that of an adapter may not, its name does not say which weights it has."""
        if request.lora_request is None:
            return True
        self._log.warn("lora", "requests with a LoRA adapter are neither loaded nor saved", interval_s=float("inf"))
        return False

    def _computed(self, scheduler_output: Any) -> Iterable[ScheduledRequest]:
        """The requests of the step that may be saved by now: not before their tiers have voted."""
        tables = scheduler_output.kv_connector_block_state
        if tables is None:
            return
        for request_id, new_tokens in scheduler_output.num_scheduled_tokens.items():
            view = self._requests.get(request_id)
            if view is not None and not view.announcement.voting:
                tokens = view.request.num_computed_tokens + new_tokens
                yield ScheduledRequest(request_id, tokens, functools.partial(tables.get_block_ids, request_id))


def _blocks_of(job: LoadJob) -> int:
    return sum(len(read.block_ids) for read in job.reads)
