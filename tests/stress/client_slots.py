"""Sync and asyncio clients of one process with one interface, so that actions are written once."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from kvtier.client import AsyncClient, Client, Timeouts
from kvtier.client.session.session import ClientSession
from stress.shape import Dataset

__all__ = ["TIMEOUTS", "Blocking", "ClientSlot", "ClientSlots"]

TIMEOUTS = Timeouts(connect=1.0, call=2.0, transfer=10.0)


class Blocking:
    """The sync client with the asyncio client's interface. It blocks the calling thread."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Callable[..., Coroutine[Any, Any, Any]]:
        method = getattr(self._client, name)

        async def call(*arguments: Any, **more: Any) -> Any:
            return method(*arguments, **more)

        return call

    @contextlib.asynccontextmanager
    async def read(self, lease: Any, items: Sequence[int]) -> AsyncIterator[Any]:
        with self._client.read(lease, items) as batch:
            yield batch

    @contextlib.asynccontextmanager
    async def write(self, keys: Sequence[bytes], *, request_id: str = "") -> AsyncIterator[Any]:
        with self._client.write(keys, request_id=request_id) as batch:
            yield batch


@dataclass
class ClientSlot:
    """A client in one namespace."""

    dataset: Dataset
    rank: int
    api: Any
    client: Client | AsyncClient

    @property
    def session(self) -> ClientSession | None:
        return self.client._transport.session


class ClientSlots:
    def __init__(self, endpoint: str, *, style: str, transport: str, name: str, engine: str | None, rank: int) -> None:
        self._endpoint = endpoint
        self._style = style
        self._more = {"transport": transport, "name": name, "engine_id": engine, "timeouts": TIMEOUTS}
        self._rank = rank
        self._slots: dict[str, ClientSlot] = {}
        self._replacing = threading.Lock()

    def open(self, dataset: Dataset) -> None:
        """Opens a client; an asyncio client uses the running loop."""
        rank = self._rank if dataset.world_size > 1 else None
        make = Client if self._style == "sync" else AsyncClient
        client = make(self._endpoint, namespace=dataset.namespace, rank=rank, **self._more)
        api = Blocking(client) if isinstance(client, Client) else client
        self._slots[dataset.name] = ClientSlot(dataset, self._rank, api, client)

    def of(self, dataset: Dataset) -> ClientSlot:
        return self._slots[dataset.name]

    async def reopen(self, dataset: Dataset) -> None:
        """Replaces a client and closes the old one while others use it."""
        with self._replacing:
            old = self._slots[dataset.name]
            self.open(dataset)
        await old.api.close()

    async def close(self) -> None:
        for slot in self._slots.values():
            await slot.api.close()
