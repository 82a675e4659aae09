"""Checks of requests to the fake server. A real server with default limits refuses the same."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...protos.v1 import cache_pb2, session_pb2
from ...protos.wire.packed_keys import unpack_key_list
from ...protos.wire.request_bounds import OutOfBounds, RequestBounds
from ..errors import error_for
from ..namespace import Namespace
from ..results import Medium

__all__ = ["FRAME_BYTES", "LIMITS", "check_bounds", "check_filter", "check_params", "keys_of", "required"]

_KEY_BYTES = range(5, 81)
FRAME_BYTES = 1 << 20
LIMITS = session_pb2.Limits(max_keys=65_536, max_frame_bytes=FRAME_BYTES)


@dataclass(frozen=True, slots=True)
class _Limits:
    max_keys: int = LIMITS.max_keys
    max_key_bytes: int = _KEY_BYTES[-1]
    max_frame_bytes: int = FRAME_BYTES


_bounds = RequestBounds(_Limits())


def check_bounds(method: str, request: Any) -> None:
    """Refuses a request with a text, list or byte string that is too long."""
    try:
        _bounds.check(method.removeprefix("/kvtier.v1."), request.SerializeToString())
    except OutOfBounds as error:
        raise error_for(error.reason, str(error)) from None


def keys_of(request: Any, namespace: Namespace | None = None) -> Sequence[bytes]:
    """Returns the keys of a request. Refuses a key without a group, if `namespace` is given."""
    try:
        keys = unpack_key_list(request.keys)
    except ValueError as error:
        raise error_for("INVALID_KEY", str(error)) from None
    if len(keys) > LIMITS.max_keys:
        raise error_for("TOO_MANY_KEYS", f"{len(keys)} keys in one call")
    if any(len(key) not in _KEY_BYTES for key in keys):
        raise error_for("INVALID_KEY", f"keys are {_KEY_BYTES[0]} to {_KEY_BYTES[-1]} bytes long")
    if namespace is not None:
        try:
            for key in keys:
                namespace.part_bytes_of(key)
        except ValueError as error:
            raise error_for("INVALID_KEY", str(error)) from None
    return keys


def check_filter(exclude: cache_pb2.TierFilter) -> None:
    """Refuses each name of a tier, because the fake has only the CPU tier."""
    if exclude.names:
        raise error_for("INVALID_ARGUMENT", f"the tier {exclude.names[0]!r} to exclude does not exist")
    if not set(exclude.media) <= set(Medium):
        raise error_for("INVALID_ARGUMENT", "a medium to exclude does not exist")


def check_params(text: str) -> None:
    try:
        params = json.loads(text or "{}")
    except ValueError as error:
        raise error_for("INVALID_ARGUMENT", f"kv_transfer_params_json is not JSON: {error}") from None
    if params is not None and not isinstance(params, dict):
        raise error_for("INVALID_ARGUMENT", "kv_transfer_params_json is not a JSON object")


def required(text: str, field: str) -> str:
    if not text:
        raise error_for("INVALID_ARGUMENT", f"{field} is missing")
    return text
