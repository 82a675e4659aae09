"""The asyncio client: the same operations, performed without blocking the event loop."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields
from typing import Any, Self, TypeVar

from ..cuda.host.copy import HostBuffer
from ..protos.credentials import Credentials
from ..protos.v1 import admin_pb2
from .device_calls import AsyncDeviceCalls
from .effects import Connect, Operation
from .errors import KVTierError
from .namespace import Namespace
from .operations import Operations
from .results import (
    HandoffDirection,
    HoldName,
    LookupResult,
    Publication,
    ReadBatch,
    RequestOutcome,
    TierFilter,
    WriteBatch,
)
from .session.connection import ClientIdentity, Transport
from .timeouts import Timeouts
from .transport.aio_wire import AsyncTransport

__all__ = ["AsyncClient", "AsyncLease"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class AsyncLease(LookupResult):
    """What a lookup found; an asynchronous context manager that releases it at its end."""

    client: AsyncClient

    async def release(self) -> None:
        """Gives the lease back; never raises: what cannot be released now falls by itself."""
        if self.id:
            with contextlib.suppress(KVTierError):
                await self.client.release(self.id)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.release()


class AsyncClient(AsyncDeviceCalls):
    """A client for one event loop; construct it there. Each method is that of `Client`, awaited.

    The session is kept by a thread, so that a loop which is busy for long does not lose it.
    """

    def __init__(
        self,
        endpoint: str | None = None,
        *,
        namespace: Namespace,
        name: str = "python-asyncio",
        engine_id: str | None = None,
        rank: int | None = None,
        transport: Transport = "auto",
        timeouts: Timeouts | None = None,
        credentials: Credentials | None = None,
    ) -> None:
        """See `Client`."""
        self.namespace = namespace
        self.engine_id = engine_id or uuid.uuid4().hex
        self.timeouts = timeouts or Timeouts()
        identity = ClientIdentity(namespace, name, self.engine_id, rank, transport)
        self._wire = AsyncTransport(endpoint, identity, self.timeouts, credentials)
        self._operations = Operations(namespace, self.timeouts, self._wire.lost)

    @property
    def connected(self) -> bool:
        """Whether there is a session now."""
        return self._wire.link is not None

    @property
    def epoch(self) -> int | None:
        """Which life of which server answers, a random number; None while there is no session."""
        link = self._wire.link
        return link.ref.epoch if link is not None else None

    @property
    def transport(self) -> str | None:
        """How bytes move now: "shm", "tcp" over plain sockets, or "grpc"; None while there is no session."""
        link = self._wire.link
        return link.transport if link is not None else None

    async def wait_until_connected(self, timeout: float | None = None) -> None:
        """See `Client.wait_until_connected`."""
        await self._wire.perform(Connect(self.timeouts.connect if timeout is None else timeout, patient=True))

    async def begin_request(
        self,
        request_id: str,
        keys: Sequence[bytes] = (),
        *,
        prompt_tokens: int = 0,
        priority: int = 0,
        kv_transfer_params: Mapping[str, Any] | None = None,
        wait: float = 0.0,
        prefix: bool = True,
        lease: float | None = None,
        exclude: TierFilter | None = None,
        min_hits: int = 0,
        retain_for: float | None = None,
    ) -> AsyncLease:
        """See `Client.begin_request`."""
        return await self._lease(
            self._operations.begin_request(
                request_id,
                keys,
                prompt_tokens=prompt_tokens,
                priority=priority,
                kv_transfer_params=kv_transfer_params,
                wait=wait,
                prefix=prefix,
                lease=lease,
                exclude=exclude,
                min_hits=min_hits,
                retain_for=retain_for,
            )
        )

    async def lookup(
        self,
        keys: Sequence[bytes],
        *,
        request_id: str = "",
        wait: float = 0.0,
        prefix: bool = True,
        lease: float | None = None,
        exclude: TierFilter | None = None,
        min_hits: int = 0,
        retain_for: float | None = None,
    ) -> AsyncLease:
        """See `Client.lookup`."""
        return await self._lease(
            self._operations.lookup(
                keys,
                request_id=request_id,
                wait=wait,
                prefix=prefix,
                lease=lease,
                exclude=exclude,
                min_hits=min_hits,
                retain_for=retain_for,
            )
        )

    @contextlib.asynccontextmanager
    async def read(self, lease: LookupResult | int, items: Sequence[int]) -> AsyncIterator[ReadBatch]:
        """See `Client.read`."""
        with ExitStack() as held:
            reading = await self._run(self._operations.begin_read(held, lease, items))
            yield reading.batch
            await self._run(self._operations.end_read(reading))

    async def load(
        self, keys: Sequence[bytes], buffers: Sequence[HostBuffer], *, request_id: str = "", wait: float = 0.0
    ) -> int:
        """See `Client.load`."""
        with ExitStack() as held:
            return await self._run(self._operations.load(held, keys, buffers, request_id=request_id, wait=wait))

    @contextlib.asynccontextmanager
    async def write(
        self, keys: Sequence[bytes], *, request_id: str = "", retain_for: float | None = None
    ) -> AsyncIterator[WriteBatch]:
        """See `Client.write`."""
        with ExitStack() as held:
            writing = await self._run(
                self._operations.begin_write(held, keys, request_id=request_id, retain_for=retain_for)
            )
            try:
                yield writing.batch
            except BaseException:
                with contextlib.suppress(KVTierError):
                    await self._run(self._operations.end_write(writing, abort=True))
                raise
            await self._run(self._operations.end_write(writing))

    async def store(
        self,
        keys: Sequence[bytes],
        buffers: Sequence[HostBuffer],
        *,
        request_id: str = "",
        retain_for: float | None = None,
    ) -> bytes:
        """See `Client.store`."""
        with ExitStack() as held:
            return await self._run(
                self._operations.store(held, keys, buffers, request_id=request_id, retain_for=retain_for)
            )

    async def flush(self, keys: Sequence[bytes], *, wait: float = 10.0) -> bytes:
        """See `Client.flush`."""
        return await self._run(self._operations.flush(keys, wait=wait))

    async def touch(self, *lease_ids: int, lease: float | None = None) -> list[int]:
        """See `Client.touch`."""
        return await self._run(self._operations.touch(lease_ids, lease=lease))

    async def release(self, *lease_ids: int) -> None:
        """See `Client.release`."""
        await self._run(self._operations.release(lease_ids))

    async def publish(
        self,
        request_id: str,
        keys: Sequence[bytes],
        positions: Sequence[int],
        *,
        num_tokens: int,
        direction: HandoffDirection = HandoffDirection.PREFILL_TO_DECODE,
        hold_for: float | None = None,
    ) -> Publication:
        """See `Client.publish`."""
        return await self._run(
            self._operations.publish(
                request_id, keys, positions, num_tokens=num_tokens, direction=direction, hold_for=hold_for
            )
        )

    async def claim(
        self,
        hold: HoldName,
        *,
        request_id: str = "",
        first_positions: Sequence[int] = (),
        wait: float = 0.0,
        lease: float | None = None,
    ) -> AsyncLease:
        """See `Client.claim`."""
        return await self._lease(
            self._operations.claim(hold, request_id=request_id, first_positions=first_positions, wait=wait, lease=lease)
        )

    async def renew_holds(self, *holds: HoldName, extension: float | None = None) -> list[HoldName]:
        """See `Client.renew_holds`."""
        return await self._run(self._operations.renew_holds(holds, extension=extension))

    async def release_holds(self, *holds: HoldName) -> None:
        """See `Client.release_holds`."""
        await self._run(self._operations.release_holds(holds))

    async def finish_request(self, request_id: str, *, wait: float = 0.0) -> RequestOutcome:
        """See `Client.finish_request`."""
        return await self._run(self._operations.finish_request(request_id, wait=wait))

    async def reset(self, *, wait: float = 0.0) -> int:
        """See `Client.reset`."""
        return await self._run(self._operations.reset(wait=wait))

    async def status(self) -> admin_pb2.GetStatusResponse:
        """See `Client.status`."""
        return await self._run(self._operations.status())

    async def close(self) -> None:
        """Ends the session; what it has pinned falls. Runs to its end even if cancelled, a second or two at the most."""
        try:
            await self._wire.close()
        finally:
            self._operations.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _lease(self, operation: Operation[LookupResult]) -> AsyncLease:
        found = await self._run(operation)
        return AsyncLease(client=self, **{field.name: getattr(found, field.name) for field in fields(found)})

    async def _run(self, operation: Operation[T]) -> T:
        try:
            effect = next(operation)
            while True:
                try:
                    result = await self._wire.perform(effect)
                except BaseException as error:  # noqa: BLE001 - the operation tidies up, and raises it again
                    effect = operation.throw(error)
                else:
                    effect = operation.send(result)
        except StopIteration as done:
            answer: T = done.value
            return answer
