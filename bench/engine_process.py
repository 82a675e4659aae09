"""Engine process of the benchmark of calls: it makes one call per line of its standard input.

    python -m bench.engine_process KIND ENDPOINT BLOCK_BYTES

KIND is `kvtier`, or `minimal` for a `bench.minimal_server` of its own. A line is a JSON list of an
action, the number of the first key and the number of keys. The answer is a line with the seconds
of the call. Each tree has its own processes, so that one run can compare two trees: the package
`kvtier` is that of PYTHONPATH.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from array import array
from collections.abc import Callable, Sequence
from typing import Protocol

from kvtier.client import StoreStatus
from kvtier.cuda.host.copy import addresses_of, copy_batch
from kvtier.cuda.host.region import HostRegion

from .measure import timed
from .minimal_server import HEAD, Kind
from .pool import BATCH, copy_blocks, page_aligned
from .workload import connect, keys_of

MINIMAL_BYTES = 512 << 20
"""Region of the minimal server."""
_POOL_BYTES = 512 << 20


class Engine(Protocol):
    def store(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> int: ...
    def load(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> int: ...
    def look_up(self, keys: Sequence[bytes]) -> int: ...
    def reset(self) -> object: ...


class KvtierEngine:
    def __init__(self, endpoint: str, block_bytes: int) -> None:
        self._client = connect(endpoint, "shm", block_bytes)

    def store(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> int:
        return self._client.store(keys, buffers).count(StoreStatus.GRANTED)

    def load(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> int:
        return self._client.load(keys, buffers)

    def look_up(self, keys: Sequence[bytes]) -> int:
        lease = self._client.lookup(keys)
        lease.release()
        return lease.prefix_hits

    def reset(self) -> object:
        return self._client.reset(wait=10)


class MinimalEngine:
    """Client of a minimal server. Its region exists in this process only."""

    def __init__(self, block_bytes: int) -> None:
        self._region = HostRegion.create(MINIMAL_BYTES)
        self._region.back(0, MINIMAL_BYTES)
        self._region.memory[:MINIMAL_BYTES] = bytes(MINIMAL_BYTES)
        self._socket, theirs = socket.socketpair()
        command = [sys.executable, "-m", "bench.minimal_server", str(theirs.fileno()), str(block_bytes)]
        subprocess.Popen([*command, str(MINIMAL_BYTES // block_bytes)], pass_fds=[theirs.fileno()])
        theirs.close()

    def call(self, kind: Kind, body: bytes) -> bytes:
        self._socket.sendall(HEAD.pack(len(body), kind) + body)
        answer = self._socket.recv(1 << 20)
        length = HEAD.unpack_from(answer)[0] + HEAD.size
        while len(answer) < length:
            more = self._socket.recv(1 << 20)
            if not more:
                raise ConnectionError("the minimal server has ended")
            answer += more
        return answer[HEAD.size :]

    def store(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> int:
        sources, sizes = addresses_of(buffers)
        answer = self.call(Kind.PREPARE_STORE, b"".join(keys))
        places = self._places(answer)
        copy_batch(places, sources, sizes)
        self.call(Kind.COMPLETE_STORE, answer[:8])
        return len(places)

    def load(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> int:
        targets, sizes = addresses_of(buffers, writable=True)
        answer = self.call(Kind.LOOKUP, b"".join(keys))
        places = self._places(answer)
        copy_batch(targets[: len(places)], places, sizes[: len(places)])
        self.call(Kind.RELEASE, answer[:8])
        return len(places)

    def look_up(self, keys: Sequence[bytes]) -> int:
        answer = self.call(Kind.LOOKUP, b"".join(keys))
        if hits := len(answer) // 8 - 1:
            self.call(Kind.RELEASE, answer[:8])
        return hits

    def reset(self) -> object:
        """Does nothing: this server evicts the oldest blocks."""

    def echo(self, keys: Sequence[bytes]) -> int:
        """A call with the bytes of a lookup, answered with the same bytes."""
        self.call(Kind.ECHO, b"".join(keys))
        return len(keys)

    def _places(self, answer: bytes) -> list[int]:
        base = self._region.address
        return [base + offset for offset in array("Q", answer[8:])]


class Actions:
    """The calls of an engine, with buffers that are not in the caches."""

    def __init__(self, engine: Engine, block_bytes: int) -> None:
        self._engine = engine
        self._blocks = page_aligned(_POOL_BYTES).reshape(-1, BATCH, block_bytes)
        self._blocks[:] = 7
        self._turn = 0

    def _batch(self, distance: int = 0) -> list[memoryview]:
        return [block.data for block in self._blocks[(self._turn + distance) % len(self._blocks)]]

    def prepared(self, action: str, keys: list[bytes]) -> Callable[[], object]:
        """Returns the call to measure."""
        self._turn += 1
        engine = self._engine
        if action == "reset":
            return engine.reset
        if action == "memcpy":
            half = len(self._blocks) // 2
            to, start = self._blocks[self._turn % half], self._blocks[self._turn % half + half]
            return lambda: copy_blocks(to, start)
        if action == "store":
            buffers = (self._batch() * (len(keys) // BATCH + 1))[: len(keys)]
            return lambda: _check(engine.store(keys, buffers), len(keys))
        if action == "load":
            buffers = self._batch(1)
            return lambda: _check(engine.load(keys, buffers), len(keys))
        if action == "echo":
            assert isinstance(engine, MinimalEngine)
            return lambda: engine.echo(keys)
        return lambda: _check(engine.look_up(keys), len(keys) if action == "hits" else 0)


def _check(found: int, expected: int) -> None:
    if found != expected:
        raise RuntimeError(f"{found} blocks instead of {expected}")


def main() -> None:
    kind, endpoint, block_bytes = sys.argv[1], sys.argv[2], int(sys.argv[3])
    engine: Engine = MinimalEngine(block_bytes) if kind == "minimal" else KvtierEngine(endpoint, block_bytes)
    actions = Actions(engine, block_bytes)
    for line in sys.stdin:
        action, first, count = json.loads(line)
        call = actions.prepared(action, keys_of("unknown" if action == "misses" else endpoint, first, count))
        print(timed(call), flush=True)


if __name__ == "__main__":
    main()
