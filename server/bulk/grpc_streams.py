"""Push and Pull over gRPC in the bulk process, on the threads of a synchronous gRPC server.

A synchronous server reads or creates a frame only after the previous frame is processed. Therefore
a slow client occupies the memory of only one frame.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import NoReturn

import grpc
import xxhash
from google.protobuf.message import DecodeError

from ...cuda.host.message import assemble, scatter
from ...cuda.host.region import HostRegion
from ...protos.error_reasons import STATUS_OF, error_details
from ...protos.v1 import transfer_pb2
from ...protos.wire.grpc_frames import decode_push_frame, frame_head
from ...protos.wire.part_sequence import PartSequence
from ..auth.authenticator import peer_credentials
from ..refused import Refused
from .broker_client import BrokerClient, Stream

__all__ = ["GrpcStreamServer"]

_log = logging.getLogger(__name__)


class GrpcStreamServer:
    def __init__(self, broker: BrokerClient, region: HostRegion, frame_bytes: int) -> None:
        self._broker = broker
        self._region = region
        self._frame_bytes = frame_bytes

    def handler(self) -> grpc.GenericRpcHandler:
        return grpc.method_handlers_generic_handler(
            "kvtier.v1.TransferService",
            {
                "Push": grpc.stream_unary_rpc_method_handler(self._push),
                "Pull": grpc.unary_stream_rpc_method_handler(self._pull),
            },
        )

    def _push(self, frames: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        scope = _StreamScope(self._broker, context)
        with scope as stream:
            first = next(frames, None)
            if first is None:
                raise Refused("INVALID_ARGUMENT", "the stream ended before its first frame")
            fields, payload = _decoded(first)
            stream.begin(fields.session, fields.store_id)
            parts = PartSequence(stream.slots, stream.sizes)
            self._write(stream, parts, fields, payload)
            # Release each frame before waiting for the next one.
            del first, payload
            for message in frames:
                self._write(stream, parts, *_decoded(message))
                del message
            complete = fields.complete and stream.covers(parts.total_bytes)
            scope.end(complete=complete)
            completed = complete and scope.completed()
            response = transfer_pb2.PushResponse(received_bytes=stream.received, completed=completed)
        return response.SerializeToString()

    def _write(
        self, stream: Stream, parts: PartSequence, fields: transfer_pb2.PushRequest, payload: memoryview
    ) -> None:
        if xxhash.xxh3_64_intdigest(payload) != fields.xxh3_64:
            stream.damaged()
            raise Refused("CHECKSUM_MISMATCH", f"the frame at byte {fields.offset_bytes} arrived damaged")
        try:
            pieces = list(parts.locate(fields.offset_bytes, payload.nbytes))
        except ValueError as error:
            raise Refused("WRONG_SIZE", str(error)) from error
        addresses = [self._region.address + offset for offset, _ in pieces]
        with stream.touching:
            stream.check()
            scatter(payload, addresses, [size for _, size in pieces])
        stream.moved(fields.offset_bytes, payload.nbytes)

    def _pull(self, message: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        scope = _StreamScope(self._broker, context)
        with scope as stream:
            try:
                request = transfer_pb2.PullRequest.FromString(message)
            except DecodeError as error:
                raise Refused("INVALID_ARGUMENT", f"the message cannot be parsed: {error}") from error
            stream.begin(request.session, request.lease_id, request.items)
            parts = PartSequence(stream.slots, stream.sizes)
            for offset in range(0, parts.total_bytes, self._frame_bytes):
                nbytes = min(self._frame_bytes, parts.total_bytes - offset)
                frame = self._read(stream, parts, offset, nbytes)
                stream.moved(offset, nbytes)
                if offset + nbytes == parts.total_bytes:
                    # All bytes are read, so the server can commit while the last frame is sent.
                    scope.end(complete=request.complete)
                yield frame
                del frame
            if request.complete and parts.total_bytes and scope.completed():
                yield transfer_pb2.PullResponse(offset_bytes=parts.total_bytes, completed=True).SerializeToString()

    def _read(self, stream: Stream, parts: PartSequence, offset: int, nbytes: int) -> bytes:
        pieces = list(parts.locate(offset, nbytes))
        addresses = [self._region.address + start for start, _ in pieces]
        head = frame_head(transfer_pb2.PullResponse(offset_bytes=offset), nbytes)
        with stream.touching:
            stream.check()
            return assemble(head.data, head.checksum_at, addresses, [size for _, size in pieces])


class _StreamScope:
    """Context manager of a stream: reports its end to the server and an error to the client."""

    def __init__(self, broker: BrokerClient, context: grpc.ServicerContext) -> None:
        self._broker = broker
        self._context = context
        self._stream = broker.open("grpc-bulk", context.cancel)
        self._stream.credentials = peer_credentials(context)
        self._ended = False

    def end(self, *, complete: bool) -> None:
        self._ended = True
        self._stream.end("OK", complete=complete)

    def completed(self) -> bool:
        return self._stream.wait_committed()

    def __enter__(self) -> Stream:
        return self._stream

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        code = _code_of(error)
        try:
            if not self._ended:
                self._stream.end(code)
        finally:
            self._broker.close(self._stream)
        if isinstance(error, Refused):
            self._abort(error.reason, str(error))
        if code == "INTERNAL":
            _log.error("a bulk stream failed", exc_info=error)
            self._abort("INTERNAL", "a defect of the server; its log has the traceback")

    def _abort(self, reason: str, text: str) -> NoReturn:
        self._context.set_trailing_metadata(error_details(reason, text))
        self._context.abort(STATUS_OF[reason], text)
        raise AssertionError("abort raises")


def _code_of(error: BaseException | None) -> str:
    if error is None:
        return "OK"
    if isinstance(error, Refused):
        return str(STATUS_OF[error.reason].name)
    # If the client has gone, gRPC raises RpcError in a Push and closes the generator of a Pull.
    return "CANCELLED" if isinstance(error, grpc.RpcError | GeneratorExit) else "INTERNAL"


def _decoded(message: bytes) -> tuple[transfer_pb2.PushRequest, memoryview]:
    try:
        return decode_push_frame(message)
    except ValueError as error:
        raise Refused("INVALID_ARGUMENT", str(error)) from error
