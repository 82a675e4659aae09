"""gRPC channel options, method paths and response types of both clients."""

from __future__ import annotations

import operator
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

from google.protobuf import message_factory
from google.protobuf.message import DecodeError, Message

from ...protos.v1 import (
    admin_pb2,
    cache_pb2,
    conversation_pb2,
    events_pb2,
    handoff_pb2,
    session_pb2,
    transfer_pb2,
)
from ..errors import ServerError

__all__ = [
    "CHANNEL_OPTIONS",
    "LOCATE",
    "PULL",
    "PUSH",
    "RESPONSES",
    "SERVICE_OPTIONS",
    "STREAM_RESPONSES",
    "UnaryCalls",
    "path_of",
    "response_of",
    "serialize",
]

SERVICE_OPTIONS = (
    # Ignore HTTP proxies that the environment sets for other traffic.
    ("grpc.enable_http_proxy", 0),
    # Reconnect within a second after a server restart.
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 500),
    # Despite the option's name, this is the minimum time-out of one attempt to connect. A busy or
    # distant host completes the handshake slowly.
    ("grpc.min_reconnect_backoff_ms", 5_000),
    # Otherwise all channels of a process share one connection, and the streams of one client delay
    # the calls of others.
    ("grpc.use_local_subchannel_pool", 1),
    # Detects a dead host. Missing heartbeats show that a server hangs.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
)
"""Options of a channel for calls without a session."""

CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    *SERVICE_OPTIONS,
)

LOCATE = "TransferService/Locate"

_METHODS = {
    f"{service.name}/{method.name}": method
    for module in (admin_pb2, cache_pb2, conversation_pb2, events_pb2, handoff_pb2, session_pb2, transfer_pb2)
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
    if not method.client_streaming
}

RESPONSES: MappingProxyType[str, type[Message]] = MappingProxyType(
    {
        name: message_factory.GetMessageClass(method.output_type)
        for name, method in _METHODS.items()
        if not method.server_streaming
    }
    | {LOCATE: transfer_pb2.LocateResponse}
)
"""Unary method -> type of its response."""

STREAM_RESPONSES: MappingProxyType[str, type[Message]] = MappingProxyType(
    {
        name: message_factory.GetMessageClass(method.output_type)
        for name, method in _METHODS.items()
        if method.server_streaming
    }
)
"""Method with a stream of responses -> type of each response."""

serialize: Callable[[Message], bytes] = operator.methodcaller("SerializeToString")


def response_of(method: str, message: bytes) -> Message:
    """Parses a response of `method`. Raises `ServerError` if it is invalid."""
    try:
        return RESPONSES[method].FromString(message)
    except DecodeError as error:
        raise ServerError(f"{method}: not an answer of kvtier: {error}") from None


def path_of(method: str) -> str:
    return f"/kvtier.v1.{method}"


class UnaryCalls(dict[str, Any]):
    """Unary calls of a channel by method. Each is made when it is first used."""

    def __init__(self, channel: Any) -> None:
        super().__init__()
        self._channel = channel

    def __missing__(self, method: str) -> Any:
        call = self[method] = self._channel.unary_unary(path_of(method), serialize, RESPONSES[method].FromString)
        return call


PUSH = path_of("TransferService/Push")
PULL = path_of("TransferService/Pull")
