"""Push and Pull over the socket protocol to the bulk process, without a copy in between."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from google.protobuf.message import DecodeError, Message

from ...cuda.host.socket_io import Connection, checksum_on
from ...protos.v1 import transfer_pb2
from ...protos.wire import socket_frames as frames
from ..effects import Pull, Push
from ..errors import DeadlineExceeded, KVTierError, NotConnected, ServerError, SessionLost
from ..session.session import ClientSession
from ..session.socket_calls import SocketCalls, SocketPool, SocketTarget, message_of, read_answer

__all__ = ["SocketStreams"]

M = TypeVar("M", bound=Message)

_STALL_SECONDS = 5.0
"""Maximum time without a byte, and until the first byte, unless the caller chooses it. A bulk
process that runs answers within milliseconds. If it hangs, the stream is retried over gRPC."""
_MAX_RESPONSE_BYTES = 64 << 10
"""Limit of the end of a stream: a few fields, or a refusal."""
_TIMER_SECONDS = 0.01
"""The kernel's timers may be early by less than this."""
_CONNECT_SECONDS = 5.0
"""For the first connection, which the connector's thread opens."""


class SocketStreams(SocketPool):
    """Push and Pull of one session; methods as in `GrpcStreams`. Any thread may call."""

    def __init__(self, target: SocketTarget, stall_seconds: float | None = None) -> None:
        """Does not connect. `stall_seconds`: maximum time without a byte."""
        super().__init__(target, frames.Purpose.STREAMS)
        self._stall_seconds = stall_seconds

    def connect(self) -> None:
        """Opens the first connection. Raises what `SocketTarget.connect` raises."""
        self.put(self._connect(_CONNECT_SECONDS), intact=True)

    def push(self, effect: Push, on_start: Callable[[Any], object] = lambda _: None) -> transfer_pb2.PushResponse:
        source = effect.source
        request = source.request(complete=effect.complete)
        with self._connection(effect, on_start) as connection:
            number = frames.next_call_number()
            connection.send([frames.pack_call(number, frames.PUSH, request.SerializeToString())])
            try:
                for offset, views in source.pieces(effect.start, effect.step):
                    nbytes = sum(view.nbytes for view in views)
                    head = frames.pack_data_head(number, offset, nbytes, checksum_on(connection, views))
                    connection.send([head, *views])
                connection.send([frames.pack_end(number)])
            except ConnectionError:
                _read_response(connection, number, transfer_pb2.PushResponse)  # raises a refusal
                raise
            return _read_response(connection, number, transfer_pb2.PushResponse)

    def pull(self, effect: Pull, on_start: Callable[[Any], object] = lambda _: None) -> None:
        sink = effect.sink
        with self._connection(effect, on_start) as connection:
            number = frames.next_call_number()
            connection.send([frames.pack_call(number, frames.PULL, effect.request.SerializeToString())])
            while True:
                head = connection.read(frames.HEAD_BYTES)
                if frames.unpack_head(head)[1] is not frames.FrameKind.DATA:
                    break
                rest = connection.read(frames.DATA_HEAD_BYTES - frames.HEAD_BYTES)
                data = frames.unpack_data_head(head + rest)
                frames.check_number(data.number, number)
                views = sink.views(data.offset, data.nbytes)
                connection.receive(views)
                sink.verify(data, checksum_on(connection, views))
            sink.take_answer(_read_response(connection, number, transfer_pb2.PullResponse, head))

    def offer_calls(self, session: ClientSession) -> None:
        """Sends the session's unary calls to the same socket, if the server accepts them there."""
        if session.calls is not None:  # applies to new connections; existing ones stay open
            session.calls.target = self.target
            return
        calls = SocketCalls(self.target)
        if calls.prepare():
            session.use_calls(calls)
            session.recovered("kvtier: calls do not use the socket")
        else:
            session.downgraded("kvtier: calls do not use the socket", calls.refusal)

    @contextlib.contextmanager
    def _connection(self, effect: Push | Pull, on_start: Callable[[Any], object]) -> Iterator[Connection]:
        """Lends a connection that is shut down on session end, cancellation or time-out."""
        deadline = time.monotonic() + effect.timeout
        stall_seconds = _STALL_SECONDS if self._stall_seconds is None else self._stall_seconds
        call = None
        intact = False
        try:
            try:
                connection = self.take(effect.timeout)
            except (OSError, KVTierError) as error:  # gRPC can try again
                if isinstance(error, KVTierError) and error.reason:
                    raise NotConnected(f"the server refused a connection: {error}", error.reason) from None
                raise ConnectionError(str(error)) from None
            try:
                call = _StreamCall(connection)
                on_start(call)
                with effect.session.cancelling(call.cancel):
                    connection.set_deadline(deadline - time.monotonic(), stall_seconds)
                    yield connection
                intact = True
            finally:
                self.put(connection, intact=intact)
        except (OSError, ValueError) as error:
            if effect.session.ended or (call is not None and call.cancelled and time.monotonic() < deadline):
                raise SessionLost("the session has ended") from None
            if time.monotonic() >= deadline - _TIMER_SECONDS:
                raise DeadlineExceeded("the stream did not end in time") from None
            if isinstance(error, BlockingIOError):
                raise NotConnected(f"no byte of a stream moved for {stall_seconds:g} s") from None
            raise NotConnected(f"the connection of a stream failed: {error}") from None


def _read_response(connection: Connection, number: int, kind: type[M], head: bytes | None = None) -> M:
    """Reads the end of a stream. Raises `KVTierError` for a refusal, or if it is no response."""
    message = message_of(read_answer(connection, number, head, _MAX_RESPONSE_BYTES))
    try:
        return kind.FromString(message)
    except DecodeError as error:
        raise ServerError(f"the server does not end a stream as kvtier does: {error}") from None


class _StreamCall:
    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True
        self._connection.shutdown()
