"""A client's request, and the objects that all requests share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from .agents import Retentions
from .conversations import Conversation
from .engines import Engines
from .fleet import Fleet
from .hints import Hints
from .metrics import Metrics
from .shared import SharedConversations
from .turns import Turn

__all__ = ["Request", "Service"]


@dataclass(frozen=True)
class Service:
    """Objects that all requests share. `clock`: monotonic seconds.

    `overlap`: whether D gets a request at the same time as P.
    `tool_time_s`: seconds for which servers retain a conversation's blocks while a tool runs.
    """

    prefill: Fleet
    decode: Fleet
    engines: Engines
    conversations: SharedConversations
    retentions: Retentions
    hints: Hints
    metrics: Metrics
    clock: Callable[[], float]
    prefill_timeout_s: float
    tool_time_s: float
    overlap: bool


@dataclass(frozen=True)
class Request:
    """A client's request. `path` and `headers` are sent to engines. `begun_at`: service clock."""

    path: str
    turn: Turn
    conversation: Conversation | None
    headers: Mapping[str, str]
    begun_at: float
