"""Limit of the gRPC requests that arrive at the same time."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from types import SimpleNamespace
from typing import Any, Self

import pytest
from harness.polling import async_wait_until

from kvtier.server.refused import Refused
from kvtier.server.rpc import in_flight_limits, interceptor
from kvtier.server.rpc.in_flight_limits import (
    LOCAL_OR_REMOTE,
    GrpcCaller,
    InFlightLimiter,
    InFlightLimits,
    RefusalPace,
    RunningRequests,
    StreamShares,
)

LIMITS = LOCAL_OR_REMOTE._replace(patience_seconds=0.05)


class Context:
    """A call whose request never arrives."""

    async def read(self) -> bytes:
        await asyncio.sleep(3600)
        return b""


class Calls:
    """Calls of several callers, and how many of each were refused."""

    def __init__(self, limits: InFlightLimits = LIMITS) -> None:
        self.limiter = InFlightLimiter(limits)
        self.refused: Counter[str] = Counter()
        self._tasks: list[asyncio.Task[None]] = []

    def begin(self, group: str, count: int = 1, context: Any = None, connection: str = "") -> None:
        caller = GrpcCaller(group, f"connection {group}{connection}")
        for _ in range(count):
            self._tasks.append(asyncio.create_task(self._receive(context or Context(), caller)))

    async def _receive(self, context: Any, caller: GrpcCaller) -> None:
        try:
            await self.limiter.receive(context, caller)
        except Refused:
            self.refused[caller.group] += 1

    def running(self, group: str) -> int:
        return self.limiter._counts[group]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def test_a_further_caller_finds_a_place_at_once() -> None:
    """Callers take at most as many places as are then free: 16, 8 and 4 of 32."""
    async with Calls(LIMITS._replace(patience_seconds=3600.0)) as calls:
        for caller in ("first", "second", "third"):
            calls.begin(caller, 40)
            await asyncio.sleep(0)
        assert [calls.running(caller) for caller in ("first", "second", "third")] == [16, 8, 4]
        calls.begin("late")
        await asyncio.sleep(0)
        assert calls.running("late") == 1


async def test_a_caller_within_its_share_is_not_refused() -> None:
    """All places are taken. Only the caller with many requests gives some up, not the oldest."""
    honest = ("first", "second", "third", "fourth")
    async with Calls() as calls:
        for caller in honest:
            calls.begin(caller, 4)
            await asyncio.sleep(0)
        calls.begin("greedy", 16)
        await asyncio.sleep(2 * LIMITS.patience_seconds)
        calls.begin("late", 8)
        await async_wait_until(lambda: calls.refused["greedy"] >= 4)
        await async_wait_until(lambda: calls.running("late") >= 4)
        assert not any(calls.refused[caller] for caller in honest)


async def test_waiting_calls_are_bounded() -> None:
    """A call of another connection is received, although hundreds wait and more are refused."""
    received = asyncio.Event()

    async def read() -> bytes:
        received.set()
        return b"request"

    complete = SimpleNamespace(read=read)
    async with Calls() as calls:
        calls.begin("acme", 400, connection="abuse")
        await async_wait_until(lambda: calls.refused["acme"] >= 100)
        assert sum(map(len, calls.limiter._waiting.values())) <= in_flight_limits._MAX_WAITING
        while not received.is_set():  # it may be refused, too
            calls.begin("acme", context=complete, connection="honest")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(received.wait(), 0.2)


async def test_streams_have_shares() -> None:
    """A caller cannot take all places of a method."""
    shares = StreamShares(256)
    with contextlib.ExitStack() as running:
        for caller in ("first", "second"):
            with pytest.raises(Refused, match="too many streams"):  # noqa: PT012 - one of many
                for _ in range(1000):
                    running.enter_context(shares.counting(caller))
        assert shares._streams == {"first": 128, "second": 64}
        with shares.counting("third"):
            pass
    with shares.counting("first"):
        assert shares._streams == {"first": 1}


def test_callers_without_a_token_have_their_address() -> None:
    def address(peer: str) -> str:
        context: Any = SimpleNamespace(peer=lambda: peer)
        return interceptor._address_of(context)

    assert address("ipv4:10.0.0.1:5000") == address("ipv4:10.0.0.1:5001") == "10.0.0.1"
    assert address("ipv6:%5Bfd00::1:2%5D:5000") == address("ipv6:[fd00::7]:5001") == "fd00::/64"
    assert address("ipv6:%5Bfe80::1%25eth0%5D:5000") == "fe80::/64"
    assert address("ipv6:%5B::ffff:10.0.0.1%5D:5000") == "10.0.0.1"
    assert address("unix:") == "unix:"


async def test_refusals_are_paced() -> None:
    """A burst is sent at once. Further ones wait; cancelled ones do not extend the delay."""
    pace = RefusalPace()
    waits = [asyncio.create_task(pace.wait()) for _ in range(in_flight_limits._REFUSAL_BURST + 20)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert sum(wait.done() for wait in waits) == in_flight_limits._REFUSAL_BURST + 1
    for wait in waits:
        wait.cancel()
    crowd = [asyncio.create_task(pace.wait()) for _ in range(in_flight_limits._MAX_HELD + 10)]
    await async_wait_until(lambda: any(wait.done() for wait in crowd))
    assert pace._held <= in_flight_limits._MAX_HELD
    assert pace._next <= asyncio.get_running_loop().time() + in_flight_limits._REFUSAL_SECONDS + 1
    for wait in crowd:
        wait.cancel()
    await asyncio.gather(*waits, *crowd, return_exceptions=True)
    assert pace._held == 0


async def test_requests_of_running_calls_share_memory() -> None:
    """A group gets half, the next one finds room at once, and a waiting call gets freed memory."""
    running = RunningRequests(100 * 4096)
    with contextlib.ExitStack() as opened:
        for _ in range(50):
            opened.enter_context(await running.count("acme", 0))
        waiting = asyncio.create_task(running.count("acme", 0))
        with await running.count("zeta", 10 * 4096):
            assert not waiting.done()
    with await waiting:
        assert running._used == {"acme": 4096}
    with await running.count("acme", 1 << 40):  # larger than all memory: alone
        other = asyncio.create_task(running.count("zeta", 0))
        await asyncio.sleep(0)
        other.cancel()
        await asyncio.gather(other, return_exceptions=True)
    assert not running._used
    assert not running._waiting
