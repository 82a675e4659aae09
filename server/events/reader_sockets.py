"""Listening sockets for readers of events: TCP, or a Unix socket that only its owner can open."""

from __future__ import annotations

import socket
from typing import Final

from ...protos.endpoint import EndpointError, parse_endpoint
from ..rpc.listening_sockets import SocketClaim, SocketError, bind_tcp

__all__ = ["SEND_BUFFER_BYTES", "PublisherError", "ReaderSocket"]

SEND_BUFFER_BYTES: Final = 128 << 10
"""The kernel doubles it. Otherwise it may keep 4 MiB for each reader that does not read."""
_RECEIVE_BUFFER_BYTES = 8 << 10
_BACKLOG = 128
_TCP_OPTIONS = {
    socket.TCP_NODELAY: 1,
    # Detect within 30 s that the host of a reader has failed, also without PING.
    socket.TCP_KEEPIDLE: 15,
    socket.TCP_KEEPINTVL: 5,
    socket.TCP_KEEPCNT: 3,
    socket.TCP_USER_TIMEOUT: 30_000,
}


class PublisherError(Exception):
    """The publisher cannot start; the message is for the operator."""


class ReaderSocket:
    """Listening sockets of an address like `tcp://HOST:PORT` or `ipc:///PATH`.

    `*` and wildcard addresses accept IPv4 and IPv6. A name stands for all of its addresses.
    """

    def __init__(self, address: str) -> None:
        """Raises PublisherError."""
        scheme, _, rest = address.partition("://")
        self._claim: SocketClaim | None = None
        self._sockets: list[socket.socket] = []
        try:
            if scheme == "ipc":
                self._listen_unix(rest)
            else:
                self._listen_tcp(rest)
        except (OSError, EndpointError, SocketError) as error:
            self.close()
            cause = error.strerror if isinstance(error, OSError) and error.strerror else error
            raise PublisherError(f"cannot publish events on {address}: {cause}") from error

    def filenos(self) -> list[int]:
        return [each.fileno() for each in self._sockets]

    def close(self) -> None:
        for each in self._sockets:
            each.close()
        if self._claim is not None:
            self._claim.release()

    def _listen_unix(self, path: str) -> None:
        endpoint = parse_endpoint(f"unix:{path}")
        self._claim = claim = SocketClaim(endpoint)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._sockets.append(listener)
        listener.bind(str(claim.path))
        claim.restrict()  # before `listen`: until then no process can connect
        listener.listen(_BACKLOG)

    def _listen_tcp(self, address: str) -> None:
        endpoint = parse_endpoint(address)
        self._sockets = bind_tcp([endpoint.host], endpoint.port)
        for listener in self._sockets:  # accepted connections inherit the options
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER_BYTES)
            for option, value in _TCP_OPTIONS.items():
                listener.setsockopt(socket.IPPROTO_TCP, option, value)
