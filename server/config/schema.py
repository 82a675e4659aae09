"""The server's configuration: what can be set, what it means, and within which bounds.

The structs below are the one table of all settings: `settings.SETTINGS` (names, environment variables, checks) and the
reference in the documentation are derived from them. Where values come from is the business of `settings.load`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from ...protos.endpoint import Endpoint, parse_endpoint
from ...tiers.negotiation import OffloadPolicy, Rule
from .units import GIB, KIB, MIB, format_size

__all__ = [
    "Admission",
    "Amount",
    "AuthConfig",
    "BulkConfig",
    "Config",
    "ConfigError",
    "CpuConfig",
    "DevicesConfig",
    "Durability",
    "Eviction",
    "HandoffConfig",
    "LeaseConfig",
    "LimitConfig",
    "LogConfig",
    "LogFormat",
    "LogLevel",
    "RateConfig",
    "RetentionConfig",
    "RuleConfig",
    "SessionConfig",
    "TenantConfig",
    "TierConfig",
    "TlsConfig",
    "TracingConfig",
    "setting",
]


_OFF = '"off"'


def setting(
    doc: str,
    *,
    unit: Literal["bytes", "seconds"] | None = None,
    ge: float | None = None,
    le: float | None = None,
    default: str | None = None,
) -> msgspec.Meta:
    """Describes one field: its meaning, its unit, its bounds and, where the code computes it, its default in words."""
    extra: dict[str, Any] = {"unit": unit, "ge": ge, "le": le, "default": default}
    return msgspec.Meta(description=doc, extra=extra)


class TlsConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The server's certificate, for TCP. The files are read again when they change."""

    cert: Annotated[
        Path | None, setting("File with the server's certificate chain (PEM): TCP is TLS then.", default=_OFF)
    ] = None
    key: Annotated[Path | None, setting("File with its private key (PEM), without a password.", default=_OFF)] = None
    client_ca: Annotated[
        Path | None,
        setting(
            "File with the certificates (PEM) of who may vouch for clients: all of them need one then.", default=_OFF
        ),
    ] = None


class AuthConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Who may call, and as which tenant. The file is read again when it changes."""

    tokens: Annotated[
        Path | None, setting("File of tokens and certificates, with their tenants and roles.", default=_OFF)
    ] = None
    unix: Annotated[
        bool,
        setting("Whether calls over the Unix socket need a token as well; else it is enough to be able to open it."),
    ] = False
    metrics: Annotated[
        bool,
        setting(
            "Whether the HTTP port asks for a token: role `metrics` or `admin`, but for `/healthz` and an empty page."
        ),
    ] = False


class RateConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What each tenant may ask for, all its sessions together; `[tenants.NAME]` has the same for one tenant."""

    calls: Annotated[float | None, setting("Most calls in a second, over ten seconds.", ge=1, le=1e9, default=_OFF)] = (
        None
    )
    bytes: Annotated[
        int | None,
        setting("Most bytes in a second that streams move, over ten seconds.", unit="bytes", ge=1024, default=_OFF),
    ] = None
    sessions: Annotated[int | None, setting("Most sessions that are open at once.", ge=1, le=65536, default=_OFF)] = (
        None
    )


LogLevel = Literal["debug", "info", "warning", "error"]


LogFormat = Literal["auto", "console", "json"]


Durability = Literal["process", "power"]


Admission = Literal["all", "second_use"]


Eviction = Literal["forecast", "lru", "arc", "mq"]


_EVICTION = "Who goes first: what is worth the least by `forecast`, or by least recent use, by ARC, by MQ."


_TTL = "Time after which a block that is not used goes from the tier; a restart begins it anew."


class ConfigError(Exception):
    """The configuration cannot be used. Each of `problems` is one line that names the setting and where it stands."""

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class LogConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What the server says about itself, on standard error."""

    level: Annotated[LogLevel, setting("Least severe level that is written.")] = "info"
    format: Annotated[
        LogFormat, setting("Lines for people or JSON; `auto` is `console` on a terminal and `json` elsewhere.")
    ] = "auto"


class LeaseConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How long a lookup's hits stay pinned."""

    default: Annotated[
        float, setting("Duration of a lease where the client names none.", unit="seconds", ge=0.1, le=86400)
    ] = 60.0
    max: Annotated[
        float, setting("Longest duration of a lease that a client gets at once.", unit="seconds", ge=0.1, le=86400)
    ] = 600.0


class SessionConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How engines and server notice that the other is gone."""

    heartbeat_interval: Annotated[
        float,
        setting(
            "Time between two heartbeats; a client that hears none for five of them registers again.",
            unit="seconds",
            ge=0.01,
            le=60,
        ),
    ] = 1.0


class CpuConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How the CPU tier keeps blocks; the tiers below have the same settings in their tables."""

    eviction: Annotated[Eviction, setting(_EVICTION)] = "forecast"
    ttl: Annotated[float | None, setting(_TTL, unit="seconds", ge=1, default='"off"')] = None


class RetentionConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How far requests may have their blocks exempted from eviction (`retain_for`)."""

    max: Annotated[
        float, setting("Longest time for which a request can retain a block at once.", unit="seconds", ge=0, le=86400)
    ] = 3600.0
    part: Annotated[
        float,
        setting("Part of each tenant's quota, and of what is nobody's quota, that may be retained.", ge=0, le=1),
    ] = 0.5


class HandoffConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How far engines may have requests held for each other."""

    default: Annotated[
        float, setting("Duration of a hold where the engine names none.", unit="seconds", ge=0.1, le=86400)
    ] = 30.0
    max: Annotated[
        float, setting("Longest duration of a hold that an engine gets at once.", unit="seconds", ge=0.1, le=86400)
    ] = 600.0
    part: Annotated[
        float,
        setting(
            "Part of each tenant's quota of memory, and of what is nobody's quota, that holds may pin.", ge=0, le=1
        ),
    ] = 0.25
    max_holds: Annotated[int, setting("Most requests of one tenant that are held at once.", ge=0, le=1 << 20)] = 4096


class LimitConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What a single call, and all of them together, may ask for."""

    max_keys: Annotated[int, setting("Most keys in one call.", ge=1, le=1 << 20)] = 65536
    max_key_bytes: Annotated[int, setting("Longest key.", unit="bytes", ge=5, le=1 * KIB)] = 80
    max_message_bytes: Annotated[
        int,
        setting(
            "Largest gRPC message; has room for `max_keys` keys and for one frame.",
            unit="bytes",
            ge=64 * KIB,
            le=1 * GIB,
        ),
    ] = 16 * MIB
    max_frame_bytes: Annotated[
        int, setting("Largest payload of one frame of a Push or Pull stream.", unit="bytes", ge=4 * KIB, le=256 * MIB)
    ] = 2 * MIB
    max_wait: Annotated[
        float, setting("Longest time for which a call may ask the server to wait.", unit="seconds", ge=0, le=3600)
    ] = 30.0
    tier_stall: Annotated[
        float,
        setting(
            "How long a tier may take for a job (32 MiB at most) before the server goes on without it.",
            unit="seconds",
            ge=0.1,
            le=3600,
        ),
    ] = 10.0
    max_sessions: Annotated[int, setting("Most sessions that are open at once.", ge=1, le=65536)] = 1024


class BulkConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Where the process listens that moves the bytes of clients without shared memory."""

    tcp: Annotated[bool, setting("Whether it serves plain TCP sockets; without, streams go over gRPC only.")] = True
    tcp_port: Annotated[
        int,
        setting("Its port for plain TCP sockets, on the hosts of `listen`; 0 lets the kernel pick.", ge=0, le=65535),
    ] = 0
    grpc_port: Annotated[int, setting("Its port for gRPC, likewise.", ge=0, le=65535)] = 0


class DevicesConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the server itself moves bytes to and from the engines' GPUs (CUDA IPC)."""

    driver: Annotated[
        str,
        setting(
            'What moves them: CUDA where it is to be had (`auto`), nothing (`off`), or "module:callable", for tests.'
        ),
    ] = "auto"


class TracingConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Whether calls and jobs are traced with OpenTelemetry (`kvtier[tracing]`)."""

    endpoint: Annotated[
        str | None,
        setting('Collector that spans are sent to, OTLP over gRPC: `http://HOST:4317`, or "off".', default='"off"'),
    ] = None
    ratio: Annotated[
        float,
        setting("Part of the traces that begin here and are recorded; others are as their caller says.", ge=0, le=1),
    ] = 1.0


class RuleConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One rule of a tier's vote: all its conditions must hold, and the first rule that matches decides."""

    policy: Literal["block_level", "request_level"]
    why: str = "as configured"
    kv_transfer_params: dict[str, Any] = msgspec.field(default_factory=dict)
    tenant: str | None = None
    min_prompt_tokens: int | None = None
    min_priority: int | None = None

    def to_rule(self) -> Rule:
        """Returns the rule that the tier votes by."""
        return Rule(
            OffloadPolicy[self.policy.upper()],
            self.why,
            kv_transfer_params=self.kv_transfer_params,
            tenant=self.tenant,
            min_prompt_tokens=self.min_prompt_tokens,
            min_priority=self.min_priority,
        )


class TierConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One tier below the CPU tier; `[[tiers]]` in the file, in lookup order."""

    type: Annotated[str, setting('Which tier: `lmdb`, `disk`, or "module:Class" for one that is not part of kvtier.')]
    name: Annotated[str, setting("Its name in status and metrics.", default="the type, or the class in lower case")]
    path: Annotated[Path, setting("Directory of its files.", default="`data_dir`/`name`")]
    size: Annotated[
        int,
        setting(
            "What its files may grow to; `lmdb` fills four fifths of that, `disk` nine tenths.",
            unit="bytes",
            ge=1 * MIB,
            default="16 GiB, at most half of the free disk",
        ),
    ]
    durability: Annotated[
        Durability, setting("What acknowledged blocks survive: a crash of the `process`, or a loss of `power` as well.")
    ] = "process"
    admission: Annotated[
        Admission, setting("What it takes in: `all`, or what a `second_use` has shown to be read again: SSDs wear.")
    ] = "all"
    eviction: Annotated[Eviction, setting(_EVICTION)] = "forecast"
    ttl: Annotated[float | None, setting(_TTL, unit="seconds", ge=1, default='"off"')] = None
    rules: Annotated[
        tuple[RuleConfig, ...] | None,
        setting(
            "How the tier votes on a request: tables with `policy` (block_level or request_level), and as conditions "
            "`kv_transfer_params`, `tenant`, `min_prompt_tokens`, `min_priority`; the first that matches decides.",
            default="request_level where `do_remote_decode` is set, or `offload_policy` says so",
        ),
    ] = None
    options: Annotated[
        Mapping[str, Any], setting('What a "module:Class" tier takes besides; passed on as it stands.', default="{}")
    ] = msgspec.field(default_factory=dict)

    @property
    def is_custom(self) -> bool:
        """Whether `type` names a class that is not part of kvtier."""
        return ":" in self.type


@dataclass(frozen=True, slots=True)
class Amount:
    """How much of a tier: a size in bytes, or a part of what it can hold."""

    size: int = 0
    part: float | None = None

    def of(self, capacity_bytes: int) -> int:
        """Returns how much that is of a tier, in bytes."""
        return self.size if self.part is None else int(self.part * capacity_bytes)

    def __str__(self) -> str:
        return format_size(self.size) if self.part is None else f"{self.part * 100:g}%"


class TenantConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One tenant with a share of its own; `[tenants.NAME]` in the file."""

    name: str
    quota: Annotated[
        Mapping[str, Amount],
        setting(
            'What nobody can take from it: a part of every tier, like `"25%"`, or per tier a size or a part, like '
            '`{cpu = "2GiB", lmdb = "25%"}`. What is free may be used beyond it.',
            default="nothing",
        ),
    ] = msgspec.field(default_factory=dict)
    limit: Annotated[
        Mapping[str, Amount],
        setting("The most that it may hold, written likewise.", default="all of it"),
    ] = msgspec.field(default_factory=dict)
    rates: Annotated[
        RateConfig,
        setting(
            'What it may ask for, as in `[rates]`: `{calls = 100, bytes = "100MiB", sessions = 4}`.',
            default="`[rates]`",
        ),
    ] = RateConfig()


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that can be set. `settings.load` fills in what depends on the machine (listen, data_dir, tiers)."""

    listen: Annotated[
        tuple[str, ...],
        setting("Where clients connect: `unix:PATH` or `HOST:PORT`, or several.", default="this user's socket"),
    ]
    region_size: Annotated[
        int,
        setting(
            "Size of the CPU tier, the shared host region.",
            unit="bytes",
            ge=1 * MIB,
            default="8 GiB, at most a quarter of the memory",
        ),
    ]
    numa: Annotated[
        str,
        setting(
            "Memory nodes that the region lies on: `spread` over all, `off` for the kernel's choice, or numbers like `0,2-3`. "
            "Nothing is done where there is but one."
        ),
    ] = "spread"
    data_dir: Annotated[
        Path,
        setting("Directory of the tiers that keep their blocks on disk.", default="`$XDG_DATA_HOME/kvtier`"),
    ]
    metrics: Annotated[str | None, setting('`HOST:PORT` of the Prometheus endpoint, or "off".', default='"off"')] = None
    estimates: Annotated[
        bool,
        setting(
            "Whether it is estimated, from a sample of the keys, what tiers of other sizes would answer "
            "(`kvtier_estimated_hit_ratio`)."
        ),
    ] = True
    insecure: Annotated[
        bool,
        setting("Whether to listen on TCP, loopback included, in the clear, or without asking anybody who he is."),
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
    tiers: Annotated[
        tuple[TierConfig, ...],
        setting("The tiers below the CPU tier, in lookup order; `[]` means CPU only.", default="one `lmdb` tier"),
    ] = ()
    tenants: Annotated[
        tuple[TenantConfig, ...],
        setting("Who has a share of the tiers of its own; all others share the rest.", default="nobody"),
    ] = ()

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        """`listen`, read."""
        return tuple(map(parse_endpoint, self.listen))
