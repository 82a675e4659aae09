"""Handing requests from one engine to another, for any engine: what to pull, what to hold, and when a peer is not needed any more.

A state machine without I/O, clock or threads, beside the one of offloading (``client/offload``): that one stores a request's full
blocks, this one has them held, names what has no content hash, and pulls what a peer holds. In the order of one request's life:

    arrived -> match (until it is known) -> allocated -> [pull_ended] -> finished

and besides: ``claim_ended``, and ``heartbeat`` and ``take_pulls`` once per step. ``now`` is seconds of any clock that does not go
back, ``wall_time`` seconds since 1970. Requests that the core does not know, or that have no parameters, are none of its business.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

from ..offload import BlockTables, CacheGeometry, FreeBlock, LoadJob
from .claims import (
    Claim,
    HandoffState,
    TransferState,
    apply_threshold,
    is_expired,
    may_pull,
    needs_earlier_context,
    needs_older_windows,
    offered_tokens,
    plan_pull,
    usable_blocks,
    usable_tokens,
)
from .holds import hold_blocks
from .model import (
    ClaimedBlocks,
    ClaimId,
    Direction,
    FinishReason,
    HandoffOptions,
    HandoffRequest,
    HandoffServer,
    PlannedPublication,
)
from .params import RemoteRequest, TransferParams, returned_params

__all__ = ["BlockPull", "EngineIdentity", "FinishedRequest", "HandoffCore"]


class EngineIdentity(NamedTuple):
    """Who we are for our peers: our engine, the server that holds our requests, and how many ranks have a part of each block."""

    engine_id: str
    host: str
    port: int
    tp_size: int


class BlockPull(NamedTuple):
    """A load from the server that ``remote`` names. Without reads it is one that cannot be done."""

    remote: RemoteRequest | None
    job: LoadJob


class FinishedRequest(NamedTuple):
    """What a request's end comes to: the parameters to answer with, and the blocks to be stored under the names given here.

    That is all that is held, so that who pulls it waits for nothing that was left out.

    ``drop_saves``: nothing more of it is to be stored at all (B2.16), or can be: its blocks may hold anything.
    """

    params: dict[str, Any] | None = None
    blocks: Collection[FreeBlock] = ()
    drop_saves: bool = False


class HandoffCore:
    """One engine's. It never waits; every method is called on the scheduler's thread."""

    def __init__(
        self, geometry: CacheGeometry, identity: EngineIdentity, options: HandoffOptions, server: HandoffServer
    ) -> None:
        self._geometry = geometry
        self._identity = identity
        self._options = options
        self._server = server
        self._requests: dict[str, HandoffState] = {}
        self._claims: dict[ClaimId, HandoffState] = {}
        self._pulls: list[BlockPull] = []
        self._next_claim = 1
        self._beat_at = 0.0
        # Of whose peers no heartbeat was sent yet.
        self._newcomers: list[str] = []

    @property
    def pending(self) -> bool:
        """Whether the engine must keep stepping for pulls to be sent or reported."""
        return bool(self._pulls) or any(state.transfer is TransferState.PULLING for state in self._requests.values())

    def arrived(self, request: HandoffRequest) -> bool:
        """A request is new; returns whether it may pull something. That gets its first heartbeat with the next step."""
        params = TransferParams.parse(request.kv_transfer_params)
        if params is None:
            return False
        wanted = may_pull(params, self._options) and (params.do_remote_prefill or params.has_blocks)
        wanted = wanted and not params.has_no_peer
        transfer = TransferState.WANTED if wanted else TransferState.NONE
        self._requests[request.request_id] = HandoffState(request, params, transfer)
        if wanted:
            self._newcomers.append(request.request_id)
        return wanted

    def match(self, request_id: str, computed_tokens: int, now: float, wall_time: float) -> int | None:
        """How many tokens after ``computed_tokens`` can be pulled; None while that is not known: ask again in the next step.

        Asked each time a waiting request is considered. After its one transfer there is nothing for it any more (B2.10); nor
        where the engine's own tokens end within a block, for nobody reads into the middle of one.
        """
        state = self._requests.get(request_id)
        if state is None or state.transfer not in (TransferState.WANTED, TransferState.CLAIMED):
            return 0
        if computed_tokens % self._geometry.step_tokens or not self._is_wanted(state, computed_tokens, wall_time):
            return 0
        claim = self._claim(state, computed_tokens, now)
        if claim is None:
            self._let_go(state)
            return 0
        if not claim.answered:
            if now < claim.deadline:
                return None
            self._server.warn(
                f"{request_id}: no answer in time what {_name(state.params.remote)} holds; computed instead"
            )
            self._let_go(state)
            return 0
        return self._offer(state, claim, computed_tokens)

    def claim_ended(self, number: ClaimId, claimed: ClaimedBlocks | None, now: float) -> None:
        """The server's answer to ``HandoffServer.start_claim``; None where nothing is held. What was dropped is ignored."""
        state = self._claims.get(number)
        if state is None or state.claim is None or state.params.remote is None:
            return
        claim = state.claim
        claim.answered, claim.answered_at, claim.answer = True, now, claimed
        if claimed is not None:
            claim.usable = usable_blocks(self._geometry, state.engine, state.params.remote, claimed)
            claim.reach = usable_tokens(self._geometry, claim.usable, claimed.num_tokens, claim.computed_tokens)

    def allocated(self, request_id: str, tables: BlockTables, external_tokens: int) -> None:
        """The engine gave a request blocks, for ``external_tokens`` of what was matched (or none) and what it computes.

        With external tokens it waits for their pull, which is in the next plan whatever is wrong with it. Without, on the first
        time, nothing is transferred: the peer is told that it may let go (B2.11).
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
                    f"{request_id}: its kv_transfer_params do not say whose blocks to pull; computed instead"
                )
            self._let_go(state)

    def pull_ended(self, request_id: str) -> None:
        """Workers have ended a pull, well or badly: that was the request's transfer."""
        state = self._requests.get(request_id)
        if state is not None and state.transfer is TransferState.PULLING:
            self._let_go(state)
            if state.ended:
                del self._requests[request_id]

    def reset(self) -> None:
        """The engine's cache was emptied, by another model's weights say: what was leased before is not pulled any more (B4.13).

        What is being pulled goes on, as requests that run do. Requests that wait ask again, and learn what is held now.
        """
        for state in self._requests.values():
            if state.transfer is TransferState.CLAIMED:
                self._drop(state)

    def take_pulls(self) -> list[BlockPull]:
        """Returns what the step's workers are to read; each pull is in one plan."""
        pulls, self._pulls = self._pulls, []
        return pulls

    def heartbeat(self, now: float) -> None:
        """Once per step: keeps what is about to be pulled alive, from the first step on and every sixth of a lease (B2.1)."""
        newcomers, self._newcomers = self._newcomers, []
        if now >= self._beat_at:
            self._beat_at = now + self._options.heartbeat_s
            self._renew(self._requests.values())
        elif newcomers:
            self._renew(self._requests[name] for name in newcomers if name in self._requests)

    def finished(
        self, request_id: str, tables: BlockTables, confirmed_tokens: int, reason: FinishReason, wall_time: float
    ) -> FinishedRequest:
        """The request has ended, in whatever way; its blocks may be freed but for its ``blocks``, until these are stored."""
        state = self._requests.pop(request_id, None)
        if state is None:
            return FinishedRequest()
        if state.transfer is TransferState.PULLING:
            state.ended = True
            self._requests[request_id] = state
            return FinishedRequest(drop_saves=True)
        if state.transfer in (TransferState.WANTED, TransferState.CLAIMED):
            self._let_go(state)
            if not state.hold_at_end:
                return FinishedRequest()  # it was never scheduled (B2.14)
        if not state.hold_at_end or not reason.is_normal:
            return FinishedRequest(drop_saves=state.hold_at_end)
        return self._hold(state, tables, confirmed_tokens, wall_time)

    # ---- details

    def _renew(self, states: Iterable[HandoffState]) -> None:
        waiting = (TransferState.WANTED, TransferState.CLAIMED, TransferState.PULLING)
        remotes = [state.params.remote for state in states if state.transfer in waiting]
        alive = list(dict.fromkeys(remote for remote in remotes if remote is not None))
        if alive:
            self._server.renew(alive)

    def _is_wanted(self, state: HandoffState, computed_tokens: int, wall_time: float) -> bool:
        params, options, request = state.params, self._options, state.engine
        if not request.may_pull:
            return False
        if is_expired(params, wall_time):
            self._server.debug(f"{request.request_id}: the time of {_name(params.remote)} is over; computed instead")
            return False
        offered = offered_tokens(params, request.prompt_tokens, computed_tokens, options)
        wanted = apply_threshold(offered, params, options)
        if offered and not wanted:
            threshold = options.kv_recompute_threshold
            self._server.debug(f"{request.request_id}: {offered} tokens < threshold {threshold}; computed, not pulled")
        return bool(wanted)

    def _offer(self, state: HandoffState, claim: Claim, computed_tokens: int) -> int:
        """Returns how many tokens of an answered claim can be pulled, and are worth it."""
        state.offered_from = computed_tokens
        reach = self._reach(claim, state.engine.prompt_tokens, computed_tokens)
        if needs_older_windows(self._geometry, computed_tokens, reach):
            return 0
        return apply_threshold(reach - computed_tokens, state.params, self._options)

    def _reach(self, claim: Claim, prompt_tokens: int, computed_tokens: int) -> int:
        """Returns how many tokens from its start the request may take from an answered claim."""
        if claim.reach < prompt_tokens or claim.usable is None:
            return claim.reach
        limit = prompt_tokens
        if needs_earlier_context(self._geometry, limit):
            limit = (limit - 1) // self._geometry.step_tokens * self._geometry.step_tokens
        return usable_tokens(self._geometry, claim.usable, limit, computed_tokens)

    def _claim(self, state: HandoffState, computed_tokens: int, now: float) -> Claim | None:
        """Returns the claim that says what can be pulled, a new one where there is none that still counts."""
        known, remote = state.claim, state.params.remote
        if known is not None and known.computed_tokens <= computed_tokens and not self._is_stale(known, now):
            return known
        self._drop(state)
        if remote is None:
            return None
        claim = Claim(ClaimId(self._next_claim), computed_tokens, now + self._options.claim_timeout_s)
        first_positions = [computed_tokens // group.block_tokens for group in self._geometry.groups]
        if not self._server.start_claim(claim.number, state.engine, remote, first_positions):
            return None
        self._next_claim += 1
        self._claims[claim.number] = state
        state.claim, state.transfer = claim, TransferState.CLAIMED
        return claim

    def _is_stale(self, claim: Claim, now: float) -> bool:
        granted = claim.answered and claim.answer is not None
        return granted and now - claim.answered_at > self._options.claim_lifetime_s

    def _pull(self, state: HandoffState | None, request_id: str, tables: BlockTables, external_tokens: int) -> None:
        job = LoadJob(request_id)
        if state is None or state.transfer not in (TransferState.WANTED, TransferState.CLAIMED):
            self._pulls.append(BlockPull(None, job))
            return
        # First of all: whatever goes wrong below, the engine is told of a load that has failed, and this was the transfer.
        state.transfer = TransferState.PULLING
        self._pulls.append(BlockPull(state.params.remote, job))
        claim, start = state.claim, state.offered_from
        if claim is not None and claim.answer is not None and claim.usable is not None:
            end = start + external_tokens
            job.reads = plan_pull(self._geometry, claim.usable, claim.answer.lease_id, tables, start, end)

    def _drop(self, state: HandoffState) -> None:
        claim, state.claim = state.claim, None
        if claim is not None:
            del self._claims[claim.number]
            self._server.drop_claim(claim.number)

    def _let_go(self, state: HandoffState) -> None:
        """Ends the transfer, whatever came of it: the lease goes back, and the peer is told (B2.11)."""
        self._drop(state)
        state.transfer = TransferState.OVER
        if state.params.remote is not None:
            self._server.release(state.params.remote)

    def _hold(
        self, state: HandoffState, tables: BlockTables, confirmed_tokens: int, wall_time: float
    ) -> FinishedRequest:
        prefilled, options, us = state.params.do_remote_decode, self._options, self._identity
        holding = hold_blocks(self._geometry, us.engine_id, state.engine, tables, confirmed_tokens)
        hold_for = options.kv_lease_duration if prefilled else options.decoder_kv_blocks_ttl
        if holding.keys:
            direction = Direction.PREFILL_TO_DECODE if prefilled else Direction.DECODE_TO_PREFILL
            self._server.publish(
                PlannedPublication(
                    state.engine.hold_name,
                    direction,
                    holding.keys,
                    holding.flat_positions,
                    holding.num_tokens,
                    hold_for,
                )
            )
        params = returned_params(
            holding.positions,
            RemoteRequest(us.engine_id, state.engine.hold_name, us.host, us.port),
            prefilled=prefilled,
            num_tokens=holding.num_tokens,
            tp_size=us.tp_size,
            expiry_time=wall_time + hold_for if holding.keys and not prefilled else None,
        )
        return FinishedRequest(params, holding.blocks)


def _name(remote: RemoteRequest | None) -> str:
    return f"{remote.request_id} of {remote.engine_id}" if remote is not None else "nobody"
