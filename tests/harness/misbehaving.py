"""Shared parts of bad-input tests: a server, raw sessions, calls and expected refusals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from kvtier.client import Client, StoreStatus
from kvtier.protos.v1 import cache_pb2, handoff_pb2, transfer_pb2
from kvtier.protos.wire.packed_keys import pack_keys

from .payloads import key_of, namespace_of
from .raw import RawSession, refusal_of
from .server_process import MIB, ServerProcess

__all__ = [
    "BAD_NAMESPACE",
    "DAMAGED",
    "FRESH",
    "GROWTH_BYTES",
    "HOLD",
    "INVALID",
    "INVALID_KEY",
    "KEYS",
    "NAMESPACE",
    "NOT_OWNER",
    "NOT_READY",
    "NO_HOLD",
    "NO_LEASE",
    "NO_STORE",
    "PART",
    "SMALL",
    "STALE",
    "TIMEOUT",
    "TOO_LARGE",
    "TOO_MANY",
    "TWO_RANKS",
    "UNKNOWN",
    "WITH_SESSION",
    "WRONG_SIZE",
    "Call",
    "World",
    "call",
    "refuse",
    "seconds",
]

PART = 64 << 10
SMALL = 4 << 10
NAMESPACE = namespace_of(PART, SMALL)
TWO_RANKS = namespace_of(SMALL, world_size=2)
KEYS = [key_of(number) for number in range(32)]
FRESH = [key_of(number, salt="fresh") for number in range(8)]
HOLD = handoff_pb2.HoldRef(engine_id="mine", request_id="r")
GROWTH_BYTES = 128 * MIB
"""Allowed growth of the server's memory: malloc keeps the memory of the largest messages."""
TIMEOUT = 60.0

INVALID = ("INVALID_ARGUMENT", "INVALID_ARGUMENT")
INVALID_KEY = ("INVALID_ARGUMENT", "INVALID_KEY")
TOO_MANY = ("INVALID_ARGUMENT", "TOO_MANY_KEYS")
BAD_NAMESPACE = ("INVALID_ARGUMENT", "INVALID_NAMESPACE")
WRONG_SIZE = ("INVALID_ARGUMENT", "WRONG_SIZE")
STALE = ("FAILED_PRECONDITION", "STALE_EPOCH")
UNKNOWN = ("UNAUTHENTICATED", "UNKNOWN_SESSION")
NO_LEASE = ("NOT_FOUND", "LEASE_NOT_FOUND")
NO_STORE = ("NOT_FOUND", "STORE_NOT_FOUND")
NO_HOLD = ("NOT_FOUND", "HOLD_NOT_FOUND")
NOT_OWNER = ("PERMISSION_DENIED", "NOT_OWNER")
NOT_READY = ("FAILED_PRECONDITION", "NOT_READY")
DAMAGED = ("DATA_LOSS", "CHECKSUM_MISMATCH")
TOO_LARGE = ("RESOURCE_EXHAUSTED", None)
"""gRPC's own error for a message beyond the limit."""


@dataclass
class World:
    """A server, a well-behaved client (the bystander), and three raw sessions."""

    server: ServerProcess
    bystander: Client
    mine: RawSession
    theirs: RawSession
    headless: RawSession
    """A scheduler: it has no rank, in a world of two."""
    own_bytes: int
    held: list[Callable[[], object]] = field(default_factory=list)
    """Undoes what a case was granted before its invalid call."""

    def lease(self, session: RawSession | None = None, keys: list[bytes] = KEYS) -> int:
        """A lease on blocks of the bystander."""
        session = session or self.mine
        request = cache_pb2.LookupRequest(session=session.ref, keys=pack_keys(keys), mode=cache_pb2.LOOKUP_MODE_EACH)
        lease_id: int = session.cache.Lookup(request, timeout=TIMEOUT).lease_id
        assert lease_id
        release = cache_pb2.ReleaseLeaseRequest(session=session.ref, lease_ids=[lease_id])
        self.held.append(lambda: session.cache.ReleaseLease(release, timeout=TIMEOUT))
        return lease_id

    def store(self, session: RawSession | None = None, keys: list[bytes] = FRESH) -> int:
        """An open store of new blocks."""
        session = session or self.mine
        request = cache_pb2.PrepareStoreRequest(session=session.ref, keys=pack_keys(keys))
        answer = session.cache.PrepareStore(request, timeout=TIMEOUT)
        assert set(answer.statuses) == {StoreStatus.GRANTED}
        discard = cache_pb2.CompleteStoreRequest(
            session=session.ref, store_id=answer.store_id, failed_items=range(len(keys))
        )
        self.held.append(lambda: session.cache.CompleteStore(discard, timeout=TIMEOUT))
        store_id: int = answer.store_id
        return store_id

    def hold(self, keys: list[bytes] = KEYS, **fields: Any) -> handoff_pb2.HoldRef:
        """A hold of session `mine`."""
        request = handoff_pb2.PublishHoldRequest(
            session=self.mine.ref, request_id="held", keys=pack_keys(keys), positions=range(len(keys)), **fields
        )
        assert self.mine.handoff.PublishHold(request, timeout=TIMEOUT).status == handoff_pb2.PUBLISH_STATUS_PUBLISHED
        hold = handoff_pb2.HoldRef(engine_id="mine", request_id="held")
        release = handoff_pb2.ReleaseHoldsRequest(session=self.mine.ref, holds=[hold])
        self.held.append(lambda: self.mine.handoff.ReleaseHolds(release, timeout=TIMEOUT))
        return hold

    def push(self, frames: list[bytes], timeout: float = TIMEOUT) -> transfer_pb2.PushResponse:
        answer: transfer_pb2.PushResponse = self.mine.push(iter(frames), timeout=timeout)
        return answer

    def pull(self, session: RawSession, lease_id: int, items: list[int]) -> list[bytes]:
        request = transfer_pb2.PullRequest(session=session.ref, lease_id=lease_id, items=items)
        return list(session.pull(request, timeout=TIMEOUT))


Call = Callable[[World], object]


def call(method: str, make: Callable[[World], Any]) -> Call:
    """A call of a service as session `mine`, unless the request names another.

    `make` returns the request or its fields.
    """

    def run(world: World) -> object:
        request = make(world)
        if isinstance(request, dict):
            module = cache_pb2 if hasattr(cache_pb2, f"{method}Request") else handoff_pb2
            request = getattr(module, f"{method}Request")(**request)
        if not request.HasField("session"):
            request.session.CopyFrom(world.mine.ref)
        return world.mine.method(method)(request, timeout=TIMEOUT)

    return run


def refuse(world: World, run: Call, expected: tuple[str, str | None]) -> None:
    """Makes a call and checks that it is refused with this status and reason."""
    with pytest.raises(grpc.RpcError) as refusal:
        run(world)
    assert refusal_of(refusal.value) == expected, refusal.value.details()


def seconds(number: float) -> Duration:
    """A duration, which may be negative."""
    duration = Duration()
    duration.FromNanoseconds(int(number * 1e9))
    return duration


WITH_SESSION: dict[str, Callable[[], Any]] = {
    "BeginRequest": lambda: cache_pb2.BeginRequestRequest(request_id="r", keys=pack_keys(KEYS)),
    "Lookup": lambda: cache_pb2.LookupRequest(keys=pack_keys(KEYS)),
    "Prefetch": lambda: cache_pb2.PrefetchRequest(keys=pack_keys(KEYS)),
    "PrepareLoad": lambda: cache_pb2.PrepareLoadRequest(lease_id=1),
    "CompleteLoad": lambda: cache_pb2.CompleteLoadRequest(lease_id=1),
    "ReleaseLease": lambda: cache_pb2.ReleaseLeaseRequest(lease_ids=[1]),
    "WithdrawGrants": lambda: cache_pb2.WithdrawGrantsRequest(grant_ids=[1]),
    "Touch": lambda: cache_pb2.TouchRequest(lease_ids=[1]),
    "PrepareStore": lambda: cache_pb2.PrepareStoreRequest(keys=pack_keys(FRESH)),
    "CompleteStore": lambda: cache_pb2.CompleteStoreRequest(store_id=1),
    "Flush": lambda: cache_pb2.FlushRequest(keys=pack_keys(KEYS)),
    "FinishRequest": lambda: cache_pb2.FinishRequestRequest(request_id="r"),
    "Reset": cache_pb2.ResetRequest,
    "PublishHold": lambda: handoff_pb2.PublishHoldRequest(
        request_id="r", keys=pack_keys(KEYS), positions=range(len(KEYS))
    ),
    "ClaimHold": lambda: handoff_pb2.ClaimHoldRequest(hold=HOLD),
    "ReportNotClaimed": lambda: handoff_pb2.ReportNotClaimedRequest(hold=HOLD, request_id="r", reason=1),
    "RenewHolds": lambda: handoff_pb2.RenewHoldsRequest(holds=[HOLD]),
    "ReleaseHolds": lambda: handoff_pb2.ReleaseHoldsRequest(holds=[HOLD]),
}
