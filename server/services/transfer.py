"""TransferService in the server process: Push and Pull of block bytes over gRPC.

Clients of this project prefer the socket protocol, which the bulk process (`bulk`) serves. They use
this service if the bulk process is unreachable or not running.

The event loop copies the frames, so the core can change nothing during a copy. Therefore a frame is
written only while its store is in flight, and the slot is not reused during the copy. Each frame
waits for the turn of its session, because a frame of 2 MiB blocks the event loop for 0.1 to 1 ms.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import grpc
from google.protobuf.message import DecodeError

from ...cuda.host.socket_io import checksum
from ...protos.v1 import common_pb2, transfer_pb2
from ...protos.wire.packed_keys import pack_offsets
from ...protos.wire.part_sequence import FRAME_BYTES, PartSequence
from ...tiers.core.in_flight_stores import Store
from ...tiers.types import EngineSession, LeaseId, StoreId
from ..bulk.supervisor import BulkProcess
from ..core_runtime import TierRuntime
from ..refused import Refused
from ..rpc.attach_socket import SUFFIX
from ..rpc.request_checks import PushFrameSizes, RefusingBounds, RequestValidator
from ..rpc.sessions import SessionRegistry
from ..rpc.slice_scheduler import GRPC_SECONDS
from ..rpc.socket_calls import SocketCallServer
from ..telemetry.metrics import Metrics
from .long_calls import LongCalls

__all__ = ["TransferService"]


_FRAME_SECONDS = 30.0
"""Maximum time for a frame of a Push to arrive; its memory is in use until then."""


async def _in_time(frames: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yields the frames of a Push. Raises `Refused` if the next one takes too long."""
    iterator = aiter(frames)
    while True:
        try:
            async with asyncio.timeout(_FRAME_SECONDS):
                frame = await anext(iterator)
        except StopAsyncIteration:
            return
        except TimeoutError:
            raise Refused("LIMIT_EXCEEDED", f"a frame did not arrive within {_FRAME_SECONDS:g} s") from None
        yield frame
        del frame  # frees the frame during the wait for the next one


class TransferService:
    def __init__(
        self,
        runtime: TierRuntime,
        sessions: SessionRegistry,
        validator: RequestValidator,
        metrics: Metrics,
        bulk: BulkProcess,
        bounds: RefusingBounds,
        long_calls: LongCalls,
    ) -> None:
        self._runtime = runtime
        self._core = runtime.core
        self._memory = runtime.region.memory
        self._digests = runtime.digests
        self._sessions = sessions
        self._validator = validator
        self._frame_bytes = min(validator.limits.max_frame_bytes, FRAME_BYTES)
        self._bulk = bulk
        self._bounds = bounds
        self._long_calls = long_calls
        self._pushed = metrics.transfer("grpc", "in")
        self._pulled = metrics.transfer("grpc", "out")
        self._damaged = metrics.mismatches("grpc")

    @property
    def _locate(self) -> grpc.RpcMethodHandler:
        return grpc.unary_unary_rpc_method_handler(
            self.Locate, transfer_pb2.LocateRequest.FromString, transfer_pb2.LocateResponse.SerializeToString
        )

    def handler(self) -> grpc.GenericRpcHandler:
        return grpc.method_handlers_generic_handler(
            "kvtier.v1.TransferService",
            {
                "Push": grpc.stream_unary_rpc_method_handler(
                    self.Push, None, transfer_pb2.PushResponse.SerializeToString
                ),
                "Pull": grpc.unary_stream_rpc_method_handler(
                    self.Pull, transfer_pb2.PullRequest.FromString, transfer_pb2.PullResponse.SerializeToString
                ),
                "Locate": self._locate,
            },
        )

    def add_calls(self, calls: SocketCallServer) -> None:
        calls.add_registered_method_handlers("kvtier.v1.TransferService", {"Locate": self._locate})

    async def Push(self, frames: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> transfer_pb2.PushResponse:
        session: EngineSession | None = None
        ref = common_pb2.SessionRef()
        store_id = StoreId(0)
        parts = PartSequence((), ())
        frame_sizes = PushFrameSizes(0, self._validator.limits.max_frame_bytes)
        received = 0
        limiter = None
        with contextlib.ExitStack() as running:
            async for message in _in_time(frames):
                if session is not None:
                    await self._long_calls.scheduler.turn(session, before=GRPC_SECONDS)
                self._bounds.check("TransferService/Push", message)
                try:
                    frame = transfer_pb2.PushRequest.FromString(message)
                except DecodeError as error:
                    raise Refused("INVALID_ARGUMENT", f"the message cannot be parsed: {error}") from error
                if session is None:
                    ref = frame.session
                    session = self._sessions.get(ref)
                    store_id = StoreId(frame.store_id)
                    store = self._core.store(session, store_id)
                    limiter = running.enter_context(self._sessions.stream(session))
                    store.is_streamed = True
                    parts = PartSequence(store.slots(), [block.part_bytes for block in store.blocks])
                    frame_sizes = PushFrameSizes(len(store.blocks), self._validator.limits.max_frame_bytes)
                payload = memoryview(frame.payload)
                frame_sizes.check(payload.nbytes)
                if checksum([payload]) != frame.xxh3_64:
                    self._damaged.inc()
                    raise Refused("CHECKSUM_MISMATCH", f"the frame at byte {frame.offset_bytes} arrived damaged")
                try:
                    parts.check(frame.offset_bytes, payload.nbytes)
                except ValueError as error:
                    raise Refused("WRONG_SIZE", str(error)) from error
                await self._bulk.end_writers(store_id)  # a client that uses gRPC has given them up
                # For each frame: the store may have ended, or the token may have been revoked.
                self._sessions.find(ref)
                expires_at = self._runtime.now() + self._validator.leases.default
                store = self._core.renew_store(session, store_id, expires_at)
                self._write(store, parts, frame.offset_bytes, payload)
                received += payload.nbytes
                self._pushed.inc(payload.nbytes)
                if limiter is not None:
                    limiter.count_bytes(payload.nbytes)
        if session is None:
            raise Refused("INVALID_ARGUMENT", "the stream ended before its first frame")
        return transfer_pb2.PushResponse(received_bytes=received)

    def _write(self, store: Store, parts: PartSequence, offset: int, payload: memoryview) -> None:
        """Copies a verified payload to the slots, except bytes that have arrived before."""
        end = offset + payload.nbytes
        for first, last in store.received.gaps(offset, end):
            taken = first - offset
            for start, nbytes in parts.locate(first, last - first):
                self._memory[start : start + nbytes] = payload[taken : taken + nbytes]
                taken += nbytes
        if not store.receive(offset, end):
            raise Refused("LIMIT_EXCEEDED", "the frames leave too many gaps between received bytes")

    async def Pull(
        self, request: transfer_pb2.PullRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[transfer_pb2.PullResponse]:
        session = self._sessions.get(request.session)
        lease_id = LeaseId(request.lease_id)
        with self._sessions.stream(session) as limiter:
            slots, sizes = await self._long_calls.read(session, lease_id, request.items)
            parts = PartSequence(slots, sizes)
            offset = 0
            while offset < parts.total_bytes:
                await self._long_calls.scheduler.turn(session, before=GRPC_SECONDS)
                self._sessions.find(request.session)  # checked for each frame, as in `Push`
                self._core.lease(session, lease_id)
                nbytes = min(self._frame_bytes, parts.total_bytes - offset)
                pieces = [self._memory[start : start + size] for start, size in parts.locate(offset, nbytes)]
                yield transfer_pb2.PullResponse(offset_bytes=offset, xxh3_64=checksum(pieces), payload=b"".join(pieces))
                offset += nbytes
                self._pulled.inc(nbytes)
                if limiter is not None:
                    limiter.count_bytes(nbytes)
            self._core.lease(session, lease_id)
            yield transfer_pb2.PullResponse(digests=pack_offsets(self._digests.of(slots)))

    async def Locate(
        self, request: transfer_pb2.LocateRequest, context: grpc.aio.ServicerContext
    ) -> transfer_pb2.LocateResponse:
        """Returns where the bulk process listens, and how many bytes of a store have arrived."""
        session = self._sessions.get(request.session)
        received = 0
        if request.store_id:
            received = self._core.store(session, StoreId(request.store_id)).received.leading
        port = self._bulk.locate()
        if port is None:
            return transfer_pb2.LocateResponse(received_bytes=received)
        return transfer_pb2.LocateResponse(socket_port=port, unix_suffix=SUFFIX, received_bytes=received)
