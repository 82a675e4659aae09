"""The synchronous client."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields
from types import TracebackType
from typing import Any, Self, TypeVar

from ..cuda.host.copy import HostBuffer
from ..cuda.host.pinning import Pin
from ..protos.credentials import Credentials
from ..protos.v1 import admin_pb2
from .device_calls import DeviceCalls
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
from .transport.sync_wire import GrpcTransport, SyncTransport

__all__ = ["Client", "Lease"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease(LookupResult):
    """What a lookup found; a context manager that releases it at its end."""

    client: Client

    def release(self) -> None:
        """Gives the lease back; never raises: what cannot be released now falls by itself."""
        if self.id:
            with contextlib.suppress(KVTierError):
                self.client.release(self.id)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class Client(DeviceCalls):
    """A client of the kvtier server on this host, or of one elsewhere. Safe to use from any thread.

    It connects in the background and reconnects by itself, with a new session, when the server was restarted. While
    there is no session, calls raise `Unavailable` at once. Every call raises a `KVTierError` or nothing.
    """

    def __init__(
        self,
        endpoint: str | None = None,
        *,
        namespace: Namespace,
        name: str = "python",
        engine_id: str | None = None,
        rank: int | None = None,
        transport: Transport = "auto",
        timeouts: Timeouts | None = None,
        pin: Pin | None = None,
        credentials: Credentials | None = None,
        wire: SyncTransport | None = None,
    ) -> None:
        """Does not block, and does not raise for a server that is not there.

        Args:
            endpoint: `unix:PATH` or `HOST:PORT`; by default `KVTIER_ENDPOINT`, else this user's socket.
            namespace: what this client's blocks share with others.
            name: name of the client for people.
            engine_id: the engine that this process is part of; clients of one engine share leases. Random by default.
            rank: the rank whose parts are read and written; None for a scheduler, or a world of one.
            transport: "shm"; "tcp" for plain sockets, or "grpc" for streams of gRPC; "auto" for shm where server and client
                share a host, else "tcp"; "cuda_ipc" is like "auto", for a
                client that registers its device (`register_kv_buffers`).
            timeouts: deadlines.
            pin: makes the object that pins the server's region and the staging buffers; see `kvtier.cuda.host.pinning`.
            credentials: what it shows the server, and how it knows the server: certificates, a token. By default what `KVTIER_CA`,
                `KVTIER_CERT`, `KVTIER_KEY`, `KVTIER_TOKEN` and `KVTIER_TOKEN_FILE` say.
            wire: for tests, what stands in for a server; see `kvtier.client.testing.fake_server`.

        Raises:
            InvalidRequest: the endpoint cannot be parsed, or the credentials cannot be used with it.
        """
        self.namespace = namespace
        self.engine_id = engine_id or uuid.uuid4().hex
        self.timeouts = timeouts or Timeouts()
        identity = ClientIdentity(namespace, name, self.engine_id, rank, transport, pin)
        self._wire = wire or GrpcTransport(endpoint, identity, self.timeouts, credentials)
        self._operations = Operations(namespace, self.timeouts, self._wire.lost, pin)

    @property
    def connected(self) -> bool:
        """Whether there is a session now."""
        return self._wire.link is not None

    @property
    def max_keys(self) -> int | None:
        """Most keys that one call may name; None while there is no session."""
        link = self._wire.link
        return link.limits.max_keys if link is not None else None

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

    def wait_until_connected(self, timeout: float | None = None) -> None:
        """Waits for a session, however many attempts it takes. Raises a `KVTierError` when the time is over."""
        self._wire.perform(Connect(self.timeouts.connect if timeout is None else timeout, patient=True))

    def begin_request(
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
    ) -> Lease:
        """Announces a request, negotiates how it is offloaded, and looks up its keys. Pair it with `finish_request`.

        Arguments as for `lookup`; the answer has `policy` and `votes` besides. `retain_for` holds for each block that the
        request uses or stores, from then on.
        """
        return self._lease(
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

    def lookup(
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
    ) -> Lease:
        """Looks up keys and pins what was found.

        Args:
            keys: see `make_key`; first tokens first.
            request_id: whose lease it is; `finish_request` releases it.
            wait: seconds to wait for blocks that are being written, or brought up from a lower tier.
            prefix: whether everything after the first miss is a miss.
            lease: seconds for which the lease holds; the server's default if None.
            exclude: tiers to leave out.
            min_hits: with `prefix`, how many leading hits are worth having; fewer are misses.
            retain_for: seconds for which the hits are not evicted, as far as the server lets that be; None means what
                the request said when it was begun.
        """
        return self._lease(
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

    @contextlib.contextmanager
    def read(self, lease: LookupResult | int, items: Sequence[int]) -> Iterator[ReadBatch]:
        """Gives access to the bytes of looked-up blocks, by their positions in the lookup.

        Leaving the block confirms that the lease held all the while. If that raises, what was copied out is garbage.
        The lease may be one that another client of the same engine was granted.
        """
        with ExitStack() as held:
            reading = self._run(self._operations.begin_read(held, lease, items))
            yield reading.batch
            self._run(self._operations.end_read(reading))

    def load(
        self, keys: Sequence[bytes], buffers: Sequence[HostBuffer], *, request_id: str = "", wait: float = 0.0
    ) -> int:
        """Fills the first buffers with the leading hits and returns how many; the other buffers are left alone.

        If it raises, the buffers may hold anything.
        """
        with ExitStack() as held:
            return self._run(self._operations.load(held, keys, buffers, request_id=request_id, wait=wait))

    @contextlib.contextmanager
    def write(
        self, keys: Sequence[bytes], *, request_id: str = "", retain_for: float | None = None
    ) -> Iterator[WriteBatch]:
        """Gives memory to write blocks to. Leaving the block stores them, an exception inside of it aborts.

        Only `batch.wanted` needs to be written: the others are there already, are being written, or found no room.
        `retain_for` as for `lookup`.
        """
        with ExitStack() as held:
            writing = self._run(self._operations.begin_write(held, keys, request_id=request_id, retain_for=retain_for))
            try:
                yield writing.batch
            except BaseException:
                with contextlib.suppress(KVTierError):
                    self._run(self._operations.end_write(writing, abort=True))
                raise
            self._run(self._operations.end_write(writing))

    def store(
        self,
        keys: Sequence[bytes],
        buffers: Sequence[HostBuffer],
        *,
        request_id: str = "",
        retain_for: float | None = None,
    ) -> bytes:
        """Stores one buffer per key; returns a `StoreStatus` per key. What is there already is not written again.

        `retain_for` as for `lookup`.
        """
        with ExitStack() as held:
            return self._run(self._operations.store(held, keys, buffers, request_id=request_id, retain_for=retain_for))

    def flush(self, keys: Sequence[bytes], *, wait: float = 10.0) -> bytes:
        """Waits until blocks are in a tier that survives restarts; returns a `DurableStatus` per key."""
        return self._run(self._operations.flush(keys, wait=wait))

    def touch(self, *lease_ids: int, lease: float | None = None) -> list[int]:
        """Extends leases; returns those that are gone."""
        return self._run(self._operations.touch(lease_ids, lease=lease))

    def release(self, *lease_ids: int) -> None:
        """Gives leases back; unknown ones are ignored."""
        self._run(self._operations.release(lease_ids))

    def publish(
        self,
        request_id: str,
        keys: Sequence[bytes],
        positions: Sequence[int],
        *,
        num_tokens: int,
        direction: HandoffDirection = HandoffDirection.PREFILL_TO_DECODE,
        hold_for: float | None = None,
    ) -> Publication:
        """Has a request of this engine held for another one: its blocks stay until the time is over, whatever becomes of us.

        Args:
            request_id: this engine's id of the request; with its `engine_id` it names the hold.
            keys: of the blocks, of all groups, those that are still on their way included. See `make_hold_key` for the last one.
            positions: of each block within its group, first tokens first.
            num_tokens: tokens of the request that the blocks back.
            direction: which way the request goes.
            hold_for: seconds; the server's default if None. The server has an upper bound.
        """
        return self._run(
            self._operations.publish(
                request_id, keys, positions, num_tokens=num_tokens, direction=direction, hold_for=hold_for
            )
        )

    def claim(
        self,
        hold: HoldName,
        *,
        request_id: str = "",
        first_positions: Sequence[int] = (),
        wait: float = 0.0,
        lease: float | None = None,
    ) -> Lease:
        """Leases what an engine of this namespace has published; `hold` of the answer says what that is. The hold goes on.

        Args:
            hold: names it.
            request_id: our own request that it is for; `finish_request` releases the lease.
            first_positions: per group, from where on blocks are wanted; all of them if empty.
            wait: seconds to wait for the publication, and for blocks on their way.
            lease: seconds for which the lease holds; the server's default if None.

        Raises:
            HoldGone: it was not published in time, or released, or its time is over, or will be within five seconds.
        """
        return self._lease(
            self._operations.claim(hold, request_id=request_id, first_positions=first_positions, wait=wait, lease=lease)
        )

    def renew_holds(self, *holds: HoldName, extension: float | None = None) -> list[HoldName]:
        """Extends holds, to `extension` seconds from now or by two thirds of what each was published for.

        Returns:
            Those that are gone.
        """
        return self._run(self._operations.renew_holds(holds, extension=extension))

    def release_holds(self, *holds: HoldName) -> None:
        """Ends holds; unknown ones are ignored."""
        self._run(self._operations.release_holds(holds))

    def finish_request(self, request_id: str, *, wait: float = 0.0) -> RequestOutcome:
        """Ends a request: its leases are released, and its tiers told once it has settled.

        Args:
            request_id: as announced with `begin_request`; one that was not is fine.
            wait: seconds to wait until nothing more is going to be stored for it.
        """
        return self._run(self._operations.finish_request(request_id, wait=wait))

    def reset(self, *, wait: float = 0.0) -> int:
        """Empties the CPU tier of this client's namespace, for all its engines; the tiers below keep what they have.

        What is being written, read or moved goes when that has ended; until then all lookups of the namespace miss.

        Args:
            wait: seconds to wait until all of it has gone.

        Returns:
            How many blocks are waited for; 0 means that it is done. Call it again until then.
        """
        return self._run(self._operations.reset(wait=wait))

    def status(self) -> admin_pb2.GetStatusResponse:
        """Asks the server for its tiers and sessions."""
        return self._run(self._operations.status())

    def close(self) -> None:
        """Ends the session; what it has pinned falls."""
        try:
            self._wire.close()
        finally:
            self._operations.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _lease(self, operation: Operation[LookupResult]) -> Lease:
        found = self._run(operation)
        return Lease(client=self, **{field.name: getattr(found, field.name) for field in fields(found)})

    def _run(self, operation: Operation[T]) -> T:
        try:
            effect = next(operation)
            while True:
                try:
                    result = self._wire.perform(effect)
                except BaseException as error:  # noqa: BLE001 - the operation tidies up, and raises it again
                    effect = operation.throw(error)
                else:
                    effect = operation.send(result)
        except StopIteration as done:
            answer: T = done.value
            return answer
