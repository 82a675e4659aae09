"""Turns of the event loop, with a clock that only the work advances."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier.server.rpc.slice_scheduler import Account, SliceScheduler

UNIT = 0.001
TENANTS = {b"abuser 1": "abuser", b"abuser 2": "abuser", b"honest": "honest", b"third": "third"}


class Loop:
    """The event loop, whose timers follow the scheduler's clock: waits take no real time."""

    def __init__(self) -> None:
        self.now = 100.0
        registry: Any = SimpleNamespace(tenant_of=TENANTS.get, check=lambda _: None)
        self.turns = SliceScheduler(registry, clock=lambda: self.now)
        self.served: list[str] = []
        loop = asyncio.get_running_loop()
        self._real_call_later = loop.call_later

    def call_later(self, seconds: float, callback: Callable[[], object]) -> asyncio.TimerHandle:
        def fire() -> None:
            self.now += seconds
            callback()

        return self._real_call_later(0, fire)

    def account(self, session: bytes) -> Account:
        account = self.turns.account_of(session)
        assert account is not None
        return account

    def work(self, session: bytes, seconds: float) -> None:
        self.served.append(session.decode())
        self.now += seconds

    def call(self, session: bytes, seconds: float = UNIT / 10) -> None:
        """Makes a call as a connection does: at once, or when it is the session's turn."""
        account = self.account(session)
        if self.turns.may_run(account):
            self.turns.run(account, self.work, session, seconds)
        else:
            self.turns.wait(account, lambda: bool(self.work(session, seconds)))

    def flood(self, session: bytes, seconds: float = UNIT) -> None:
        """Keeps a request of a session waiting until the end of the test."""

        def served() -> bool:
            self.work(session, seconds)
            self.turns.wait(self.account(session), served)
            return False

        self.turns.wait(self.account(session), served)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not condition():  # noqa: ASYNC110 - no timer may advance the clock
                await asyncio.sleep(0)

    def seconds_of(self, *sessions: bytes, unit: float = UNIT) -> float:
        return sum(self.served.count(session.decode()) for session in sessions) * unit


@pytest.fixture
def scenario(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Loop], Awaitable[None]]], None]:
    def run(test: Callable[[Loop], Awaitable[None]]) -> None:
        async def main() -> None:
            world = Loop()
            monkeypatch.setattr(asyncio.get_running_loop(), "call_later", world.call_later, raising=False)
            await test(world)

        asyncio.run(main())

    return run


def test_a_lone_session_gets_all_of_the_time(scenario: Any) -> None:
    async def test(world: Loop) -> None:
        world.flood(b"abuser 1")
        await world.until(lambda: len(world.served) >= 200)
        assert world.now == pytest.approx(100 + len(world.served) * UNIT)

    scenario(test)


def test_a_call_beside_a_flood_starts_at_once(scenario: Any) -> None:
    """Each call of another tenant starts before any further waiting request of the flood."""

    async def test(world: Loop) -> None:
        for _ in range(60):
            world.flood(b"abuser 1")
        await world.until(lambda: len(world.served) >= 60)
        for _ in range(100):
            served = len(world.served)
            world.call(b"honest")
            assert world.served[served:] == ["honest"]
            await asyncio.sleep(0)

    scenario(test)


def test_a_flood_uses_half_of_the_time_beside_another_tenant(scenario: Any) -> None:
    """60 waiting requests get as much of the loop as one; the loop is free for the other half."""

    async def test(world: Loop) -> None:
        for _ in range(60):
            world.flood(b"abuser 1")
        while world.now < 101:
            world.call(b"honest", UNIT / 100)
            await asyncio.sleep(0)
        assert 0.3 < world.seconds_of(b"abuser 1") < 0.55
        assert world.served.count("honest") >= 100

    scenario(test)


def test_time_used_alone_is_not_waited_for(scenario: Any) -> None:
    """After a call of another tenant, or of another session, a busy session waits for one slice."""

    async def test(world: Loop) -> None:
        for session, other in [(b"honest", b"third"), (b"abuser 1", b"abuser 2")]:
            world.flood(session)
            for _ in range(5):
                start = world.now
                await world.until(lambda until=start + 0.2: world.now >= until)  # type: ignore[misc]
                world.call(other)
                now, served = world.now, len(world.served)
                await world.until(lambda count=served + 1: len(world.served) >= count)  # type: ignore[misc]
                assert world.now - now <= 3 * UNIT

    scenario(test)


def test_a_machine_that_stops_during_a_call_is_not_charged(scenario: Any) -> None:
    """A tenant whose call was running for a minute is served again within a second."""

    async def test(world: Loop) -> None:
        world.flood(b"abuser 1")
        await world.until(lambda: len(world.served) >= 20)
        world.call(b"honest", 60.0)
        await world.until(lambda: len(world.served) >= 30)
        began = world.now
        world.call(b"honest")
        await world.until(lambda: world.served.count("honest") == 2 or world.now > began + 10)
        assert world.now < began + 1

    scenario(test)


def test_tenants_share_by_time_not_by_calls_or_sessions(scenario: Any) -> None:
    """Long requests of two sessions get as much time as short ones of another tenant."""

    async def test(world: Loop) -> None:
        for _ in range(30):
            world.flood(b"abuser 1", 4 * UNIT)
            world.flood(b"abuser 2", 4 * UNIT)
        world.flood(b"honest")
        await world.until(lambda: world.now >= 102)
        abuser = world.seconds_of(b"abuser 1", b"abuser 2", unit=4 * UNIT)
        honest = world.seconds_of(b"honest")
        assert abuser == pytest.approx(honest, rel=0.15)
        assert world.served.count("abuser 1") == pytest.approx(world.served.count("abuser 2"), abs=3)

    scenario(test)


def test_sessions_of_one_tenant_share_its_time(scenario: Any) -> None:
    async def test(world: Loop) -> None:
        for _ in range(59):
            world.flood(b"abuser 1")
        world.flood(b"abuser 2")
        await world.until(lambda: len(world.served) >= 400)
        assert world.served.count("abuser 1") == pytest.approx(world.served.count("abuser 2"), abs=5)

    scenario(test)


def test_a_pause_gives_no_claim_to_the_past(scenario: Any) -> None:
    """A tenant that returns after a minute does not get a minute of the loop in one piece."""

    async def test(world: Loop) -> None:
        world.call(b"honest")
        world.flood(b"abuser 1")
        await world.until(lambda: world.now >= 160)
        start = len(world.served)
        world.flood(b"honest")
        await world.until(lambda: len(world.served) >= start + 200)
        assert world.served[start:].count("abuser 1") == pytest.approx(100, abs=5)

    scenario(test)


def test_a_measured_call_is_charged_for_each_step(scenario: Any) -> None:
    """Also for the steps after a wait, and after an exception in the call."""

    async def test(world: Loop) -> None:
        async def call() -> str:
            world.now += UNIT
            try:
                await asyncio.sleep(0)
                world.now += UNIT
                raise ValueError  # noqa: TRY301 - as a handler does
            except ValueError:
                await asyncio.sleep(0)
                world.now += UNIT
            return "answer"

        account = world.account(b"honest")
        assert await world.turns.metered(account, call()) == "answer"
        assert account.tenant.used == account.used == pytest.approx(3 * UNIT)

    scenario(test)


def test_a_cancelled_wait_does_not_stop_the_others(scenario: Any) -> None:
    async def test(world: Loop) -> None:
        for _ in range(10):
            world.flood(b"abuser 1")
        world.call(b"honest")
        tasks = [asyncio.create_task(world.turns.enter(world.account(b"abuser 1"))) for _ in range(5)]
        await asyncio.sleep(0)
        for task in tasks[:4]:
            task.cancel()
        await world.until(lambda: all(task.done() for task in tasks))
        assert [task.cancelled() for task in tasks] == [True] * 4 + [False]

    scenario(test)


def test_accounts_end_with_their_sessions(scenario: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tenants without sessions are dropped, so that many names do not fill the memory."""

    async def test(world: Loop) -> None:
        monkeypatch.setattr("kvtier.server.rpc.slice_scheduler._MAX_TENANTS", 10)
        for number in range(1000):
            session = b"%d" % number
            TENANTS[session] = f"tenant {number}"
            try:
                world.call(session)
            finally:
                del TENANTS[session]
            world.turns.forget(session)
            world.now += 1
        assert len(world.turns._tenants) <= 10
        assert not world.turns._accounts

    scenario(test)
