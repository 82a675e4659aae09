"""Engine-independent hand-off of requests: what an engine pulls from peers and holds for peers.

``core`` is the state machine that engine adapters drive (B2). ``claims`` decides how much is
pulled, into which blocks, and what is held. ``params`` parses ``kv_transfer_params``. ``model``
defines the interfaces through which the core uses the engine and the servers. References such as
(B2) cite docs/behaviour.md.
"""

from .core import BlockPull, EngineIdentity, FinishedRequest, HandoffCore
from .model import (
    EXPIRY_MARGIN_S,
    ClaimedBlocks,
    ClaimId,
    FinishReason,
    HandoffOptions,
    HandoffRequest,
    HandoffServer,
    HeldBlock,
    NotClaimedReason,
    PlannedPublication,
    PrefixCache,
)
from .params import RemoteRequest, TransferParams

__all__ = [
    "EXPIRY_MARGIN_S",
    "BlockPull",
    "ClaimId",
    "ClaimedBlocks",
    "EngineIdentity",
    "FinishReason",
    "FinishedRequest",
    "HandoffCore",
    "HandoffOptions",
    "HandoffRequest",
    "HandoffServer",
    "HeldBlock",
    "NotClaimedReason",
    "PlannedPublication",
    "PrefixCache",
    "RemoteRequest",
    "TransferParams",
]
