"""Arguments of a client's calls: options, each defined once, and the encoding of arguments.

A method takes the options as keywords and passes them on whole. An operation encodes those that are
given; the server's defaults apply to the others.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from functools import partial
from typing import Any, Final, TypedDict, TypeVar

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from ...protos.durations import duration_of
from ...protos.v1 import cache_pb2, common_pb2
from ...protos.wire.packed_keys import pack_keys
from ..errors import InvalidRequest
from ..results import Medium, TierFilter
from ..timeouts import check_seconds

__all__ = [
    "LeaseOptions",
    "LookupOptions",
    "PrefetchOptions",
    "RequestOptions",
    "StoreOptions",
    "duration",
    "encoded",
    "member",
    "message",
    "packed",
]


_MAX_SECONDS = 2.0**60
"""Longest time that a request can have. The server shortens times to its limits."""

M = TypeVar("M", bound=Message)
E = TypeVar("E", bound=Enum)


class StoreOptions(TypedDict, total=False):
    """Options of a store.

    `request_id` names the request that stores. `retain_for`: seconds without eviction, within the
    server's limit; default: those of `begin_request`.
    """

    request_id: str
    retain_for: float | None


class _Search(TypedDict, total=False):
    wait: float
    exclude: TierFilter | None
    retain_for: float | None
    source: str


class LeaseOptions(_Search, total=False):
    """Options of calls that look up keys and pin the hits; see `LookupOptions`."""

    prefix: bool
    lease: float | None
    min_hits: int
    slots: bool


class PrefetchOptions(_Search, total=False):
    """Options of a prefetch; see `LookupOptions`."""

    request_id: str


class LookupOptions(LeaseOptions, total=False):
    """Options of a lookup.

    `request_id`: owner of the lease; `finish_request` releases it.
    `wait`: seconds to wait for room, and for blocks that are being written or promoted; default: 0.
    `prefix`: whether all keys after the first miss count as misses; default: True.
    `lease`: duration of the lease in seconds; default: the server's.
    `exclude`: tiers that the lookup does not use.
    `min_hits`: with `prefix`: if there are fewer leading hits, all keys count as misses.
    `retain_for`: seconds without eviction, within the server's limit; default: those of
    `begin_request`.
    `source`: server of another host (`HOST:PORT`) from which to load blocks that are missing.
    `slots`: whether `read` of the leading hits needs no call before the copy; see `LeaseSlots`.
    """

    request_id: str


class RequestOptions(LeaseOptions, total=False):
    """Options of the begin of a request: those of a lookup, and further ones.

    `retain_for` is for all blocks of the request. `prompt_tokens`, `priority` and
    `kv_transfer_params` (a mapping that JSON can represent) are for the votes of the tiers.
    `conversation_id`: see `ConversationClient`.
    """

    prompt_tokens: int
    priority: int
    kv_transfer_params: Mapping[str, Any] | None
    conversation_id: str


def encoded(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a request. Raises `InvalidRequest` for a wrong value.

    Raises TypeError for a name that is no option of any call. `message` refuses an option of
    another call.
    """
    fields = {}
    for name, value in options.items():
        if (encoder := _ENCODERS.get(name)) is None:
            raise TypeError(f"unexpected keyword argument {name!r}")
        field, encode = encoder
        fields[field] = value if encode is None else encode(value)
    return fields


def message(make: type[M], **fields: Any) -> M:
    """Returns a protobuf message; raises `InvalidRequest` for a value of the wrong type."""
    try:
        return make(**fields)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(str(error)) from error


def packed(keys: Sequence[bytes]) -> common_pb2.PackedKeys:
    """Returns the request field for keys; raises `InvalidRequest` for values that are no keys."""
    try:
        return pack_keys(keys)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidRequest(f"keys must be bytes: {error}") from error


def member(kind: type[E], value: object, name: str) -> E:
    """Returns the member of an enum with this value; raises `InvalidRequest` for other values."""
    try:
        return kind(value)
    except ValueError:
        choices = ", ".join(f"{kind.__name__}.{choice.name}" for choice in kind)
        raise InvalidRequest(f"{name} must be one of {choices}, not {value!r}") from None


def duration(name: str, seconds: float | None) -> Duration | None:
    """Returns the duration of the argument `name`; raises `InvalidRequest` if it is invalid."""
    if seconds is None:
        return None
    check_seconds(name, seconds, _MAX_SECONDS)
    return duration_of(seconds)


def _mode(prefix: bool) -> cache_pb2.LookupMode:  # noqa: FBT001 - a value, not a switch
    return cache_pb2.LOOKUP_MODE_PREFIX if prefix else cache_pb2.LOOKUP_MODE_EACH


def _json(params: object) -> str:
    if params is None:
        return ""
    if not isinstance(params, Mapping):
        raise InvalidRequest(f"kv_transfer_params must be a mapping, not {params!r:.100}")
    try:
        return json.dumps(params, allow_nan=False, ensure_ascii=False) if params else ""
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"kv_transfer_params cannot be encoded as JSON: {error}") from error


def _tier_filter(exclude: object) -> cache_pb2.TierFilter | None:
    if exclude is None:
        return None
    if not isinstance(exclude, TierFilter):
        raise InvalidRequest(f"exclude must be a TierFilter, not {exclude!r:.100}")
    for name in ("names", "media"):
        if isinstance(value := getattr(exclude, name), str) or not isinstance(value, Iterable):
            raise InvalidRequest(f"TierFilter.{name} must be a collection, not {value!r}")
    media = [cache_pb2.TierMedium.Name(member(Medium, medium, "TierFilter.media")) for medium in exclude.media]
    return message(cache_pb2.TierFilter, names=exclude.names, media=media, remote=exclude.remote)


def _wait(seconds: float | None) -> Duration | None:
    """Returns None for 0, which is the server's default."""
    if seconds is None:
        return None
    check_seconds("wait", seconds, _MAX_SECONDS)
    return duration_of(seconds) if seconds else None


_ENCODERS: Final[Mapping[str, tuple[str, Callable[[Any], Any] | None]]] = {
    "request_id": ("request_id", None),
    "wait": ("wait", _wait),
    "prefix": ("mode", _mode),
    "lease": ("lease_duration", partial(duration, "lease")),
    "exclude": ("exclude", _tier_filter),
    "min_hits": ("min_hits", None),
    "retain_for": ("retain_for", partial(duration, "retain_for")),
    "source": ("source", None),
    "slots": ("want_slots", None),
    "prompt_tokens": ("prompt_tokens", None),
    "priority": ("priority", None),
    "kv_transfer_params": ("kv_transfer_params_json", _json),
    "conversation_id": ("conversation_id", None),
}
"""Per option its field of the request, and the encoder of its value."""
