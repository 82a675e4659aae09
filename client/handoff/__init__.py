"""What one engine hands to another, when, and for how long: decided here once, for every engine (BEHAVIOUR B2).

``core`` is the door. Behind it: ``params`` (what callers say, and are answered), ``matching`` (how much can be pulled), ``reads``
(into which blocks), ``holding`` (what is held at a request's end) and ``requests`` (the one transfer of each). ``engine`` says what
the core asks of its surroundings. It knows neither an engine nor kvtier's client, and shares the words of ``client/offload``.
"""

from .claims import TransferState
from .core import BlockPull, EngineIdentity, FinishedRequest, HandoffCore
from .model import (
    EXPIRY_MARGIN_S,
    ClaimedBlocks,
    ClaimId,
    Direction,
    FinishReason,
    HandoffOptions,
    HandoffRequest,
    HandoffServer,
    HeldBlock,
    PlannedPublication,
)
from .params import RemoteRequest, TransferParams

__all__ = [
    "EXPIRY_MARGIN_S",
    "BlockPull",
    "ClaimId",
    "ClaimedBlocks",
    "Direction",
    "EngineIdentity",
    "FinishReason",
    "FinishedRequest",
    "HandoffCore",
    "HandoffOptions",
    "HandoffRequest",
    "HandoffServer",
    "HeldBlock",
    "PlannedPublication",
    "RemoteRequest",
    "TransferParams",
    "TransferState",
]
