"""Push and Pull over raw TCP sockets: bytes are copied directly between the socket and the slots.

Each connection has a thread, which serves one request after the other. Shutting down the socket
unblocks the thread and ends its stream.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

from google.protobuf.message import DecodeError

from ...cuda.host.region import HostRegion
from ...cuda.host.socket_io import Deadline, checksum, limit_waits, receive, send
from ...protos.error_reasons import STATUS_OF
from ...protos.v1 import transfer_pb2
from ...protos.wire import attach, tcp_frames
from ...protos.wire.part_sequence import PartSequence
from ..refused import Refused
from .broker_client import BrokerClient, Stream

__all__ = ["TcpStreamServer"]

_log = logging.getLogger(__name__)

_MAX_CONNECTIONS = 128
_IDLE_SECONDS = 120.0
"""Maximum time without progress on a connection, between two requests or within one."""
_REQUEST_SECONDS = 10.0
"""Maximum time to receive the rest of the first message of a connection for calls."""
_ROOM_SECONDS = 1.0
_END = tcp_frames.pack_frame_head(0, 0, 0)


class TcpStreamServer:
    """Accepts connections, with one thread for each listener and each connection."""

    def __init__(self, broker: BrokerClient, region: HostRegion, frame_bytes: int, handover: socket.socket) -> None:
        """Connections for calls are passed to the server over `handover`."""
        self._broker = broker
        self._region = region
        self._frame_bytes = frame_bytes
        self._handover = handover
        self._connections = threading.Semaphore(_MAX_CONNECTIONS)
        self._lock = threading.Lock()
        self._idle: dict[socket.socket, None] = {}
        """Idle connections; the longest idle one is first."""

    def listen(self, hosts: tuple[str, ...], wanted: int, *, other: bool = True) -> int:
        """Listens on all hosts at one port; returns the port, or 0 if no host can be bound.

        The port is `wanted`, or with `other` any port if `wanted` is in use.
        """
        port = 0
        for host in hosts:
            for number in (port,) if port else (wanted, 0) if other else (wanted,):
                try:
                    family = socket.AF_INET6 if ":" in host else socket.AF_INET
                    listener = socket.create_server((host, number), family=family, backlog=128)
                except OSError as error:
                    _log.warning("raw TCP streams are not served on %s port %d: %s", host, number, error)
                    continue
                port = listener.getsockname()[1]
                threading.Thread(target=self._accept, args=(listener,), name="kvtier-accept", daemon=True).start()
                break
        return port

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError as error:  # such as too many open files
                _log.warning("cannot accept a connection: %s", error)
                threading.Event().wait(0.1)
                continue
            if not self._has_room():
                connection.close()
                continue
            try:
                threading.Thread(target=self._serve, args=(connection,), name="kvtier-tcp", daemon=True).start()
            except RuntimeError as error:  # no thread available
                _log.warning("cannot serve a connection: %s", error)
                connection.close()
                self._connections.release()

    def _has_room(self) -> bool:
        """Reserves a place for a connection; closes the longest idle one if all are used."""
        if self._connections.acquire(blocking=False):
            return True
        with self._lock:
            idlest = next(iter(self._idle), None)
            if idlest is None:
                return False
            del self._idle[idlest]
            _hang_up(idlest)
        return self._connections.acquire(timeout=_ROOM_SECONDS)

    @contextlib.contextmanager
    def _idling(self, connection: socket.socket) -> Iterator[None]:
        """Marks a connection as idle, so that `_has_room` may close it."""
        with self._lock:
            self._idle[connection] = None
        try:
            yield
        finally:
            with self._lock:
                self._idle.pop(connection, None)

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection:
                limit_waits(connection, _IDLE_SECONDS)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                while self._request(connection):
                    pass
        except (OSError, ValueError) as error:
            _log.debug("a connection has ended: %s", error)
        finally:
            self._connections.release()

    def _request(self, connection: socket.socket) -> bool:
        """Serves one request; returns whether another may follow."""
        try:
            with self._idling(connection):
                head = bytes(_received(connection, tcp_frames.REQUEST_BYTES))
        except ConnectionResetError:
            return False
        if head.startswith(attach.Purpose.CALLS.value):
            self._hand_over(connection, head)
            return False
        method, nbytes = tcp_frames.unpack_request(head)
        hang_up = partial(_hang_up, connection)
        stream = self._broker.open("tcp", hang_up, hang_up)
        code = "CANCELLED"
        ended = False
        try:
            message = bytes(_received(connection, nbytes))
            if method is tcp_frames.Method.PUSH:
                completes = self._push(connection, stream, message)
            else:
                completes = self._pull(connection, stream, message)
            ended = True
            stream.end("OK", complete=completes)
            completed = completes and stream.wait_committed()
            self._answer(connection, stream, method, completed=completed)
        except Refused as error:
            code = STATUS_OF[error.reason].name
            end = b"" if method is tcp_frames.Method.PUSH else _END
            send(connection, [end + tcp_frames.pack_refusal(error.reason, str(error))])
            return False
        finally:
            if not ended:
                stream.end(code)
            self._broker.close(stream)
        return True

    def _hand_over(self, connection: socket.socket, head: bytes) -> None:
        request = head + bytes(_received(connection, attach.REQUEST_BYTES - len(head), _REQUEST_SECONDS))
        socket.send_fds(self._handover, [request], [connection.fileno()])

    def _push(self, connection: socket.socket, stream: Stream, message: bytes) -> bool:
        request = _parsed(transfer_pb2.PushRequest, message)
        stream.begin(request.session, request.store_id)
        parts = PartSequence(stream.slots, stream.sizes)
        while True:
            try:
                head = tcp_frames.unpack_frame_head(_received(connection, tcp_frames.FRAME_HEAD_BYTES))
            except ValueError as error:
                stream.damaged()
                raise Refused("CHECKSUM_MISMATCH", str(error)) from error
            if not head.nbytes:
                break
            try:
                views = self._views(parts, head.offset, head.nbytes)
            except ValueError as error:
                raise Refused("WRONG_SIZE", str(error)) from error
            with stream.touching:
                stream.check()
                receive(connection, views)
            if checksum(views) != head.xxh3_64:
                stream.damaged()
                raise Refused("CHECKSUM_MISMATCH", f"the frame at byte {head.offset} arrived damaged")
            stream.moved(head.offset, head.nbytes)
        return bool(request.complete and stream.covers(parts.total_bytes))

    def _pull(self, connection: socket.socket, stream: Stream, message: bytes) -> bool:
        request = _parsed(transfer_pb2.PullRequest, message)
        stream.begin(request.session, request.lease_id, request.items)
        parts = PartSequence(stream.slots, stream.sizes)
        for offset in range(0, parts.total_bytes, self._frame_bytes):
            nbytes = min(self._frame_bytes, parts.total_bytes - offset)
            views = self._views(parts, offset, nbytes)
            with stream.touching:
                stream.check()
                send(connection, [tcp_frames.pack_frame_head(offset, nbytes, checksum(views)), *views])
            stream.moved(offset, nbytes)
        return bool(request.complete and parts.total_bytes)

    @staticmethod
    def _answer(connection: socket.socket, stream: Stream, method: tcp_frames.Method, *, completed: bool) -> None:
        if method is tcp_frames.Method.PUSH:
            pushed = transfer_pb2.PushResponse(received_bytes=stream.received, completed=completed)
            send(connection, [tcp_frames.pack_answer(pushed.SerializeToString())])
        else:
            pulled = transfer_pb2.PullResponse(completed=completed)
            send(connection, [_END + tcp_frames.pack_answer(pulled.SerializeToString())])

    def _views(self, parts: PartSequence, offset: int, nbytes: int) -> list[memoryview]:
        memory = self._region.memory
        return [memory[start : start + size] for start, size in parts.locate(offset, nbytes)]


def _parsed(kind: Any, message: bytes) -> Any:
    try:
        return kind.FromString(message)
    except DecodeError as error:
        raise Refused("INVALID_ARGUMENT", f"the message cannot be parsed: {error}") from error


def _received(connection: socket.socket, nbytes: int, seconds: float | None = None) -> bytearray:
    data = bytearray(nbytes)
    if nbytes:
        receive(connection, [memoryview(data)], None if seconds is None else Deadline(connection, seconds))
    return data


def _hang_up(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
