"""Streams that continue after the end of their lease or store, while their slots get other blocks.

An attacker does not read its Pull, so that the server is in the middle of many frames when the
lease ends. The victim then fills the region with its mark. No byte of it may reach the attacker.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import ssl
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import grpc
import numpy as np
import pytest
from google.protobuf.duration_pb2 import Duration
from harness.auth_site import Site, make_site
from harness.bulk import ROUTES, Route, data_frame, kill_bulk, prepare, pull_call, push_call, serving, tls_route
from harness.payloads import assert_serves, key_of, namespace_of, payload
from harness.polling import wait_until
from harness.raw import RawSession, RawSocket, hello_of
from harness.server_process import MIB

from kvtier.client import Client, Credentials, StoreStatus
from kvtier.protos.v1 import cache_pb2, transfer_pb2
from kvtier.protos.wire import socket_frames as frames
from kvtier.protos.wire.packed_keys import pack_keys

PART = 1 * MIB
REGION = 32 * MIB
CONFIG = "[leases]\npart = 1.0"
"""The victim may use each free slot."""
COUNT = 8
STREAMS = 8
TIMEOUT = 60.0
MARK = b"\xabvictim's secret"
SECRET = np.frombuffer(MARK * (PART // len(MARK)), np.uint8)
SALTS = itertools.count()
FREED_SECONDS = 20.0
"""The slots of an ended lease must be free by then. A stream that is only slow ends after 30 s."""
ATTACKER = namespace_of(PART, tenant="acme", model="attack")


@dataclass
class Place:
    """A server, and the ways of attacker and victim to it."""

    route: Route
    reader: Credentials
    victim: Credentials
    site: Site | None

    def client(self) -> Client:
        namespace = namespace_of(PART, tenant="zeta", model="victim")
        return Client(self.route.endpoint, namespace=namespace, transport="tcp", credentials=self.victim)

    def fill(self) -> list[bytes]:
        """Fills the whole region with the victim's mark; returns the keys."""
        keys = [key_of(number, salt=f"victim {next(SALTS)}") for number in range(self.slots)]
        with self.client() as client:

            def filled() -> bool:
                statuses = client.store(keys, [SECRET] * len(keys))
                return set(statuses) <= {StoreStatus.GRANTED, StoreStatus.PRESENT}

            wait_until(filled, FREED_SECONDS)
        return keys

    @property
    def slots(self) -> int:
        return int(self.route.server.status().tiers[0].available_bytes) // PART

    def store(self) -> list[bytes]:
        """Stores the attacker's own blocks."""
        keys = [key_of(number, salt=f"attack {next(SALTS)}") for number in range(COUNT)]
        with self.route.client(ATTACKER) as client:
            assert set(client.store(keys, [payload(key, PART) for key in keys])) == {StoreStatus.GRANTED}
        return keys

    def reader_session(self, credentials: Credentials | None = None) -> RawSession:
        return RawSession(self.route.endpoint, ATTACKER, engine_id="reader", credentials=credentials or self.reader)

    def stalled_pull(self, session: RawSession, lease_id: int, credentials: Credentials | None = None) -> RawSocket:
        """A stream whose client reads nothing after the first byte."""
        credentials = credentials or self.reader
        context = credentials.socket_context(frames.STREAMS_PROTOCOL) if self.route.name == "tls" else None
        hello = hello_of(session.ref, frames.Purpose.STREAMS, credentials.socket_token())
        connection = RawSocket(self.route.address(session), hello, context)
        assert connection.answer() == (0, b"")
        connection.send(pull_call(lease_id, range(COUNT)))
        assert connection.read(1)
        return connection


@pytest.fixture(scope="module", params=ROUTES)
def place(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Place]:
    directory = tmp_path_factory.mktemp("o")
    with contextlib.ExitStack() as stack:
        if request.param == "tls":
            site = make_site(directory, region=REGION, config=CONFIG, shared_memory=False)
            stack.enter_context(site.server.start())
            place = Place(tls_route(site), site.credentials("acme-reader"), site.credentials("zeta-engine"), site)
        else:
            route = stack.enter_context(serving(request.param, directory, region=REGION, config=CONFIG))
            place = Place(route, Credentials(), Credentials(), None)
        yield place
        assert place.route.server.alive
        assert '"call failed"' not in place.route.server.log, "a defect, answered with INTERNAL"


def lease_of(session: RawSession, keys: list[bytes], seconds: float = 600.0) -> int:
    duration = Duration(seconds=int(seconds), nanos=int(seconds % 1 * 1e9))
    request = cache_pb2.LookupRequest(
        session=session.ref, keys=pack_keys(keys), request_id="r", lease_duration=duration
    )
    found = session.cache.Lookup(request, timeout=TIMEOUT)
    assert found.prefix_hits == len(keys)
    return int(found.lease_id)


def rest_of(connection: RawSocket) -> bytes:
    """Reads until the connection ends, or all blocks have arrived."""
    data = bytearray()
    connection.socket.settimeout(TIMEOUT)
    with contextlib.suppress(ConnectionError, ssl.SSLError):
        while len(data) < COUNT * PART and (piece := connection.socket.recv(MIB)):
            data += piece
    return bytes(data)


def release(session: RawSession, lease_id: int) -> None:
    session.cache.ReleaseLease(cache_pb2.ReleaseLeaseRequest(session=session.ref, lease_ids=[lease_id]))


def complete(session: RawSession, lease_id: int) -> None:
    session.cache.CompleteLoad(cache_pb2.CompleteLoadRequest(session=session.ref, lease_id=lease_id, release=True))


def finish(session: RawSession, _: int) -> None:
    session.cache.FinishRequest(cache_pb2.FinishRequestRequest(session=session.ref, request_id="r"))


def end(session: RawSession, _: int) -> None:
    session.end()


ENDS: dict[str, tuple[float, Callable[[RawSession, int], None]]] = {
    "expiry": (0.5, lambda *_: None),
    "release": (600.0, release),
    "completed load": (600.0, complete),
    "finished request": (600.0, finish),
    "ended session": (600.0, end),
}


@pytest.mark.parametrize("how", ENDS)
def test_a_stalled_pull_shows_no_other_block(place: Place, how: str) -> None:
    """The end of the lease ends the stream; its slots are reused only when it has detached."""
    keys, (seconds, end_lease) = place.store(), ENDS[how]
    with contextlib.ExitStack() as stack:
        session = stack.enter_context(place.reader_session())
        lease_id = lease_of(session, keys, seconds)
        streams = [stack.enter_context(place.stalled_pull(session, lease_id)) for _ in range(STREAMS)]
        end_lease(session, lease_id)
        place.fill()
        received = [rest_of(stream) for stream in streams]
    assert [data.count(MARK) for data in received] == [0] * STREAMS
    assert max(map(len, received)) < COUNT * PART, "the streams were not in the middle of the blocks"
    place.route.server.wait_for(lambda status: not status.leases)


def test_a_stalled_pull_shows_no_block_after_a_reset(place: Place) -> None:
    """The lease continues, and so do its pins. They end with the connection of the stream."""
    keys = place.store()
    with contextlib.ExitStack() as stack:
        session = stack.enter_context(place.reader_session())
        stream = stack.enter_context(place.stalled_pull(session, lease_of(session, keys)))
        with place.route.client(ATTACKER) as client:
            client.reset()
        with place.client() as victim:
            others = [key_of(number, salt=f"victim {next(SALTS)}") for number in range(place.slots - COUNT)]
            victim.store(others, [SECRET] * len(others))
        session.end()
        place.fill()
        assert rest_of(stream).count(MARK) == 0


def test_the_stream_of_a_revoked_token_shows_no_other_block(place: Place) -> None:
    if place.site is None:
        pytest.skip("the server has no tokens")
    keys = place.store()
    place.site.tokens.add("acme-brief", "acme", "reader")
    brief = place.site.credentials("acme-brief")
    with contextlib.ExitStack() as stack:
        session = wait_until(lambda: _opened(place, brief))
        stack.enter_context(session)
        stream = stack.enter_context(place.stalled_pull(session, lease_of(session, keys), brief))
        place.site.tokens.remove("acme-brief")
        place.fill()
        data = rest_of(stream)
    assert data.count(MARK) == 0
    assert len(data) < COUNT * PART


def _opened(place: Place, credentials: Credentials) -> RawSession | None:
    """Returns a session once the server has read the token file."""
    try:
        return place.reader_session(credentials)
    except grpc.RpcError:
        return None


def test_an_unread_pull_over_grpc_shows_no_other_block(place: Place) -> None:
    keys = place.store()
    with place.reader_session() as session:
        lease_id = lease_of(session, keys)
        items = [*range(COUNT)] * 16  # more than gRPC keeps for a client that does not read
        request = transfer_pb2.PullRequest(session=session.ref, lease_id=lease_id, items=items)
        pulled = session.pull(request, timeout=TIMEOUT)
        data = [next(pulled)]
        release(session, lease_id)
        place.fill()
        with contextlib.suppress(grpc.RpcError):
            data += pulled
    assert b"".join(data).count(MARK) == 0


@pytest.mark.parametrize("number", [signal.SIGCONT, signal.SIGKILL])
def test_slots_stay_pinned_while_a_stopped_process_may_read_them(place: Place, number: int) -> None:
    """A stopped bulk process cannot detach. Its end, or its answer, frees the slots."""
    keys = place.store()
    with contextlib.ExitStack() as stack:
        session = stack.enter_context(place.reader_session())
        stream = stack.enter_context(place.stalled_pull(session, lease_of(session, keys)))
        pid = kill_bulk(place.route.server, signal.SIGSTOP)
        session.end()
        place.route.server.wait_for(lambda status: not status.leases)
        with _grpc_only(place) as victim:
            statuses = _statuses(victim, place.slots)
            assert statuses.count(StoreStatus.GRANTED) == place.slots - COUNT
            os.kill(pid, number)
            wait_until(lambda: StoreStatus.NO_ROOM not in _statuses(victim, place.slots))
        assert rest_of(stream).count(MARK) == 0
    if number == signal.SIGKILL:
        wait_until(place.store)


@contextlib.contextmanager
def _grpc_only(place: Place) -> Iterator[RawSession]:
    namespace = namespace_of(PART, tenant="zeta", model="slots")
    with RawSession(place.route.endpoint, namespace, engine_id="victim", credentials=place.victim) as session:
        yield session


def _statuses(session: RawSession, count: int) -> list[int]:
    """Asks for slots, and returns them; the statuses show how many slots can be used."""
    keys = [key_of(number, salt=f"slots {next(SALTS)}") for number in range(count)]
    answer = session.cache.PrepareStore(
        cache_pb2.PrepareStoreRequest(session=session.ref, keys=pack_keys(keys)), timeout=TIMEOUT
    )
    if answer.store_id:
        discard(session, answer.store_id, list(answer.statuses).count(StoreStatus.GRANTED))
    return list(answer.statuses)


def discard(session: RawSession, store_id: int, blocks: int = COUNT) -> None:
    request = cache_pb2.CompleteStoreRequest(session=session.ref, store_id=store_id, failed_items=range(blocks))
    session.cache.CompleteStore(request, timeout=TIMEOUT)


def _stored(client: Client, keys: list[bytes]) -> bool:
    """Stores blocks, whose slots may not be free yet; returns whether all are stored."""
    statuses = client.store(keys, [payload(key, PART) for key in keys])
    return set(statuses) <= {StoreStatus.GRANTED, StoreStatus.PRESENT}


@pytest.mark.parametrize("end_store", [discard, end])
def test_a_stalled_push_changes_no_other_block(place: Place, end_store: Callable[[RawSession, int], None]) -> None:
    """The rest of a frame arrives when the slots already belong to the victim."""
    with contextlib.ExitStack() as stack:
        session = stack.enter_context(place.route.session(ATTACKER, "writer"))
        keys = [key_of(number, salt=f"push {next(SALTS)}") for number in range(COUNT)]
        store_id = prepare(session, keys)
        frame = data_frame(b"\xee" * PART, 0, 0 if place.route.name == "tls" else None)
        streams = [stack.enter_context(place.route.open(session)) for _ in range(2)]
        for stream in streams:
            stream.send(push_call(store_id), frame[: PART // 2])
        end_store(session, store_id)
        victim_keys = [key_of(number, salt=f"victim {next(SALTS)}") for number in range(place.slots)]
        with place.client() as victim:
            wait_until(lambda: _stored(victim, victim_keys))
            for stream in streams:
                with contextlib.suppress(OSError):
                    stream.send(frame[PART // 2 :] * 4)
            assert_serves(victim, victim_keys, step=4)
