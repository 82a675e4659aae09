"""Batched copies on the host that hold the GIL only for short copies.

A copy that releases the GIL may wait 5 ms to get the GIL back if another thread runs Python code. A
copy that holds the GIL makes all other threads wait. Therefore a batch of at most 4 MiB (less than
a millisecond) is copied with the GIL. A longer batch is copied without the GIL and with the help of
a second thread. If such copies take too long, another thread is busy with Python code. The copies
of the next 0.2 seconds then hold the GIL. Measurements: `docs/decisions/0016-copies.md`.

The copies check no addresses: the caller is responsible for addresses, sizes and lifetimes. Any
thread may call.
"""

from __future__ import annotations

import ctypes
import logging
import os
import resource
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import repeat
from operator import attrgetter
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeAlias, TypeVar

from ...protos.buffers import extent_of
from .memory import cgroup_directories

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

__all__ = ["CopyHelper", "HostBuffer", "TensorLike", "address_of", "addresses_of", "copy_batch"]
__all__ += ["helper_refusal", "usable_cores"]

_log = logging.getLogger(__name__)

_GIL_HELD_BYTES = 4 << 20
"""Longest batch that is copied with the GIL. Such a copy takes 0.25 to 0.5 ms, about the wake-up
time of a thread."""

_LONG_BYTES = 1 << 20
"""Larger blocks are copied in pieces of this size. For a piece of this size the cost of releasing
the GIL is small."""

_PIECE_BYTES = 256 << 10
"""Size of the pieces into which a batch of small blocks is divided."""

_SLOWEST = 1e9
"""Lowest copy rate, in bytes per second, if no other thread delays the copy. The slowest copies
write to memory whose pages are not allocated yet."""

_BUSY_SECONDS = 0.2
"""How long another thread counts as busy after a late copy."""

Piece = TypeVar("Piece")


class TensorLike(Protocol):
    """The attributes of a torch tensor that this module uses; it does not import torch."""

    @property
    def nbytes(self) -> int: ...

    @property
    def device(self) -> Any:
        """The tensor's device; has a `type`, such as "cpu"."""
        ...

    def data_ptr(self) -> int: ...

    def is_contiguous(self) -> bool: ...


HostBuffer: TypeAlias = "ReadableBuffer | TensorLike"
"""Contiguous bytes on the host: memoryview, bytes, bytearray, numpy array, CPU tensor, …"""

_start_of: Callable[[Any], ctypes.Array[ctypes.c_char]] = (ctypes.c_char * 0).from_buffer
_size_of = attrgetter("nbytes")

_memmove = ctypes.memmove
"""Copies without the GIL."""
_memmove_holding_gil = ctypes.PyDLL(None)["memmove"]
# c_void_p is the fastest type to convert.
_memmove_holding_gil.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
_memmove_holding_gil.restype = None


def address_of(buffer: HostBuffer, *, writable: bool = False) -> tuple[int, int]:
    """Returns a buffer's (address, size in bytes).

    The address is valid as long as the caller keeps the buffer and does not resize it. Pass
    `writable` if the copy writes to the buffer. Raises `ValueError` if the buffer is not
    contiguous, is on a device, or is read-only although `writable` is passed. Raises `TypeError` if
    the object is no buffer.
    """
    if type(buffer) is not memoryview and hasattr(buffer, "data_ptr"):
        return _tensor_address(buffer)  # type: ignore[arg-type]
    try:
        return extent_of(buffer, writable=writable)
    except (BufferError, ValueError) as error:  # numpy raises ValueError
        raise ValueError(f"a contiguous {'writable ' if writable else ''}buffer is needed: {error}") from error


def _tensor_address(tensor: TensorLike) -> tuple[int, int]:
    if not tensor.is_contiguous():
        raise ValueError("a contiguous tensor is needed: call .contiguous(), or pass its blocks one by one")
    if tensor.device.type != "cpu":
        raise ValueError(f"a tensor on the host is needed, not one on {tensor.device}")
    return tensor.data_ptr(), tensor.nbytes


def addresses_of(buffers: Sequence[HostBuffer], *, writable: bool = False) -> tuple[list[int], list[int]]:
    """`address_of` for many buffers: (addresses, sizes in bytes). Raises as `address_of` does.

    Writable arrays and views cost 0.2 microseconds each, other buffers 0.7.
    """
    if not any(map(hasattr, set(map(type, buffers)), repeat("data_ptr"))):
        try:
            return list(map(ctypes.addressof, map(_start_of, buffers))), list(map(_size_of, buffers))
        except (TypeError, ValueError, BufferError, AttributeError):
            pass  # an object is read-only, has no `nbytes`, or is no buffer
    places = [address_of(buffer, writable=writable) for buffer in buffers]
    return [address for address, _ in places], [size for _, size in places]


def copy_batch(destinations: Sequence[int], sources: Sequence[int], sizes: Sequence[int]) -> None:
    """Copies `sizes[i]` bytes from address `sources[i]` to address `destinations[i]`, for all i.

    Only the lengths of the lists are checked (`ValueError`). The caller keeps the memory mapped
    until the call returns.
    """
    if not len(destinations) == len(sources) == len(sizes):
        raise ValueError("the lists of destinations, sources and sizes have different lengths")
    if sum(sizes) <= _GIL_HELD_BYTES:
        deque(map(_memmove_holding_gil, destinations, sources, sizes), 0)
    else:
        _contention.copy(_pieces(destinations, sources, sizes))


_Piece: TypeAlias = tuple[Sequence[int], Sequence[int], Sequence[int]]
"""Destinations, sources and sizes. Short enough to be copied with the GIL."""


def _pieces(destinations: Sequence[int], sources: Sequence[int], sizes: Sequence[int]) -> Iterator[_Piece]:
    longest = max(sizes)
    if longest <= _LONG_BYTES:
        number = max(1, _PIECE_BYTES // longest)
        for start in range(0, len(sizes), number):
            end = start + number
            yield destinations[start:end], sources[start:end], sizes[start:end]
        return
    for destination, source, size in zip(destinations, sources, sizes, strict=True):
        for done in range(0, size, _LONG_BYTES):
            yield (destination + done,), (source + done,), (min(_LONG_BYTES, size - done),)


class _GilContention:
    """Detects from late copies whether another thread of this process is busy with Python.

    If another thread is busy, a copy that releases the GIL for each block waits 5 ms for each
    0.1 ms of copying. Therefore copies then hold the GIL, and release it only when the interpreter
    asks (every 5 ms), like other Python code.
    """

    def __init__(self) -> None:
        self._busy_until = 0.0
        self._suspected = False
        """Whether the next block is copied without the GIL to test for a busy thread. True after a
        late copy, and when the busy time has just ended."""
        self._preemptions = threading.local()
        """By thread: preemption count at the start of its batch or at its last late copy."""

    def copy(self, pieces: Iterator[_Piece]) -> None:
        """Copies a long batch: with two threads, or with one if another thread is busy."""
        self._preemptions.count = _preemptions()
        if time.perf_counter() < self._busy_until or not _helper.share(pieces, self._copy_piece):
            deque(map(self._copy_piece, pieces), 0)

    def _copy_piece(self, piece: _Piece) -> None:
        started = time.perf_counter()
        if started < self._busy_until:
            deque(map(_memmove_holding_gil, *piece), 0)
        elif self._suspected:
            (destination, *destinations), (source, *sources), (size, *sizes) = piece
            _memmove(destination, source, size)
            self._suspected = self._is_late(started, size)
            if self._suspected:
                self._busy_until = time.perf_counter() + _BUSY_SECONDS
            deque(map(_memmove_holding_gil, destinations, sources, sizes), 0)
        else:
            deque(map(_memmove, *piece), 0)
            # Never clears the flag, because another thread may have set it.
            if self._is_late(started, sum(piece[2])):
                self._suspected = True

    def _is_late(self, started: float, size: int) -> bool:
        """Whether a copy without the GIL was late although its thread was not preempted."""
        if time.perf_counter() - started < sys.getswitchinterval() / 2 + size / _SLOWEST:
            return False
        preemptions = _preemptions()
        before = getattr(self._preemptions, "count", -1)
        self._preemptions.count = preemptions
        return preemptions == before


def _preemptions() -> int:
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw


class CopyHelper:
    """A daemon thread that shares the work of a calling thread. Any thread may call `share`.

    It helps one caller at a time: while two callers copy, both work without the helper. The thread
    starts with the first call. A forked child starts a thread of its own, because threads do not
    survive `fork`.
    """

    def __init__(self) -> None:
        self._reset()
        # A forked child gets new objects. A lock that was held at the fork would stay locked there.
        os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        self._jobs: SimpleQueue[_Job[Any]] = SimpleQueue()
        self._lock = threading.Lock()
        self._helped: _Job[Any] | None = None
        self._active: set[_Job[Any]] = set()
        self._available: bool | None = None
        self.refusal = ""
        """Why the thread could not start; it is not tried again."""

    def share(self, pieces: Iterable[Piece], work: Callable[[Piece], None]) -> bool:
        """Calls `work` for every piece, in this thread and the helper's, in any order.

        Does nothing and returns False if the process has only one processor or the thread cannot
        start. Raises the first error of `work`, or an exception of a signal handler; then the
        remaining pieces are skipped. When the call returns or raises, no piece is in progress.
        """
        if not self._can_help():
            return False
        job = _Job(iter(list(pieces)), work)
        try:
            self._enter(job)
            job.take_part()
        finally:
            late: BaseException | None = None
            while not job.over:
                try:
                    self._leave(job)
                except BaseException as error:  # noqa: BLE001 raised when the helper uses no memory any more
                    late = error
            if late is not None:
                raise late
        if job.error is not None:
            raise job.error
        return True

    def _can_help(self) -> bool:
        if self._available is None:
            with self._lock:
                if self._available is None:
                    self._available = usable_cores() > 1 and self._start()
        return self._available

    def _enter(self, job: _Job[Any]) -> None:
        """Starts a job. The helper joins a single job; with several jobs it helps none."""
        with self._lock:
            self._active.add(job)
            if len(self._active) == 1:
                self._helped = job
                self._jobs.put(job)
            elif self._helped is not None:
                self._helped.dismiss()

    def _leave(self, job: _Job[Any]) -> None:
        """Ends a job, started or not. Called again if a signal handler interrupted the call."""
        job.finish()
        with self._lock:
            self._active.discard(job)
            if self._helped is job:
                self._helped = None
        job.over = True

    def _start(self) -> bool:
        if sys.is_finalizing():  # the thread would never run, and the caller would wait for it
            return False
        try:
            threading.Thread(target=self._run, name="kvtier-copy", daemon=True).start()
        except RuntimeError as error:  # the process has too many threads
            self.refusal = f"copies are slower, because their second thread cannot start: {error}"
            _log.warning("kvtier: %s", self.refusal)
            return False
        return True

    def _run(self) -> None:
        while True:
            self._jobs.get().help()


class _Job(Generic[Piece]):
    """Pieces that two threads take from one list iterator, whose `next` is atomic under the GIL."""

    __slots__ = ("_dismissed", "_helping", "_pieces", "_work", "error", "over")

    def __init__(self, pieces: Iterator[Piece], work: Callable[[Piece], None]) -> None:
        self._pieces = pieces
        self._work = work
        self._helping = threading.Lock()
        self._dismissed = False
        self.error: BaseException | None = None
        """An error of `work` in the helper's thread."""
        self.over = False
        """Whether no piece is in progress any more."""

    def take_part(self) -> None:
        deque(map(self._work, self._pieces), 0)

    def help(self) -> None:
        """Works in the helper's thread until dismissed or no piece is left."""
        with self._helping:
            try:
                while not self._dismissed:
                    self._work(next(self._pieces))
            except StopIteration:
                pass
            except BaseException as error:  # noqa: BLE001 `share` raises it
                self.error = error
                self._skip_rest()

    def dismiss(self) -> None:
        """Makes the helper take no more pieces."""
        self._dismissed = True

    def finish(self) -> None:
        """Skips the remaining pieces and waits for the helper's current one."""
        self._skip_rest()
        with self._helping:
            pass

    def _skip_rest(self) -> None:
        deque(self._pieces, 0)


def usable_cores() -> int:
    """Number of usable processors: the CPU affinity and cgroup quotas (rounded down) limit it."""
    quotas = (_quota(version, group) for version, group in cgroup_directories("cpu"))
    bounds = [int(quota) for quota in quotas if quota is not None]
    return max(1, min([len(os.sched_getaffinity(0)), *bounds]))


def _quota(version: int, group: Path) -> float | None:
    """Number of processors that a cgroup's CPU quota allows; None if it has no quota."""
    try:
        if version == 1:
            quota, period = ((group / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        else:
            quota, period = (group / "cpu.max").read_text().split()
        return int(quota) / int(period) if int(quota) > 0 else None
    except (OSError, ValueError, ZeroDivisionError):  # "max" means no quota
        return None


_contention = _GilContention()
_helper = CopyHelper()


def helper_refusal() -> str:
    """Returns why large copies of this process are slower; empty if they are not."""
    return _helper.refusal
