"""Scheduler half of hand-offs: translates between vLLM's events and `client/handoff`."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

from ....handoff import (
    BlockPull,
    EngineIdentity,
    FinishedRequest,
    FinishReason,
    HandoffCore,
    HandoffOptions,
    TransferParams,
)
from ....offload import CacheGeometry, LoadJob
from ..background import RateLimitedLog
from ..peers import Peers
from ..stats import TransferCounters
from .block_pool import VllmBlockPool
from .hold_calls import HoldCalls
from .requests import VllmRequest

__all__ = ["HandoffScheduler"]

_IDLE_WAIT_S = 0.005

_REASONS = {"FINISHED_STOPPED": FinishReason.STOPPED, "FINISHED_LENGTH_CAPPED": FinishReason.LENGTH}


class HandoffScheduler:
    """Pulls of blocks from other engines, and holds of finished requests for other engines.

    Every method runs on the scheduler's thread. Only `wait_for_peer` waits.
    """

    def __init__(
        self,
        geometry: CacheGeometry,
        identity: EngineIdentity,
        options: HandoffOptions,
        peers: Peers,
        log: RateLimitedLog,
        counters: TransferCounters,
        pool: VllmBlockPool,
    ) -> None:
        self._options = options
        self._peers = peers
        self._log = log
        self._counters = counters
        self._calls = HoldCalls(peers, options.claim_timeout_s, log, counters)
        self._core = HandoffCore(geometry, identity, options, self._calls, pool)
        # Ids of requests for which `match` has returned a hit, until `allocated`.
        self._offered: set[str] = set()
        # Number of blocks of each pull in flight, by request id.
        self._pulling: dict[str, int] = {}

    @property
    def pending(self) -> bool:
        """Whether the engine must keep stepping: workers must still get or report a pull."""
        return self._core.pending

    def holds_at_end(self, kv_transfer_params: object) -> bool:
        return self._options.holds_at_end(TransferParams.parse(kv_transfer_params))

    @staticmethod
    def holds_early(kv_transfer_params: object) -> bool:
        """Whether another engine pulls the request's blocks while this engine computes it."""
        params = TransferParams.parse(kv_transfer_params)
        return params is not None and params.holds_early

    def arrived(self, request: VllmRequest, *, may_hold: bool = True) -> bool:
        """Registers a new request. Returns whether blocks may be pulled for the request."""
        return self._core.arrived(request, may_hold=may_hold)

    def match(self, request_id: str, computed_tokens: int) -> int | None:
        """Returns how many tokens after `computed_tokens` can be pulled (None: not known yet)."""
        self._process_answers()
        hit = self._core.match(request_id, computed_tokens, time.monotonic(), time.time())
        if hit:
            self._offered.add(request_id)
        else:
            self._offered.discard(request_id)
        return hit

    def allocated(self, request_id: str, block_ids: Sequence[Sequence[int]], external_tokens: int) -> bool:
        """Records the request's blocks. Returns whether `external_tokens` will be pulled."""
        pulls = request_id in self._offered and external_tokens > 0
        self._offered.discard(request_id)
        self._core.allocated(request_id, block_ids, external_tokens if pulls else 0)
        if pulls:
            self._counters.count("pull_tokens", external_tokens)
        return pulls

    def wait_for_peer(self) -> None:
        """Waits a few milliseconds if a request waits for blocks that another engine computes.

        Called in idle steps only. Without the wait, the engine's busy loop would use a processor
        for the whole prefill of the other engine. An answer of a claim ends the wait.
        """
        if self._core.awaits_peer:
            self._calls.wait_for_answer(_IDLE_WAIT_S)

    def take_pulls(self, now: float) -> list[LoadJob]:
        """Sends heartbeats that are due. Returns this step's pulls for the workers."""
        if not self._core.active:
            return []
        self._process_answers()
        self._core.heartbeat(now)
        jobs = [self._job(pull) for pull in self._core.take_pulls()]
        for job in jobs:
            self._pulling[job.request_id] = self._pulling.get(job.request_id, 0) + job.num_blocks
        return jobs

    def pulls_ended(self, ended: Iterable[str], failed: Iterable[str]) -> set[str]:
        """Records and returns the pulls among the loads that workers have ended."""
        pulls = self._pulling.keys() & ended
        for request_id in pulls:
            outcome = "failed" if request_id in failed else "pulled"
            self._counters.count(f"pull_blocks:{outcome}", self._pulling.pop(request_id))
            self._core.pull_ended(request_id)
        return pulls

    def reset(self) -> bool:
        """Drops all claims. Returns False while a pull is in flight."""
        self._core.reset()
        return not self._core.pending

    def finished(
        self, request: Any, block_ids: Sequence[Sequence[int]], confirmed_tokens: int, *, may_hold: bool = True
    ) -> FinishedRequest:
        """Ends the request. Returns the parameters for the response and the blocks to store.

        An asynchronous scheduler may have begun a step more than the request needed. The recurrent
        state then also contains the token of this step, which is the request's last token.
        """
        self._offered.discard(request.request_id)
        reason = _REASONS.get(request.status.name, FinishReason.OTHER) if may_hold else FinishReason.OTHER
        computed = request.num_computed_tokens
        state_tokens = computed if computed <= request.num_tokens else None
        return self._core.finished(request.request_id, block_ids, confirmed_tokens, reason, time.time(), state_tokens)

    def use(self, peers: Peers) -> None:
        """Makes all later calls with other clients, because the namespace has changed."""
        self._peers = peers
        self._calls.use(peers)

    def close(self) -> None:
        self._calls.close()

    def _process_answers(self) -> None:
        for number, claimed, at in self._calls.answers():
            try:
                self._core.claim_ended(number, claimed, at)
            except Exception as error:  # noqa: BLE001 - the other requests need their answers
                self._log.warn("claim-answer", f"an answer of a claim was not used: {error!r}", exc_info=True)

    def _job(self, pull: BlockPull) -> LoadJob:
        endpoint = self._peers.endpoint_of(pull.remote) if pull.remote is not None else None
        if endpoint is None:
            return LoadJob(pull.job.request_id)
        for read in pull.job.reads:
            read.endpoint = endpoint
        return pull.job
