"""Bytes that are not a valid message, not gRPC, or not a request for the region."""

from __future__ import annotations

import contextlib
import socket
import time

import grpc
import pytest
from harness.misbehaving import INVALID, TIMEOUT, WITH_SESSION, World, refuse
from harness.raw import RawSocket, attach_reply, hello_of
from harness.server_process import MIB

from kvtier.protos.wire.socket_frames import HELLO_BYTES, Purpose
from kvtier.server.rpc.attach_socket import _HANDSHAKE_SECONDS


def path_of(method: str) -> str:
    return f"{'HandoffService' if 'Hold' in method or 'Claim' in method else 'CacheService'}/{method}"


@pytest.mark.parametrize("method", [*map(path_of, WITH_SESSION), "TransferService/Pull"])
def test_unparsable_messages_are_refused(world: World, method: str) -> None:
    for garbage in (b"\xff" * 64, b"\x0a\xff\xff\xff\xff\x0f", bytes(range(256))):
        kind = world.mine.channel.unary_stream if method.endswith("Pull") else world.mine.channel.unary_unary
        refuse(
            world, lambda _, kind=kind, text=garbage: list(kind(f"/kvtier.v1.{method}")(text, timeout=TIMEOUT)), INVALID
        )


def test_unknown_methods_are_unimplemented(world: World) -> None:
    for method in ("/kvtier.v1.CacheService/Nothing", "/kvtier.v2.CacheService/Lookup", "/nothing"):
        with pytest.raises(grpc.RpcError) as refusal:
            world.mine.channel.unary_unary(method, None, None)(b"", timeout=TIMEOUT)
        assert refusal.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_bytes_that_are_not_grpc_do_no_harm(world: World) -> None:
    """Connections to the socket that send another protocol or nothing do not disturb the server."""
    for text in (b"GET / HTTP/1.1\r\n\r\n", b"\x00" * 4096, b""):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.connect(str(world.server.path))
            connection.sendall(text)
            if text:
                connection.shutdown(socket.SHUT_WR)
                connection.settimeout(60)
                while connection.recv(4096):
                    pass


def attach_path(world: World) -> str:
    """Returns the socket that sends the region's descriptor."""
    path: str = world.mine.capabilities.region.attach_path
    return path


@pytest.mark.slow
def test_incomplete_attach_requests_end_by_themselves(world: World) -> None:
    """They delay no other client."""
    before, began = world.server.descriptors(), time.monotonic()
    hello = hello_of(world.mine.ref, Purpose.REGION)
    connections = [RawSocket(attach_path(world), hello[: number % HELLO_BYTES]) for number in range(100)]
    assert attach_reply(attach_path(world), world.mine.ref) == 64 * MIB
    connections[0].socket.setblocking(False)
    if time.monotonic() - began < _HANDSHAKE_SECONDS - 1:
        with pytest.raises(BlockingIOError):  # the connection is newer than those that were closed
            connections[0].socket.recv(1)
    connections[0].socket.settimeout(60)
    for number, connection in enumerate(connections):
        with connection:
            assert number >= 50 or connection.is_ended()
    world.server.wait_for(lambda _: world.server.descriptors() <= before + 2)


def test_bytes_after_the_attach_request_are_ignored(world: World) -> None:
    """Only the end of the connection counts."""
    with contextlib.closing(world.mine.attach()) as attachment:
        attachment._connection.sendall(bytes(1 << 20))
        status = world.server.wait_for(lambda status: any(session.attached for session in status.sessions))
        # the bystander and this one
        assert sum(session.attached for session in status.sessions) == 2
