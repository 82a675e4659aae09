"""Operations that store from and load to device blocks; the server copies the bytes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...protos.v1 import cache_pb2, devices_pb2, transfer_pb2
from ..device import KvBuffers, Mark, registration_of
from ..effects import Call, Copy, Operation
from ..errors import DeadlineExceeded, DeviceUnavailable, InvalidRequest, KVTierError
from ..results import LookupResult, StoreStatus
from ..session.session import ClientSession
from .arguments import StoreOptions, message
from .lookups import LookupOperations, lease_id_of

__all__ = ["DeviceOperations"]

_START_SECONDS = 30.0
"""Additional time for the first registration: the server starts a process and a CUDA context."""
_RETRY_SECONDS = 10.0
"""Time after a refused registration in which calls fail at once, without another attempt."""
_SETTLE_SECONDS = 1.0
"""Time after the deadline in which the server ends copies in progress (at most two batches)."""
_ANSWER_SECONDS = 2.0
"""Time after the deadline of a copy request in which the server must respond."""


@dataclass(frozen=True, slots=True)
class _Registered:
    session: ClientSession
    id: int
    sees_events: bool


class DeviceOperations(LookupOperations):
    _buffers: KvBuffers | None = None
    _registered: _Registered | None = None
    _refused: tuple[ClientSession, float, DeviceUnavailable] | None = None

    def register_kv_buffers(self, buffers: KvBuffers) -> Operation[None]:
        self._buffers, self._registered, self._refused = buffers, None, None
        session: ClientSession = yield self._connect
        yield from self._register(session, _START_SECONDS)

    def store_from_device(
        self,
        keys: Sequence[bytes],
        blocks: Sequence[int],
        options: StoreOptions,
        *,
        after: Mark | None,
    ) -> Operation[bytes]:
        if len(keys) != len(blocks):
            raise InvalidRequest(f"{len(keys)} keys, but {len(blocks)} blocks")
        session: ClientSession = yield self._connect
        registered = yield from self._register(session)
        event = yield from self._order(registered, after)
        with self.held() as held:
            held.session = session
            answer = yield from self._prepare_store(session, keys, options, held.grant_id)
            if not answer.store_id:
                return bytes(answer.statuses)
            wanted = [number for number, status in enumerate(answer.statuses) if status == StoreStatus.GRANTED]
            complete = cache_pb2.CompleteStoreRequest(session=session.ref, store_id=answer.store_id)
            try:
                request = message(
                    transfer_pb2.StoreFromDeviceRequest,
                    session=session.ref,
                    buffers_id=registered.id,
                    store_id=answer.store_id,
                    blocks=[blocks[number] for number in wanted],
                    after=event,
                    deadline_nanoseconds=self._deadline(),
                )
                yield from self._move(session, "TransferService/StoreFromDevice", request)
            except BaseException as error:
                # The server answers when its copies have ended. Until then it reads the blocks.
                yield from self._give_back(session, held.grant_id, error, is_patient=True)
                raise
            yield from self._complete_store(session, complete, held.grant_id)
            return bytes(answer.statuses)

    def load_to_device(
        self, keys: Sequence[bytes], blocks: Sequence[int], *, request_id: str, wait: float, after: Mark | None
    ) -> Operation[int]:
        if len(keys) != len(blocks):
            raise InvalidRequest(f"{len(keys)} keys, but {len(blocks)} blocks")
        with self.held() as held:
            found = yield from self.lookup(keys, {"request_id": request_id, "wait": wait}, held=held)
            hits = found.prefix_hits
            try:
                if hits:
                    yield from self.read_to_device(found, range(hits), blocks[:hits], after=after)
            except BaseException as error:
                yield from self._give_back(found.session, held.grant_id, error)
                raise
            if found.id:
                yield from self._ignore_errors(self._release_granted(found, held.grant_id))
            return hits

    def read_to_device(
        self, lease: LookupResult | int, items: Sequence[int], blocks: Sequence[int], *, after: Mark | None
    ) -> Operation[None]:
        lease_id = lease_id_of(lease, items)
        session: ClientSession = yield self._connect
        registered = yield from self._register(session)
        event = yield from self._order(registered, after)
        request = message(
            transfer_pb2.LoadToDeviceRequest,
            session=session.ref,
            buffers_id=registered.id,
            lease_id=lease_id,
            items=items,
            blocks=blocks,
            after=event,
            deadline_nanoseconds=self._deadline(),
        )
        try:
            yield from self._move(session, "TransferService/LoadToDevice", request)
        except BaseException as error:
            if not (isinstance(error, KVTierError) and error.reason):
                # The server may still write to the blocks. So this operation raises only after the
                # deadline, when the server has stopped.
                over = request.deadline_nanoseconds / 1e9 + _SETTLE_SECONDS
                yield Copy(lambda: time.sleep(max(0.0, over - time.monotonic())))
            raise
        confirm = cache_pb2.CompleteLoadRequest(session=session.ref, lease_id=lease_id)
        yield from self._call(session, "CacheService/CompleteLoad", confirm)

    def _register(self, session: ClientSession, wait: float = 0.0) -> Operation[_Registered]:
        """Returns the registration with the session's server, and registers if necessary.

        `wait`: additional seconds for the start of the copy worker. If the start takes longer,
        raises `DeadlineExceeded`. If `wait` is 0, raises `DeviceUnavailable` instead, so that the
        caller can use another transport.
        """
        registered, refused = self._registered, self._refused
        if registered is not None and registered.session is session:
            return registered
        if refused is not None and refused[0] is session and time.monotonic() < refused[1]:
            raise DeviceUnavailable(str(refused[2]), refused[2].reason)
        try:
            registered = yield from self._send_registration(session, wait)
        except DeviceUnavailable as error:
            self._refused = (session, time.monotonic() + _RETRY_SECONDS, error)
            raise
        except DeadlineExceeded as error:
            if wait:
                raise
            unavailable = DeviceUnavailable(
                f"starting: the copy worker is not ready yet: {error}", "DEVICE_UNAVAILABLE"
            )
            self._refused = (session, time.monotonic() + _RETRY_SECONDS, unavailable)
            raise unavailable from error
        self._registered = registered
        return registered

    def _send_registration(self, session: ClientSession, wait: float) -> Operation[_Registered]:
        if self._buffers is None:
            raise InvalidRequest("no KV buffers are registered: see register_kv_buffers")
        if not session.devices.offered:
            why = session.devices.why_not or "the server does not support devices"
            raise DeviceUnavailable(why, "DEVICE_UNAVAILABLE")
        request = registration_of(self._buffers.export)
        request.session.CopyFrom(session.ref)
        answer = yield from self._call(session, "TransferService/RegisterDeviceBuffers", request, wait)
        return _Registered(session, answer.buffers_id, answer.order == devices_pb2.DEVICE_ORDER_EVENTS)

    def _order(self, registered: _Registered, after: Mark | None) -> Operation[devices_pb2.DeviceAfter | None]:
        """Returns the event that the server waits for before it copies.

        If the server cannot wait for `after`, waits here and returns None.
        """
        if after is None:
            return None
        if registered.sees_events and after.index is not None:
            return devices_pb2.DeviceAfter(event_index=after.index)
        yield Copy(after.wait)
        return None

    def _deadline(self) -> int:
        return time.monotonic_ns() + int(self._timeouts.device * 1e9)

    def _move(self, session: ClientSession, method: str, request: Any) -> Operation[None]:
        try:
            yield Call(method, request, self._timeouts.device + _ANSWER_SECONDS)
        except DeviceUnavailable:
            self._registered = None  # the next call registers anew
            raise
