"""Invalid pushes and pulls, and streams that stop in the middle."""

from __future__ import annotations

import contextlib
import struct
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
import xxhash
from harness.bulk import bulk_pid, data_frame, locate, pull_call, push_call
from harness.misbehaving import (
    DAMAGED,
    FRESH,
    INVALID,
    KEYS,
    NO_LEASE,
    NO_STORE,
    NOT_OWNER,
    PART,
    STALE,
    TIMEOUT,
    TOO_LARGE,
    WRONG_SIZE,
    World,
    call,
)
from harness.payloads import assert_serves, key_of, payload
from harness.polling import wait_until
from harness.push_frames import encode_push_frame
from harness.raw import RawSession, RawSocket, hello_of, refusal_of
from harness.server_process import MIB

from kvtier.client.results import KeyStatus
from kvtier.protos.error_reasons import STATUS_OF
from kvtier.protos.v1 import cache_pb2, transfer_pb2
from kvtier.protos.wire.packed_keys import pack_keys
from kvtier.protos.wire.socket_frames import DATA_HEAD_BYTES, PUSH, Purpose, pack_call, pack_data_head, unpack_data_head

Outcome = tuple[str, str | None] | None
"""Status and reason of a refused stream."""
TOTAL = PART * len(FRESH)


def message_of(world: World, store_id: int, data: bytes, offset: int = 0, checksum: int | None = None) -> bytes:
    checksum = xxhash.xxh3_64_intdigest(data) if checksum is None else checksum
    return encode_push_frame(offset, checksum, [data], session=world.mine.ref, store_id=store_id)


def outcome_of(run: Callable[[], object]) -> Outcome:
    try:
        run()
    except grpc.RpcError as error:
        return refusal_of(error)
    return None


def open_streams(world: World, session: RawSession | None = None) -> RawSocket:
    """Returns a connection for streams that the server has accepted."""
    wait_until(lambda: locate(world.mine).unix_suffix)
    connection = RawSocket(f"{world.server.path}.shm", hello_of((session or world.mine).ref, Purpose.STREAMS))
    assert connection.answer() == (0, b"")
    return connection


def over_socket(world: World, *pieces: bytes, session: RawSession | None = None) -> Outcome:
    """Sends bytes over a new connection for streams; returns how the call in them is refused."""
    with open_streams(world, session) as connection:
        with contextlib.suppress(ConnectionError):  # the server may close it early
            connection.send(*pieces)
        return connection.refusal()


SERVICES = {
    "grpc": SimpleNamespace(
        push=lambda w, *push: outcome_of(lambda: w.push([message_of(w, *push)])),
        pull=lambda w, session, lease_id, items: outcome_of(lambda: w.pull(session, lease_id, items)),
    ),
    "socket": SimpleNamespace(
        push=lambda w, store_id, *frame: over_socket(w, push_call(store_id), data_frame(*frame)),
        pull=lambda w, session, *pull: over_socket(w, pull_call(*pull), session=session),
    ),
}


@pytest.fixture(params=SERVICES)
def service(request: pytest.FixtureRequest) -> SimpleNamespace:
    """Returns the service of the server or of its bulk process; both refuse alike."""
    return SERVICES[request.param]


PUSHES: dict[str, tuple[Callable[[World], tuple[Any, ...]], Outcome]] = {
    "unknown store": (lambda _: (4711, b"x"), NO_STORE),
    "another client's store": (lambda w: (w.store(w.theirs), b"x"), NOT_OWNER),
    "bytes beyond the end": (lambda w: (w.store(), bytes(100), TOTAL - 99), WRONG_SIZE),
    "bytes far beyond the end": (lambda w: (w.store(), b"x", 2**64 - 1), WRONG_SIZE),
    "more than the blocks take": (lambda w: (w.store(), bytes(TOTAL + 1)), WRONG_SIZE),
    "damaged in transit": (lambda w: (w.store(), bytes(100), 0, 1), DAMAGED),
}


@pytest.mark.parametrize("case", PUSHES)
def test_bad_pushes_are_refused(world: World, service: SimpleNamespace, case: str) -> None:
    """Push accepts only whole frames that fit slots of the caller's own store."""
    make, expected = PUSHES[case]
    assert service.push(world, *make(world)) == expected


MESSAGES: dict[str, tuple[Callable[[World], list[bytes]], Outcome]] = {
    "frame beyond the limit": (lambda w: [message_of(w, w.store(), bytes(20 * MIB))], TOO_LARGE),
    "garbage": (lambda _: [b"\xff" * 100], INVALID),
    "garbage after a good frame": (lambda w: [message_of(w, w.store(), bytes(100)), b"\x00garbage"], INVALID),
    "payload cut short": (lambda w: [message_of(w, w.store(), bytes(100))[:-1]], INVALID),
    "nothing at all": (lambda _: [], INVALID),
    "an empty frame": (lambda _: [b""], STALE),
}


@pytest.mark.parametrize("case", MESSAGES)
def test_bad_messages_of_a_push_are_refused(world: World, case: str) -> None:
    make, expected = MESSAGES[case]
    assert outcome_of(lambda: world.push(make(world))) == expected


FRAMES: dict[str, tuple[Callable[[World], list[bytes]], Outcome]] = {
    "longer than the store": (lambda w: [push_call(w.store()), pack_data_head(1, 0, 2**31, 0)], WRONG_SIZE),
    "damaged head": (lambda w: [push_call(w.store()), b"\x40", data_frame(bytes(100))[1:]], DAMAGED),
    "a call between frames": (lambda w: [push_call(w.store()), push_call(1, number=2), bytes(100)], DAMAGED),
    "no message": (lambda _: [pack_call(1, PUSH, b"\xff" * 9)], INVALID),
    "no store": (lambda _: [pack_call(1, PUSH, b"")], NO_STORE),
    "no such method": (lambda _: [pack_call(1, b"CacheService/Lookup", b"")], ("UNIMPLEMENTED", None)),
}


@pytest.mark.parametrize("case", FRAMES)
def test_bad_frames_of_a_push_are_refused(world: World, case: str) -> None:
    make, expected = FRAMES[case]
    assert over_socket(world, *make(world)) == expected


@pytest.mark.parametrize(
    "noise",
    [
        bytes(17),
        b"GET / HTTP/1.1\r\n\r\n",
        *(struct.pack("<IBQ", length, kind, 1) + b"\7" for length, kind in ((2**32 - 1, 1), (1, 2), (0, 4), (1, 1))),
    ],
)
def test_frames_that_are_no_call_end_the_connection(world: World, noise: bytes) -> None:
    """The process closes the connection and continues."""
    pid = bulk_pid(world.server.pid)
    with open_streams(world) as connection:
        connection.send(noise)
        assert connection.is_ended()
    assert bulk_pid(world.server.pid) == pid is not None


def test_random_bytes_are_refused(world: World) -> None:
    """The answer has a reason, and the server continues."""
    whole = message_of(world, world.store(), bytes(64))
    for number in range(200):
        noise = payload(key_of(number, salt="noise"), 8).tobytes()
        position = number % len(whole)
        damaged = whole[:position] + noise + whole[position + number % 8 :]
        outcome = outcome_of(lambda damaged=damaged: world.push([damaged]))  # type: ignore[misc]
        assert outcome is None or outcome[0] == STATUS_OF[outcome[1] or ""].name != "INTERNAL"


def test_a_push_to_an_ended_store_is_refused(world: World) -> None:
    """The slots may already belong to another store. `server.bulk` has this test for sockets."""
    store_id = world.store()

    def messages() -> Iterator[bytes]:
        yield message_of(world, store_id, bytes(100))
        wait_until(lambda: locate(world.mine, store_id).received_bytes)
        end = cache_pb2.CompleteStoreRequest(session=world.mine.ref, store_id=store_id, failed_items=range(len(FRESH)))
        world.mine.cache.CompleteStore(end, timeout=TIMEOUT)
        yield encode_push_frame(100, xxhash.xxh3_64_intdigest(b"late"), [b"late"])

    assert outcome_of(lambda: world.mine.push(messages(), timeout=TIMEOUT)) == NO_STORE


def test_a_session_has_a_limited_number_of_grpc_streams(world: World) -> None:
    """A further Push or Pull is refused. Its place is free when another stream has ended."""
    store_id, lease_id, end = world.store(), world.lease(), threading.Event()

    def frames(number: int) -> Iterator[bytes]:
        yield message_of(world, store_id, b"x", number)
        end.wait(TIMEOUT)

    def pull() -> Outcome:
        return outcome_of(lambda: world.pull(world.mine, lease_id, [0]))

    def begun(number: int) -> grpc.Future | None:
        """Begins a Push; None if a stream of an earlier test keeps its place."""
        push = world.mine.push.future(frames(number), timeout=TIMEOUT)
        wait_until(lambda: push.done() or locate(world.mine, store_id).received_bytes > number)
        return None if push.done() else push

    pushes = [wait_until(lambda number=number: begun(number)) for number in range(64)]  # type: ignore[misc]
    try:
        too_many = "RESOURCE_EXHAUSTED", "LIMIT_EXCEEDED"
        assert outcome_of(lambda: world.push([message_of(world, store_id, b"x")])) == too_many
        assert pull() == too_many
        assert outcome_of(lambda: world.pull(world.theirs, 4711, [0])) == NO_LEASE, "another session has its own"
        pushes.pop().cancel()
        wait_until(lambda: pull() is None)
    finally:
        end.set()
    assert [push.result().received_bytes for push in pushes] == [1] * 63


@pytest.mark.parametrize("service", SERVICES)
def test_a_cancelled_push_leaves_no_block(world: World, service: str) -> None:
    """The store can still be ended (B4.5)."""
    store_id, cancelled = world.store(), threading.Event()

    def messages() -> Iterator[bytes]:
        yield message_of(world, store_id, bytes(100))
        cancelled.wait(60)

    if service == "grpc":
        sent = world.mine.push.future(messages(), timeout=TIMEOUT)
        wait_until(lambda: locate(world.mine, store_id).received_bytes)
        sent.cancel()
        cancelled.set()
    else:
        with open_streams(world) as connection:
            connection.send(push_call(store_id), data_frame(bytes(100)))
    found: Any = call("Lookup", lambda _: cache_pb2.LookupRequest(keys=pack_keys(FRESH)))(world)
    assert KeyStatus.HIT not in found.statuses
    call("ReleaseLease", lambda _: cache_pb2.ReleaseLeaseRequest(lease_ids=[found.lease_id]))(world)


PULLS: dict[str, tuple[Callable[[World], tuple[Any, ...]], Outcome]] = {
    "unknown lease": (lambda w: (w.mine, 4711, [0]), NO_LEASE),
    "another client's lease": (lambda w: (w.mine, w.lease(w.theirs), [0]), NOT_OWNER),
    "unknown item": (lambda w: (w.mine, w.lease(), [0, 32]), INVALID),
    "item far out": (lambda w: (w.mine, w.lease(), [2**32 - 1]), INVALID),
    "more items than keys in a call": (lambda w: (w.mine, w.lease(), [0] * 1_000_000), INVALID),
    "a miss": (lambda w: (w.mine, w.lease(keys=[*KEYS, *FRESH]), [33]), INVALID),
}


@pytest.mark.parametrize("case", PULLS)
def test_bad_pulls_are_refused(world: World, service: SimpleNamespace, case: str) -> None:
    """Pull sends only ready items of a lease of the caller's own engine."""
    make, expected = PULLS[case]
    assert service.pull(world, *make(world)) == expected


def test_an_unread_pull_does_not_delay_other_streams(world: World) -> None:
    items = [*range(32)] * 200
    request = transfer_pb2.PullRequest(session=world.mine.ref, lease_id=world.lease(), items=items)
    stream = world.mine.pull(request, timeout=TIMEOUT)
    first = transfer_pb2.PullResponse.FromString(next(stream))
    assert xxhash.xxh3_64_intdigest(first.payload) == first.xxh3_64
    with open_streams(world) as connection:
        connection.send(pull_call(world.lease(), items))
        head = unpack_data_head(connection.read(DATA_HEAD_BYTES))
        assert xxhash.xxh3_64_intdigest(connection.read(head.nbytes)) == head.xxh3_64
        assert_serves(world.bystander, KEYS)
    stream.cancel()
