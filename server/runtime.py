"""The shell around the core: feeds it events, carries out its commands, moves bytes on threads.

Everything here runs on the event loop, except the tiers' jobs and the backing of the region, which run on threads
and report back through the loop. The core is therefore never entered twice at once, and needs no locks.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Protocol

from ..cuda.region import HostRegion, RegionError
from ..tiers.base import BlockBytes, NamespaceId, Outcome, SecondaryTier
from ..tiers.blocks import Block
from ..tiers.commands import (
    Command,
    JobId,
    LeaseId,
    LeaseSettled,
    LoadFromTier,
    LookupInTier,
    RemoveFromTier,
    StoreInTier,
)
from ..tiers.keeping import Keeping
from ..tiers.manager import TierManager
from ..tiers.stats import ManagerStats
from .logs import get_logger

__all__ = ["JobObserver", "TierRuntime", "extent_bytes_for"]

_log = get_logger(__name__)

_TICK_SECONDS = 1.0
_LOAD_THREADS = 2
_WRITERS_SECONDS = 3.0
_BACKING_CHUNK_BYTES = 64 << 20


class JobObserver(Protocol):
    """Who is told of every job that ended, on the thread that ran it."""

    def __call__(self, tier: str, operation: str, seconds: float, nbytes: int, outcomes: Sequence[Outcome], /) -> None:
        """Takes note of a job."""


def extent_bytes_for(region_bytes: int) -> int:
    """Returns the size of an extent, a power of two: 64 MiB in a region of 2 to 64 GiB.

    A part of a block must fit an extent, and each size class wastes one extent at most: so it is a 32nd of a smaller region
    and a 512th of a larger one, from 64 KiB to 256 MiB.
    """
    wanted = max(min(region_bytes // 32, 64 << 20), min(region_bytes // 512, 256 << 20))
    return 1 << (max(wanted, 64 << 10).bit_length() - 1)


class TierRuntime:
    """Owns the core, the region and the tiers of one server."""

    def __init__(self, region: HostRegion, tiers: Sequence[SecondaryTier], keeping: Keeping | None = None) -> None:
        """Opens nothing and starts nothing: see `start`. The region and the tiers are closed by `close`.

        Raises:
            ValueError: `keeping` contradicts itself, or what the tiers can hold.
        """
        self.region = region
        self.extent_bytes = extent_bytes_for(region.size_bytes)
        self.core = TierManager(
            region.size_bytes,
            self.extent_bytes,
            tiers,
            first_id=secrets.randbits(62),
            keeping=keeping,
            now=time.monotonic(),
        )
        self._tiers = tiers
        self.observe_job: JobObserver = _ignore_job
        # One thread stores and removes, in the order of the commands; loads run beside it.
        self._writers = [ThreadPoolExecutor(1, thread_name_prefix=f"kvtier-{tier.name}-store") for tier in tiers]
        self._loaders = [
            ThreadPoolExecutor(_LOAD_THREADS, thread_name_prefix=f"kvtier-{tier.name}-load") for tier in tiers
        ]
        self._waiting: dict[LeaseId, list[asyncio.Future[None]]] = defaultdict(list)
        self._finished: deque[tuple[JobId, Sequence[Outcome]]] = deque()
        """Jobs that threads have ended and the core has not heard of."""
        self._jobs = 0
        self._changed = asyncio.Event()
        self._closing = threading.Event()
        self._backing_trouble: str | None = None
        self._backing: threading.Thread | None = None
        self._ticker: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Backs the first extent with pages, and the others in the background; lets the core know of time from now on."""
        self._loop = asyncio.get_running_loop()
        first = min(self.extent_bytes, self.region.size_bytes)
        if await asyncio.to_thread(self._back, 0, first):
            self._backing = threading.Thread(target=self._back_from, args=(first,), name="kvtier-backing", daemon=True)
            self._backing.start()
        self.core.tick(self.now())
        self._ticker = self._loop.create_task(self._tick())
        self.pump()

    def now(self) -> float:
        """Returns the core's time, in seconds."""
        return time.monotonic()

    def pump(self) -> None:
        """Carries out what the core has asked for. Called after every event."""
        commands = self.core.take_commands()
        while commands:
            for command in commands:
                self._carry_out(command)
            commands = self.core.take_commands()

    def get_finished_jobs(self) -> None:
        """Lets the core know of all jobs that have ended by now. Called by the loop, and before room is asked for (B3.4)."""
        if not self._finished:
            return
        while self._finished:
            job_id, outcomes = self._finished.popleft()
            self._jobs -= 1
            self.core.job_finished(job_id, outcomes)
        self.pump()
        self.notify()

    async def settled(self, lease_id: LeaseId, seconds: float) -> None:
        """Waits until nothing of a lease is pending, or the time is over. The lease may be gone by then."""
        future = self._loop.create_future()
        self._waiting[lease_id].append(future)
        try:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(future, seconds)
        finally:
            waiting = self._waiting.get(lease_id, [])
            if future in waiting:
                waiting.remove(future)
            if not waiting:
                self._waiting.pop(lease_id, None)

    async def changed(self, seconds: float) -> None:
        """Waits until a job of a tier ends or a store fails, or the time is over."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), seconds)

    def notify(self) -> None:
        """Wakes who waits for a change."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def drain(self, seconds: float) -> bool:
        """Waits until no store is in flight and all that fits is durable; returns whether that came about in time.

        New stores must be refused meanwhile. What is not done in time is left out, the least recently used first.
        """
        deadline = self.now() + seconds
        self.core.make_durable()
        self.pump()
        # Writers get a moment, not more: one that hangs must not cost what is there already.
        stored = await self._idle(self.now() + min(_WRITERS_SECONDS, seconds), lambda: self.core.stats().stores)
        self.core.make_durable()
        self.pump()
        return await self._idle(deadline, lambda: self._jobs) and stored

    async def _idle(self, deadline: float, busy: Callable[[], int]) -> bool:
        while busy():
            if self.now() >= deadline:
                return False
            await self.changed(min(0.05, deadline - self.now()))
        return True

    def stats(self) -> ManagerStats:
        """Returns the figures of this moment. Called on the loop."""
        stats = self.core.stats()
        if self._backing_trouble is None:
            return stats
        cpu = replace(stats.tiers[0], healthy=False, trouble=self._backing_trouble)
        return replace(stats, tiers=(cpu, *stats.tiers[1:]))

    async def close(self) -> None:
        """Ends threads, closes tiers and lets go of the region. Called once, when no call is served any more."""
        self._closing.set()
        if self._ticker is not None:
            self._ticker.cancel()
        await asyncio.to_thread(self._close_threads)
        self.region.close()

    def _close_threads(self) -> None:
        if self._backing is not None:
            self._backing.join()
        for pool in (*self._writers, *self._loaders):
            pool.shutdown(wait=True, cancel_futures=True)
        for tier in self._tiers:
            tier.close()

    def _carry_out(self, command: Command) -> None:
        if self._closing.is_set():
            return
        match command:
            case StoreInTier(job_id, tier, blocks):
                self._run_job(self._writers[tier - 1], self._tiers[tier - 1], "store", job_id, blocks)
            case LoadFromTier(job_id, tier, blocks):
                self._run_job(self._loaders[tier - 1], self._tiers[tier - 1], "load", job_id, blocks)
            case LookupInTier(job_id, tier, keys):
                self._loaders[tier - 1].submit(self._ask, self._tiers[tier - 1], job_id, keys)
            case RemoveFromTier(tier, keys):
                self._writers[tier - 1].submit(_logging_errors(self._tiers[tier - 1].remove), keys)
            case LeaseSettled(lease_id):
                for future in self._waiting.pop(lease_id, ()):
                    if not future.done():
                        future.set_result(None)

    def _run_job(
        self, pool: ThreadPoolExecutor, tier: SecondaryTier, operation: str, job_id: JobId, blocks: Sequence[Block]
    ) -> None:
        """Hands a job to a thread. The slots are resolved here, on the loop; pins keep them where they are."""
        self._jobs += 1
        move = tier.store if operation == "store" else tier.load
        job = [self._block_bytes(block) for block in blocks]
        try:
            pool.submit(self._move, tier, operation, move, job_id, job)
        except RuntimeError as error:  # no thread to be had
            _log.error("tier failed", tier=tier.name, operation=operation, exc_info=error)
            self._finished.append((job_id, [Outcome.FAILED] * len(job)))
            self._loop.call_soon(self.get_finished_jobs)

    def _move(
        self,
        tier: SecondaryTier,
        operation: str,
        move: Callable[[Sequence[BlockBytes]], list[Outcome]],
        job_id: JobId,
        job: Sequence[BlockBytes],
    ) -> None:
        """Runs on a worker thread."""
        started = time.monotonic()
        try:
            outcomes = move(job)
        except Exception as error:  # noqa: BLE001 - a tier's defect must not end the server
            _log.error("tier failed", tier=tier.name, operation=operation, exc_info=error)
            tier.trouble = f"{operation}: {error}"
            outcomes = [Outcome.FAILED] * len(job)
        try:
            self.observe_job(tier.name, operation, time.monotonic() - started, sum(b.nbytes for b in job), outcomes)
        except Exception as error:  # noqa: BLE001 - a figure less, not a job that never ends
            _log.error("job not observed", exc_info=error)
        self._finished.append((job_id, outcomes))
        self._loop.call_soon_threadsafe(self.get_finished_jobs)

    def _ask(self, tier: SecondaryTier, job_id: JobId, keys: Sequence[tuple[NamespaceId, bytes]]) -> None:
        """Runs on a worker thread."""
        try:
            answers = tier.lookup(keys)
        except Exception as error:  # noqa: BLE001 - a tier's defect must not end the server
            _log.error("tier failed", tier=tier.name, operation="lookup", exc_info=error)
            tier.trouble = f"lookup: {error}"
            answers = []
        self._loop.call_soon_threadsafe(self._answered, job_id, answers)

    def _answered(self, job_id: JobId, answers: Sequence[bool]) -> None:
        self.core.lookup_finished(job_id, answers)
        self.pump()
        self.notify()

    def _block_bytes(self, block: Block) -> BlockBytes:
        memory = self.region.memory
        return BlockBytes(
            block.namespace,
            block.key,
            tuple(memory[slot : slot + block.part_bytes] for slot in block.slots if slot is not None),
        )

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            try:
                self.core.tick(self.now())
                self.pump()
                self.notify()
            except Exception as error:  # noqa: BLE001 - without it nothing would ever expire again
                _log.error("tick failed", exc_info=error)

    def _back_from(self, start: int) -> None:
        """Backs the rest of the region chunk by chunk, on a thread of its own."""
        chunk = max(self.extent_bytes, _BACKING_CHUNK_BYTES)
        for offset in range(start, self.region.size_bytes, chunk):
            if self._closing.is_set() or not self._back(offset, min(chunk, self.region.size_bytes - offset)):
                return
        _log.info("region backed", bytes=self.region.size_bytes, huge_bytes=self.region.huge_bytes)

    def _back(self, offset: int, nbytes: int) -> bool:
        """Backs a piece of the region and lets the core use it; returns whether there was memory for it."""
        try:
            self.region.back(offset, nbytes)
        except RegionError as error:
            self._backing_trouble = f"only {offset} of {self.region.size_bytes} bytes are backed: {error}"
            _log.error("region is smaller than configured", backed_bytes=offset, error=str(error))
            return False
        with contextlib.suppress(RuntimeError):  # the loop is closed: the server has ended meanwhile
            self._loop.call_soon_threadsafe(self.core.add_memory, offset, nbytes)
        return True


def _ignore_job(tier: str, operation: str, seconds: float, nbytes: int, outcomes: Sequence[Outcome], /) -> None:
    """Stands in until somebody observes jobs."""


def _logging_errors(remove: Callable[..., None]) -> Callable[..., None]:
    def call(keys: Sequence[object]) -> None:
        try:
            remove(keys)
        except Exception as error:  # noqa: BLE001 - what was not removed is removed when the tier is opened again
            _log.error("tier failed", operation="remove", exc_info=error)

    return call
