"""Validation of request arguments, before the core is called.

The sizes of all lists and texts have been checked before the request was parsed.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence

from google.protobuf.duration_pb2 import Duration

from ...protos.durations import seconds_of
from ...protos.v1 import cache_pb2, common_pb2
from ...protos.wire.packed_keys import check_form, count_keys, slices_of_keys
from ...protos.wire.request_bounds import OutOfBounds, RequestBounds
from ...tiers.negotiation import Medium, TierFilter
from ...tiers.types import GROUP_INDEX_BYTES, NamespaceSpec
from ..config.schema import HandoffConfig, LeaseConfig, LimitConfig, RetentionConfig
from ..refused import Refused

__all__ = ["PushFrameSizes", "RefusingBounds", "RequestValidator", "duration_seconds"]

_SHORT_FRAME_BYTES = 4096
_SHORT_FRAMES = 64


class RefusingBounds(RequestBounds):
    """Bounds of requests for the server, which answers a request beyond them with a refusal."""

    def check(self, method: str, message: bytes) -> None:
        """Checks a request of a method (Service/Method). Raises `Refused`."""
        try:
            super().check(method, message)
        except OutOfBounds as error:
            raise Refused(error.reason, str(error)) from None


class PushFrameSizes:
    """Bounds of the frames of one Push, because each frame costs the server the same work.

    A client may send one frame per part, and parts may be short. So it may send as many frames of
    less than 4 KiB as the store has parts, and 64 more.
    """

    def __init__(self, parts: int, most_bytes: int) -> None:
        """`parts`: number of parts of the store; `most_bytes`: largest payload of a frame."""
        self._most_bytes = most_bytes
        self._short_frames = self._left = parts + _SHORT_FRAMES

    def check(self, nbytes: int) -> None:
        """Raises `Refused` if the next frame must not have this size."""
        if nbytes > self._most_bytes:
            raise Refused("WRONG_SIZE", f"a frame has {nbytes} bytes; the limit is {self._most_bytes}")
        if nbytes < _SHORT_FRAME_BYTES:
            self._left -= 1
            if self._left < 0:
                text = f"more than {self._short_frames} frames have less than {_SHORT_FRAME_BYTES} bytes"
                raise Refused("WRONG_SIZE", text)


class RequestValidator:
    """Checks arguments against the limits; raises `Refused`. Durations are in seconds."""

    def __init__(
        self, limits: LimitConfig, leases: LeaseConfig, retention: RetentionConfig, handoff: HandoffConfig
    ) -> None:
        self.limits = limits
        self.leases = leases
        self._retention = retention
        self._handoff = handoff

    def check_keys(self, keys: common_pb2.PackedKeys) -> None:
        """Checks the number of keys, and their length if they have one. An empty list is valid."""
        nbytes, key_bytes, limits = len(keys.keys), keys.key_bytes, self.limits
        has_length = GROUP_INDEX_BYTES < key_bytes <= limits.max_key_bytes and not nbytes % key_bytes
        if has_length and nbytes <= limits.max_keys * key_bytes and not keys.lengths:
            return  # the usual form
        number = count_keys(keys)
        if number > self.limits.max_keys:
            raise Refused("TOO_MANY_KEYS", f"{number} keys in one call; the limit is {self.limits.max_keys}")
        try:
            check_form(keys)
        except ValueError as error:
            raise Refused("INVALID_KEY", f"keys: {error}") from None
        if number and keys.key_bytes:
            self._check_lengths((keys.key_bytes,))

    def slices_of(self, keys: common_pb2.PackedKeys, most: int) -> Iterator[tuple[bytes, list[bytes]]]:
        """Checks keys in slices of at most `most`. Yields the bytes of each slice, and its keys.

        65,536 keys of different lengths take 20 ms. A caller does other work between the slices.
        """
        self.check_keys(keys)
        try:
            for joined, part in slices_of_keys(keys, most):
                if not keys.key_bytes:
                    self._check_lengths(set(map(len, part)))
                yield joined, part
        except ValueError as error:
            raise Refused("INVALID_KEY", f"keys: {error}") from None

    def check_groups(self, keys: Sequence[bytes], packed: bytes, key_bytes: int, namespace: NamespaceSpec) -> None:
        """Raises `InvalidKey` for an unknown group. `packed`: the bytes of the keys."""
        if not key_bytes or not namespace.groups_are_known(packed, key_bytes):
            namespace.check(keys)

    def _check_lengths(self, lengths: Collection[int]) -> None:
        if min(lengths) <= GROUP_INDEX_BYTES or max(lengths) > self.limits.max_key_bytes:
            raise Refused(
                "INVALID_KEY",
                f"keys are {GROUP_INDEX_BYTES + 1} to {self.limits.max_key_bytes} bytes long; "
                f"got {min(lengths)} to {max(lengths)}",
            )

    def tiers(self, exclude: cache_pb2.TierFilter) -> TierFilter:
        try:
            media = frozenset(map(Medium, exclude.media))
        except ValueError as error:
            raise Refused("INVALID_ARGUMENT", f"exclude.media: {error}") from error
        return TierFilter(frozenset(exclude.names), media, exclude.remote)

    def wait(self, wait: Duration) -> float:
        """Returns the time that a call may wait; 0 if not given."""
        return min(duration_seconds(wait, "wait"), self.limits.max_wait) if wait.seconds or wait.nanos else 0.0

    def lease(self, duration: Duration) -> float:
        """Returns the duration of a lease; the default if not given."""
        is_given = duration.seconds or duration.nanos
        seconds = duration_seconds(duration, "lease_duration") if is_given else 0.0
        return min(seconds or self.leases.default, self.leases.max)

    def retention(self, retain_for: Duration) -> float:
        """Returns the time for which blocks are exempt from eviction; 0 if not given."""
        is_given = retain_for.seconds or retain_for.nanos
        return min(duration_seconds(retain_for, "retain_for"), self._retention.max) if is_given else 0.0

    def hold(self, duration: Duration) -> float:
        """Returns the duration of a hold."""
        return min(duration_seconds(duration, "duration") or self._handoff.default, self._handoff.max)

    def extension(self, extension: Duration) -> float | None:
        """Returns the requested remaining time of a hold; None if not given."""
        return min(duration_seconds(extension, "extension"), self._handoff.max) or None


def duration_seconds(duration: Duration, name: str) -> float:
    """Converts the duration in the request field `name`. Raises `Refused` if it is negative."""
    seconds = seconds_of(duration)
    if seconds < 0 or not math.isfinite(seconds):
        raise Refused("INVALID_ARGUMENT", f"{name} is negative")
    return seconds
