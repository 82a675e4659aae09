"""EventService: replay, live events, resuming, tenants and restarts, against real servers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from harness.auth_site import Tokens
from harness.payloads import key_of, namespace_of, payload
from harness.raw import RawSession, refusal_of
from harness.server_process import ServerProcess

from kvtier.client import Client, Credentials, Namespace
from kvtier.client.events import BlockFollower
from kvtier.protos.v1 import events_pb2, events_pb2_grpc

PART = 64 << 10
NAMESPACE = namespace_of(PART)
KEYS = [key_of(number) for number in range(40)]

Known = set[tuple[str, bytes]]


class Watcher:
    """A session with a stream of events, and what the events have told so far."""

    def __init__(self, session: RawSession, after: Any = None, *, all_namespaces: bool = False) -> None:
        self._stub = events_pb2_grpc.EventServiceStub(session.channel)
        request = events_pb2.WatchEventsRequest(session=session.ref, after=after, all_namespaces=all_namespaces)
        self.stream = self._stub.WatchEvents(request, timeout=60)
        self._follower = BlockFollower()
        self.known: Known = set()
        self.replays = 0
        self.cursor: Any = None

    def read(self) -> events_pb2.WatchEventsResponse:
        response = next(self.stream)
        self.replays += response.phase == events_pb2.REPLAY_PHASE_BEGIN
        for change in self._follower.apply(response):
            names = {(change.medium, key) for key in change.keys}
            assert len(names) == len(change.keys)
            assert not names & self.known if change.stored else names <= self.known
            self.known = self.known | names if change.stored else self.known - names
        self.cursor = response.cursor if response.HasField("cursor") else self.cursor
        return response

    def read_until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self.read()

    def read_replay(self) -> None:
        self.read_until(lambda: self.replays > 0 and self.cursor is not None)

    def close(self) -> None:
        self.stream.cancel()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("e")).start() as server:
        yield server


@pytest.fixture
def namespace(request: pytest.FixtureRequest) -> Namespace:
    return namespace_of(PART, model=request.node.name)


@pytest.fixture
def client(server: ServerProcess, namespace: Namespace) -> Iterator[Client]:
    with Client(server.endpoint, namespace=namespace) as client:
        client.wait_until_connected(60)
        yield client


@pytest.fixture
def reader(server: ServerProcess, namespace: Namespace) -> Iterator[RawSession]:
    with RawSession(server.endpoint, namespace, engine_id="reader") as session:
        yield session


def store(client: Client, keys: list[bytes]) -> None:
    client.store(keys, [payload(key, PART) for key in keys])


def on(medium: str, keys: list[bytes]) -> Known:
    return {(medium, key) for key in keys}


def test_a_reader_gets_what_is_held_and_then_each_change(client: Client, reader: RawSession) -> None:
    """B6.1 B6.2 A replay of all tiers comes first, then each stored and cleared event."""
    store(client, KEYS[:10])
    client.flush(KEYS[:10])
    watcher = Watcher(reader)
    watcher.read_replay()
    assert watcher.known == on("CPU", KEYS[:10]) | on("STORAGE", KEYS[:10])
    store(client, KEYS[10:])
    client.flush(KEYS[10:])
    watcher.read_until(lambda: watcher.known == on("CPU", KEYS) | on("STORAGE", KEYS))
    client.reset(wait=30)
    watcher.read_until(lambda: watcher.known == on("STORAGE", KEYS))
    client.load(KEYS[:1], [bytearray(PART)], wait=30)
    watcher.read_until(lambda: watcher.known == on("STORAGE", KEYS) | on("CPU", KEYS[:1]))
    assert watcher.replays == 1


def test_a_reader_resumes_after_a_break_without_a_replay(client: Client, reader: RawSession) -> None:
    """B6.3 Events of the break are kept; a cursor of no earlier event leads to a replay."""
    first = Watcher(reader)
    first.read_replay()
    cursor = first.cursor
    first.close()
    store(client, KEYS)
    resumed = Watcher(reader, cursor)
    resumed.read_until(lambda: on("CPU", KEYS) <= resumed.known)
    assert resumed.replays == 0
    unknown = (
        events_pb2.EventCursor(epoch=cursor.epoch, sequence=cursor.sequence + 10_000),
        events_pb2.EventCursor(epoch=cursor.epoch + 1, sequence=cursor.sequence),
    )
    for wrong in unknown:
        again = Watcher(reader, wrong)
        again.read_replay()
        assert again.known >= on("CPU", KEYS)
        again.close()


def test_after_a_restart_the_blocks_on_disk_are_replayed(tmp_path: Path) -> None:
    """B6.3 The cursor of another epoch leads to a replay, which has only what the disk kept."""
    with ServerProcess(tmp_path).start() as server:
        with (
            Client(server.endpoint, namespace=NAMESPACE) as client,
            RawSession(server.endpoint, NAMESPACE, engine_id="reader") as session,
        ):
            store(client, KEYS)
            client.flush(KEYS)
            watcher = Watcher(session)
            watcher.read_replay()
            watcher.read_until(lambda: watcher.known == on("CPU", KEYS) | on("STORAGE", KEYS))
        server.kill()
        server.start()
        with RawSession(server.endpoint, NAMESPACE, engine_id="reader") as session:
            later = Watcher(session, watcher.cursor)
            later.read_replay()
            assert later.known == on("STORAGE", KEYS)
            assert later.cursor.epoch != watcher.cursor.epoch


def test_other_namespaces_only_on_request(server: ServerProcess, client: Client, reader: RawSession) -> None:
    """B6.4 `all_namespaces` adds the other namespaces of the tenant, and no blocks of others."""
    other = namespace_of(PART, model="other")
    stranger = namespace_of(PART, model="other", tenant="stranger")
    with Client(server.endpoint, namespace=other) as second, Client(server.endpoint, namespace=stranger) as third:
        own, everything = Watcher(reader), Watcher(reader, all_namespaces=True)
        own.read_replay()
        everything.read_replay()
        before = set(everything.known)
        store(third, KEYS[20:])
        store(second, KEYS[10:20])
        store(client, KEYS[:10])
        own.read_until(lambda: on("CPU", KEYS[:10]) <= own.known)
        everything.read_until(lambda: on("CPU", KEYS[:20]) <= everything.known)
        assert {key for _, key in own.known} <= set(KEYS[:10])
        assert not {key for _, key in everything.known - before} & set(KEYS[20:])


def test_a_session_has_a_limited_number_of_streams(reader: RawSession) -> None:
    """B6.5 A stream beyond the limit is refused, and a stream ends with its session."""
    watchers = [Watcher(reader) for _ in range(4)]
    for watcher in watchers:
        watcher.read_replay()
    with pytest.raises(grpc.RpcError) as refusal:
        Watcher(reader).read()
    assert refusal_of(refusal.value) == ("RESOURCE_EXHAUSTED", "LIMIT_EXCEEDED")
    reader.end()
    with pytest.raises(grpc.RpcError) as ended:
        watchers[0].read_until(lambda: False)
    assert refusal_of(ended.value) == ("UNAUTHENTICATED", "UNKNOWN_SESSION")


def test_a_tenant_cannot_read_through_the_session_of_another(tmp_path: Path) -> None:
    """B6.4 A token of one tenant gets no events of another."""
    tokens = Tokens(tmp_path / "tokens")
    tokens.add("a", "tenant-a", "reader", "engine")
    tokens.add("b", "tenant-b", "reader")
    config = f"[auth]\ntokens = {json.dumps(str(tokens.path))}\n"
    with ServerProcess(tmp_path, config=config, tcp=True).start() as server:
        sessions = {
            name: RawSession(
                server.tcp, NAMESPACE, engine_id=name, credentials=Credentials(token=tokens.token[name], insecure=True)
            )
            for name in ("a", "b")
        }
        with sessions["a"] as first, sessions["b"] as second:
            stub = events_pb2_grpc.EventServiceStub(second.channel)
            with pytest.raises(grpc.RpcError) as refusal:
                next(stub.WatchEvents(events_pb2.WatchEventsRequest(session=first.ref, all_namespaces=True)))
            assert refusal_of(refusal.value) == ("UNAUTHENTICATED", "UNKNOWN_SESSION")
