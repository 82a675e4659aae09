"""Bulk process: `python -m kvtier.server.bulk.main` with three inherited descriptors."""

from __future__ import annotations

import logging
import os
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import grpc

from ...cuda.host.memory import tune_malloc
from ...cuda.host.region import HostRegion
from ...protos.endpoint import Endpoint
from ...protos.wire.grpc_frames import FRAME_BYTES
from ..auth.tls import server_credentials
from ..process.child_main import connect
from .broker_client import BrokerClient
from .grpc_streams import GrpcStreamServer
from .messages import Setup
from .tcp_streams import TcpStreamServer

__all__ = ["MAX_STREAMS", "listen", "main"]

_log = logging.getLogger(__name__)

MAX_STREAMS = 64
"""Maximum number of gRPC streams; each has a thread. Further clients use the server process."""

_MESSAGE_OVERHEAD_BYTES = 64 << 10
_NICE = 5
"""Nice value 5 gives a third of the server's CPU weight, so busy streams do not delay calls."""


def main(socket_fd: int, region_fd: int, handover_fd: int) -> None:
    """Serves until the server has ended. Does not return."""
    broker = BrokerClient(connect(socket_fd))
    _lower_priority()
    tune_malloc()
    sys.setswitchinterval(1e-4)  # as in the server: see `serve`
    os.umask(0o177)  # new sockets are accessible to their owner only
    setup = broker.setup()
    region = HostRegion.attach(region_fd, setup.region_bytes)
    os.close(region_fd)
    server = grpc.server(
        ThreadPoolExecutor(MAX_STREAMS, thread_name_prefix="kvtier-bulk"),
        maximum_concurrent_rpcs=MAX_STREAMS,
        options=[
            ("grpc.max_receive_message_length", setup.max_message_bytes + _MESSAGE_OVERHEAD_BYTES),
            ("grpc.max_send_message_length", -1),
            ("grpc.so_reuseport", 0),
            ("grpc.keepalive_time_ms", 10_000),
            ("grpc.keepalive_timeout_ms", 5_000),
            ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
            # Connections without a handshake are closed.
            ("grpc.server_handshake_timeout_ms", 5_000),
        ],
    )
    frame_bytes = min(setup.max_frame_bytes, FRAME_BYTES)
    server.add_generic_rpc_handlers((GrpcStreamServer(broker, region, frame_bytes).handler(),))
    credentials = None if setup.tls is None else server_credentials(setup.tls[0], setup.tls[1], setup.tls[2] or None)
    port = listen(server, setup, credentials)
    tcp_port = 0
    if setup.tcp:
        tcp_server = TcpStreamServer(broker, region, frame_bytes, socket.socket(fileno=handover_fd))
        tcp_port = tcp_server.listen(setup.hosts, setup.tcp_port, other=setup.any_tcp_port)
    server.start()
    broker.start(port, tcp_port)
    server.wait_for_termination()


def _lower_priority() -> None:
    """Lowers the priority of this process below the server's. Later threads inherit it."""
    with suppress(OSError):  # a sandbox may forbid it
        os.nice(_NICE)


def listen(server: grpc.Server, setup: Setup, credentials: grpc.ServerCredentials | None = None) -> int:
    """Binds as many endpoints as possible; returns the TCP port, or 0 without a TCP endpoint."""
    port = 0
    for host in setup.hosts:
        # Try the port of the previous child first, because clients know it.
        for wanted in (port,) if port else (setup.port, 0) if setup.any_port else (setup.port,):
            bound = _bind(server, Endpoint(host=host, port=wanted).target, credentials)
            if bound:
                port = bound
                break
    for path in setup.paths:
        _bind(server, Endpoint(path=path).target, None)
    return port


def _bind(server: grpc.Server, target: str, credentials: grpc.ServerCredentials | None) -> int:
    try:
        if credentials is not None:
            return int(server.add_secure_port(target, credentials))
        return int(server.add_insecure_port(target))
    except RuntimeError as error:
        _log.warning("bulk streams are not served at %s: %s", target, error)
        return 0


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]))
