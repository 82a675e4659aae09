"""Claims of a peer's hold: usable blocks of a claim, and blocks to pull (B2)."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field
from enum import Enum

from ..offload import BlockRead, BlockTables, CacheGeometry, CacheGroup, CacheGroupKind
from ..offload.loads import longest_hit
from .holds import HeldBlocks, block_key
from .model import ClaimedBlocks, ClaimId, HandoffOptions, HandoffRequest, HandoffServer, PlannedPublication
from .params import RemoteRequest, TransferParams

__all__ = [
    "Claim",
    "Claims",
    "HandoffState",
    "OpenPull",
    "TransferState",
    "Usable",
    "apply_threshold",
    "may_pull",
    "needs_earlier_context",
    "needs_older_windows",
    "offered_tokens",
    "plan_pull",
    "pull_blocks",
    "usable_blocks",
    "usable_tokens",
]


Usable = dict[int, dict[int, int]]
"""``usable[group index][position]`` is the index of the block in the lease."""


class TransferState(Enum):
    """State of a request's transfer; a request has at most one (B2.10).

    The state changes only to a later state of this list.

    NONE: the request pulls nothing from a peer.
    WANTED: the request may pull, and no claim was sent yet.
    CLAIMED: a claim was sent or granted.
    PULLING: workers copy the blocks.
    OVER: the transfer has ended or was given up; the core has released the peer's hold.
    """

    NONE = "none"
    WANTED = "wanted"
    CLAIMED = "claimed"
    PULLING = "pulling"
    OVER = "over"


@dataclass
class Claim:
    """A claim of a hold's blocks after ``computed_tokens``.

    ``answer``: the granted blocks; None if the claim is not answered yet or was refused.
    ``usable``: the blocks of the answer that have this request's tokens. If the engine pulls while
    the peer computes, these are also the blocks that the peer has not stored yet.
    ``ready``: the usable blocks that are leased.
    ``reach``: number of leading tokens that the engine has after it has pulled the usable blocks.
    """

    number: ClaimId
    computed_tokens: int
    deadline: float
    answered: bool = False
    answered_at: float = 0.0
    answer: ClaimedBlocks | None = None
    usable: Usable = field(default_factory=dict)
    ready: Usable = field(default_factory=dict)
    reach: int = 0

    def record(
        self,
        geometry: CacheGeometry,
        request: HandoffRequest,
        params: TransferParams,
        claimed: ClaimedBlocks,
        pull: OpenPull | None = None,
    ) -> None:
        """Records the answer of a granted claim.

        ``pull``: a pull that waits for the blocks. Then only its missing blocks count, and
        ``reach`` stays 0. So the cost of a part falls with the number of missing blocks.
        """
        assert params.remote is not None
        self.answer = claimed
        wanted = pull.blocks if pull is not None else None
        self.ready, self.usable = usable_blocks(
            geometry, request, params.remote, claimed, wanted=wanted, pending=params.pulls_early
        )
        if pull is None:
            self.reach = usable_tokens(geometry, self.usable, claimed.num_tokens, self.computed_tokens)

    def reach_of(self, geometry: CacheGeometry, prompt_tokens: int, computed_tokens: int) -> int:
        """Returns how many leading tokens a request has after a pull of the usable blocks."""
        if self.reach < prompt_tokens:
            return self.reach
        limit = prompt_tokens
        if needs_earlier_context(geometry, limit):
            limit = (limit - 1) // geometry.step_tokens * geometry.step_tokens
        return usable_tokens(geometry, self.usable, limit, computed_tokens)

    @property
    def is_early(self) -> bool:
        """Whether the peer has not stored a usable block yet, but may do so."""
        return not any(self.ready.values()) and any(self.usable.values())


@dataclass
class OpenPull:
    """A pull in several parts, while the peer computes.

    ``blocks[group index, position]``: id of the engine's block that is not filled yet, in the order
    of positions. ``ends``: per group the position after the last block. ``progress_at``: when a
    claim last granted a block.
    """

    blocks: dict[tuple[int, int], int]
    ends: list[int]
    progress_at: float

    @property
    def first_positions(self) -> list[int]:
        """Per group the position of the first block that is not filled yet."""
        first: dict[int, int] = {}
        for group_index, position in self.blocks:
            first.setdefault(group_index, position)
        return [first.get(index, end) for index, end in enumerate(self.ends)]

    def take(self, claim: Claim) -> list[BlockRead]:
        """Returns the read of the blocks that the claim has leased, and marks them as filled."""
        if claim.answer is None:
            return []
        read = BlockRead(claim.answer.lease_id)
        for (group_index, position), block_id in list(self.blocks.items()):
            item = claim.ready[group_index].get(position)
            if item is not None:
                read.add(item, group_index, block_id)
                del self.blocks[group_index, position]
        if not read.indices:
            return []
        self.progress_at = claim.answered_at
        return [read]

    def can_end(self, claim: Claim) -> bool:
        """Whether the peer has stored the missing blocks, or may still do so."""
        usable = claim.usable
        return all(position in usable.get(group_index, {}) for group_index, position in self.blocks)


@dataclass
class HandoffState:
    """Hand-off state of one request.

    ``claimed_at``: when the first claim was started.
    ``offered_from``: number of computed tokens when ``match`` last offered tokens.
    ``hold_at_end``: the request was scheduled, and its blocks are held when it ends (B2.8).
    ``ended``: the request has ended, but workers still write into its blocks.
    ``pull``: the pull in several parts, until its last part.
    ``earlier_claims``: claims whose leases the parts of a pull read.
    ``early``: the hold that was published when the request arrived.
    ``publication``: the publication of ``early``.
    """

    engine: HandoffRequest
    params: TransferParams
    transfer: TransferState
    claim: Claim | None = None
    claimed_at: float = 0.0
    offered_from: int = 0
    hold_at_end: bool = False
    ended: bool = False
    pull: OpenPull | None = None
    earlier_claims: list[Claim] = field(default_factory=list)
    early: HeldBlocks | None = None
    publication: PlannedPublication | None = None


class Claims:
    """Claims of all requests, and the parts of pulls that wait for further claims."""

    def __init__(self, geometry: CacheGeometry, options: HandoffOptions, server: HandoffServer) -> None:
        self._geometry = geometry
        self._options = options
        self._server = server
        self._states: dict[ClaimId, HandoffState] = {}
        self._next = 1

    def state(self, number: ClaimId) -> HandoffState | None:
        """Returns the request of a claim that was not dropped."""
        return self._states.get(number)

    def start(
        self, state: HandoffState, remote: RemoteRequest, computed_tokens: int, min_blocks: int, now: float
    ) -> Claim | None:
        """Claims the blocks after ``computed_tokens``. Returns None if no server is connected."""
        claim = Claim(ClaimId(self._next), computed_tokens, now + self._options.claim_timeout_s)
        first_positions = [computed_tokens // group.block_tokens for group in self._geometry.groups]
        if state.pull is not None:
            first_positions = state.pull.first_positions
        if not self._server.start_claim(claim.number, state.engine, remote, first_positions, min_blocks):
            return None
        self._next += 1
        self._states[claim.number] = state
        state.claim = claim
        return claim

    def again(self, state: HandoffState, claim: Claim, waits_since: float) -> bool:
        """Starts a claim of further blocks of the same hold. The lease of ``claim`` is kept.

        Returns False if no block has come since ``waits_since`` for longer than the peer's lease.
        """
        answer, remote = claim.answer, state.params.remote
        if answer is None or remote is None or claim.answered_at - waits_since > self._options.kv_lease_duration:
            return False
        more = self.start(state, remote, claim.computed_tokens, answer.settled_blocks + 1, claim.answered_at)
        if more is not None:
            state.earlier_claims.append(claim)
        return more is not None

    def drop(self, state: HandoffState) -> None:
        """Drops all claims of a request, and so releases their leases."""
        claims, state.earlier_claims = state.earlier_claims, []
        if state.claim is not None:
            claims.append(state.claim)
        state.claim = None
        for claim in claims:
            del self._states[claim.number]
            self._server.drop_claim(claim.number)

    def next_part(self, state: HandoffState, claim: Claim) -> tuple[list[BlockRead], bool]:
        """Returns reads of the blocks of an answered claim, and whether the pull ends with them.

        If blocks are still missing, claims them. If they cannot come, the pull ends without reads,
        so it fails, and the engine computes the request.
        """
        pull = state.pull
        assert pull is not None
        reads = pull.take(claim)
        if pull.blocks:
            if pull.can_end(claim) and self.again(state, claim, pull.progress_at):
                return reads, False
            reads = []
        state.pull = None
        return reads, True


# ---- how much to pull


def may_pull(params: TransferParams, options: HandoffOptions) -> bool:
    """Whether parameters and options allow a pull (B2.7, B2.9)."""
    if params.holds_nothing:
        return False
    return params.do_remote_prefill or (params.do_remote_decode and options.bidirectional_kv_xfer)


def offered_tokens(params: TransferParams, prompt_tokens: int, computed_tokens: int, options: HandoffOptions) -> int:
    """Number of tokens after ``computed_tokens`` that the peer has according to ``params``."""
    if params.remote is None or not may_pull(params, options):
        return 0
    if params.do_remote_prefill:
        return max(0, prompt_tokens - computed_tokens)
    return max(0, min(params.num_tokens, prompt_tokens) - computed_tokens) if params.has_blocks else 0


def apply_threshold(count: int, params: TransferParams, options: HandoffOptions) -> int:
    """Returns ``count``, or 0 if ``count`` is below the threshold of a prefill engine (B2.4)."""
    too_few = not params.do_remote_prefill and count < options.kv_recompute_threshold
    return 0 if count <= 0 or too_few else count


def usable_blocks(
    geometry: CacheGeometry,
    request: HandoffRequest,
    remote: RemoteRequest,
    claimed: ClaimedBlocks,
    *,
    wanted: Container[tuple[int, int]] | None = None,
    pending: bool = False,
) -> tuple[Usable, Usable]:
    """Returns ``ready`` and ``usable`` of a claim.

    These are claimed blocks whose keys, and so tokens, equal those of this request. ``wanted``:
    only blocks of these (group index, position). ``pending``: the peer may still store blocks.
    """
    ready: Usable = {group.index: {} for group in geometry.groups}
    usable: Usable = {group.index: {} for group in geometry.groups}
    groups = {group.index: group for group in geometry.groups}
    for item, block in enumerate(claimed.blocks):
        place = (block.group_index, block.position)
        if wanted is not None and place not in wanted:
            continue
        group = groups.get(block.group_index)
        if group is None or (block.item is None and not (pending and block.is_pending)):
            continue
        if block.key == block_key(
            request, remote.engine_id, remote.request_id, group, block.position, claimed.num_tokens
        ):
            usable[group.index][block.position] = item
            if block.item is not None:
                ready[group.index][block.position] = block.item
    return ready, usable


def usable_tokens(geometry: CacheGeometry, usable: Usable, num_tokens: int, computed_tokens: int) -> int:
    """Number of leading tokens that the engine has after a pull of usable blocks.

    ``computed_tokens``: tokens that the engine has before the pull; a multiple of ``step_tokens``.
    """
    if all(_is_complete(group, usable[group.index], num_tokens, computed_tokens) for group in geometry.groups):
        return num_tokens
    step = geometry.step_tokens
    present = {index: set(items) for index, items in usable.items()}
    return longest_hit(geometry.groups, present, computed_tokens, num_tokens // step * step, step)


def needs_older_windows(geometry: CacheGeometry, start: int, end: int) -> bool:
    """Whether a pull of [``start``, ``end``) needs window blocks that the engine may have evicted.

    An engine with state groups counts tokens before ``start`` as computed if it has their
    full-attention blocks, even if it evicted their sliding-window blocks.
    """
    if not any(group.is_state for group in geometry.groups):
        return False
    windows = (group for group in geometry.groups if group.kind is CacheGroupKind.WINDOW)
    return any(group.first_needed_block(end) < start // group.block_tokens for group in windows)


def needs_earlier_context(geometry: CacheGeometry, end: int) -> bool:
    """Whether the engine cannot compute the last prompt token after a pull of all ``end`` tokens.

    The engine always computes the last token of a prompt, from the context before this token. A
    pulled state already contains this token, so it is unusable. A sliding window may need an
    earlier block, which this pull lacks.
    """
    return any(g.is_state or g.first_needed_block(end - 1) < g.first_needed_block(end) for g in geometry.groups)


def plan_pull(
    geometry: CacheGeometry, usable: Usable, lease_id: int, tables: BlockTables, start: int, end: int
) -> list[BlockRead]:
    """Returns the read that fills all blocks allocated for [``start``, ``end``).

    The engine treats every allocated block as loaded. So the result is empty if the claim lacks one
    of these blocks, or if ``start`` is inside a block.
    """
    read = BlockRead(lease_id)
    for (group_index, position), block_id in pull_blocks(geometry, tables, start, end).items():
        item = usable[group_index].get(position)
        if item is None:
            return []
        read.add(item, group_index, block_id)
    return [read] if read.indices else []


def pull_blocks(geometry: CacheGeometry, tables: BlockTables, start: int, end: int) -> dict[tuple[int, int], int]:
    """Returns the blocks allocated for [``start``, ``end``) by (group index, position).

    Empty if ``start`` is inside a block.
    """
    if any(start % group.block_tokens for group in geometry.groups):
        return {}
    return {
        (group.index, position): block_id
        for group in geometry.groups
        for position in range(start // group.block_tokens, -(-end // group.block_tokens))
        if (block_id := tables[group.index][position]) != geometry.null_block
    }


def _is_complete(group: CacheGroup, items: dict[int, int], num_tokens: int, computed_tokens: int) -> bool:
    first = max(group.first_needed_block(num_tokens), computed_tokens // group.block_tokens)
    return all(position in items for position in range(first, -(-num_tokens // group.block_tokens)))
