"""Store and load jobs between vLLM's primary tier and kvtier, on background threads.

Every job is reported exactly once, in bounded time: a job whose call hangs is given up, and its thread finds the door to the
primary tier's memory shut when it comes back. Only a copy that has begun is waited for, and those are copies in memory.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ....cuda.host.copy import copy_batch
from ... import Client, KVTierError, Lease, LeaseLost, StoreStatus, Unavailable
from ..vllm.background import BackgroundThreads, LimitedLog
from .tier_lookups import Pin, TierLookups, TierRequest

__all__ = ["EnginePrimaryTier", "Job", "Transfers"]

_BATCH_BYTES = 64 << 20
_JOB_SECONDS = 30.0
_HAS = frozenset((StoreStatus.GRANTED, StoreStatus.PRESENT, StoreStatus.IN_PROGRESS))


class _GivenUp(Exception):
    """The job was reported as failed meanwhile: the primary tier is not ours any more."""


@dataclass(frozen=True, slots=True)
class EnginePrimaryTier:
    """vLLM's primary tier: ``rows`` rows of ``row_bytes`` bytes from ``address`` on."""

    address: int
    row_bytes: int
    rows: int

    def at(self, row: int) -> int:
        """Returns a row's address. Raises ValueError for one that there is not."""
        if not 0 <= row < self.rows:
            raise ValueError(f"row {row} of {self.rows}")
        return self.address + row * self.row_bytes


@dataclass(eq=False)
class Job:
    """One job of vLLM's: ``rows[i]`` is, or is to be, the bytes of ``keys[i]``. ``pins`` say where a load's are, if anywhere.

    ``done`` are the keys that are where they belong for sure. It and what follows it is under the lock of Transfers, until the
    job is reported: then it is the scheduler's.
    """

    number: int
    request: TierRequest
    keys: Sequence[bytes]
    rows: Sequence[int]
    pins: Sequence[Pin | None] | None
    begun_at: float = field(default_factory=time.monotonic)
    done: frozenset[bytes] = frozenset()
    seconds: float = 0.0
    copying: bool = False
    ended: bool = False

    @property
    def succeeded(self) -> bool:
        """Whether all of it is done."""
        return len(self.done) == len(self.keys)


class Transfers:
    """Carries jobs out. Public methods are called on the scheduler's thread; none but ``drain`` blocks."""

    def __init__(
        self,
        client: Client,
        primary: EnginePrimaryTier,
        lookups: TierLookups,
        log: LimitedLog,
        threads: Sequence[BackgroundThreads],
    ) -> None:
        """``threads`` are for loads and for stores, so that no load queues behind stores; they are closed with this."""
        self._client = client
        self._primary = primary
        self._lookups = lookups
        self._log = log
        self._loads, self._stores = threads
        self._changed = threading.Condition()
        self._running: dict[int, Job] = {}
        self._finished: list[Job] = []

    def submit(self, job: Job) -> None:
        """Begin a job. Raises ValueError for rows that there are not; then it has not begun."""
        for row in job.rows:
            self._primary.at(row)
        with self._changed:
            self._running[job.number] = job
        self._lookups.hold(job.request.announcement)
        if job.pins is None:
            self._stores.submit(lambda: self._run(job))
        else:
            self._loads.submit(lambda: self._run(job))

    def take_finished(self) -> list[Job]:
        """Returns the jobs that ended since the last call, and gives those up that take too long."""
        late = time.monotonic() - _JOB_SECONDS
        with self._changed:
            for job in [job for job in self._running.values() if job.begun_at < late]:
                self._give_up(job)
            finished, self._finished = self._finished, []
        return finished

    def drain(self, timeout_s: float) -> None:
        """Wait until every job has ended; after ``timeout_s`` give up those that run. Afterwards nothing touches the rows."""
        with self._changed:
            self._changed.wait_for(lambda: not self._running, timeout_s)
            for job in list(self._running.values()):
                self._give_up(job)
            self._changed.wait_for(lambda: not self._running)

    def close(self, timeout_s: float) -> None:
        """Drain, and end the threads; called at shutdown."""
        self.drain(timeout_s)
        for threads in (self._loads, self._stores):
            threads.close(0.5)

    def _give_up(self, job: Job) -> None:
        """Report a job as it stands, unless it copies just now: then it ends with that copy."""
        if job.copying:
            job.ended = True
        else:
            self._report(job)

    def _report(self, job: Job) -> None:
        job.ended = True
        job.seconds = time.monotonic() - job.begun_at
        # Once only: a job that was given up comes here a second time.
        if self._running.pop(job.number, None) is job:
            self._finished.append(job)
            self._changed.notify_all()

    # ---- background threads from here on

    def _run(self, job: Job) -> None:
        try:
            # A server that is slow to find is left in peace by lookups, and loads are computed; a store can wait for it.
            if job.ended or not self._client.connected:
                return
            if job.pins is None:
                self._store(job)
            elif not self._lookups.cooling:
                self._load(job, job.pins)
        except KVTierError as error:
            if isinstance(error, Unavailable):
                self._lookups.cool_down(error)
            self._log.warn("transfer", f"a {'store' if job.pins is None else 'load'} failed: {error}")
        except _GivenUp:
            self._log.warn("late", "a transfer came too late; its chunks are computed, or not stored")
        finally:
            # Whatever happened: a job that is not reported pins its rows for ever.
            with self._changed:
                self._report(job)
            self._lookups.let_go(job.request.announcement)

    def _store(self, job: Job) -> None:
        for batch in self._batches(range(len(job.keys))):
            keys = [job.keys[index] for index in batch]
            with self._client.write(keys, request_id=job.request.announcement.request_id) as memory:
                rows = [self._primary.at(job.rows[batch[index]]) for index in memory.wanted]
                slots = [memory.address + offset for offset in memory.offsets]
                with self._copying(job, memory.sizes):
                    copy_batch(slots, rows, memory.sizes)
            self._note_done(job, [key for key, status in zip(keys, memory.statuses, strict=True) if status in _HAS])

    def _load(self, job: Job, pins: Sequence[Pin | None]) -> None:
        by_lease: dict[int, tuple[Lease, list[int]]] = {}
        for index, pin in enumerate(pins):
            if pin is not None:
                by_lease.setdefault(pin.lease.id, (pin.lease, []))[1].append(index)
        for lease, indices in by_lease.values():
            try:
                for batch in self._batches(indices):
                    self._read(job, lease, batch, [pin.item for index in batch if (pin := pins[index]) is not None])
            except LeaseLost as error:
                self._log.warn("lease", f"some chunks are not there any more, and are computed: {error}")

    def _read(self, job: Job, lease: Lease, indices: Sequence[int], items: Sequence[int]) -> None:
        # Leaving the block confirms the lease and raises if it did not hold: these rows hold anything then.
        with self._client.read(lease, items) as memory:
            rows = [self._primary.at(job.rows[index]) for index in indices]
            slots = [memory.address + offset for offset in memory.offsets]
            with self._copying(job, memory.sizes):
                copy_batch(rows, slots, memory.sizes)
        self._note_done(job, [job.keys[index] for index in indices])

    def _note_done(self, job: Job, keys: Sequence[bytes]) -> None:
        with self._changed:
            if not job.ended:
                job.done |= frozenset(keys)

    @contextlib.contextmanager
    def _copying(self, job: Job, sizes: Sequence[int]) -> Iterator[None]:
        """The rows are the job's, until this ends. Raises _GivenUp if they are not any more."""
        if any(size != self._primary.row_bytes for size in sizes):
            raise ValueError(f"a slot is not as large as a row of {self._primary.row_bytes} bytes")
        with self._changed:
            if job.ended:
                raise _GivenUp
            job.copying = True
        try:
            yield
        finally:
            with self._changed:
                job.copying = False
                if job.ended:
                    self._report(job)

    def _batches(self, indices: Sequence[int]) -> list[Sequence[int]]:
        """Slices of at most _BATCH_BYTES and the server's number of keys (and at least one row) each."""
        most = min(max(1, _BATCH_BYTES // self._primary.row_bytes), self._client.max_keys or len(indices) or 1)
        return [indices[first : first + most] for first in range(0, len(indices), most)]
