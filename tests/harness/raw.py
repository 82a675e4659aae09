"""Sessions with raw gRPC stubs, and connections of the socket protocol without a client."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable
from types import TracebackType
from typing import Self

import grpc
from google.protobuf.message import Message
from google.rpc import status_pb2

from kvtier.client.namespace import Namespace
from kvtier.client.session.session import Attachment
from kvtier.client.session.socket_calls import SocketTarget
from kvtier.client.transport.grpc_methods import CHANNEL_OPTIONS, PULL, PUSH
from kvtier.protos.credentials import Credentials
from kvtier.protos.endpoint import parse_endpoint
from kvtier.protos.error_reasons import reason_of, reason_within
from kvtier.protos.v1 import (
    cache_pb2_grpc,
    common_pb2,
    handoff_pb2_grpc,
    session_pb2,
    session_pb2_grpc,
    transfer_pb2,
)
from kvtier.protos.wire import socket_frames as frames

__all__ = [
    "RawSession",
    "RawSocket",
    "attach_reply",
    "connected_socket",
    "hello_of",
    "refusal_of",
]


class RawSession:
    """An open session: `ref` names it. It never reconnects."""

    def __init__(
        self,
        endpoint: str,
        namespace: Namespace,
        *,
        engine_id: str,
        rank: int | None = None,
        transport: str = "grpc",
        credentials: Credentials | None = None,
    ) -> None:
        self.namespace = namespace
        self.channel = (credentials or Credentials()).channel(parse_endpoint(endpoint), CHANNEL_OPTIONS)
        self.sessions = session_pb2_grpc.SessionServiceStub(self.channel)
        self.cache = cache_pb2_grpc.CacheServiceStub(self.channel)
        self.handoff = handoff_pb2_grpc.HandoffServiceStub(self.channel)
        self.push = self.channel.stream_unary(PUSH, None, transfer_pb2.PushResponse.FromString)
        self.pull = self.channel.unary_stream(PULL, transfer_pb2.PullRequest.SerializeToString, None)
        self.capabilities = self.sessions.Capabilities(
            session_pb2.CapabilitiesRequest(), timeout=60, wait_for_ready=True
        )
        self.request = session_pb2.OpenRequest(
            protocol_version=2,
            client_name="raw",
            engine_id=engine_id,
            rank=rank,
            namespace=namespace.to_proto(),
            transport=transport,
        )
        self._stream = self.sessions.Open(self.request)
        self.ref: common_pb2.SessionRef = next(self._stream).session

    def method(self, name: str) -> Callable[..., object]:
        """A unary method by its name, of any service."""
        found: Callable[..., object] = getattr(self.cache, name, None) or getattr(self.handoff, name)
        return found

    def attach(self) -> Attachment:
        """Maps the region. The attachment outlives the session until it is closed."""
        path = self.capabilities.region.attach_path
        return Attachment.connect(SocketTarget(path, self.ref, Credentials()), path)

    def end(self) -> None:
        """Ends the heartbeat stream, which ends the session."""
        self._stream.cancel()

    def close(self) -> None:
        """Ends everything but attachments."""
        self.end()
        self.channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def refusal_of(error: grpc.RpcError) -> tuple[str, str | None]:
    """Status and reason of a failed call."""
    return error.code().name, reason_of(error.trailing_metadata())


def hello_of(ref: common_pb2.SessionRef, purpose: frames.Purpose, token: str = "") -> bytes:
    """A hello with the call number 0."""
    return frames.pack_hello(purpose, ref.session_id, ref.epoch, 0, token)


def attach_reply(path: str, ref: common_pb2.SessionRef) -> int | None:
    """Requests the region and closes the connection; returns its size, or None if refused."""
    with connected_socket(path) as connection:
        connection.sendall(hello_of(ref, frames.Purpose.REGION))
        answer, descriptors, _, _ = socket.recv_fds(connection, frames.REGION_ANSWER_BYTES, 1)
        for descriptor in descriptors:
            socket.close(descriptor)
        code, message = frames.unpack_answer(answer[frames.HEAD_BYTES :])
        assert (code == 0) == bool(descriptors)
        return frames.unpack_region_answer(message)[0] if code == 0 else None


def connected_socket(address: str | tuple[str, int]) -> socket.socket:
    """A socket that is connected to a path or to a TCP address, with a long time-out."""
    if not isinstance(address, str):
        return socket.create_connection(address, 60)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(60)
    connection.connect(address)
    return connection


class RawSocket:
    """A connection of the socket protocol that has sent some first bytes, usually a hello.

    Its calls have the numbers 1, 2, 3, ….
    """

    def __init__(
        self, address: str | tuple[str, int], first: bytes = b"", context: ssl.SSLContext | None = None
    ) -> None:
        self.calls = 0
        """Number of the last call."""
        self.answers = 0
        """Number of the next answer."""
        self.socket = connected_socket(address)
        try:
            if context is not None:
                self.socket = context.wrap_socket(self.socket, server_hostname="127.0.0.1")
            self.socket.sendall(first)
        except BaseException:
            self.socket.close()
            raise

    def send(self, *pieces: bytes) -> None:
        self.socket.sendall(b"".join(pieces))

    def read(self, nbytes: int) -> bytes:
        """Receives this many bytes. Raises EOFError if the connection ends before."""
        data = bytearray()
        while len(data) < nbytes:
            piece = self.socket.recv(nbytes - len(data))
            if not piece:
                raise EOFError(f"{len(data)} of {nbytes} bytes")
            data += piece
        return bytes(data)

    def answer(self) -> tuple[int, bytes]:
        """Reads the next answer, first that to the hello; returns its status code and message."""
        length, kind, number = frames.unpack_head(self.read(frames.HEAD_BYTES))
        assert (kind, number) == (frames.FrameKind.ANSWER, self.answers)
        self.answers += 1
        return frames.unpack_answer(self.read(length))

    def refusal(self) -> tuple[str, str | None]:
        """Reads an answer with an error; returns its status and reason."""
        code, message = self.answer()
        assert code, "the answer has no error"
        return frames.STATUS_OF_CODE[code].name, reason_within(status_pb2.Status.FromString(message))

    def next_call(self, name: bytes, message: bytes) -> bytes:
        """Returns the frame of the next call."""
        self.calls += 1
        return frames.pack_call(self.calls, name, message)

    def send_call(self, name: str, message: Message) -> None:
        self.send(self.next_call(name.encode(), message.SerializeToString()))

    def call(self, name: str, message: Message) -> tuple[int, bytes]:
        """Makes a call; returns status code and message of the answer."""
        self.send_call(name, message)
        return self.answer()

    def is_ended(self) -> bool:
        """Waits until the server has closed the connection; False if it sends bytes before."""
        try:
            return self.socket.recv(1) == b""
        except ConnectionError:
            return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()
