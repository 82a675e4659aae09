"""The clients of one process, sync or asyncio, behind one face: acts are written once and await them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from kvtier.client import AsyncClient, Client, Timeouts
from kvtier.client.session.session import ClientSession
from stress.shape import Field

__all__ = ["TIMEOUTS", "Blocking", "ClientSlots", "Seat"]

TIMEOUTS = Timeouts(connect=1.0, call=2.0, transfer=10.0)


class Blocking:
    """The sync client with the asyncio client's face. It blocks the thread, which is the caller's own."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Callable[..., Coroutine[Any, Any, Any]]:
        method = getattr(self._client, name)

        async def call(*arguments: Any, **more: Any) -> Any:
            return method(*arguments, **more)

        return call

    @contextlib.asynccontextmanager
    async def read(self, lease: Any, items: Sequence[int]) -> AsyncIterator[Any]:
        """See `Client.read`."""
        with self._client.read(lease, items) as batch:
            yield batch

    @contextlib.asynccontextmanager
    async def write(self, keys: Sequence[bytes], *, request_id: str = "") -> AsyncIterator[Any]:
        """See `Client.write`."""
        with self._client.write(keys, request_id=request_id) as batch:
            yield batch


@dataclass
class Seat:
    """A client in one namespace."""

    field: Field
    rank: int
    api: Any
    client: Client | AsyncClient

    @property
    def session(self) -> ClientSession | None:
        """The session, if there is one now."""
        return self.client._transport.session


class ClientSlots:
    """Opens clients, and replaces them."""

    def __init__(self, endpoint: str, *, style: str, transport: str, name: str, engine: str | None, rank: int) -> None:
        self._endpoint = endpoint
        self._style = style
        self._more = {"transport": transport, "name": name, "engine_id": engine, "timeouts": TIMEOUTS}
        self._rank = rank
        self._slots: dict[str, Seat] = {}
        self._replacing = threading.Lock()

    def open(self, field: Field) -> None:
        """Opens a client; an asyncio one on the running loop."""
        rank = self._rank if field.world_size > 1 else None
        make = Client if self._style == "sync" else AsyncClient
        client = make(self._endpoint, namespace=field.namespace, rank=rank, **self._more)
        api = Blocking(client) if isinstance(client, Client) else client
        self._slots[field.name] = Seat(field, self._rank, api, client)

    def of(self, field: Field) -> Seat:
        """Returns the client that there is now."""
        return self._slots[field.name]

    async def reopen(self, field: Field) -> None:
        """Replaces a client, and ends the old one under whoever is using it."""
        with self._replacing:
            old = self._slots[field.name]
            self.open(field)
        await old.api.close()

    async def close(self) -> None:
        """Ends all of them."""
        for seat in self._slots.values():
            await seat.api.close()
