"""HandoffService with its runtime, without a server: times, waiting claims, and leases."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration
from harness.operations import run_to_end
from harness.payloads import key_of
from harness.polling import async_wait_until

from kvtier.cuda.host.region import HostRegion
from kvtier.protos.v1 import handoff_pb2
from kvtier.protos.wire.packed_keys import pack_keys, unpack_key_list
from kvtier.server.config.schema import HandoffConfig, LeaseConfig, LimitConfig, RetentionConfig
from kvtier.server.core_runtime import TierRuntime
from kvtier.server.refused import Refused
from kvtier.server.rpc.request_checks import RequestValidator
from kvtier.server.rpc.slice_scheduler import SliceScheduler
from kvtier.server.services.handoff import HandoffService
from kvtier.server.services.long_calls import LongCalls
from kvtier.tiers.core.call_specs import StoreSpec
from kvtier.tiers.errors import HoldExpired, HoldNotFound, UnknownSession
from kvtier.tiers.secondary_tier import NamespaceId
from kvtier.tiers.stats.request_log import ClaimOutcome
from kvtier.tiers.types import EngineSession, KeyStatus, NamespaceSpec, StoreStatus

SPEC = NamespaceSpec(NamespaceId(b"n" * 32), world_size=1, part_bytes=(4096,))
HOLD = handoff_pb2.HoldRef(engine_id="e", request_id="r")


class Engine:
    """The service, and one engine's session with it."""

    def __init__(self, runtime: TierRuntime) -> None:
        self.runtime = runtime
        self.session: EngineSession = runtime.core.open_session(b"s", "e", None, SPEC)
        self.draining = False
        registry: Any = SimpleNamespace(
            get=lambda _, **__: self.session,
            check=lambda session: runtime.core.session(session.id),
            tenant_of=lambda _: None,
            refuse_if_draining=self._refuse_if_draining,
        )
        validator = RequestValidator(LimitConfig(), LeaseConfig(), RetentionConfig(), HandoffConfig())
        self._service: Any = HandoffService(
            runtime, registry, validator, LongCalls(runtime, registry, SliceScheduler(registry))
        )

    def _refuse_if_draining(self) -> None:
        if self.draining:
            raise Refused("DRAINING", "the server is shutting down")

    async def publish(self, names: list[bytes], **fields: Any) -> handoff_pb2.PublishHoldResponse:
        request = handoff_pb2.PublishHoldRequest(
            request_id="r", keys=pack_keys(names), positions=range(len(names)), **fields
        )
        answer: handoff_pb2.PublishHoldResponse = await self._service.PublishHold(request, None)
        return answer

    async def claim(self, wait: float = 0.0, **fields: Any) -> handoff_pb2.ClaimHoldResponse:
        request = handoff_pb2.ClaimHoldRequest(hold=HOLD, wait=seconds(wait), **fields)
        answer: handoff_pb2.ClaimHoldResponse = await self._service.ClaimHold(request, None)
        return answer

    async def release(self) -> None:
        await self._service.ReleaseHolds(handoff_pb2.ReleaseHoldsRequest(holds=[HOLD]), None)

    async def renew(self, **fields: Any) -> handoff_pb2.RenewHoldsResponse:
        request = handoff_pb2.RenewHoldsRequest(holds=[HOLD], **fields)
        answer: handoff_pb2.RenewHoldsResponse = await self._service.RenewHolds(request, None)
        return answer

    def store(self, names: list[bytes]) -> None:
        answer = run_to_end(self.runtime.core.prepare_store(self.session, names, StoreSpec(lease_seconds=1e12), now=0))
        assert set(answer.statuses) == {StoreStatus.GRANTED}
        run_to_end(self.runtime.core.complete_store(self.session, answer.store_id))


def seconds(number: float) -> Duration:
    duration = Duration()
    duration.FromNanoseconds(int(number * 1e9))
    return duration


@pytest.fixture
async def runtime() -> AsyncIterator[TierRuntime]:
    """A runtime with a region of 16 blocks."""
    runtime = TierRuntime(HostRegion.create(16 * 4096), [], stall_seconds=10.0)
    await runtime.start()
    await async_wait_until(lambda: runtime.core.stats().tiers[0].available_bytes == 16 * 4096)
    yield runtime
    await runtime.close()


@pytest.fixture
def engine(runtime: TierRuntime) -> Engine:
    return Engine(runtime)


def keys(first: int, count: int) -> list[bytes]:
    return [key_of(number) for number in range(first, first + count)]


async def test_waiting_claims_are_answered_before_the_call(engine: Engine, runtime: TierRuntime) -> None:
    """Publication and release execute the core's effects at once, not at the next tick."""
    await engine.publish(keys(0, 1))
    assert runtime.core.take_commands() == []
    await engine.release()
    assert runtime.core.take_commands() == []


async def test_other_calls_run_while_many_claims_of_a_hold_wake(engine: Engine, runtime: TierRuntime) -> None:
    """The event loop handles other callbacks between them."""
    claims, name = [asyncio.ensure_future(engine.claim(wait=600)) for _ in range(320)], (SPEC.id, "e", "r")
    await async_wait_until(lambda: len(runtime._waiting.get(name, ())) == len(claims))
    await engine.publish(keys(0, 1))  # no client stores the block, so all claims continue to wait
    rounds = 0
    while len(runtime._waiting.get(name, ())) < len(claims):
        rounds += 1
        await asyncio.sleep(0)
    assert rounds >= 10
    await engine.release()
    assert {type(each) for each in await asyncio.gather(*claims, return_exceptions=True)} == {HoldNotFound}
    assert not runtime._waiting


async def test_a_draining_server_accepts_no_holds(engine: Engine) -> None:
    """Existing holds can still be claimed and released."""
    engine.store(keys(0, 1))
    await engine.publish(keys(0, 1))
    engine.draining = True
    with pytest.raises(Refused, match="shutting down"):
        await engine.publish(keys(0, 1))
    assert (await engine.claim()).lease_id
    await engine.release()


async def test_a_claim_is_checked_again_after_its_wait(engine: Engine, runtime: TierRuntime) -> None:
    """B2.19: a hold that is about to expire when its blocks arrive is not read."""
    engine.store(keys(0, 1))
    await engine.publish(keys(0, 2), duration=seconds(5.3))
    with pytest.raises(HoldExpired):
        await engine.claim(wait=0.6)
    assert runtime.core.stats().leases == 0


async def test_a_session_that_ends_during_its_claim_gets_no_lease(engine: Engine, runtime: TierRuntime) -> None:
    """B2.19: no client would release the lease."""
    publisher = runtime.core.open_session(b"p", "e", None, SPEC)
    claiming = asyncio.ensure_future(engine.claim(wait=20))
    await async_wait_until(lambda: bool(runtime._waiting))
    runtime.core.close_session(engine.session.id)
    engine.session = publisher
    await engine.publish([])
    with pytest.raises(UnknownSession):
        await claiming
    assert runtime.core.stats().leases == 0
    assert not runtime._waiting


async def test_the_lease_of_a_claim_belongs_to_its_request(engine: Engine, runtime: TierRuntime) -> None:
    """B2.17: it ends with the reader's request and at its expiry, like that of a lookup."""
    engine.store(keys(0, 1))
    await engine.publish(keys(0, 1))
    answer = await engine.claim(request_id="mine", lease_duration=seconds(7))
    lease = runtime.core.lease(engine.session, answer.lease_id)  # type: ignore[arg-type]
    assert answer.statuses == bytes([KeyStatus.HIT])
    assert 6 < lease.expires_at - runtime.now() <= 7
    runtime.core.finish_request(engine.session, "mine")
    assert runtime.core.stats().leases == 0


async def test_a_heartbeat_may_set_the_extension(engine: Engine) -> None:
    """B2.1: the default is two thirds of the duration of the hold."""
    await engine.publish(keys(0, 1), duration=seconds(30))
    assert list((await engine.renew()).missing_holds) == []
    assert (await engine.claim()).remaining.seconds < 30
    await engine.renew(extension=seconds(300))
    assert (await engine.claim()).remaining.seconds >= 290
    await engine.release()
    assert list((await engine.renew()).missing_holds) == [0]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
async def test_each_hold_of_a_long_call_is_renewed_and_released(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """The call runs in slices. The answer names missing holds by their number in the call."""
    monkeypatch.setattr("kvtier.server.services.handoff._SLICE", 2)
    held = [number for number in range(count) if number % 3 != 1]
    engine.store(keys(0, 1))
    for number in held:
        request = handoff_pb2.PublishHoldRequest(request_id=f"r{number}", keys=pack_keys(keys(0, 1)), positions=[0])
        answer = await engine._service.PublishHold(request, None)
        assert (answer.status, answer.pending_blocks) == (handoff_pb2.PUBLISH_STATUS_PUBLISHED, 0)
    holds = [handoff_pb2.HoldRef(engine_id="e", request_id=f"r{number}") for number in range(count)]
    renewing = handoff_pb2.RenewHoldsRequest(holds=holds)
    answer = await engine._service.RenewHolds(renewing, None)
    assert list(answer.missing_holds) == [number for number in range(count) if number not in held]
    await engine._service.ReleaseHolds(handoff_pb2.ReleaseHoldsRequest(holds=holds), None)
    answer = await engine._service.RenewHolds(renewing, None)
    assert list(answer.missing_holds) == list(range(count))


@pytest.mark.parametrize("way", ["released", "reset", "declined", "declined while it waits"])
async def test_claims_do_not_wait_for_ended_or_declined_holds(engine: Engine, runtime: TierRuntime, way: str) -> None:
    """B2.17: they are misses at once; only an unknown hold may still be published."""
    claiming = asyncio.ensure_future(engine.claim(wait=3600)) if way.endswith("waits") else None
    if claiming:
        await async_wait_until(lambda: bool(runtime._waiting))
    # Holds may have four of 16 blocks.
    answer = await engine.publish(keys(0, 6 if way.startswith("declined") else 1))
    assert (answer.status == handoff_pb2.PUBLISH_STATUS_PUBLISHED) is not way.startswith("declined")
    if way == "released":
        await engine.release()
    if way == "reset":
        runtime.core.reset(engine.session)
    with pytest.raises(HoldNotFound):
        await (claiming or engine.claim(wait=3600))
    assert runtime.core.stats().claims_missed == {ClaimOutcome.NOT_HELD: 1}
    await engine.publish(keys(0, 1))
    engine.store(keys(0, 1))
    assert (await engine.claim(wait=3600)).lease_id


async def test_claims_do_not_wait_for_holds_of_other_namespaces(engine: Engine, runtime: TierRuntime) -> None:
    """Engines whose blocks differ, for example by tensor parallelism, cannot share holds."""
    await engine.publish(keys(0, 1))
    other = NamespaceSpec(NamespaceId(b"n" * 16 + b"o" * 16), world_size=1, part_bytes=(4096,))
    engine.session = runtime.core.open_session(b"o", "reader", None, other)
    with pytest.raises(HoldNotFound):
        await engine.claim(wait=3600)
    assert runtime.core.stats().claims_missed == {ClaimOutcome.OTHER_NAMESPACE: 1}


@pytest.fixture
async def large(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Engine]:
    """An engine with a hold of 2,048 blocks, half of them ready. Each slice has its own turn."""
    monkeypatch.setattr("kvtier.server.rpc.slice_scheduler._TURN_SECONDS", 0.0)
    runtime = TierRuntime(HostRegion.create(16 * 1024 * 4096), [])
    await runtime.start()
    await async_wait_until(lambda: runtime.core.stats().tiers[0].available_bytes == runtime.region.size_bytes)
    engine = Engine(runtime)
    engine.store(keys(0, 1024))
    await engine.publish(keys(0, 2048))
    yield engine
    await runtime.close()


async def test_a_publication_runs_in_slices(large: Engine) -> None:
    """Other calls run between two slices; a cancelled publication leaves no hold and no pin."""
    handoffs, turns = large.runtime.core._handoffs, 0
    publishing = asyncio.ensure_future(large.publish(keys(0, 4096)))
    while not publishing.done():
        turns += 1
        await asyncio.sleep(0)
    assert turns > 4096 // 256
    assert (await publishing).status == handoff_pb2.PUBLISH_STATUS_PUBLISHED
    publishing = asyncio.ensure_future(large.publish(keys(4096, 2048)))
    while not handoffs._publications:
        assert not publishing.done()
        await asyncio.sleep(0)
    publishing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await publishing
    await async_wait_until(lambda: not handoffs._pins._counts)
    assert large.runtime.core.stats().held_bytes == 0


async def test_a_claim_runs_in_slices(large: Engine) -> None:
    """Other calls run between two slices; the answer is of the whole hold."""
    turns, claiming = 0, asyncio.ensure_future(large.claim())
    while not claiming.done():
        turns += 1
        await asyncio.sleep(0)
    assert turns > 2048 // 256
    answer = await claiming
    assert unpack_key_list(answer.keys) == keys(0, 2048)
    assert list(answer.positions) == list(range(2048))
    assert answer.statuses == bytes([KeyStatus.HIT]) * 1024 + bytes([KeyStatus.HIT_PENDING]) * 1024
    [lease] = large.runtime.core.leases()
    assert (lease.id, len(lease.items)) == (answer.lease_id, 1024)


@pytest.mark.parametrize("end", ["call", "session", "hold", "reset"])
async def test_a_claim_that_ends_early_leaves_no_lease(large: Engine, end: str) -> None:
    """The client disconnects, or its session or the hold ends, between two slices."""
    core = large.runtime.core
    claiming = asyncio.ensure_future(large.claim())
    for _ in range(4):
        await asyncio.sleep(0)
    assert core.leases()
    assert not claiming.done()
    if end == "call":
        claiming.cancel()
    elif end == "session":
        core.close_session(large.session.id)
    elif end == "hold":
        await large.release()
    else:
        core.reset(large.session)
    await asyncio.wait([claiming])
    assert claiming.cancelled() or isinstance(claiming.exception(), HoldNotFound | UnknownSession)
    assert not core.leases()
    if end != "session":
        core.reset(large.session)
        await async_wait_until(lambda: not core.resetting(large.session))


@pytest.mark.parametrize(
    ("method", "is_refused"),
    [
        ("ReleaseHolds", False),
        ("PublishHold", True),
        ("ClaimHold", True),
        ("RenewHolds", True),
        ("ReportNotClaimed", True),
    ],
)
async def test_only_releases_may_exceed_the_rate_limit(engine: Engine, method: str, *, is_refused: bool) -> None:
    """Else the held blocks of a tenant above its limit would stay pinned."""

    def get(_: object, *, is_release: bool = False) -> EngineSession:
        if not is_release:
            raise Refused("RATE_LIMITED", "too many calls")
        return engine.session

    engine._service._sessions.get = get
    service = handoff_pb2.DESCRIPTOR.services_by_name["HandoffService"]
    request = getattr(handoff_pb2, service.methods_by_name[method].input_type.name)()
    reason = ""
    try:
        await getattr(engine._service, method)(request, None)
    except Refused as refused:
        reason = refused.reason
    assert (reason == "RATE_LIMITED") is is_refused
