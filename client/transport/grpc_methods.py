"""What the sync and the asyncio client share about their gRPC channels."""

from __future__ import annotations

import operator
from collections.abc import Callable
from types import MappingProxyType

from google.protobuf import message_factory
from google.protobuf.message import DecodeError, Message

from ...protos.v1 import admin_pb2, cache_pb2, handoff_pb2, transfer_pb2
from ..errors import ServerError

__all__ = ["CHANNEL_OPTIONS", "LOCATE", "PULL", "PUSH", "RESPONSES", "path_of", "response_of", "serialize"]

CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # A proxy for the web is none for us.
    ("grpc.enable_http_proxy", 0),
    # A server that comes back is to be found within a second.
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 500),
    # Not a pause, whatever its name: how long an attempt may take at least. A busy host, or a far one, is slow to shake hands.
    ("grpc.min_reconnect_backoff_ms", 5_000),
    # Channels of one process would share a connection, and a bulk stream would hold up another client's calls.
    ("grpc.use_local_subchannel_pool", 1),
    # A server whose host is gone is noticed; one that hangs is noticed by its heartbeats.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
)

LOCATE = "TransferService/Locate"

RESPONSES: MappingProxyType[str, type[Message]] = MappingProxyType(
    {
        f"{service.name}/{method.name}": message_factory.GetMessageClass(method.output_type)
        for file in (cache_pb2.DESCRIPTOR, handoff_pb2.DESCRIPTOR, admin_pb2.DESCRIPTOR, transfer_pb2.DESCRIPTOR)
        for service in file.services_by_name.values()
        for method in service.methods
        if not (method.client_streaming or method.server_streaming)
    }
    | {LOCATE: transfer_pb2.LocateResponse}
)
"""The unary methods that operations call, and what they answer with."""


serialize: Callable[[Message], bytes] = operator.methodcaller("SerializeToString")
"""Turns any request into its bytes."""


def response_of(method: str, message: bytes) -> Message:
    """Returns what a method has answered. Raises `ServerError` for what is no answer of it."""
    try:
        return RESPONSES[method].FromString(message)
    except DecodeError as error:
        raise ServerError(f"{method}: not an answer of kvtier: {error}") from None


def path_of(method: str) -> str:
    """Returns how gRPC names a method."""
    return f"/kvtier.v1.{method}"


PUSH = path_of("TransferService/Push")
PULL = path_of("TransferService/Pull")
