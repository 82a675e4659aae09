"""`python -m stress.worker JSON`: one client process. SIGTERM ends it in order; anything else that ends it is a failure."""

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
from stress.acts import Acts
from stress.client_slots import ClientSlots
from stress.durable_ledger import DurableLedger
from stress.shape import FIELDS, LEDGER, PAIR, Field
from stress.tally import Tally

__all__ = ["Task"]

PUBLISH_SECONDS = 0.5
NEVER = ("InvalidRequest", "NotOwner", "ChecksumMismatch", "ServerError")
"""What no client may see, whoever is killed: each is a failure."""


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """What one client process is to be.

    Attributes:
        name: slot and incarnation; also the name of its files.
        style: "sync" (threads that share its clients) or "aio" (tasks that do).
        hands: how many threads or tasks.
        rank: of the pair; None for a process that is an engine by itself.
        lease: how long the server's leases hold, in seconds.
        since: when the run began, by the monotonic clock.
        deposits: how many blocks a second it deposits.
    """

    name: str
    seed: str
    endpoint: str
    directory: str
    style: str
    transport: str
    fields: tuple[str, ...]
    hands: int
    lease: float
    since: float
    deposits: float
    rank: int | None = None

    def shapes(self) -> list[Field]:
        """Returns the namespaces that it is busy in."""
        known = {**FIELDS, PAIR.name: PAIR, LEDGER.name: LEDGER}
        return [known[name] for name in self.fields]


class Worker:
    """Runs the hands of one process until it is told to stop."""

    def __init__(self, task: Task) -> None:
        directory = Path(task.directory)
        self._task = task
        self._fields = task.shapes()
        self._tally = Tally(directory / f"{task.name}.jsonl")
        self._ledger = DurableLedger(directory, task.name, since=task.since, per_second=task.deposits)
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
            self._tally.publish()
        for thread in threads:
            thread.join()
        if self._task.style == "sync":
            asyncio.run(self._guarded(self._slots.close()))
        self._tally.publish("end")
        self._tally.close()
        self._ledger.close()
        return int(self._tally.failed)

    def _threads(self) -> list[threading.Thread]:
        hands = range(self._task.hands)
        if self._task.style == "aio":
            return [threading.Thread(target=lambda: asyncio.run(self._guarded(self._all(list(hands)))), name="loop")]
        for field in self._fields:
            self._slots.open(field)
        return [
            threading.Thread(target=lambda hand: asyncio.run(self._guarded(self._hand(hand))), args=(hand,))
            for hand in hands
        ]

    async def _guarded(self, work: Any) -> None:
        try:
            await work
        except BaseException:  # noqa: BLE001 - also a `CancelledError` that nobody asked for
            self._tally.fail(traceback.format_exc())
            self._stop.set()

    async def _all(self, hands: list[int]) -> None:
        for field in self._fields:
            self._slots.open(field)
        await asyncio.gather(*(self._guarded(self._hand(hand)) for hand in hands))
        await self._slots.close()

    async def _hand(self, hand: int) -> None:
        rng = random.Random(f"{self._task.seed}:{hand}")
        acts = Acts(rng, self._slots, self._fields, self._tally, self._ledger, lease=self._task.lease)
        while not self._stop.is_set():
            try:
                await self._one(acts, rng)
            except KVTierError as error:
                self._count(error)
                await asyncio.sleep(rng.uniform(0.01, 0.1))
            await asyncio.sleep(rng.uniform(0.0, 0.04))

    async def _one(self, acts: Acts, rng: random.Random) -> None:
        if self._task.style == "aio" and rng.random() < 0.15:
            await acts.cancelled()
        elif self._task.rank is not None and rng.random() < 0.2:
            seat = self._slots.of(PAIR)
            await acts.hand_over(seat, acts.keys(PAIR))
        else:
            await acts.one()

    def _count(self, error: KVTierError) -> None:
        kind = type(error).__name__
        self._tally.count(f"error {kind} {error.reason}".rstrip())
        if kind in NEVER:
            self._tally.fail(traceback.format_exc())


def main() -> int:
    """Runs the task in the first argument."""
    return Worker(msgspec.json.decode(sys.argv[1], type=Task)).run()


if __name__ == "__main__":
    sys.exit(main())
