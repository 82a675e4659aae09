"""A client's request, and the objects that all requests share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from .conversations import Conversation, Conversations
from .engines import Engines
from .fleet import Fleet
from .metrics import Metrics
from .turns import Turn

__all__ = ["Request", "Service"]


@dataclass(frozen=True)
class Service:
    """Objects that all requests share. `clock`: monotonic seconds."""

    prefill: Fleet
    decode: Fleet
    engines: Engines
    conversations: Conversations
    metrics: Metrics
    clock: Callable[[], float]
    prefill_timeout_s: float


@dataclass(frozen=True)
class Request:
    """A client's request. `path` and `headers` are sent to engines. `begun_at`: service clock."""

    path: str
    turn: Turn
    conversation: Conversation | None
    headers: Mapping[str, str]
    begun_at: float
