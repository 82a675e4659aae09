"""What the core remembers of a request between its arrival and its end."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from .engine import Claimed, ClaimId, HandoffRequest
from .matching import Usable
from .params import TransferParams

__all__ = ["Claim", "HandoffState", "Transfer"]


class Transfer(Enum):
    """Where the one transfer of a request is (B2.10). It only ever moves down this list.

    NONE: the parameters name nobody to pull from. WANTED: they do, and it was not decided yet. CLAIMED: asked for, or leased.
    PULLING: workers copy. OVER: copied, or not worth it, or not possible; the peer has been told that it is not needed any more.
    """

    NONE = "none"
    WANTED = "wanted"
    CLAIMED = "claimed"
    PULLING = "pulling"
    OVER = "over"


@dataclass
class Claim:
    """A question to a server, from ``computed_tokens`` on; once answered a lease on what is ``usable`` of the request.

    ``answer`` is None for one that was not granted anything. ``reach``: how far the usable blocks go, in tokens.
    """

    number: ClaimId
    computed_tokens: int
    deadline: float
    answered: bool = False
    answered_at: float = 0.0
    answer: Claimed | None = None
    usable: Usable | None = None
    reach: int = 0


@dataclass
class HandoffState:
    """One request.

    ``in_batch``: it was scheduled, and is to be held at its end (B2.8). ``ended``: only workers use it any more.
    """

    engine: HandoffRequest
    params: TransferParams
    transfer: Transfer
    claim: Claim | None = None
    offered_from: int = 0
    in_batch: bool = False
    ended: bool = False
