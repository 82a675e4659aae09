"""Who calls, and what he may: the identities, the roles, and the one table of what each RPC asks for."""

from __future__ import annotations

import contextvars
import enum
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ..refused import Refused

__all__ = ["CALLER", "OWNER", "RPC_ROLES", "Identity", "Role", "is_open", "require_role"]


class Role(enum.Enum):
    """What a credential is for."""

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
    """Somebody with credentials."""

    name: str
    """For people, in the log."""
    tenant: str | None
    """Whose blocks it may reach; None for every tenant's, as its session says."""
    roles: frozenset[Role]
    shared_memory: bool
    """Whether it may map the region, in which the blocks of all tenants lie."""
    credential: bytes | None = None
    """What it was recognized by; None for who needs none."""


OWNER = Identity("owner", None, frozenset(Role) - {Role.METRICS}, shared_memory=True)
"""Whoever comes through a socket that only the server's user can open; or in the clear where nobody asks."""

CALLER: contextvars.ContextVar[Identity] = contextvars.ContextVar("kvtier_caller", default=OWNER)
"""Who makes the call that is being served."""

_ANYBODY: frozenset[Role] | None = None
_USERS = frozenset({Role.ENGINE, Role.READER, Role.ADMIN})
_READS = frozenset({Role.ENGINE, Role.READER})
_WRITES = frozenset({Role.ENGINE})
_ADMINS = frozenset({Role.ADMIN})

RPC_ROLES: Mapping[str, frozenset[Role] | None] = MappingProxyType(
    {
        # Probes have no credentials, and learn one word.
        "grpc.health.v1.Health/Check": _ANYBODY,
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
"""For each RPC, the roles of which one is needed; None for those that anybody may call. What is not here nobody may call."""


def is_open(method: str) -> bool:
    """Returns whether anybody may call an RPC (`service/method`), without credentials."""
    return RPC_ROLES.get(method, frozenset()) is None


def require_role(method: str, identity: Identity) -> None:
    """Raises Refused if an RPC (`service/method`) is not for this one."""
    roles = RPC_ROLES.get(method, frozenset())
    if roles is not None and not roles & identity.roles:
        wanted = " or ".join(sorted(role.value for role in roles)) or "that nobody has"
        raise Refused("PERMISSION_DENIED", f"{identity.name} may not call {method}: it takes the role {wanted}")
