"""Hand-off core: decides which blocks an engine pulls from peers and holds for peers.

The core is a state machine without I/O, clock or threads, for any engine. An engine uses it
together with the offload core, which stores the full blocks of each request. The hand-off core
publishes holds of these blocks, assigns keys to blocks without a content key, and pulls the blocks
that a peer holds. Calls for one request:

    arrived -> match (repeated while it returns None) -> allocated -> [pull_ended] -> finished

If both engines got the request at the same time (``TransferParams.overlap``), the prefill engine
publishes its hold in ``arrived``. The decode engine pulls in several jobs of one load: a job for
the blocks of each answered claim, and each claim waits for one block more than the previous one.

Other calls: ``claim_ended``, and ``heartbeat`` and ``take_pulls`` once per step. ``now`` is in
seconds of a monotonic clock, ``wall_time`` in seconds since 1970. Requests without
``kv_transfer_params`` are ignored.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

from ..offload import BlockTables, CacheGeometry, FreeBlock, LoadJob
from .claims import (
    Claim,
    Claims,
    HandoffState,
    OpenPull,
    TransferState,
    apply_threshold,
    may_pull,
    needs_older_windows,
    offered_tokens,
    plan_pull,
    pull_blocks,
)
from .holds import HeldBlocks, early_length, find_blocks, held_length, hold_blocks, name_blocks
from .model import (
    EXPIRY_MARGIN_S,
    ClaimedBlocks,
    ClaimId,
    FinishReason,
    HandoffDirection,
    HandoffOptions,
    HandoffRequest,
    HandoffServer,
    NotClaimedReason,
    PlannedPublication,
    PrefixCache,
)
from .params import RemoteRequest, TransferParams

__all__ = ["BlockPull", "EngineIdentity", "FinishedRequest", "HandoffCore"]


class EngineIdentity(NamedTuple):
    """An engine as peers see it: its id, address of its server and tensor-parallel size."""

    engine_id: str
    host: str
    port: int
    tp_size: int


class BlockPull(NamedTuple):
    """A load from the server of ``remote``. Workers report a job without ``reads`` as failed."""

    remote: RemoteRequest | None
    job: LoadJob


class FinishedRequest(NamedTuple):
    """Result of ``HandoffCore.finished``.

    ``params``: the ``kv_transfer_params`` that the engine returns with the request's output.
    ``blocks``: all blocks of the hold, with keys. The engine must store each, because a peer waits
    for all of them.
    ``drop_saves``: the engine must not store further blocks of the request, because their content
    may be undefined (B2.16).
    """

    params: dict[str, Any] | None = None
    blocks: Collection[FreeBlock] = ()
    drop_saves: bool = False


class HandoffCore:
    """Hand-offs of one engine. Methods are called on the scheduler's thread and never block."""

    def __init__(
        self,
        geometry: CacheGeometry,
        identity: EngineIdentity,
        options: HandoffOptions,
        server: HandoffServer,
        cache: PrefixCache,
    ) -> None:
        self._geometry = geometry
        self._identity = identity
        self._options = options
        self._server = server
        self._cache = cache
        self._state_tokens = max((group.block_tokens for group in geometry.groups if group.is_state), default=0)
        self._requests: dict[str, HandoffState] = {}
        self._claims = Claims(geometry, options, server)
        self._pulls: list[BlockPull] = []
        self._next_heartbeat_at = 0.0
        # New requests for which no heartbeat has been sent yet.
        self._without_heartbeat: list[str] = []

    @property
    def active(self) -> bool:
        """Whether there is a request with a hand-off, or a pull that was not taken."""
        return bool(self._requests or self._pulls)

    @property
    def pending(self) -> bool:
        """Whether the engine must run further steps to send pulls or receive their reports."""
        return bool(self._pulls) or any(state.transfer is TransferState.PULLING for state in self._requests.values())

    @property
    def awaits_peer(self) -> bool:
        """Whether a request waits for blocks that a peer still computes."""
        return any(
            state.params.pulls_early and state.claim is not None and not state.claim.answered
            for state in self._requests.values()
        )

    def arrived(self, request: HandoffRequest, *, may_hold: bool = True) -> bool:
        """Registers a request; returns whether it may pull. ``heartbeat`` then renews the hold.

        ``may_hold``: whether blocks may be stored now, so that a hold may be published early.
        """
        params = TransferParams.parse(request.kv_transfer_params)
        if params is None:
            return False
        wanted = may_pull(params, self._options) and (params.do_remote_prefill or params.has_blocks)
        wanted = wanted and not params.has_no_peer
        if params.pulls_early and not early_length(self._geometry, request.prompt_tokens):
            wanted = False  # a prefill engine publishes nothing of such a prompt
        # A peer cannot hold a state of a prompt of one block.
        is_expected = params.do_remote_prefill and request.prompt_tokens > self._state_tokens
        if is_expected and params.holds_nothing and params.remote is not None:
            self._server.not_claimed(request, params.remote, NotClaimedReason.NOTHING_HELD)
        transfer = TransferState.WANTED if wanted else TransferState.NONE
        state = self._requests[request.request_id] = HandoffState(request, params, transfer)
        if wanted:
            self._without_heartbeat.append(request.request_id)
        if params.holds_early and may_hold and request.may_hold:
            state.early = name_blocks(self._geometry, self._identity.engine_id, request)
            if state.early is not None:
                state.publication = self._publish(state, state.early)
        return wanted

    def match(self, request_id: str, computed_tokens: int, now: float, wall_time: float) -> int | None:
        """Returns how many tokens after ``computed_tokens`` can be pulled.

        The adapter calls this each time that the scheduler considers a waiting request. If the
        peer's server has not answered yet, returns None; the adapter asks again in the next step.
        Returns 0 if the request has already had its only transfer (B2.10), or if
        ``computed_tokens`` is not a multiple of ``step_tokens``.
        """
        state = self._requests.get(request_id)
        if state is None or state.transfer not in (TransferState.WANTED, TransferState.CLAIMED):
            return 0
        if computed_tokens % self._geometry.step_tokens or not self._is_wanted(state, computed_tokens, wall_time):
            return 0
        claim = self._claim(state, computed_tokens, now)
        if claim is None:
            self._end_transfer(state)
            return 0
        if not claim.answered:
            if now < claim.deadline:
                return None
            self._server.warn(
                f"{request_id}: the claim of {_describe(state.params.remote)} timed out; the engine computes the request"
            )
            self._end_transfer(state)
            return 0
        return self._offer(state, claim, computed_tokens)

    def claim_ended(self, number: ClaimId, claimed: ClaimedBlocks | None, now: float) -> None:
        """Records the result of ``start_claim``, unless the claim was dropped.

        ``claimed`` is None if the server granted no lease.
        """
        state = self._claims.state(number)
        if state is None or state.claim is None or state.params.remote is None:
            return
        claim = state.claim
        claim.answered, claim.answered_at = True, now
        if claimed is not None:
            claim.record(self._geometry, state.engine, state.params, claimed, state.pull)
        if state.transfer is TransferState.PULLING:
            self._continue_pull(state, claim)
        elif claim.is_early and not self._claims.again(state, claim, state.claimed_at):
            self._end_transfer(state)

    def allocated(self, request_id: str, tables: BlockTables, external_tokens: int) -> None:
        """The engine allocated blocks to pull ``external_tokens`` of the match: all, some or none.

        If ``external_tokens`` is above 0, the engine lets the request wait for a pull. Therefore
        ``take_pulls`` always returns a pull for it, if necessary with an empty job. If it is 0, the
        core ends the transfer and releases the peer's hold (B2.11).
        """
        state = self._requests.get(request_id)
        if external_tokens > 0:
            self._pull(state, request_id, tables, external_tokens)
        if state is None:
            return
        params = state.params
        state.hold_at_end = state.engine.may_hold and self._options.holds_at_end(params)
        if state.transfer in (TransferState.WANTED, TransferState.CLAIMED):
            if params.remote is None:
                self._server.warn(
                    f"{request_id}: kv_transfer_params do not fully name the peer; the engine computes the request"
                )
            self._end_transfer(state)

    def pull_ended(self, request_id: str) -> None:
        """Ends the transfer: workers have ended the request's pull, successfully or not."""
        state = self._requests.get(request_id)
        if state is not None and state.transfer is TransferState.PULLING:
            self._end_transfer(state)
            if state.ended:
                del self._requests[request_id]

    def reset(self) -> None:
        """Drops all claims, because the engine's cache was reset (B4.13).

        Pulls in flight continue, as running requests do. Requests that still wait claim again.
        """
        for state in self._requests.values():
            if state.transfer is TransferState.CLAIMED:
                self._claims.drop(state)

    def take_pulls(self) -> list[BlockPull]:
        """Returns the pulls of this step; each is returned once."""
        pulls, self._pulls = self._pulls, []
        return pulls

    def heartbeat(self, now: float) -> None:
        """Renews the peers' holds of all requests that have not ended their pull (B2.1).

        The adapter calls this once per step. Every ``heartbeat_s`` seconds the core sends one for
        all these requests; for a new request it sends one at once. With the heartbeat for all it
        fails each pull whose claim got no answer until ``claim_timeout_s`` after its deadline.
        """
        new_requests, self._without_heartbeat = self._without_heartbeat, []
        if now >= self._next_heartbeat_at:
            self._next_heartbeat_at = now + self._options.heartbeat_s
            self._fail_unanswered(now)
            self._renew(self._requests.values())
        elif new_requests:
            self._renew(self._requests[name] for name in new_requests if name in self._requests)

    def finished(
        self,
        request_id: str,
        tables: BlockTables,
        confirmed_tokens: int,
        reason: FinishReason,
        wall_time: float,
        state_tokens: int | None = None,
    ) -> FinishedRequest:
        """Ends a request. Returns the blocks that the engine must store before it frees them.

        The engine may free all other blocks at once. ``state_tokens``: see ``held_length``.
        """
        state = self._requests.pop(request_id, None)
        if state is None:
            return FinishedRequest()
        is_pulling = state.transfer is TransferState.PULLING
        if is_pulling:
            state.ended = True
            self._requests[request_id] = state
            if state.pull is not None:
                self._fail_pull(state)
        elif state.transfer in (TransferState.WANTED, TransferState.CLAIMED):
            self._end_transfer(state)
        # A request that was never scheduled is not held (B2.14).
        is_held = state.hold_at_end and reason.is_normal and not is_pulling
        if state.publication is not None and state.publication.refused:
            state.early = None  # `_hold` publishes the request like one without overlap
        if state.early is not None:
            if is_held:
                self._server.renew([self._own(state)])
            else:
                self._server.release(self._own(state))
        if not is_held:
            return FinishedRequest(drop_saves=state.hold_at_end or is_pulling)
        return self._hold(state, tables, confirmed_tokens, state_tokens, wall_time)

    # ---- details

    def _own(self, state: HandoffState) -> RemoteRequest:
        identity = self._identity
        return RemoteRequest(identity.engine_id, state.engine.hold_name, identity.host, identity.port)

    def _renew(self, states: Iterable[HandoffState]) -> None:
        waiting = (TransferState.WANTED, TransferState.CLAIMED, TransferState.PULLING)
        remotes: list[RemoteRequest | None] = []
        for state in states:
            if state.transfer in waiting:
                remotes.append(state.params.remote)
            if state.early is not None and not state.ended:
                remotes.append(self._own(state))
        alive = list(dict.fromkeys(remote for remote in remotes if remote is not None))
        if alive:
            self._server.renew(alive)

    def _is_wanted(self, state: HandoffState, computed_tokens: int, wall_time: float) -> bool:
        params, options, request = state.params, self._options, state.engine
        if not request.may_pull:
            return False
        # The hold has expired, or will expire before workers have read it (B2.19).
        if params.expiry_time is not None and params.expiry_time - EXPIRY_MARGIN_S <= wall_time:
            self._server.debug(
                f"{request.request_id}: the hold of {_describe(params.remote)} has expired; the engine computes the request"
            )
            return False
        offered = offered_tokens(params, request.prompt_tokens, computed_tokens, options)
        wanted = apply_threshold(offered, params, options)
        if offered and not wanted:
            threshold = options.kv_recompute_threshold
            self._server.debug(
                f"{request.request_id}: {offered} tokens are below the threshold {threshold}; the engine computes them"
            )
        return bool(wanted)

    def _offer(self, state: HandoffState, claim: Claim, computed_tokens: int) -> int:
        """Returns how many tokens of an answered claim to pull; 0 if they are too few."""
        state.offered_from = computed_tokens
        reach = claim.reach_of(self._geometry, state.engine.prompt_tokens, computed_tokens)
        if needs_older_windows(self._geometry, computed_tokens, reach):
            return 0
        return apply_threshold(reach - computed_tokens, state.params, self._options)

    def _claim(self, state: HandoffState, computed_tokens: int, now: float) -> Claim | None:
        """Returns the current claim. If it is missing or stale, starts a new claim."""
        known, remote = state.claim, state.params.remote
        if known is not None and known.computed_tokens <= computed_tokens and not self._is_stale(known, now):
            return known
        self._claims.drop(state)
        if remote is None:
            return None
        min_blocks = 1 if state.params.pulls_early else 0
        claim = self._claims.start(state, remote, computed_tokens, min_blocks, now)
        if claim is not None and state.transfer is not TransferState.CLAIMED:
            state.transfer, state.claimed_at = TransferState.CLAIMED, now
        return claim

    def _is_stale(self, claim: Claim, now: float) -> bool:
        granted = claim.answered and claim.answer is not None
        return granted and now - claim.answered_at > self._options.claim_lifetime_s

    def _pull(self, state: HandoffState | None, request_id: str, tables: BlockTables, external_tokens: int) -> None:
        job = LoadJob(request_id)
        if state is None or state.transfer not in (TransferState.WANTED, TransferState.CLAIMED):
            self._pulls.append(BlockPull(None, job))
            return
        # Record the pull first. If planning raises, workers report the empty job as failed.
        state.transfer = TransferState.PULLING
        self._pulls.append(BlockPull(state.params.remote, job))
        claim, start, end = state.claim, state.offered_from, state.offered_from + external_tokens
        if claim is None or claim.answer is None:
            return
        if not state.params.pulls_early:
            job.reads = plan_pull(self._geometry, claim.ready, claim.answer.lease_id, tables, start, end)
        elif blocks := pull_blocks(self._geometry, tables, start, end):
            ends = [-(-end // group.block_tokens) for group in self._geometry.groups]
            state.pull = OpenPull(blocks, ends, claim.answered_at)
            job.reads, job.is_last = self._claims.next_part(state, claim)

    def _continue_pull(self, state: HandoffState, claim: Claim) -> None:
        """Adds a job for the blocks of an answered claim to a pull that waits for more blocks."""
        if state.pull is not None:
            reads, is_last = self._claims.next_part(state, claim)
            if reads or is_last:
                self._pulls.append(BlockPull(state.params.remote, LoadJob(state.engine.request_id, reads, is_last)))

    def _fail_pull(self, state: HandoffState) -> None:
        state.pull = None  # it waits for further blocks
        self._pulls.append(BlockPull(state.params.remote, LoadJob(state.engine.request_id)))

    def _fail_unanswered(self, now: float) -> None:
        for state in self._requests.values():
            claim = state.claim if state.pull is not None else None
            if claim is not None and now >= claim.deadline + self._options.claim_timeout_s:
                self._server.warn(
                    f"{state.engine.request_id}: a claim was not answered; the engine computes the request"
                )
                self._fail_pull(state)

    def _end_transfer(self, state: HandoffState) -> None:
        """Ends the transfer: releases the lease and the peer's hold (B2.11)."""
        self._claims.drop(state)
        state.transfer, state.pull = TransferState.OVER, None
        if state.params.remote is not None:
            self._server.release(state.params.remote)

    def _hold(
        self,
        state: HandoffState,
        tables: BlockTables,
        confirmed_tokens: int,
        state_tokens: int | None,
        wall_time: float,
    ) -> FinishedRequest:
        prefilled, identity = state.params.do_remote_decode, self._identity
        if state.early is not None:
            held = state.early
            find_blocks(self._geometry, state.engine, tables, held, self._cache)
        else:
            geometry, request, cache = self._geometry, state.engine, self._cache
            end = held_length(geometry, request, confirmed_tokens, state_tokens, cache, same_prompt=prefilled)
            held = hold_blocks(geometry, identity.engine_id, request, tables, end, cache)
            if held.keys:
                self._publish(state, held)
        params = {
            "do_remote_prefill": prefilled,
            "do_remote_decode": not prefilled,
            # Positions instead of block ids, because a server holds the blocks.
            "remote_block_ids": held.positions,
            "remote_engine_id": identity.engine_id,
            "remote_request_id": state.engine.hold_name,
            "remote_host": identity.host,
            "remote_port": identity.port,
            "tp_size": identity.tp_size,
            "remote_num_tokens": held.num_tokens,
            "remote_blocks_expiry_time": (
                wall_time + self._options.decoder_kv_blocks_ttl if held.keys and not prefilled else None
            ),
        }
        return FinishedRequest(params, held.blocks)

    def _publish(self, state: HandoffState, held: HeldBlocks) -> PlannedPublication:
        prefilled, options = state.params.do_remote_decode, self._options
        direction = HandoffDirection.PREFILL_TO_DECODE if prefilled else HandoffDirection.DECODE_TO_PREFILL
        hold_for = options.kv_lease_duration if prefilled else options.decoder_kv_blocks_ttl
        positions = [position for group in held.positions for position in group]
        name = state.engine.hold_name
        publication = PlannedPublication(name, direction, held.keys, positions, held.num_tokens, hold_for)
        self._server.publish(publication)
        return publication


def _describe(remote: RemoteRequest | None) -> str:
    return f"{remote.request_id} of {remote.engine_id}" if remote is not None else "no peer"
