"""CacheService: a refused call has a status and a stable reason; other clients are not affected."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from harness.misbehaving import (
    FRESH,
    INVALID,
    KEYS,
    NO_LEASE,
    NO_STORE,
    NOT_OWNER,
    NOT_READY,
    World,
    call,
    refuse,
    seconds,
)
from harness.raw import refusal_of

from kvtier.client.results import KeyStatus
from kvtier.protos.v1 import cache_pb2
from kvtier.protos.wire.packed_keys import pack_keys

CACHE_CASES: dict[str, tuple[Callable[[World], dict[str, Any]], tuple[str, str | None]]] = {
    "BeginRequest without id": (lambda _: {"keys": pack_keys(KEYS)}, INVALID),
    "BeginRequest with a long id": (lambda _: {"request_id": "r" * 600, "keys": pack_keys(KEYS)}, INVALID),
    "Lookup with a long id": (lambda _: {"request_id": "r" * 600}, INVALID),
    "Lookup with a negative lease": (lambda _: {"keys": pack_keys(KEYS), "lease_duration": seconds(-1)}, INVALID),
    "Lookup with a negative wait": (lambda _: {"keys": pack_keys(KEYS), "wait": seconds(-0.001)}, INVALID),
    "Lookup with a wait that contradicts itself": (
        lambda _: {"keys": pack_keys(KEYS), "wait": Duration(seconds=1, nanos=-(2**31))},
        INVALID,
    ),
    "BeginRequest with a long conversation": (
        lambda _: {"request_id": "r", "keys": pack_keys(KEYS), "conversation_id": "c" * 600},
        INVALID,
    ),
    "BeginRequest with a negative wait": (
        lambda _: {"request_id": "r", "keys": pack_keys(KEYS), "wait": seconds(-1)},
        INVALID,
    ),
    "Prefetch with a negative wait": (lambda _: {"keys": pack_keys(KEYS), "wait": seconds(-1)}, INVALID),
    "Prefetch with a negative retention": (lambda _: {"keys": pack_keys(KEYS), "retain_for": seconds(-1)}, INVALID),
    "Prefetch with a long id": (lambda _: {"request_id": "r" * 600, "keys": pack_keys(KEYS)}, INVALID),
    "Touch with a negative lease": (lambda w: {"lease_ids": [w.lease()], "lease_duration": seconds(-5)}, INVALID),
    "Flush with a negative wait": (lambda _: {"keys": pack_keys(KEYS), "wait": seconds(-1)}, INVALID),
    "PrepareLoad of an unknown lease": (lambda _: {"lease_id": 2**64 - 1, "items": [0]}, NO_LEASE),
    "PrepareLoad of another client's": (lambda w: {"lease_id": w.lease(w.theirs), "items": [0]}, NOT_OWNER),
    "PrepareLoad of an unknown item": (lambda w: {"lease_id": w.lease(), "items": [0, 32]}, INVALID),
    "PrepareLoad of an item far out": (lambda w: {"lease_id": w.lease(), "items": [2**32 - 1]}, INVALID),
    "PrepareLoad of more items than keys in a call": (
        lambda w: {"lease_id": w.lease(), "items": [0] * 4_000_000},
        INVALID,
    ),
    "PrepareLoad of a miss": (lambda w: {"lease_id": w.lease(keys=[*KEYS, *FRESH]), "items": [33]}, INVALID),
    "PrepareLoad of a block that is being stored": (
        lambda w: {"lease_id": (w.store(), w.lease(keys=FRESH))[1], "items": [0]},
        NOT_READY,
    ),
    "CompleteLoad of an unknown lease": (lambda _: {"lease_id": 4711}, NO_LEASE),
    "CompleteLoad of another client's": (lambda w: {"lease_id": w.lease(w.theirs), "release": True}, NOT_OWNER),
    "ReleaseLease of another client's": (lambda w: {"lease_ids": [w.lease(w.theirs)]}, NOT_OWNER),
    "WithdrawGrants of too many": (lambda _: {"grant_ids": range(257)}, INVALID),
    "ReleaseLease of too many": (lambda _: {"lease_ids": range(1_000_000)}, INVALID),
    "Touch of another client's": (lambda w: {"lease_ids": [w.lease(w.theirs)]}, NOT_OWNER),
    "Touch of too many": (lambda _: {"lease_ids": range(1_000_000)}, INVALID),
    "CompleteStore of an unknown store": (lambda _: {"store_id": 4711}, NO_STORE),
    "CompleteStore of another client's": (lambda w: {"store_id": w.store(w.theirs)}, NOT_OWNER),
    "CompleteStore discards another client's": (
        lambda w: {"store_id": w.store(w.theirs), "failed_items": range(len(FRESH))},
        NOT_OWNER,
    ),
    "CompleteStore with an unknown item": (lambda w: {"store_id": w.store(), "failed_items": [0, 8]}, INVALID),
    "CompleteStore with an item far out": (lambda w: {"store_id": w.store(), "failed_items": [2**32 - 1]}, INVALID),
    "FinishRequest with a long id": (lambda _: {"request_id": "r" * 600}, INVALID),
    "FinishRequest without an id": (lambda _: {}, INVALID),
    "PrepareStore with a long id": (lambda _: {"request_id": "r" * 600, "keys": pack_keys(FRESH)}, INVALID),
    **{
        f"BeginRequest with params {name}": (
            lambda _, text=text: {"request_id": "r", "keys": pack_keys(KEYS), "kv_transfer_params_json": text},
            INVALID,
        )
        for name, text in {
            "cut short": '{"a": ',
            "not an object": "[1, 2]",
            "a text": '"text"',
            "nested too deep": "[" * 100_000,
            "a number that is too long": "9" * 10_000,
            "not JSON": "\x00\x01",
        }.items()
    },
}


@pytest.mark.parametrize("case", CACHE_CASES)
def test_bad_calls_are_refused(world: World, case: str) -> None:
    """Values out of range, unknown ids and other clients' ids have their status and reason."""
    make, expected = CACHE_CASES[case]
    refuse(world, call(case.partition(" ")[0], make), expected)


def test_completing_twice(world: World) -> None:
    """The second completion of a store or lease finds nothing, and the first stays valid."""
    store_id, lease_id = world.store(), world.lease()
    store = call("CompleteStore", lambda _: {"store_id": store_id, "failed_items": range(len(FRESH))})
    load = call("CompleteLoad", lambda _: {"lease_id": lease_id, "release": True})
    for complete, second in ((store, NO_STORE), (load, NO_LEASE)):
        complete(world)
        refuse(world, complete, second)
    assert set(call("Lookup", lambda _: {"keys": pack_keys(FRESH)})(world).statuses) == {KeyStatus.MISS}  # type: ignore[attr-defined]


def test_unknown_leases_and_requests_can_be_ended(world: World) -> None:
    """An unknown lease can be released; a touch names it; an unknown request is ignored."""
    lease_id = world.lease()
    call("ReleaseLease", lambda _: {"lease_ids": [1, 2, 2**64 - 1]})(world)
    touched: Any = call("Touch", lambda _: {"lease_ids": [1, lease_id, 2]})(world)
    assert list(touched.missing_lease_ids) == [1, 2]
    call("FinishRequest", lambda _: {"request_id": "never begun"})(world)


def test_times_beyond_the_limits_are_shortened(world: World) -> None:
    """A wait or lease of centuries is shortened to the server's limit instead of being refused."""
    long = Duration(seconds=10**11)
    request = cache_pb2.LookupRequest(keys=pack_keys(KEYS), lease_duration=long, wait=long)
    found: Any = call("Lookup", lambda _: request)(world)
    assert found.prefix_hits == len(KEYS)
    call("ReleaseLease", lambda _: {"lease_ids": [found.lease_id]})(world)


def test_a_cancelled_lookup_leaves_no_lease(world: World) -> None:
    """The caller disconnects while the server waits for blocks."""
    world.store(world.theirs)
    request = cache_pb2.LookupRequest(session=world.mine.ref, keys=pack_keys(FRESH), wait=seconds(20))
    with pytest.raises(grpc.RpcError) as refusal:
        world.mine.cache.Lookup(request, timeout=0.2)
    assert refusal_of(refusal.value) == ("DEADLINE_EXCEEDED", None)
    world.server.wait_for(lambda status: status.leases == 0)
