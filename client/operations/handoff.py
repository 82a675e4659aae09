"""Operations on holds: blocks of requests that one engine hands over to another."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ...protos.v1 import handoff_pb2
from ...protos.wire.packed_keys import unpack_key_list
from ..effects import Operation
from ..errors import ServerError
from ..results import (
    HandoffDirection,
    HoldInfo,
    HoldName,
    KeyStatus,
    LookupResult,
    NotClaimedReason,
    Publication,
    PublishStatus,
)
from ..session.session import ClientSession
from .arguments import duration, member, message, packed
from .base import Base

__all__ = ["HandoffOperations"]

_HOLDS_PER_CALL = 1024
"""Maximum number of holds in one call; servers refuse calls with more."""


class HandoffOperations(Base):
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
        answer = yield from self._request(
            handoff_pb2.PublishHoldRequest,
            "HandoffService/PublishHold",
            request_id=request_id,
            direction=int(member(HandoffDirection, direction, "direction")),
            keys=packed(keys),
            positions=positions,
            num_tokens=num_tokens,
            duration=duration("hold_for", hold_for),
        )
        remaining = answer.remaining.ToNanoseconds() / 1e9
        return Publication(PublishStatus(answer.status), remaining, answer.pending_blocks)

    def claim(
        self,
        hold: HoldName,
        request_id: str,
        first_positions: Sequence[int],
        *,
        wait: float,
        min_blocks: int,
        lease: float | None,
    ) -> Operation[LookupResult]:
        session: ClientSession = yield self._connect
        request = message(
            handoff_pb2.ClaimHoldRequest,
            session=session.ref,
            hold=_ref(hold),
            request_id=request_id,
            first_positions=first_positions,
            lease_duration=duration("lease", lease),
            wait=duration("wait", wait),
            min_blocks=min_blocks,
            grant_id=self._new_grant(),
        )
        answer = yield from self._call(session, "HandoffService/ClaimHold", request, wait, grant_id=request.grant_id)
        try:
            keys = unpack_key_list(answer.keys)
        except ValueError as error:
            raise ServerError(f"the answer has malformed keys: {error}") from error
        statuses: bytes = answer.statuses
        return LookupResult(
            id=answer.lease_id,
            statuses=statuses,
            prefix_hits=len(statuses) - len(statuses.lstrip(bytes([KeyStatus.HIT]))),
            request_id=request_id,
            keys=keys,
            session=session,
            source_indices=bytes(len(statuses)),
            hold=HoldInfo(
                positions=answer.positions,
                num_tokens=answer.num_tokens,
                direction=HandoffDirection(answer.direction),
                remaining=answer.remaining.ToNanoseconds() / 1e9,
                settled_blocks=answer.settled_blocks,
            ),
        )

    def renew_holds(self, holds: Sequence[HoldName], *, extension: float | None) -> Operation[list[HoldName]]:
        missing: list[HoldName] = []
        for part in _parts(holds):
            refs, extend = map(_ref, part), duration("extension", extension)
            answer = yield from self._request(
                handoff_pb2.RenewHoldsRequest, "HandoffService/RenewHolds", holds=refs, extension=extend
            )
            missing += (part[number] for number in answer.missing_holds)
        return missing

    def release_holds(self, holds: Iterable[HoldName]) -> Operation[None]:
        for part in _parts(list(holds)):
            refs = map(_ref, part)
            yield from self._request(handoff_pb2.ReleaseHoldsRequest, "HandoffService/ReleaseHolds", holds=refs)

    def report_not_claimed(self, hold: HoldName, *, request_id: str, reason: NotClaimedReason) -> Operation[None]:
        yield from self._request(
            handoff_pb2.ReportNotClaimedRequest,
            "HandoffService/ReportNotClaimed",
            hold=_ref(hold),
            request_id=request_id,
            reason=int(reason),
        )


def _parts(holds: Sequence[HoldName]) -> list[Sequence[HoldName]]:
    """Returns the holds of each call; one call if there are none, to get the server's answer."""
    return [holds[at : at + _HOLDS_PER_CALL] for at in range(0, max(1, len(holds)), _HOLDS_PER_CALL)]


def _ref(hold: HoldName) -> handoff_pb2.HoldRef:
    return message(handoff_pb2.HoldRef, engine_id=hold.engine_id, request_id=hold.request_id)
