"""What is remembered of conversations: per conversation the hold of its latest turn, to be used once (BEHAVIOUR B2.20, B2.21)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import Enum

from .transfer import Params

__all__ = ["Conversation", "Conversations", "Reuse", "Taken"]


class Reuse(Enum):
    """Whether a turn goes on from what D holds."""

    HIT = "hit"
    MISS = "miss"
    EXPIRED = "expired"
    UNNAMED = "no_conversation_id"
    ALONE = "not_one_prompt"
    """The request is not of one prompt and one answer: D serves it alone."""


@dataclass(frozen=True)
class Conversation:
    """Which one it is. ``owner`` and ``model`` keep those apart that chose the same ``name``: of two credentials, of two models."""

    owner: str
    model: str
    name: str


@dataclass(frozen=True)
class Taken:
    """An entry, or why there is none."""

    reuse: Reuse
    hold: Params | None = None


@dataclass(frozen=True)
class _Entry:
    hold: bytes  # JSON: the block ids of a long conversation are a list of thousands
    until: float


class Conversations:
    """The entries; times in seconds, on any clock that does not go back.

    ``ttl_s`` is to be less than for how long D holds. Of more than ``max_entries``, or ``max_bytes`` of them, the oldest go.
    """

    def __init__(self, ttl_s: float = 450.0, max_entries: int = 100_000, max_bytes: int = 256 << 20) -> None:
        self._ttl_s = ttl_s
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._bytes = 0
        self._entries: dict[
            Conversation, _Entry
        ] = {}  # in the order in which they were put, and so in that of their ends

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, conversation: Conversation, hold: Params, now: float) -> int:
        """Remembers the latest turn, instead of an earlier one; returns how many others had to make room."""
        self._forget(conversation)
        entry = _Entry(json.dumps(hold).encode(), now + self._ttl_s)
        self._entries[conversation] = entry
        self._bytes += len(entry.hold)
        crowded_out = 0
        while len(self._entries) > self._max_entries or self._bytes > self._max_bytes:
            self._forget(next(iter(self._entries)))
            crowded_out += 1
        return crowded_out

    def take(self, conversation: Conversation, now: float) -> Taken:
        """Returns the hold and forgets it."""
        entry = self._forget(conversation)
        if entry is None:
            return Taken(Reuse.MISS)
        return Taken(Reuse.HIT, json.loads(entry.hold)) if now < entry.until else Taken(Reuse.EXPIRED)

    def evict(self, now: float) -> int:
        """Forgets what is over; returns how many."""
        stale = [conversation for conversation, entry in self._entries.items() if entry.until <= now]
        for conversation in stale:
            self._forget(conversation)
        return len(stale)

    def _forget(self, conversation: Conversation) -> _Entry | None:
        entry = self._entries.pop(conversation, None)
        if entry is not None:
            self._bytes -= len(entry.hold)
        return entry
