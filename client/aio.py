"""Client for asyncio: `AsyncClient`. `Client` (sync.py) is generated from this file."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Self, TypeVar, Unpack

from ..cuda.host.copy import HostBuffer
from ..cuda.host.pinning import Pin
from ..protos.credentials import Credentials
from ..protos.v1 import admin_pb2
from .connection_state import ConnectionState
from .device import KvBuffers, Mark
from .effects import Connect, Operation, Transport
from .errors import KVTierError
from .namespace import Namespace
from .operations import Operations
from .operations.arguments import LookupOptions, PrefetchOptions, RequestOptions, StoreOptions
from .operations.digests import Verify, chosen
from .results import (
    HandoffDirection,
    HoldName,
    LeaseSlots,
    LookupResult,
    NotClaimedReason,
    Prefetched,
    Publication,
    ReadBatch,
    RequestOutcome,
    WriteBatch,
)
from .session.reconnect import ClientIdentity, EngineAddress, TransportName
from .timeouts import Timeouts
from .transport.aio_transport import AsyncGrpcTransport, run_operation

__all__ = ["AsyncClient", "AsyncLease"]

T = TypeVar("T")

_fields_of = attrgetter(*(field.name for field in fields(LookupResult)))


@dataclass(frozen=True, slots=True, kw_only=True)
class AsyncLease(LookupResult):
    """Result of a lookup. As an asynchronous context manager, releases the lease on exit."""

    client: AsyncClient

    async def release(self) -> None:
        """Releases the lease. Raises no `KVTierError`: if the release fails, the lease expires."""
        if self.id:
            try:
                await self.client.release(self.id)
            except KVTierError:
                return

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.release()


class AsyncClient(ConnectionState):
    """Client of one kvtier server, local or remote, for asyncio.

    Construct the client on the event loop that uses it. A separate thread keeps the session open,
    even if the event loop is busy.

    The client connects in the background. After a server restart the client opens a new session.
    During the first attempt to connect, calls wait for a session, up to `Timeouts.connect`. After
    that, calls without a session raise at once. All exceptions derive from `KVTierError`.
    """

    def __init__(
        self,
        endpoint: str | None = None,
        *,
        namespace: Namespace,
        name: str = "python-asyncio",
        engine_id: str | None = None,
        rank: int | None = None,
        transport: TransportName = "auto",
        timeouts: Timeouts | None = None,
        pin: Pin | None = None,
        credentials: Credentials | None = None,
        published: EngineAddress | None = None,
        verify: Verify | None = None,
        backend: Transport | None = None,
    ) -> None:
        """Starts to connect. Does not block, and does not raise if the server is down.

        Args:
            endpoint: `unix:PATH` or `HOST:PORT`; default: `KVTIER_ENDPOINT`, or the user's socket.
            namespace: identity of the blocks; clients with equal namespaces share blocks.
            name: client name for logs and `kvtier sessions`.
            engine_id: id of the engine; default: random. Clients with the same id share leases.
            rank: rank whose parts this client transfers; None for a scheduler, or for world size 1.
            transport: "shm" (shared memory), "tcp" (sockets), "grpc", "auto" ("shm" on the server's
                host, otherwise "tcp"), or "cuda_ipc" (like "auto", with `register_kv_buffers`).
            timeouts: deadlines of calls; see `Timeouts`.
            pin: pins the server's region and staging buffers; see `kvtier.cuda.host.pinning`.
            credentials: certificates and token; default: `Credentials.from_environment()`.
            published: address of the engine for the server's publisher of events.
            verify: which parts this client stores with a digest, and compares after loads: "always"
                all, "sampled" those of about one in 32 keys, "off" none. Default: `KVTIER_VERIFY`,
                or "sampled".
            backend: for tests: replaces the connection to a server; see `kvtier.client.testing`.

        Raises:
            InvalidRequest: an argument is invalid, or the endpoint needs other credentials.
        """
        self.namespace = namespace
        self.engine_id = engine_id or uuid.uuid4().hex
        self.timeouts = timeouts or Timeouts()
        verify = chosen(verify)
        identity = ClientIdentity(
            namespace, name, self.engine_id, rank, transport, pin, published, verify_all=verify == "always"
        )
        self._transport = backend or AsyncGrpcTransport(endpoint, identity, self.timeouts, credentials)
        self._operations = Operations(namespace, self.timeouts, self._transport, pin, rank=rank, verify=verify)

    async def wait_until_connected(self, timeout: float | None = None) -> None:
        """Waits `timeout` s (`Timeouts.connect`) for a session, or until a `permanent` refusal."""
        self._check_process()
        await self._transport.perform(Connect(self.timeouts.connect if timeout is None else timeout, patient=True))

    async def begin_request(
        self, request_id: str, keys: Sequence[bytes] = (), **options: Unpack[RequestOptions]
    ) -> AsyncLease:
        """Registers a request, negotiates its offload policy and looks up its keys.

        Call `finish_request` when it ends. `options`: see `RequestOptions`. The result has `policy`
        and `votes`.
        """
        return await self._lease(self._operations.begin_request(request_id, keys, options))

    async def lookup(self, keys: Sequence[bytes], **options: Unpack[LookupOptions]) -> AsyncLease:
        """Looks up keys, made by `make_key`, in token order, and pins the hits with a lease.

        `options`: see `LookupOptions`.
        """
        return await self._lease(self._operations.lookup(keys, options))

    async def prefetch(self, keys: Sequence[bytes], **options: Unpack[PrefetchOptions]) -> Prefetched:
        """Starts to promote the leading blocks into the CPU tier, and takes no lease.

        Without `retain_for`, the server may evict the blocks again before a lookup. `wait`: seconds
        to wait for answers of shared tiers and of `source`. `options`: see `LookupOptions`.
        """
        return await self._run(self._operations.prefetch(keys, options))

    @contextlib.asynccontextmanager
    async def read(
        self, lease: LookupResult | int, items: Sequence[int], *, slots: LeaseSlots | None = None
    ) -> AsyncIterator[ReadBatch]:
        """Gives access to the bytes of looked-up blocks; `items` are indices in the lookup's keys.

        On exit the server confirms that the lease was valid all the time, and digests are compared.
        If the exit raises, discard all bytes that were read. Another client of the engine may own
        the lease. If `lease` is an id, `slots` can be those of its lookup.
        """
        with self._operations.held() as held:
            reading = await self._run(self._operations.begin_read(held, lease, items, slots=slots))
            yield reading.batch
            await self._run(self._operations.end_read(reading))

    async def load(
        self, keys: Sequence[bytes], buffers: Sequence[HostBuffer], *, request_id: str = "", wait: float = 0.0
    ) -> int:
        """Looks up `keys` and copies the leading hits into the first buffers; returns their number.

        The other buffers are unchanged, except behind a block that does not match its digest: the
        load ends before this block. If `load` raises, the content of all buffers is undefined.
        """
        return await self._run(self._operations.load(keys, buffers, request_id=request_id, wait=wait))

    async def report_wrong(self, keys: Sequence[bytes]) -> None:
        """Reports stored blocks that are not the KV that this engine computes for their keys.

        The server removes them from its tiers, and logs who stored them. Keys that it does not have
        are ignored. Raises `AccessDenied` if the client must not store blocks, and `InvalidRequest`
        for more than 256 keys.
        """
        await self._run(self._operations.report_wrong(keys))

    @contextlib.asynccontextmanager
    async def write(self, keys: Sequence[bytes], **options: Unpack[StoreOptions]) -> AsyncIterator[WriteBatch]:
        """Gives memory to write blocks to. The exit of the `with` statement stores the blocks.

        If the body or the exit raises, nothing is stored. Write only the blocks of `batch.wanted`;
        `batch.statuses` gives the reason for the other blocks. `options`: see `StoreOptions`.
        """
        with self._operations.held() as held:
            writing = await self._run(self._operations.begin_write(held, keys, options))
            try:
                yield writing.batch
            except BaseException as error:
                with contextlib.suppress(KVTierError):  # in a forked child
                    await self._run(self._operations.abort_write(writing, error))
                raise
            await self._run(self._operations.end_write(writing))

    async def store(
        self, keys: Sequence[bytes], buffers: Sequence[HostBuffer], **options: Unpack[StoreOptions]
    ) -> bytes:
        """Stores each buffer, unless its key is stored already. Returns a `StoreStatus` per key.

        `options`: see `StoreOptions`.
        """
        return await self._run(self._operations.store(keys, buffers, options))

    async def register_kv_buffers(self, buffers: KvBuffers) -> None:
        """Registers device memory with the server now, and again in each new session.

        This call may take seconds, because the server starts a process for the device. Raises
        DeviceUnavailable with the cause if the server cannot copy to the device. Calls that do not
        use the device then still work.
        """
        await self._run(self._operations.register_kv_buffers(buffers))

    async def store_from_device(
        self,
        keys: Sequence[bytes],
        blocks: Sequence[int],
        *,
        after: Mark | None = None,
        **options: Unpack[StoreOptions],
    ) -> bytes:
        """Stores device block `blocks[i]` under `keys[i]`, from the tensors of the key's group.

        A block may occur once per group. `after` marks the compute that writes the blocks; None if
        it has ended. `options`: see `StoreOptions`. Returns one `StoreStatus` per key. When the
        call ends, the server no longer reads the blocks, unless the connection was lost.
        """
        return await self._run(self._operations.store_from_device(keys, blocks, options, after=after))

    async def load_to_device(
        self,
        keys: Sequence[bytes],
        blocks: Sequence[int],
        *,
        after: Mark | None = None,
        request_id: str = "",
        wait: float = 0.0,
    ) -> int:
        """Copies the leading hits of `keys` into device blocks and returns the number of hits.

        The other blocks are unchanged. `after` marks the last compute that uses the old content.
        When the call ends, the server has stopped writing. If it raises, the blocks are undefined.
        """
        return await self._run(
            self._operations.load_to_device(keys, blocks, request_id=request_id, wait=wait, after=after)
        )

    async def read_to_device(
        self, lease: LookupResult | int, items: Sequence[int], blocks: Sequence[int], *, after: Mark | None = None
    ) -> None:
        """Copies items of a lease into device blocks. See `read` and `load_to_device`."""
        await self._run(self._operations.read_to_device(lease, items, blocks, after=after))

    async def flush(self, keys: Sequence[bytes], *, wait: float = 10.0) -> bytes:
        """Waits until blocks are durable, up to `wait` s. Returns a `DurableStatus` per key."""
        return await self._run(self._operations.flush(keys, wait=wait))

    async def touch(self, *lease_ids: int, lease: float | None = None) -> list[int]:
        """Extends leases to `lease` seconds from now. Returns the ids of unknown leases."""
        return await self._run(self._operations.touch(lease_ids, lease=lease))

    async def release(self, *lease_ids: int) -> None:
        """Releases leases; unknown ids are ignored."""
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
        """Makes the server hold a request's blocks for another engine, even after this client ends.

        Args:
            request_id: this engine's id of the request; `engine_id` and this id name the hold.
            keys: keys of the blocks of all groups, also of blocks that are not stored yet; see
                `make_hold_key` for a partial block.
            positions: position of each block within its group, in token order.
            num_tokens: number of the request's tokens for which there are blocks.
            direction: direction of the hand-off.
            hold_for: duration in seconds, up to the server's limit; None: the server's default.
        """
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
        min_blocks: int = 0,
        lease: float | None = None,
    ) -> AsyncLease:
        """Leases the blocks of a hold and does not end the hold. `LookupResult.hold` describes it.

        Args:
            hold: name of the hold.
            request_id: this engine's request; `finish_request` releases the lease.
            first_positions: for each group, the first position to lease; empty: all positions.
            wait: seconds to wait for the publication, and for blocks that are not stored yet.
            min_blocks: number of blocks to wait for; 0: all. `settled_blocks` + 1 waits for more.
            lease: duration of the lease in seconds; None: the server's default.

        Raises:
            HoldGone: the hold was not published in time, was released, or expires within 5 s.
        """
        claim = self._operations.claim(hold, request_id, first_positions, wait=wait, min_blocks=min_blocks, lease=lease)
        return await self._lease(claim)

    async def renew_holds(self, *holds: HoldName, extension: float | None = None) -> list[HoldName]:
        """Extends holds to `extension` seconds from now; returns the holds that no longer exist.

        If `extension` is None, it is two thirds of each hold's duration. A hold is never shortened.
        """
        return await self._run(self._operations.renew_holds(holds, extension=extension))

    async def release_holds(self, *holds: HoldName) -> None:
        """Ends holds; unknown holds are ignored."""
        await self._run(self._operations.release_holds(holds))

    async def report_not_claimed(self, hold: HoldName, *, request_id: str, reason: NotClaimedReason) -> None:
        """Reports why a request is computed and not claimed. Any server may have the hold."""
        await self._run(self._operations.report_not_claimed(hold, request_id=request_id, reason=reason))

    async def finish_request(self, request_id: str, *, wait: float = 0.0) -> RequestOutcome:
        """Ends a request: releases its leases and waits up to `wait` seconds for its stores."""
        return await self._run(self._operations.finish_request(request_id, wait=wait))

    async def reset(self, *, wait: float = 0.0, retire: bool = False) -> int:
        """Removes the namespace from the CPU tier, for all engines.

        Blocks in use are removed when their use ends; until then all lookups of the namespace miss.
        Waits up to `wait` seconds. Returns the number of blocks in use; call again until it is 0.
        With `retire` (before a change of namespace), secondary tiers evict these blocks first.
        """
        return await self._run(self._operations.reset(wait=wait, retire=retire))

    async def status(self) -> admin_pb2.GetStatusResponse:
        """Returns the server's status: tiers, sessions, leases and stores."""
        return await self._run(self._operations.status())

    async def close(self) -> None:
        """Ends the session and its leases. Takes up to two seconds, even if cancelled."""
        try:
            await self._transport.close()
        finally:
            self._operations.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _lease(self, operation: Operation[LookupResult]) -> AsyncLease:
        found = await self._run(operation)
        return AsyncLease(*_fields_of(found), client=self)

    async def _run(self, operation: Operation[T]) -> T:
        if self._is_forked:
            self._check_process()
        return await run_operation(self._transport, operation)
