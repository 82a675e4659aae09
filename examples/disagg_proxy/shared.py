"""Holds of conversations, which several proxies share in a Valkey or Redis server.

Without such a server, each proxy has only its own table. A proxy also writes to its own table, and
always searches both. No failure of the server affects a request.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from .conversations import MAX_TURNS, Conversation, Conversations, FoundHold, HeldTurn
from .metrics import Metrics
from .transfer import Params

if TYPE_CHECKING:
    from redis.asyncio import Redis

__all__ = ["SharedConversations"]

DEADLINE_S = 0.25
PAUSE_S = 1.0
"""Seconds for which the server is not asked after a failure."""
_MAX_UNTIL = 1e12
"""Seconds since the epoch; an entry never has a later time. NaN and infinity are not below it."""

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
        """Returns the hold that a request with this prompt can use.

        The server lacks turns that proxies recorded while it did not answer. So the own table is
        searched, too.
        """
        turns: list[HeldTurn] = await self._ask("find", lambda server: _read(server, _key(conversation))) or []
        if surplus := [turn.digest for turn in turns[:-MAX_TURNS]]:
            await self._ask("put", lambda server: server.hdel(_key(conversation), *surplus))
        now = self._clock()
        ahead = now - time.time()
        others = [replace(turn, until=turn.until + ahead) for turn in turns]
        return self.own.find(conversation, prompt, now, others)

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


async def _read(server: Redis, key: str) -> list[HeldTurn]:
    """Returns the turns of a conversation, the latest last."""
    fields: dict[Any, Any] = await server.hgetall(key)
    turns = [turn for digest, value in fields.items() if (turn := _turn(digest, value)) is not None]
    return sorted(turns, key=lambda turn: turn.until)


def _turn(digest: bytes, value: bytes) -> HeldTurn | None:
    """Parses a field. Returns None for a field that no proxy has written."""
    try:
        fields = json.loads(value)
        prompt_bytes, hold, until = fields["prompt_bytes"], fields["hold"], fields["until"]
        is_valid = type(prompt_bytes) is int and prompt_bytes >= 0 and isinstance(hold, dict)
        if not is_valid or not 0 < until < _MAX_UNTIL:
            return None
        return HeldTurn(prompt_bytes, digest.decode(), json.dumps(hold).encode(), float(until))
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
