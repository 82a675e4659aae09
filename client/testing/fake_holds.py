"""Sessions, leases, stores and holds of the fake server. They end only by calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.duration_pb2 import Duration

from ...protos.v1 import common_pb2, handoff_pb2
from ..errors import error_for
from ..namespace import Namespace, is_hold_key
from ..results import KeyStatus
from .fake_checks import keys_of

__all__ = ["BlockName", "Engine", "FakeHold", "FakeHolds", "FakeLease", "FakeSession", "FakeStore"]

BlockName = tuple[bytes, bytes]
Engine = tuple[str, bytes, str]
"""Tenant, namespace and id of an engine."""
_Name = tuple[bytes, str, str]

_SECONDS = 30


@dataclass(slots=True, eq=False)
class FakeSession:
    engine_id: str
    rank: int
    namespace: Namespace
    prefix: bytes
    granted: dict[int, int] = field(default_factory=dict)
    """Ids of leases and stores by the id that the client chose."""

    @property
    def engine(self) -> Engine:
        return self.namespace.tenant, self.prefix, self.engine_id

    def names_in(self, request: Any) -> list[BlockName]:
        """Returns the names of the blocks of a request. Refuses keys like a server."""
        return [(self.prefix, key) for key in keys_of(request, self.namespace)]


@dataclass(slots=True)
class FakeLease:
    engine: Engine
    request_id: str
    names: list[BlockName | None]
    blocks: dict[BlockName, dict[int, bytes]]
    """The pinned blocks. A block stays readable even after the end of its last hold."""
    is_claim: bool = False
    """Whether it is of a claim. Then the missing blocks can still be stored."""
    is_reset: bool = False
    """Whether the namespace was reset after the grant."""


@dataclass(slots=True)
class FakeStore:
    """A store between PrepareStore and CompleteStore."""

    engine: Engine
    rank: int
    names: list[BlockName]
    sizes: list[int]
    staged: bytearray
    missing: bytearray
    """A 1 for each byte that has not been received."""
    is_reset: bool = False
    """Whether the namespace was reset after the grant. Then the blocks are not published."""


@dataclass(frozen=True, slots=True)
class FakeHold:
    request: handoff_pb2.PublishHoldRequest
    names: Sequence[BlockName]


class FakeHolds:
    def __init__(self, is_ready: Callable[[BlockName], bool], drop: Callable[[BlockName], None]) -> None:
        """`drop` removes a block without content hash after the end of its hold."""
        self.declining = False
        self._is_ready = is_ready
        self._drop = drop
        self._open: dict[_Name, FakeHold] = {}
        self._expired: set[_Name] = set()

    def pinned(self) -> set[BlockName]:
        return {name for hold in self._open.values() for name in hold.names}

    def end_all(self, *, expired: bool = False, prefix: bytes | None = None) -> None:
        for name in [name for name in self._open if prefix in (None, name[0])]:
            self._end(name)
            if expired:
                self._expired.add(name)

    def publish(
        self, prefix: bytes, engine_id: str, names: Sequence[BlockName], request: handoff_pb2.PublishHoldRequest
    ) -> handoff_pb2.PublishHoldResponse:
        name = (prefix, engine_id, _named(request.request_id))
        if len(names) != len(request.positions):
            raise error_for("INVALID_ARGUMENT", f"{len(names)} keys and {len(request.positions)} positions")
        replaced = self._open.pop(name, None)
        if not self.declining:
            self._expired.discard(name)
            self._open[name] = FakeHold(request, names)
        self._drop_hold_only([*(replaced.names if replaced is not None else ()), *names])
        if self.declining:
            return handoff_pb2.PublishHoldResponse(status=handoff_pb2.PUBLISH_STATUS_NO_ROOM)
        return handoff_pb2.PublishHoldResponse(
            status=handoff_pb2.PUBLISH_STATUS_PUBLISHED,
            remaining=self.remaining(FakeHold(request, names)),
            pending_blocks=sum(not self._is_ready(block) for block in names),
        )

    def find(self, prefix: bytes, request: handoff_pb2.ClaimHoldRequest) -> FakeHold:
        name = _name(prefix, request.hold)
        hold = self._open.get(name)
        if hold is None:
            reason = "HOLD_EXPIRED" if name in self._expired else "HOLD_NOT_FOUND"
            raise error_for(reason, f"request {name[2]!r} of engine {name[1]!r} is not held")
        return hold

    def statuses(self, hold: FakeHold, first_positions: Sequence[int], *, publisher_lives: bool) -> bytes:
        """Returns one `KeyStatus` per block of a hold; 0 for blocks before `first_positions`."""
        missing = KeyStatus.HIT_PENDING if publisher_lives else KeyStatus.MISS
        statuses = bytearray()
        for name, position in zip(hold.names, hold.request.positions, strict=True):
            group = int.from_bytes(name[1][-4:], "big")
            wanted = group >= len(first_positions) or position >= first_positions[group]
            status = KeyStatus.HIT if self._is_ready(name) else missing
            statuses.append(status if wanted else common_pb2.KEY_STATUS_UNSPECIFIED)
        return bytes(statuses)

    def claimed(
        self, hold: FakeHold, statuses: bytes, lease_id: int, *, publisher_lives: bool
    ) -> handoff_pb2.ClaimHoldResponse:
        published = hold.request
        return handoff_pb2.ClaimHoldResponse(
            keys=published.keys,
            positions=published.positions,
            statuses=statuses,
            lease_id=lease_id,
            num_tokens=published.num_tokens,
            direction=handoff_pb2.HandoffDirection.Name(published.direction),
            remaining=self.remaining(hold),
            settled_blocks=sum(self._is_ready(name) or not publisher_lives for name in hold.names),
        )

    def remaining(self, hold: FakeHold) -> Duration:
        """Returns the full duration of a hold, because no time passes."""
        return hold.request.duration if hold.request.HasField("duration") else Duration(seconds=_SECONDS)

    def renew(self, prefix: bytes, request: handoff_pb2.RenewHoldsRequest) -> handoff_pb2.RenewHoldsResponse:
        names = [_name(prefix, hold) for hold in request.holds]
        missing = [number for number, name in enumerate(names) if name not in self._open]
        return handoff_pb2.RenewHoldsResponse(missing_holds=missing)

    def release(self, prefix: bytes, request: handoff_pb2.ReleaseHoldsRequest) -> handoff_pb2.ReleaseHoldsResponse:
        for name in [_name(prefix, hold) for hold in request.holds]:
            if name in self._open:
                self._end(name)
        return handoff_pb2.ReleaseHoldsResponse()

    def not_claimed(
        self, prefix: bytes, request: handoff_pb2.ReportNotClaimedRequest
    ) -> handoff_pb2.ReportNotClaimedResponse:
        """Accepts a report, which a real server counts."""
        return handoff_pb2.ReportNotClaimedResponse()

    def _end(self, name: _Name) -> None:
        self._drop_hold_only(self._open.pop(name).names)

    def _drop_hold_only(self, names: Sequence[BlockName]) -> None:
        still = self.pinned()
        for block in names:
            if is_hold_key(block[1]) and block not in still:
                self._drop(block)


def _name(prefix: bytes, hold: handoff_pb2.HoldRef) -> _Name:
    return (prefix, _named(hold.engine_id), _named(hold.request_id))


def _named(text: str) -> str:
    if not text:
        raise error_for("INVALID_ARGUMENT", "the name of a hold must not be empty")
    return text
