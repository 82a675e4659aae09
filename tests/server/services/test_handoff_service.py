"""HandoffService with its runtime, without a server: times, waiting claims, and leases."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration
from harness.payloads import key_of
from harness.polling import async_wait_until

from kvtier.cuda.host.region import HostRegion
from kvtier.protos.v1 import handoff_pb2
from kvtier.server.config.schema import HandoffConfig, LeaseConfig, LimitConfig, RetentionConfig
from kvtier.server.refused import Refused
from kvtier.server.rpc.request_checks import RequestValidator
from kvtier.server.runtime import TierRuntime
from kvtier.server.services.handoff import HandoffService
from kvtier.tiers.base import NamespaceId
from kvtier.tiers.errors import HoldExpired, HoldNotFound, UnknownSession
from kvtier.tiers.stats.request_log import ClaimOutcome
from kvtier.tiers.types import EngineSession, KeyStatus, NamespaceSpec, StoreStatus

SPEC = NamespaceSpec(NamespaceId(b"n" * 16), world_size=1, part_bytes=(4096,))
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
            refuse_if_draining=self._refuse_if_draining,
        )
        validator = RequestValidator(LimitConfig(), LeaseConfig(), RetentionConfig(), HandoffConfig())
        self._service: Any = HandoffService(runtime, registry, validator)

    def _refuse_if_draining(self) -> None:
        if self.draining:
            raise Refused("DRAINING", "the server is shutting down")

    async def publish(self, names: list[bytes], **fields: Any) -> handoff_pb2.PublishHoldResponse:
        request = handoff_pb2.PublishHoldRequest(request_id="r", keys=names, positions=range(len(names)), **fields)
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
        answer = self.runtime.core.prepare_store(self.session, names, request_id="", expires_at=1e12)
        assert set(answer.statuses) == {StoreStatus.GRANTED}
        assert answer.store_id is not None
        self.runtime.core.complete_store(self.session, answer.store_id)


def seconds(number: float) -> Duration:
    duration = Duration()
    duration.FromNanoseconds(int(number * 1e9))
    return duration


def run_with_engine(scenario: Any) -> None:
    """Runs a scenario with an engine, in a region of 16 blocks."""

    async def main() -> None:
        runtime = TierRuntime(HostRegion.create(16 * 4096), [], stall_seconds=10.0)
        await runtime.start()
        await async_wait_until(lambda: runtime.core.stats().tiers[0].available_bytes == 16 * 4096)
        try:
            await scenario(Engine(runtime), runtime)
        finally:
            await runtime.close()

    asyncio.run(main())


def keys(first: int, count: int) -> list[bytes]:
    return [key_of(number) for number in range(first, first + count)]


def test_waiting_claims_are_answered_before_the_call() -> None:
    """Publication and release execute the core's effects at once, not at the next tick."""

    async def scenario(engine: Engine, runtime: TierRuntime) -> None:
        await engine.publish(keys(0, 1))
        assert runtime.core.take_commands() == []
        await engine.release()
        assert runtime.core.take_commands() == []

    run_with_engine(scenario)


def test_a_draining_server_accepts_no_holds() -> None:
    """Existing holds can still be claimed and released."""

    async def scenario(engine: Engine, _: TierRuntime) -> None:
        engine.store(keys(0, 1))
        await engine.publish(keys(0, 1))
        engine.draining = True
        with pytest.raises(Refused, match="shutting down"):
            await engine.publish(keys(0, 1))
        assert (await engine.claim()).lease_id
        await engine.release()

    run_with_engine(scenario)


def test_a_claim_is_checked_again_after_its_wait() -> None:
    """B2.19: a hold that is about to expire when its blocks arrive is not read."""

    async def scenario(engine: Engine, runtime: TierRuntime) -> None:
        engine.store(keys(0, 1))
        await engine.publish(keys(0, 2), duration=seconds(5.3))
        with pytest.raises(HoldExpired):
            await engine.claim(wait=0.6)
        assert runtime.core.stats().leases == 0

    run_with_engine(scenario)


def test_a_session_that_ends_during_its_claim_gets_no_lease() -> None:
    """B2.19: no client would release the lease."""

    async def scenario(engine: Engine, runtime: TierRuntime) -> None:
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

    run_with_engine(scenario)


def test_the_lease_of_a_claim_belongs_to_its_request() -> None:
    """B2.17: it ends with the reader's request and at its expiry, like that of a lookup."""

    async def scenario(engine: Engine, runtime: TierRuntime) -> None:
        engine.store(keys(0, 1))
        await engine.publish(keys(0, 1))
        answer = await engine.claim(request_id="mine", lease_duration=seconds(7))
        lease = runtime.core.lease(engine.session, answer.lease_id)  # type: ignore[arg-type]
        assert answer.statuses == bytes([KeyStatus.HIT])
        assert 6 < lease.expires_at - runtime.now() <= 7
        runtime.core.finish_request(engine.session, "mine")
        assert runtime.core.stats().leases == 0

    run_with_engine(scenario)


def test_a_heartbeat_may_set_the_extension() -> None:
    """B2.1: the default is two thirds of the duration of the hold."""

    async def scenario(engine: Engine, _: TierRuntime) -> None:
        await engine.publish(keys(0, 1), duration=seconds(30))
        assert list((await engine.renew()).missing_holds) == []
        assert (await engine.claim()).remaining.seconds < 30
        await engine.renew(extension=seconds(300))
        assert (await engine.claim()).remaining.seconds >= 290
        await engine.release()
        assert list((await engine.renew()).missing_holds) == [0]

    run_with_engine(scenario)


@pytest.mark.parametrize("way", ["released", "reset", "declined", "declined while it waits"])
def test_claims_do_not_wait_for_ended_or_declined_holds(way: str) -> None:
    """B2.17: they are misses at once; only an unknown hold may still be published."""

    async def scenario(engine: Engine, runtime: TierRuntime) -> None:
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

    run_with_engine(scenario)


def test_claims_do_not_wait_for_holds_of_other_namespaces() -> None:
    """Engines whose blocks differ, for example by tensor parallelism, cannot share holds."""

    async def scenario(engine: Engine, runtime: TierRuntime) -> None:
        await engine.publish(keys(0, 1))
        other = NamespaceSpec(NamespaceId(b"o" * 16), world_size=1, part_bytes=(4096,))
        engine.session = runtime.core.open_session(b"o", "reader", None, other)
        with pytest.raises(HoldNotFound):
            await engine.claim(wait=3600)
        assert runtime.core.stats().claims_missed == {ClaimOutcome.OTHER_NAMESPACE: 1}

    run_with_engine(scenario)
