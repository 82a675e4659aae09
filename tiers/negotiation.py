"""Votes of tiers on the offload policy of a request: rules, request properties, tier filters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NewType

from ..protos.values import Medium, OffloadPolicy, TierFilter

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
"""Digest of all properties that must be equal for engines to share blocks; 16 bytes."""


@dataclass(frozen=True, slots=True)
class RequestInfo:
    """Properties of a request on which a vote may depend."""

    request_id: str
    namespace: NamespaceId
    prompt_tokens: int = 0
    tenant: str = ""
    priority: int = 0
    kv_transfer_params: dict[str, object] = field(default_factory=dict)
    retain_for: float = 0.0
    """How long to retain the request's blocks after each use, in seconds."""
    conversation_id: str = ""
    """Name of the conversation that the request belongs to; may be empty."""


@dataclass(frozen=True, slots=True)
class Vote:
    """Vote of a tier on a new request: the policy, and the reason (for operators)."""

    policy: OffloadPolicy
    why: str


@dataclass(frozen=True, slots=True)
class Rule:
    """A vote for requests that match every condition. A condition of None matches every request.

    Attributes:
        policy: the vote.
        why: the reason, for operators.
        kv_transfer_params: required values of the request's parameters; True matches any truthy
            value.
        tenant: required tenant.
        min_prompt_tokens: minimum length of the prompt.
        min_priority: minimum priority of the request.
    """

    policy: OffloadPolicy
    why: str
    kv_transfer_params: Mapping[str, object] = field(default_factory=dict)
    tenant: str | None = None
    min_prompt_tokens: int | None = None
    min_priority: int | None = None

    def matches(self, request: RequestInfo) -> bool:
        """Returns whether a request meets all conditions. A missing parameter counts as None."""
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
        "do_remote_decode: another engine will decode the request",
        kv_transfer_params={"do_remote_decode": True},
    ),
    Rule(
        OffloadPolicy.REQUEST_LEVEL,
        "offload_policy: the request asks for it",
        kv_transfer_params={"offload_policy": "request_level"},
    ),
)
"""The rules of a tier without configured rules (B1.6)."""


def vote(rules: Sequence[Rule], request: RequestInfo) -> Vote:
    """Returns the vote of the first matching rule, or BLOCK_LEVEL."""
    for rule in rules:
        if rule.matches(request):
            return Vote(rule.policy, rule.why)
    return Vote(OffloadPolicy.BLOCK_LEVEL, "the default")


def _agrees(value: object, wanted: object) -> bool:
    return bool(value) if wanted is True else value == wanted
