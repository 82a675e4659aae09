"""Settings in `kv_connector_extra_config`, checked once when the engine starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ....protos.endpoint import EndpointError, parse_endpoint
from ...handoff import EXPIRY_MARGIN_S, HandoffOptions
from ..server_config import ServerConfig, check_number

__all__ = ["ConnectorConfig"]

_MAX_TOKENS = 1 << 31
_MAX_HOLD_S = 86400.0
_MAX_PARTS = 64
# Each heartbeat extends a hold by two thirds of the lease. If this extension were shorter than the
# expiry margin, a hold could expire while its blocks are being read.
_MIN_LEASE_S = 3 * EXPIRY_MARGIN_S


@dataclass(frozen=True)
class ConnectorConfig(ServerConfig):
    """The connector's settings.

    `max_held_fraction`: saves in flight hold at most this fraction of the engine's KV blocks. Until
    these saves have ended, other blocks are not saved.
    `lazy_offload`: store blocks when the engine is about to evict them, not when they are full.
    `watch_events`: whether vLLM's KV events also tell what other engines of the host have stored
    and what the server has removed. If false, they tell only this engine's own stores. Used only
    if `kv_events_config` enables KV events.
    `publish_token_ids`: whether the server gets the token ids of stored blocks, for its events and
    for vLLM's KV events. Indexers such as Dynamo ignore events without them. Not in lazy mode. The
    readers of events then see the tokens of all prompts.
    `engine_address`: the address (`host:port`) at which routers reach this engine. The server's
    publisher of events, if it is on, then has a topic for this engine. Default: none.
    `kv_parts`: number of parts into which the KV heads of a block are divided. Engines with
    different tensor parallelism share blocks if they have the same value, which must be a multiple
    of the tensor parallel size of each engine. Default (0): the tensor parallel size.
    `audit_fraction`: for this fraction of the requests with a hit, the engine computes the last
    blocks of the hit, and compares them with the stored ones. 0: for none. Not in lazy mode.
    `weights_change_on_reset`: whether the weights may have changed when vLLM resets the connector.
    If true, the engine then uses another namespace. If false, only the CPU tier is emptied.

    Hand-offs between engines (`kv_transfer_params`, see `HandoffOptions`):
    `kv_recompute_threshold`, `bidirectional_kv_xfer`, `kv_lease_duration`, `decoder_kv_blocks_ttl`,
    `claim_timeout_s`.
    `advertise`: the address (`host:port`) at which engines of other hosts reach this engine's
    server. Default: `endpoint`.
    `peers`: addresses of servers on other hosts from which blocks may be pulled. If the
    `kv_transfer_params` of a request name any other server, nothing is pulled.
    """

    max_held_fraction: float = 0.5
    lazy_offload: bool = False
    watch_events: bool = True
    publish_token_ids: bool = False
    engine_address: str | None = None
    kv_parts: int = 0
    audit_fraction: float = 1 / 256
    weights_change_on_reset: bool = True
    kv_recompute_threshold: int = 64
    bidirectional_kv_xfer: bool = False
    kv_lease_duration: float = 30.0
    decoder_kv_blocks_ttl: float = 480.0
    claim_timeout_s: float = 5.0
    advertise: str | None = None
    peers: Sequence[str] = ()

    @property
    def audit_every(self) -> int:
        """One of how many requests with a hit is audited; 0 for none."""
        return round(1 / self.audit_fraction) if self.audit_fraction >= 1e-9 else 0

    @property
    def handoff(self) -> HandoffOptions:
        return HandoffOptions(
            kv_recompute_threshold=self.kv_recompute_threshold,
            bidirectional_kv_xfer=self.bidirectional_kv_xfer,
            kv_lease_duration=self.kv_lease_duration,
            decoder_kv_blocks_ttl=self.decoder_kv_blocks_ttl,
            claim_timeout_s=self.claim_timeout_s,
        )

    def check(self) -> None:
        super().check()
        for name in (
            "lazy_offload",
            "watch_events",
            "publish_token_ids",
            "weights_change_on_reset",
            "bidirectional_kv_xfer",
        ):
            if not isinstance(value := getattr(self, name), bool):
                raise ValueError(f"kvtier: {name} must be true or false, not {value!r}")  # noqa: TRY004 - as above
        check_number("kv_parts", self.kv_parts, 0, _MAX_PARTS, int)
        check_number("audit_fraction", self.audit_fraction, 0.0, 1.0)
        check_number("max_held_fraction", self.max_held_fraction, 0.01, 1.0)
        check_number("kv_recompute_threshold", self.kv_recompute_threshold, 0, _MAX_TOKENS)
        check_number("kv_lease_duration", self.kv_lease_duration, _MIN_LEASE_S, _MAX_HOLD_S)
        check_number("decoder_kv_blocks_ttl", self.decoder_kv_blocks_ttl, 2 * EXPIRY_MARGIN_S, _MAX_HOLD_S)
        check_number("claim_timeout_s", self.claim_timeout_s, 0.0, 60.0)
        if isinstance(self.peers, str) or not isinstance(self.peers, Sequence):
            raise ValueError(f"kvtier: peers must be a list of HOST:PORT, not {self.peers!r}")  # noqa: TRY004 - as above
        own = (("advertise", self.advertise), ("engine_address", self.engine_address))
        given: list[tuple[str, object]] = [(name, address) for name, address in own if address is not None]
        for name, endpoint in (*given, *(("peers", peer) for peer in self.peers)):
            try:
                parse_endpoint(endpoint if isinstance(endpoint, str) else "")
            except EndpointError as error:
                raise ValueError(f"kvtier: {name}: {endpoint!r} is not an address: {error}") from error
