"""Scheduler half of the connector: translates between vLLM's scheduler and `OffloadCore`.

All methods run on the scheduler's thread. They make no remote call and do not raise if the server
fails. They do not wait, except for a few milliseconds in idle steps (`HandoffScheduler`).
"""

from __future__ import annotations

import functools
import pickle
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

from .... import Client
from ....handoff import EngineIdentity, FinishedRequest
from ....offload import (
    CacheGeometry,
    EndedSave,
    OffloadCore,
    OffloadMode,
    OffloadOptions,
    ScheduledRequest,
)
from ...identity import namespace_digest
from ..background import RateLimitedLog
from ..compat import CacheHitSource, KVCacheEvent
from ..config import ConnectorConfig
from ..lora import LoraAdapters
from ..peers import NoClient, Peers, ServerLink
from ..request_settings import RequestSettings
from ..stats import TransferCounters
from ..step_metadata import IDLE_WITHOUT_JOBS, NO_JOBS, StepMetadata
from ..worker.reports import SAVE_LOST_AFTER_S, WorkerReport
from .block_pool import VllmBlockPool
from .handoff_scheduler import HandoffScheduler
from .kv_events import KVEvents, OpenStream
from .prefix_lookups import LookupService
from .requests import RequestRegistration, VllmRequest, server_name

__all__ = ["SchedulerSide"]

_SOURCES = {"cpu": CacheHitSource.HOST, "lmdb": CacheHitSource.DISK, "disk": CacheHitSource.DISK}


class SchedulerSide:
    """Half of KVTierConnector in the scheduler's process.

    `batched_tokens`: maximum number of tokens in a step; 0 if lazy mode is off. `publish_events`:
    whether vLLM's settings enable KV events. `open_stream`: opens the stream of the server's
    events; None to publish only this engine's own stores. `connect`: connects in the namespace of
    a version of the weights; None if the namespace never changes. `client`: None if the namespace
    is not known yet. Every request is then a miss until `connect` has returned.
    """

    def __init__(
        self,
        client: Client | None,
        geometry: CacheGeometry,
        digest: str,
        config: ConnectorConfig,
        world_size: int,
        *,
        may_load: bool,
        may_save: bool,
        log: RateLimitedLog,
        counters: TransferCounters | None = None,
        batched_tokens: int = 0,
        publish_events: bool = False,
        open_stream: OpenStream | None = None,
        identity: EngineIdentity,
        peers: Peers | None = None,
        connect: Callable[[str], ServerLink] | None = None,
    ) -> None:
        self._linked = client is not None
        client = client or cast("Client", NoClient())
        peers = peers or Peers(client)
        self._geometry = geometry
        self._digest = digest
        self._log = log
        self._may_load = may_load
        self._may_save = may_save
        self._pool = VllmBlockPool(geometry)
        self.adapters = LoraAdapters(log)
        self._counters = counters or TransferCounters()
        self._events = KVEvents(geometry.groups, open_stream, enabled=publish_events)
        self._server = LookupService(
            client, geometry, config.lookup_timeout_s, log, self._counters, self._transfers_ended
        )
        self._client, self._peers = client, peers
        self._namespace = b""
        self._weights_change_on_reset = config.weights_change_on_reset
        self._first_version = self._weights_version = config.weights_version
        self._connect = connect
        # Whether the reset that has not ended changes the version of the weights.
        self._weights_changed = False
        # Whether the latest reset found no block in use, so that the engine has no KV of before.
        self._reset_is_complete = True
        self._core = self._new_core(config, world_size, batched_tokens)
        self._handoffs = HandoffScheduler(geometry, identity, config.handoff, peers, log, self._counters, self._pool)
        self._requests: dict[str, VllmRequest] = {}
        # Number of blocks of each load in flight, by request id.
        self._loading: dict[str, int] = {}
        self._resetting = False
        # Whether the saves of the latest step were planned, so that the core knows its tokens.
        self._is_planned = True
        # Namespace of which the workers know, by its digest.
        self._sent_digest: str | None = None
        if self._linked:
            self._events.follow(client)
        else:  # as if a reset had begun, because requests miss and nothing is saved until it ends
            self._resetting = True
            self._core.reset()

    def _new_core(self, config: ConnectorConfig, world_size: int, batched_tokens: int) -> OffloadCore:
        options = OffloadOptions(
            mode=OffloadMode.LAZY if config.lazy_offload and self._may_save else OffloadMode.EAGER,
            lookup_timeout_s=config.lookup_timeout_s,
            max_held_fraction=config.max_held_fraction,
            save_lost_after_s=SAVE_LOST_AFTER_S,
            batched_tokens=batched_tokens,
            audit_every=config.audit_every,
        )
        content_of = VllmRequest.content if config.publish_token_ids else None
        return OffloadCore(self._geometry, world_size, options, self._pool, self._server, content_of)

    def bind_pool(self, block_pool: Any) -> None:
        self._pool.bind(block_pool)

    # ---- loads

    def new_request(self, request: Any) -> None:
        """Registers a request, and starts a lookup of the blocks that the engine does not have."""
        self._process_answers()
        adapted = self._adapt(request)
        # A pull from another engine makes a lookup unnecessary.
        pulls = self._handoffs.arrived(adapted, may_hold=not self._resetting)
        own_tokens = None if pulls or not adapted.may_load else self._pool.cached_tokens(adapted)
        looked_up = self._core.arrived(adapted, own_tokens, time.monotonic())
        if not looked_up and adapted.may_save:
            self._server.register(adapted.registration)

    def matched_tokens(self, request: Any, computed_tokens: int) -> tuple[int | None, bool]:
        """Returns how many tokens after `computed_tokens` can be loaded (None: not known yet).

        The second value is True if there is a hit: the load is asynchronous.
        """
        if request.request_id not in self._requests:
            self.new_request(request)
        self._process_answers()
        # Held blocks may come from the old weights, so nothing is pulled during a reset (B4.13).
        hit = 0 if self._resetting else self._handoffs.match(request.request_id, computed_tokens)
        if hit == 0:
            hit = self._core.match(request.request_id, computed_tokens, time.monotonic())
        return hit, bool(hit)

    def blocks_allocated(self, request: Any, block_ids: Sequence[Sequence[int]], external_tokens: int) -> None:
        """Records that the engine allocated blocks and accepted `external_tokens` of the hit."""
        if self._handoffs.allocated(request.request_id, block_ids, external_tokens):
            external_tokens = 0
        self._core.allocated(request.request_id, block_ids, external_tokens)

    def hit_sources(self, request: Any, external_tokens: int) -> dict[CacheHitSource, int] | None:
        """Returns the hit's tokens by kind of tier, or None if the tiers are not known."""
        sources: dict[CacheHitSource, int] = {}
        for tier, tokens in self._core.sources(request.request_id).items():
            source = _SOURCES.get(tier, CacheHitSource.EXTERNAL_UNSPECIFIED)
            sources[source] = sources.get(source, 0) + tokens
        return sources if sum(sources.values()) == external_tokens else None

    # ---- once per step

    def build_step(self, scheduler_output: Any, *, is_awaited: bool = False) -> StepMetadata:
        """Returns `NO_JOBS` or `IDLE_WITHOUT_JOBS` if there is nothing to tell the workers.

        `is_awaited`: the caller adds jobs, so the step needs the namespace.
        """
        is_idle = scheduler_output.total_num_scheduled_tokens == 0
        if is_idle:
            self._handoffs.wait_for_peer()
        was_planned, self._is_planned = self._is_planned, False
        if not was_planned:
            self._core.all_due()
        self._process_answers()
        now = time.monotonic()
        try:
            self._plan_saves(scheduler_output, now)
            self._is_planned = True
        except Exception as error:  # noqa: BLE001 - as the comment says
            # Requests wait for the step's loads, so the loads must reach the workers anyway.
            self._log.warn("plan", f"planning saves failed: {error!r}", exc_info=True)
        plan, pulls = self._core.take_plan(now), self._handoffs.take_pulls(now)
        if not (plan.loads or plan.saves or pulls or is_awaited) and self._sent_digest == self._digest:
            return IDLE_WITHOUT_JOBS if is_idle else NO_JOBS
        self._loading.update((job.request_id, job.num_blocks) for job in plan.loads)
        self._sent_digest = self._digest
        return StepMetadata(
            loads=plan.loads + pulls,
            saves=plan.saves,
            namespace_digest=self._digest,
            idle=is_idle,
            sent_at=time.time(),
            namespace=self._namespace,
        )

    def loads_reported(self, finished_loads: Iterable[str], failed_loads: Iterable[str]) -> None:
        """Handles loads that all workers have ended since the last step."""
        finished_loads, failed_loads = set(finished_loads), set(failed_loads)
        finished_loads -= self._handoffs.pulls_ended(finished_loads, failed_loads)
        failed_loads &= finished_loads
        for request_id in finished_loads:
            outcome = "failed" if request_id in failed_loads else "loaded"
            self._counters.count(f"load_blocks:{outcome}", self._loading.pop(request_id, 0))
        self._core.loads_ended(finished_loads, failed_loads)

    def saves_reported(self, report: object) -> None:
        if isinstance(report, WorkerReport):
            self._count_saves(self._core.saves_ended(report.ended_saves, report.not_stored, time.monotonic()))

    def request_finished(self, request: Any, block_ids: Sequence[Sequence[int]]) -> dict[str, Any] | None:
        """Ends the request. Blocks that its last step filled are still saved (B4.14).

        Returns the parameters for the engine that continues the request, or None.
        """
        adapted = self._requests.pop(request.request_id, None)
        may_hold = not self._resetting and (adapted is None or not adapted.stale)
        if adapted is not None and request.lora_request is not None:
            self._pool.learn_tag(adapted, None if adapted.stale else adapted.tag or None)
        # Draft tokens that were accepted after the request's end are computed, but not confirmed.
        confirmed = min(request.num_computed_tokens - request.num_output_placeholders, request.num_tokens)
        handed_on = FinishedRequest(drop_saves=True)
        try:
            handed_on = self._handoffs.finished(request, block_ids, confirmed, may_hold=may_hold)
        finally:
            # Also after an exception, because the request has ended.
            if handed_on.drop_saves:
                confirmed = 0
            self._core.finished(request.request_id, block_ids, confirmed, time.monotonic(), handed_on.blocks)
        return handed_on.params

    def take_events(self) -> Iterable[KVCacheEvent]:
        return self._events.take()

    def has_pending_work(self) -> bool:
        """Whether the engine must keep stepping, because a job must be sent or reported (B4.8)."""
        return self._core.pending or self._handoffs.pending

    def has_pending_block_frees(self) -> bool:
        """Whether a save will soon free blocks, so that the engine should wait, not preempt."""
        return self._core.frees_pending(time.monotonic())

    def reset(self) -> bool:
        """Drops all lookups, and empties the CPU tier or changes the namespace to new weights.

        Does not wait for the server. Until the reset has ended, requests miss and nothing is saved.
        Returns False while transfers are in flight (B4.13). For new weights it also returns False
        while a block is in use, because its KV may be of the old weights. The reset then does not
        end: the caller must repeat it.
        """
        self._resetting = True
        self._weights_changed |= self._weights_change_on_reset and self._connect is not None
        self._events.cleared()
        self._server.resets.supersede()
        pulls_nothing = self._handoffs.reset()
        self._reset_is_complete = pulls_nothing and self._pool.unused
        drained = self._core.reset()
        if self._reset_is_complete and drained:
            self.adapters.reset()
        return drained and pulls_nothing and (self._reset_is_complete or not self._weights_changed)

    def weights_named(self) -> None:
        """The weights have changed. The reset that follows changes the namespace in any case."""
        self._weights_changed = self._connect is not None

    def adapter_loads(self, adapter: Any) -> None:
        """Called before workers load an adapter. If the adapter replaces one, requests go stale."""
        if self.adapters.loads(adapter):
            for adapted in self._requests.values():
                used = adapted.request.lora_request
                if used is not None and used.lora_int_id == adapter.lora_int_id:
                    adapted.stale, adapted.may_save, adapted.may_load, adapted.may_pull = True, False, False, False
                    self._pool.learn_tag(adapted, None)

    def close(self) -> None:
        self._events.close()
        self._handoffs.close()
        self._peers.close()
        self._server.close()

    # ---- details

    def _process_answers(self) -> None:
        if self._server.has_changed():
            self._core.server_changed()
        for lookup, found, at in self._server.answers():
            self._core.lookup_ended(lookup, found, at)
        if self._server.resets.take_done():
            self._use_new_link()
            self._events.follow(self._client)
            self._core.emptied()
            self._resetting = self._weights_changed = False

    def _transfers_ended(self) -> None:
        """Called by the core when no transfer from before a reset is in flight (B4.13)."""
        connect = self._connect
        if connect is not None and not self._linked and not self._weights_changed:
            self._server.resets.renew(lambda: connect(self._first_version), None)
        elif connect is None or not self._weights_changed:
            self._server.empty_cpu_tier()
        elif self._reset_is_complete:
            version = f"reset {uuid.uuid4().hex}"
            # Other engines may use the namespace in which this engine started.
            shared = self._weights_version == self._first_version or not self._linked
            self._server.resets.renew(lambda: connect(version), None if shared else self._client)
        else:
            self._log.warn(
                "incomplete",
                "the weights may have changed while requests used blocks; every request is a miss until a reset returns True",
            )

    def _use_new_link(self) -> None:
        client, peers = self._client, self._peers

        def close_old() -> None:
            peers.close()
            client.close()

        link = self._server.resets.take_link(close_old)
        if link is not None:
            self._linked = True
            self._client, self._peers = link.client, link.peers
            self._namespace, self._weights_version = pickle.dumps(link.namespace), link.weights_version
            self._digest = namespace_digest(link.namespace)
            self._server.use(link.client)
            self._handoffs.use(link.peers)

    def _count_saves(self, ended: Iterable[EndedSave]) -> None:
        """Counts ended saves, and publishes events unless a save may be older than a reset."""
        missed = 0
        for save in ended:
            missed += len(save.not_stored)
            self._counters.count("save_blocks:stored", len(save.job.keys) - len(save.not_stored))
            if not self._resetting and not save.suspect:
                self._events.stored(save)
        self._counters.count("save_blocks:not_stored", missed)
        if missed:
            self._log.warn(
                "missed", f"{missed} blocks were not stored; a request that still runs offers its blocks again"
            )

    def _adapt(self, request: Any) -> VllmRequest:
        adapter = request.lora_request
        tag = b"" if adapter is None else self.adapters.tag_of(adapter)
        served = tag is not None
        reads = served and not request.skip_reading_prefix_cache
        handed_on = served and self._handoffs.holds_at_end(request.kv_transfer_params)
        settings = RequestSettings.parse(request.kv_transfer_params, functools.partial(self._log.warn, "settings"))
        adapted = self._requests[request.request_id] = VllmRequest(
            request,
            RequestRegistration(
                server_name(request.request_id),
                request.num_prompt_tokens,
                settings.forwarded_params(request.kv_transfer_params),
                settings,
                # vLLM: the lowest number is the most urgent. kvtier: the highest.
                priority=-getattr(request, "priority", 0),
            ),
            self._geometry,
            may_load=self._may_load and reads and not settings.skip_load,
            # `kv_role` concerns the cache only. A hand-off stores its blocks in every role.
            may_save=(self._may_save or handed_on) and served and not settings.skip_save,
            may_pull=reads and not settings.skip_load,
            may_hold=handed_on and settings.hold and not settings.skip_save,
            holds_early=handed_on and self._handoffs.holds_early(request.kv_transfer_params),
            tag=tag or b"",
        )
        if adapter is not None:
            self._pool.learn_tag(adapted, tag)
        return adapted

    def _plan_saves(self, scheduler_output: Any, now: float) -> None:
        if scheduler_output.preempted_req_ids:
            self._core.preempted(scheduler_output.preempted_req_ids)
        drafts = scheduler_output.scheduled_spec_decode_tokens
        usual = 1 + max(map(len, drafts.values())) if drafts else 1
        due = self._core.due(scheduler_output.num_scheduled_tokens, usual)
        if lost := self._core.plan_saves(self._computed(due, scheduler_output) if due else (), now):
            self._count_saves(lost)

    def _computed(self, request_ids: Iterable[str], scheduler_output: Any) -> Iterable[ScheduledRequest]:
        """Yields the requests that may be saved, without those whose vote is pending."""
        tables = scheduler_output.kv_connector_block_state
        if tables is None:
            return
        for request_id in request_ids:
            adapted = self._requests.get(request_id)
            if adapted is not None and not adapted.registration.voting:
                tokens = adapted.request.num_computed_tokens + scheduler_output.num_scheduled_tokens[request_id]
                yield ScheduledRequest(request_id, tokens, functools.partial(tables.get_block_ids, request_id))
