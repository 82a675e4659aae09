"""The shell around the core."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from kvtier.cuda.host.region import HostRegion
from kvtier.protos.v1.cache_pb2 import PrepareStoreRequest
from kvtier.server.config.schema import HandoffConfig, LeaseConfig, LimitConfig, RetentionConfig
from kvtier.server.rpc.request_checks import RequestValidator
from kvtier.server.runtime import TierRuntime
from kvtier.server.services.cache import CacheService
from kvtier.tiers.base import BlockBytes, Entry, NamespaceId, Outcome, RequestInfo, SecondaryTier, Vote
from kvtier.tiers.negotiation import vote
from kvtier.tiers.types import EngineSession, NamespaceSpec, StoreStatus

REGION = 64 << 10
PART = 4096
SPEC = NamespaceSpec(NamespaceId(b"n" * 16), world_size=1, part_bytes=(PART,))


class Gated(SecondaryTier):
    """Takes its time, until it is let go."""

    type: ClassVar[str] = "gated"
    durable: ClassVar[bool] = False

    def __init__(self) -> None:
        super().__init__("gated", 1 << 20)
        self.gate = threading.Event()
        self.stored = 0
        self.ended = threading.Event()

    def on_new_request(self, request: RequestInfo) -> Vote:
        return vote(self.rules, request)

    def entries(self) -> Iterator[Entry]:
        return iter(())

    def store(self, blocks: Sequence[BlockBytes]) -> list[Outcome]:
        assert self.gate.wait(60)
        self.ended.set()
        self.stored += len(blocks)
        return [Outcome.DONE] * len(blocks)

    def load(self, blocks: Sequence[BlockBytes]) -> list[Outcome]:
        return [Outcome.MISSING] * len(blocks)

    def remove(self, keys: Sequence[tuple[NamespaceId, bytes]]) -> None:
        pass

    def close(self) -> None:
        pass


def run(scenario: Any, *, stall_seconds: float = 60.0) -> None:
    """Runs a scenario with a runtime whose region holds 16 blocks, all of them."""

    async def main() -> None:
        tier = Gated()
        region = HostRegion.create(REGION)
        runtime = TierRuntime(region, [tier], stall_seconds=stall_seconds)
        await runtime.start()
        try:
            await scenario(runtime, tier)
        finally:
            tier.gate.set()
            await runtime.close()

    asyncio.run(main())


def keys(first: int, count: int) -> list[bytes]:
    """Returns keys."""
    return [number.to_bytes(4, "big") + bytes(4) for number in range(first, first + count)]


async def store_beside_a_finished_job(runtime: TierRuntime, tier: Gated) -> EngineSession:
    """Fills the region: a part with blocks whose job has ended without the loop knowing, the rest with a store in flight."""
    core = runtime.core
    session = core.open_session(b"s", "e", None, SPEC)
    await asyncio.sleep(0)  # the region's memory is announced through the loop
    assert core.stats().tiers[0].available_bytes == REGION
    blocks = REGION // PART // 4  # no more than may wait for a tier
    first = core.prepare_store(session, keys(0, 16), request_id="", expires_at=1e12)
    assert first.store_id is not None
    core.complete_store(session, first.store_id, range(blocks, 16))
    lease = core.prepare_store(session, keys(100, 16 - blocks), request_id="", expires_at=1e12)
    assert len(lease.slots) == 16 - blocks, "the rest of the region is being written to"
    runtime.pump()
    tier.gate.set()
    assert tier.ended.wait(60)
    deadline = runtime.now() + 60
    while not runtime._finished:
        assert runtime.now() < deadline
    answer = core.prepare_store(session, keys(200, 1), request_id="", expires_at=1e12)
    assert answer.statuses == bytes([StoreStatus.NO_ROOM]), "the core has not heard of it"
    return session


def test_what_threads_have_finished_can_be_taken_in_at_any_time() -> None:
    """B3.20: `get_finished_jobs` polls, and the blocks of what it finds are free for the very next store."""

    async def scenario(runtime: TierRuntime, tier: Gated) -> None:
        session = await store_beside_a_finished_job(runtime, tier)
        runtime.get_finished_jobs()
        answer = runtime.core.prepare_store(session, keys(200, 1), request_id="", expires_at=1e12)
        assert answer.statuses == bytes([StoreStatus.GRANTED])
        assert not any(hasattr(thing, "get_finished") for thing in (runtime, runtime.core, tier))

    run(scenario)


def test_finished_jobs_are_taken_in_before_room_is_made() -> None:
    """B3.4: PrepareStore sees what threads have finished, before the loop comes round to it."""

    async def scenario(runtime: TierRuntime, tier: Gated) -> None:
        session = await store_beside_a_finished_job(runtime, tier)
        registry: Any = SimpleNamespace(refuse_if_draining=lambda: None, get=lambda _: session)
        service = CacheService(
            runtime, registry, RequestValidator(LimitConfig(), LeaseConfig(), RetentionConfig(), HandoffConfig())
        )
        answer = await service.PrepareStore(PrepareStoreRequest(keys=keys(200, 1)), SimpleNamespace())  # type: ignore[arg-type]
        assert answer.statuses == bytes([StoreStatus.GRANTED])

    run(scenario)


async def store_two_jobs(runtime: TierRuntime, tier: Gated) -> None:
    """Stores four blocks, one of which a job of the tier is at work on; the others wait behind it."""
    await asyncio.sleep(0)
    session = runtime.core.open_session(b"s", "e", None, SPEC)
    for first, count in ((0, 1), (1, 3)):
        answer = runtime.core.prepare_store(session, keys(first, count), request_id="", expires_at=1e12)
        assert answer.store_id is not None
        runtime.core.complete_store(session, answer.store_id)
        runtime.pump()
    assert tier.stored == 0


def test_an_end_waits_for_a_tier_that_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it missed meanwhile is stored when it comes back in time; and it is not said to be all well if it does not."""
    monkeypatch.setattr("kvtier.server.runtime._TICK_SECONDS", 0.02)
    monkeypatch.setattr("kvtier.server.runtime._STALLED_SECONDS", 0.5)

    async def scenario(runtime: TierRuntime, tier: Gated) -> None:
        await store_two_jobs(runtime, tier)
        while not runtime.tiers[0].last_error:
            await runtime.changed(1)
        assert not await runtime.drain(20), "it is still at work"
        drained = asyncio.ensure_future(runtime.drain(20))
        await asyncio.sleep(0.1)
        tier.gate.set()
        assert await drained
        assert tier.stored == 4

    run(scenario, stall_seconds=0.1)


def test_a_server_that_was_stopped_says_nothing_of_its_tiers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A SIGSTOP, a frozen cgroup: the tier had no time to come back either."""
    monkeypatch.setattr("kvtier.server.runtime._TICK_SECONDS", 0.02)
    monkeypatch.setattr("kvtier.server.runtime._LATE_SECONDS", 0.1)

    async def scenario(runtime: TierRuntime, tier: Gated) -> None:
        await store_two_jobs(runtime, tier)
        time.sleep(0.6)  # noqa: ASYNC251 - the loop is to stand still
        await asyncio.sleep(0.1)
        assert not runtime.tiers[0].last_error
        tier.gate.set()
        assert await runtime.drain(20)
        assert tier.stored == 4
        assert runtime.stats().tiers[1].dropped == 0

    run(scenario, stall_seconds=0.5)


def test_a_tier_is_back_however_late_the_server_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where late ticks keep it from looking who stands still, a tier that did is heard when it comes back, and not before."""
    monkeypatch.setattr("kvtier.server.runtime._TICK_SECONDS", 0.02)

    async def scenario(runtime: TierRuntime, tier: Gated) -> None:
        await store_two_jobs(runtime, tier)
        while not runtime.tiers[0].last_error:
            await runtime.changed(1)
        runtime._stall_watch_from = runtime.now() + 3600
        await asyncio.sleep(0.1)
        assert runtime.tiers[0].last_error
        tier.gate.set()
        deadline = runtime.now() + 10
        while runtime.tiers[0].last_error:
            assert runtime.now() < deadline
            await asyncio.sleep(0.01)
        assert await runtime.drain(20)
        assert tier.stored == 4

    run(scenario, stall_seconds=0.1)


def test_a_slice_that_fails_is_no_end_of_a_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is logged and counted, the rest is done later, and what happens meanwhile does not have it tried at once."""
    monkeypatch.setattr("kvtier.server.runtime._RETRY_SECONDS", 0.01)
    monkeypatch.setattr("kvtier.tiers.core.cpu_tier.SLICE", 4)
    logged: list[str] = []
    counted: list[str] = []

    async def scenario(runtime: TierRuntime, tier: Gated) -> None:
        runtime.observe_failures(counted.append)
        tier.gate.set()
        await asyncio.sleep(0)
        core, failures = runtime.core, [True, True, True, False]
        session = core.open_session(b"s", "e", None, SPEC)
        answer = core.prepare_store(session, keys(0, 16), request_id="", expires_at=1e12)
        assert answer.store_id is not None
        core.complete_store(session, answer.store_id)
        runtime.pump()
        reset_slice, later = core._cpu_tier.reset_slice, asyncio.get_running_loop().call_later

        def broken() -> bool:
            if failures and failures.pop():
                raise RuntimeError("a defect")
            return reset_slice()

        waits: list[float] = []

        def call_later(delay: float, *arguments: Any) -> Any:
            waits.append(delay)
            return later(delay, *arguments)

        monkeypatch.setattr(core._cpu_tier, "reset_slice", broken)
        monkeypatch.setattr(runtime._loop, "call_later", call_later)
        monkeypatch.setattr("kvtier.server.runtime._log", SimpleNamespace(error=lambda text, **_: logged.append(text)))
        core.reset(session)
        runtime.pump()
        for _ in range(100):  # other events, which ask for slices as well
            core._sliced_work.continue_if(more=True)
            runtime.pump()
        while core.resetting(session):
            await runtime.changed(0.02)
        assert logged == ["slice failed"] * 3
        assert counted == ["slice"] * 3
        assert waits.count(0.01) == 3

    run(scenario)


def test_a_tick_that_fails_is_counted_and_the_next_one_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing would ever expire again without it."""
    monkeypatch.setattr("kvtier.server.runtime._TICK_SECONDS", 0.01)

    async def scenario(runtime: TierRuntime, _: Gated) -> None:
        counted: list[str] = []
        failed = asyncio.Event()

        def observe(what: str) -> None:
            counted.append(what)
            if len(counted) == 2:
                failed.set()

        def tick(_: float) -> None:
            raise RuntimeError("a defect")

        runtime.observe_failures(observe)
        monkeypatch.setattr(runtime.core, "tick", tick)
        await asyncio.wait_for(failed.wait(), 60)
        assert set(counted) == {"tick"}

    run(scenario)
