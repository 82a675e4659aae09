"""Minimal server of block slots: the limit of what a server in plain Python can reach.

It has the two calls of a store and of a load, an index of runs, and one round trip per call. It has
no sessions, checks, tenants, policies, statistics or tiers, and its messages have no fields.

    python -m bench.minimal_server DESCRIPTOR BLOCK_BYTES SLOTS

It serves the socket with this descriptor until the peer closes it. A frame has a length, a kind
and a body. Offsets and ids are little-endian numbers of eight bytes.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import sys
from array import array
from collections import deque
from enum import IntEnum

__all__ = ["HEAD", "KEY_BYTES", "Kind"]

KEY_BYTES = 36
HEAD = struct.Struct("<IB")
_ID = struct.Struct("<Q")


class Kind(IntEnum):
    PREPARE_STORE = 1
    COMPLETE_STORE = 2
    LOOKUP = 3
    RELEASE = 4
    ECHO = 5


class Run:
    """The blocks that one store has brought, in the order of their keys."""

    __slots__ = ("keys", "offsets", "pins")

    def __init__(self, keys: bytes, offsets: array[int]) -> None:
        self.keys = keys
        self.offsets = offsets
        self.pins = 0


class MinimalServer(asyncio.Protocol):
    def __init__(self, block_bytes: int, slots: int) -> None:
        self._free = array("Q", range(0, slots * block_bytes, block_bytes))
        self._runs: dict[bytes, tuple[Run, int]] = {}
        """Run of each key, and the position of the key in bytes."""
        self._order: deque[Run] = deque()
        self._open: dict[int, tuple[bytes, array[int]] | list[Run]] = {}
        self._last_id = 0
        self._received = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, _: Exception | None) -> None:
        asyncio.get_running_loop().stop()

    def data_received(self, data: bytes) -> None:
        self._received += data
        if len(self._received) < HEAD.size:
            return
        length, kind = HEAD.unpack_from(self._received)
        if len(self._received) < HEAD.size + length:
            return
        body = bytes(self._received[HEAD.size :])
        self._received.clear()
        answer = self._answer(kind, body)
        self._transport.write(HEAD.pack(len(answer), kind) + answer)

    def _answer(self, kind: int, body: bytes) -> bytes:
        if kind == Kind.PREPARE_STORE:
            offsets = self._take(len(body) // KEY_BYTES)
            return self._opened((body, offsets)) + offsets.tobytes()
        if kind == Kind.COMPLETE_STORE:
            self._store(*self._open.pop(_ID.unpack(body)[0]))  # type: ignore[misc]
            return b"\0"
        if kind == Kind.LOOKUP:
            return self._look_up(body)
        if kind == Kind.RELEASE:
            for run in self._open.pop(_ID.unpack(body)[0]):
                run.pins -= 1  # type: ignore[union-attr]
            return b"\0"
        return body

    def _opened(self, what: tuple[bytes, array[int]] | list[Run]) -> bytes:
        self._last_id += 1
        self._open[self._last_id] = what
        return _ID.pack(self._last_id)

    def _take(self, count: int) -> array[int]:
        while len(self._free) < count:
            run = self._order.popleft()
            if run.pins:
                self._order.append(run)
                continue
            for at in range(0, len(run.keys), KEY_BYTES):
                del self._runs[run.keys[at : at + KEY_BYTES]]
            self._free += run.offsets
        taken = self._free[:count]
        del self._free[:count]
        return taken

    def _store(self, keys: bytes, offsets: array[int]) -> None:
        run = Run(keys, offsets)
        self._order.append(run)
        self._runs.update((keys[at : at + KEY_BYTES], (run, at)) for at in range(0, len(keys), KEY_BYTES))

    def _look_up(self, keys: bytes) -> bytes:
        """Pins the leading hits; answers the id of their lease (0 without hits) and the offsets."""
        at, found, pinned = 0, array("Q"), []
        while at < len(keys):
            place = self._runs.get(keys[at : at + KEY_BYTES])
            if place is None:
                break
            run, start = place
            length = min(len(run.keys) - start, len(keys) - at)
            if run.keys[start : start + length] != keys[at : at + length]:
                length = KEY_BYTES  # the runs part somewhere: one key at a time
            found += run.offsets[start // KEY_BYTES : (start + length) // KEY_BYTES]
            run.pins += 1
            pinned.append(run)
            at += length
        return (self._opened(pinned) if pinned else _ID.pack(0)) + found.tobytes()


def main() -> None:
    descriptor, block_bytes, slots = map(int, sys.argv[1:4])
    loop = asyncio.new_event_loop()
    server = MinimalServer(block_bytes, slots)
    loop.run_until_complete(loop.create_connection(lambda: server, sock=socket.socket(fileno=descriptor)))
    loop.run_forever()


if __name__ == "__main__":
    main()
