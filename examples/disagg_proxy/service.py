"""A client's request, and the objects that all requests share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

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
    `tasks`: work that may last longer than its request, until shutdown.
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
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Runs `work` in a task that shutdown cancels."""
        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task


@dataclass(frozen=True)
class Request:
    """A client's request. `path` and `headers` are sent to engines. `begun_at`: service clock."""

    path: str
    turn: Turn
    conversation: Conversation | None
    headers: Mapping[str, str]
    begun_at: float
