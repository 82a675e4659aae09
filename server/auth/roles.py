"""Identities and roles, and the roles that each RPC requires."""

from __future__ import annotations

import contextvars
import enum
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ..refused import Refused

__all__ = ["CALLER", "OWNER", "RPC_ROLES", "Identity", "Role", "is_public", "require_role"]


class Role(enum.Enum):
    """Permission group of a credential."""

    ENGINE = "engine"
    """May look up, load and store blocks of its tenant."""
    READER = "reader"
    """May look up and load blocks of its tenant."""
    ADMIN = "admin"
    """May call AdminService, which shows all tenants, and act on conversations of all tenants."""
    METRICS = "metrics"
    """May read the metrics over HTTP; may call no RPC."""


@dataclass(frozen=True, slots=True)
class Identity:
    name: str
    """Name for the log."""
    tenant: str | None
    """Tenant whose blocks the caller may access; None: any tenant that a session names."""
    roles: frozenset[Role]
    shared_memory: bool
    """Whether the caller may map the memory pool of its tenant. If it may act for any tenant, it
    may also map the pool that several tenants share."""
    credential: bytes | None = None
    """Hash of the token, or name of the certificate; None without authentication."""


OWNER = Identity("owner", None, frozenset(Role) - {Role.METRICS}, shared_memory=True)
"""Caller on the server user's Unix socket, or any caller if no authentication is configured."""

CALLER: contextvars.ContextVar[Identity] = contextvars.ContextVar("kvtier_caller", default=OWNER)
"""Caller of the RPC being served."""

_PUBLIC: frozenset[Role] | None = None
_USERS = frozenset({Role.ENGINE, Role.READER, Role.ADMIN})
_READS = frozenset({Role.ENGINE, Role.READER})
_WRITES = frozenset({Role.ENGINE})
_ADMINS = frozenset({Role.ADMIN})
_OPERATORS = frozenset({Role.ENGINE, Role.ADMIN})

_SERVICES = (
    # Health probes have no credentials.
    ("grpc.health.v1.Health", _PUBLIC, "Check"),
    ("grpc.health.v1.Health", _USERS, "Watch List"),
    ("grpc.reflection.v1alpha.ServerReflection", _USERS, "ServerReflectionInfo"),
    ("kvtier.v1.SessionService", _USERS, "Capabilities"),
    ("kvtier.v1.SessionService", _READS, "Open"),
    (
        "kvtier.v1.CacheService",
        _READS,
        "BeginRequest Lookup Prefetch PrepareLoad CompleteLoad ReleaseLease Touch FinishRequest WithdrawGrants",
    ),
    ("kvtier.v1.CacheService", _WRITES, "PrepareStore CompleteStore Flush Reset"),
    ("kvtier.v1.EventService", _READS, "WatchEvents"),
    ("kvtier.v1.EventService", _WRITES, "DescribeBlocks"),
    ("kvtier.v1.ConversationService", _USERS, "ListConversations"),
    ("kvtier.v1.ConversationService", _OPERATORS, "ActOnConversation"),
    ("kvtier.v1.HandoffService", _READS, "ClaimHold ReportNotClaimed"),
    ("kvtier.v1.HandoffService", _WRITES, "PublishHold RenewHolds ReleaseHolds"),
    ("kvtier.v1.TransferService", _READS, "Pull Locate RegisterDeviceBuffers UnregisterDeviceBuffers LoadToDevice"),
    ("kvtier.v1.TransferService", _WRITES, "Push StoreFromDevice"),
    ("kvtier.v1.AdminService", _ADMINS, "GetStatus Fsck Evict Drain ListLeases ExplainRequest ListHandoffs"),
)

RPC_ROLES: Mapping[str, frozenset[Role] | None] = MappingProxyType(
    {f"{service}/{method}": roles for service, roles, methods in _SERVICES for method in methods.split()}
)
"""Permitted roles of each RPC (a caller needs one of them). None: the RPC needs no credentials."""


def is_public(method: str) -> bool:
    return RPC_ROLES.get(method, frozenset()) is None


def require_role(method: str, identity: Identity) -> None:
    """Raises `Refused` if the identity has no role for an RPC (`service/method`)."""
    roles = RPC_ROLES.get(method, frozenset())
    if roles is not None and not roles & identity.roles:
        wanted = " or ".join(sorted(role.value for role in roles))
        why = f"the call needs the role {wanted}" if roles else "there is no such call"
        raise Refused("PERMISSION_DENIED", f"{identity.name} must not call {method}: {why}")
