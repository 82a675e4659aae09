"""What all kinds of clients have in common: they pick somebody, and something, at random."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtier.tiers.core.block import Block
from kvtier.tiers.types import EngineSession

from .ledger import Client
from .model import CHAINS, HELD_REQUESTS, private_key
from .tier_settings import tenant_of

if TYPE_CHECKING:
    from .world import World

__all__ = ["HOLD_SECONDS", "Actors"]

HOLD_SECONDS = (3, 30, 30, 300)
"""For how long leases and stores are held."""


class Actors:
    """Somebody who does things in a world; every choice comes from its seed."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.rng = world.rng

    def retain_until(self) -> float:
        """Returns until when a request wants to keep what it uses; mostly it does not."""
        wanted = self.rng.choice((0, 0, 0, 10, 60, 4000))
        return self.world.now + wanted if wanted else 0.0

    def used(self, session: EngineSession, blocks: list[Block], retain_until: float, not_retained: int) -> None:
        """Takes note of the use of blocks, for the sake of which others may have gone."""
        book, now = self.world.keeping, self.world.environment.latest
        book.takers.add(tenant_of(session.namespace.id))
        book.used(blocks, now, retain_until, not_retained)
        self.world.saw("blocks retained", bool(blocks) and retain_until > now and not not_retained)
        self.world.saw("blocks not retained", bool(not_retained))

    def pick_client(self) -> Client | None:
        """Returns somebody, if there is anybody."""
        clients = self.world.ledger.clients
        return self.rng.choice(clients) if clients else None

    def any_of(self, engine: str) -> EngineSession:
        """Returns a session of an engine: any of its processes may speak for it."""
        return self.rng.choice([client for client in self.world.ledger.clients if client.engine == engine]).session

    def stranger_to(self, engine: str) -> EngineSession | None:
        """Returns a session of another engine, if there is any."""
        others = [client for client in self.world.ledger.clients if client.engine != engine]
        return self.rng.choice(others).session if others else None

    def some_keys(self, session: EngineSession) -> list[bytes]:
        """Returns a run of a chain, as a prompt's blocks are; sometimes with a repetition."""
        chains = CHAINS[self.rng.choice((0, 0, 1)) % len(session.namespace.part_bytes)]
        start = 0 if self.rng.random() < 0.8 else self.rng.randrange(20)
        keys = chains[self.rng.choice((0, 0, 0, 1, 2))][start : start + self.rng.randint(0, 10)]
        if self.rng.random() < 0.1:
            return [*keys, private_key(session.engine_id, self.rng.choice(HELD_REQUESTS))]
        return keys + keys[:1] if self.rng.random() < 0.05 else keys
