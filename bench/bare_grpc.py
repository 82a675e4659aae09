"""gRPC streams of raw bytes between two processes: the limit of kvtier's gRPC transport.

`push` and `pull` repeat one frame, which stays in the processor's caches. `push_memory` and
`pull_memory` read each frame from memory and write it to memory. Frames have no checksums.

`python -m bench.bare_grpc ADDRESS [CERT KEY]` is the server. It prints its port. It ends when its
standard input is closed.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc
import numpy as np
from numpy.typing import NDArray

from kvtier.cuda.host.memory import tune_malloc
from kvtier.protos.wire.part_sequence import FRAME_BYTES

from .certificate import Certificate

__all__ = ["BareGrpc"]

OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
TIMEOUT = 60.0
MEMORY_BYTES = 256 << 20
"""Memory of each process; larger than the caches."""


class _Memory:
    """Ring of memory: source and destination of frames."""

    def __init__(self) -> None:
        self._memory = np.ones(MEMORY_BYTES, np.uint8)
        self._place = 0

    def frames(self, nbytes: int) -> Iterator[bytes]:
        for start in range(0, nbytes, FRAME_BYTES):
            yield self._next(min(FRAME_BYTES, nbytes - start)).tobytes()

    def take(self, frame: bytes) -> int:
        """Writes a frame to the next place; returns its size."""
        np.copyto(self._next(len(frame)), np.frombuffer(frame, np.uint8))
        return len(frame)

    def _next(self, nbytes: int) -> NDArray[np.uint8]:
        if self._place + nbytes > MEMORY_BYTES:
            self._place = 0
        self._place += nbytes
        return self._memory[self._place - nbytes : self._place]


class BareGrpc:
    """Client of the gRPC server, which it starts as a child process."""

    def __init__(self, address: str, certificate: Certificate | None = None) -> None:
        files = [] if certificate is None else [certificate.cert, certificate.key]
        command = [sys.executable, "-m", "bench.bare_grpc", address, *files]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        stdout = self._process.stdout
        assert stdout is not None
        port = stdout.readline().strip()
        target = address if address.startswith("unix:") else f"{address.rpartition(':')[0]}:{port}"
        if certificate is None:
            self._channel = grpc.insecure_channel(target, OPTIONS)
        else:
            roots = grpc.ssl_channel_credentials(Path(certificate.cert).read_bytes())
            self._channel = grpc.secure_channel(target, roots, OPTIONS)
        self._push = self._channel.stream_unary("/bare/Push")
        self._pull = self._channel.unary_stream("/bare/Pull")
        self._echo = self._channel.unary_unary("/bare/Echo")
        self._push_memory = self._channel.stream_unary("/bare/PushMemory")
        self._pull_memory = self._channel.unary_stream("/bare/PullMemory")
        self._frame = bytes(FRAME_BYTES)
        self._memory = _Memory()

    def push(self, nbytes: int) -> None:
        """Sends bytes in one stream and waits for the answer."""
        self._push(self._frames(nbytes), timeout=TIMEOUT)

    def pull(self, nbytes: int) -> None:
        """Receives bytes in one stream."""
        received = sum(len(frame) for frame in self._pull(b"%d" % nbytes, timeout=TIMEOUT))
        if received != nbytes:
            raise RuntimeError(f"{received} bytes were received instead of {nbytes}")

    def push_memory(self, nbytes: int) -> None:
        """Sends bytes of memory in one stream; the server writes them to memory."""
        self._push_memory(self._memory.frames(nbytes), timeout=TIMEOUT)

    def pull_memory(self, nbytes: int) -> None:
        """Receives bytes in one stream and writes them to memory."""
        received = sum(map(self._memory.take, self._pull_memory(b"%d" % nbytes, timeout=TIMEOUT)))
        if received != nbytes:
            raise RuntimeError(f"{received} bytes were received instead of {nbytes}")

    def echo(self, request: bytes) -> bytes:
        """Makes a unary call with the sizes of a lookup: the response has every 32nd byte."""
        answer: bytes = self._echo(request, timeout=TIMEOUT)
        return answer

    def _frames(self, nbytes: int) -> Iterator[bytes]:
        for start in range(0, nbytes, FRAME_BYTES):
            yield self._frame if nbytes - start >= FRAME_BYTES else self._frame[: nbytes - start]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._channel.close()
        self._process.communicate(timeout=10)


def _serve(address: str, *files: str) -> None:
    frame = bytes(FRAME_BYTES)
    memory = _Memory()

    def push(frames: Iterator[bytes], _: Any) -> bytes:
        return b"%d" % sum(map(len, frames))

    def pull(request: bytes, _: Any) -> Iterator[bytes]:
        nbytes = int(request)
        for start in range(0, nbytes, FRAME_BYTES):
            yield frame if nbytes - start >= FRAME_BYTES else frame[: nbytes - start]

    def push_memory(frames: Iterator[bytes], _: Any) -> bytes:
        return b"%d" % sum(map(memory.take, frames))

    def pull_memory(request: bytes, _: Any) -> Iterator[bytes]:
        return memory.frames(int(request))

    def echo(request: bytes, _: Any) -> bytes:
        return request[::32]

    handlers = {
        "Push": grpc.stream_unary_rpc_method_handler(push),
        "Pull": grpc.unary_stream_rpc_method_handler(pull),
        "PushMemory": grpc.stream_unary_rpc_method_handler(push_memory),
        "PullMemory": grpc.unary_stream_rpc_method_handler(pull_memory),
        "Echo": grpc.unary_unary_rpc_method_handler(echo),
    }
    server = grpc.server(ThreadPoolExecutor(4), options=OPTIONS)
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("bare", handlers)])
    if files:
        cert, key = (Path(file).read_bytes() for file in files)
        port = server.add_secure_port(address, grpc.ssl_server_credentials([(key, cert)]))
    else:
        port = server.add_insecure_port(address)
    server.start()
    print(port, flush=True)
    sys.stdin.read()
    server.stop(0).wait()


if __name__ == "__main__":
    tune_malloc()
    _serve(*sys.argv[1:])
