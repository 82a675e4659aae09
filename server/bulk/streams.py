"""Bulk process: serves Push and Pull over the socket protocol (`docs/wire.md`).

`python -m kvtier.server.bulk.streams` with inherited descriptors runs it. Bytes are copied
directly between socket and slots.

Each connection has a thread, which serves one call after the other. Shutting down the socket
unblocks the thread and ends its stream.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from google.rpc import status_pb2

from ...cuda.host.memory import tune_malloc
from ...cuda.host.region import DIGEST_PAGE_BYTES, HostRegion
from ...cuda.host.socket_io import Connection, TlsConnection, checksum_on
from ...protos.error_reasons import STATUS_OF, status_of
from ...protos.v1 import transfer_pb2
from ...protos.wire import socket_frames as frames
from ...protos.wire.packed_keys import pack_offsets
from ...protos.wire.part_sequence import FRAME_BYTES, PartSequence
from ..auth.certificate_names import certificate_names
from ..auth.tls_files import ServerContext
from ..config.schema import LimitConfig
from ..process.child_main import connect
from ..refused import Refused
from ..rpc.new_connections import NewConnections
from ..rpc.request_checks import PushFrameSizes, RefusingBounds
from .broker_client import BrokerClient, Stream
from .connection_places import ConnectionPlaces, Place
from .messages import Caller

__all__ = ["StreamServer", "main"]

_log = logging.getLogger(__name__)

_MAX_MESSAGE_BYTES = 1 << 20
"""Largest message of a call, from a client that the server has accepted."""
_IDLE_SECONDS = 120.0
"""Maximum time without progress on a connection, between two calls or within one."""
_HELLO_SECONDS = 5.0
"""Maximum time for the TLS handshake and the hello."""
_NICE = 5
"""Nice value 5 gives a third of the server's CPU weight, so busy streams do not delay calls."""
_TLS_RECORD = b"\x16\x03"
_TLS_RECORD_HEAD_BYTES = 5


@dataclass(slots=True)
class _Client:
    """Client whose hello was accepted."""

    connection: Connection
    caller: Caller
    place: Place
    last_call: int
    """Number of its last call, or of its hello."""


class StreamServer:
    """Accepts connections, with one thread for each listener and each connection."""

    def __init__(
        self,
        broker: BrokerClient,
        region: HostRegion,
        limits: LimitConfig,
        handover: socket.socket,
        tls: ServerContext | None = None,
    ) -> None:
        """`handover`: TCP connections for calls go to the server, Unix ones for streams come."""
        self._broker = broker
        self._region = region
        self._bounds = RefusingBounds(limits)
        self._max_frame_bytes = limits.max_frame_bytes
        self._frame_bytes = min(limits.max_frame_bytes, FRAME_BYTES)
        self._handover = handover
        self._tls = tls
        self._places = ConnectionPlaces()
        self._new = NewConnections()

    def serve(self, listener: socket.socket) -> None:
        """Accepts connections of a listening socket on a thread."""
        listener.setblocking(True)  # the server's event loop has made it non-blocking
        threading.Thread(target=self._accept, args=(listener,), name="kvtier-accept", daemon=True).start()

    def receive_connections(self) -> None:
        """Serves the Unix connections for streams that the server passes. Does not return."""
        while True:
            hello, descriptors, _, _ = socket.recv_fds(self._handover, 4096, 1, socket.MSG_CMSG_CLOEXEC)
            if not hello:
                return
            for descriptor in descriptors:
                sock = socket.socket(fileno=descriptor)
                sock.setblocking(True)  # the server's event loop has made it non-blocking
                self._start(sock, hello)

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError as error:  # such as too many open files
                self._broker.slower("accept", f"connections for streams and calls over TCP are not accepted: {error}")
                threading.Event().wait(0.1)
                continue
            self._broker.slower("accept")
            self._start(sock, None)

    def _start(self, sock: socket.socket, hello: bytes | None) -> None:
        """Starts the thread of a connection. `hello` has been received already if it is given."""
        try:
            threading.Thread(target=self._serve, args=(sock, hello), name="kvtier-stream", daemon=True).start()
        except RuntimeError as error:  # no thread available
            self._broker.slower("thread", f"a connection for streams is closed, because no thread can start: {error}")
            sock.close()
        else:
            self._broker.slower("thread")

    def _serve(self, sock: socket.socket, hello: bytes | None) -> None:
        accepted = None
        try:
            with sock:
                if hello is None:
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    with self._new.counting(sock.getpeername()[0], Connection(sock).shutdown):
                        accepted = self._accept_client(sock)
                else:
                    accepted = self._accept_local(Connection(sock, _IDLE_SECONDS), hello)
                if accepted is not None:
                    while self._serve_call(accepted):
                        pass
        except (OSError, ValueError) as error:
            _log.debug("a connection has ended: %s", error)
        finally:
            if accepted is not None:
                self._places.leave(accepted.place)

    def _accept_client(self, sock: socket.socket) -> _Client | None:
        """Performs the handshakes. None: the connection went to the server, or was refused."""
        deadline = time.monotonic() + _HELLO_SECONDS
        connection = Connection(sock, _IDLE_SECONDS)
        connection.set_deadline(_HELLO_SECONDS)
        if _is_for_calls(connection, tls=self._tls is not None):
            try:
                socket.send_fds(self._handover, [b"calls"], [sock.fileno()])
            except OSError as error:
                self._broker.slower("calls", f"a connection for calls cannot be passed to the server: {error}")
                raise
            self._broker.slower("calls")
            return None
        names: list[str] = []
        if self._tls is not None:
            connection = secure = TlsConnection(sock, self._tls.current(), idle_seconds=_IDLE_SECONDS)
            secure.set_deadline(deadline - time.monotonic())
            secure.handshake()
            names = certificate_names(secure.peer_certificate)
        hello = connection.read(frames.HELLO_BYTES)
        token = connection.read(frames.unpack_hello(hello).token_bytes)
        return self._handshake(connection, hello + token, names, is_local=False)

    def _accept_local(self, connection: Connection, hello: bytes) -> _Client | None:
        return self._handshake(connection, hello, [], is_local=True)

    def _handshake(self, connection: Connection, hello: bytes, names: list[str], *, is_local: bool) -> _Client | None:
        """Asks the server to accept a client, and answers the hello. None: refused."""
        fields = frames.unpack_hello(hello[: frames.HELLO_BYTES])
        token = hello[frames.HELLO_BYTES :].decode("ascii") or None
        caller = Caller(fields.session_id, fields.epoch, token, names, is_local)
        if fields.purpose is not frames.Purpose.STREAMS:
            return None
        stream = self._broker.open(caller, connection.shutdown)
        try:
            place = self._places.take(stream.handshake(), connection.shutdown)
        except Refused as error:
            connection.send([_refusal(fields.number, error)])
            return None
        finally:
            self._broker.close(stream)
        try:
            connection.send([frames.pack_answer(fields.number, 0)])
            connection.set_deadline(None)
        except OSError:
            self._places.leave(place)
            raise
        return _Client(connection, caller, place, fields.number)

    def _serve_call(self, client: _Client) -> bool:
        """Serves one call; returns whether another may follow. Raises OSError, ValueError."""
        connection = client.connection
        try:
            with self._places.idling(client.place):
                head = connection.read(frames.HEAD_BYTES)
        except ConnectionResetError:
            return False
        length, number = frames.unpack_call_head(head, client.last_call)
        if length > _MAX_MESSAGE_BYTES:
            raise ValueError(f"a call with {length} bytes")
        client.last_call = number
        stream = self._broker.open(client.caller, connection.shutdown)
        code = "CANCELLED"
        ended = False
        try:
            method, message = frames.unpack_call(connection.read(length))
            digests = b""
            if method == frames.PUSH:
                completes = self._push(connection, stream, number, message)
            elif method == frames.PULL:
                completes, digests = self._pull(connection, stream, number, message)
            else:
                connection.send([_unimplemented(number, method)])
                return False
            ended = True
            stream.end("OK", complete=completes)
            completed = completes and stream.wait_committed()
            connection.send([_answer(number, stream, method, digests, completed=completed)])
        except Refused as error:
            code = STATUS_OF[error.reason].name
            connection.send([_refusal(number, error)])
            return False
        finally:
            if not ended:
                stream.end(code)
            self._broker.close(stream)
        return True

    def _push(self, connection: Connection, stream: Stream, number: int, message: bytes) -> bool:
        request = self._parsed(frames.PUSH, transfer_pb2.PushRequest, message)
        stream.begin(request.store_id)
        parts = PartSequence(stream.slots, stream.sizes)
        frame_sizes = PushFrameSizes(len(stream.sizes), self._max_frame_bytes)
        while (head := _read_data_head(connection, stream, number)) is not None:
            frame_sizes.check(head.nbytes)
            try:
                parts.check(head.offset, head.nbytes)
            except ValueError as error:
                raise Refused("WRONG_SIZE", str(error)) from error
            self._receive(connection, stream, parts, head)
        return request.complete and parts.total_bytes > 0 and stream.store.has_all(parts.total_bytes)

    def _receive(self, connection: Connection, stream: Stream, parts: PartSequence, head: frames.DataHead) -> None:
        """Receives the payload of a frame into the slots. Discards bytes that arrived before."""
        end = head.offset + head.nbytes
        gaps, arrived = stream.store.begin_frame(stream, head.offset, end), False
        try:
            views = self._destination(parts, head, gaps)
            with stream.touching:
                stream.check()
                connection.receive(views)
                if checksum_on(connection, views) != head.xxh3_64:
                    stream.damaged()
                    raise Refused("CHECKSUM_MISMATCH", f"the frame at byte {head.offset} arrived damaged")
                stream.moved(head.offset, head.nbytes)
            arrived = True
        finally:
            stream.store.end_frame(stream, arrived=arrived)

    def _destination(self, parts: PartSequence, head: frames.DataHead, gaps: list[tuple[int, int]]) -> list[memoryview]:
        """Returns memory for a frame: slots for its `gaps`, and a buffer for repeated bytes."""
        end = head.offset + head.nbytes
        if gaps == [(head.offset, end)]:
            return self._views(parts, head.offset, head.nbytes)
        if head.nbytes > FRAME_BYTES:
            text = f"a frame that repeats received bytes has {head.nbytes} bytes; the limit is {FRAME_BYTES}"
            raise Refused("WRONG_SIZE", text)
        views, position = [], head.offset
        for start, stop in [*gaps, (end, end)]:
            if position < start:
                views.append(memoryview(bytearray(start - position)))
            views += self._views(parts, start, stop - start)
            position = stop
        return views

    def _pull(self, connection: Connection, stream: Stream, number: int, message: bytes) -> tuple[bool, bytes]:
        """Returns whether to confirm the load, and the packed digests of the parts."""
        request = self._parsed(frames.PULL, transfer_pb2.PullRequest, message)
        stream.begin(request.lease_id, request.items)
        parts = PartSequence(stream.slots, stream.sizes)
        for offset in range(0, parts.total_bytes, self._frame_bytes):
            nbytes = min(self._frame_bytes, parts.total_bytes - offset)
            views = self._views(parts, offset, nbytes)
            with stream.touching:
                stream.check()
                head = frames.pack_data_head(number, offset, nbytes, checksum_on(connection, views))
                connection.send([head, *views])
                stream.moved(offset, nbytes)
        with stream.touching:
            stream.check()
            table = self._region.digests
            digests = pack_offsets([table[slot // DIGEST_PAGE_BYTES] for slot in stream.slots])
        return bool(request.complete and parts.total_bytes), digests

    def _parsed(self, method: bytes, kind: Any, message: bytes) -> Any:
        self._bounds.check(method.decode(), message)
        try:
            return kind.FromString(message)
        except DecodeError as error:
            raise Refused("INVALID_ARGUMENT", f"the message cannot be parsed: {error}") from error

    def _views(self, parts: PartSequence, offset: int, nbytes: int) -> list[memoryview]:
        memory = self._region.memory
        return [memory[start : start + size] for start, size in parts.locate(offset, nbytes)]


def _is_for_calls(connection: Connection, *, tls: bool) -> bool:
    """Returns whether a new connection is for calls. The received bytes stay in the socket.

    With TLS the names of the application protocols in the ClientHello tell it. A wrong result does
    no harm: the handshake then fails, because each process accepts only the name of its purpose.
    """
    if not tls:
        return frames.purpose_of(connection.peek(frames.PURPOSE_BYTES)) is frames.Purpose.CALLS
    start = connection.peek(_TLS_RECORD_HEAD_BYTES)
    if not start.startswith(_TLS_RECORD):
        raise ValueError("the connection does not begin with a TLS handshake")
    length = int.from_bytes(start[-2:], "big")
    return frames.CALLS_PROTOCOL.encode() in connection.peek(_TLS_RECORD_HEAD_BYTES + length)


def _read_data_head(connection: Connection, stream: Stream, number: int) -> frames.DataHead | None:
    """Reads the head of a data frame of call `number`; None at the end of its Push.

    Raises `Refused`, and `CrossedFrameError` for a frame of another call.
    """
    head = connection.read(frames.HEAD_BYTES)
    try:
        length, kind, call = frames.unpack_head(head)
        if kind == frames.FrameKind.END and not length:
            frames.check_number(call, number)
            return None
        data = frames.unpack_data_head(head + connection.read(frames.DATA_HEAD_BYTES - frames.HEAD_BYTES))
    except ValueError as error:
        stream.damaged()
        raise Refused("CHECKSUM_MISMATCH", str(error)) from error
    frames.check_number(data.number, number)
    return data


def _answer(number: int, stream: Stream, method: bytes, digests: bytes, *, completed: bool) -> bytes:
    if method == frames.PUSH:
        pushed = transfer_pb2.PushResponse(received_bytes=stream.received, completed=completed)
        return frames.pack_answer(number, 0, pushed.SerializeToString())
    pulled = transfer_pb2.PullResponse(completed=completed, digests=digests)
    return frames.pack_answer(number, 0, pulled.SerializeToString())


def _refusal(number: int, error: Refused) -> bytes:
    return frames.pack_error(number, status_of(error.reason, str(error)))


def _unimplemented(number: int, method: bytes) -> bytes:
    code: int = grpc.StatusCode.UNIMPLEMENTED.value[0]
    text = f"{method.decode(errors='replace')} is not served on this connection"
    return frames.pack_error(number, status_pb2.Status(code=code, message=text))


def main(pools: str, socket_fd: int, handover_fd: int, *listener_fds: int) -> None:
    """Serves until the server has ended. Does not return."""
    broker = BrokerClient(connect(socket_fd))
    setup = broker.setup()
    broker.start()  # without the nice value, so that busy streams do not delay its answers
    try:
        slower = ""
        os.nice(_NICE)  # before the other threads start, because threads inherit it
    except OSError as error:  # a sandbox may forbid it
        slower = f"streams may delay calls, because the bulk process has the priority of the server: {error}"
    tune_malloc()
    sys.setswitchinterval(1e-4)  # as in the server: see `serve`
    region = HostRegion.inherit(pools, setup.region_bytes)
    tls = (
        ServerContext(setup.tls[0], setup.tls[1], setup.tls[2] or None, frames.STREAMS_PROTOCOL) if setup.tls else None
    )
    server = StreamServer(broker, region, setup.limits, socket.socket(fileno=handover_fd), tls)
    for descriptor in listener_fds:
        server.serve(socket.socket(fileno=descriptor))
    broker.listening()
    broker.slower("priority", slower)
    server.receive_connections()


if __name__ == "__main__":
    main(sys.argv[2], int(sys.argv[1]), *map(int, sys.argv[3:]))
