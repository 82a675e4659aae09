"""Tables of reasons and enums match the wire contract."""

from __future__ import annotations

from typing import Any

import pytest

from kvtier.client.errors import ERROR_OF
from kvtier.protos import values
from kvtier.protos.error_reasons import STATUS_OF
from kvtier.protos.v1 import admin_pb2, cache_pb2, common_pb2, errors_pb2, handoff_pb2
from kvtier.tiers import types
from kvtier.tiers.errors import CoreError
from kvtier.tiers.stats import request_log


def test_every_reason_has_its_status_and_its_exception() -> None:
    """The tables of statuses and exceptions have exactly the reasons of the wire contract."""
    reasons = {
        name.removeprefix("ERROR_REASON_")
        for name, number in errors_pb2.ErrorReason.items()
        if number != errors_pb2.ERROR_REASON_UNSPECIFIED
    }
    assert set(STATUS_OF) == reasons
    assert set(ERROR_OF) == reasons
    refusals = [CoreError, *CoreError.__subclasses__()]
    assert {refusal.reason for refusal in refusals} <= reasons  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("ours", "wire"),
    [
        (values.KeyStatus, common_pb2.KeyStatus),
        (values.StoreStatus, common_pb2.StoreStatus),
        (values.DurableStatus, common_pb2.DurableStatus),
        (values.OffloadPolicy, cache_pb2.OffloadPolicy),
        (values.Medium, cache_pb2.TierMedium),
        (values.HandoffDirection, handoff_pb2.HandoffDirection),
        (values.PublishStatus, handoff_pb2.PublishStatus),
        (types.MissReason, admin_pb2.MissReason),
        (types.HoldEnd, admin_pb2.HoldEnd),
        (request_log.ClaimOutcome, admin_pb2.ClaimOutcome),
    ],
)
def test_numbers_agree_with_the_wire(ours: Any, wire: Any) -> None:
    """The enums have the names and numbers of the wire contract."""
    prefixed = {name: number for name, number in wire.items() if number}
    length = len(next(iter(prefixed))) - len(
        max((m.name for m in ours if next(iter(prefixed)).endswith(m.name)), key=len)
    )
    assert {member.name: member.value for member in ours} == {name[length:]: n for name, n in prefixed.items()}
