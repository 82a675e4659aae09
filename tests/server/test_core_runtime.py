"""The runtime: the core with its threads, timers and tiers."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from harness.operations import run_to_end
from harness.polling import async_wait_until, stays
from harness.service_calls import no_sources

from kvtier.cuda.host.region import HostRegion
from kvtier.protos.v1.cache_pb2 import PrepareStoreRequest
from kvtier.protos.wire.packed_keys import pack_keys
from kvtier.server.config.schema import HandoffConfig, LeaseConfig, LimitConfig, RetentionConfig
from kvtier.server.core_runtime import TierRuntime
from kvtier.server.rpc.request_checks import RequestValidator
from kvtier.server.rpc.slice_scheduler import SliceScheduler
from kvtier.server.services.cache import CacheService
from kvtier.server.services.long_calls import LongCalls
from kvtier.tiers.core.call_specs import LookupSpec, StoreSpec
from kvtier.tiers.negotiation import vote
from kvtier.tiers.secondary_tier import BlockBytes, Entry, NamespaceId, Outcome, RequestInfo, SecondaryTier, Vote
from kvtier.tiers.types import EngineSession, NamespaceSpec, StoreStatus

REGION = 64 << 10
PART = 4096
SPEC = NamespaceSpec(NamespaceId(b"n" * 32), world_size=1, part_bytes=(PART,))


class GatedTier(SecondaryTier):
    """Its jobs wait until they are released."""

    type: ClassVar[str] = "gated"
    durable: ClassVar[bool] = False

    def __init__(self) -> None:
        super().__init__("gated", 1 << 20)
        self.gate = threading.Event()
        self.stored = 0
        self.ended = threading.Event()
        self.finished: list[str] = []

    def on_new_request(self, request: RequestInfo) -> Vote:
        return vote(self.rules, request)

    def on_request_finished(self, request_id: str) -> None:
        self.finished.append(request_id)

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


@pytest.fixture
def tier() -> GatedTier:
    return GatedTier()


@pytest.fixture
def stall_seconds() -> float:
    return 60.0


@pytest.fixture
async def runtime(tier: GatedTier, stall_seconds: float, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[TierRuntime]:
    """A runtime with short ticks, whose backed region holds 16 blocks."""
    monkeypatch.setattr("kvtier.server.core_runtime._TICK_SECONDS", 0.02)
    monkeypatch.setattr("kvtier.server.core_runtime._CLOSE_SECONDS", 0.1)
    runtime = TierRuntime(HostRegion.create(REGION), [tier], stall_seconds=stall_seconds)
    await runtime.start()
    await async_wait_until(lambda: runtime.core.stats().tiers[0].available_bytes == REGION)
    yield runtime
    tier.gate.set()
    await runtime.close()


async def test_tiers_see_the_end_of_each_request_of_a_server_that_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The requests of a session end in slices, and the runtime closes at once after the session."""
    monkeypatch.setattr("kvtier.server.tier_host.guard.VOTE_SECONDS", 60.0)
    tier = GatedTier()
    runtime = TierRuntime(HostRegion.create(REGION), [tier], stall_seconds=60.0)
    await runtime.start()
    session = runtime.core.open_session(b"s", "e", None, SPEC)
    names = [f"r{number}" for number in range(500)]
    for name in names:
        runtime.core.begin_request(session, RequestInfo(name, SPEC.id))
    runtime.core.close_session(session.id)
    runtime.run_commands()
    await runtime.close()
    assert sorted(tier.finished) == sorted(names)


def keys(first: int, count: int) -> list[bytes]:
    return [number.to_bytes(4, "big") + bytes(4) for number in range(first, first + count)]


def store_beside_a_finished_job(runtime: TierRuntime, tier: GatedTier) -> EngineSession:
    """Fills the region with blocks of a job whose end is unseen, and with a running store."""
    core = runtime.core
    session = core.open_session(b"s", "e", None, SPEC)
    blocks = REGION // PART // 4  # a tier may not queue more
    first = run_to_end(core.prepare_store(session, keys(0, 16), StoreSpec(lease_seconds=1e12), now=0))
    run_to_end(core.complete_store(session, first.store_id, range(blocks, 16)))
    lease = run_to_end(core.prepare_store(session, keys(100, 16 - blocks), StoreSpec(lease_seconds=1e12), now=0))
    assert len(lease.slots) == 16 - blocks, "the rest of the region is being written"
    runtime.run_commands()
    tier.gate.set()
    assert tier.ended.wait(60)
    deadline = runtime.now() + 60
    while not runtime._finished:
        assert runtime.now() < deadline
    answer = run_to_end(core.prepare_store(session, keys(200, 1), StoreSpec(lease_seconds=1e12), now=0))
    assert answer.statuses == bytes([StoreStatus.NO_ROOM]), "the core has not seen the end of the job"
    return session


async def test_finished_jobs_can_be_polled(runtime: TierRuntime, tier: GatedTier) -> None:
    """B3.20: `get_finished_jobs` polls; blocks of finished jobs are free for the next store."""
    session = store_beside_a_finished_job(runtime, tier)
    runtime.get_finished_jobs()
    answer = run_to_end(runtime.core.prepare_store(session, keys(200, 1), StoreSpec(lease_seconds=1e12), now=0))
    assert answer.statuses == bytes([StoreStatus.GRANTED])
    assert not any(hasattr(thing, "get_finished") for thing in (runtime, runtime.core, tier))


async def test_lookups_that_wait_for_one_block_wake_in_portions(runtime: TierRuntime) -> None:
    """The event loop handles other callbacks between them."""
    core = runtime.core
    session = core.open_session(b"s", "e", None, SPEC)
    store = run_to_end(core.prepare_store(session, keys(0, 1), StoreSpec(lease_seconds=1e12), now=0))
    spec = LookupSpec(lease_seconds=1e12)
    leases = [run_to_end(core.lookup(session, keys(0, 1), spec, now=0)).lease for _ in range(320)]
    waits = [asyncio.ensure_future(runtime.wait_for(lease.id, 600)) for lease in leases if lease is not None]
    await async_wait_until(lambda: len(runtime._waiting) == 320)
    run_to_end(core.complete_store(session, store.store_id))
    runtime.run_commands()
    rounds = 0
    while not all(each.done() for each in waits):
        rounds += 1
        await asyncio.sleep(0)
    assert rounds >= 10


async def test_finished_jobs_are_processed_before_an_eviction(runtime: TierRuntime, tier: GatedTier) -> None:
    """B3.4: PrepareStore sees finished jobs before the loop's next poll."""
    session = store_beside_a_finished_job(runtime, tier)
    registry: Any = SimpleNamespace(refuse_if_draining=lambda: None, get=lambda _: session)
    validator = RequestValidator(LimitConfig(), LeaseConfig(), RetentionConfig(), HandoffConfig())
    long_calls = LongCalls(runtime, registry, SliceScheduler(registry))
    sources = no_sources(runtime, long_calls)
    service = CacheService(runtime, registry, validator, pytest.fail, pytest.fail, long_calls, sources)
    answer = await service.PrepareStore(PrepareStoreRequest(keys=pack_keys(keys(200, 1))), SimpleNamespace())  # type: ignore[arg-type]
    assert answer.statuses == bytes([StoreStatus.GRANTED])


async def store_two_jobs(runtime: TierRuntime, tier: GatedTier) -> None:
    """Stores four blocks: a job of the tier works on one, and the others wait behind it."""
    session = runtime.core.open_session(b"s", "e", None, SPEC)
    for first, count in ((0, 1), (1, 3)):
        answer = run_to_end(
            runtime.core.prepare_store(session, keys(first, count), StoreSpec(lease_seconds=1e12), now=0)
        )
        run_to_end(runtime.core.complete_store(session, answer.store_id))
        runtime.run_commands()
    assert tier.stored == 0


@pytest.mark.parametrize("stall_seconds", [0.1])
async def test_a_drain_waits_for_a_hanging_tier(
    runtime: TierRuntime, tier: GatedTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the tier recovers in time, its missed blocks are stored.

    Otherwise the drain reports a failure.
    """
    monkeypatch.setattr("kvtier.server.core_runtime._STALLED_SECONDS", 0.5)
    await store_two_jobs(runtime, tier)
    while not runtime.tiers[0].last_error:
        await runtime.wait_for_change(1)
    assert not await runtime.drain(20), "the tier is still busy"
    drained = asyncio.ensure_future(runtime.drain(20))
    await asyncio.wait([drained], timeout=0.1)
    tier.gate.set()
    assert await drained
    assert tier.stored == 4


@pytest.mark.parametrize("stall_seconds", [0.5])
async def test_a_stopped_server_does_not_blame_its_tiers(
    runtime: TierRuntime, tier: GatedTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """During a SIGSTOP or in a frozen cgroup a tier has no time to answer either."""
    monkeypatch.setattr("kvtier.server.core_runtime._LATE_SECONDS", 0.1)
    await store_two_jobs(runtime, tier)
    await runtime.wait_for_change(1)  # the ticks have begun
    time.sleep(0.6)  # noqa: ASYNC251 - blocks the loop on purpose
    await asyncio.to_thread(stays, lambda: not runtime.tiers[0].last_error, 0.1)
    tier.gate.set()
    assert await runtime.drain(20)
    assert tier.stored == 4
    assert runtime.stats().tiers[1].dropped == 0


@pytest.mark.parametrize("stall_seconds", [0.1])
async def test_a_tier_recovers_despite_late_ticks(runtime: TierRuntime, tier: GatedTier) -> None:
    """Late ticks delay the check for hanging tiers, but not the recovery of a tier."""
    await store_two_jobs(runtime, tier)
    while not runtime.tiers[0].last_error:
        await runtime.wait_for_change(1)
    runtime._stall_watch_from = runtime.now() + 3600
    await asyncio.to_thread(stays, lambda: runtime.tiers[0].last_error, 0.1)
    tier.gate.set()
    await async_wait_until(lambda: not runtime.tiers[0].last_error)
    assert await runtime.drain(20)
    assert tier.stored == 4


async def test_a_failed_slice_does_not_end_a_reset(
    runtime: TierRuntime, tier: GatedTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The failure is logged and counted; the rest follows later, without an immediate retry."""
    monkeypatch.setattr("kvtier.server.core_runtime._RETRY_SECONDS", 0.01)
    monkeypatch.setattr("kvtier.tiers.core.cpu_tier.SLICE", 4)
    logged: list[str] = []
    counted: list[str] = []
    runtime.observe_failures(counted.append)
    tier.gate.set()
    core, failures = runtime.core, [True, True, True, False]
    session = core.open_session(b"s", "e", None, SPEC)
    answer = run_to_end(core.prepare_store(session, keys(0, 16), StoreSpec(lease_seconds=1e12), now=0))
    run_to_end(core.complete_store(session, answer.store_id))
    runtime.run_commands()
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
    monkeypatch.setattr("kvtier.server.core_runtime._log", SimpleNamespace(error=lambda text, **_: logged.append(text)))
    core.reset(session)
    runtime.run_commands()
    for _ in range(100):  # other events, which ask for slices as well
        core._sliced_work.continue_if(more=True)
        runtime.run_commands()
    while core.resetting(session):
        await runtime.wait_for_change(0.02)
    assert logged == ["slice failed"] * 3
    assert counted == ["slice"] * 3
    assert waits.count(0.01) == 3


@pytest.mark.parametrize(("idle_ms", "slice_ms", "wait_ms"), [(0, 2, 2), (0, 900, 50), (51, 2, None)])
async def test_slices_use_at_most_half_of_a_busy_event_loop(
    runtime: TierRuntime, monkeypatch: pytest.MonkeyPatch, idle_ms: int, slice_ms: int, wait_ms: int | None
) -> None:
    """After a slice the loop is free for as long as the slice took; without calls, for no time."""
    now, later, waits = 1000.0, runtime._loop.call_later, []
    left = 3

    def work() -> None:
        nonlocal now, left
        now, left = now + slice_ms / 1000, left - 1
        runtime.called_at = now - idle_ms / 1000
        runtime.core._sliced_work.is_requested = False
        runtime.core._sliced_work.continue_if(left > 0)

    def call_later(delay: float, callback: Any, *arguments: Any) -> Any:
        if callback == runtime._run_slice:
            waits.append(round(1000 * delay))
            delay = 0
        return later(delay, callback, *arguments)

    monkeypatch.setattr(runtime, "now", lambda: now)
    monkeypatch.setattr(runtime.core, "work", work)
    monkeypatch.setattr(runtime._loop, "call_later", call_later)
    runtime.core._sliced_work.continue_if(more=True)
    runtime.run_commands()
    await async_wait_until(lambda: left == 0)
    assert waits == ([wait_ms] * 2 if wait_ms is not None else [])


async def test_a_failed_tick_is_counted_and_repeated(runtime: TierRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without ticks nothing would expire."""
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
