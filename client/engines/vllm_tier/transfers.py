"""Store and load jobs between vLLM's primary tier and kvtier, on background threads.

Every job is reported exactly once, within a bounded time. A job whose call hangs is abandoned: the
job is reported as failed, and the job's thread must not access the primary tier any more. If the
job is copying memory, the report waits for the end of the copy.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ....cuda.host.copy import copy_batch
from ... import Client, KVTierError, Lease, LeaseLost, StoreStatus, Unavailable
from ..vllm.background import BackgroundThreads, RateLimitedLog
from .tier_lookups import Pin, TierLookups, TierRequest

__all__ = ["EnginePrimaryTier", "Job", "Transfers"]

_BATCH_BYTES = 64 << 20
_JOB_SECONDS = 30.0
_STORED = frozenset((StoreStatus.GRANTED, StoreStatus.PRESENT, StoreStatus.IN_PROGRESS))


class _Abandoned(Exception):
    """The job was reported as failed. Its rows may belong to another job now."""


@dataclass(frozen=True, slots=True)
class EnginePrimaryTier:
    """vLLM's primary tier: `rows` rows of `row_bytes` bytes from `address` on."""

    address: int
    row_bytes: int
    rows: int

    def at(self, row: int) -> int:
        """Returns a row's address. Raises ValueError if there is no such row."""
        if not 0 <= row < self.rows:
            raise ValueError(f"row {row} is outside the primary tier of {self.rows} rows")
        return self.address + row * self.row_bytes


@dataclass(eq=False)
class Job:
    """One job of vLLM: `rows[i]` holds the bytes of `keys[i]`.

    `pins`: the hits of a load; None for a store. `done`: keys that were certainly copied. Until the
    job is reported, the lock of Transfers protects `done` and the fields below `done`.
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
        return len(self.done) == len(self.keys)


class Transfers:
    """Runs jobs. Public methods run on the scheduler's thread; only `drain` and `close` block."""

    def __init__(
        self,
        client: Client,
        primary: EnginePrimaryTier,
        lookups: TierLookups,
        log: RateLimitedLog,
        threads: Sequence[BackgroundThreads],
    ) -> None:
        """`threads`: one group for loads, one for stores, so that no load queues behind stores."""
        self._client = client
        self._primary = primary
        self._lookups = lookups
        self._log = log
        self._loads, self._stores = threads
        self._changed = threading.Condition()
        self._running: dict[int, Job] = {}
        self._finished: list[Job] = []

    def submit(self, job: Job) -> None:
        """Begins a job. Raises ValueError, and begins nothing, if a row does not exist."""
        for row in job.rows:
            self._primary.at(row)
        with self._changed:
            self._running[job.number] = job
        self._lookups.acquire(job.request.registration)
        if job.pins is None:
            self._stores.submit(lambda: self._run(job))
        else:
            self._loads.submit(lambda: self._run(job))

    def take_finished(self) -> list[Job]:
        """Returns the jobs that ended since the last call. Abandons jobs after 30 seconds."""
        late = time.monotonic() - _JOB_SECONDS
        with self._changed:
            for job in [job for job in self._running.values() if job.begun_at < late]:
                self._abandon(job)
            finished, self._finished = self._finished, []
        return finished

    def drain(self, timeout_s: float) -> None:
        """Waits for all jobs; abandons the rest after `timeout_s`. Then no job uses rows."""
        with self._changed:
            self._changed.wait_for(lambda: not self._running, timeout_s)
            for job in list(self._running.values()):
                self._abandon(job)
            self._changed.wait_for(lambda: not self._running)

    def close(self, timeout_s: float) -> None:
        self.drain(timeout_s)
        for threads in (self._loads, self._stores):
            threads.close(0.5)

    def _abandon(self, job: Job) -> None:
        """Reports a job that has not ended: now, or at the end of a copy that is running."""
        if job.copying:
            job.ended = True
        else:
            self._report(job)

    def _report(self, job: Job) -> None:
        job.ended = True
        job.seconds = time.monotonic() - job.begun_at
        # An abandoned job calls this method again when it ends, but is reported only once.
        if self._running.pop(job.number, None) is job:
            self._finished.append(job)
            self._changed.notify_all()

    # ---- on background threads

    def _run(self, job: Job) -> None:
        try:
            # While the circuit is open, a load fails at once. A store can wait for the server.
            if job.ended or not self._client.connected:
                return
            if job.pins is None:
                self._store(job)
            elif not self._lookups.circuit.is_open:
                self._load(job, job.pins)
        except KVTierError as error:
            if isinstance(error, Unavailable):
                self._lookups.circuit.open(error)
            self._log.warn("transfer", f"a {'store' if job.pins is None else 'load'} failed: {error}")
        except _Abandoned:
            self._log.warn("late", "a transfer took too long, so its chunks are computed (load) or not stored (store)")
        finally:
            # Without a report, the job's rows would stay pinned for ever.
            with self._changed:
                self._report(job)
            self._lookups.release(job.request.registration)

    def _store(self, job: Job) -> None:
        for batch in self._batches(range(len(job.keys))):
            keys = [job.keys[index] for index in batch]
            with self._client.write(keys, request_id=job.request.registration.request_id) as memory:
                rows = [self._primary.at(job.rows[batch[index]]) for index in memory.wanted]
                slots = [memory.address + offset for offset in memory.offsets]
                with self._copying(job, memory.sizes):
                    copy_batch(slots, rows, memory.sizes)
            self._mark_done(job, [key for key, status in zip(keys, memory.statuses, strict=True) if status in _STORED])

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
                self._log.warn("lease", f"some chunks were evicted, so they are computed: {error}")

    def _read(self, job: Job, lease: Lease, indices: Sequence[int], items: Sequence[int]) -> None:
        # The end of the `with` block checks the lease. If that raises, the rows are undefined.
        with self._client.read(lease, items) as memory:
            rows = [self._primary.at(job.rows[index]) for index in indices]
            slots = [memory.address + offset for offset in memory.offsets]
            with self._copying(job, memory.sizes):
                copy_batch(rows, slots, memory.sizes)
        self._mark_done(job, [job.keys[index] for index in indices])

    def _mark_done(self, job: Job, keys: Sequence[bytes]) -> None:
        with self._changed:
            if not job.ended:
                job.done |= frozenset(keys)

    @contextlib.contextmanager
    def _copying(self, job: Job, sizes: Sequence[int]) -> Iterator[None]:
        """Context in which the rows belong to the job. Raises _Abandoned if the job has ended."""
        if any(size != self._primary.row_bytes for size in sizes):
            raise ValueError(f"a slot does not have the size of a row ({self._primary.row_bytes} bytes)")
        with self._changed:
            if job.ended:
                raise _Abandoned
            job.copying = True
        try:
            yield
        finally:
            with self._changed:
                job.copying = False
                if job.ended:
                    self._report(job)

    def _batches(self, indices: Sequence[int]) -> list[Sequence[int]]:
        """Returns slices of at most _BATCH_BYTES (or one row) and the server's maximum of keys."""
        most = min(max(1, _BATCH_BYTES // self._primary.row_bytes), self._client.max_keys or len(indices) or 1)
        return [indices[first : first + most] for first in range(0, len(indices), most)]
