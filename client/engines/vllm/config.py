"""Settings in `kv_connector_extra_config`, checked once when the engine starts."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self, get_args

from ....protos.credentials import Credentials
from ....protos.endpoint import EndpointError, parse_endpoint
from ...handoff import EXPIRY_MARGIN_S, HandoffOptions
from ...session.connection import TransportName

__all__ = ["ConnectorConfig", "ServerConfig"]

_MAX_TOKENS = 1 << 31
_MAX_HOLD_S = 86400.0
_MAX_PARTS = 64
# Each heartbeat extends a hold by two thirds of the lease. If this extension were shorter than the
# expiry margin, a hold could expire while its blocks are being read.
_MIN_LEASE_S = 3 * EXPIRY_MARGIN_S


@dataclass(frozen=True)
class ServerConfig:
    """Settings common to vLLM's connector and vLLM's tiering.

    `endpoint`: the server, `unix:PATH` or `host:port`. Default: `$KVTIER_ENDPOINT`, otherwise the
    default socket of this user.
    `transport`: `auto`, `shm`, `tcp` (gRPC if the server has TLS), `grpc` or `cuda_ipc`. With
    `auto` and `cuda_ipc` the server copies to and from a GPU. If the server cannot do this, the
    engine copies.
    `lookup_timeout_s`: a request whose lookup takes longer is computed without the cache.
    `tenant`: part of the namespace; engines of different tenants never share blocks.
    `weights_version`: name of the weights, if the engine gets other weights than those of the model
    files. Part of the namespace.
    `ca`, `cert`, `key`, `token_file`: paths of files, see `kvtier.client.Credentials`. Defaults:
    `$KVTIER_CA`, `$KVTIER_CERT` and so on. There is no `token`, because vLLM logs these settings.
    """

    source: ClassVar[str] = "kv_connector_extra_config"

    endpoint: str | None = None
    transport: TransportName = "auto"
    lookup_timeout_s: float = 1.0
    tenant: str = ""
    weights_version: str = ""
    ca: str | None = None
    cert: str | None = None
    key: str | None = None
    token_file: str | None = None

    @property
    def credentials(self) -> Credentials:
        return Credentials.from_environment(ca=self.ca, cert=self.cert, key=self.key, token_file=self.token_file)

    @classmethod
    def parse(cls, extra: Mapping[str, Any], warn: Callable[[str], None]) -> Self:
        """Parses `extra`. Raises ValueError for a wrong value, and warns of each unknown key."""
        known = [field.name for field in fields(cls)]
        for key in extra:
            if key not in known:
                near = difflib.get_close_matches(key, known, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else f"; known keys: {', '.join(known)}"
                warn(f"kvtier: unknown key {key!r} in {cls.source} is ignored{hint}")
        values = {key: extra[key] for key in known if key in extra}
        values.setdefault("endpoint", os.environ.get("KVTIER_ENDPOINT") or None)
        config = cls(**values)
        config.check()
        return config

    def check(self) -> None:
        """Raises ValueError for an invalid value."""
        if self.endpoint is not None and not isinstance(self.endpoint, str):
            raise ValueError(f"kvtier: endpoint must be a string, not {self.endpoint!r}")
        if self.transport not in get_args(TransportName):
            raise ValueError(
                f"kvtier: transport must be one of {', '.join(get_args(TransportName))}, not {self.transport!r}"
            )
        for name in ("tenant", "weights_version"):
            if not isinstance(value := getattr(self, name), str):
                raise ValueError(f"kvtier: {name} must be a string, not {value!r}")  # noqa: TRY004 - one kind for all
        for name in ("ca", "cert", "key", "token_file"):
            if not isinstance(value := getattr(self, name), str | None):
                raise ValueError(f"kvtier: {name} must be the path of a file, not {value!r}")  # noqa: TRY004 - as above
        _check_number("lookup_timeout_s", self.lookup_timeout_s, 0.0, 60.0)


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
    weights_change_on_reset: bool = True
    kv_recompute_threshold: int = 64
    bidirectional_kv_xfer: bool = False
    kv_lease_duration: float = 30.0
    decoder_kv_blocks_ttl: float = 480.0
    claim_timeout_s: float = 5.0
    advertise: str | None = None
    peers: Sequence[str] = ()

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
        _check_number("kv_parts", self.kv_parts, 0, _MAX_PARTS, int)
        _check_number("max_held_fraction", self.max_held_fraction, 0.01, 1.0)
        _check_number("kv_recompute_threshold", self.kv_recompute_threshold, 0, _MAX_TOKENS)
        _check_number("kv_lease_duration", self.kv_lease_duration, _MIN_LEASE_S, _MAX_HOLD_S)
        _check_number("decoder_kv_blocks_ttl", self.decoder_kv_blocks_ttl, 2 * EXPIRY_MARGIN_S, _MAX_HOLD_S)
        _check_number("claim_timeout_s", self.claim_timeout_s, 0.0, 60.0)
        if isinstance(self.peers, str) or not isinstance(self.peers, Sequence):
            raise ValueError(f"kvtier: peers must be a list of HOST:PORT, not {self.peers!r}")  # noqa: TRY004 - as above
        own = (("advertise", self.advertise), ("engine_address", self.engine_address))
        given: list[tuple[str, object]] = [(name, address) for name, address in own if address is not None]
        for name, endpoint in (*given, *(("peers", peer) for peer in self.peers)):
            try:
                parse_endpoint(endpoint if isinstance(endpoint, str) else "")
            except EndpointError as error:
                raise ValueError(f"kvtier: {name}: {endpoint!r} is not an address: {error}") from error


def _check_number(name: str, value: object, low: float, high: float, kind: type[int | float] = float) -> None:
    accepted = (int,) if kind is int else (int, float)
    if isinstance(value, bool) or not isinstance(value, accepted) or not low <= value <= high:
        noun = "an integer" if kind is int else "a number"
        raise ValueError(f"kvtier: {name} must be {noun} from {low:g} to {high:g}, not {value!r}")
