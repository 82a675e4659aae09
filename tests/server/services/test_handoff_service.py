"""HandoffService beside its runtime, call by call: when it looks, whom it wakes, and on whose behalf."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration
from harness.payloads import key_of

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
from kvtier.tiers.types import KeyStatus, NamespaceSpec, Session, StoreStatus

SPEC = NamespaceSpec(NamespaceId(b"n" * 16), world_size=1, part_bytes=(4096,))
HOLD = handoff_pb2.HoldRef(engine_id="e", request_id="r")


class Desk:
    """The service, and one engine's session with it."""

    def __init__(self, runtime: TierRuntime) -> None:
        self.runtime = runtime
        self.session: Session = runtime.core.open_session(b"s", "e", None, SPEC)
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
    """Returns a duration."""
    duration = Duration()
    duration.FromNanoseconds(int(number * 1e9))
    return duration


def at_the_desk(scenario: Any) -> None:
    """Runs a scenario with a desk, in a region of 16 blocks."""

    async def main() -> None:
        runtime = TierRuntime(HostRegion.create(16 * 4096), [], stall_seconds=10.0)
        await runtime.start()
        await asyncio.sleep(0)  # the region's memory is announced through the loop
        try:
            await scenario(Desk(runtime), runtime)
        finally:
            await runtime.close()

    asyncio.run(main())


def keys(first: int, count: int) -> list[bytes]:
    """Returns keys."""
    return [key_of(number) for number in range(first, first + count)]


def test_who_waits_is_told_before_the_call_is_answered() -> None:
    """Publication and release carry out what the core has asked for, and leave nothing to the next tick."""

    async def scenario(desk: Desk, runtime: TierRuntime) -> None:
        await desk.publish(keys(0, 1))
        assert runtime.core.take_commands() == []
        await desk.release()
        assert runtime.core.take_commands() == []

    at_the_desk(scenario)


def test_nothing_is_held_by_a_server_that_is_about_to_end() -> None:
    """It would not live to be claimed; what is held may still be claimed, and given back."""

    async def scenario(desk: Desk, _: TierRuntime) -> None:
        desk.store(keys(0, 1))
        await desk.publish(keys(0, 1))
        desk.draining = True
        with pytest.raises(Refused, match="shutting down"):
            await desk.publish(keys(0, 1))
        assert (await desk.claim()).lease_id
        await desk.release()

    at_the_desk(scenario)


def test_what_a_wait_ends_with_is_as_of_then() -> None:
    """B2.19: a hold whose time has come near while its claim waited for a block is not read."""

    async def scenario(desk: Desk, runtime: TierRuntime) -> None:
        desk.store(keys(0, 1))
        await desk.publish(keys(0, 2), duration=seconds(5.3))
        with pytest.raises(HoldExpired):
            await desk.claim(wait=0.6)
        assert runtime.core.stats().leases == 0

    at_the_desk(scenario)


def test_a_session_that_falls_while_it_waits_is_granted_nothing() -> None:
    """B2.19: nobody would ever give the lease back."""

    async def scenario(desk: Desk, runtime: TierRuntime) -> None:
        publisher = runtime.core.open_session(b"p", "e", None, SPEC)
        claiming = asyncio.ensure_future(desk.claim(wait=20))
        await asyncio.sleep(0)
        assert runtime._waiting
        runtime.core.close_session(desk.session.id)
        desk.session = publisher
        await desk.publish([])
        with pytest.raises(UnknownSession):
            await claiming
        assert runtime.core.stats().leases == 0
        assert not runtime._waiting

    at_the_desk(scenario)


def test_a_claims_lease_is_its_requests_for_as_long_as_it_said() -> None:
    """B2.17: it falls with the reader's request, and with its time, like that of a lookup."""

    async def scenario(desk: Desk, runtime: TierRuntime) -> None:
        desk.store(keys(0, 1))
        await desk.publish(keys(0, 1))
        answer = await desk.claim(request_id="mine", lease_duration=seconds(7))
        lease = runtime.core.lease(desk.session, answer.lease_id)  # type: ignore[arg-type]
        assert answer.statuses == bytes([KeyStatus.HIT])
        assert 6 < lease.expires_at - runtime.now() <= 7
        runtime.core.finish_request(desk.session, "mine")
        assert runtime.core.stats().leases == 0

    at_the_desk(scenario)


def test_a_heartbeat_may_say_how_long() -> None:
    """B2.1: else it is two thirds of what the hold was published with."""

    async def scenario(desk: Desk, _: TierRuntime) -> None:
        await desk.publish(keys(0, 1), duration=seconds(30))
        assert list((await desk.renew()).missing_holds) == []
        assert (await desk.claim()).remaining.seconds < 30
        await desk.renew(extension=seconds(300))
        assert (await desk.claim()).remaining.seconds >= 290
        await desk.release()
        assert list((await desk.renew()).missing_holds) == [0]

    at_the_desk(scenario)


@pytest.mark.parametrize("way", ["released", "reset", "declined", "declined while it waits"])
def test_what_will_not_come_is_not_waited_for(way: str) -> None:
    """B2.17: a hold that has ended, or was declined, is a miss at once; only one that was never heard of may yet be published."""

    async def scenario(desk: Desk, runtime: TierRuntime) -> None:
        claiming = asyncio.ensure_future(desk.claim(wait=3600)) if way.endswith("waits") else None
        await asyncio.sleep(0)
        # Of 16 blocks four may be held.
        answer = await desk.publish(keys(0, 6 if way.startswith("declined") else 1))
        assert (answer.status == handoff_pb2.PUBLISH_STATUS_PUBLISHED) is not way.startswith("declined")
        if way == "released":
            await desk.release()
        if way == "reset":
            runtime.core.reset(desk.session)
        with pytest.raises(HoldNotFound):
            await (claiming or desk.claim(wait=3600))
        assert runtime.core.stats().claims_missed == {ClaimOutcome.NOT_HELD: 1}
        await desk.publish(keys(0, 1))
        desk.store(keys(0, 1))
        assert (await desk.claim(wait=3600)).lease_id

    at_the_desk(scenario)


def test_what_is_held_in_another_namespace_is_not_waited_for() -> None:
    """Engines whose blocks mean something else (of another tensor parallelism, say) do not meet, and do not wait either."""

    async def scenario(desk: Desk, runtime: TierRuntime) -> None:
        await desk.publish(keys(0, 1))
        other = NamespaceSpec(NamespaceId(b"o" * 16), world_size=1, part_bytes=(4096,))
        desk.session = runtime.core.open_session(b"o", "reader", None, other)
        with pytest.raises(HoldNotFound):
            await desk.claim(wait=3600)
        assert runtime.core.stats().claims_missed == {ClaimOutcome.OTHER_NAMESPACE: 1}

    at_the_desk(scenario)
