"""Holds of conversations, which several proxies share in a Valkey or Redis server.

Without such a server, each proxy has only its own table. A proxy also writes to its own table, and
uses this table while the server does not answer. No failure of the server affects a request.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .conversations import MAX_TURNS, Conversation, Conversations, FoundHold, HeldTurn, find
from .metrics import Metrics
from .transfer import Params

if TYPE_CHECKING:
    from redis.asyncio import Redis

__all__ = ["SharedConversations"]

DEADLINE_S = 0.25
PAUSE_S = 1.0
"""Seconds for which the server is not asked after a failure."""

logger = logging.getLogger(__name__)


class SharedConversations:
    """`own`: the table of this proxy. `url`: `redis://HOST[:PORT][/DATABASE]`; None for no server.

    The user's password is in the environment variable `REDISCLI_AUTH`, as for `redis-cli`.
    """

    def __init__(
        self,
        own: Conversations,
        metrics: Metrics,
        clock: Callable[[], float],
        url: str | None = None,
        ttl_s: float = 450.0,
    ) -> None:
        self.own = own
        self._metrics = metrics
        self._clock = clock
        self._ttl_s = ttl_s
        self._server = None if url is None else _server(url)
        self._ask_at = 0.0

    async def find(self, conversation: Conversation, prompt: bytes) -> FoundHold:
        """Returns the hold that a request with this prompt can use."""
        fields = await self._ask("find", lambda server: server.hgetall(_key(conversation)))
        if fields is None:
            return self.own.find(conversation, prompt, self._clock())
        turns = sorted((_turn(digest, value) for digest, value in fields.items()), key=lambda turn: turn.until)
        if surplus := [turn.digest for turn in turns[:-MAX_TURNS]]:
            await self._ask("put", lambda server: server.hdel(_key(conversation), *surplus))
        return find(turns, prompt, time.time())

    async def put(self, conversation: Conversation, prompt: bytes, hold: Params) -> None:
        """Records a turn."""
        crowded_out = self.own.put(conversation, prompt, hold, self._clock())
        self._metrics.dropped.labels("no_room").inc(crowded_out)
        turn = HeldTurn.of(prompt, hold, time.time() + self._ttl_s)
        value = json.dumps({"prompt_bytes": turn.prompt_bytes, "until": turn.until, "hold": hold})

        def write(server: Redis) -> Any:
            both = server.pipeline(transaction=False)
            both.execute_command("HSET", _key(conversation), turn.digest, value)
            both.execute_command("EXPIRE", _key(conversation), max(1, round(self._ttl_s)))
            return both.execute()

        await self._ask("put", write)

    async def close(self) -> None:
        if self._server is not None:
            await self._server.aclose()

    async def _ask(self, operation: str, call: Callable[[Redis], Any]) -> Any:
        """Returns the server's answer, None without a server or an answer."""
        if self._server is None or self._clock() < self._ask_at:
            return None
        try:
            async with asyncio.timeout(DEADLINE_S):
                return await call(self._server)
        except Exception as error:  # noqa: BLE001 - the request must not fail
            self._ask_at = self._clock() + PAUSE_S
            self._metrics.state_errors.labels(operation).inc()
            logger.warning("the server of --state does not answer: %s", str(error) or type(error).__name__)
            return None


def _server(url: str) -> Redis:
    from redis.asyncio import Redis
    from redis.asyncio.retry import Retry
    from redis.backoff import NoBackoff

    return Redis.from_url(
        url.replace("valkey", "redis", 1) if url.startswith("valkey") else url,
        password=os.environ.get("REDISCLI_AUTH"),
        retry=Retry(NoBackoff(), 0),
        socket_connect_timeout=DEADLINE_S,
    )


def _key(conversation: Conversation) -> str:
    named = f"{conversation.owner}\0{conversation.model}\0{conversation.name}".encode("utf-8", "surrogatepass")
    return f"disagg_proxy/1/{hashlib.sha256(named).hexdigest()}"


def _turn(digest: bytes, value: bytes) -> HeldTurn:
    fields = json.loads(value)
    return HeldTurn(fields["prompt_bytes"], digest.decode(), json.dumps(fields["hold"]).encode(), fields["until"])
