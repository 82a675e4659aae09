"""Schema of the configuration: one struct per table, with meaning, default and bounds of settings.

`fields.SETTINGS` (names, environment variables, checks) and the reference in the documentation are
derived from these structs. `loader.load` reads the values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from ...protos.endpoint import Endpoint, parse_endpoint
from ...tiers.negotiation import OffloadPolicy, Rule
from .annotations import _duration, _setting, _size
from .events import EventConfig
from .peers import PeersConfig
from .tracing import TracingConfig
from .units import GIB, KIB, MIB, format_size

__all__ = [
    "Admission",
    "Amount",
    "AuthConfig",
    "BulkConfig",
    "Config",
    "ConfigError",
    "Eviction",
    "HandoffConfig",
    "LeaseConfig",
    "LimitConfig",
    "LogConfig",
    "RateConfig",
    "RetentionConfig",
    "TenantConfig",
    "TierConfig",
    "TlsConfig",
]

Admission = Literal["all", "second_use"]
Eviction = Literal["forecast", "lru", "arc", "mq"]

_DAY = 86400
_EVICTION = "Eviction policy. `forecast` predicts which blocks will be used again."
_TTL = 'Time after which an unused block is removed, or "off". After a restart of the server the time starts again.'


class ConfigError(Exception):
    """The configuration is invalid. Each of `problems` names a setting and its origin."""

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class LogConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Log of the server, written to standard error."""

    level: Annotated[Literal["debug", "info", "warning", "error"], _setting("Lowest severity that is logged.")] = "info"
    format: Annotated[
        Literal["auto", "console", "json"],
        _setting(
            "Format of the log: `console` (text) or `json` (lines). `auto` is `console` on a terminal, otherwise `json`."
        ),
    ] = "auto"


class LeaseConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Duration of the leases that pin a lookup's hits."""

    default: Annotated[float, _duration("Lease duration if the client requests none.", 0.1, _DAY)] = 60.0
    max: Annotated[
        float, _duration("Longest lease duration per grant or renewal. Longer requests get this duration.", 0.1, _DAY)
    ] = 600.0
    part: Annotated[
        float,
        _setting("Fraction of its quota, or of the rest, that a tenant's leases or stores can pin.", ge=0.1, le=1),
    ] = 0.75


class SessionConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Heartbeats between server and clients."""

    heartbeat_interval: Annotated[
        float, _duration("Time between heartbeats. A client that misses five heartbeats opens a new session.", 0.01, 60)
    ] = 1.0


class LimitConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Limits per call, and limits of the whole server."""

    max_keys: Annotated[
        int, _setting("Maximum number of keys per call. Calls with more keys are refused.", ge=1, le=1 << 20)
    ] = 65536
    max_key_bytes: Annotated[int, _size("Maximum length of a key. Calls with a longer key are refused.", 5, KIB)] = 80
    max_message_bytes: Annotated[
        int,
        _size(
            "Maximum size of a gRPC message; must be large enough for `max_keys` keys and for one frame.",
            64 * KIB,
            GIB,
        ),
    ] = 16 * MIB
    max_frame_bytes: Annotated[
        int, _size("Maximum payload of one frame of a Push or Pull stream.", 4 * KIB, 256 * MIB)
    ] = 2 * MIB
    max_wait: Annotated[
        float, _duration("Longest wait that a call can request. Longer waits are shortened.", 0, 3600)
    ] = 30.0
    tier_stall: Annotated[
        float,
        _duration(
            "Time after which a running job of a tier (at most 32 MiB) counts as stalled. The tier then gets no other job "
            "until this job ends.",
            0.1,
            3600,
        ),
    ] = 10.0
    max_sessions: Annotated[
        int,
        _setting(
            "Maximum number of open sessions. Further sessions are refused. If credentials determine the tenant, a "
            "tenant gets at most as many as are then free.",
            ge=1,
            le=65536,
        ),
    ] = 1024


class CpuConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Eviction in the CPU tier. `[[tiers]]` has the same settings for secondary tiers."""

    eviction: Annotated[Eviction, _setting(_EVICTION)] = "forecast"
    ttl: Annotated[float | None, _duration(_TTL, 1)] = None


class RetentionConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of retention: a request can protect its blocks from eviction for a time."""

    max: Annotated[
        float, _duration("Longest time for which a request can retain a block. Longer requests get this time.", 0, _DAY)
    ] = 3600.0
    part: Annotated[
        float,
        _setting("Fraction of each quota, and of the space without a quota, that retained blocks can use.", ge=0, le=1),
    ] = 0.5


class HandoffConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of holds, which keep the blocks of a finished request for another engine."""

    default: Annotated[float, _duration("Hold duration if the engine requests none.", 0.1, _DAY)] = 30.0
    max: Annotated[
        float,
        _duration("Longest hold duration per publication or renewal. Longer requests get this duration.", 0.1, _DAY),
    ] = 600.0
    part: Annotated[
        float,
        _setting(
            "Fraction of each quota in the CPU tier, and of the CPU tier's space without a quota, that holds can pin.",
            ge=0,
            le=1,
        ),
    ] = 0.25
    max_holds: Annotated[
        int, _setting("Maximum number of holds per tenant. Further requests are not held.", ge=0, le=1 << 20)
    ] = 4096


class BulkConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Bulk process, which transfers blocks for clients without shared memory."""

    tcp: Annotated[bool, _setting("Whether to serve the socket protocol over TCP, with TLS if `tls.cert` is set.")] = (
        True
    )
    tcp_port: Annotated[
        int, _setting("TCP port for the socket protocol, on the hosts of `listen`; 0: any.", ge=0, le=65535)
    ] = 0


class DevicesConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Copies by the server between the region and the engines' GPUs (CUDA IPC)."""

    driver: Annotated[
        str, _setting('GPU driver of the server: `auto` (CUDA if available), `off`, or "module:callable" for tests.')
    ] = "auto"


class TlsConfig(msgspec.Struct, frozen=True, kw_only=True):
    """TLS on TCP. The server reads the files again when they change."""

    cert: Annotated[
        Path | None, _setting("Certificate chain of the server (PEM file). If set, TCP connections must use TLS.")
    ] = None
    key: Annotated[Path | None, _setting("Private key of the certificate (PEM file), without a password.")] = None
    client_ca: Annotated[
        Path | None,
        _setting(
            "CA certificates (PEM file). If set, each client must have a certificate that one of these CAs issued."
        ),
    ] = None


class AuthConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Authentication. The server reads the token file again when it changes."""

    tokens: Annotated[
        Path | None, _setting("Token file: lists tokens and client certificates, with the tenant and roles of each.")
    ] = None
    unix: Annotated[
        bool,
        _setting(
            "Whether calls over the Unix socket need a token. If not, permission to open the socket is sufficient."
        ),
    ] = False
    metrics: Annotated[
        bool,
        _setting(
            "Whether HTTP requests need a token with role `metrics` or `admin`. `/healthz` and the static files of the "
            "status page never need a token."
        ),
    ] = False


class RateConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Rate limits of each tenant, over all its sessions; `[tenants.NAME]` overrides them."""

    calls: Annotated[
        float | None,
        _setting("Maximum calls per second of a tenant, averaged over 10 s. Further calls are refused.", ge=1, le=1e9),
    ] = None
    bytes: Annotated[
        int | None,
        _size(
            "Maximum bytes per second in streams of a tenant, averaged over 10 s. Above it, new streams are refused.",
            1024,
        ),
    ] = None
    sessions: Annotated[
        int | None,
        _setting("Maximum number of open sessions of a tenant. Further sessions are refused.", ge=1, le=65536),
    ] = None


class RuleConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One rule of a tier's vote. The first rule whose conditions are all met decides the vote."""

    policy: Literal["block_level", "request_level"]
    why: str = "as configured"
    kv_transfer_params: dict[str, Any] = msgspec.field(default_factory=dict)
    tenant: str | None = None
    min_prompt_tokens: int | None = None
    min_priority: int | None = None

    def to_rule(self) -> Rule:
        return Rule(
            OffloadPolicy[self.policy.upper()],
            self.why,
            kv_transfer_params=self.kv_transfer_params,
            tenant=self.tenant,
            min_prompt_tokens=self.min_prompt_tokens,
            min_priority=self.min_priority,
        )


class TierConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One tier below the CPU tier: `[[tiers]]` in the file, in lookup order."""

    type: Annotated[
        str,
        _setting(
            'Type: `lmdb`, `disk`, `valkey` (also Redis), `s3`, `mooncake`, or "module:Class" for a class outside kvtier.'
        ),
    ]
    name: Annotated[
        str, _setting("Name of the tier in status and metrics.", default="the type, or the class name in lower case")
    ]
    path: Annotated[Path, _setting("Directory of the tier's files.", default="`data_dir`/`name`")]
    size: Annotated[
        int,
        _size(
            "Maximum size of the files. Blocks can use 80 % of it in `lmdb` and 93 % in `disk`. Shared tiers: of known blocks.",
            MIB,
            default="16 GiB, but at most half of the free disk space, which the tiers without `size` on one file system "
            "share equally",
        ),
    ]
    durability: Annotated[
        Literal["process", "power"],
        _setting("Event that stored blocks survive: `process` (a crash of the server) or `power` (also a power loss)."),
    ] = "process"
    admission: Annotated[
        Admission,
        _setting(
            "Blocks that the tier stores: `all`, or `second_use` (a block is stored when it is used again, which saves "
            "SSD writes)."
        ),
    ] = "all"
    eviction: Annotated[Eviction, _setting(_EVICTION)] = "forecast"
    ttl: Annotated[float | None, _duration(_TTL, 1)] = None
    rules: Annotated[
        tuple[RuleConfig, ...] | None,
        _setting(
            "Rules for the tier's vote on the offload policy of a request. Each rule is a table with `policy` (block_level "
            "or request_level) and the conditions `kv_transfer_params`, `tenant`, `min_prompt_tokens` and "
            "`min_priority`. The first rule that matches decides.",
            default="request_level if `kv_transfer_params` has `do_remote_decode`, or has `offload_policy` with this value",
        ),
    ] = None
    options: Annotated[
        Mapping[str, Any],
        _setting(
            'Settings of `valkey`, `s3` or `mooncake` (below), or arguments of a "module:Class" tier.', default="{}"
        ),
    ] = msgspec.field(default_factory=dict)

    @property
    def is_custom(self) -> bool:
        """Whether `type` names a class that is not part of kvtier."""
        return ":" in self.type

    @property
    def is_remote(self) -> bool:
        return self.type in ("valkey", "s3", "mooncake")  # without files on this host


@dataclass(frozen=True, slots=True)
class Amount:
    """Amount of a tier's space: `size` in bytes, or the fraction `part` of the capacity."""

    size: int = 0
    part: float | None = None

    def of(self, capacity_bytes: int) -> int:
        return self.size if self.part is None else int(self.part * capacity_bytes)

    def __str__(self) -> str:
        return format_size(self.size) if self.part is None else f"{self.part * 100:g}%"


class TenantConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Quotas and limits of one tenant: `[tenants.NAME]` in the file."""

    name: str
    quota: Annotated[
        Mapping[str, Amount],
        _setting(
            'Space reserved for the tenant: a fraction of every tier, like `"25%"`, or a size or fraction per tier, like '
            '`{cpu = "2GiB", lmdb = "25%"}`. The tenant can also use free space beyond its quota.',
            default="nothing",
        ),
    ] = msgspec.field(default_factory=dict)
    limit: Annotated[
        Mapping[str, Amount], _setting("Maximum space of the tenant, written like `quota`.", default="the whole tier")
    ] = msgspec.field(default_factory=dict)
    rates: Annotated[
        RateConfig,
        _setting(
            'Rate limits, with the keys of `[rates]`: `{calls = 100, bytes = "100MiB", sessions = 4}`.',
            default="`[rates]`",
        ),
    ] = RateConfig()


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """All settings. `loader.load` computes the defaults that depend on the machine."""

    listen: Annotated[
        tuple[str, ...], _setting("Addresses to listen on: `unix:PATH` or `HOST:PORT`.", default="this user's socket")
    ]
    region_size: Annotated[
        int,
        _size(
            "Size of the region, the shared memory with the blocks of the CPU tier.",
            MIB,
            default="8 GiB, but at most a quarter of the memory, and half of the free memory",
        ),
    ]
    numa: Annotated[
        str,
        _setting(
            "NUMA nodes of the region's memory: `spread` (over all nodes), `off` (the kernel chooses), or node numbers "
            "like `0,2-3`. No effect on a machine with one node."
        ),
    ] = "spread"
    data_dir: Annotated[Path, _setting("Parent directory of the tiers' files.", default="`$XDG_DATA_HOME/kvtier`")]
    keeper: Annotated[
        Path | None,
        _setting(
            "Unix socket of `kvtier keeper`. The keeper holds the memory of the CPU tier while the server restarts."
        ),
    ] = None
    metrics: Annotated[
        str | None,
        _setting(
            "Address of the HTTP endpoint for Prometheus, `HOST:PORT`. It also serves `/healthz` and the status page."
        ),
    ] = None
    estimates: Annotated[
        bool, _setting("Whether to estimate the hit ratio at other tier sizes (`kvtier_estimated_hit_ratio`).")
    ] = True
    insecure: Annotated[
        bool, _setting("Whether to allow TCP (loopback included) without TLS or without authentication.")
    ] = False
    log: LogConfig = LogConfig()
    leases: LeaseConfig = LeaseConfig()
    sessions: SessionConfig = SessionConfig()
    limits: LimitConfig = LimitConfig()
    cpu: CpuConfig = CpuConfig()
    retention: RetentionConfig = RetentionConfig()
    handoff: HandoffConfig = HandoffConfig()
    bulk: BulkConfig = BulkConfig()
    devices: DevicesConfig = DevicesConfig()
    tls: TlsConfig = TlsConfig()
    auth: AuthConfig = AuthConfig()
    rates: RateConfig = RateConfig()
    tracing: TracingConfig = TracingConfig()
    events: EventConfig = EventConfig()
    peers: PeersConfig = PeersConfig()
    tiers: Annotated[
        tuple[TierConfig, ...], _setting("Tiers below the CPU tier; `[]` means none.", default="one `lmdb` tier")
    ] = ()
    tenants: Annotated[
        tuple[TenantConfig, ...],
        _setting(
            "Tenants with a quota, limit or rates. Tenants without a quota share the remaining space.", default="none"
        ),
    ] = ()

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        return tuple(map(parse_endpoint, self.listen))

    @property
    def authenticates(self) -> bool:
        """Whether callers on TCP must authenticate."""
        return self.auth.tokens is not None or self.tls.client_ca is not None
