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
    """Looks up, loads and stores, for its tenant."""
    READER = "reader"
    """Looks up and loads, for its tenant."""
    ADMIN = "admin"
    """AdminService: sees all tenants."""
    METRICS = "metrics"
    """The metrics of the HTTP port; no RPC at all."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Authenticated caller."""

    name: str
    """Name for the log."""
    tenant: str | None
    """Tenant whose blocks it may access; None: any tenant, as its session states."""
    roles: frozenset[Role]
    shared_memory: bool
    """Whether it may map the region, which holds the blocks of all tenants."""
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

RPC_ROLES: Mapping[str, frozenset[Role] | None] = MappingProxyType(
    {
        # Health probes have no credentials.
        "grpc.health.v1.Health/Check": _PUBLIC,
        "grpc.health.v1.Health/Watch": _USERS,
        "grpc.health.v1.Health/List": _USERS,
        "grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": _USERS,
        "kvtier.v1.SessionService/Capabilities": _USERS,
        "kvtier.v1.SessionService/Open": _READS,
        "kvtier.v1.CacheService/BeginRequest": _READS,
        "kvtier.v1.CacheService/Lookup": _READS,
        "kvtier.v1.CacheService/PrepareLoad": _READS,
        "kvtier.v1.CacheService/CompleteLoad": _READS,
        "kvtier.v1.CacheService/ReleaseLease": _READS,
        "kvtier.v1.CacheService/Touch": _READS,
        "kvtier.v1.CacheService/PrepareStore": _WRITES,
        "kvtier.v1.CacheService/CompleteStore": _WRITES,
        "kvtier.v1.CacheService/Flush": _WRITES,
        "kvtier.v1.CacheService/FinishRequest": _READS,
        "kvtier.v1.CacheService/Reset": _WRITES,
        "kvtier.v1.HandoffService/PublishHold": _WRITES,
        "kvtier.v1.HandoffService/ClaimHold": _READS,
        "kvtier.v1.HandoffService/RenewHolds": _WRITES,
        "kvtier.v1.HandoffService/ReleaseHolds": _WRITES,
        "kvtier.v1.TransferService/Push": _WRITES,
        "kvtier.v1.TransferService/Pull": _READS,
        "kvtier.v1.TransferService/Locate": _READS,
        "kvtier.v1.TransferService/RegisterDeviceBuffers": _READS,
        "kvtier.v1.TransferService/UnregisterDeviceBuffers": _READS,
        "kvtier.v1.TransferService/StoreFromDevice": _WRITES,
        "kvtier.v1.TransferService/LoadToDevice": _READS,
        "kvtier.v1.AdminService/GetStatus": _ADMINS,
        "kvtier.v1.AdminService/Fsck": _ADMINS,
        "kvtier.v1.AdminService/Evict": _ADMINS,
        "kvtier.v1.AdminService/Drain": _ADMINS,
        "kvtier.v1.AdminService/ListLeases": _ADMINS,
        "kvtier.v1.AdminService/ExplainRequest": _ADMINS,
        "kvtier.v1.AdminService/ListHandoffs": _ADMINS,
    }
)
"""For each RPC the roles of which the caller needs one; None: no credentials needed. Other RPCs are refused."""


def is_public(method: str) -> bool:
    """Returns whether an RPC (`service/method`) needs no credentials."""
    return RPC_ROLES.get(method, frozenset()) is None


def require_role(method: str, identity: Identity) -> None:
    """Raises `Refused` if the identity has no role for an RPC (`service/method`)."""
    roles = RPC_ROLES.get(method, frozenset())
    if roles is not None and not roles & identity.roles:
        wanted = " or ".join(sorted(role.value for role in roles)) or "that does not exist"
        raise Refused("PERMISSION_DENIED", f"{identity.name} may not call {method}: it takes the role {wanted}")
