"""Table with the holds of each conversation's turns (B2.20, B2.21).

An agent may continue one turn in several branches, which all use its hold. So a request uses the
turn whose prompt is the longest beginning of its own prompt, and the turn stays in the table. Any
other request uses no hold: it could pull nothing, and would end the hold of another branch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import Enum

from .transfer import Params

__all__ = ["MAX_SERVER_NAME", "MAX_TURNS", "Conversation", "Conversations", "FoundHold", "HeldTurn", "Reuse"]

MAX_SERVER_NAME = 128
"""Maximum number of characters of a conversation's name on kvtier servers."""


class Reuse(Enum):
    """Whether a turn continues from the blocks that D has held."""

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
        name = f"{hashlib.sha256(owner).hexdigest()[:32]}.{self.name}"
        if len(name) <= MAX_SERVER_NAME and name.isascii() and name.isprintable():
            return name
        return hashlib.sha256(owner + b"\0" + self.name.encode("utf-8", "surrogatepass")).hexdigest()


MAX_TURNS = 8
"""Turns of a conversation that the table has: enough for its branches."""


@dataclass(frozen=True)
class FoundHold:
    """A hold, or the reason why it is missing."""

    reuse: Reuse
    hold: Params | None = None


@dataclass(frozen=True)
class HeldTurn:
    """A turn: size and digest of its prompt, hold as JSON, and time until which it can be used."""

    prompt_bytes: int
    digest: str
    hold: bytes
    until: float

    @classmethod
    def of(cls, prompt: bytes, hold: Params, until: float) -> HeldTurn:
        return cls(len(prompt), hashlib.sha256(prompt).hexdigest(), json.dumps(hold).encode(), until)


def _find(turns: Collection[HeldTurn], prompt: bytes, now: float) -> FoundHold:
    """Returns the hold of the turn that the prompt continues. `turns`: the latest last."""
    usable = [turn for turn in turns if now < turn.until]
    if turns and not usable:
        return FoundHold(Reuse.EXPIRED)
    turn = _continued(usable, prompt)
    return FoundHold(Reuse.MISS) if turn is None else FoundHold(Reuse.HIT, json.loads(turn.hold))


def _continued(turns: Iterable[HeldTurn], prompt: bytes) -> HeldTurn | None:
    """Returns the turn whose prompt is the longest beginning of this prompt."""
    hashed, view, at, found = hashlib.sha256(), memoryview(prompt), 0, None
    for turn in sorted(turns, key=lambda turn: turn.prompt_bytes):
        if turn.prompt_bytes > len(prompt):
            break
        hashed.update(view[at : turn.prompt_bytes])
        at = turn.prompt_bytes
        if hashed.hexdigest() == turn.digest:
            found = turn
    return found


class Conversations:
    """Table of the holds that a later turn can use. Times are seconds on a monotonic clock.

    `ttl_s` must be shorter than the lifetime of D's hold. If the table exceeds `max_entries`
    conversations or `max_bytes`, those that were not put for the longest time are removed.
    """

    def __init__(self, ttl_s: float = 450.0, max_entries: int = 100_000, max_bytes: int = 256 << 20) -> None:
        self._ttl_s = ttl_s
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._bytes = 0
        self._entries: dict[Conversation, dict[str, HeldTurn]] = {}
        """Turns by digest, in the order of insertion and of expiry; so are the conversations."""

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, conversation: Conversation, prompt: bytes, hold: Params, now: float) -> int:
        """Records a turn. Returns how many conversations were removed to make room."""
        turns = self._entries.pop(conversation, {})
        self._entries[conversation] = turns
        turn = HeldTurn.of(prompt, hold, now + self._ttl_s)
        self._drop(turns, turn.digest)
        turns[turn.digest] = turn
        self._bytes += len(turn.hold)
        while len(turns) > MAX_TURNS:
            self._drop(turns, next(iter(turns)))
        crowded_out = 0
        while len(self._entries) > self._max_entries or self._bytes > self._max_bytes:
            self._forget(next(iter(self._entries)))
            crowded_out += 1
        return crowded_out

    def find(
        self, conversation: Conversation, prompt: bytes, now: float, others: Collection[HeldTurn] = ()
    ) -> FoundHold:
        """Returns the hold that a request with this prompt can use; removes expired turns.

        `others`: turns of the conversation that other tables have.
        """
        turns = [*others, *self._entries.get(conversation, {}).values()]
        found = _find(sorted(turns, key=lambda turn: turn.until), prompt, now)
        if found.reuse is Reuse.EXPIRED:
            self._forget(conversation)
        return found

    def evict(self, now: float) -> int:
        """Removes the conversations whose turns have all expired; returns their number."""
        stale = [each for each, turns in self._entries.items() if all(turn.until <= now for turn in turns.values())]
        for conversation in stale:
            self._forget(conversation)
        return len(stale)

    def _forget(self, conversation: Conversation) -> None:
        turns = self._entries.pop(conversation, {})
        for digest in list(turns):
            self._drop(turns, digest)

    def _drop(self, turns: dict[str, HeldTurn], digest: str) -> None:
        turn = turns.pop(digest, None)
        if turn is not None:
            self._bytes -= len(turn.hold)
