"""Process with the client of Mooncake Store: `python -m kvtier.tiers.remote.mooncake_child`.

`mooncake_process.py` starts it. It maps the host region and makes the calls of the tier, so that
Mooncake moves bytes between its nodes and the region without a copy. For RDMA it registers the
region with Mooncake once. For TCP it does not: Mooncake needs no registration there, and its port
would let every peer read and write registered memory.

The server kills the process if a call does not end: only so Mooncake cannot write to memory that
has another use by then.

The control socket passes one connection per worker thread of the server. Each connection has a
thread here. A request and its answer are JSON with a length of 4 bytes before it.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import mmap
import os
import signal
import socket
import struct
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["LENGTH", "READY", "REGION", "STAGING", "read_exactly"]

LENGTH = struct.Struct("<I")
"""Size of the JSON text that follows."""
REGION = 0
"""Area of a piece: the host region."""
STAGING = 1
"""Area of a piece: the connection's own memory, for bytes that are not in the region."""
READY = b"ready"
"""First message on the control socket after a successful start; otherwise an error text."""

_PR_SET_PDEATHSIG = 1
_NO_SEGMENT = 0
_NO_BUFFER = 0
_ADDRESS = (ctypes.c_char * 0).from_buffer
_Move = Callable[[list[str], list[Any], list[Any]], Sequence[int]]
"""Call of Mooncake with names, addresses and sizes."""


class _Area:
    """Shared memory that Mooncake uses until `close`; its first byte has the offset `begin`."""

    def __init__(self, store: Any, fd: int, nbytes: int, begin: int = 0, *, register: bool) -> None:
        self._map = mmap.mmap(fd, nbytes)
        self._registered_at = store if register else None
        self.begin = begin
        self._address = ctypes.addressof(_ADDRESS(self._map))
        if register and (code := store.register_buffer(self._address, nbytes)):
            raise OSError(f"Mooncake cannot register {nbytes} bytes of memory (error {code}); see its log")

    def address_of(self, offset: int) -> int:
        return self._address + offset - self.begin

    def close(self) -> None:
        if self._registered_at is not None:
            self._registered_at.unregister_buffer(self._address)
        self._map.close()


class _Connection:
    """Calls of one worker thread of the server."""

    def __init__(self, store: Any, region: Sequence[_Area], connection: socket.socket, *, register: bool) -> None:
        """`region`: its pools in the order of their offsets."""
        self._store = store
        self._register = register
        self._connection = connection
        self._region = region
        self._staging: _Area | None = None

    def serve(self) -> None:
        """Answers requests until the server closes the connection."""
        try:
            while request := self._receive():
                answer = json.dumps(self._answer(**request)).encode()
                self._connection.sendall(LENGTH.pack(len(answer)) + answer)
        except OSError:
            pass  # the server no longer waits for the answer
        finally:
            self._connection.close()
            if self._staging is not None:
                self._staging.close()

    def _receive(self) -> dict[str, Any] | None:
        """Returns the next request. Maps new staging memory whose descriptor comes with it."""
        head, fds, _, _ = socket.recv_fds(self._connection, LENGTH.size, 1)
        if not head:
            return None
        head += read_exactly(self._connection, LENGTH.size - len(head))
        request: dict[str, Any] = json.loads(read_exactly(self._connection, *LENGTH.unpack(head)))
        staging_bytes = request.pop("staging_bytes", 0)
        for fd in fds:
            if self._staging is not None:
                self._staging.close()
            self._staging = _Area(self._store, fd, staging_bytes, register=self._register)
            os.close(fd)
        return request

    def _answer(self, call: str, names: list[str], pieces: Sequence[Sequence[Sequence[int]]] = ()) -> list[int]:
        """Returns Mooncake's code of each name. `pieces` are triples of area, offset and size."""
        match call:
            case "exist":
                codes = self._store.batch_is_exist(names)
            case "size":
                codes = [self._store.get_size(name) for name in names]
            case "remove":
                codes = self._store.batch_remove(names, True)  # also if a read has leased the value
            case "put":
                codes = self._move(self._store.batch_put_from, self._store.batch_put_from_multi_buffers, names, pieces)
            case _:
                codes = self._move(self._store.batch_get_into, self._store.batch_get_into_multi_buffers, names, pieces)
        return list(map(int, codes))

    def _move(
        self, move: _Move, move_pieces: _Move, names: list[str], pieces: Sequence[Sequence[Sequence[int]]]
    ) -> Sequence[int]:
        """Calls `move` if each value is one piece: that is faster than `move_pieces`."""
        addresses = [[self._address_of(area, offset) for area, offset, _ in value] for value in pieces]
        sizes = [[nbytes for _, _, nbytes in value] for value in pieces]
        if any(len(value) != 1 for value in pieces):
            return move_pieces(names, addresses, sizes)
        return move(names, [address for [address] in addresses], [nbytes for [nbytes] in sizes])

    def _address_of(self, area: int, offset: int) -> int:
        if area == STAGING:
            return self._staging.address_of(offset) if self._staging is not None else 0
        return next((pool.address_of(offset) for pool in reversed(self._region) if pool.begin <= offset), 0)


def read_exactly(connection: socket.socket, nbytes: int) -> bytes:
    """Raises OSError at the end of the connection."""
    data = bytearray(nbytes)
    view = memoryview(data)
    while view:
        received = connection.recv_into(view)
        if not received:
            raise ConnectionResetError("the connection was closed")
        view = view[received:]
    return bytes(data)


def _start(settings: dict[str, str]) -> Any:
    """Connects to the master; returns the client. Takes 90 s if the master does not answer."""
    os.environ["MC_STORE_CLIENT_METRIC"] = "0"  # no metrics of its own
    store = importlib.import_module("mooncake.store").MooncakeDistributedStore()
    code = store.setup(
        settings["local_host"],
        settings["metadata"],
        _NO_SEGMENT,
        _NO_BUFFER,
        settings["protocol"],
        settings["device"],
        settings["master"],
    )
    if code:
        raise OSError(f"Mooncake cannot start its client (error {code}); see its log")
    return store


def main() -> None:
    pools: list[tuple[int, int, int]] = json.loads(sys.argv[2])
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    with socket.socket(fileno=int(sys.argv[1])) as control:
        settings = json.loads(sys.argv[3])
        register = settings["protocol"] != "tcp"
        try:
            store = _start(settings)
            region = [_Area(store, fd, end - begin, begin, register=register) for begin, end, fd in pools]
        except (ImportError, OSError) as error:
            control.sendall(f"{error}".encode()[:1000])
            return
        control.sendall(READY)
        while True:
            message, fds, _, _ = socket.recv_fds(control, 1, 1)
            if not message:
                break
            for fd in fds:
                connection = _Connection(store, region, socket.socket(fileno=fd), register=register)
                threading.Thread(target=connection.serve, daemon=True).start()
    os._exit(0)  # without waiting for Mooncake's threads


if __name__ == "__main__":
    main()
