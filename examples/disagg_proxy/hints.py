"""Sends hints to kvtier servers in the background. A failure of a hint never affects a request.

Only this module needs kvtier, and only if an engine has a server for hints.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

from .agents import Hint
from .metrics import Metrics

if TYPE_CHECKING:
    from kvtier.client import AsyncConversationClient

__all__ = ["Hints"]

TIMEOUT_S = 2.0
MAX_QUEUED = 1000
"""Hints that wait for one server. Further hints are dropped."""

MAX_AGE_S = 10.0
"""An older hint is dropped, because the agent has gone on."""

logger = logging.getLogger(__name__)


class Hints:
    """Queues of hints, one per server.

    A server gets its hints one after another, so that a release follows its retention.
    """

    def __init__(self, servers: Iterable[str], metrics: Metrics, clock: Callable[[], float]) -> None:
        self._senders = {server: _Sender(server, metrics, clock) for server in servers}

    def send(self, hints: Iterable[Hint]) -> None:
        """Queues the hints and returns at once."""
        for hint in hints:
            self._senders[hint.server].put(hint)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Sends hints until the context ends. Raises an exception if credentials are unusable."""
        if not self._senders:
            yield
            return
        from kvtier.client import AsyncConversationClient

        async with AsyncExitStack() as stack:
            tasks = []
            for server, sender in self._senders.items():
                client = await stack.enter_async_context(AsyncConversationClient(server, timeout=TIMEOUT_S))
                tasks.append(asyncio.create_task(sender.run(client)))
            try:
                yield
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)


class _Sender:
    def __init__(self, server: str, metrics: Metrics, clock: Callable[[], float]) -> None:
        self._server = server
        self._metrics = metrics
        self._clock = clock
        self._queue: asyncio.Queue[tuple[float, Hint]] = asyncio.Queue(MAX_QUEUED)

    def put(self, hint: Hint) -> None:
        try:
            self._queue.put_nowait((self._clock(), hint))
        except asyncio.QueueFull:
            self._failed(hint, "dropped", f"{MAX_QUEUED} hints are waiting")

    async def run(self, client: AsyncConversationClient) -> None:
        from kvtier.client import ConversationAction, KVTierError

        while True:
            put_at, hint = await self._queue.get()
            if self._clock() - put_at > MAX_AGE_S:
                self._failed(hint, "dropped", f"it is older than {MAX_AGE_S:g} s")
                continue
            action = ConversationAction[hint.action.name]
            try:
                await client.act(action, hint.conversation_id, retain_for=hint.retain_for_s)
            except KVTierError as error:
                self._failed(hint, error.reason.lower() or "unreachable", str(error))
            except Exception as error:
                logger.exception("a hint failed")
                self._failed(hint, "defect", repr(error))
            else:
                self._count(hint, "ok")

    def _failed(self, hint: Hint, outcome: str, cause: str) -> None:
        self._count(hint, outcome)
        logger.warning("%s got no %s of %s: %s", self._server, hint.action.value, hint.conversation_id, cause)

    def _count(self, hint: Hint, outcome: str) -> None:
        self._metrics.hints.labels(hint.action.value, outcome).inc()
