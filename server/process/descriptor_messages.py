"""Messages between a server and the keeper of its descriptors, over a SOCK_SEQPACKET socket.

One packet is one message: lines of the form KEY=VALUE, and at most one descriptor (SCM_RIGHTS).
FDSTORE, FDSTOREREMOVE, FDNAME and FDPOLL have the meaning of sd_notify(3).

| message of the server | answer |
|---|---|
| KVTIER-KEEPER=1 (the version); the first message | KVTIER-KEEPER, FDSTOREMAX, FDSTORED |
| FDSTORE=1, FDNAME, optionally FDPOLL=0; with a descriptor | none |
| FDSTOREREMOVE=1, FDNAME | none |
| FDLIST=1 | FDSTORE=1, FDNAME and a descriptor, for each kept one; then END=1 |

The keeper answers REFUSED to a server that it does not admit, and closes the connection.
"""

from __future__ import annotations

import array
import contextlib
import os
import re
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = [
    "FDLIST",
    "HELLO",
    "LIST_END",
    "VERSION",
    "Received",
    "close_quietly",
    "is_name",
    "message_of",
    "peer_of",
    "receive",
    "send",
]

HELLO = "KVTIER-KEEPER"
VERSION = "1"
FDLIST = {"FDLIST": "1"}
LIST_END = {"END": "1"}

_MAX_BYTES = 512
_MAX_DESCRIPTORS = 2
"""One more than a message may have, so that the receiver notices a second one."""
_INT_BYTES = array.array("i").itemsize
_CREDENTIALS = struct.Struct("=iII")
_NAME = re.compile(r"[a-z0-9-]{1,64}")
_LINE = re.compile(r"([A-Z-]+)=([ -~]*)")


def is_name(text: str) -> bool:
    """Whether a store accepts this name of a descriptor."""
    return _NAME.fullmatch(text) is not None


@dataclass(slots=True)
class Received:
    """A message; its receiver owns the descriptors."""

    text: bytes
    descriptors: list[int] = field(default_factory=list)
    is_cut: bool = False
    """Whether the kernel dropped text or descriptors, for lack of room or of a free number."""

    def fields(self) -> dict[str, str]:
        """Returns the values by key. Raises `ValueError`."""
        if self.is_cut:
            raise ValueError("a message is too long, or has descriptors that cannot be received")
        found: dict[str, str] = {}
        for line in self.text.decode("ascii", errors="replace").split("\n"):
            match = _LINE.fullmatch(line)
            if match is None or match[1] in found:
                raise ValueError("a message does not consist of different lines KEY=VALUE")
            found[match[1]] = match[2]
        return found

    def close(self) -> None:
        """Closes the descriptors."""
        while self.descriptors:
            close_quietly(self.descriptors.pop())


def close_quietly(descriptor: int) -> None:
    """Closes a descriptor of a foreign file, for which `close` may report an earlier failure."""
    with contextlib.suppress(OSError):
        os.close(descriptor)


def message_of(fields: Mapping[str, str]) -> str:
    """Returns the text of a message."""
    return "\n".join(f"{key}={value}" for key, value in fields.items())


def send(connection: socket.socket, fields: Mapping[str, str], descriptor: int | None = None) -> None:
    """Sends a message without waiting. Raises `OSError`, also if the queue is full."""
    rights = [] if descriptor is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))]
    connection.sendmsg([message_of(fields).encode()], rights, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)


def receive(connection: socket.socket) -> Received:
    """Returns the next message of a non-blocking socket; empty at the end. Raises `OSError`.

    The kernel reports ECONNRESET once if the peer has ended with unread messages, although messages
    of the peer may still be queued.
    """
    for is_last in (False, True):
        try:
            text, ancillary, flags, _ = connection.recvmsg(
                _MAX_BYTES, socket.CMSG_SPACE(_MAX_DESCRIPTORS * _INT_BYTES), socket.MSG_CMSG_CLOEXEC
            )
            break
        except ConnectionResetError:
            if is_last:
                raise
    received = Received(text, is_cut=bool(flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC)))
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            received.descriptors += array.array("i", data[: len(data) // _INT_BYTES * _INT_BYTES])
    return received


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Returns process (0 in another PID namespace) and user of the peer. Raises `OSError`."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(data)
    return pid, uid
