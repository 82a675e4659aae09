"""How a tier votes on a request: the words of the negotiation, and rules as data."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NewType

__all__ = [
    "DEFAULT_RULES",
    "Medium",
    "NamespaceId",
    "OffloadPolicy",
    "RequestInfo",
    "Rule",
    "TierFilter",
    "Vote",
    "vote",
]

NamespaceId = NewType("NamespaceId", bytes)
"""Digest of everything that must agree for blocks to be shared; 16 bytes."""


class OffloadPolicy(enum.IntEnum):
    """How a request is offloaded. Numbers as in `kvtier.v1.OffloadPolicy`."""

    BLOCK_LEVEL = 1
    """Only newly computed blocks."""
    REQUEST_LEVEL = 2
    """Every block of the request, prefix hits included."""


class Medium(enum.IntEnum):
    """What the bytes of a tier lie on. Numbers as in `kvtier.v1.TierMedium`."""

    MEMORY = 1
    DISK = 2
    NETWORK = 3


@dataclass(frozen=True, slots=True)
class TierFilter:
    """Which tiers a lookup leaves out. Never the CPU tier: everything is read from it.

    Attributes:
        names: tiers, by name.
        media: tiers whose bytes lie on one of these.
        remote: whether tiers are left out whose bytes are not on this host.
    """

    names: frozenset[str] = frozenset()
    media: frozenset[Medium] = frozenset()
    remote: bool = False

    def __bool__(self) -> bool:
        """Whether it can leave out anything."""
        return bool(self.names or self.media or self.remote)


@dataclass(frozen=True, slots=True)
class RequestInfo:
    """A request, as far as a tier may base its vote on it."""

    request_id: str
    namespace: NamespaceId
    prompt_tokens: int = 0
    tenant: str = ""
    priority: int = 0
    kv_transfer_params: dict[str, object] = field(default_factory=dict)
    retain_for: float = 0.0
    """For how many seconds it wants its blocks to stay, from each use on."""


@dataclass(frozen=True, slots=True)
class Vote:
    """A tier's answer to a new request: how it wants it offloaded, and why (for people)."""

    policy: OffloadPolicy
    why: str


@dataclass(frozen=True, slots=True)
class Rule:
    """A vote for the requests that match every condition; a condition that is None is none.

    Attributes:
        policy: what is voted.
        why: the reason, for people.
        kv_transfer_params: values that the request's parameters must have; True stands for anything truthy.
        tenant: the tenant that the request must belong to.
        min_prompt_tokens: length that the prompt must have at least.
        min_priority: priority that the request must have at least.
    """

    policy: OffloadPolicy
    why: str
    kv_transfer_params: Mapping[str, object] = field(default_factory=dict)
    tenant: str | None = None
    min_prompt_tokens: int | None = None
    min_priority: int | None = None

    def matches(self, request: RequestInfo) -> bool:
        """Returns whether a request meets all conditions. Parameters that are absent match nothing but None."""
        params = request.kv_transfer_params
        return (
            all(_agrees(params.get(name), wanted) for name, wanted in self.kv_transfer_params.items())
            and self.tenant in (None, request.tenant)
            and (self.min_prompt_tokens is None or request.prompt_tokens >= self.min_prompt_tokens)
            and (self.min_priority is None or request.priority >= self.min_priority)
        )


DEFAULT_RULES: tuple[Rule, ...] = (
    Rule(
        OffloadPolicy.REQUEST_LEVEL,
        "do_remote_decode: another engine will decode it",
        kv_transfer_params={"do_remote_decode": True},
    ),
    Rule(
        OffloadPolicy.REQUEST_LEVEL,
        "offload_policy: the request asks for it",
        kv_transfer_params={"offload_policy": "request_level"},
    ),
)
"""What a tier votes by unless it is configured otherwise (B1.6)."""


def vote(rules: Sequence[Rule], request: RequestInfo) -> Vote:
    """Returns the vote of the first rule that matches, or BLOCK_LEVEL."""
    for rule in rules:
        if rule.matches(request):
            return Vote(rule.policy, rule.why)
    return Vote(OffloadPolicy.BLOCK_LEVEL, "the default")


def _agrees(value: object, wanted: object) -> bool:
    return bool(value) if wanted is True else value == wanted
