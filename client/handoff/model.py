"""Interfaces through which the hand-off core uses engine and servers; options of the core.

The core calls all methods of the interfaces on the scheduler's thread. The methods must not block,
and must not raise if a server fails.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NewType, Protocol

from ...protos.values import HandoffDirection, NotClaimedReason
from ..offload import CacheGroup
from .params import RemoteRequest, TransferParams

__all__ = [
    "EXPIRY_MARGIN_S",
    "ClaimId",
    "ClaimedBlocks",
    "FinishReason",
    "HandoffDirection",
    "HandoffOptions",
    "HandoffRequest",
    "HandoffServer",
    "HeldBlock",
    "NotClaimedReason",
    "PlannedPublication",
    "PrefixCache",
]


EXPIRY_MARGIN_S = 5.0
"""An engine does not claim or read a hold that expires within this time (B2.19)."""

ClaimId = NewType("ClaimId", int)


class FinishReason(Enum):
    """Why a request has ended. STOPPED and LENGTH are the normal ends (B2.16)."""

    STOPPED = "stopped"
    LENGTH = "length"
    OTHER = "aborted, or failed"

    @property
    def is_normal(self) -> bool:
        return self is not FinishReason.OTHER


@dataclass(frozen=True)
class HeldBlock:
    """A block of a hold. ``item``: its index in the lease; None if the server lacks the block.

    ``is_pending``: the server lacks the block, but the other engine may still store it.
    """

    group_index: int
    position: int
    key: bytes
    item: int | None
    is_pending: bool = False


@dataclass(frozen=True)
class ClaimedBlocks:
    """A granted claim: a lease on blocks of a hold that has ``num_tokens`` tokens.

    ``lease_id``: 0 if the server has none of the blocks. ``settled_blocks``: number of the hold's
    blocks that the server has, or will never have.
    """

    lease_id: int
    num_tokens: int
    blocks: Sequence[HeldBlock]
    settled_blocks: int = 0


@dataclass
class PlannedPublication:
    """A request whose blocks the server must hold for ``hold_for`` seconds.

    Stores of these blocks may still be in flight when the core publishes the hold. If a peer pulls
    during the prefill, the blocks are not even computed then.

    ``refused``: the server did not publish the hold. The adapter sets it, on any thread.
    """

    request_id: str
    direction: HandoffDirection
    keys: Sequence[bytes]
    positions: Sequence[int]
    num_tokens: int
    hold_for: float
    refused: bool = False


class HandoffRequest(Protocol):
    """One request, from its arrival to its end. Properties return current values."""

    @property
    def request_id(self) -> str:
        """The engine's id of the request. The adapter uses the same id when it calls the core."""
        ...

    @property
    def hold_name(self) -> str:
        """Name of the request's hold; peers receive the name as ``remote_request_id``."""
        ...

    @property
    def prompt_tokens(self) -> int: ...

    @property
    def kv_transfer_params(self) -> object:
        """The value that the engine received with the request; the core never changes it."""

    @property
    def may_pull(self) -> bool:
        """Whether the request may use blocks that other engines computed."""
        ...

    @property
    def may_hold(self) -> bool:
        """Whether blocks of the request may be stored."""
        ...

    def final_blocks(self, group: CacheGroup) -> int:
        """Number of leading full blocks without draft tokens. Only these have a content key."""
        ...

    def key(self, group: CacheGroup, position: int) -> bytes:
        """Content key (token hash) of a block; ``position`` is below ``final_blocks(group)``."""
        ...

    def hold_key(
        self, engine_id: str, request_id: str, group: CacheGroup, position: int, num_tokens: int
    ) -> bytes | None:
        """Key of a block without a content key, in a hold of ``num_tokens`` tokens.

        The key is a hash of the hold's name and of the tokens up to ``num_tokens``. So a claiming
        engine gets the same key only if its own request has the same tokens. None if the request
        has fewer tokens.
        """


class PrefixCache(Protocol):
    """The engine's own prefix cache."""

    def cached_block(self, request: HandoffRequest, group: CacheGroup, position: int) -> int | None:
        """Id of a block with the content key of this position; None if the cache lacks it.

        ``position`` is below ``request.final_blocks(group)``. The engine may evict the block as
        soon as it runs, unless the caller holds it.
        """


class HandoffServer(Protocol):
    """Sends the core's requests to servers. The adapter reports results by calling the core."""

    def start_claim(
        self,
        claim: ClaimId,
        request: HandoffRequest,
        remote: RemoteRequest,
        first_positions: Sequence[int],
        min_blocks: int,
    ) -> bool:
        """Starts a claim: leases the blocks of each group from ``first_positions[group]`` on.

        Returns at once. The claim waits in the background, for a limited time, until the peer has
        published the hold and has stored ``min_blocks`` of its blocks (0: all). The adapter
        passes the result to ``HandoffCore.claim_ended``. Returns False if the peer's server cannot
        be reached; the engine then computes the request.
        """
        ...

    def not_claimed(self, request: HandoffRequest, remote: RemoteRequest, reason: NotClaimedReason) -> None:
        """Counts a request that is computed without a claim; reports it to the engine's server."""

    def drop_claim(self, claim: ClaimId) -> None:
        """Cancels a claim: the adapter reports no result and releases the lease, if granted."""

    def renew(self, remotes: Sequence[RemoteRequest]) -> None:
        """Sends heartbeats, so that the holds of these requests do not expire before the pull."""

    def release(self, remote: RemoteRequest) -> None:
        """Releases the hold on the peer's server."""

    def publish(self, publication: PlannedPublication) -> None:
        """Publishes a hold in the background, and sets ``publication.refused`` if that failed."""

    def debug(self, text: str) -> None:
        """Logs why a request is computed instead of pulled."""

    def warn(self, text: str) -> None:
        """Logs a problem."""


@dataclass(frozen=True)
class HandoffOptions:
    """Settings of the core; times in seconds.

    ``kv_recompute_threshold``: if fewer tokens than this can be pulled, a prefill engine computes
        these tokens. With 0 the engine always pulls.
    ``bidirectional_kv_xfer``: whether decode engines hold finished requests for prefill engines.
    ``kv_lease_duration``: lifetime of a prefill engine's hold without a heartbeat.
    ``decoder_kv_blocks_ttl``: lifetime of a decode engine's hold.
    ``claim_timeout_s``: maximum time that a request waits for its claim; after this time the engine
        computes the request.
    ``claim_lifetime_s``: if a granted claim is not pulled within this time, the core claims again.
        This time must be shorter than the lease of the claim.
    """

    kv_recompute_threshold: int = 64
    bidirectional_kv_xfer: bool = False
    kv_lease_duration: float = 30.0
    decoder_kv_blocks_ttl: float = 480.0
    claim_timeout_s: float = 5.0
    claim_lifetime_s: float = 10.0

    def holds_at_end(self, params: TransferParams | None) -> bool:
        """Whether a request with these parameters is held for a peer when it ends (B2.8)."""
        if params is None:
            return False
        return params.do_remote_decode or (params.do_remote_prefill and self.bidirectional_kv_xfer)

    @property
    def heartbeat_s(self) -> float:
        """Time between two heartbeats: a sixth of ``kv_lease_duration``."""
        return self.kv_lease_duration / 6
