"""Base class of operations, and functions that make requests from the caller's arguments."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, count
from operator import itemgetter
from typing import Any

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

__all__ = [
    "Base",
    "Grant",
    "SessionOperations",
    "consecutive",
]


_group_of: Callable[[bytes], bytes] = itemgetter(slice(-4, None))


@dataclass
class Grant:
    """A lease or store that a call may have got. The client chooses the id, per session."""

    id: int
    session: ClientSession | None = None
    """Session of the call; None before the call."""


class SessionOperations:
    """Calls on the current session of a transport."""

    def __init__(self, timeouts: Timeouts, transport: Transport) -> None:
        self._timeouts = timeouts
        self._invalidate = transport.invalidate
        self._withdraw = transport.withdraw
        self._grant_ids = count(1)

    def _request(self, make: type[Message], method: str, *, wait: float | None = None, **fields: Any) -> Operation[Any]:
        """Performs a call on the current session. `wait` and `fields` are fields of the request."""
        session: ClientSession = yield Connect(self._timeouts.connect)
        if wait is not None:
            fields["wait"] = duration("wait", wait)
        request = message(make, session=session.ref, **fields)
        return (yield from self._call(session, method, request, wait or 0.0))

    def _prepare_store(
        self, session: ClientSession, keys: Sequence[bytes], options: StoreOptions, grant_id: int
    ) -> Operation[cache_pb2.PrepareStoreResponse]:
        request = message(
            cache_pb2.PrepareStoreRequest,
            session=session.ref,
            keys=packed(keys),
            grant_id=grant_id,
            **encoded(options),
        )
        answer: cache_pb2.PrepareStoreResponse = yield from self._call_granting(
            session, grant_id, "CacheService/PrepareStore", request
        )
        return answer

    def _call(self, session: ClientSession, method: str, request: Any, wait: float = 0.0) -> Operation[Any]:
        try:
            return (yield Call(method, request, self._timeouts.call + wait))
        except SessionLost as error:
            if error.reason:  # otherwise only this call's connection has ended
                self._invalidate(session)
            raise

    def _new_grant(self) -> int:
        """Returns an id for the lease or store of a call, unique within the session."""
        return next(self._grant_ids)

    @contextlib.contextmanager
    def _owning(self, grant: Grant) -> Iterator[None]:
        """Ends a grant in the background if the caller is interrupted while it owns the grant.

        An interruption can come after any bytecode, also between the answer and the next `try`.
        """
        try:
            yield
        except (Exception, GeneratorExit):
            raise
        except BaseException:
            if grant.session is not None:
                self._withdraw(grant.session, grant.id)
            raise

    def _call_granting(
        self, session: ClientSession, grant_id: int, method: str, request: Any, wait: float = 0.0
    ) -> Operation[Any]:
        """Performs a call that grants a lease or store, or ends a store.

        If the answer is not known (no answer in time, or an interruption of the caller), the grant
        ends in the background. So the failure costs no other operation.
        """
        try:
            return (yield from self._call(session, method, request, wait))
        except BaseException as error:
            if not (isinstance(error, KVTierError) and error.reason):
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
                yield from self._call_granting(session, grant_id, "CacheService/WithdrawGrants", request)
            except KVTierError:
                return
        else:
            self._withdraw(session, grant_id)

    def _complete_store(
        self, session: ClientSession, request: cache_pb2.CompleteStoreRequest, grant_id: int
    ) -> Operation[None]:
        """Completes a store. Raises ServerError if the server lacks bytes of its blocks."""
        answer = yield from self._call_granting(session, grant_id, "CacheService/CompleteStore", request)
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
    ) -> None:
        """`pin` pins staging buffers."""
        super().__init__(timeouts, transport)
        self._namespace = namespace
        self._rank = rank
        self._staging = StagingPool(pin)
        self._sizes_by_group = {
            number.to_bytes(4, "big"): group.part_bytes for number, group in enumerate(namespace.groups)
        }

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
