"""Hints for kvtier servers about the conversations of agents: when, what, and to which servers.

An agent calls tools between its requests. While a tool runs, the blocks of the conversation are
unused, and other requests could evict them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from .conversations import Conversation

__all__ = [
    "CONVERSATION_HEADER",
    "TOOL_HEADER",
    "AgentRequest",
    "Hint",
    "HintAction",
    "Retentions",
    "calls_tools",
    "prefetch",
]

TOOL_HEADER = "x-kv-cache-tool-seconds"
"""Header with the maximum duration of the tools that the answer may call."""

CONVERSATION_HEADER = "x-kv-cache-conversation"
"""Header with the value `end` in the last request of a conversation."""

PREFETCH_RETAIN_S = 30.0
"""Seconds for which prefetched blocks are retained, so that they are there when the request is."""

_MAX_TOOL_S = 86400.0
_TOOL_ENDINGS = ("tool_calls", "function_call")
_TOOL_ROLES = ("tool", "function")


class HintAction(Enum):
    """Action of `kvtier.client.ConversationAction` with the same name."""

    RETAIN = "retain"
    PREFETCH = "prefetch"
    RELEASE = "release"


@dataclass(frozen=True)
class Hint:
    """A call of a kvtier server. `conversation_id`: the name on this server."""

    server: str
    action: HintAction
    conversation_id: str
    retain_for_s: float | None = None


@dataclass(frozen=True)
class AgentRequest:
    """What a request tells about its agent.

    `has_tool_results`: the prompt ends with the result of a tool. `tool_s`: maximum duration of the
    tools that the answer may call; None: the proxy's setting. `is_last`: the conversation ends.
    """

    has_tool_results: bool = False
    tool_s: float | None = None
    is_last: bool = False

    @classmethod
    def parse(cls, body: Mapping[str, Any], headers: Mapping[str, str]) -> AgentRequest:
        """Parses a request's body and headers. Raises ValueError."""
        last = headers.get(CONVERSATION_HEADER)
        if last not in (None, "end"):
            raise ValueError(f"{CONVERSATION_HEADER} must be end")
        messages = body.get("messages")
        message = messages[-1] if isinstance(messages, list) and messages else None
        has_tool_results = isinstance(message, dict) and message.get("role") in _TOOL_ROLES
        return cls(has_tool_results, _tool_seconds(headers.get(TOOL_HEADER)), bool(last))


def _tool_seconds(given: str | None) -> float | None:
    if given is None:
        return None
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= _MAX_TOOL_S:
        raise ValueError(f"{TOOL_HEADER} must be a number of seconds, at most {_MAX_TOOL_S:g}")
    return seconds


def calls_tools(choice: Mapping[str, Any]) -> bool:
    """Whether a choice of an answer, or of a chunk of a stream, calls tools.

    vLLM gives a call of a tool that the request chose the finish reason `stop`.
    """
    message = choice.get("message", choice.get("delta"))
    return choice.get("finish_reason") in _TOOL_ENDINGS or (
        isinstance(message, dict) and bool(message.get("tool_calls") or message.get("function_call"))
    )


def prefetch(conversation: Conversation, servers: Collection[str]) -> list[Hint]:
    """Returns the hints for a request that comes soon, or that an engine is about to get."""
    return _hints(HintAction.PREFETCH, conversation, servers, PREFETCH_RETAIN_S)


@dataclass(frozen=True)
class _Retention:
    servers: frozenset[str]
    until: float


class Retentions:
    """Table of the conversations whose blocks servers retain. Times: seconds, monotonic clock.

    An entry remains until the next answer of the conversation, or until the servers end the
    retention themselves. If the table exceeds `max_entries`, the oldest entries are released.
    """

    def __init__(self, max_entries: int) -> None:
        self._max_entries = max_entries
        self._entries: dict[Conversation, _Retention] = {}  # in the order of insertion

    def __len__(self) -> int:
        return len(self._entries)

    def retain(self, conversation: Conversation, servers: Collection[str], seconds: float, now: float) -> list[Hint]:
        """Returns the hints after an answer that calls tools.

        `servers` are those of the engines that served the request. Earlier servers release.
        """
        before = self._entries.pop(conversation, None)
        hints = list(self._releases(conversation, before, now, keeping=servers))
        if not servers:
            return hints
        self._entries[conversation] = _Retention(frozenset(servers), now + seconds)
        hints += _hints(HintAction.RETAIN, conversation, servers, seconds)
        while len(self._entries) > self._max_entries:
            oldest = next(iter(self._entries))
            hints += self._releases(oldest, self._entries.pop(oldest), now)
        return hints

    def release(self, conversation: Conversation, now: float) -> list[Hint]:
        """Returns the hints after an answer that calls no tools, or at the conversation's end."""
        return list(self._releases(conversation, self._entries.pop(conversation, None), now))

    def _releases(
        self, conversation: Conversation, entry: _Retention | None, now: float, keeping: Collection[str] = ()
    ) -> Iterator[Hint]:
        if entry is not None and now < entry.until:
            yield from _hints(HintAction.RELEASE, conversation, entry.servers.difference(keeping))


def _hints(
    action: HintAction, conversation: Conversation, servers: Collection[str], retain_for_s: float | None = None
) -> list[Hint]:
    return [Hint(server, action, conversation.server_name, retain_for_s) for server in sorted(servers)]
