"""Tier `mooncake`: blocks in Mooncake Store, by TCP or RDMA from and into the host region.

Mooncake's client runs in a process of its own (`mooncake_child.py`).
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

from ...protos.buffers import address_of, copy_from
from ..secondary_tier import Outcome, TierOpenError
from . import value_codec
from .mooncake_child import LENGTH, REGION, STAGING, read_exactly
from .mooncake_process import (
    P2P,
    MooncakeChild,
    MooncakeProcess,
    MooncakeSettings,
    Region,
    master_address,
    require_mooncake,
)
from .network_tier import RemoteLimits
from .object_store import OneNode, StoreUnavailableError
from .remote_tier import RemoteTier
from .value_codec import ValueCodec

__all__ = ["MooncakeStore", "MooncakeTier", "codes_in"]

Piece = bytes | memoryview
Place = tuple[int, int, int]
"""Area, offset and size of a piece."""
_StagedPiece = tuple[int, memoryview, int]
"""Number of the value, a piece of it, and the piece's offset in staging memory."""

# Error codes of Mooncake (mooncake-store/include/types.h).
NO_AVAILABLE_HANDLE = -200
OBJECT_NOT_FOUND = -704
OBJECT_ALREADY_EXISTS = -705
RPC_FAIL = -900
RPC_TIMEOUT = -901

_COMBINED_BYTES = 512 << 10
"""A smaller value is copied into one piece: each piece is a transfer, which costs more."""
_CODE_BYTES = 24
"""Limit of the text of one code in an answer."""
_MAX_OTHER_SIZES = 16
"""Limit of the values of a call that are read again because they have another size. Each one is a
call. The others are misses until the next load."""
_CHECKED_NAME = "kvtier/check"


class MooncakeTier(RemoteTier):
    type: ClassVar[str] = "mooncake"

    def __init__(
        self,
        name: str,
        size_bytes: int,
        *,
        master: str,
        limits: RemoteLimits,
        metadata: str = P2P,
        protocol: str = "tcp",
        device: str | None = None,
        local_host: str | None = None,
        log: Path | None = None,
        codec: ValueCodec = value_codec,
    ) -> None:
        """Raises `TierOpenError` if Mooncake is not installed. See `MooncakeSettings`.

        `limits.ttl_seconds` has no effect, because Mooncake's values have no time to live.
        """
        require_mooncake()
        try:
            master_address(master)
        except ValueError as error:
            raise TierOpenError(f"master: {error}") from None
        self._process = MooncakeProcess(MooncakeSettings(master, metadata, protocol, device, local_host, log))
        node = OneNode(master, lambda: MooncakeStore(self._process, limits.deadline_seconds))
        super().__init__(name, size_bytes, topology=node, limits=limits, codec=codec)

    def use_region(self, pools: Sequence[tuple[int, int, int]], address: int, size_bytes: int) -> None:
        """Starts the process that maps the region and registers it with Mooncake."""
        self._process.region = Region(pools, address, size_bytes)
        self._process.start()

    def close(self) -> None:
        super().close()
        self._process.close()


class MooncakeStore:
    """`ObjectStore` that connects on first use, and again after an error."""

    def __init__(self, process: MooncakeProcess, deadline_seconds: float) -> None:
        self._process = process
        self._deadline_seconds = deadline_seconds
        self._link: tuple[MooncakeChild, socket.socket] | None = None
        self._staging = _Staging()

    def exists(self, names: Sequence[bytes]) -> list[bool]:
        """A value on a dead node counts as absent after a load of it has failed."""
        codes = self._ask("exist", names)
        if codes and max(codes) < 0:  # a single one is a miss of its name only
            raise _no_answer(min(codes))
        return [code == 1 and name not in self._process.suspects for code, name in zip(codes, names, strict=True)]

    def renew(self, names: Sequence[bytes], ttl_seconds: float) -> list[bool]:
        """Returns False for all: there is no time to live, and `put` skips existing values."""
        return [False] * len(names)

    def get(
        self, names: Sequence[bytes], values: Sequence[Sequence[memoryview]], ttl_seconds: float
    ) -> list[int | None]:
        wanted = [number for number, name in enumerate(names) if name not in self._process.suspects]
        sizes: list[int | None] = [None] * len(names)
        failed: dict[bytes, int] = {}
        unasked: dict[bytes, int] = {}
        codes = dict(
            zip(
                wanted,
                self._get([names[number] for number in wanted], [values[number] for number in wanted]),
                strict=True,
            )
        )
        for number, code in codes.items():
            if code == sum(map(len, values[number])):
                sizes[number] = code
            elif code in (RPC_FAIL, RPC_TIMEOUT):
                unasked[names[number]] = code
        others = [
            number
            for number, code in codes.items()
            if sizes[number] is None and code != OBJECT_NOT_FOUND and names[number] not in unasked
        ][:_MAX_OTHER_SIZES]
        other_sizes = self._ask("size", [names[number] for number in others]) if others else []
        for number, size in zip(others, other_sizes, strict=True):
            if size == sum(map(len, values[number])):  # the transfer has failed
                failed[names[number]] = codes[number]
            elif size >= 0:
                sizes[number] = self._get_other_size(names[number], values[number], size)
        self._process.suspects.add(failed)
        without_answer = failed | unasked
        if without_answer and len(without_answer) == len(wanted):
            raise _no_answer(min(without_answer.values()))
        return sizes

    def put(
        self, names: Sequence[bytes], value_of: Callable[[int], Sequence[Piece]], ttl_seconds: float
    ) -> list[Outcome]:
        places, staged = self._place([value_of(number) for number in range(len(names))])
        for _, piece, offset in staged:
            self._staging.copy_from(piece, offset)
        codes = self._call("put", names, places)
        if codes and all(code in (RPC_FAIL, RPC_TIMEOUT) for code in codes):
            raise _no_answer(codes[0])
        return [_outcome(code) for code in codes]

    def delete_if_equal(self, name: bytes, value: Sequence[Piece]) -> None:
        """Deletes a value that is still the same. Mooncake has no atomic step for that.

        A value that another server writes between the two calls is lost, which is a miss.
        """
        expected = b"".join(value)
        if not expected:
            return
        found = bytearray(len(expected))
        if self._get([name], [[memoryview(found)]]) == [len(expected)] and found == expected:
            self._ask("remove", [name])

    def ping(self) -> None:
        """Asks the master for a name."""
        self.exists([_CHECKED_NAME.encode()])

    def close(self) -> None:
        self._disconnect()
        self._staging.close()

    def _get_other_size(self, name: bytes, pieces: Sequence[memoryview], size: int) -> int:
        """Fills pieces from a smaller value; returns the size of the value."""
        rest, cut = size, []
        for piece in pieces:
            cut.append(piece[:rest])
            rest -= len(cut[-1])
        if not rest and size:
            self._get([name], [cut])
        return size

    def _get(self, names: Sequence[bytes], values: Sequence[Sequence[memoryview]]) -> list[int]:
        if not names:
            return []
        places, staged = self._place(values)
        codes = self._call("get", names, places)
        for number, piece, offset in staged:
            if codes[number] > 0:
                self._staging.copy_to(piece, offset)
        return codes

    def _ask(self, call: str, names: Sequence[bytes]) -> list[int]:
        """Makes a call that moves no bytes."""
        return self._call(call, names, ())

    def _place(self, values: Sequence[Sequence[Piece]]) -> tuple[list[list[Place]], list[_StagedPiece]]:
        """Returns where the values are, and the pieces that need a copy to or from staging memory.

        A small value has one place.
        """
        places: list[list[Place]] = []
        staged: list[_StagedPiece] = []
        end = 0
        for number, value in enumerate(values):
            pieces = [view for piece in value if (view := memoryview(piece)).nbytes]
            is_small = sum(view.nbytes for view in pieces) < _COMBINED_BYTES
            start, placed = end, list[Place]()
            for view in pieces:
                offset = None if is_small else self._offset_in_region(view)
                if offset is not None:
                    placed.append((REGION, offset, view.nbytes))
                else:
                    placed.append((STAGING, end, view.nbytes))
                    staged.append((number, view, end))
                    end += view.nbytes
            places.append([(STAGING, start, end - start)] if is_small and placed else placed)
        self._staging.reserve(end)
        return places, staged

    def _offset_in_region(self, view: memoryview) -> int | None:
        region = self._process.region
        if region is None:
            return None
        offset = address_of(view) - region.address
        return offset if offset >= 0 and offset + view.nbytes <= region.size_bytes else None

    def _call(self, call: str, names: Sequence[bytes], places: Sequence[Sequence[Place]]) -> list[int]:
        """Makes a call within the deadline. Raises StoreUnavailableError.

        If a call that moves bytes does not end, the process is killed: it could write to the region
        later, when the memory has another block.
        """
        ends_at = time.monotonic() + self._deadline_seconds
        child, connection = self._connect(ends_at)
        request: dict[str, Any] = {"call": call, "names": [name.decode() for name in names]}
        fds = []
        if places:
            request["pieces"] = places
            if self._staging.nbytes and not self._staging.is_sent:
                request["staging_bytes"], fds = self._staging.nbytes, [self._staging.fd]
        text = json.dumps(request).encode()
        try:
            connection.settimeout(max(0.001, ends_at - time.monotonic()))
            socket.send_fds(connection, [LENGTH.pack(len(text))], fds)
            connection.sendall(text)
            [size] = LENGTH.unpack(_receive(connection, LENGTH.size, ends_at))
            # A larger answer is cut, and so invalid.
            size = min(size, _CODE_BYTES * (1 + len(names)))
            codes = codes_in(_receive(connection, size, ends_at), len(names))
        except TimeoutError as error:
            self._end_late_call(child, is_transfer=bool(places))
            if call == "get":
                self._process.suspects.add(names)
            raise StoreUnavailableError(f"no answer within {self._deadline_seconds:g} s") from error
        except OSError as error:
            self._end_late_call(child, is_transfer=True)
            raise StoreUnavailableError("the client process has ended") from error
        except (ValueError, RecursionError) as error:
            self._end_late_call(child, is_transfer=True)
            raise StoreUnavailableError(f"the client process sends a wrong answer: {error}") from error
        except BaseException:
            self._end_late_call(child, is_transfer=bool(places))
            raise
        if fds:
            self._staging.is_sent = True
        return codes

    def _connect(self, ends_at: float) -> tuple[MooncakeChild, socket.socket]:
        if self._link is not None and not self._process.is_running(self._link[0]):
            self._disconnect()
        if self._link is None:
            self._link = self._process.connect(ends_at)
            self._staging.is_sent = False
        return self._link

    def _end_late_call(self, child: MooncakeChild, *, is_transfer: bool) -> None:
        self._disconnect()
        if is_transfer:
            self._process.kill(child)
        else:
            self._process.abandon(child)

    def _disconnect(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            link[1].close()


def codes_in(answer: bytes, count: int) -> list[int]:
    """Returns the codes in an answer of the process. Raises ValueError."""
    codes = json.loads(answer)
    if not isinstance(codes, list) or len(codes) != count or any(type(code) is not int for code in codes):
        raise ValueError(f"not {count} codes")
    return codes


def _receive(connection: socket.socket, nbytes: int, ends_at: float) -> bytes:
    connection.settimeout(max(0.001, ends_at - time.monotonic()))
    return read_exactly(connection, nbytes)


class _Staging:
    """Memory that is shared with the process, for headers, small values and encrypted values."""

    def __init__(self) -> None:
        self.nbytes = 0
        self.is_sent = False
        self.fd = -1
        self._view = memoryview(b"")
        self._address = 0

    def reserve(self, nbytes: int) -> None:
        """Replaces the memory if it is smaller. Its bytes are then lost."""
        if nbytes <= self.nbytes:
            return
        self.close()
        nbytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        fd = os.memfd_create("kvtier-mooncake", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, nbytes)
            self._view = memoryview(mmap.mmap(fd, nbytes))
        except BaseException:
            os.close(fd)
            raise
        self._address = address_of(self._view)
        self.fd, self.nbytes, self.is_sent = fd, nbytes, False

    def copy_from(self, source: memoryview, offset: int) -> None:
        copy_from(self._address + offset, source)

    def copy_to(self, target: memoryview, offset: int) -> None:
        copy_from(address_of(target), self._view[offset : offset + target.nbytes])

    def close(self) -> None:
        if self.nbytes:
            self._view.release()  # the last reference to the mapping
            os.close(self.fd)
            self.nbytes = 0


def _outcome(code: int) -> Outcome:
    if code in (0, OBJECT_ALREADY_EXISTS):
        return Outcome.DONE
    return Outcome.NO_SPACE if code == NO_AVAILABLE_HANDLE else Outcome.FAILED


def _no_answer(code: int) -> StoreUnavailableError:
    what = "the master does not answer" if code in (RPC_FAIL, RPC_TIMEOUT) else "a node does not answer"
    return StoreUnavailableError(f"{what} (Mooncake's error {code})")
