"""Base class of all simulated clients: random choice of clients, blocks and durations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtier.tiers.core.block import Block
from kvtier.tiers.core.conversations import Conversation
from kvtier.tiers.types import EngineSession

from . import inspect as inside
from .ledger import Client
from .model import CHAINS, HELD_REQUESTS, private_key
from .tier_settings import tenant_of

if TYPE_CHECKING:
    from .world import World

__all__ = ["HOLD_SECONDS", "Actors"]

HOLD_SECONDS = (3, 30, 30, 300)
"""Durations of leases and stores, in seconds."""


class Actors:
    """Base of the simulated clients; every choice comes from the world's seed."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.rng = world.rng

    def retain_for(self) -> float:
        """Returns the seconds of a request's retention; 0 mostly."""
        return self.rng.choice((0, 0, 0, 10, 60, 4000))

    def retain_until(self, session: EngineSession, request_id: str, retain_for: float) -> float:
        """Returns the end of the retention of a call that begins now; 0 for none."""
        request = inside.request(self.world.core, session.engine, request_id)
        seconds = retain_for or (request.retain_for if request is not None else 0)
        return self.world.now + seconds if seconds else 0.0

    def conversation_used(
        self, session: EngineSession, request_id: str, keys: list[bytes], retain_until: float
    ) -> float:
        """Records the keys of a request for its conversation; returns the end of retention."""
        return self.used_by(inside.conversation_of(self.world.core, session, request_id), keys, retain_until)

    def used_by(self, conversation: Conversation | None, keys: list[bytes], retain_until: float) -> float:
        """Does the same for a known conversation."""
        if conversation is None:
            return retain_until
        self.world.ledger.conversations[conversation.name].update(keys)
        return max(retain_until, conversation.retain_until)

    def used(self, session: EngineSession, blocks: list[Block], retain_until: float, not_retained: int) -> None:
        """Records a use of blocks, which may have evicted others."""
        book, now = self.world.settings_model, self.world.environment.latest
        book.takers.add(tenant_of(session.namespace.id))
        book.used(blocks, now, retain_until, not_retained)
        self.world.saw("blocks retained", bool(blocks) and retain_until > now and not not_retained)
        self.world.saw("blocks not retained", bool(not_retained))

    def pick_client(self) -> Client | None:
        """Returns a connected client, or None."""
        clients = self.world.ledger.clients
        return self.rng.choice(clients) if clients else None

    def any_of(self, engine: str) -> EngineSession:
        """Returns a session of an engine, of any of its processes."""
        return self.rng.choice([client for client in self.world.ledger.clients if client.engine == engine]).session

    def session_of_another(self, engine: str) -> EngineSession | None:
        """Returns a session of another engine, or None."""
        others = [client for client in self.world.ledger.clients if client.engine != engine]
        return self.rng.choice(others).session if others else None

    def some_keys(self, session: EngineSession) -> list[bytes]:
        """Returns a run of a chain, as the blocks of a prompt; sometimes with a repetition."""
        return self.some_keys_of(len(session.namespace.part_bytes), session.engine_id)

    def some_keys_of(self, groups: int, engine: str) -> list[bytes]:
        chains = CHAINS[self.rng.choice((0, 0, 1)) % groups]
        start = 0 if self.rng.random() < 0.8 else self.rng.randrange(20)
        keys = chains[self.rng.choice((0, 0, 0, 1, 2))][start : start + self.rng.randint(0, 10)]
        if self.rng.random() < 0.1:
            return [*keys, private_key(engine, self.rng.choice(HELD_REQUESTS))]
        return keys + keys[:1] if self.rng.random() < 0.05 else keys
