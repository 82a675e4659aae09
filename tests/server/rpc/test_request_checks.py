"""Durations of requests: defaults and limits of the server."""

from __future__ import annotations

from harness.service_calls import duration

from kvtier.server.config.schema import HandoffConfig, LeaseConfig, LimitConfig, RetentionConfig
from kvtier.server.rpc.request_checks import RequestValidator


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
