"""HandoffService: invalid calls are refused; no hold is left."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from harness.misbehaving import (
    FRESH,
    HOLD,
    INVALID,
    INVALID_KEY,
    KEYS,
    NO_HOLD,
    TIMEOUT,
    TOO_LARGE,
    TOO_MANY,
    Call,
    World,
    call,
    refuse,
    seconds,
)
from harness.payloads import key_of
from harness.raw import refusal_of

from kvtier.client import make_key
from kvtier.client.results import KeyStatus
from kvtier.protos.v1 import cache_pb2, handoff_pb2
from kvtier.protos.wire.packed_keys import pack_keys


def publish(**fields: Any) -> Call:
    """Returns a valid publication with these fields replaced."""
    sound = {"request_id": "r", "keys": KEYS, "positions": range(len(KEYS)), "num_tokens": 1}
    fields = sound | fields
    fields["keys"] = pack_keys(fields["keys"])
    return call("PublishHold", lambda _: handoff_pb2.PublishHoldRequest(**fields))


def claim(**fields: Any) -> Call:
    """Returns a claim of an unpublished hold, with these fields."""
    return call("ClaimHold", lambda _: handoff_pb2.ClaimHoldRequest(**({"hold": HOLD} | fields)))


def claimed(world: World, **fields: Any) -> Any:
    """Claims a hold; releases it at the end."""
    answer: Any = claim(**fields)(world)
    release = cache_pb2.ReleaseLeaseRequest(session=world.mine.ref, lease_ids=[answer.lease_id])
    world.held.append(lambda: world.mine.cache.ReleaseLease(release, timeout=TIMEOUT))
    return answer


def name(engine_id: str = "mine", request_id: str = "r") -> handoff_pb2.HoldRef:
    return handoff_pb2.HoldRef(engine_id=engine_id, request_id=request_id)


CASES: dict[str, tuple[Call, tuple[str, str | None]]] = {
    "no request": (publish(request_id=""), INVALID),
    "a long request": (publish(request_id="r" * 600), INVALID),
    "a position too few": (publish(positions=range(31)), INVALID),
    "a position too many": (publish(positions=range(33)), INVALID),
    "positions for no keys": (publish(keys=[]), INVALID),
    "a negative duration": (publish(duration=seconds(-1)), INVALID),
    "an unknown direction": (publish(direction=7), INVALID),
    "a key that is only a group": (publish(keys=[b"abcd"], positions=[0]), INVALID_KEY),
    "a key of an unknown group": (publish(keys=[make_key(b"some hash", 2)], positions=[0]), INVALID_KEY),
    "a key that is too long": (publish(keys=[b"k" * 81], positions=[0]), INVALID_KEY),
    "a key too many": (publish(keys=[b"five5"] * 65_537), TOO_MANY),
    "a million keys": (publish(keys=[key_of(0)] * 1_000_000), TOO_LARGE),
    "a claim of an unpublished hold": (claim(), NO_HOLD),
    "a claim that waits for it": (claim(wait=seconds(0.2)), NO_HOLD),
    "a claim without a name": (call("ClaimHold", lambda _: handoff_pb2.ClaimHoldRequest()), INVALID),
    "a claim without an engine": (claim(hold=name(engine_id="")), INVALID),
    "a claim of a long name": (claim(hold=name(engine_id="e" * 600)), INVALID),
    "a claim for a long request": (claim(request_id="r" * 600), INVALID),
    "a claim with a negative wait": (claim(wait=seconds(-1)), INVALID),
    "a claim with a negative lease": (claim(lease_duration=seconds(-1)), INVALID),
    "a claim of a million groups": (claim(first_positions=[0] * 1_000_000), INVALID),
    "a renewal without a name": (call("RenewHolds", lambda _: {"holds": [HOLD, name("")]}), INVALID),
    "a renewal into the past": (call("RenewHolds", lambda _: {"holds": [HOLD], "extension": seconds(-1)}), INVALID),
    "a renewal of too many": (call("RenewHolds", lambda _: {"holds": [name("e", "r")] * 65_537}), INVALID),
    "a release without a name": (call("ReleaseHolds", lambda _: {"holds": [name(request_id="")]}), INVALID),
    "a report without a reason": (call("ReportNotClaimed", lambda _: {"hold": HOLD, "request_id": "r"}), INVALID),
    "a report with the outcome of a claim as reason": (
        call("ReportNotClaimed", lambda _: {"hold": HOLD, "request_id": "r", "reason": 4}),
        INVALID,
    ),
    "a report without a request": (call("ReportNotClaimed", lambda _: {"hold": HOLD, "reason": 5}), INVALID),
    "a release of too many": (call("ReleaseHolds", lambda _: {"holds": [name("e", "r")] * 65_537}), INVALID),
}


@pytest.mark.parametrize("case", CASES)
def test_bad_calls_are_refused(world: World, case: str) -> None:
    """Values out of range, contradictions and unknown names have their status and reason."""
    refuse(world, *CASES[case])


def test_a_refused_call_releases_nothing(world: World) -> None:
    """A list that contains a bad name is refused as a whole."""
    hold = world.hold()
    bad = call("ReleaseHolds", lambda _: handoff_pb2.ReleaseHoldsRequest(holds=[hold, name("")]))
    refuse(world, bad, INVALID)
    assert set(claimed(world, hold=hold).statuses) == {KeyStatus.HIT}


def test_times_beyond_the_limits_are_shortened(world: World) -> None:
    """A hold of centuries, or a renewal by centuries, gets the configured maximum."""
    long = Duration(seconds=10**11)
    hold = world.hold(duration=long)
    assert 590 < claimed(world, hold=hold, wait=long, lease_duration=long).remaining.seconds <= 600
    renew = call("RenewHolds", lambda _: handoff_pb2.RenewHoldsRequest(holds=[hold], extension=long))
    assert not renew(world).missing_holds  # type: ignore[attr-defined]
    assert claimed(world, hold=hold).remaining.seconds <= 600


def test_first_positions_of_unknown_groups_lease_nothing(world: World) -> None:
    """Positions beyond the last block have the same effect."""
    answer = claimed(world, hold=world.hold(), first_positions=[2**32 - 1] * 9)
    assert (set(answer.statuses), answer.lease_id) == ({0}, 0)


def test_a_cancelled_claim_leaves_no_lease(world: World) -> None:
    """The caller disconnects while the server waits for blocks; the hold expires as usual."""
    hold = world.hold(FRESH)
    request = handoff_pb2.ClaimHoldRequest(session=world.mine.ref, hold=hold, wait=seconds(20))
    with pytest.raises(grpc.RpcError) as refusal:
        world.mine.handoff.ClaimHold(request, timeout=0.2)
    assert refusal_of(refusal.value) == ("DEADLINE_EXCEEDED", None)
    world.server.wait_for(lambda status: status.leases == 0)
    assert (
        world.mine.handoff.RenewHolds(
            handoff_pb2.RenewHoldsRequest(session=world.mine.ref, holds=[hold]), timeout=TIMEOUT
        )
        == handoff_pb2.RenewHoldsResponse()
    )
