"""HandoffService: holds the blocks of a published request until another engine claims them."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import grpc
from google.protobuf.duration_pb2 import Duration

from ...protos.durations import duration_of
from ...protos.v1 import handoff_pb2, handoff_pb2_grpc
from ...protos.wire.packed_keys import pack_keys
from ...tiers.core.holds import Hold
from ...tiers.errors import HoldExpired
from ...tiers.stats.request_log import ClaimOutcome
from ...tiers.types import EngineSession, HandoffDirection, HoldName, Owner, PublishStatus
from ..core_runtime import TierRuntime
from ..refused import Refused
from ..rpc.request_checks import RequestValidator
from ..rpc.sessions import SessionRegistry
from ..rpc.slice_scheduler import slices_of
from .long_calls import LongCalls

__all__ = ["HandoffService"]

_SLICE = 256
"""Holds per slice of a renewal. A hold takes 2 to 4 µs."""
_RELEASES = 4
"""Holds per slice of a release. The pins of a hold take up to 1 ms."""


class HandoffService(handoff_pb2_grpc.HandoffServiceServicer):
    def __init__(
        self, runtime: TierRuntime, sessions: SessionRegistry, validator: RequestValidator, long_calls: LongCalls
    ) -> None:
        self._runtime = runtime
        self._core = runtime.core
        self._sessions = sessions
        self._validator = validator
        self._long_calls = long_calls

    async def PublishHold(
        self, request: handoff_pb2.PublishHoldRequest, context: grpc.aio.ServicerContext
    ) -> handoff_pb2.PublishHoldResponse:
        self._sessions.refuse_if_draining()
        session = self._sessions.get(request.session)
        request_id = _required(request.request_id, "request_id")
        keys = await self._long_calls.keys(session, self._validator, request.keys)
        publication = self._core.publish(
            session,
            request_id,
            keys,
            list(request.positions),
            num_tokens=request.num_tokens,
            direction=_direction(request.direction),
            duration=self._validator.hold(request.duration),
            now=self._runtime.now(),
        )
        held = await self._long_calls.run(session, publication)
        if isinstance(held, PublishStatus):
            return handoff_pb2.PublishHoldResponse(status=handoff_pb2.PublishStatus.Name(held.value))
        return handoff_pb2.PublishHoldResponse(
            status=handoff_pb2.PUBLISH_STATUS_PUBLISHED, remaining=self._remaining(held), pending_blocks=held.pending
        )

    async def ClaimHold(
        self, request: handoff_pb2.ClaimHoldRequest, context: grpc.aio.ServicerContext
    ) -> handoff_pb2.ClaimHoldResponse:
        session = self._sessions.get(request.session)
        name, request_id = self._name(session, request.hold), request.request_id
        lease_seconds = self._validator.lease(request.lease_duration)
        with contextlib.suppress(HoldExpired):  # `claim` raises it too, and records the miss
            await self._wait_settled(session, name, request.min_blocks, self._validator.wait(request.wait))
        operation = self._core.claim(
            session,
            name,
            first_positions=list(request.first_positions),
            request_id=request_id,
            lease_seconds=lease_seconds,
            now=self._runtime.now(),
            grant_id=request.grant_id,
        )
        claim = await self._long_calls.run(session, operation)
        hold = claim.hold
        return handoff_pb2.ClaimHoldResponse(
            keys=pack_keys(hold.keys),
            positions=hold.positions,
            statuses=bytes(claim.statuses),
            lease_id=claim.lease.id if claim.lease is not None else 0,
            num_tokens=hold.num_tokens,
            direction=handoff_pb2.HandoffDirection.Name(hold.direction.value),
            remaining=self._remaining(hold),
            settled_blocks=claim.settled,
        )

    async def RenewHolds(
        self, request: handoff_pb2.RenewHoldsRequest, context: grpc.aio.ServicerContext
    ) -> handoff_pb2.RenewHoldsResponse:
        session, now = self._sessions.get(request.session), self._runtime.now()
        extension = self._validator.extension(request.extension)
        renewed: list[bool] = []
        for part in slices_of(request.holds, _SLICE):
            if len(part) < len(request.holds):
                await self._long_calls.scheduler.turn(session)
            renewed += [self._core.renew_hold(name, now, extension) for name in self._names(session, part)]
        missing = [number for number, was_renewed in enumerate(renewed) if not was_renewed]
        return handoff_pb2.RenewHoldsResponse(missing_holds=missing)

    async def ReleaseHolds(
        self, request: handoff_pb2.ReleaseHoldsRequest, context: grpc.aio.ServicerContext
    ) -> handoff_pb2.ReleaseHoldsResponse:
        session, now = self._sessions.get(request.session, is_release=True), self._runtime.now()
        for part in slices_of(request.holds, _RELEASES):
            if len(part) < len(request.holds):
                await self._long_calls.scheduler.turn(session)
            for name in self._names(session, part):
                self._core.release_hold(name, now)
            self._runtime.run_commands()
        return handoff_pb2.ReleaseHoldsResponse()

    async def ReportNotClaimed(
        self, request: handoff_pb2.ReportNotClaimedRequest, context: grpc.aio.ServicerContext
    ) -> handoff_pb2.ReportNotClaimedResponse:
        session = self._sessions.get(request.session)
        name, request_id = self._name(session, request.hold), _required(request.request_id, "request_id")
        owner = Owner(session.engine, session.id, request_id)
        self._core.not_claimed(owner, name, _outcome(request.reason), self._runtime.now())
        return handoff_pb2.ReportNotClaimedResponse()

    async def _wait_settled(self, session: EngineSession, name: HoldName, blocks: int, seconds: float) -> None:
        """Waits, at most `seconds`, until a hold is published and its blocks are stored.

        `blocks`: the number of blocks to wait for; 0 for all. Returns early if the hold can no
        longer be published. Raises `HoldExpired`.
        """
        deadline = self._runtime.now() + seconds
        while (remaining := deadline - self._runtime.now()) > 0:
            hold = self._core.find_hold(name, self._runtime.now())
            if self._core.is_settled(hold, blocks) if hold is not None else not self._core.may_come(name):
                return
            await self._runtime.wait_for(name, remaining)
            await self._long_calls.scheduler.turn(session)  # a change wakes all claims of the hold

    def _remaining(self, hold: Hold) -> Duration:
        return duration_of(hold.expires_at - self._runtime.now())

    def _name(self, session: EngineSession, hold: handoff_pb2.HoldRef) -> HoldName:
        engine_id = _required(hold.engine_id, "hold.engine_id")
        return (session.namespace.id, engine_id, _required(hold.request_id, "hold.request_id"))

    def _names(self, session: EngineSession, holds: Sequence[handoff_pb2.HoldRef]) -> list[HoldName]:
        return [self._name(session, hold) for hold in holds]


def _required(text: str, field: str) -> str:
    if not text:
        raise Refused("INVALID_ARGUMENT", f"{field} is missing")
    return text


def _direction(direction: int) -> HandoffDirection:
    try:
        return HandoffDirection(direction or HandoffDirection.PREFILL_TO_DECODE)
    except ValueError as error:
        raise Refused("INVALID_ARGUMENT", f"direction: {error}") from error


def _outcome(reason: int) -> ClaimOutcome:
    if not reason or reason not in handoff_pb2.NotClaimedReason.values():
        raise Refused("INVALID_ARGUMENT", f"reason: {reason} is not a reason")
    return ClaimOutcome(reason)
