"""What a request is served with, and what it is."""

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
    """What all requests share. ``clock``: seconds, never back."""

    prefill: Fleet
    decode: Fleet
    engines: Engines
    conversations: Conversations
    metrics: Metrics
    clock: Callable[[], float]
    prefill_timeout_s: float


@dataclass(frozen=True)
class Request:
    """What a client wants: ``path`` as the engines have it, ``headers`` for them, ``begun_at`` on the service's clock."""

    path: str
    turn: Turn
    conversation: Conversation | None
    headers: Mapping[str, str]
    begun_at: float
