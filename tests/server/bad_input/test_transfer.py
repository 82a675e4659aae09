"""Invalid pushes and pulls, and streams that stop in the middle."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
import xxhash
from harness.bulk import bulk_streams
from harness.misbehaving import (
    DAMAGED,
    FRESH,
    INVALID,
    KEYS,
    NO_LEASE,
    NO_STORE,
    NOT_OWNER,
    NOT_READY,
    PART,
    STALE,
    TIMEOUT,
    TOO_LARGE,
    WRONG_SIZE,
    Call,
    World,
    call,
    refuse,
)
from harness.payloads import assert_serves, key_of, payload
from harness.push_frames import encode_push_frame
from harness.raw import refusal_of
from harness.server_process import MIB

from kvtier.client.results import KeyStatus
from kvtier.protos.error_reasons import STATUS_OF
from kvtier.protos.v1 import cache_pb2, transfer_pb2
from kvtier.protos.wire.grpc_frames import decode_pull_frame


def frames_of(world: World, store_id: int, payload_bytes: bytes, **changed: Any) -> list[bytes]:
    """Returns a stream with one frame for a store."""
    offset = changed.get("offset", 0)
    checksum = changed.get("checksum", xxhash.xxh3_64_intdigest(payload_bytes))
    return [encode_push_frame(offset, checksum, [payload_bytes], session=world.mine.ref, store_id=store_id)]


TOTAL = PART * len(FRESH)


@pytest.fixture(params=["server", "bulk"])
def streams(world: World, request: pytest.FixtureRequest) -> Iterator[World]:
    """Yields the world with streams to the server or to its bulk process; both refuse alike."""
    if request.param == "server":
        yield world
        return
    with bulk_streams(world.mine, world.server.endpoint):
        yield world


PUSH_CASES: dict[str, tuple[Call, tuple[str, str | None]]] = {
    "unknown store": (lambda w: w.push(frames_of(w, 4711, b"x")), NO_STORE),
    "another client's store": (lambda w: w.push(frames_of(w, w.store(w.theirs), b"x")), NOT_OWNER),
    "bytes beyond the end": (lambda w: w.push(frames_of(w, w.store(), bytes(100), offset=TOTAL - 99)), WRONG_SIZE),
    "bytes far beyond the end": (lambda w: w.push(frames_of(w, w.store(), b"x", offset=2**64 - 1)), WRONG_SIZE),
    "more than the blocks take": (lambda w: w.push(frames_of(w, w.store(), bytes(TOTAL + 1))), WRONG_SIZE),
    "damaged in transit": (lambda w: w.push(frames_of(w, w.store(), bytes(100), checksum=1)), DAMAGED),
    "frame beyond the limit": (lambda w: w.push(frames_of(w, w.store(), bytes(20 * MIB))), TOO_LARGE),
    "garbage": (lambda w: w.push([b"\xff" * 100]), INVALID),
    "garbage after a good frame": (lambda w: w.push([*frames_of(w, w.store(), bytes(100)), b"\x00garbage"]), INVALID),
    "payload cut short": (lambda w: w.push([frames_of(w, w.store(), bytes(100))[0][:-1]]), INVALID),
    "payload not last": (lambda w: w.push([frames_of(w, w.store(), bytes(100))[0] + b"\x18\x01"]), INVALID),
    "nothing at all": (lambda w: w.push([]), INVALID),
    "an empty frame": (lambda w: w.push([b""]), STALE),
}


@pytest.mark.parametrize("case", PUSH_CASES)
def test_bad_pushes_are_refused(streams: World, case: str) -> None:
    """Push accepts only whole frames that fit slots of the caller's own store."""
    refuse(streams, *PUSH_CASES[case])


def test_random_bytes_are_refused(streams: World) -> None:
    """The answer has a reason, and the server continues."""
    world = streams
    whole = frames_of(world, world.store(), bytes(64))[0]
    for number in range(200):
        noise = payload(key_of(number, salt="noise"), 8).tobytes()
        position = number % len(whole)
        damaged = whole[:position] + noise + whole[position + number % 8 :]
        try:
            world.push([damaged])
        except grpc.RpcError as error:
            status, reason = refusal_of(error)
            assert reason in STATUS_OF
            assert status == STATUS_OF[reason].name != "INTERNAL"


def test_a_push_to_an_ended_store_is_refused(streams: World) -> None:
    """The slots may already belong to another store."""
    world = streams
    store_id = world.store()
    first = frames_of(world, store_id, bytes(100))[0]

    def frames() -> Iterator[bytes]:
        yield first
        time.sleep(0.1)
        abort = cache_pb2.CompleteStoreRequest(session=world.mine.ref, store_id=store_id, abort=True)
        world.mine.cache.CompleteStore(abort, timeout=TIMEOUT)
        yield encode_push_frame(100, xxhash.xxh3_64_intdigest(b"late"), [b"late"])

    refuse(world, lambda w: w.mine.push(frames(), timeout=TIMEOUT), NO_STORE)


def test_a_cancelled_push_leaves_no_block(streams: World) -> None:
    """The store can still be aborted (B4.5)."""
    world = streams
    store_id = world.store()

    def frames() -> Iterator[bytes]:
        yield frames_of(world, store_id, bytes(100))[0]
        time.sleep(5)

    sent = world.mine.push.future(frames(), timeout=TIMEOUT)
    time.sleep(0.1)
    sent.cancel()
    found: Any = call("Lookup", lambda _: cache_pb2.LookupRequest(keys=FRESH))(world)
    assert KeyStatus.HIT not in found.statuses
    call("ReleaseLease", lambda _: cache_pb2.ReleaseLeaseRequest(lease_ids=[found.lease_id]))(world)


PULL_CASES: dict[str, tuple[Call, tuple[str, str | None]]] = {
    "unknown lease": (lambda w: w.pull(w.mine, 4711, [0]), NO_LEASE),
    "another client's lease": (lambda w: w.pull(w.mine, w.lease(w.theirs), [0]), NOT_OWNER),
    "unknown item": (lambda w: w.pull(w.mine, w.lease(), [0, 32]), INVALID),
    "item far out": (lambda w: w.pull(w.mine, w.lease(), [2**32 - 1]), INVALID),
    "more items than keys in a call": (lambda w: w.pull(w.mine, w.lease(), [0] * 4_000_000), INVALID),
    "a miss": (lambda w: w.pull(w.mine, w.lease(keys=[*KEYS, *FRESH]), [33]), NOT_READY),
}


@pytest.mark.parametrize("case", PULL_CASES)
def test_bad_pulls_are_refused(streams: World, case: str) -> None:
    """Pull sends only ready items of a lease of the caller's own engine."""
    refuse(streams, *PULL_CASES[case])


def test_an_unread_pull_does_not_delay_other_streams(streams: World) -> None:
    world = streams
    request = transfer_pb2.PullRequest(session=world.mine.ref, lease_id=world.lease(), items=[*range(32)] * 200)
    stream = world.mine.pull(request, timeout=TIMEOUT)
    fields, first = decode_pull_frame(next(stream))
    assert xxhash.xxh3_64_intdigest(first) == fields.xxh3_64
    assert_serves(world.bystander, KEYS)
    stream.cancel()
