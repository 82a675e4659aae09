"""Rate of the calls over gRPC that need no session."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import Self

import pytest
from harness.polling import async_wait_until

from kvtier.server.refused import Refused
from kvtier.server.rpc import call_pace
from kvtier.server.rpc.call_pace import CallPace
from kvtier.server.rpc.in_flight_limits import GrpcCaller

BURST = 4
NEXT = BURST + 4
"""A delayed loop starts up to `BURST` calls at once. The next turns belong to the new caller."""


class Callers:
    """Calls of several callers, in the order in which they got their turn."""

    def __init__(self) -> None:
        self.pace = CallPace()
        self.begun: list[str] = []
        self.refused: Counter[str] = Counter()
        self.tasks: list[asyncio.Task[None]] = []

    def begin(self, group: str, connection: str, count: int = 1) -> list[asyncio.Task[None]]:
        caller = GrpcCaller(group, f"{group}/{connection}")
        tasks = [asyncio.create_task(self._call(caller)) for _ in range(count)]
        self.tasks += tasks
        return tasks

    async def _call(self, caller: GrpcCaller) -> None:
        try:
            await self.pace.wait(caller)
            self.begun.append(caller.connection)
        except Refused:
            self.refused[caller.group] += 1

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        assert not self.pace._groups
        assert not self.pace._waiting


@pytest.fixture
async def callers(monkeypatch: pytest.MonkeyPatch) -> Callers:
    monkeypatch.setattr(call_pace, "_BURST", BURST)
    return Callers()


async def test_calls_have_a_rate(callers: Callers) -> None:
    """After a burst, no more calls begin than the rate allows."""
    async with callers:
        began = time.monotonic()
        callers.begin("a", "1", 500)
        await async_wait_until(lambda: len(callers.begun) >= 40)
        elapsed = time.monotonic() - began
        assert len(callers.begun) <= BURST + 2 + elapsed * call_pace._CALLS_PER_SECOND


async def test_groups_take_turns(callers: Callers) -> None:
    """One call of another address is among the next ones."""
    async with callers:
        callers.begin("a", "1", 500)
        await async_wait_until(lambda: len(callers.begun) >= 10)
        [one] = callers.begin("b", "1")
        await asyncio.sleep(0)
        before = len(callers.begun)
        await one
        assert callers.begun.index("b/1") <= before + NEXT


async def test_connections_of_a_group_take_turns(callers: Callers) -> None:
    """A call of the same address is among the next ones, although a hundred connections wait."""
    async with callers:
        for number in range(100):
            callers.begin("a", f"{number}", 5)
        await async_wait_until(lambda: len(callers.begun) >= 10)
        [one] = callers.begin("a", "honest")
        await asyncio.sleep(0)
        before = len(callers.begun)
        await one
        assert callers.begun.index("a/honest") <= before + NEXT


async def test_new_connections_do_not_keep_old_ones_waiting(callers: Callers) -> None:
    """A flood opens a connection for each call, and always has the latest one."""
    async with callers:
        callers.begin("a", "first", 10)
        await async_wait_until(lambda: len(callers.begun) >= 4)
        [one] = callers.begin("a", "honest")
        for number in range(60):
            callers.begin("a", f"{number}")
            await asyncio.sleep(0.005)
            if one.done():
                break
        assert one.done()


async def test_waiting_calls_are_bounded(callers: Callers, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call of the group with most is refused, and none of others."""
    monkeypatch.setattr(call_pace, "_MAX_WAITING", 20)
    async with callers:
        callers.begin("a", "1", 60)
        callers.begin("b", "1", 5)
        await async_wait_until(lambda: len(callers.begun) + callers.refused.total() == 65)
        assert callers.refused == {"a": 60 - callers.begun.count("a/1")}
        assert callers.begun.count("b/1") == 5


async def test_cancelled_calls_keep_no_place(callers: Callers) -> None:
    async with callers:
        for task in callers.begin("a", "1", 50):
            await asyncio.sleep(0)
            task.cancel()
        await asyncio.sleep(0)
        assert callers.pace._waiting == 0
        [one] = callers.begin("a", "1")
        await one
