"""Malformed, too many, unknown and repeated keys."""

from __future__ import annotations

from typing import Any

import pytest
from harness.misbehaving import FRESH, INVALID_KEY, KEYS, TOO_LARGE, TOO_MANY, World, call, refuse, seconds
from harness.payloads import key_of
from harness.server_process import MIB

from kvtier.client import StoreStatus, make_key
from kvtier.client.results import DurableStatus, KeyStatus
from kvtier.protos.v1 import cache_pb2, common_pb2
from kvtier.protos.wire.packed_keys import pack_keys

WITH_KEYS = {
    "BeginRequest": lambda **fields: cache_pb2.BeginRequestRequest(request_id="r", **fields),
    "Lookup": cache_pb2.LookupRequest,
    "PrepareStore": cache_pb2.PrepareStoreRequest,
    "Flush": cache_pb2.FlushRequest,
}


@pytest.mark.parametrize("method", WITH_KEYS)
@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        pytest.param([b""], INVALID_KEY, id="empty"),
        pytest.param([bytes(4)], INVALID_KEY, id="only a group"),
        pytest.param([*KEYS, b"k" * 81], INVALID_KEY, id="too long"),
        pytest.param([make_key(b"some hash", 2)], INVALID_KEY, id="no such group"),
        pytest.param([*KEYS[:3], make_key(b"some hash", 2**32 - 1)], INVALID_KEY, id="no such group, last"),
        pytest.param([b"five5"] * 65_537, TOO_MANY, id="one too many"),
        pytest.param([b"five5"] * 1_000_000, TOO_MANY, id="a million"),
        pytest.param([key_of(0)] * 1_000_000, TOO_LARGE, id="a million in 22 MB"),
    ],
)
def test_bad_keys_are_refused(world: World, method: str, keys: list[bytes], expected: tuple[str, str | None]) -> None:
    """Every method with keys refuses malformed keys and too many of them; it grants nothing."""
    refuse(world, call(method, lambda _: WITH_KEYS[method](keys=pack_keys(keys))), expected)


KEY_BYTES = len(KEYS[0])
LENGTHS = bytes([KEY_BYTES, 0]) * len(KEYS)


@pytest.mark.parametrize("method", WITH_KEYS)
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        pytest.param({"keys": b"five5"}, INVALID_KEY, id="of no length"),
        pytest.param({"keys": b"".join(KEYS)[:-1], "key_bytes": KEY_BYTES}, INVALID_KEY, id="cut off"),
        pytest.param({"keys": b"".join(KEYS), "key_bytes": 2**32 - 1}, INVALID_KEY, id="longer than all of them"),
        pytest.param({"keys": b"".join(KEYS), "key_bytes": KEY_BYTES, "lengths": LENGTHS}, INVALID_KEY, id="both ways"),
        pytest.param({"keys": b"".join(KEYS), "lengths": LENGTHS[:-1]}, INVALID_KEY, id="half a length"),
        pytest.param({"keys": b"".join(KEYS), "lengths": LENGTHS[:-2]}, INVALID_KEY, id="one length too few"),
        pytest.param({"lengths": bytes(2 * 65_537)}, TOO_MANY, id="lengths of no bytes"),
    ],
)
def test_malformed_keys_are_refused(
    world: World, method: str, fields: dict[str, Any], expected: tuple[str, str | None]
) -> None:
    """The bytes and the lengths of the keys must fit together."""
    packed = common_pb2.PackedKeys(**fields)
    refuse(world, call(method, lambda _: WITH_KEYS[method](keys=packed)), expected)


def test_keys_may_have_different_lengths(world: World) -> None:
    """The server finds, grants and repeats keys of other lengths like those of one length."""
    asked = [*KEYS, make_key(b"another length", 0), *KEYS[:3]]
    found: Any = call(
        "Lookup", lambda _: cache_pb2.LookupRequest(mode=cache_pb2.LOOKUP_MODE_EACH, keys=pack_keys(asked))
    )(world)
    assert list(found.statuses) == [KeyStatus.HIT] * 32 + [KeyStatus.MISS] + [KeyStatus.HIT] * 3
    call("ReleaseLease", lambda _: cache_pb2.ReleaseLeaseRequest(lease_ids=[found.lease_id]))(world)
    new = [KEYS[0], make_key(b"another length", 0)]
    granted: Any = call("PrepareStore", lambda _: cache_pb2.PrepareStoreRequest(keys=pack_keys(new)))(world)
    assert list(granted.statuses) == [StoreStatus.PRESENT, StoreStatus.GRANTED]
    call("CompleteStore", lambda _: cache_pb2.CompleteStoreRequest(store_id=granted.store_id, failed_items=[0]))(world)


@pytest.mark.parametrize("method", WITH_KEYS)
def test_an_empty_key_list_is_valid(world: World, method: str) -> None:
    answer: Any = call(method, lambda _: WITH_KEYS[method]())(world)
    found = answer.lookup if method == "BeginRequest" else answer
    assert found.statuses == b""
    assert not getattr(found, "lease_id", 0)
    assert not getattr(found, "store_id", 0)


def test_unknown_keys_are_misses(world: World) -> None:
    """They get no lease and are durable in no tier."""
    unknown = [key_of(number, salt="unknown") for number in range(1000)]
    for mode in (cache_pb2.LOOKUP_MODE_PREFIX, cache_pb2.LOOKUP_MODE_EACH):
        found: Any = call("Lookup", lambda _, mode=mode: cache_pb2.LookupRequest(keys=pack_keys(unknown), mode=mode))(
            world
        )
        assert (set(found.statuses), found.prefix_hits, found.lease_id) == ({KeyStatus.MISS}, 0, 0)
    flushed: Any = call("Flush", lambda _: cache_pb2.FlushRequest(keys=pack_keys(unknown), wait=seconds(5)))(world)
    assert set(flushed.statuses) == {DurableStatus.VOLATILE}


def test_refused_messages_are_freed_at_once(world: World) -> None:
    """Refused messages and their unpacked keys are freed without a garbage collection."""
    refused = call("Lookup", lambda _: cache_pb2.LookupRequest(keys=pack_keys([b"five5"] * 1_000_000)))
    refuse(world, refused, TOO_MANY)
    before = world.server.own_bytes()
    for _ in range(8):
        refuse(world, refused, TOO_MANY)
    assert world.server.own_bytes() < before + 48 * MIB


def test_a_repeated_key_has_one_lease_and_one_slot(world: World) -> None:
    """A repeated key is answered each time it occurs."""
    found: Any = call("Lookup", lambda _: cache_pb2.LookupRequest(keys=pack_keys(KEYS[:1] * 5000)))(world)
    assert found.prefix_hits == 5000
    call("ReleaseLease", lambda _: cache_pb2.ReleaseLeaseRequest(lease_ids=[found.lease_id] * 5000))(world)
    granted: Any = call("PrepareStore", lambda _: cache_pb2.PrepareStoreRequest(keys=pack_keys(FRESH[:1] * 5000)))(
        world
    )
    assert list(granted.statuses) == [StoreStatus.GRANTED] + [StoreStatus.IN_PROGRESS] * 4999
    call("CompleteStore", lambda _: cache_pb2.CompleteStoreRequest(store_id=granted.store_id, failed_items=[0]))(world)
