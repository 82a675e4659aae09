"""Runtime of the core: passes events to the core, executes its commands, runs jobs on threads.

Threads run the jobs of the tiers and back the region (allocate its pages). They report their
results to the event loop. Everything else runs on the event loop, so the core needs no locks.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import count, islice
from typing import TypeVar

from ..cuda.host.region import HostRegion
from ..tiers.core.block import Block
from ..tiers.core.commands import (
    Command,
    ContinueWork,
    EndReaders,
    EventsRecorded,
    HoldChanged,
    LeaseSettled,
    LoadFromTier,
    LookupInTier,
    RemoveFromTier,
    RequestsSettled,
    RoomOffered,
    StoreInTier,
    Waiter,
)
from ..tiers.core.manager import TierManager
from ..tiers.core.settings import TierSettings
from ..tiers.core.slot_allocator import extent_bytes_for
from ..tiers.secondary_tier import NamespaceId, Outcome, SecondaryTier
from ..tiers.stats.snapshots import ManagerStats
from ..tiers.types import HoldName, JobId, LeaseId
from .random_ids import random_ids
from .region_backing import RegionBacking
from .region_digests import DamageLog, RegionDigests, RegionJobs
from .telemetry.downgrades import Downgrades
from .telemetry.logs import get_logger
from .telemetry.metrics import JobObserver
from .tier_host.guard import CheckedTier
from .tier_host.worker import TierWorker, close_all
from .warm_restart import WarmMemory

__all__ = ["TierRuntime"]

_log = get_logger(__name__)

_TICK_SECONDS = 1.0
_DISK_TICKS = 10
"""Number of ticks between two measurements of the free disk space."""
_WRITERS_SECONDS = 3.0
"""Maximum time that `drain` waits for stores in flight."""
_STALLED_SECONDS = 5.0
"""Maximum time that `drain` waits for tiers with a stalled job."""
_LATE_SECONDS = 1.0
"""If a tick is late by more than this, the process was paused, and so were its tier jobs. For
`stall_seconds` the runtime then detects no new stall, because no tier made the jobs late."""
_RETRY_SECONDS = 1.0
"""Delay of the next slice of work after a slice that failed."""
_ACTIVE_SECONDS = 0.05
"""For so long after a client's call, the event loop keeps half of its time free of slices."""
_CLOSE_SECONDS = 5.0
_WOKEN = 16
"""Number of calls that wake at once: 0.1 ms each."""

T = TypeVar("T")
_Name = LeaseId | HoldName | bytes | Waiter | None


class TierRuntime:
    """Owner of the core, the region and the tiers of one server."""

    def __init__(
        self,
        region: HostRegion,
        tiers: Sequence[SecondaryTier],
        settings: TierSettings | None = None,
        memory: WarmMemory | None = None,
        *,
        stall_seconds: float = 10.0,
        downgrades: Downgrades | None = None,
    ) -> None:
        """Takes ownership of region, memory and tiers: `close` closes them. Starts nothing.

        If a job takes longer than `stall_seconds`, its tier gets no other job until this job ends.
        Raises `ValueError` if the settings contradict each other or exceed what the tiers can hold.
        """
        self.region = region
        self.digests = RegionDigests(region)
        self._jobs = RegionJobs(region, self.digests, partial(self._call_loop, self.remove_damaged))
        self.downgrades = downgrades or Downgrades()
        self.memory = memory or WarmMemory(region, self.downgrades)
        self.extent_bytes = extent_bytes_for(region.size_bytes)
        self._workers = [TierWorker(tier) for tier in tiers]
        self.core = TierManager(
            region.size_bytes,
            self.extent_bytes,
            self.tiers,
            new_ids=random_ids(),
            settings=settings,
            now=time.monotonic(),
            records=self.memory.records,
        )
        self._stall_seconds = stall_seconds
        self._stall_watch_from = 0.0
        """New stalls are detected from this time on. The end of a stall is always detected."""
        self._waiting: dict[_Name, dict[asyncio.Future[None], None]] = defaultdict(dict)
        self._observe_failure: Callable[[str], object] = lambda _: None
        self.observe_damage: Callable[[int], object] = lambda _: None  # gets their number
        self.observe_wrong: Callable[[int], object] = lambda _: None  # gets their number
        self._damage_log = DamageLog()
        self._slice_failed = False
        self._slice_seconds = 0.0  # duration of the last slice
        self.called_at = 0.0
        """Time of the last call of a session, in seconds. Set by the registry of the sessions."""
        self.end_readers: Callable[[LeaseId], object] = lambda _: None
        """Ends the copies from the slots of a lease. Set by the owner of these copies."""
        self._finished: deque[tuple[TierWorker, JobId, Sequence[Outcome]]] = deque()
        """Ended jobs that the core has not processed."""
        self.next_change = asyncio.Event()
        """Event that the next call of `notify_change` sets."""
        self._is_closing = False
        add_memory = partial(self._call_loop, self._add_memory)
        self._backing = RegionBacking(region, self.downgrades, add_memory, is_warm=self.memory.is_warm)
        self._ticker: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Backs the first extents, starts a thread that backs the others, and starts the ticks."""
        self._loop = asyncio.get_running_loop()
        self.memory.recover(self.core)
        await asyncio.to_thread(self._backing.start, self.extent_bytes)
        self.core.tick(self.now())
        self._ticker = self._loop.create_task(self._tick())
        for worker in self._workers:
            if worker.tier.invalid_entries:
                worker.remove(worker.tier.invalid_entries)
        self.run_commands()

    now = staticmethod(time.monotonic)
    """Returns the time on the clock of the core, in seconds."""

    def run_commands(self) -> None:
        """Executes the commands that the core has queued. Call it after each call of the core."""
        woken: dict[asyncio.Future[None], None] = {}
        try:
            while commands := self.core.take_commands():
                for command in commands:
                    self._execute(command, woken)
        finally:
            if woken:
                self._wake_some(woken)

    def get_finished_jobs(self) -> None:
        """Passes the results of ended jobs to the core, which then unpins their blocks.

        Services call this before they allocate slots, so that these blocks can be evicted (B3.4).
        """
        if not self._finished:
            return
        while self._finished:
            worker, job_id, outcomes = self._finished.popleft()
            worker.jobs -= 1
            self.core.job_finished(job_id, outcomes)
        self.run_commands()
        self.notify_change()

    async def wait_for(self, name: _Name, seconds: float) -> None:
        """Waits, at most `seconds`, for an event of a lease, hold, scope of the log or waiter.

        The event of a lease: no block of the lease is pending any more, or the lease has ended. The
        event of a hold: the hold has changed or ended. The event of a scope: the log has an event
        after the events that were read. The event of a waiter: there may be room for it.
        """
        future = self._loop.create_future()
        self._waiting[name][future] = None
        try:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(future, seconds)
        finally:
            waiting = self._waiting.get(name, {})
            waiting.pop(future, None)
            if not waiting:
                self._waiting.pop(name, None)

    async def wait_for_change(self, seconds: float, change: asyncio.Event | None = None) -> None:
        """Waits, at most `seconds`, until `notify_change` is called, for example after a tick.

        `change` is an earlier `next_change`. If it is set meanwhile, the call returns at once.
        """
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for((change or self.next_change).wait(), seconds)

    def notify_change(self) -> None:
        """Wakes the callers of `wait_for_change`."""
        self.next_change.set()
        self.next_change = asyncio.Event()

    async def drain(self, seconds: float) -> bool:
        """Waits, at most `seconds`, until stores in flight end and blocks are written to the tiers.

        Returns whether all stores ended and all blocks were written in time. The least recently
        used blocks are written last. The caller must refuse new stores before this call.
        """
        deadline = self.now() + seconds
        self.core.store_skipped()
        self.run_commands()
        # Wait only briefly for stores in flight: a hanging engine must not delay complete blocks.
        stored = await self._wait_idle(self.now() + min(_WRITERS_SECONDS, seconds), lambda: self.core.stats().stores)
        self.core.store_skipped()
        self.run_commands()
        idle = await self._wait_idle(deadline, self._begin_queued_stores)
        return await self._wait_for_stalled(deadline) and idle and stored

    def _begin_queued_stores(self) -> int:
        """Starts the stores that wait for more blocks; returns the number of jobs that run."""
        self.core.flush_queues()
        self.run_commands()
        return sum(worker.jobs for worker in self._workers if not worker.stalled)

    async def _wait_for_stalled(self, deadline: float) -> bool:
        """Waits until no tier is stalled, then writes the blocks that the stalled tiers skipped.

        Both waits end at the latest at `deadline`. Returns whether no tier is stalled at the end.
        """
        stall_deadline = min(deadline, self.now() + _STALLED_SECONDS)
        stalled = [worker for worker in self._workers if worker.stalled]
        if not stalled:
            return True
        await self._wait_idle(stall_deadline, lambda: sum(worker.stalled for worker in stalled))
        self.core.store_skipped()
        self.run_commands()
        await self._wait_idle(deadline, self._begin_queued_stores)
        return not any(worker.stalled for worker in self._workers)

    async def _wait_idle(self, deadline: float, busy: Callable[[], int]) -> bool:
        while busy():
            if self.now() >= deadline:
                return False
            await self.wait_for_change(min(0.05, deadline - self.now()))
        return True

    def stats(self) -> ManagerStats:
        stats = self.core.stats()
        cpu, *others = stats.tiers
        if self._backing.error is not None:
            cpu = replace(cpu, healthy=False, last_error=self._backing.error)
        measured = (
            replace(tier, free_disk_bytes=worker.free_disk_bytes)
            for tier, worker in zip(others, self._workers, strict=True)
        )
        return replace(stats, tiers=(cpu, *measured))

    def observe_jobs(self, observer: JobObserver) -> None:
        for worker in self._workers:
            worker.observe_job = observer

    def observe_failures(self, observer: Callable[[str], object]) -> None:
        """Sets the observer of failures in background work. It gets "tick" or "slice"."""
        self._observe_failure = observer

    @property
    def tiers(self) -> list[CheckedTier]:
        """Tiers below the CPU tier, in lookup order."""
        return [worker.tier for worker in self._workers]

    def check(self, number: int, work: Callable[[], T]) -> asyncio.Future[T]:
        return self._workers[number - 1].check(work)

    def entries_lost(self, number: int, names: Sequence[tuple[NamespaceId, bytes]]) -> None:
        self.core.entries_lost(number, names)
        self.run_commands()
        self.notify_change()

    async def close(self) -> None:
        """Ends the threads, then closes the tiers and the region. Must be the last call.

        First waits, at most `_CLOSE_SECONDS`, for the core's work: tiers must see the end of each
        request. If a thread of a tier does not end, the region stays mapped, as it may be accessed.
        """
        until = self.now() + _CLOSE_SECONDS
        while self.core.has_work() and self.now() < until:  # noqa: ASYNC110 - once per life
            await asyncio.sleep(0.005)
        self._is_closing = True
        if self._ticker is not None:
            self._ticker.cancel()
        await asyncio.to_thread(self._backing.close)
        await asyncio.to_thread(close_all, self._workers)
        if not self.left_behind:
            self.memory.close()

    @property
    def left_behind(self) -> list[str]:
        """Names of the tiers whose threads did not end during `close`."""
        return [worker.tier.name for worker in self._workers if worker.left_behind]

    def _execute(self, command: Command, woken: dict[asyncio.Future[None], None]) -> None:
        """Executes a command. Adds the calls that must wake to `woken`."""
        if self._is_closing:
            return
        match command:
            case StoreInTier(job_id, tier, blocks):
                worker = self._workers[tier - 1]
                self._jobs.store(worker, blocks, partial(self._ended_on_thread, worker, job_id))
            case LoadFromTier(job_id, tier, blocks):
                worker = self._workers[tier - 1]
                self._jobs.load(worker, blocks, partial(self._ended_on_thread, worker, job_id))
            case LookupInTier(job_id, tier, keys):
                self._workers[tier - 1].look_up(keys, partial(self._call_loop, self._answered, job_id))
            case RemoveFromTier(tier, keys):
                self._workers[tier - 1].remove(keys)
            case LeaseSettled(name) | HoldChanged(name) | EventsRecorded(name) | RoomOffered(name):
                woken.update(self._waiting.pop(name, {}))
            case EndReaders(lease_id):
                self.end_readers(lease_id)
            case RequestsSettled():
                self.notify_change()
            case ContinueWork():
                self._schedule_slice()

    def _wake_some(self, waiting: dict[asyncio.Future[None], None]) -> None:
        """Wakes the first calls now, the others later: thousands can wait for a block or hold."""
        for future in list(islice(waiting, _WOKEN)):
            del waiting[future]
            if not future.done():
                future.set_result(None)
        if waiting:
            self._loop.call_soon(self._wake_some, waiting)

    def _schedule_slice(self) -> None:
        if self._slice_failed:
            self._loop.call_later(_RETRY_SECONDS, self._run_slice)
        elif self.now() - self.called_at < _ACTIVE_SECONDS:
            self._loop.call_later(min(self._slice_seconds, _ACTIVE_SECONDS), self._run_slice)
        else:
            self._loop.call_soon(self._run_slice)

    def _run_slice(self) -> None:
        """Runs one slice of the core's work. Other calls run before the next slice."""
        self._slice_failed, began = False, self.now()
        try:
            self.core.work()
        except Exception as error:  # noqa: BLE001 - otherwise resets and evictions would stop
            self._slice_failed = True
            self._observe_failure("slice")
            _log.error("slice failed", exc_info=error)
        self._slice_seconds = self.now() - began
        self.run_commands()

    def remove_damaged(self, blocks: Sequence[Block], found_by: str) -> None:
        """Removes damaged blocks. `found_by`: name of a client or a tier."""
        removed = self.core.remove_damaged(blocks)
        self.observe_damage(len(removed))
        self._damage_log.write(removed, found_by, self.now())
        self.run_commands()

    def remove_wrong(self, blocks: Sequence[Block], found_by: str) -> None:
        """Removes blocks whose KV an engine has found to be wrong, also from the tiers below."""
        removed = self.core.remove_wrong(blocks)
        self.observe_wrong(len(removed))
        self._damage_log.write(removed, found_by, self.now(), "block differs from the KV that an engine computes")
        self.run_commands()

    def _ended_on_thread(self, worker: TierWorker, job_id: JobId, outcomes: Sequence[Outcome]) -> None:
        self._finished.append((worker, job_id, outcomes))
        self._call_loop(self.get_finished_jobs)

    def _call_loop(self, what: Callable[..., object], *arguments: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the server has ended
            self._loop.call_soon_threadsafe(what, *arguments)

    def _answered(self, job_id: JobId, answers: Sequence[bool]) -> None:
        self.core.lookup_finished(job_id, answers)
        self.run_commands()
        self.notify_change()

    async def _tick(self) -> None:
        for tick in count():
            if tick % _DISK_TICKS == 0:
                for worker in self._workers:
                    worker.measure_disk()
            asleep = self.now()
            await asyncio.sleep(_TICK_SECONDS)
            if self.now() - asleep > _TICK_SECONDS + _LATE_SECONDS:
                self._stall_watch_from = self.now() + self._stall_seconds
            try:
                self._watch_tiers()
                self.core.tick(self.now())
                self.run_commands()
                self.notify_change()
            except Exception as error:  # noqa: BLE001 - without ticks nothing would expire
                self._observe_failure("tick")
                _log.error("tick failed", exc_info=error)

    def _watch_tiers(self) -> None:
        for number, worker in enumerate(self._workers, start=1):
            if worker.stalled or self.now() >= self._stall_watch_from:
                self.core.tier_stalled(number, stalled=worker.watch(self._stall_seconds))

    def _add_memory(self, offset: int, nbytes: int) -> None:
        self.core.add_memory(offset, nbytes)
        self.run_commands()
