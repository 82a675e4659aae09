"""Sessions that are unknown, that are refused, or that have no slots."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
from harness.misbehaving import (
    BAD_NAMESPACE,
    INVALID,
    SMALL,
    STALE,
    TIMEOUT,
    TWO_RANKS,
    UNKNOWN,
    WITH_SESSION,
    Call,
    World,
    refuse,
)
from harness.payloads import key_of
from harness.push_frames import encode_push_frame
from harness.raw import RawSession
from harness.server_process import MIB

from kvtier.protos.v1 import cache_pb2, common_pb2, handoff_pb2, session_pb2, transfer_pb2
from kvtier.protos.wire.packed_keys import pack_keys


def test_table_names_every_method_of_the_cache() -> None:
    """The tables here name every RPC of CacheService and HandoffService."""
    services = (
        cache_pb2.DESCRIPTOR.services_by_name["CacheService"],
        handoff_pb2.DESCRIPTOR.services_by_name["HandoffService"],
    )
    assert set(WITH_SESSION) == {method.name for service in services for method in service.methods}


@pytest.mark.parametrize("method", [*WITH_SESSION, "Push", "Pull"])
@pytest.mark.parametrize("which", ["unknown", "missing", "stale", "short", "long"])
def test_an_unknown_session_is_refused(world: World, method: str, which: str) -> None:
    """Every method refuses an unknown session, and a session of an earlier epoch of the server."""
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
        return world.mine.method(method)(request, timeout=TIMEOUT)

    refuse(world, run, STALE if which in ("stale", "missing") else UNKNOWN)


def as_scheduler(method: str, make: Callable[[World], Any]) -> Call:
    def run(world: World) -> object:
        request = make(world)
        request.session.CopyFrom(world.headless.ref)
        return getattr(world.headless.cache, method)(request, timeout=TIMEOUT)

    return run


def test_scheduler_has_no_slots(world: World) -> None:
    """A session without a rank may look up blocks. It reads no slots, and it stores no blocks."""
    keys = [key_of(number, salt="two ranks") for number in range(4)]
    for rank in (0, 1):
        with (
            RawSession(world.server.endpoint, TWO_RANKS, engine_id="workers", rank=rank) as worker,
            contextlib.closing(worker.attach()),
        ):
            answer = worker.cache.PrepareStore(cache_pb2.PrepareStoreRequest(session=worker.ref, keys=pack_keys(keys)))
            worker.cache.CompleteStore(cache_pb2.CompleteStoreRequest(session=worker.ref, store_id=answer.store_id))
    refuse(world, as_scheduler("PrepareStore", lambda _: cache_pb2.PrepareStoreRequest(keys=pack_keys(keys))), INVALID)
    lease_id = world.lease(world.headless, keys)
    refuse(
        world,
        as_scheduler("PrepareLoad", lambda _: cache_pb2.PrepareLoadRequest(lease_id=lease_id, items=[0])),
        INVALID,
    )
    refuse(world, lambda w: w.pull(w.headless, lease_id, [0]), INVALID)


def opening(world: World, **fields: Any) -> object:
    """Opens a session with these fields replaced; returns the first answer."""
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
    "version of the future": ({"protocol_version": 3}, ("FAILED_PRECONDITION", "UNSUPPORTED_VERSION")),
}


@pytest.mark.parametrize("case", OPEN_CASES)
def test_invalid_sessions_are_refused(world: World, case: str) -> None:
    """A request that contradicts itself or does not fit opens no session."""
    fields, expected = OPEN_CASES[case]
    before = len(world.server.status().sessions)
    refuse(world, lambda w: opening(w, **{name: _copied(value) for name, value in fields.items()}), expected)
    # sessions of earlier cases may still be closing
    assert len(world.server.status().sessions) <= before


def _copied(value: Any) -> Any:
    return dict(value) if isinstance(value, dict) else value


def test_sessions_end_with_their_streams(world: World) -> None:
    for _ in range(50):
        opening(world)
    world.server.wait_for(lambda status: len(status.sessions) == 4)
