"""How requests are handed over. The names and defaults are those that deployments know from vLLM (B2.1)."""

from __future__ import annotations

from dataclasses import dataclass

from .params import TransferParams

__all__ = ["EXPIRY_MARGIN_S", "HandoffOptions"]

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

    def hands_on(self, params: TransferParams | None) -> bool:
        """Whether a request with these parameters is held at its end, for the engine that goes on with it (B2.8)."""
        if params is None:
            return False
        return params.do_remote_decode or (params.do_remote_prefill and self.bidirectional_kv_xfer)

    @property
    def heartbeat_s(self) -> float:
        """Time between two heartbeats: every sixth of a lease."""
        return self.kv_lease_duration / 6
