"""Interfaces of the hand-off core to the engine and to servers, and its options.

All methods are called on the scheduler's thread. They must not block, and must not raise because a
server failed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NewType, Protocol

from ..offload import CacheGroup
from .params import RemoteRequest, TransferParams

__all__ = [
    "EXPIRY_MARGIN_S",
    "ClaimId",
    "ClaimedBlocks",
    "Direction",
    "FinishReason",
    "HandoffOptions",
    "HandoffRequest",
    "HandoffServer",
    "HeldBlock",
    "PlannedPublication",
]


EXPIRY_MARGIN_S = 5.0
"""A hold that expires within this time is not read any more (B2.19)."""

ClaimId = NewType("ClaimId", int)


class Direction(Enum):
    """Direction of a hand-off."""

    PREFILL_TO_DECODE = "prefill to decode"
    DECODE_TO_PREFILL = "decode to prefill"


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
    """A block of a hold. ``item``: its index in the lease; None if the server does not have it."""

    group_index: int
    position: int
    key: bytes
    item: int | None


@dataclass(frozen=True)
class ClaimedBlocks:
    """A granted claim: a lease on blocks of a request of ``num_tokens`` tokens."""

    lease_id: int
    num_tokens: int
    blocks: Sequence[HeldBlock]


@dataclass(frozen=True)
class PlannedPublication:
    """A request to hold for ``hold_for`` seconds. Stores of its blocks may still be in flight."""

    request_id: str
    direction: Direction
    keys: Sequence[bytes]
    positions: Sequence[int]
    num_tokens: int
    hold_for: float


class HandoffRequest(Protocol):
    """One request, from its arrival to its end. Properties return current values."""

    @property
    def request_id(self) -> str:
        """The engine's id, as in the events."""
        ...

    @property
    def hold_name(self) -> str:
        """Name of its hold; peers receive it as ``remote_request_id``."""
        ...

    @property
    def prompt_tokens(self) -> int:
        """Length of its prompt."""
        ...

    @property
    def kv_transfer_params(self) -> object:
        """The caller's value; the core never changes it."""

    @property
    def may_pull(self) -> bool:
        """Whether it may use blocks that other engines computed."""
        ...

    @property
    def may_hold(self) -> bool:
        """Whether its blocks may be stored."""
        ...

    def final_blocks(self, group: CacheGroup) -> int:
        """How many blocks of ``group`` have a content key: those whose tokens are final."""
        ...

    def key(self, group: CacheGroup, position: int) -> bytes:
        """Content key of a block; ``position`` is below ``final_blocks(group)``."""
        ...

    def hold_key(
        self, engine_id: str, request_id: str, group: CacheGroup, position: int, num_tokens: int
    ) -> bytes | None:
        """Key of a block without a content key, in a hold of ``num_tokens`` tokens.

        It is computed from the hold's name and the tokens up to ``num_tokens``, so that the
        claiming engine can check that they are its own. None if the request has fewer tokens.
        """


class HandoffServer(Protocol):
    """Sends the core's requests to servers. Results arrive later, as events."""

    def start_claim(
        self, claim: ClaimId, request: HandoffRequest, remote: RemoteRequest, first_positions: Sequence[int]
    ) -> bool:
        """Leases a hold's blocks, per group from these positions on; waits a while for the hold.

        ``HandoffCore.claim_ended`` answers it. Returns False if no server is connected: a miss.
        """
        ...

    def drop_claim(self, claim: ClaimId) -> None:
        """Releases the lease of a claim, answered or not. The core expects no result."""

    def renew(self, remotes: Sequence[RemoteRequest]) -> None:
        """Sends heartbeats for holds that will be claimed or read."""

    def release(self, remote: RemoteRequest) -> None:
        """Tells the peer's server that the hold is not needed any more."""

    def publish(self, publication: PlannedPublication) -> None:
        """Publishes a hold. A failure is not reported."""

    def debug(self, text: str) -> None:
        """Logs why a request is computed instead of pulled."""

    def warn(self, text: str) -> None:
        """Logs a problem."""


@dataclass(frozen=True)
class HandoffOptions:
    """Settings of the core; times in seconds.

    ``kv_recompute_threshold``: a prefill engine computes fewer tokens than this; 0 always pulls.
    ``bidirectional_kv_xfer``: whether decode engines hold their requests, and prefill engines pull
        them.
    ``kv_lease_duration``: lifetime of a prefill engine's hold without a heartbeat.
    ``decoder_kv_blocks_ttl``: lifetime of a decode engine's hold.
    ``claim_timeout_s``: longest wait of a request for its claim; then the engine computes it.
    ``claim_lifetime_s``: a claim not pulled within this time is repeated, before its lease ends.
    """

    kv_recompute_threshold: int = 64
    bidirectional_kv_xfer: bool = False
    kv_lease_duration: float = 30.0
    decoder_kv_blocks_ttl: float = 480.0
    claim_timeout_s: float = 5.0
    claim_lifetime_s: float = 10.0

    def holds_at_end(self, params: TransferParams | None) -> bool:
        """Whether a request with these parameters is held at its end, for a peer (B2.8)."""
        if params is None:
            return False
        return params.do_remote_decode or (params.do_remote_prefill and self.bidirectional_kv_xfer)

    @property
    def heartbeat_s(self) -> float:
        """Time between two heartbeats: a sixth of the lease."""
        return self.kv_lease_duration / 6
