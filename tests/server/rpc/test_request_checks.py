"""Limits of requests: durations, and sizes of the frames of a Push."""

from __future__ import annotations

import pytest
from harness.service_calls import duration

from kvtier.server.config.schema import HandoffConfig, LeaseConfig, LimitConfig, RetentionConfig
from kvtier.server.refused import Refused
from kvtier.server.rpc.request_checks import PushFrameSizes, RequestValidator


def test_durations_have_a_default_and_a_maximum() -> None:
    """The server shortens a longer duration to its maximum."""
    validator = RequestValidator(
        LimitConfig(max_wait=2.0),
        LeaseConfig(default=3.0, max=5.0),
        RetentionConfig(max=7.0),
        HandoffConfig(default=8.0, max=9.0),
    )
    asked = [duration(seconds) for seconds in (0.0, 1.0, 1e6)]
    assert [validator.wait(each) for each in asked] == [0.0, 1.0, 2.0]
    assert [validator.lease(each) for each in asked] == [3.0, 1.0, 5.0]
    assert [validator.retention(each) for each in asked] == [0.0, 1.0, 7.0]
    assert [validator.hold(each) for each in asked] == [8.0, 1.0, 9.0]
    assert [validator.extension(each) for each in asked] == [None, 1.0, 9.0]


def test_a_push_has_a_bounded_number_of_short_frames() -> None:
    """As many as the store has parts, and 64 more. Frames of 4 KiB do not count."""
    sizes = PushFrameSizes(parts=3, most_bytes=5000)
    for nbytes in [4095] * 67 + [4096] * 100:
        sizes.check(nbytes)
    with pytest.raises(Refused):
        sizes.check(4095)
