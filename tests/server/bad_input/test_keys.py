"""Malformed, too many, unknown and repeated keys."""

from __future__ import annotations

from typing import Any

import pytest
from harness.misbehaving import FRESH, INVALID, INVALID_KEY, KEYS, TOO_LARGE, TOO_MANY, World, call, refuse, seconds
from harness.payloads import key_of
from harness.server_process import MIB

from kvtier.client import StoreStatus, make_key
from kvtier.client.results import DurableStatus, KeyStatus
from kvtier.protos.v1 import cache_pb2, common_pb2

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
        pytest.param([b"abcd"], INVALID_KEY, id="only a group"),
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
    refuse(world, call(method, lambda _: WITH_KEYS[method](keys=keys)), expected)


WITH_PACKED_KEYS = [method for method in WITH_KEYS if method != "Flush"]
KEY_BYTES = len(KEYS[0])


@pytest.mark.parametrize("method", WITH_PACKED_KEYS)
@pytest.mark.parametrize(
    ("keys", "key_bytes", "unpacked", "expected"),
    [
        pytest.param(b"five5", 0, [], INVALID_KEY, id="of no length"),
        pytest.param(b"abcd" * 3, 4, [], INVALID_KEY, id="only groups"),
        pytest.param(b"k" * 81, 81, [], INVALID_KEY, id="too long"),
        pytest.param(b"".join(KEYS)[:-1], KEY_BYTES, [], INVALID_KEY, id="cut off"),
        pytest.param(b"".join(KEYS), 2**32 - 1, [], INVALID_KEY, id="longer than all of them"),
        pytest.param(b"".join([*KEYS, make_key(KEYS[0][:-4], 2)]), KEY_BYTES, [], INVALID_KEY, id="no such group"),
        pytest.param(b"five5" * 65_537, 5, [], TOO_MANY, id="one too many"),
        pytest.param(b"five5" * 1_000_000, 5, [], TOO_MANY, id="a million"),
        pytest.param(b"".join(KEYS), KEY_BYTES, KEYS[:1], INVALID, id="both ways"),
    ],
)
def test_bad_packed_keys_are_refused(
    world: World, method: str, keys: bytes, key_bytes: int, unpacked: list[bytes], expected: tuple[str, str | None]
) -> None:
    """Packed keys are checked as strictly as unpacked ones."""
    packed = common_pb2.PackedKeys(keys=keys, key_bytes=key_bytes)
    refuse(world, call(method, lambda _: WITH_KEYS[method](packed_keys=packed, keys=unpacked)), expected)


def test_packed_keys_act_like_unpacked_keys(world: World) -> None:
    """The server finds, grants and repeats packed keys like unpacked ones."""
    asked = [*KEYS, key_of(7, salt="unknown"), *KEYS[:3]]
    packed = common_pb2.PackedKeys(keys=b"".join(asked), key_bytes=KEY_BYTES)
    answers: list[Any] = [
        call("Lookup", lambda _, fields=fields: cache_pb2.LookupRequest(mode=cache_pb2.LOOKUP_MODE_EACH, **fields))(
            world
        )
        for fields in ({"keys": asked}, {"packed_keys": packed})
    ]
    for found in answers:
        assert list(found.statuses) == [KeyStatus.HIT] * 32 + [KeyStatus.MISS] + [KeyStatus.HIT] * 3
        call("ReleaseLease", lambda _, id_=found.lease_id: cache_pb2.ReleaseLeaseRequest(lease_ids=[id_]))(world)
    packed = common_pb2.PackedKeys(keys=KEYS[0] + FRESH[0], key_bytes=KEY_BYTES)
    granted: Any = call("PrepareStore", lambda _: cache_pb2.PrepareStoreRequest(packed_keys=packed))(world)
    assert list(granted.statuses) == [StoreStatus.PRESENT, StoreStatus.GRANTED]
    call("CompleteStore", lambda _: cache_pb2.CompleteStoreRequest(store_id=granted.store_id, abort=True))(world)


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
        found: Any = call("Lookup", lambda _, mode=mode: cache_pb2.LookupRequest(keys=unknown, mode=mode))(world)
        assert (set(found.statuses), found.prefix_hits, found.lease_id) == ({KeyStatus.MISS}, 0, 0)
    flushed: Any = call("Flush", lambda _: cache_pb2.FlushRequest(keys=unknown, wait=seconds(5)))(world)
    assert set(flushed.statuses) == {DurableStatus.VOLATILE}


def test_refused_messages_are_freed_at_once(world: World) -> None:
    """Refused messages and their unpacked keys are freed without a garbage collection."""
    refused = call("Lookup", lambda _: cache_pb2.LookupRequest(keys=[b"five5"] * 1_000_000))
    refuse(world, refused, TOO_MANY)
    before = world.server.own_bytes()
    for _ in range(8):
        refuse(world, refused, TOO_MANY)
    assert world.server.own_bytes() < before + 48 * MIB


def test_a_repeated_key_has_one_lease_and_one_slot(world: World) -> None:
    """A repeated key is answered each time it occurs."""
    found: Any = call("Lookup", lambda _: cache_pb2.LookupRequest(keys=KEYS[:1] * 5000))(world)
    assert found.prefix_hits == 5000
    call("ReleaseLease", lambda _: cache_pb2.ReleaseLeaseRequest(lease_ids=[found.lease_id] * 5000))(world)
    granted: Any = call("PrepareStore", lambda _: cache_pb2.PrepareStoreRequest(keys=FRESH[:1] * 5000))(world)
    assert list(granted.statuses) == [StoreStatus.GRANTED] + [StoreStatus.IN_PROGRESS] * 4999
    call("CompleteStore", lambda _: cache_pb2.CompleteStoreRequest(store_id=granted.store_id, abort=True))(world)
