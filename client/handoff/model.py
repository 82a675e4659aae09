"""What the core asks of its surroundings: of the engine's requests, and of whoever talks to the servers.

Everything is called on the thread that calls the core, may not block, and may not raise for what a server does.
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


ClaimId = NewType("ClaimId", int)


class Direction(Enum):
    """Which way a request goes on."""

    PREFILL_TO_DECODE = "prefill to decode"
    DECODE_TO_PREFILL = "decode to prefill"


class FinishReason(Enum):
    """Why a request has ended. STOPPED and LENGTH are the normal ends (B2.16)."""

    STOPPED = "stopped"
    LENGTH = "length"
    OTHER = "aborted, or failed"

    @property
    def is_normal(self) -> bool:
        """Whether it has said all that it had to say."""
        return self is not FinishReason.OTHER


@dataclass(frozen=True)
class HeldBlock:
    """A block of a hold: where it stands, how it is named, and which item of the lease it is; None where it is not there."""

    group_index: int
    position: int
    key: bytes
    item: int | None


@dataclass(frozen=True)
class ClaimedBlocks:
    """What a claim was granted: a lease on blocks of a request of ``num_tokens`` tokens."""

    lease_id: int
    num_tokens: int
    blocks: Sequence[HeldBlock]


@dataclass(frozen=True)
class PlannedPublication:
    """A request to be held, for so many seconds. Its blocks may be on their way to the server still."""

    request_id: str
    direction: Direction
    keys: Sequence[bytes]
    positions: Sequence[int]
    num_tokens: int
    hold_for: float


class HandoffRequest(Protocol):
    """One request, from its arrival to its end; its answers are as of now."""

    @property
    def request_id(self) -> str:
        """The engine's name of it, as in the events."""
        ...

    @property
    def hold_name(self) -> str:
        """What its hold is to be called; peers are told."""
        ...

    @property
    def prompt_tokens(self) -> int:
        """Tokens of its prompt."""
        ...

    @property
    def kv_transfer_params(self) -> object:
        """What the caller gave; never changed by the core."""
        ...

    @property
    def may_pull(self) -> bool:
        """Whether it may use what others have computed."""
        ...

    @property
    def may_hold(self) -> bool:
        """Whether its blocks may be stored."""
        ...

    def final_blocks(self, group: CacheGroup) -> int:
        """How many of its blocks of ``group`` have a key: those whose tokens are final."""
        ...

    def key(self, group: CacheGroup, position: int) -> bytes:
        """The content's name of a block; ``position`` is below ``final_blocks(group)``."""
        ...

    def hold_key(
        self, engine_id: str, request_id: str, group: CacheGroup, position: int, num_tokens: int
    ) -> bytes | None:
        """The name of a block that has none of its own, in a hold of ``num_tokens`` tokens.

        Made of the hold's name and of the tokens up to ``num_tokens``, so that who claims it knows that they are its own. None
        where the request does not have so many.
        """
        ...


class HandoffServer(Protocol):
    """Carries out what the core wants of servers; it answers later, with events."""

    def start_claim(
        self, claim: ClaimId, request: HandoffRequest, remote: RemoteRequest, first_positions: Sequence[int]
    ) -> bool:
        """Lease what is held of a request, per group from these positions on; wait for it a while.

        Answered by ``HandoffCore.claim_ended``. False when there is nobody to ask: a miss at once, and no answer.
        """
        ...

    def drop_claim(self, claim: ClaimId) -> None:
        """Nobody reads what was, or will be, claimed any more: give the lease back. No answer is expected."""

    def renew(self, remotes: Sequence[RemoteRequest]) -> None:
        """Send heartbeats: these are about to be claimed or read."""

    def release(self, remote: RemoteRequest) -> None:
        """Tell whoever holds this that it is not needed any more."""

    def publish(self, publication: PlannedPublication) -> None:
        """Have a request held. What cannot be held is not an error, and not reported."""

    def debug(self, text: str) -> None:
        """For the log, where people look for a reason."""

    def warn(self, text: str) -> None:
        """For the log, where people look for trouble."""


EXPIRY_MARGIN_S = 5.0
"""What ends within so many seconds is not read any more (B2.19)."""


@dataclass(frozen=True)
class HandoffOptions:
    """Settings of the core; times in seconds.

    ``kv_recompute_threshold``: of a decode engine's tokens, fewer are computed rather than pulled; 0 pulls any number.
    ``bidirectional_kv_xfer``: whether decode engines hold their requests, and prefill engines pull them.
    ``kv_lease_duration``: how long a prefill engine's hold lasts without a heartbeat of who is about to pull it.
    ``decoder_kv_blocks_ttl``: how long a decode engine's does.
    ``claim_timeout_s``: how long a request may wait to learn what is held; afterwards it is computed.
    ``claim_lifetime_s``: what was claimed and waited longer for room in the engine is claimed again: its lease may be about to end.
    """

    kv_recompute_threshold: int = 64
    bidirectional_kv_xfer: bool = False
    kv_lease_duration: float = 30.0
    decoder_kv_blocks_ttl: float = 480.0
    claim_timeout_s: float = 5.0
    claim_lifetime_s: float = 10.0

    def holds_at_end(self, params: TransferParams | None) -> bool:
        """Whether a request with these parameters is held at its end, for the engine that goes on with it (B2.8)."""
        if params is None:
            return False
        return params.do_remote_decode or (params.do_remote_prefill and self.bidirectional_kv_xfer)

    @property
    def heartbeat_s(self) -> float:
        """Time between two heartbeats: every sixth of a lease."""
        return self.kv_lease_duration / 6
