"""Batched copies on the host that neither stop the other threads of the process nor are stopped by them.

A copy that lets go of the GIL can wait 5 ms until it has it back, where a thread beside it is busy with Python; one
that keeps it makes everybody else wait. So what takes less than a fraction of a millisecond is copied with the GIL, and
what takes longer without it and with the help of a second thread, until it shows that somebody is busy.
`docs/decisions/0016-copies.md` has the measurements.

`memmove` through ctypes checks nothing: addresses, sizes and lifetimes are the caller's word. Any thread may call.
"""

from __future__ import annotations

import ctypes
import os
import resource
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeAlias, TypeVar

from .memory import own_groups

__all__ = ["Helper", "HostBuffer", "TensorLike", "address_of", "addresses_of", "copy_batch", "usable_cores"]


Piece = TypeVar("Piece")


def usable_cores() -> int:
    """Returns how many processors this process can keep busy, by its affinity and its cgroups' quotas (v1, v2); 1 at least.

    Of a quota only whole ones count: with one and a half, two busy threads are stopped for a part of the time.
    """
    quotas = (_quota(version, group) for version, group in own_groups("cpu"))
    bounds = [int(quota) for quota in quotas if quota is not None]
    return max(1, min([len(os.sched_getaffinity(0)), *bounds]))


def _quota(version: int, group: Path) -> float | None:
    """Returns how many processors a cgroup has time for; None where that has no bound."""
    try:
        if version == 1:
            quota, period = ((group / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        else:
            quota, period = (group / "cpu.max").read_text().split()
        return int(quota) / int(period) if int(quota) > 0 else None
    except (OSError, ValueError, ZeroDivisionError):  # one that is not bound says "max"
        return None


class Helper:
    """One thread that works beside whoever asks for it. Any thread may ask; two that ask at a time are two without it.

    It is there from the first time on, as a daemon. A process that has forked makes another one: threads do not come along.
    """

    def __init__(self) -> None:
        """Starts nothing."""
        self._begin()
        # Whoever held the lock has stayed with the parent, as the thread has.
        os.register_at_fork(after_in_child=self._begin)

    def _begin(self) -> None:
        self._jobs: SimpleQueue[_Job[Any]] = SimpleQueue()
        self._lock = threading.Lock()
        self._helped: _Job[Any] | None = None
        self._at_work: set[_Job[Any]] = set()
        """Jobs that somebody is at now."""
        self._is_there: bool | None = None

    def share(self, pieces: Iterable[Piece], work: Callable[[Piece], None]) -> bool:
        """Has `work` done for every piece, here and maybe in the helper's thread, in no order; returns when all of it is.

        Returns False, and has done nothing, where there is but one processor. Raises what `work` raises first, or what breaks in,
        as a signal's handler may anywhere; what has been begun is over by then, and the rest is left.
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
                except BaseException as error:  # noqa: BLE001 it is raised when nobody is at that memory any more
                    late = error
            if late is not None:
                raise late
        if job.error is not None:
            raise job.error
        return True

    def _can_help(self) -> bool:
        if self._is_there is None:
            with self._lock:
                if self._is_there is None:
                    self._is_there = usable_cores() > 1 and self._start()
        return self._is_there

    def _enter(self, job: _Job[Any]) -> None:
        """Begins a job, with the helper's help if nobody else is at work; who is helped until now goes on alone."""
        with self._lock:
            self._at_work.add(job)
            if len(self._at_work) == 1:
                self._helped = job
                self._jobs.put(job)
            elif self._helped is not None:
                self._helped.dismiss()

    def _leave(self, job: _Job[Any]) -> None:
        """Ends a job, whether it has begun or not. Called again where something has broken in."""
        job.finish()
        with self._lock:
            self._at_work.discard(job)
            if self._helped is job:
                self._helped = None
        job.over = True

    def _start(self) -> bool:
        if sys.is_finalizing():  # it would be waited for, and never run
            return False
        try:
            threading.Thread(target=self._run, name="kvtier-copy", daemon=True).start()
        except RuntimeError:  # no more threads are to be had
            return False
        return True

    def _run(self) -> None:
        while True:
            self._jobs.get().help()


class _Job(Generic[Piece]):
    """Pieces of work that two threads take from one iterator, of a list: its `next` is one step under the GIL."""

    __slots__ = ("_dismissed", "_helping", "_pieces", "_work", "error", "over")

    def __init__(self, pieces: Iterator[Piece], work: Callable[[Piece], None]) -> None:
        self._pieces = pieces
        self._work = work
        self._helping = threading.Lock()
        self._dismissed = False
        self.error: BaseException | None = None
        """What the helper has met with."""
        self.over = False
        """Whether nobody is at a piece of it any more."""

    def take_part(self) -> None:
        """Works until no piece is left to be taken."""
        deque(map(self._work, self._pieces), 0)

    def help(self) -> None:
        """Does so in the helper's thread, until it is dismissed; one that comes late finds nothing left."""
        with self._helping:
            try:
                while not self._dismissed:
                    self._work(next(self._pieces))
            except StopIteration:
                pass
            except BaseException as error:  # noqa: BLE001 it is raised where the work was asked for
                self.error = error
                self._leave_the_rest()

    def dismiss(self) -> None:
        """Has the helper take no more pieces."""
        self._dismissed = True

    def finish(self) -> None:
        """Waits for the piece that the helper is at, if it is at any."""
        self._leave_the_rest()
        with self._helping:
            pass

    def _leave_the_rest(self) -> None:
        deque(self._pieces, 0)


if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


_KEPT_BYTES = 4 << 20
"""What is copied at once with the GIL: a quarter to half a millisecond, in which a second thread would hardly be awake."""


_LONG_BYTES = 1 << 20
"""A copy of so much takes so long that letting go of the GIL costs next to nothing: no piece of a large block is longer."""


_PIECE_BYTES = 256 << 10
"""What one of two threads takes at once of small blocks, each of which is one more time to wait for the GIL."""


_SLOWEST = 1e9
"""Bytes per second of a copy that nobody kept waiting: into memory that is touched for the first time."""


_CROWDED_SECONDS = 0.2
"""How long somebody who was busy is taken to be busy still."""


class TensorLike(Protocol):
    """What is used of a torch tensor; torch itself is never imported here."""

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        ...

    @property
    def device(self) -> Any:
        """Where it is; has a `type`."""
        ...

    def data_ptr(self) -> int:
        """Returns its address."""
        ...

    def is_contiguous(self) -> bool:
        """Says whether its elements lie in one piece, in order."""
        ...


HostBuffer: TypeAlias = "ReadableBuffer | TensorLike"
"""Bytes in one piece on the host: memoryview, bytes, bytearray, numpy array, CPU tensor, …"""


class _PyBuffer(ctypes.Structure):
    """`Py_buffer` of CPython's C API; its layout is part of the stable ABI since 3.11."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


# Subscripts give function objects of our own; attributes are shared with, and reconfigured by, whoever else uses them.
_get_buffer = ctypes.pythonapi["PyObject_GetBuffer"]


_get_buffer.argtypes = [ctypes.py_object, ctypes.POINTER(_PyBuffer), ctypes.c_int]


_release_buffer = ctypes.pythonapi["PyBuffer_Release"]


_release_buffer.argtypes = [ctypes.POINTER(_PyBuffer)]


_release_buffer.restype = None


_WRITABLE = 1  # PyBUF_WRITABLE; without it PyBUF_SIMPLE: flat and contiguous


def address_of(buffer: HostBuffer, *, writable: bool = False) -> tuple[int, int]:
    """Returns where a buffer's bytes are and how many: (address, size in bytes).

    The address holds as long as the caller keeps the buffer and does not resize it. Pass `writable` for a buffer that
    is to be filled. Raises `ValueError` for a buffer that is not contiguous, is read-only where it is to be filled,
    or is on a device, and `TypeError` for what is no buffer.
    """
    if type(buffer) is not memoryview and hasattr(buffer, "data_ptr"):
        return _tensor_address(buffer)  # type: ignore[arg-type]
    view = _PyBuffer()
    try:
        _get_buffer(buffer, view, _WRITABLE if writable else 0)
    except (BufferError, ValueError) as error:  # numpy raises ValueError
        raise ValueError(f"a contiguous {'writable ' if writable else ''}buffer is wanted: {error}") from error
    address, size = view.buf or 0, view.len
    _release_buffer(view)
    return address, size


def _tensor_address(tensor: TensorLike) -> tuple[int, int]:
    if not tensor.is_contiguous():
        raise ValueError("a contiguous tensor is wanted: call .contiguous(), or hand over its blocks one by one")
    if tensor.device.type != "cpu":
        raise ValueError(f"a tensor on the host is wanted, not one on {tensor.device}")
    return tensor.data_ptr(), tensor.nbytes


_start_of: Callable[[Any], ctypes.Array[ctypes.c_char]] = (ctypes.c_char * 0).from_buffer


_size_of = attrgetter("nbytes")


def addresses_of(buffers: Sequence[HostBuffer], *, writable: bool = False) -> tuple[list[int], list[int]]:
    """Returns what `address_of` says of each buffer, and raises what it raises: (addresses, sizes in bytes).

    Arrays and their views that can be written to take 0.2 microseconds each, others 0.7.
    """
    if not any(hasattr(kind, "data_ptr") for kind in set(map(type, buffers))):
        try:
            return list(map(ctypes.addressof, map(_start_of, buffers))), list(map(_size_of, buffers))
        except (TypeError, ValueError, BufferError, AttributeError):
            pass  # one of them is read-only, knows its size by another name, or is none
    places = [address_of(buffer, writable=writable) for buffer in buffers]
    return [address for address, _ in places], [size for _, size in places]


_move = ctypes.memmove
"""Copies without the GIL."""


_move_kept = ctypes.PyDLL(None)["memmove"]
"""Copies with the GIL."""


_move_kept.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]  # the quickest to be filled in, sizes too


_move_kept.restype = None


def copy_batch(destinations: Sequence[int], sources: Sequence[int], sizes: Sequence[int]) -> None:
    """Copies `sizes[i]` bytes from address `sources[i]` to address `destinations[i]`, for all i.

    Takes the three lists as they are: nothing is checked but that they are of one length (`ValueError`). The caller keeps the
    memory mapped meanwhile.
    """
    if not len(destinations) == len(sources) == len(sizes):
        raise ValueError("one of the lists of destinations, sources and sizes is shorter than another")
    if sum(sizes) <= _KEPT_BYTES:
        deque(map(_move_kept, destinations, sources, sizes), 0)
    else:
        _crowd.copy(_pieces(destinations, sources, sizes))


_Piece: TypeAlias = tuple[Sequence[int], Sequence[int], Sequence[int]]
"""Destinations, sources and sizes, few enough for nobody to wait long while they are copied with the GIL."""


class _Crowd:
    """Whether another thread of this process is busy with Python, as far as long copies have shown.

    Then letting go of the GIL for each block would mean 5 ms of waiting for 0.1 ms of copying. Instead it is kept, and
    given up where the interpreter asks for it: every 5 ms, as any Python code does.
    """

    def __init__(self) -> None:
        self._until = 0.0
        """Until when somebody is taken to be busy."""
        self._suspected = False
        """Whether the next block is a probe: the last long copy came back late, or somebody was busy until now."""
        self._preemptions = threading.local()
        """Of each thread, how often it had lost its processor when a batch of its began, or a copy of its came back late."""

    def copy(self, pieces: Iterator[_Piece]) -> None:
        """Copies more than should be copied at once with the GIL: by two threads, or where somebody is busy by this one."""
        self._preemptions.count = _preemptions()
        if time.perf_counter() < self._until or not _helper.share(pieces, self._copy_piece):
            deque(map(self._copy_piece, pieces), 0)

    def _copy_piece(self, piece: _Piece) -> None:
        started = time.perf_counter()
        if started < self._until:
            deque(map(_move_kept, *piece), 0)
        elif self._suspected:
            (destination, *destinations), (source, *sources), (size, *sizes) = piece
            _move(destination, source, size)
            self._suspected = self._is_late(started, size)
            if self._suspected:
                self._until = time.perf_counter() + _CROWDED_SECONDS
            deque(map(_move_kept, destinations, sources, sizes), 0)
        else:
            deque(map(_move, *piece), 0)
            if self._is_late(started, sum(piece[2])):  # if not, another thread may suspect somebody all the same
                self._suspected = True

    def _is_late(self, started: float, size: int) -> bool:
        """Whether a copy without the GIL has come back late, and not for want of a processor.

        Whoever waits for the GIL gives up its processor by itself; only one that was taken away is counted as a preemption.
        """
        if time.perf_counter() - started < sys.getswitchinterval() / 2 + size / _SLOWEST:
            return False
        preemptions = _preemptions()
        before = getattr(self._preemptions, "count", -1)
        self._preemptions.count = preemptions
        return preemptions == before


def _preemptions() -> int:
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw


_crowd = _Crowd()


_helper = Helper()


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
