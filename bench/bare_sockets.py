"""Sockets without kvtier: raw bytes between two processes, the limit of the socket protocol.

`push` and `pull` read bytes from memory and write them to memory, without checksums: over TCP, or
over TLS with `ssl.SSLSocket`.

`python -m bench.bare_sockets [CERT KEY]` is the server. It prints its port and ends with its
standard input.
"""

from __future__ import annotations

import socket
import ssl
import struct
import subprocess
import sys
import threading
from types import TracebackType
from typing import Self

from kvtier.cuda.host.memory import tune_malloc
from kvtier.protos.wire.part_sequence import FRAME_BYTES

from .certificate import Certificate

__all__ = ["BareSockets"]

MEMORY_BYTES = 256 << 20
"""At each end; larger than the caches."""
_REQUEST = struct.Struct("<?Q")  # whether this is a push; number of bytes


class _Memory:
    """Memory that is read and written in order."""

    def __init__(self) -> None:
        self._memory = memoryview(bytearray(b"\1") * MEMORY_BYTES)
        self._place = 0

    def send(self, connection: socket.socket, nbytes: int) -> None:
        for start in range(0, nbytes, FRAME_BYTES):
            connection.sendall(self._next(min(FRAME_BYTES, nbytes - start)))

    def receive(self, connection: socket.socket, nbytes: int) -> None:
        for start in range(0, nbytes, FRAME_BYTES):
            _fill(connection, self._next(min(FRAME_BYTES, nbytes - start)))

    def _next(self, nbytes: int) -> memoryview:
        if self._place + nbytes > MEMORY_BYTES:
            self._place = 0
        self._place += nbytes
        return self._memory[self._place - nbytes : self._place]


class BareSockets:
    """The server as a child process, and a connection to it."""

    def __init__(self, certificate: Certificate | None = None) -> None:
        files = [] if certificate is None else [certificate.cert, certificate.key]
        command = [sys.executable, "-m", "bench.bare_sockets", *files]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self._connection = socket.create_connection(("127.0.0.1", int(self._process.stdout.readline())))
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if certificate is not None:
            context = ssl.create_default_context(cafile=certificate.cert)
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            self._connection = context.wrap_socket(self._connection, server_hostname="127.0.0.1")
        self._memory = _Memory()

    def push(self, nbytes: int) -> None:
        """Sends bytes of memory and waits for the answer."""
        self._connection.sendall(_REQUEST.pack(True, nbytes))
        self._memory.send(self._connection, nbytes)
        _fill(self._connection, memoryview(bytearray(1)))

    def pull(self, nbytes: int) -> None:
        """Receives bytes to memory."""
        self._connection.sendall(_REQUEST.pack(False, nbytes))
        self._memory.receive(self._connection, nbytes)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._connection.close()
        self._process.communicate(timeout=10)


def _fill(connection: socket.socket, view: memoryview) -> None:
    """Receives until `view` is full. Raises EOFError if the peer has closed the connection."""
    while view:
        received = connection.recv_into(view)
        if not received:
            raise EOFError
        view = view[received:]


def _serve(listener: socket.socket, context: ssl.SSLContext | None) -> None:
    connection, _ = listener.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if context is not None:
        connection = context.wrap_socket(connection, server_side=True)
    memory = _Memory()
    request = bytearray(_REQUEST.size)
    while True:
        try:
            _fill(connection, memoryview(request))
        except EOFError:
            return
        is_push, nbytes = _REQUEST.unpack(request)
        if is_push:
            memory.receive(connection, nbytes)
            connection.sendall(b"\0")
        else:
            memory.send(connection, nbytes)


def _main(files: list[str]) -> None:
    context = None
    if files:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.load_cert_chain(*files)
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=_serve, args=(listener, context), daemon=True).start()
    print(listener.getsockname()[1], flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    tune_malloc()
    _main(sys.argv[1:])
