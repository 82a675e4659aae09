"""Odd inputs of each method of a client. All servers and transports give the same outcome.

The outcome of a call is the reason of its error, the name of the exception if the client raises it
without asking the server, or a value made of the call's result.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

from kvtier.client import (
    Client,
    Group,
    HandoffDirection,
    HoldName,
    KVTierError,
    Medium,
    Namespace,
    TierFilter,
    make_key,
)

__all__ = ["NAMESPACE", "odd_calls", "outcome_of"]

Call: TypeAlias = Callable[[Client], Any]

SMALL = 5000
NAMESPACE = Namespace("odd inputs", "uint8", (Group(SMALL, 16), Group(2 * SMALL, 16)))
BLOCK = bytes(SMALL)
UNKNOWN = 2**62
"""An id of a lease that no server has granted."""

KEY = make_key(b"a key that no client stores.....", 0)
KEYS: dict[str, Any] = {
    "an empty key": [b""],
    "a key of one byte": [b"k"],
    "a group without a hash": [bytes(4)],
    "a key of 5 bytes": [b"k" + bytes(4)],
    "a key of 80 bytes": [bytes(76) + bytes(4)],
    "a key of 81 bytes": [bytes(77) + bytes(4)],
    "a key of 204 bytes": [bytes(200) + bytes(4)],
    "an unknown group": [make_key(b"x" * 32, 2)],
    "the largest group": [make_key(b"x" * 32, 2**32 - 1)],
    "a good and an unknown group": [KEY, make_key(b"x" * 32, 2)],
    "keys of two lengths": [KEY, b"k" + bytes(4)],
    "a good and an empty key": [KEY, b""],
    "a text as a key": ["text"],
    "a number as a key": [7],
    "None as a key": [None],
    "a memoryview as a key": [memoryview(KEY)],
    "a text as the list": "text",
    "a number as the list": 7,
    "None as the list": None,
    "one key without a list": KEY,
    "a key twice": [KEY, KEY],
    "an empty list": [],
    "a tuple": (KEY,),
    "65,537 keys": [KEY] * 65_537,
    "65,538 keys of two lengths": [KEY, b"k" + bytes(4)] * 32_769,
}
SECONDS: dict[str, Any] = {
    "negative": -1.0,
    "minus zero": -0.0,
    "infinite": math.inf,
    "not a number": math.nan,
    "a text": "1",
    "1e30": 1e30,
    "a nanosecond": 1e-9,
}
TEXTS: dict[str, Any] = {
    "an empty text": "",
    "512 characters": "é" * 512,
    "513 characters": "r" * 513,
    "a text with a zero": "a\0b",
    "a lone surrogate": "\ud800",
    "bytes": b"request",
    "invalid bytes": b"\xff",
    "a number": 7,
    "a list": ["r"],
}
NUMBERS: dict[str, Any] = {
    "a negative number": -1,
    "a number of 33 bits": 2**32,
    "a number of 65 bits": 2**64,
    "a fraction": 0.5,
    "a text": "1",
}
ITEMS: dict[str, Any] = {
    "item -1": [-1],
    "items 0 and -1": [0, -1],
    "an item behind the end": [3],
    "an item of 32 bits": [2**32 - 1],
    "an item of 33 bits": [2**32],
    "an item of 65 bits": [2**64],
    "a miss": [2],
    "a hit and a miss": [0, 2],
    "a miss and an item behind the end": [2, 3],
    "a text as an item": ["0"],
    "a fraction as an item": [0.5],
    "None as an item": [None],
    "a number as the list": 0,
    "items twice": [0, 0, 1],
    "no items": [],
    "items backwards": [1, 0],
    "65,537 items": [0] * 65_537,
}
PARAMS: dict[str, Any] = {
    "a list": [1],
    "an empty list": [],
    "a text": "text",
    "a number": 7,
    "a key that is a number": {1: 2},
    "a value that JSON lacks": {"a": object()},
    "an infinite value": {"a": math.inf},
    "a large number": {"a": 10**400},
    "16,385 characters": {"a": "x" * 16_376},
    "16,384 characters": {"a": "x" * 16_375},
    "deep nesting": {"a": json.loads("[" * 90 + "]" * 90)},
    "a lone surrogate": {"a": "\ud800"},
}
FILTERS: dict[str, Any] = {
    "an unknown tier": TierFilter(names=["unknown"]),
    "the CPU tier": TierFilter(names=["cpu"]),
    "an empty name": TierFilter(names=[""]),
    "a text as names": TierFilter(names="cpu"),
    "an unknown medium": TierFilter(media=[99]),  # type: ignore[list-item]
    "all media": TierFilter(media=list(Medium)),
    "a text as the filter": "cpu",
    "65 names": TierFilter(names=["cpu"] * 65),
}
BUFFERS: dict[str, Any] = {
    "too few buffers": [],
    "too many buffers": [BLOCK, BLOCK],
    "one byte too few": [bytes(SMALL - 1)],
    "one byte too many": [bytes(SMALL + 1)],
    "an empty buffer": [b""],
    "a text as a buffer": ["text"],
    "None as a buffer": [None],
    "a buffer with gaps": [memoryview(bytes(2 * SMALL))[::2]],
    "None as the list": None,
}


def outcome_of(call: Call, client: Client) -> Any:
    try:
        return call(client)
    except KVTierError as error:
        return error.reason or type(error).__name__


def odd_calls() -> Iterator[tuple[str, Call]]:
    """Yields a name and a call. Calls leave no lease, request or hold, and may store blocks."""
    for name, keys in KEYS.items():
        yield from ((f"{method}: {name}", call) for method, call in _calls_with_keys(keys))
    for name, seconds in SECONDS.items():
        yield from ((f"{method}, seconds: {name}", call) for method, call in _calls_with_seconds(seconds))
    for name, text in TEXTS.items():
        yield from ((f"{method}: {name}", call) for method, call in _calls_with_text(text))
    for name, number in NUMBERS.items():
        yield from ((f"{method}: {name}", call) for method, call in _calls_with_number(number))
    for name, items in ITEMS.items():
        yield f"read: {name}", lambda client, items=items: _read(client, items)
        yield f"read by id: {name}", lambda client, items=items: _read(client, items, by_id=True)
    for name, params in PARAMS.items():
        yield f"kv_transfer_params: {name}", lambda client, params=params: _begin(client, kv_transfer_params=params)
    for name, exclude in FILTERS.items():
        yield f"lookup without {name}", lambda client, e=exclude: _statuses(client.lookup([KEY], exclude=e))
        yield f"prefetch without {name}", lambda client, e=exclude: client.prefetch([KEY], exclude=e)
    for name, buffers in BUFFERS.items():
        yield f"store: {name}", lambda client, b=buffers: client.store([_new_key()], b)
        yield f"load: {name}", lambda client, b=buffers: client.load([KEY], b)
    yield "load: a buffer that cannot be written", lambda client: client.load(_stored(client), [BLOCK])
    yield "reset: a block is leased", _reset_with_a_lease
    yield "reset: a block is being written", _reset_with_a_store
    yield "reset: a block is held", _reset_with_a_hold
    yield "write: a failed item that does not exist", _fail_an_unknown_item


def _calls_with_keys(keys: Any) -> Iterator[tuple[str, Call]]:
    yield "lookup", lambda client: _statuses(client.lookup(keys))
    yield "lookup of each key", lambda client: _statuses(client.lookup(keys, prefix=False))
    yield "begin_request", lambda client: _begin(client, keys)
    yield "prefetch", lambda client: client.prefetch(keys)
    yield "load", lambda client: client.load(keys, [bytearray(SMALL)] * _length(keys))
    yield "store", lambda client: _aborted(client, keys)
    yield "flush", lambda client: client.flush(keys, wait=0)
    yield "publish", lambda client: _publish(client, keys=keys, positions=range(_length(keys)))


def _calls_with_seconds(seconds: Any) -> Iterator[tuple[str, Call]]:
    for name in ("wait", "lease", "retain_for"):
        yield f"lookup, {name}", lambda client, name=name: _statuses(client.lookup([KEY], **{name: seconds}))
    for name in ("wait", "retain_for"):
        yield f"prefetch, {name}", lambda client, name=name: client.prefetch([KEY], **{name: seconds})
    yield "begin_request, retain_for", lambda client: _begin(client, retain_for=seconds)
    yield "touch", lambda client: client.touch(UNKNOWN, lease=seconds)
    yield "publish", lambda client: _publish(client, hold_for=seconds)
    yield "renew_holds", lambda client: client.renew_holds(HoldName("e", "r"), extension=seconds)
    if seconds not in (1e30, math.inf):
        yield "flush", lambda client: client.flush([], wait=seconds)
        yield "reset", lambda client: client.reset(wait=seconds)
        yield "finish_request", lambda client: client.finish_request("r", wait=seconds).settled
        yield "claim", lambda client: client.claim(HoldName(client.engine_id, "no"), wait=seconds)


def _calls_with_text(text: Any) -> Iterator[tuple[str, Call]]:
    yield "lookup, request_id", lambda client: _statuses(client.lookup([KEY], request_id=text))
    yield "lookup, source", lambda client: _statuses(client.lookup([], source=text))
    yield "begin_request, request_id", lambda client: _begin(client, request_id=text)
    yield "begin_request, conversation_id", lambda client: _begin(client, conversation_id=text)
    yield "finish_request", lambda client: client.finish_request(text).settled
    yield "store, request_id", lambda client: client.store([], [], request_id=text)
    yield "publish, request_id", lambda client: _publish(client, request_id=text)
    yield "claim, engine", lambda client: client.claim(HoldName(text, "r"))
    yield "claim, request", lambda client: client.claim(HoldName("e", text))
    yield "claim, request_id", lambda client: client.claim(HoldName("e", "r"), request_id=text)
    yield "renew_holds", lambda client: len(client.renew_holds(HoldName("e", text)))
    yield "release_holds", lambda client: client.release_holds(HoldName(text, "r"))


def _calls_with_number(number: Any) -> Iterator[tuple[str, Call]]:
    yield "lookup, min_hits", lambda client: _statuses(client.lookup([KEY], min_hits=number))
    yield "begin_request, prompt_tokens", lambda client: _begin(client, prompt_tokens=number)
    yield "begin_request, priority", lambda client: _begin(client, priority=number)
    yield "touch", lambda client: client.touch(number) == [number]
    yield "release", lambda client: client.release(number)
    yield "read of a lease", lambda client: _read(client, [0], lease=number)
    yield "publish, num_tokens", lambda client: _publish(client, num_tokens=number)
    yield "publish, position", lambda client: _publish(client, positions=[number])
    yield "publish, direction", lambda client: _publish(client, direction=number)
    yield "claim, min_blocks", lambda client: client.claim(HoldName("e", "r"), min_blocks=number)
    yield "claim, first_positions", lambda client: client.claim(HoldName("e", "r"), first_positions=[number])


def _length(keys: Any) -> int:
    try:
        return len(keys)
    except TypeError:
        return 1


def _new_key() -> bytes:
    return make_key(os.urandom(32), 0)


def _stored(client: Client, count: int = 1) -> list[bytes]:
    keys = [_new_key() for _ in range(count)]
    client.store(keys, [BLOCK] * count)
    return keys


def _statuses(lease: Any) -> Any:
    lease.release()
    return lease.statuses, lease.prefix_hits


def _begin(client: Client, keys: Any = (), *, request_id: Any = "r", **options: Any) -> Any:
    try:
        return _statuses(client.begin_request(request_id, keys, **options))
    finally:
        if request_id == "r":
            client.finish_request("r")


def _aborted(client: Client, keys: Any) -> Any:
    """Begins a store and stores nothing."""
    with client.write(keys) as batch:
        batch.failed.update(range(len(batch.wanted)))
    return batch.statuses, batch.wanted


def _publish(
    client: Client, *, request_id: Any = "r", keys: Any = (KEY,), positions: Any = (0,), **options: Any
) -> Any:
    options = {"num_tokens": 16, "direction": HandoffDirection.PREFILL_TO_DECODE} | options
    published = client.publish(request_id, keys, positions, **options)
    client.release_holds(HoldName(client.engine_id, request_id if isinstance(request_id, str) else request_id.decode()))
    return published.status, published.pending_blocks


def _read(client: Client, items: Any, *, by_id: bool = False, lease: Any = None) -> Any:
    """Reads items of a lease of two hits and a miss."""
    with (
        client.lookup([*_stored(client, 2), _new_key()]) as found,
        client.read((found.id if by_id else found) if lease is None else lease, items) as batch,
    ):
        return len(batch.views())


def _reset_with_a_lease(client: Client) -> Any:
    """Uses the namespace before, during and after a reset that waits for the end of a lease."""
    _reset(client)
    keys, other, later = _stored(client, 2), _stored(client), _new_key()
    client.flush([*keys, *other], wait=60)  # else blocks in a write count as in use
    with client.lookup(keys) as lease:
        pending = client.reset()
        during = client.lookup(other).id, client.store([later], [BLOCK]), client.store(keys, [BLOCK] * 2)
        found = client.lookup([later, *keys], prefix=False)
        found.release()
        with client.read(lease, [0, 1]) as batch:
            read = len(batch.views())
    return pending, during, found.statuses, read, _reset(client)


def _reset_with_a_store(client: Client) -> Any:
    _reset(client)
    key = _new_key()
    with client.write([key]):
        pending = client.reset()
        again = client.store([key], [BLOCK])
    return pending, again, _statuses(client.lookup([key])), _reset(client)


def _reset(client: Client) -> int:
    """Waits for the end of a reset that runs, and resets again."""
    return client.reset(wait=10) + client.reset(wait=10)


def _reset_with_a_hold(client: Client) -> Any:
    keys = _stored(client)
    client.publish("held", keys, [0], num_tokens=16)
    return _reset(client), len(client.renew_holds(HoldName(client.engine_id, "held")))


def _fail_an_unknown_item(client: Client) -> None:
    with client.write([_new_key()]) as batch:
        batch.failed.add(1)
