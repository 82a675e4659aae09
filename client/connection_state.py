"""State of a client's connection, for `AsyncClient` and `Client`."""

from __future__ import annotations

from ..cuda.host.copy import helper_refusal
from .effects import Transport
from .operations import Operations
from .session.fork_guard import ForkGuarded

__all__ = ["ConnectionState"]


class ConnectionState(ForkGuarded):
    """Base class of both clients."""

    _transport: Transport
    _operations: Operations

    @property
    def connected(self) -> bool:
        """Whether there is a session now."""
        return self._transport.session is not None

    @property
    def max_keys(self) -> int | None:
        """Maximum number of keys per call; None while there is no session."""
        return session.limits.max_keys if (session := self._transport.session) else None

    @property
    def epoch(self) -> int | None:
        """Random id of the current server process; None while there is no session."""
        return session.ref.epoch if (session := self._transport.session) else None

    @property
    def downgrades(self) -> tuple[str, ...]:
        """Causes for which the current session is slower than it could be; empty without any."""
        session = self._transport.session
        found = session.downgrades.copy() if session is not None else {}
        own = filter(None, [self._operations.staging_refusal, helper_refusal()])
        return (*(f"{what}: {why}".removeprefix("kvtier: ") for what, why in found.items()), *own)

    @property
    def transport(self) -> str | None:
        """Current transport of bytes: "shm", "tcp" or "grpc"; None while there is no session."""
        return session.transport if (session := self._transport.session) else None
