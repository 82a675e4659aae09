"""Socket of the service manager: address and messages of sd_notify(3)."""

from __future__ import annotations

import array
import socket
from collections.abc import Mapping, Sequence

__all__ = ["notify", "notify_address"]


def notify_address(environment: Mapping[str, str]) -> str | None:
    """Returns the address in `NOTIFY_SOCKET`; None without a service manager.

    "@" stands for the NUL byte of an abstract socket. Other kinds of address (vsock) are ignored.
    """
    path = environment.get("NOTIFY_SOCKET", "")
    return {"/": path, "@": f"\0{path[1:]}"}.get(path[:1])


def notify(address: str, message: str, descriptors: Sequence[int] = ()) -> None:
    """Sends one datagram without waiting. Raises `OSError`, also if the queue is full."""
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK) as sender:
        sender.sendmsg([message.encode()], rights, socket.MSG_NOSIGNAL, address)
