"""Device calls of TransferService: registration of device blocks, copies to and from slots."""

from __future__ import annotations

import operator
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import grpc
from google.protobuf import message_factory

from ...cuda.device.device_errors import DeviceError
from ...protos.v1 import devices_pb2, transfer_pb2
from ...tiers.core.block import Block
from ...tiers.core.in_flight_stores import Store
from ...tiers.types import GROUP_INDEX_BYTES, LeaseId, StoreId
from ..core_runtime import TierRuntime
from ..devices.copy_worker_client import CopyPlan
from ..devices.registry import DeviceRegistry, Registration, export_of
from ..refused import Refused
from ..rpc.own_copies import Writers
from ..rpc.request_checks import RequestValidator
from ..rpc.sessions import SessionRegistry
from ..telemetry.metrics import Metrics

__all__ = ["DeviceCopyCalls", "add_device_calls"]

_LONGEST_NANOSECONDS = 60 * 10**9


class DeviceCopyCalls:
    def __init__(
        self,
        runtime: TierRuntime,
        sessions: SessionRegistry,
        validator: RequestValidator,
        metrics: Metrics,
        devices: DeviceRegistry,
        writers: Writers,
    ) -> None:
        self._runtime = runtime
        self._core = runtime.core
        self._sessions = sessions
        self._validator = validator
        self._devices = devices
        self._writers = writers
        self._moved = {
            out: metrics.transfer("cuda_ipc", "in" if out else "out") for out in (True, False)
        }  # a copy out of the device is a transfer into the region

    async def RegisterDeviceBuffers(
        self, request: transfer_pb2.RegisterDeviceBuffersRequest, context: grpc.aio.ServicerContext
    ) -> transfer_pb2.RegisterDeviceBuffersResponse:
        session = self._sessions.get(request.session)
        try:
            export = export_of(request)
        except DeviceError as error:
            raise Refused("INVALID_ARGUMENT", f"{error.cause}: {error}") from error
        registration = await self._devices.register(session, export)
        self._sessions.set_transport(session, "cuda_ipc")
        order = devices_pb2.DEVICE_ORDER_EVENTS if registration.events else devices_pb2.DEVICE_ORDER_CALLER_WAITS
        return transfer_pb2.RegisterDeviceBuffersResponse(buffers_id=registration.id, order=order)

    async def UnregisterDeviceBuffers(
        self, request: transfer_pb2.UnregisterDeviceBuffersRequest, context: grpc.aio.ServicerContext
    ) -> transfer_pb2.UnregisterDeviceBuffersResponse:
        session = self._sessions.get(request.session, is_release=True)
        await self._devices.unregister(self._devices.get(session, request.buffers_id))
        return transfer_pb2.UnregisterDeviceBuffersResponse()

    async def StoreFromDevice(
        self, request: transfer_pb2.StoreFromDeviceRequest, context: grpc.aio.ServicerContext
    ) -> transfer_pb2.StoreFromDeviceResponse:
        session = self._sessions.get(request.session)
        registration = self._devices.get(session, request.buffers_id)
        self._sessions.set_transport(session, "cuda_ipc")
        store_id = StoreId(request.store_id)
        store = self._core.renew_store(session, store_id, self._runtime.now() + self._validator.leases.default)
        items = _distinct(request.items, "item") or range(len(store.blocks))
        if max(items, default=0) >= len(store.blocks):
            raise Refused(
                "INVALID_ARGUMENT",
                f"there is no item {max(items, default=0)}: store {store_id} has {len(store.blocks)} items",
            )
        slots = store.slots()
        plan = self._plan(
            registration,
            request,
            [store.blocks[item] for item in items],
            [slots[item] for item in items],
            out=True,
        )
        await self._devices.copy(registration, plan, self._writing(store, items))
        # Raises if the store has ended meanwhile, because then the copied bytes are lost.
        self._core.renew_store(session, store_id, self._runtime.now() + self._validator.leases.default)
        return transfer_pb2.StoreFromDeviceResponse(moved_bytes=self._count(plan))

    async def LoadToDevice(
        self, request: transfer_pb2.LoadToDeviceRequest, context: grpc.aio.ServicerContext
    ) -> transfer_pb2.LoadToDeviceResponse:
        session = self._sessions.get(request.session)
        registration = self._devices.get(session, request.buffers_id)
        self._sessions.set_transport(session, "cuda_ipc")
        lease = self._core.lease(session, LeaseId(request.lease_id))
        items = _distinct(request.items, "item")
        slots, _ = lease.read(items, session.own_rank())
        blocks = [block for block in lease.blocks(items) if block is not None]
        plan = self._plan(registration, request, blocks, slots, out=False)
        await self._devices.copy(registration, plan, self._writers.reading(lease))
        # Raises if the lease has ended meanwhile.
        self._core.lease(session, lease.id)
        return transfer_pb2.LoadToDeviceResponse(moved_bytes=self._count(plan))

    @contextmanager
    def _writing(self, store: Store, items: Sequence[int]) -> Iterator[None]:
        """Context of a copy to these items of a store, which are received if the copy succeeds."""
        ends = list(accumulate(block.part_bytes for block in store.blocks))
        ranges = [(ends[item] - store.blocks[item].part_bytes, ends[item]) for item in items]
        for start, end in ranges:
            store.received.remove(start, end)
        with self._writers.writing(store):
            yield
            for start, end in ranges:
                store.receive(start, end)

    def _count(self, plan: CopyPlan) -> int:
        self._moved[plan.out].inc(plan.nbytes)
        return plan.nbytes

    def _plan(
        self,
        registration: Registration,
        request: transfer_pb2.StoreFromDeviceRequest | transfer_pb2.LoadToDeviceRequest,
        parts: Sequence[Block],
        slots: Sequence[int],
        *,
        out: bool,
    ) -> CopyPlan:
        if len(request.blocks) != len(parts):
            raise Refused(
                "INVALID_ARGUMENT", f"{len(request.blocks)} blocks for {len(parts)} items; the numbers must be equal"
            )
        groups: dict[int, tuple[list[int], list[int]]] = {}
        for part, block, slot in zip(parts, request.blocks, slots, strict=True):
            ids, offsets = groups.setdefault(int.from_bytes(part.key[-GROUP_INDEX_BYTES:], "big"), ([], []))
            ids.append(block)
            offsets.append(slot)
        for group, (ids, _) in groups.items():
            _check_blocks(ids, group, registration.num_blocks(group))
        nbytes = sum(part.part_bytes for part in parts)
        return CopyPlan(out, groups, nbytes, _event_of(request, registration), _deadline_of(request))


def add_device_calls(calls: DeviceCopyCalls, server: Any) -> None:
    """Registers the calls with a gRPC server or a socket call server."""
    service = transfer_pb2.DESCRIPTOR.services_by_name["TransferService"]
    handlers = {
        method.name: grpc.unary_unary_rpc_method_handler(
            getattr(calls, method.name),
            message_factory.GetMessageClass(method.input_type).FromString,
            operator.methodcaller("SerializeToString"),
        )
        for method in service.methods
        if hasattr(calls, method.name)
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service.full_name, handlers),))
    server.add_registered_method_handlers(service.full_name, handlers)


def _check_blocks(ids: Sequence[int], group: int, num_blocks: int) -> None:
    if not num_blocks:
        raise Refused("INVALID_ARGUMENT", f"blocks of group {group} are not registered")
    if max(ids) >= num_blocks:
        raise Refused("INVALID_ARGUMENT", f"there is no block {max(ids)} of group {group}: it has {num_blocks}")
    _distinct(ids, f"block of group {group}")


def _distinct(numbers: Sequence[int], what: str) -> Sequence[int]:
    """Raises Refused if a number is repeated: the order of two copies to one place is undefined."""
    if len(set(numbers)) != len(numbers):
        raise Refused("INVALID_ARGUMENT", f"the request contains a {what} twice")
    return numbers


def _event_of(
    request: transfer_pb2.StoreFromDeviceRequest | transfer_pb2.LoadToDeviceRequest, registration: Registration
) -> int | None:
    if not request.HasField("after"):
        return None
    if request.after.event_index >= registration.events:
        message = f"there is no event {request.after.event_index}: {registration.events} are registered"
        raise Refused("INVALID_ARGUMENT", message)
    return request.after.event_index


def _deadline_of(request: transfer_pb2.StoreFromDeviceRequest | transfer_pb2.LoadToDeviceRequest) -> int:
    """Returns the time until which copies may begin, in nanoseconds of the monotonic clock."""
    latest = time.monotonic_ns() + _LONGEST_NANOSECONDS
    return min(request.deadline_nanoseconds or latest, latest)
