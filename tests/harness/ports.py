"""Ports of the loopback for servers that are to listen at a port that is known before they do."""

from __future__ import annotations

import socket
from typing import Self

__all__ = ["ReservedPort"]


class ReservedPort:
    """A port that nobody else is given until `close`, and that a server which asks for it by its number gets all the same.

    A socket is bound to it and does not listen: whoever connects is refused. A port that was only looked for is free again: the
    kernel may give it to whoever asks for any one, before the server comes up or between two lives of it.
    """

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do, else neither could be bound
        self._socket.bind(("127.0.0.1", 0))
        self.number: int = self._socket.getsockname()[1]

    def close(self) -> None:
        """Gives it up; may be repeated."""
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
