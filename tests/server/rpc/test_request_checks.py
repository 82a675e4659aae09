"""Limits of requests: durations, and sizes of the frames of a Push."""

from __future__ import annotations

import pytest
from harness.service_calls import duration, serving

from kvtier.protos.v1.common_pb2 import PackedKeys
from kvtier.protos.wire.packed_keys import pack_keys
from kvtier.server.config.schema import HandoffConfig, LeaseConfig, LimitConfig, RetentionConfig
from kvtier.server.refused import Refused
from kvtier.server.rpc.request_checks import PushFrameSizes, RequestValidator
from kvtier.tiers.errors import InvalidKey


def key(length: int, group: int = 0) -> bytes:
    return bytes(length - 4) + group.to_bytes(4, "big")


MOST, LONGEST = 8, 40
VALIDATOR = RequestValidator(
    LimitConfig(max_keys=MOST, max_key_bytes=LONGEST), LeaseConfig(), RetentionConfig(), HandoffConfig()
)
UNUSUAL = {
    "too many": (pack_keys([key(20)] * (MOST + 1)), "TOO_MANY_KEYS"),
    "too many, of two lengths": (pack_keys([key(20)] * MOST + [key(21)]), "TOO_MANY_KEYS"),
    "too long": (pack_keys([key(LONGEST + 1)]), "INVALID_KEY"),
    "too short": (PackedKeys(keys=bytes(8), key_bytes=4), "INVALID_KEY"),
    "cut off": (PackedKeys(keys=bytes(39), key_bytes=20), "INVALID_KEY"),
    "one length and a list": (PackedKeys(keys=bytes(40), key_bytes=20, lengths=b"\x14\0\x14\0"), "INVALID_KEY"),
    "no length": (PackedKeys(keys=bytes(40)), "INVALID_KEY"),
}


@pytest.mark.parametrize("case", UNUSUAL)
def test_keys_have_a_number_and_a_length(case: str) -> None:
    packed, reason = UNUSUAL[case]
    with pytest.raises(Refused) as refused:
        VALIDATOR.check_keys(packed)
    assert refused.value.reason == reason


@pytest.mark.parametrize("lengths", [[], [5], [LONGEST], [20] * MOST, [20, 21]], ids=str)
def test_keys_within_the_limits_are_valid(lengths: list[int]) -> None:
    VALIDATOR.check_keys(pack_keys(list(map(key, lengths))))


@pytest.mark.parametrize("length", [20, 21], ids=["one length", "two lengths"])
async def test_a_lookup_of_an_unknown_group_is_refused(length: int) -> None:
    packed = pack_keys([key(20), key(length, group=9)])
    async with serving() as calls:
        with pytest.raises(InvalidKey):
            await calls.long_calls.keys(calls.session, calls.validator, packed)


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
