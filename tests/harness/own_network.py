"""Network namespace of a test, with only a loopback interface.

For servers that listen on all addresses: other hosts and other tests cannot reach them. Needs root.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import socket
import struct
from collections.abc import Iterator

__all__ = ["own_network"]

_NEW_NETWORK = 0x40000000
_GET_FLAGS, _SET_FLAGS, _UP = 0x8913, 0x8914, 0x1
_libc = ctypes.CDLL(None, use_errno=True)


@contextlib.contextmanager
def own_network() -> Iterator[None]:
    """Moves the calling thread to a new namespace, and back at the end.

    Threads and processes that it starts meanwhile are in the new namespace. Raises OSError if the
    user may not create one.
    """
    with contextlib.ExitStack() as opened:
        before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        opened.callback(os.close, before)
        _check(_libc.unshare(_NEW_NETWORK))
        opened.callback(lambda: _check(_libc.setns(before, _NEW_NETWORK)))
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            request = struct.pack("16sH14x", b"lo", 0)
            flags = struct.unpack("16sH14x", fcntl.ioctl(any_socket, _GET_FLAGS, request))[1]
            fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack("16sH14x", b"lo", flags | _UP))
        yield


def _check(result: int) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
