"""Handing requests over: publishing, claiming, and how long they are held."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ...protos.v1 import handoff_pb2
from ..effects import Connect, Operation
from ..results import HandoffDirection, HoldInfo, HoldName, KeyStatus, LookupResult, Publication, PublishStatus
from ..session.session import Session
from .base import Base, duration, message

__all__ = ["HandoffOperations"]


class HandoffOperations(Base):
    """Requests that one engine holds for another."""

    def publish(
        self,
        request_id: str,
        keys: Sequence[bytes],
        positions: Sequence[int],
        *,
        num_tokens: int,
        direction: HandoffDirection,
        hold_for: float | None,
    ) -> Operation[Publication]:
        """Publishes a request of this engine."""
        link: Session = yield Connect(self._timeouts.connect)
        request = message(
            handoff_pb2.PublishHoldRequest,
            session=link.ref,
            request_id=request_id,
            direction=int(direction),
            keys=keys,
            positions=positions,
            num_tokens=num_tokens,
            duration=duration(hold_for),
        )
        answer = yield from self._call(link, "HandoffService/PublishHold", request)
        remaining = answer.remaining.ToNanoseconds() / 1e9
        return Publication(PublishStatus(answer.status), remaining, answer.pending_blocks)

    def claim(
        self,
        hold: HoldName,
        *,
        request_id: str,
        first_positions: Sequence[int],
        wait: float,
        lease: float | None,
    ) -> Operation[LookupResult]:
        """Leases the blocks of a hold."""
        link: Session = yield Connect(self._timeouts.connect)
        request = message(
            handoff_pb2.ClaimHoldRequest,
            session=link.ref,
            hold=_ref(hold),
            request_id=request_id,
            first_positions=first_positions,
            lease_duration=duration(lease),
            wait=duration(wait),
        )
        answer = yield from self._call(link, "HandoffService/ClaimHold", request, wait)
        statuses: bytes = answer.statuses
        return LookupResult(
            id=answer.lease_id,
            statuses=statuses,
            prefix_hits=len(statuses) - len(statuses.lstrip(bytes([KeyStatus.HIT]))),
            request_id=request_id,
            keys=answer.keys,
            link=link,
            source_indices=bytes(len(statuses)),
            hold=HoldInfo(
                positions=answer.positions,
                num_tokens=answer.num_tokens,
                direction=HandoffDirection(answer.direction),
                remaining=answer.remaining.ToNanoseconds() / 1e9,
            ),
        )

    def renew_holds(self, holds: Sequence[HoldName], *, extension: float | None) -> Operation[list[HoldName]]:
        """Extends holds; returns those that are gone."""
        link: Session = yield Connect(self._timeouts.connect)
        request = message(
            handoff_pb2.RenewHoldsRequest,
            session=link.ref,
            holds=map(_ref, holds),
            extension=duration(extension),
        )
        answer = yield from self._call(link, "HandoffService/RenewHolds", request)
        return [holds[number] for number in answer.missing_holds]

    def release_holds(self, holds: Iterable[HoldName]) -> Operation[None]:
        """Ends holds."""
        link: Session = yield Connect(self._timeouts.connect)
        request = message(handoff_pb2.ReleaseHoldsRequest, session=link.ref, holds=map(_ref, holds))
        yield from self._call(link, "HandoffService/ReleaseHolds", request)


def _ref(hold: HoldName) -> handoff_pb2.HoldRef:
    return message(handoff_pb2.HoldRef, engine_id=hold.engine_id, request_id=hold.request_id)
