"""Bad input, a table per service: each call has its status and its stable reason, and nobody else notices."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
import xxhash
from google.protobuf.duration_pb2 import Duration
from harness.payloads import assert_serves, key_of, namespace_of, payload
from harness.raw import RawSession, attach_reply, refusal_of
from harness.server_process import MIB, ServerProcess

from kvtier.client import Client, StoreStatus, make_key
from kvtier.client.errors import ERROR_OF
from kvtier.client.results import DurableStatus, KeyStatus
from kvtier.protos.attach import REQUEST_BYTES, pack_request
from kvtier.protos.frames import decode_pull_frame, encode_push_frame
from kvtier.protos.reasons import STATUS_OF
from kvtier.protos.v1 import cache_pb2, common_pb2, errors_pb2, session_pb2, transfer_pb2
from kvtier.tiers import answers, base, leases
from kvtier.tiers.errors import CoreError

PART = 64 << 10
SMALL = 4 << 10
NAMESPACE = namespace_of(PART, SMALL)
TWO_RANKS = namespace_of(SMALL, world_size=2)
KEYS = [key_of(number) for number in range(32)]
FRESH = [key_of(number, salt="fresh") for number in range(8)]
GROWTH_BYTES = 128 * MIB
"""How much the server may have grown: some of these messages are as large as messages may be, and malloc keeps that."""
TIMEOUT = 20.0

INVALID = ("INVALID_ARGUMENT", "INVALID_ARGUMENT")
INVALID_KEY = ("INVALID_ARGUMENT", "INVALID_KEY")
TOO_MANY = ("INVALID_ARGUMENT", "TOO_MANY_KEYS")
BAD_NAMESPACE = ("INVALID_ARGUMENT", "INVALID_NAMESPACE")
WRONG_SIZE = ("INVALID_ARGUMENT", "WRONG_SIZE")
STALE = ("FAILED_PRECONDITION", "STALE_EPOCH")
UNKNOWN = ("UNAUTHENTICATED", "UNKNOWN_SESSION")
NO_LEASE = ("NOT_FOUND", "LEASE_NOT_FOUND")
NO_STORE = ("NOT_FOUND", "STORE_NOT_FOUND")
NOT_OWNER = ("PERMISSION_DENIED", "NOT_OWNER")
NOT_READY = ("FAILED_PRECONDITION", "NOT_READY")
DAMAGED = ("DATA_LOSS", "CHECKSUM_MISMATCH")
TOO_LARGE = ("RESOURCE_EXHAUSTED", None)
"""What gRPC itself says of a message beyond the limit."""


@dataclass
class World:
    """A server, a client that minds its own business, and three raw sessions that do not."""

    server: ServerProcess
    bystander: Client
    mine: RawSession
    theirs: RawSession
    headless: RawSession
    """A scheduler: it has no rank, in a world of two."""
    own_bytes: int
    held: list[Callable[[], object]] = field(default_factory=list)
    """Gives back what a case was granted before it misbehaved."""

    def lease(self, session: RawSession | None = None, keys: list[bytes] = KEYS) -> int:
        """Returns a lease on blocks of the bystander's."""
        session = session or self.mine
        request = cache_pb2.LookupRequest(session=session.ref, keys=keys, mode=cache_pb2.LOOKUP_MODE_EACH)
        lease_id: int = session.cache.Lookup(request, timeout=TIMEOUT).lease_id
        assert lease_id
        release = cache_pb2.ReleaseLeaseRequest(session=session.ref, lease_ids=[lease_id])
        self.held.append(lambda: session.cache.ReleaseLease(release, timeout=TIMEOUT))
        return lease_id

    def store(self, session: RawSession | None = None, keys: list[bytes] = FRESH) -> int:
        """Returns a store of fresh blocks that is not complete."""
        session = session or self.mine
        request = cache_pb2.PrepareStoreRequest(session=session.ref, keys=keys)
        answer = session.cache.PrepareStore(request, timeout=TIMEOUT)
        assert set(answer.statuses) == {StoreStatus.GRANTED}
        abort = cache_pb2.CompleteStoreRequest(session=session.ref, store_id=answer.store_id, abort=True)
        self.held.append(lambda: session.cache.CompleteStore(abort, timeout=TIMEOUT))
        store_id: int = answer.store_id
        return store_id

    def push(self, frames: list[bytes], timeout: float = TIMEOUT) -> transfer_pb2.PushResponse:
        """Sends frames as they are."""
        answer: transfer_pb2.PushResponse = self.mine.push(iter(frames), timeout=timeout)
        return answer

    def pull(self, session: RawSession, lease_id: int, items: list[int]) -> list[bytes]:
        """Reads items of a lease."""
        request = transfer_pb2.PullRequest(session=session.ref, lease_id=lease_id, items=items)
        return list(session.pull(request, timeout=TIMEOUT))


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """One server for the whole table."""
    with (
        ServerProcess(tmp_path_factory.mktemp("bad")) as server,
        Client(server.start().endpoint, namespace=NAMESPACE, name="bystander") as bystander,
        RawSession(server.endpoint, NAMESPACE, engine_id="mine") as mine,
        RawSession(server.endpoint, NAMESPACE, engine_id="theirs") as theirs,
        RawSession(server.endpoint, TWO_RANKS, engine_id="headless") as headless,
    ):
        bystander.store(KEYS, [payload(key, PART) for key in KEYS])
        assert set(bystander.flush(KEYS)) == {DurableStatus.DURABLE}
        assert_serves(bystander, KEYS)
        yield World(server, bystander, mine, theirs, headless, server.own_bytes())
        # All of it still holds after the table as a whole, and in another life.
        server.restart()
        with Client(server.endpoint, namespace=NAMESPACE) as client:
            assert_serves(client, KEYS)


@pytest.fixture
def world(shared: World) -> Iterator[World]:
    """The shared server; whatever a case did, the bystander's blocks are served and nothing is left pinned."""
    yield shared
    while shared.held:
        with contextlib.suppress(grpc.RpcError):  # the case has ended it itself; what remains is counted below
            shared.held.pop()()
    assert shared.server.alive, shared.server.log[-3000:]
    assert_serves(shared.bystander, KEYS)
    status = shared.server.wait_for(lambda status: not status.leases and not status.stores, 5)
    assert status.quarantined_bytes == 0
    assert all(tier.healthy for tier in status.tiers)
    assert {session.engine_id for session in status.sessions} >= {"mine", "theirs", "headless"}
    assert shared.server.own_bytes() < shared.own_bytes + GROWTH_BYTES
    assert '"call failed"' not in shared.server.log, "a defect, answered with INTERNAL"


Call = Callable[[World], object]


def call(method: str, make: Callable[[World], Any]) -> Call:
    """Returns a call of a method of CacheService as session `mine`, if the request names no other."""

    def run(world: World) -> object:
        request = make(world)
        if not request.HasField("session"):
            request.session.CopyFrom(world.mine.ref)
        return getattr(world.mine.cache, method)(request, timeout=TIMEOUT)

    return run


def refuse(world: World, run: Call, expected: tuple[str, str | None]) -> None:
    """Makes a call, and fails unless it is refused like this."""
    with pytest.raises(grpc.RpcError) as refusal:
        run(world)
    assert refusal_of(refusal.value) == expected, refusal.value.details()


def seconds(number: float) -> Duration:
    """Returns a duration, negative ones as well."""
    duration = Duration()
    duration.FromNanoseconds(int(number * 1e9))
    return duration


WITH_SESSION: dict[str, Callable[[], Any]] = {
    "BeginRequest": lambda: cache_pb2.BeginRequestRequest(request_id="r", keys=KEYS),
    "Lookup": lambda: cache_pb2.LookupRequest(keys=KEYS),
    "PrepareLoad": lambda: cache_pb2.PrepareLoadRequest(lease_id=1),
    "CompleteLoad": lambda: cache_pb2.CompleteLoadRequest(lease_id=1),
    "ReleaseLease": lambda: cache_pb2.ReleaseLeaseRequest(lease_ids=[1]),
    "Touch": lambda: cache_pb2.TouchRequest(lease_ids=[1]),
    "PrepareStore": lambda: cache_pb2.PrepareStoreRequest(keys=FRESH),
    "CompleteStore": lambda: cache_pb2.CompleteStoreRequest(store_id=1),
    "Flush": lambda: cache_pb2.FlushRequest(keys=KEYS),
    "FinishRequest": lambda: cache_pb2.FinishRequestRequest(request_id="r"),
    "Reset": cache_pb2.ResetRequest,
}
WITH_KEYS = {
    "BeginRequest": lambda **fields: cache_pb2.BeginRequestRequest(request_id="r", **fields),
    "Lookup": cache_pb2.LookupRequest,
    "PrepareStore": cache_pb2.PrepareStoreRequest,
    "Flush": cache_pb2.FlushRequest,
}


def test_table_names_every_method_of_the_cache() -> None:
    """No RPC of CacheService is left out of the tables here."""
    assert set(WITH_SESSION) == {
        method.name for method in cache_pb2.DESCRIPTOR.services_by_name["CacheService"].methods
    }


@pytest.mark.parametrize("method", [*WITH_SESSION, "Push", "Pull"])
@pytest.mark.parametrize("which", ["unknown", "missing", "stale", "short", "long"])
def test_session_that_is_not_open(world: World, method: str, which: str) -> None:
    """A call in the name of an unknown session, or of an earlier life of the server, is refused by every method."""
    ref, good = common_pb2.SessionRef(), world.mine.ref
    if which != "missing":
        ids = {"unknown": bytes(16), "stale": good.session_id, "short": b"x", "long": bytes(1 << 16)}
        ref.session_id, ref.epoch = ids[which], good.epoch ^ (which == "stale")

    def run(world: World) -> object:
        if method == "Push":
            return world.push([encode_push_frame(0, 0, [b"x"], session=ref, store_id=1)])
        if method == "Pull":
            return list(world.mine.pull(transfer_pb2.PullRequest(session=ref, lease_id=1, items=[0]), timeout=TIMEOUT))
        request = WITH_SESSION[method]()
        request.session.CopyFrom(ref)
        request.session.SetInParent()
        return getattr(world.mine.cache, method)(request, timeout=TIMEOUT)

    refuse(world, run, STALE if which in ("stale", "missing") else UNKNOWN)


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
def test_keys(world: World, method: str, keys: list[bytes], expected: tuple[str, str | None]) -> None:
    """Malformed keys and too many of them are refused by every method that takes keys; nothing is granted."""
    refuse(world, call(method, lambda _: WITH_KEYS[method](keys=keys)), expected)


@pytest.mark.parametrize("method", WITH_KEYS)
def test_no_keys(world: World, method: str) -> None:
    """No keys at all are fine, and get no answers."""
    answer: Any = call(method, lambda _: WITH_KEYS[method]())(world)
    found = answer.lookup if method == "BeginRequest" else answer
    assert found.statuses == b""
    assert not getattr(found, "lease_id", 0)
    assert not getattr(found, "store_id", 0)


def test_unknown_keys(world: World) -> None:
    """Keys that nobody stored are misses without a lease, and durable nowhere."""
    unknown = [key_of(number, salt="nobody") for number in range(1000)]
    for mode in (cache_pb2.LOOKUP_MODE_PREFIX, cache_pb2.LOOKUP_MODE_EACH):
        found: Any = call("Lookup", lambda _, mode=mode: cache_pb2.LookupRequest(keys=unknown, mode=mode))(world)
        assert (set(found.statuses), found.prefix_hits, found.lease_id) == ({KeyStatus.MISS}, 0, 0)
    flushed: Any = call("Flush", lambda _: cache_pb2.FlushRequest(keys=unknown, wait=seconds(5)))(world)
    assert set(flushed.statuses) == {DurableStatus.VOLATILE}


def test_refusals_do_not_add_up(world: World) -> None:
    """Refused messages, and what they made the server unpack, are let go at once, not when garbage is collected."""
    refused = call("Lookup", lambda _: cache_pb2.LookupRequest(keys=[b"five5"] * 1_000_000))
    refuse(world, refused, TOO_MANY)
    before = world.server.own_bytes()
    for _ in range(8):
        refuse(world, refused, TOO_MANY)
    assert world.server.own_bytes() < before + 48 * MIB


def test_same_key_again_and_again(world: World) -> None:
    """A key that stands in a call many times gets an answer each time, one lease and one slot."""
    found: Any = call("Lookup", lambda _: cache_pb2.LookupRequest(keys=KEYS[:1] * 5000))(world)
    assert found.prefix_hits == 5000
    call("ReleaseLease", lambda _: cache_pb2.ReleaseLeaseRequest(lease_ids=[found.lease_id] * 5000))(world)
    granted: Any = call("PrepareStore", lambda _: cache_pb2.PrepareStoreRequest(keys=FRESH[:1] * 5000))(world)
    assert list(granted.statuses) == [StoreStatus.GRANTED] + [StoreStatus.IN_PROGRESS] * 4999
    call("CompleteStore", lambda _: cache_pb2.CompleteStoreRequest(store_id=granted.store_id, abort=True))(world)


CACHE_CASES: dict[str, tuple[Call, tuple[str, str | None]]] = {
    "BeginRequest without id": (call("BeginRequest", lambda _: cache_pb2.BeginRequestRequest(keys=KEYS)), INVALID),
    "BeginRequest with a long id": (
        call("BeginRequest", lambda _: cache_pb2.BeginRequestRequest(request_id="r" * 600, keys=KEYS)),
        INVALID,
    ),
    "Lookup with a long id": (call("Lookup", lambda _: cache_pb2.LookupRequest(request_id="r" * 600)), INVALID),
    "Lookup with a negative lease": (
        call("Lookup", lambda _: cache_pb2.LookupRequest(keys=KEYS, lease_duration=seconds(-1))),
        INVALID,
    ),
    "Lookup with a negative wait": (
        call("Lookup", lambda _: cache_pb2.LookupRequest(keys=KEYS, wait=seconds(-0.001))),
        INVALID,
    ),
    "Lookup with a wait that contradicts itself": (
        call("Lookup", lambda _: cache_pb2.LookupRequest(keys=KEYS, wait=Duration(seconds=1, nanos=-(2**31)))),
        INVALID,
    ),
    "BeginRequest with a negative wait": (
        call("BeginRequest", lambda _: cache_pb2.BeginRequestRequest(request_id="r", keys=KEYS, wait=seconds(-1))),
        INVALID,
    ),
    "Touch with a negative lease": (
        call("Touch", lambda w: cache_pb2.TouchRequest(lease_ids=[w.lease()], lease_duration=seconds(-5))),
        INVALID,
    ),
    "Flush with a negative wait": (
        call("Flush", lambda _: cache_pb2.FlushRequest(keys=KEYS, wait=seconds(-1))),
        INVALID,
    ),
    "PrepareLoad of an unknown lease": (
        call("PrepareLoad", lambda _: cache_pb2.PrepareLoadRequest(lease_id=2**64 - 1, items=[0])),
        NO_LEASE,
    ),
    "PrepareLoad of someone else's": (
        call("PrepareLoad", lambda w: cache_pb2.PrepareLoadRequest(lease_id=w.lease(w.theirs), items=[0])),
        NOT_OWNER,
    ),
    "PrepareLoad of an item that there is not": (
        call("PrepareLoad", lambda w: cache_pb2.PrepareLoadRequest(lease_id=w.lease(), items=[0, 32])),
        INVALID,
    ),
    "PrepareLoad of an item far out": (
        call("PrepareLoad", lambda w: cache_pb2.PrepareLoadRequest(lease_id=w.lease(), items=[2**32 - 1])),
        INVALID,
    ),
    "PrepareLoad of more items than keys in a call": (
        call("PrepareLoad", lambda w: cache_pb2.PrepareLoadRequest(lease_id=w.lease(), items=[0] * 4_000_000)),
        INVALID,
    ),
    "PrepareLoad of a miss": (
        call("PrepareLoad", lambda w: cache_pb2.PrepareLoadRequest(lease_id=w.lease(keys=[*KEYS, *FRESH]), items=[33])),
        NOT_READY,
    ),
    "PrepareLoad of a block in the making": (
        lambda w: call(
            "PrepareLoad",
            lambda _: cache_pb2.PrepareLoadRequest(lease_id=(w.store(), w.lease(keys=FRESH))[1], items=[0]),
        )(w),
        NOT_READY,
    ),
    "CompleteLoad of an unknown lease": (
        call("CompleteLoad", lambda _: cache_pb2.CompleteLoadRequest(lease_id=4711)),
        NO_LEASE,
    ),
    "CompleteLoad of someone else's": (
        call("CompleteLoad", lambda w: cache_pb2.CompleteLoadRequest(lease_id=w.lease(w.theirs), release=True)),
        NOT_OWNER,
    ),
    "ReleaseLease of someone else's": (
        call("ReleaseLease", lambda w: cache_pb2.ReleaseLeaseRequest(lease_ids=[w.lease(w.theirs)])),
        NOT_OWNER,
    ),
    "ReleaseLease of too many": (
        call("ReleaseLease", lambda _: cache_pb2.ReleaseLeaseRequest(lease_ids=range(1_000_000))),
        INVALID,
    ),
    "Touch of someone else's": (
        call("Touch", lambda w: cache_pb2.TouchRequest(lease_ids=[w.lease(w.theirs)])),
        NOT_OWNER,
    ),
    "Touch of too many": (call("Touch", lambda _: cache_pb2.TouchRequest(lease_ids=range(1_000_000))), INVALID),
    "CompleteStore of an unknown store": (
        call("CompleteStore", lambda _: cache_pb2.CompleteStoreRequest(store_id=4711)),
        NO_STORE,
    ),
    "CompleteStore of someone else's": (
        call("CompleteStore", lambda w: cache_pb2.CompleteStoreRequest(store_id=w.store(w.theirs))),
        NOT_OWNER,
    ),
    "CompleteStore aborts someone else's": (
        call("CompleteStore", lambda w: cache_pb2.CompleteStoreRequest(store_id=w.store(w.theirs), abort=True)),
        NOT_OWNER,
    ),
    "CompleteStore with an item that there is not": (
        call("CompleteStore", lambda w: cache_pb2.CompleteStoreRequest(store_id=w.store(), failed_items=[0, 8])),
        INVALID,
    ),
    "CompleteStore with an item far out": (
        call("CompleteStore", lambda w: cache_pb2.CompleteStoreRequest(store_id=w.store(), failed_items=[2**32 - 1])),
        INVALID,
    ),
    "FinishRequest with a long id": (
        call("FinishRequest", lambda _: cache_pb2.FinishRequestRequest(request_id="r" * 600)),
        INVALID,
    ),
    "PrepareStore with a long id": (
        call("PrepareStore", lambda _: cache_pb2.PrepareStoreRequest(request_id="r" * 600, keys=FRESH)),
        INVALID,
    ),
    **{
        f"BeginRequest with params {name}": (
            call(
                "BeginRequest",
                lambda _, text=text: cache_pb2.BeginRequestRequest(
                    request_id="r", keys=KEYS, kv_transfer_params_json=text
                ),
            ),
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
def test_cache(world: World, case: str) -> None:
    """CacheService refuses what is out of range, not there, or not the caller's."""
    refuse(world, *CACHE_CASES[case])


def as_headless(method: str, make: Callable[[World], Any]) -> Call:
    """Returns a call as the scheduler's session."""

    def run(world: World) -> object:
        request = make(world)
        request.session.CopyFrom(world.headless.ref)
        return getattr(world.headless.cache, method)(request, timeout=TIMEOUT)

    return run


def test_scheduler_has_no_slots(world: World) -> None:
    """A session without a rank, in a world of several, looks up; slots to read or write it is refused, and leaves no lease."""
    keys = [key_of(number, salt="two ranks") for number in range(4)]
    for rank in (0, 1):
        with RawSession(world.server.endpoint, TWO_RANKS, engine_id="workers", rank=rank) as worker:
            answer = worker.cache.PrepareStore(cache_pb2.PrepareStoreRequest(session=worker.ref, keys=keys))
            worker.cache.CompleteStore(cache_pb2.CompleteStoreRequest(session=worker.ref, store_id=answer.store_id))
    refuse(world, as_headless("PrepareStore", lambda _: cache_pb2.PrepareStoreRequest(keys=keys)), INVALID)
    refuse(world, as_headless("Lookup", lambda _: cache_pb2.LookupRequest(keys=keys, want_slots=True)), INVALID)
    assert world.server.status().leases == 0
    lease_id = world.lease(world.headless, keys)
    refuse(
        world, as_headless("PrepareLoad", lambda _: cache_pb2.PrepareLoadRequest(lease_id=lease_id, items=[0])), INVALID
    )
    refuse(world, lambda w: w.pull(w.headless, lease_id, [0]), INVALID)


def test_completing_twice(world: World) -> None:
    """The second completion of a store, or of a lease, finds nothing; what the first one did stands."""
    store_id, lease_id = world.store(), world.lease()
    store = call("CompleteStore", lambda _: cache_pb2.CompleteStoreRequest(store_id=store_id, abort=True))
    load = call("CompleteLoad", lambda _: cache_pb2.CompleteLoadRequest(lease_id=lease_id, release=True))
    for complete, second in ((store, NO_STORE), (load, NO_LEASE)):
        complete(world)
        refuse(world, complete, second)
    assert set(call("Lookup", lambda _: cache_pb2.LookupRequest(keys=FRESH))(world).statuses) == {KeyStatus.MISS}  # type: ignore[attr-defined]


def test_ends_of_leases_that_are_gone(world: World) -> None:
    """Releasing unknown leases is fine, touching them names them, and finishing an unknown request does nothing."""
    lease_id = world.lease()
    call("ReleaseLease", lambda _: cache_pb2.ReleaseLeaseRequest(lease_ids=[1, 2, 2**64 - 1]))(world)
    touched: Any = call("Touch", lambda _: cache_pb2.TouchRequest(lease_ids=[1, lease_id, 2]))(world)
    assert list(touched.missing_lease_ids) == [1, 2]
    call("FinishRequest", lambda _: cache_pb2.FinishRequestRequest(request_id="never begun"))(world)
    call("FinishRequest", lambda _: cache_pb2.FinishRequestRequest())(world)


def test_times_beyond_the_limits_are_cut(world: World) -> None:
    """A wait or lease of centuries is cut to the server's limit instead of being refused."""
    long = Duration(seconds=10**11)
    request = cache_pb2.LookupRequest(keys=KEYS, lease_duration=long, wait=long)
    found: Any = call("Lookup", lambda _: request)(world)
    assert found.prefix_hits == len(KEYS)
    call("ReleaseLease", lambda _: cache_pb2.ReleaseLeaseRequest(lease_ids=[found.lease_id]))(world)


def test_caller_that_does_not_wait_for_its_lease(world: World) -> None:
    """A lookup whose caller hangs up while the server waits for it leaves no lease behind."""
    world.store(world.theirs)
    request = cache_pb2.LookupRequest(session=world.mine.ref, keys=FRESH, wait=seconds(20))
    with pytest.raises(grpc.RpcError) as refusal:
        world.mine.cache.Lookup(request, timeout=0.2)
    assert refusal_of(refusal.value) == ("DEADLINE_EXCEEDED", None)
    world.server.wait_for(lambda status: status.leases == 0, 2)


def opening(world: World, **fields: Any) -> object:
    """Opens a session with a request that is sound but for these fields; hands back the first answer."""
    request = session_pb2.OpenRequest()
    request.CopyFrom(world.mine.request)
    namespace = fields.pop("namespace", {})
    groups = namespace.pop("groups", None)
    for name, value in namespace.items():
        setattr(request.namespace, name, value)
    if groups is not None:
        del request.namespace.groups[:]
        request.namespace.groups.extend(common_pb2.Group(part_bytes=nbytes) for nbytes in groups)
    for name, value in fields.items():
        setattr(request, name, value)
    stream = world.mine.sessions.Open(request, timeout=TIMEOUT)
    try:
        return next(stream)
    finally:
        stream.cancel()


OPEN_CASES: dict[str, tuple[dict[str, Any], tuple[str, str]]] = {
    "world of none": ({"namespace": {"world_size": 0}}, BAD_NAMESPACE),
    "world of too many": ({"namespace": {"world_size": 2**32 - 1}}, BAD_NAMESPACE),
    "no groups": ({"namespace": {"groups": []}}, BAD_NAMESPACE),
    "too many groups": ({"namespace": {"groups": [SMALL] * 100_000}}, BAD_NAMESPACE),
    "no bytes": ({"namespace": {"groups": [SMALL, 0]}}, BAD_NAMESPACE),
    "part beyond an extent": ({"namespace": {"groups": [(64 * MIB) // 32 + 1]}}, BAD_NAMESPACE),
    "part beyond everything": ({"namespace": {"groups": [2**64 - 1]}}, BAD_NAMESPACE),
    "rank outside": ({"rank": 1}, BAD_NAMESPACE),
    "rank far outside": ({"rank": 2**32 - 1}, BAD_NAMESPACE),
    "no engine": ({"engine_id": ""}, INVALID),
    "engine's name too long": ({"engine_id": "e" * 1_000_000}, INVALID),
    "client's name too long": ({"client_name": "c" * 1_000_000}, INVALID),
    "transport's name too long": ({"transport": "t" * 1_000_000}, INVALID),
    "model's name too long": ({"namespace": {"model": "m" * 1_000_000}}, BAD_NAMESPACE),
    "no version": ({"protocol_version": 0}, ("FAILED_PRECONDITION", "UNSUPPORTED_VERSION")),
    "version of the future": ({"protocol_version": 2}, ("FAILED_PRECONDITION", "UNSUPPORTED_VERSION")),
}


@pytest.mark.parametrize("case", OPEN_CASES)
def test_open(world: World, case: str) -> None:
    """A session is not opened for what contradicts itself or does not fit."""
    fields, expected = OPEN_CASES[case]
    before = len(world.server.status().sessions)
    refuse(world, lambda w: opening(w, **{name: _copied(value) for name, value in fields.items()}), expected)
    assert len(world.server.status().sessions) <= before  # those of earlier cases may still be on their way out


def _copied(value: Any) -> Any:
    return dict(value) if isinstance(value, dict) else value


def test_open_and_hang_up(world: World) -> None:
    """Sessions whose streams are dropped at once are gone at once."""
    for _ in range(50):
        opening(world)
    world.server.wait_for(lambda status: len(status.sessions) == 4, 5)


def frames_of(world: World, store_id: int, payload_bytes: bytes, **changed: Any) -> list[bytes]:
    """Returns one frame to a store."""
    offset = changed.get("offset", 0)
    checksum = changed.get("checksum", xxhash.xxh3_64_intdigest(payload_bytes))
    return [encode_push_frame(offset, checksum, [payload_bytes], session=world.mine.ref, store_id=store_id)]


TOTAL = PART * len(FRESH)

PUSH_CASES: dict[str, tuple[Call, tuple[str, str | None]]] = {
    "unknown store": (lambda w: w.push(frames_of(w, 4711, b"x")), NO_STORE),
    "someone else's store": (lambda w: w.push(frames_of(w, w.store(w.theirs), b"x")), NOT_OWNER),
    "bytes beyond the end": (lambda w: w.push(frames_of(w, w.store(), bytes(100), offset=TOTAL - 99)), WRONG_SIZE),
    "bytes far beyond the end": (lambda w: w.push(frames_of(w, w.store(), b"x", offset=2**64 - 1)), WRONG_SIZE),
    "more than the blocks take": (lambda w: w.push(frames_of(w, w.store(), bytes(TOTAL + 1))), WRONG_SIZE),
    "damaged on the way": (lambda w: w.push(frames_of(w, w.store(), bytes(100), checksum=1)), DAMAGED),
    "frame beyond the limit": (lambda w: w.push(frames_of(w, w.store(), bytes(20 * MIB))), TOO_LARGE),
    "garbage": (lambda w: w.push([b"\xff" * 100]), INVALID),
    "garbage after a good frame": (lambda w: w.push([*frames_of(w, w.store(), bytes(100)), b"\x00garbage"]), INVALID),
    "payload cut short": (lambda w: w.push([frames_of(w, w.store(), bytes(100))[0][:-1]]), INVALID),
    "payload not last": (lambda w: w.push([frames_of(w, w.store(), bytes(100))[0] + b"\x18\x01"]), INVALID),
    "nothing at all": (lambda w: w.push([]), INVALID),
    "an empty frame": (lambda w: w.push([b""]), STALE),
}


@pytest.mark.parametrize("case", PUSH_CASES)
def test_push(world: World, case: str) -> None:
    """Push takes only whole frames that fit slots of the caller's own store."""
    refuse(world, *PUSH_CASES[case])


def test_push_of_random_bytes(world: World) -> None:
    """Whatever bytes come as a frame, the answer has a reason and the server goes on."""
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


def test_push_to_a_store_that_ended_meanwhile(world: World) -> None:
    """A frame that comes after the store was ended is refused: its slots may be somebody else's by then."""
    store_id = world.store()
    first = frames_of(world, store_id, bytes(100))[0]

    def frames() -> Iterator[bytes]:
        yield first
        time.sleep(0.1)
        abort = cache_pb2.CompleteStoreRequest(session=world.mine.ref, store_id=store_id, abort=True)
        world.mine.cache.CompleteStore(abort, timeout=TIMEOUT)
        yield encode_push_frame(100, xxhash.xxh3_64_intdigest(b"late"), [b"late"])

    refuse(world, lambda w: w.mine.push(frames(), timeout=TIMEOUT), NO_STORE)


def test_push_that_stops_in_the_middle(world: World) -> None:
    """A stream that is cancelled in mid-store leaves a store that can still be aborted, and no block (B4.5)."""
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
    "someone else's lease": (lambda w: w.pull(w.mine, w.lease(w.theirs), [0]), NOT_OWNER),
    "item that there is not": (lambda w: w.pull(w.mine, w.lease(), [0, 32]), INVALID),
    "item far out": (lambda w: w.pull(w.mine, w.lease(), [2**32 - 1]), INVALID),
    "more items than keys in a call": (lambda w: w.pull(w.mine, w.lease(), [0] * 4_000_000), INVALID),
    "a miss": (lambda w: w.pull(w.mine, w.lease(keys=[*KEYS, *FRESH]), [33]), NOT_READY),
}


@pytest.mark.parametrize("case", PULL_CASES)
def test_pull(world: World, case: str) -> None:
    """Pull sends only ready items of a lease of the caller's own engine."""
    refuse(world, *PULL_CASES[case])


def test_pull_that_nobody_reads(world: World) -> None:
    """A reader that stops in the middle holds up nobody but itself."""
    request = transfer_pb2.PullRequest(session=world.mine.ref, lease_id=world.lease(), items=[*range(32)] * 200)
    stream = world.mine.pull(request, timeout=TIMEOUT)
    fields, first = decode_pull_frame(next(stream))
    assert xxhash.xxh3_64_intdigest(first) == fields.xxh3_64
    assert_serves(world.bystander, KEYS)
    stream.cancel()


@pytest.mark.parametrize("method", [*(f"CacheService/{name}" for name in WITH_SESSION), "TransferService/Pull"])
def test_bytes_that_are_no_message(world: World, method: str) -> None:
    """A message that protobuf cannot parse is refused."""
    for garbage in (b"\xff" * 64, b"\x0a\xff\xff\xff\xff\x0f", bytes(range(256))):
        kind = world.mine.channel.unary_stream if method.endswith("Pull") else world.mine.channel.unary_unary
        refuse(
            world, lambda _, kind=kind, text=garbage: list(kind(f"/kvtier.v1.{method}")(text, timeout=TIMEOUT)), INVALID
        )


def test_methods_that_there_are_not(world: World) -> None:
    """An unknown method or service is UNIMPLEMENTED."""
    for method in ("/kvtier.v1.CacheService/Nothing", "/kvtier.v2.CacheService/Lookup", "/nothing"):
        with pytest.raises(grpc.RpcError) as refusal:
            world.mine.channel.unary_unary(method, None, None)(b"", timeout=TIMEOUT)
        assert refusal.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_bytes_that_are_no_grpc(world: World) -> None:
    """Whoever talks something else to the socket, or nothing at all, is no trouble."""
    for text in (b"GET / HTTP/1.1\r\n\r\n", b"\x00" * 4096, b""):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.connect(str(world.server.path))
            connection.sendall(text)
            if text:
                connection.shutdown(socket.SHUT_WR)
                connection.settimeout(10)
                while connection.recv(4096):
                    pass


def attach_path(world: World) -> str:
    """Returns the socket that hands out the region."""
    path: str = world.mine.capabilities.region.attach_path
    return path


def test_attach_is_for_open_sessions_only(world: World) -> None:
    """The region's descriptor goes to sessions of this life, and to nobody else."""
    good = world.mine.ref
    assert attach_reply(attach_path(world), good) == 64 * MIB
    for session_id, epoch in ((bytes(16), good.epoch), (good.session_id, good.epoch ^ 1), (bytes(16), 0)):
        ref = common_pb2.SessionRef(session_id=session_id, epoch=epoch)
        assert attach_reply(attach_path(world), ref) is None


@pytest.mark.parametrize("sent", [b"", b"KVT1", b"\xff" * REQUEST_BYTES, b"KVT2" + bytes(24), b"x" * 100_000])
def test_attach_with_garbage(world: World, sent: bytes) -> None:
    """A connection that does not say what it should is closed, without a descriptor."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(10)
        connection.connect(attach_path(world))
        try:
            connection.sendall(sent)
            connection.shutdown(socket.SHUT_WR)
            data, descriptors, _, _ = socket.recv_fds(connection, 64, 1)
        except (BrokenPipeError, ConnectionResetError):
            return
        assert (data, descriptors) == (b"", [])


def test_attach_half_way(world: World) -> None:
    """Many connections that stop in mid-request hold up nobody, and end by themselves."""
    before = world.server.descriptors()
    connections = []
    for number in range(100):
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.connect(attach_path(world))
        connection.sendall(pack_request(world.mine.ref.session_id, world.mine.ref.epoch)[: number % REQUEST_BYTES])
        connections.append(connection)
    began = time.monotonic()
    assert attach_reply(attach_path(world), world.mine.ref) == 64 * MIB
    assert time.monotonic() - began < 2
    for connection in connections[50:]:
        connection.close()
    for connection in connections[:50]:
        connection.settimeout(10)
        assert connection.recv(1) == b""
        connection.close()
    assert world.server.descriptors() <= before + 2


def test_attached_client_that_talks_on(world: World) -> None:
    """What an attached client sends after its request is ignored; the end of the connection is what counts."""
    with contextlib.closing(world.mine.attach()) as attachment:
        attachment._connection.sendall(bytes(1 << 20))
        status = world.server.wait_for(lambda status: any(session.attached for session in status.sessions))
        assert sum(session.attached for session in status.sessions) == 2  # the bystander, and this one


def test_every_reason_has_its_status_and_its_exception() -> None:
    """The table of statuses and that of exceptions name each reason of the wire contract, and no other."""
    reasons = {
        name.removeprefix("ERROR_REASON_")
        for name, number in errors_pb2.ErrorReason.items()
        if number != errors_pb2.ERROR_REASON_UNSPECIFIED
    }
    assert set(STATUS_OF) == reasons
    assert set(ERROR_OF) == reasons
    refusals = [CoreError, *CoreError.__subclasses__()]
    assert {refusal.reason for refusal in refusals} <= reasons


@pytest.mark.parametrize(
    ("ours", "wire"),
    [
        (leases.KeyStatus, common_pb2.KeyStatus),
        (answers.StoreStatus, common_pb2.StoreStatus),
        (answers.DurableStatus, common_pb2.DurableStatus),
        (base.OffloadPolicy, cache_pb2.OffloadPolicy),
        (KeyStatus, common_pb2.KeyStatus),
        (StoreStatus, common_pb2.StoreStatus),
        (DurableStatus, common_pb2.DurableStatus),
    ],
)
def test_numbers_agree_with_the_wire(ours: Any, wire: Any) -> None:
    """The enums of core and client have the names and numbers of the wire contract."""
    prefixed = {name: number for name, number in wire.items() if number}
    length = len(next(iter(prefixed))) - len(
        max((m.name for m in ours if next(iter(prefixed)).endswith(m.name)), key=len)
    )
    assert {member.name: member.value for member in ours} == {name[length:]: n for name, n in prefixed.items()}
