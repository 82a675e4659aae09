"""Storing from and loading to blocks on a device, whose bytes the server moves."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...protos.v1 import cache_pb2, devices_pb2, transfer_pb2
from ..device import KvBuffers, Mark, registration_of
from ..effects import Call, Connect, Copy, Operation
from ..errors import DeadlineExceeded, DeviceUnavailable, InvalidRequest, KVTierError
from ..results import LookupResult, StoreStatus
from ..session.session import Session
from .base import duration, keys_for, message
from .lookups import LookupOperations

__all__ = ["DeviceOperations"]

_START_SECONDS = 30.0
"""For the first registration with a device: a process is started there, and a context made."""
_COOL_DOWN_SECONDS = 10.0
"""After a refusal, until the next attempt: until then calls fail at once."""
_SETTLE_SECONDS = 1.0
"""What the server had begun when the time was over, two batches at the most, has ended by then."""
_ANSWER_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class _Registered:
    """What a server has open of this client."""

    link: Session
    id: int
    sees_events: bool


class DeviceOperations(LookupOperations):
    """Bytes between a device and the server, moved by the server."""

    _buffers: KvBuffers | None = None
    _registered: _Registered | None = None
    _refused: tuple[Session, float, DeviceUnavailable] | None = None

    def register_kv_buffers(self, buffers: KvBuffers) -> Operation[None]:
        """Registers blocks now; from now on with every server that answers."""
        self._buffers, self._registered, self._refused = buffers, None, None
        link: Session = yield Connect(self._timeouts.connect)
        yield from self._register(link, _START_SECONDS)

    def store_from_device(
        self,
        keys: Sequence[bytes],
        blocks: Sequence[int],
        *,
        request_id: str,
        retain_for: float | None,
        after: Mark | None,
    ) -> Operation[bytes]:
        """Stores blocks; returns a `StoreStatus` per key."""
        if len(keys) != len(blocks):
            raise InvalidRequest(f"{len(keys)} keys, but {len(blocks)} blocks")
        link: Session = yield Connect(self._timeouts.connect)
        registered = yield from self._register(link)
        event = yield from self._order(registered, after)
        prepare = message(
            cache_pb2.PrepareStoreRequest,
            session=link.ref,
            request_id=request_id,
            **keys_for(link, keys),
            retain_for=duration(retain_for),
        )
        answer = yield from self._call_for_sure(link, "CacheService/PrepareStore", prepare)
        if not answer.store_id:
            return bytes(answer.statuses)
        wanted = [number for number, status in enumerate(answer.statuses) if status == StoreStatus.GRANTED]
        complete = cache_pb2.CompleteStoreRequest(session=link.ref, store_id=answer.store_id)
        try:
            request = message(
                transfer_pb2.StoreFromDeviceRequest,
                session=link.ref,
                buffers_id=registered.id,
                store_id=answer.store_id,
                blocks=[blocks[number] for number in wanted],
                after=event,
                give_up_at_nanoseconds=self._give_up_at(),
            )
            yield from self._move(link, "TransferService/StoreFromDevice", request)
        except BaseException:
            complete.abort = True  # answered when nothing of it is copied any more
            yield from self._quietly(self._call_for_sure(link, "CacheService/CompleteStore", complete))
            raise
        yield from self._call_for_sure(link, "CacheService/CompleteStore", complete)
        return bytes(answer.statuses)

    def load_to_device(
        self, keys: Sequence[bytes], blocks: Sequence[int], *, request_id: str, wait: float, after: Mark | None
    ) -> Operation[int]:
        """Fills blocks with the leading hits; returns how many."""
        if len(keys) != len(blocks):
            raise InvalidRequest(f"{len(keys)} keys, but {len(blocks)} blocks")
        found = yield from self.lookup(keys, request_id=request_id, wait=wait, prefix=True, lease=None)
        hits = found.prefix_hits
        try:
            if hits:
                yield from self.read_to_device(found, range(hits), blocks[:hits], after=after)
        finally:
            if found.id:
                yield from self._quietly(self.release([found.id]))
        return hits

    def read_to_device(
        self, lease: LookupResult | int, items: Sequence[int], blocks: Sequence[int], *, after: Mark | None
    ) -> Operation[None]:
        """Fills blocks with items of a lease, and makes sure that it held."""
        link: Session = yield Connect(self._timeouts.connect)
        registered = yield from self._register(link)
        event = yield from self._order(registered, after)
        lease_id = lease if isinstance(lease, int) else lease.id
        request = message(
            transfer_pb2.LoadToDeviceRequest,
            session=link.ref,
            buffers_id=registered.id,
            lease_id=lease_id,
            items=items,
            blocks=blocks,
            after=event,
            give_up_at_nanoseconds=self._give_up_at(),
        )
        try:
            yield from self._move(link, "TransferService/LoadToDevice", request)
        except BaseException as error:
            if not (isinstance(error, KVTierError) and error.reason):
                # Nobody has said that nothing is written to the blocks any more: so they are not given back before that is sure.
                over = request.give_up_at_nanoseconds / 1e9 + _SETTLE_SECONDS
                yield Copy(lambda: time.sleep(max(0.0, over - time.monotonic())))
            raise
        confirm = cache_pb2.CompleteLoadRequest(session=link.ref, lease_id=lease_id)
        yield from self._call(link, "CacheService/CompleteLoad", confirm)

    def _register(self, link: Session, wait: float = 0.0) -> Operation[_Registered]:
        """Returns what the link's server has open, and has it opened if that has not happened yet.

        Who waits for the first start of a mover (``wait``) is told that it takes longer still; for any other call the server does
        not move bytes until it is up, and another way is taken.
        """
        registered, refused = self._registered, self._refused
        if registered is not None and registered.link is link:
            return registered
        if refused is not None and refused[0] is link and time.monotonic() < refused[1]:
            raise DeviceUnavailable(str(refused[2]), refused[2].reason)
        try:
            registered = yield from self._ask_to_open(link, wait)
        except DeviceUnavailable as error:
            self._refused = (link, time.monotonic() + _COOL_DOWN_SECONDS, error)
            raise
        except DeadlineExceeded as error:
            if wait:
                raise
            unavailable = DeviceUnavailable(f"starting: the blocks are not open yet: {error}", "DEVICE_UNAVAILABLE")
            self._refused = (link, time.monotonic() + _COOL_DOWN_SECONDS, unavailable)
            raise unavailable from error
        self._registered = registered
        return registered

    def _ask_to_open(self, link: Session, wait: float) -> Operation[_Registered]:
        if self._buffers is None:
            raise InvalidRequest("no KV buffers are registered: see register_kv_buffers")
        if not link.devices.offered:
            why = link.devices.why_not or "the server knows nothing of devices"
            raise DeviceUnavailable(why, "DEVICE_UNAVAILABLE")
        request = registration_of(self._buffers.export)
        request.session.CopyFrom(link.ref)
        answer = yield from self._call(link, "TransferService/RegisterDeviceBuffers", request, wait)
        return _Registered(link, answer.buffers_id, answer.order == devices_pb2.DEVICE_ORDER_EVENTS)

    def _order(self, registered: _Registered, after: Mark | None) -> Operation[devices_pb2.DeviceAfter | None]:
        """Returns what a call says of the mark; waits for it here where the server cannot."""
        if after is None:
            return None
        if registered.sees_events and after.index is not None:
            return devices_pb2.DeviceAfter(event_index=after.index)
        yield Copy(after.wait)
        return None

    def _give_up_at(self) -> int:
        return time.monotonic_ns() + int(self._timeouts.device * 1e9)

    def _move(self, link: Session, method: str, request: Any) -> Operation[None]:
        try:
            yield Call(method, request, self._timeouts.device + _ANSWER_SECONDS)
        except DeviceUnavailable:
            self._registered = None  # the next call registers anew
            raise
