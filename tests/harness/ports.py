"""Loopback ports for servers whose port must be known before they start."""

from __future__ import annotations

import socket
from typing import Self

__all__ = ["ReservedPort"]


class ReservedPort:
    """A port reserved until `close`, which a server can bind by its number.

    The reserving socket is bound but does not listen, so connections are refused. Without it the
    kernel could give the port to another process before the server starts or between two starts.
    """

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._socket.setsockopt(
            socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
        )  # as servers do; otherwise neither could bind
        self._socket.bind(("127.0.0.1", 0))
        self.number: int = self._socket.getsockname()[1]

    def close(self) -> None:
        """Releases the port. May be repeated."""
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
