"""`kvtier keeper`: holds the memory of the CPU tier while the server restarts.

Besides the standard library, it imports only modules without packages, so that the process stays
small.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import resource
import select
import signal
import socket
import sys
import time
from pathlib import Path

from ...protos.endpoint import MAX_SOCKET_PATH_BYTES, Endpoint
from ..printable import printable
from ..process.keeper import Keeper
from ..rpc.listening_sockets import SocketClaim, SocketError
from .console import EXIT_FAILURE, EXIT_USAGE, refuse

__all__ = ["run"]

_OWN_DESCRIPTORS = 64
"""Descriptors that the process needs for connections and itself."""


def run(options: argparse.Namespace) -> int:
    path = Path(options.socket).absolute()
    if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES or "\0" in options.socket:
        return refuse([f"--socket: must be a path of at most {MAX_SOCKET_PATH_BYTES} bytes"], EXIT_USAGE)
    try:
        claim = SocketClaim(Endpoint(path=str(path)), "another keeper listens there")
    except SocketError as error:
        return refuse([str(error)], EXIT_FAILURE)
    with contextlib.ExitStack() as closers:
        closers.callback(claim.release)
        stop = _stop_signal(closers)
        try:
            listener = closers.enter_context(_listen(path))
        except OSError as error:
            return refuse([f"unix:{path}: {error.strerror or error}"], EXIT_FAILURE)
        most = min(options.max_descriptors, _raised_limit() - _OWN_DESCRIPTORS)
        if most < options.max_descriptors:
            _log(f"keeps at most {most} descriptors: raise the hard limit of open files (ulimit -Hn)")
        _log(f"listens on unix:{path}; process {os.getpid()}")
        Keeper(listener, most=most, forget_after_seconds=options.forget_after, log=_log).run(stop)
    return 0


def _stop_signal(closers: contextlib.ExitStack) -> int:
    """Returns a descriptor that is readable after SIGTERM or SIGINT.

    SIGHUP is ignored, because the keeper must survive the end of its terminal.
    """
    reader, writer = os.pipe()
    for end in (reader, writer):
        closers.callback(os.close, end)
        os.set_blocking(end, False)
    closers.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(writer, warn_on_full_buffer=False))
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: None)
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:  # as in a background job of a script
        signal.signal(signal.SIGINT, lambda *_: None)
    return reader


def _listen(path: Path) -> socket.socket:
    """Returns the listening socket. The claim of `path` must be held. Raises `OSError`.

    The socket gets its name when it already listens, and replaces that of a killed keeper.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    unnamed = path.with_name(f"{path.name}.new")
    mask = os.umask(0o177)
    try:
        unnamed.unlink(missing_ok=True)
        listener.bind(str(unnamed))
        listener.listen()
        unnamed.rename(path)
    except BaseException:
        listener.close()
        raise
    finally:
        os.umask(mask)
    return listener


def _raised_limit() -> int:
    """Raises the soft limit of open files to the hard one; returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


def _log(text: str) -> None:
    """Writes a line to standard error, unless this would wait or fail."""
    line = f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())} kvtier keeper: {printable(text)}\n"
    poll = select.poll()
    with contextlib.suppress(OSError):
        poll.register(2, select.POLLOUT)
        if any(events & select.POLLOUT for _, events in poll.poll(0)):
            os.write(2, line.encode(errors="backslashreplace"))
