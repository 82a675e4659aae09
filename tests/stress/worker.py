"""`python -m stress.worker JSON`: one client process.

SIGTERM ends it; any other end is a failure.
"""

from __future__ import annotations

import asyncio
import random
import signal
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

import msgspec

from kvtier.client import KVTierError
from stress.actions import Actions
from stress.client_slots import ClientSlots
from stress.durable_ledger import DepositPlan, DurableLedger
from stress.result_log import ResultLog
from stress.shape import DATASETS, LEDGER, PAIR, Dataset

__all__ = ["Task"]

PUBLISH_SECONDS = 0.5
NEVER = ("InvalidRequest", "NotOwner", "ChecksumMismatch", "ServerError")
"""Errors that no client may see, even if processes are killed: each is a failure."""


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """Configuration of one client process.

    Attributes:
        name: slot and incarnation; also the name of its files.
        style: "sync" (threads that share its clients) or "aio" (tasks).
        workers: number of threads or tasks.
        rank: in the pair; None for a single-process engine.
        lease: the server's lease duration in seconds.
        since: start of the run on the monotonic clock.
        deposits: how many blocks to deposit.
    """

    name: str
    seed: str
    endpoint: str
    directory: str
    style: str
    transport: str
    fields: tuple[str, ...]
    workers: int
    lease: float
    since: float
    deposits: DepositPlan
    rank: int | None = None

    def shapes(self) -> list[Dataset]:
        """The namespaces that it uses."""
        known = {**DATASETS, PAIR.name: PAIR, LEDGER.name: LEDGER}
        return [known[name] for name in self.fields]


class Worker:
    """Runs the threads or tasks of one process until SIGTERM."""

    def __init__(self, task: Task) -> None:
        directory = Path(task.directory)
        self._task = task
        self._datasets = task.shapes()
        self._results = ResultLog(directory / f"{task.name}.jsonl")
        self._ledger = DurableLedger(directory, task.name, task.deposits, since=task.since)
        self._stop = threading.Event()
        engine = "pair" if task.rank is not None else None
        self._slots = ClientSlots(
            task.endpoint,
            style=task.style,
            transport=task.transport,
            name=task.name,
            engine=engine,
            rank=task.rank or 0,
        )

    def run(self) -> int:
        """Works until SIGTERM; returns the exit code."""
        signal.signal(signal.SIGTERM, lambda *_: self._stop.set())
        threads = self._threads()
        for thread in threads:
            thread.start()
        while not self._stop.wait(PUBLISH_SECONDS):
            self._results.publish()
        for thread in threads:
            thread.join()
        if self._task.style == "sync":
            asyncio.run(self._guarded(self._slots.close()))
        self._results.publish("end")
        self._results.close()
        self._ledger.close()
        return int(self._results.failed)

    def _threads(self) -> list[threading.Thread]:
        workers = range(self._task.workers)
        if self._task.style == "aio":
            return [threading.Thread(target=lambda: asyncio.run(self._guarded(self._all(list(workers)))), name="loop")]
        for field in self._datasets:
            self._slots.open(field)
        return [
            threading.Thread(target=lambda hand: asyncio.run(self._guarded(self._hand(hand))), args=(hand,))
            for hand in workers
        ]

    async def _guarded(self, work: Any) -> None:
        try:
            await work
        except BaseException:  # noqa: BLE001 - also an unexpected `CancelledError`
            self._results.fail(traceback.format_exc())
            self._stop.set()

    async def _all(self, workers: list[int]) -> None:
        for field in self._datasets:
            self._slots.open(field)
        await asyncio.gather(*(self._guarded(self._hand(hand)) for hand in workers))
        await self._slots.close()

    async def _hand(self, hand: int) -> None:
        rng = random.Random(f"{self._task.seed}:{hand}")
        acts = Actions(rng, self._slots, self._datasets, self._results, self._ledger, lease=self._task.lease)
        while not self._stop.is_set():
            try:
                await self._one(acts, rng)
            except KVTierError as error:
                self._count(error)
            await asyncio.sleep(rng.uniform(0.0, 0.04))

    async def _one(self, acts: Actions, rng: random.Random) -> None:
        if self._task.style == "aio" and rng.random() < 0.15:
            await acts.cancelled()
        elif self._task.rank is not None and rng.random() < 0.2:
            slot = self._slots.of(PAIR)
            await acts.leave_lease(slot, acts.keys(PAIR))
        else:
            await acts.run_one()

    def _count(self, error: KVTierError) -> None:
        kind = type(error).__name__
        self._results.count(f"error {kind} {error.reason}".rstrip())
        if kind in NEVER:
            self._results.fail(traceback.format_exc())


def main() -> int:
    return Worker(msgspec.json.decode(sys.argv[1], type=Task)).run()


if __name__ == "__main__":
    sys.exit(main())
