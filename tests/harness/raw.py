"""Sessions with raw gRPC stubs and their own attach connection."""

from __future__ import annotations

import socket
from collections.abc import Callable
from types import TracebackType
from typing import Self

import grpc

from kvtier.client.namespace import Namespace
from kvtier.client.session.session import Attachment
from kvtier.client.transport.grpc_methods import CHANNEL_OPTIONS, PULL, PUSH
from kvtier.protos.credentials import Credentials
from kvtier.protos.endpoint import parse_endpoint
from kvtier.protos.error_reasons import reason_of
from kvtier.protos.v1 import (
    cache_pb2_grpc,
    common_pb2,
    handoff_pb2_grpc,
    session_pb2,
    session_pb2_grpc,
    transfer_pb2,
)
from kvtier.protos.wire.attach import REPLY_BYTES, pack_request, unpack_reply

__all__ = ["RawSession", "attach_reply", "refusal_of"]


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
            protocol_version=1,
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
        return Attachment.connect(self.capabilities.region.attach_path, self.ref)

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


def attach_reply(path: str, ref: common_pb2.SessionRef) -> int | None:
    """Requests the region and closes the connection; returns its size, or None if refused."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(60)
        connection.connect(path)
        connection.sendall(pack_request(ref.session_id, ref.epoch))
        reply, descriptors, _, _ = socket.recv_fds(connection, REPLY_BYTES, 1)
        for descriptor in descriptors:
            socket.close(descriptor)
        size = unpack_reply(reply)
        assert (size is None) == (not descriptors)
        return size
