"""Table with the hold of each conversation's latest turn. A hold is used once (B2.20, B2.21)."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from enum import Enum

from .transfer import Params

__all__ = ["MAX_SERVER_NAME", "Conversation", "Conversations", "Reuse", "TakeResult"]

MAX_SERVER_NAME = 128
"""Maximum number of characters of a conversation's name on kvtier servers."""


class Reuse(Enum):
    """Whether a turn continues from the blocks that D holds."""

    HIT = "hit"
    MISS = "miss"
    EXPIRED = "expired"
    UNNAMED = "no_conversation_id"
    ALONE = "not_one_prompt"
    """D serves the turn without P, because it is not one prompt with one completion."""


@dataclass(frozen=True)
class Conversation:
    """Key of a conversation. `owner`: hash of the credential. `name`: given by the client."""

    owner: str
    model: str
    name: str

    @classmethod
    def of(cls, authorization: str, model: str, name: str) -> Conversation:
        """Returns the key of a conversation of the client with this header Authorization."""
        return cls(hashlib.sha256(authorization.encode()).hexdigest(), model, name)

    @property
    def server_name(self) -> str:
        """Name on kvtier servers: different for each owner and model, at most 128 characters."""
        owner = f"{self.owner}\0{self.model}".encode("utf-8", "surrogatepass")
        name = f"{hashlib.sha256(owner).hexdigest()[:16]}.{self.name}"
        if len(name) <= MAX_SERVER_NAME and name.isascii() and name.isprintable():
            return name
        return hashlib.sha256(owner + b"\0" + self.name.encode("utf-8", "surrogatepass")).hexdigest()


@dataclass(frozen=True)
class TakeResult:
    """An entry, or the reason why it is missing."""

    reuse: Reuse
    hold: Params | None = None


@dataclass(frozen=True)
class _Entry:
    hold: bytes  # JSON, because a long conversation has thousands of block ids
    until: float


class Conversations:
    """Table of the holds that a later turn can use. Times are seconds on a monotonic clock.

    `ttl_s` must be shorter than the lifetime of D's hold. If the table exceeds `max_entries` or
    `max_bytes`, the oldest entries are removed.
    """

    def __init__(self, ttl_s: float = 450.0, max_entries: int = 100_000, max_bytes: int = 256 << 20) -> None:
        self._ttl_s = ttl_s
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._bytes = 0
        self._entries: dict[Conversation, _Entry] = {}  # in the order of insertion and of expiry

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, conversation: Conversation, hold: Params, now: float) -> int:
        """Records the latest turn. Returns how many entries were removed to make room."""
        self._forget(conversation)
        entry = _Entry(json.dumps(hold).encode(), now + self._ttl_s)
        self._entries[conversation] = entry
        self._bytes += len(entry.hold)
        crowded_out = 0
        while len(self._entries) > self._max_entries or self._bytes > self._max_bytes:
            self._forget(next(iter(self._entries)))
            crowded_out += 1
        return crowded_out

    def take(self, conversation: Conversation, now: float) -> TakeResult:
        """Removes and returns the hold."""
        entry = self._forget(conversation)
        if entry is None:
            return TakeResult(Reuse.MISS)
        return TakeResult(Reuse.HIT, json.loads(entry.hold)) if now < entry.until else TakeResult(Reuse.EXPIRED)

    def evict(self, now: float) -> int:
        """Removes expired entries and returns their number."""
        stale = [conversation for conversation, entry in self._entries.items() if entry.until <= now]
        for conversation in stale:
            self._forget(conversation)
        return len(stale)

    def _forget(self, conversation: Conversation) -> _Entry | None:
        entry = self._entries.pop(conversation, None)
        if entry is not None:
            self._bytes -= len(entry.hold)
        return entry
