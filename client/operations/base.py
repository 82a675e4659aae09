"""Base class of operations, and functions that make requests from the caller's arguments."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from itertools import accumulate, count
from operator import itemgetter
from types import TracebackType
from typing import Any, Self

from google.protobuf.message import Message

from ...cuda.host.copy import HostBuffer, addresses_of
from ...cuda.host.pinning import Pin
from ...protos.v1 import cache_pb2
from ..effects import Call, Connect, Operation, Transport
from ..errors import InvalidRequest, KVTierError, ServerError, SessionLost, Unavailable
from ..namespace import Namespace
from ..session.session import ClientSession
from ..staging import StagingPool
from ..timeouts import Timeouts
from .arguments import StoreOptions, duration, encoded, message, packed
from .digests import PartDigests, Verify

__all__ = [
    "Base",
    "Held",
    "SessionOperations",
    "consecutive",
]


_group_of: Callable[[bytes], bytes] = itemgetter(slice(-4, None))


class Held:
    """What an operation has until its end: a grant, a use of the region, and a staging buffer.

    A grant is a lease or store that a call may have got. The client chooses its id, per session. If
    the caller is interrupted, the exit ends the grant in the background. An interruption can come
    after any bytecode, also between the answer and the next `try`.
    """

    __slots__ = ("__weakref__", "_itself", "_lent", "_used", "_withdraw", "grant_id", "session")

    def __init__(self, withdraw: Callable[[ClientSession, int], object], grant_id: int) -> None:
        self._withdraw = withdraw
        self.grant_id = grant_id
        self.session: ClientSession | None = None
        """Session of the call that may get the grant; None before the call."""
        self._itself: weakref.ref[object] = weakref.ref(self)
        self._used: ClientSession | None = None
        self._lent: AbstractContextManager[memoryview] | None = None

    def use(self, session: ClientSession) -> None:
        """Keeps the region mapped and the slots reserved. Raises `SessionLost`."""
        self._used = session
        session.begin_use(self._itself)

    def borrow(self, lent: AbstractContextManager[memoryview]) -> memoryview:
        """Keeps a staging buffer."""
        self._lent = lent
        return lent.__enter__()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is not None and not issubclass(kind, (Exception, GeneratorExit)) and self.session is not None:
                self._withdraw(self.session, self.grant_id)
            if self._lent is not None:
                self._lent.__exit__(kind, error, trace)
        finally:
            if self._used is not None:
                self._used.end_use(self._itself)


class SessionOperations:
    """Calls on the current session of a transport."""

    def __init__(self, timeouts: Timeouts, transport: Transport) -> None:
        self._timeouts = timeouts
        self._connect = Connect(timeouts.connect)
        self._invalidate = transport.invalidate
        self._withdraw = transport.withdraw
        self._digests = PartDigests("off", None)
        self._new_grant = count(1).__next__
        """Returns an id for the lease or store of a call, unique within the session."""

    def held(self) -> Held:
        """Returns a context manager with the id of a new grant."""
        return Held(self._withdraw, self._new_grant())

    def _request(self, make: type[Message], method: str, *, wait: float | None = None, **fields: Any) -> Operation[Any]:
        """Performs a call on the current session. `wait` and `fields` are fields of the request."""
        session: ClientSession = yield self._connect
        if wait is not None:
            fields["wait"] = duration("wait", wait)
        request = message(make, session=session.ref, **fields)
        return (yield from self._call(session, method, request, wait or 0.0))

    def _prepare_store(
        self, session: ClientSession, keys: Sequence[bytes], options: StoreOptions, grant_id: int
    ) -> Operation[cache_pb2.PrepareStoreResponse]:
        """Returns the operation that begins a store."""
        request = message(
            cache_pb2.PrepareStoreRequest,
            session=session.ref,
            keys=packed(keys),
            grant_id=grant_id,
            **encoded(options),
        )
        return self._call(session, "CacheService/PrepareStore", request, grant_id=grant_id)

    def _call(
        self, session: ClientSession, method: str, request: Any, wait: float = 0.0, *, grant_id: int | None = None
    ) -> Operation[Any]:
        """Performs a call. `grant_id`: of the lease or store that it grants, or that it ends.

        If the answer is not known (no answer in time, or an interruption of the caller), the grant
        ends in the background. So the failure costs no other operation.
        """
        try:
            return (yield Call(method, request, self._timeouts.call + wait))
        except BaseException as error:
            reason = isinstance(error, KVTierError) and error.reason
            if reason and isinstance(error, SessionLost):  # otherwise only its connection has ended
                self._invalidate(session)
            elif not reason and grant_id is not None:
                self._withdraw(session, grant_id)
            raise

    def _give_back(
        self, session: ClientSession, grant_id: int, error: BaseException, *, is_patient: bool = False
    ) -> Operation[None]:
        """Ends the grant of an operation that failed with `error`. Raises no `KVTierError`.

        After an interruption, or if the server does not answer, a background thread ends it. With
        `is_patient`, the operation also waits for the server after an interruption.
        """
        answers = isinstance(error, Exception) and not isinstance(error, Unavailable)
        if (answers or is_patient) and not isinstance(error, GeneratorExit):
            request = cache_pb2.WithdrawGrantsRequest(session=session.ref, grant_ids=[grant_id])
            try:
                yield from self._call(session, "CacheService/WithdrawGrants", request, grant_id=grant_id)
            except KVTierError:
                return
        else:
            self._withdraw(session, grant_id)

    def _complete_store(
        self, session: ClientSession, request: cache_pb2.CompleteStoreRequest, grant_id: int
    ) -> Operation[None]:
        """Completes a store. Raises ServerError if the server lacks bytes of its blocks."""
        answer = yield from self._call(session, "CacheService/CompleteStore", request, grant_id=grant_id)
        if answer.failed_items:
            raise ServerError(f"the server has not received {len(answer.failed_items)} blocks of a store completely")

    def _ignore_errors(self, operation: Operation[None]) -> Operation[None]:
        """Runs an operation that cleans up after a failure. Ignores `KVTierError`."""
        try:
            yield from operation
        except KVTierError:
            return


class Base(SessionOperations):
    """Namespace, rank, deadlines and staging buffers of one client."""

    def __init__(
        self,
        namespace: Namespace,
        timeouts: Timeouts,
        transport: Transport,
        pin: Pin | None = None,
        *,
        rank: int | None = None,
        verify: Verify = "sampled",
    ) -> None:
        """`pin` pins staging buffers. For `verify` see `PartDigests`."""
        super().__init__(timeouts, transport)
        self._namespace = namespace
        self._rank = rank
        self._digests = PartDigests(verify, rank)
        self._staging = StagingPool(pin)
        self._part_bytes = [group.part_bytes for group in namespace.groups]
        self._sizes_by_group = {number.to_bytes(4, "big"): size for number, size in enumerate(self._part_bytes)}

    def close(self) -> None:
        self._staging.close()

    @property
    def staging_refusal(self) -> str:
        """Why staging buffers are not pinned as the client asked; empty if they are."""
        return self._staging.refusal

    def _sizes(self, keys: Iterable[bytes]) -> list[int]:
        """Returns the part size in bytes of each key."""
        by_group = self._sizes_by_group
        try:
            return list(map(by_group.__getitem__, map(_group_of, keys)))
        except (KeyError, TypeError) as error:
            raise InvalidRequest(f"a key must end in a group index of this namespace: {error}; see make_key") from None

    def _addresses_and_sizes(
        self, keys: Sequence[bytes], buffers: Sequence[HostBuffer], *, writable: bool
    ) -> tuple[list[int], list[int]]:
        """Returns addresses and sizes; raises `InvalidRequest` if the sizes do not fit the keys."""
        try:
            if len(keys) != len(buffers):
                raise InvalidRequest(f"{len(keys)} keys, but {len(buffers)} buffers")
            addresses, sizes = addresses_of(buffers, writable=writable)
        except (TypeError, ValueError) as error:
            raise InvalidRequest(str(error)) from error
        wanted = self._sizes(keys)
        if sizes != wanted:
            wrong = next(number for number, size in enumerate(sizes) if size != wanted[number])
            raise InvalidRequest(f"a buffer has {sizes[wrong]} bytes, but the part of its key has {wanted[wrong]}")
        return addresses, sizes


def consecutive(sizes: Sequence[int]) -> list[int]:
    """Returns the offsets of adjacent pieces of these sizes."""
    return [end - size for end, size in zip(accumulate(sizes), sizes, strict=True)]
