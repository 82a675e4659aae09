"""Attacks on the publisher of events: by peers without credentials, and by other tenants."""

from __future__ import annotations

import contextlib
import itertools
import resource
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest
import zmq
from harness.auth_site import TIMEOUTS, Site, make_site
from harness.indexer import hash_of
from harness.payloads import key_of, namespace_of, payload
from harness.polling import wait_until
from harness.ports import ReservedPort
from harness.raw import RawSession, refusal_of
from harness.server_process import MIB, own_bytes
from harness.zmtp_peer import GREETING, RawPeer, command, frame, ready, subscription

from kvtier.client import Client, EngineAddress, Group, Namespace
from kvtier.client.events import BlockContent, describe_blocks
from kvtier.protos.v1 import events_pb2, events_pb2_grpc

PART = 512
BUFFER = 2 * MIB
MAX_READERS = 64
MAX_NEW = 64
OTHER_DESCRIPTORS = 32
MESSAGE_BYTES = 64 << 10
"""More than a message of 256 blocks without token ids."""
SLACK = 16 * MIB
"""What a process may grow by for other reasons: connections, and memory that malloc keeps."""
KEYS = [key_of(number) for number in range(3000)]
_numbers = itertools.count(1)


class Events:
    """The server with the addresses of its publisher."""

    def __init__(self, site: Site, publish: int, replay: int) -> None:
        self.site = site
        self.server = site.server
        self.publish, self.replay = f"127.0.0.1:{publish}", f"127.0.0.1:{replay}"

    @property
    def child(self) -> int:
        """Process that serves the readers."""
        for status in Path("/proc").glob("[0-9]*/status"):
            with contextlib.suppress(OSError):
                is_child = f"\nPPid:\t{self.server.pid}\n" in status.read_text()
                if is_child and b"events.readers" in status.with_name("cmdline").read_bytes():
                    return int(status.parent.name)
        raise AssertionError("the process for readers does not run")

    def sizes(self) -> dict[int, int]:
        return {pid: own_bytes(pid) for pid in (self.server.pid, self.child)}

    def engine(self, token: str, address: str = "", **more: Any) -> Client:
        published = EngineAddress(address, "model") if address else None
        return Client(
            self.server.tcp,
            namespace=namespace_of(PART, **more),
            credentials=self.site.credentials(token),
            timeouts=TIMEOUTS,
            published=published,
        )


@pytest.fixture(scope="module")
def events(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Events]:
    with ReservedPort() as publish, ReservedPort() as replay:
        config = (
            f'[events]\npublish = "tcp://127.0.0.1:{publish.number}"\nreplay = "tcp://127.0.0.1:{replay.number}"\n'
            f"insecure = true\nbuffer = {BUFFER}\nmax_readers = {MAX_READERS}\n"
        )
        made = make_site(tmp_path_factory.mktemp("t"), config=config, shared_memory=False)
        with made.server.start():
            yield Events(made, publish.number, replay.number)
            assert made.server.alive
            assert '"call failed"' not in made.server.log


@contextlib.contextmanager
def subscriber(address: str, topic: bytes = b"", **options: bytes) -> Iterator[Callable[[], list[bytes]]]:
    """An honest reader, made with libzmq; yields a function that receives a message."""
    with zmq.Context() as context, context.socket(zmq.SUB) as sub:
        sub.set(zmq.LINGER, 0)
        sub.set(zmq.RCVTIMEO, 60_000)
        for name, value in options.items():
            sub.setsockopt(getattr(zmq, name), value)
        monitor = sub.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        sub.subscribe(topic)
        sub.connect(f"tcp://{address}")
        assert monitor.poll(60_000), "no handshake"
        sub.disable_monitor()
        monitor.close()
        yield sub.recv_multipart


class Honest:
    """What one topic holds, as a reader learns it from messages and replays."""

    def __init__(self, topic: bytes) -> None:
        self._topic = topic
        self.known: set[tuple[str, int]] = set()

    def follow(self, receive: Callable[[], list[bytes]], condition: Callable[[], bool]) -> None:
        while not condition():
            topic, _, body = receive()
            if topic == self._topic:
                self.apply(body)

    def apply(self, body: bytes) -> None:
        for event in msgspec.msgpack.decode(body)[1]:
            names = {(event["medium"], each) for each in event["block_hashes"]}
            self.known = self.known | names if event["type"] == "BlockStored" else self.known - names


def names_of(keys: list[bytes]) -> set[tuple[str, int]]:
    return {("CPU", hash_of(key)) for key in keys}


def store(client: Client, keys: list[bytes]) -> None:
    client.store(keys, [payload(key, PART) for key in keys])


def wait_until_served(events: Events) -> str:
    """An honest reader gets the blocks of an honest engine. Returns the topic, which is new."""
    address = f"10.0.0.{next(_numbers)}:1"
    topic = f"kv@{address}@model"
    with subscriber(events.publish, topic.encode()) as receive, events.engine("zeta-engine", address) as client:
        store(client, KEYS[:20])
        honest = Honest(topic.encode())
        honest.follow(receive, lambda: names_of(KEYS[:20]) <= honest.known)
    return topic


def assert_bounded(events: Events, before: dict[int, int], extra: int = 0) -> None:
    for pid, size in events.sizes().items():
        limit = before[pid] + SLACK + (BUFFER + extra if pid == events.child else 0)
        assert size <= limit, f"{pid} grew from {before[pid] >> 20} to {size >> 20} MiB; limit {limit >> 20}"


@pytest.mark.parametrize("stage", ["greeting", "handshake", "message", "command"])
def test_a_peer_announces_2_gib(events: Events, stage: str) -> None:
    """The connection is closed before the bytes are received; the peer costs nothing."""
    before = events.sizes()
    huge = b"\x02" + (2 << 30).to_bytes(8, "big")
    for address, kind in ((events.publish, b"SUB"), (events.replay, b"DEALER")):
        peers = [RawPeer(address) for _ in range(8)]
        for peer in peers:
            if stage != "greeting":
                peer.socket.sendall(GREETING)
            if stage in ("message", "command"):
                peer.socket.sendall(ready(kind))
            head = huge if stage == "message" else b"\x06" + huge[1:]
            peer.flood(head + bytes(64 << 10), 16)
        for peer in peers:
            wait_until(peer.has_been_closed)
            peer.close()
    assert_bounded(events, before)


def test_1500_idle_connections(events: Events) -> None:
    """They use no descriptor of the server, and a bounded number of its child process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
    before, descriptors = events.sizes(), events.server.descriptors()
    child = Path(f"/proc/{events.child}/fd")
    with contextlib.ExitStack() as open_peers:
        open_peers.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        for number in range(1500):
            peer = RawPeer(events.publish if number % 2 else events.replay)
            open_peers.callback(peer.close)
            if number % 3 == 1:
                peer.socket.sendall(GREETING[:11])
            elif number % 3 == 2:
                with contextlib.suppress(ConnectionError):
                    peer.shake_hands(b"SUB" if number % 2 else b"REQ")
        assert len(list(child.iterdir())) <= OTHER_DESCRIPTORS + MAX_NEW + 2 * MAX_READERS
        assert events.server.descriptors() <= descriptors + 8
        wait_until_served(events)
        with events.engine("any-engine", tenant="late") as client:
            store(client, KEYS[:3])
    assert_bounded(events, before)


def test_half_handshakes_end(events: Events) -> None:
    """Within seconds, without any further connection."""
    peers = [RawPeer(address) for address in (events.publish, events.replay) for _ in range(8)]
    for number, peer in enumerate(peers):
        peer.socket.sendall((GREETING + ready(b"SUB"))[: number * 6])
    for peer in peers[:10]:  # of the others, the greeting may be complete
        wait_until(peer.has_been_closed)
    for peer in peers:
        peer.close()


@pytest.mark.parametrize(
    "flood",
    [
        [subscription(b"%09d" % number) for number in range(100_000)],
        [subscription(bytes([number & 255]) * 2000) for number in range(10_000)],
        [command(b"SUBSCRIBE", b"%09d" % number) for number in range(100_000)],
        [command(b"PING", b"\0\0" + b"x" * 16)] * 100_000,
        [subscription(b"a") + frame(b"\0a")] * 100_000,
        [frame(b"", flags=1)] * 100_000,
    ],
    ids=["short", "long", "commands", "pings", "in turns", "frames of one message"],
)
def test_a_flood_of_small_frames(events: Events, flood: list[bytes]) -> None:
    """Ends the connection that sends it; an honest reader is served."""
    before = events.sizes()
    peers = [RawPeer(events.publish) for _ in range(8)]
    for peer in peers:
        peer.shake_hands(b"SUB")
        peer.flood(b"".join(flood), 1)
    for peer in peers:
        wait_until(peer.has_been_closed)
        peer.close()
    assert_bounded(events, before)
    wait_until_served(events)


def test_readers_that_do_not_read(events: Events) -> None:
    """Much more is published than the buffer has room for; the memory comes back."""
    half = MAX_READERS // 2 - 2
    before = events.sizes()
    with contextlib.ExitStack() as open_peers:
        for _ in range(half):
            for address, first in (
                (events.publish, ready(b"SUB") + subscription(b"")),
                (events.replay, ready(b"DEALER") + (frame(b"", flags=1) + frame(bytes(8))) * 100),
            ):
                peer = RawPeer(address, receive_buffer=4096)
                open_peers.callback(peer.close)
                peer.socket.sendall(GREETING + first)
        with events.engine("zeta-engine") as client:
            for start in range(0, len(KEYS), 500):
                store(client, KEYS[start : start + 500])
            for number in range(12):
                topic = f"kv@10.0.1.{number}:1@model".encode()
                with subscriber(events.publish, topic) as receive:
                    honest = Honest(topic)
                    with events.engine("zeta-engine", f"10.0.1.{number}:1"):
                        honest.follow(receive, lambda: names_of(KEYS) <= honest.known)  # noqa: B023
                    honest.follow(receive, lambda: not honest.known)  # noqa: B023
        assert_bounded(events, before, 2 * half * MESSAGE_BYTES)
    wait_until(lambda: len(list(Path(f"/proc/{events.child}/fd").iterdir())) < OTHER_DESCRIPTORS)
    assert_bounded(events, before)


def test_replays_are_repeated_in_turns(events: Events) -> None:
    """Readers that request everything again and again do not delay the replay of another one."""
    with contextlib.ExitStack() as opened:
        for _ in range(16):
            peer = RawPeer(events.replay, receive_buffer=4096)
            opened.callback(peer.close)
            peer.shake_hands(b"DEALER")
            peer.flood((frame(b"", flags=1) + frame(bytes(8))) * 1000, 1)
        topic = wait_until_served(events).encode()
        context = opened.enter_context(zmq.Context())
        dealer = opened.enter_context(context.socket(zmq.DEALER))
        dealer.set(zmq.LINGER, 0)
        dealer.connect(f"tcp://{events.replay}")
        dealer.send_multipart([b"", bytes(8)])
        honest = Honest(topic)
        while dealer.poll(60_000):
            _, name, sequence, body = dealer.recv_multipart()
            if sequence == b"\xff" * 8:
                break
            if name == topic:
                honest.apply(body)
        else:
            pytest.fail("the replay has no end")


def test_a_reader_that_leaves_while_messages_are_sent(events: Events) -> None:
    """Connections that are reset at any time leave nothing behind."""
    with events.engine("zeta-engine", "10.0.0.4:1") as client:
        for number in range(100):
            peer = RawPeer(events.publish)
            peer.socket.sendall(GREETING + ready(b"SUB") + subscription(b""))
            if number % 2:
                peer.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            store(client, [KEYS[number]])
            peer.close()
    wait_until(lambda: len(list(Path(f"/proc/{events.child}/fd").iterdir())) < OTHER_DESCRIPTORS)


def messages(receive: Callable[[], list[bytes]]) -> Iterator[tuple[bytes, str, set[tuple[str, int]]]]:
    while True:
        topic, _, body = receive()
        for event in msgspec.msgpack.decode(body)[1]:
            yield topic, event["type"], {(event["medium"], each) for each in event["block_hashes"]}


@pytest.mark.parametrize(
    "form", ["{}", "{}@x", " {}", "HOST-{}"], ids=["the same", "with a model", "space", "capitals"]
)
def test_an_address_of_another_tenant(events: Events, form: str) -> None:
    """The other tenant's blocks are published on its own topic, and never on that of the engine."""
    address = f"10.9.1.{next(_numbers)}:1"
    claimed = form.format(address)
    address = claimed.lower() if claimed.startswith("HOST") else address
    own, foreign = KEYS[100:110], [key_of(number, salt="acme") for number in range(10)]
    with subscriber(events.publish) as receive, events.engine("zeta-engine", address) as victim:
        store(victim, own)
        following = messages(receive)
        topic = f"kv@{address}@model".encode()
        known: set[tuple[str, int]] = set()

        def read_until(condition: Callable[[bytes, str, set[tuple[str, int]]], bool]) -> None:
            for name, kind, names in following:
                assert not (names & names_of(foreign) and name.startswith(b"kv@")), f"{name!r} has foreign blocks"
                if name == topic:
                    known.symmetric_difference_update(names)
                if condition(name, kind, names):
                    return

        read_until(lambda *_: names_of(own) <= known)
        with events.engine("acme-far", claimed) as attacker:
            store(attacker, foreign)
            read_until(lambda name, _, names: name == b"kvtier@acme" and bool(names & names_of(foreign)))
        read_until(lambda name, kind, _: name == b"kvtier@acme" and kind == "BlockRemoved")
        assert names_of(own) <= known, "the end of the attacker's session removes nothing"


def test_a_reader_declares_no_address(events: Events) -> None:
    """A client with the role `reader` can neither publish nor take an address from an engine."""
    with (
        subscriber(events.publish, b"kv@10.9.0.7:1@") as receive,
        events.engine("acme-reader", "10.9.0.7:1") as reader,
        events.engine("zeta-engine", "10.9.0.7:1") as engine,
    ):
        reader.wait_until_connected(60)
        store(engine, KEYS[300:310])
        following = messages(receive)
        seen: set[tuple[str, int]] = set()
        while not names_of(KEYS[300:310]) <= seen:
            seen |= next(following)[2]


def test_an_engine_that_restarts_keeps_its_address(events: Events) -> None:
    """Another tenant waits for the address, and does not get it between two sessions."""
    address = f"10.9.2.{next(_numbers)}:1"
    topic = f"kv@{address}@model".encode()
    own, foreign = KEYS[400:410], [key_of(number, salt="acme") for number in range(20, 30)]
    known: dict[bytes, set[tuple[str, int]]] = {topic: set(), b"kvtier@acme": set()}
    with subscriber(events.publish) as receive:
        following = messages(receive)

        def read_until(condition: Callable[[], bool]) -> None:
            while not condition():
                name, _, names = next(following)
                known.setdefault(name, set()).symmetric_difference_update(names)
                assert not known[topic] & names_of(foreign)

        with events.engine("zeta-engine", address) as engine:
            store(engine, own)
            read_until(lambda: names_of(own) <= known[topic])
        with events.engine("acme-far", address) as attacker:
            store(attacker, foreign)
            read_until(lambda: names_of(foreign) <= known[b"kvtier@acme"] and not known[topic])
            with events.engine("zeta-engine", address) as engine:
                engine.wait_until_connected(60)
                read_until(lambda: names_of(own) <= known[topic])


def test_streams_with_large_contents_that_are_not_read(events: Events) -> None:
    """A tenant describes blocks of 16,384 tokens, and opens as many streams as it may."""
    number, block_bytes, streams = 400, 64 << 10, 64
    namespace = Namespace("large", "uint8", (Group(PART, block_bytes // 4, "g"),), "bytes", "test", tenant="acme")
    keys = KEYS[:number]
    before = events.sizes()
    with contextlib.ExitStack() as opened:
        client = opened.enter_context(
            Client(
                events.server.tcp,
                namespace=namespace,
                credentials=events.site.credentials("acme-far"),
                timeouts=TIMEOUTS,
            )
        )
        client.wait_until_connected(60)
        for start in range(0, number, 50):
            part = keys[start : start + 50]
            assert describe_blocks(client, part, [BlockContent(None, bytes(block_bytes))] * len(part))
        store(client, keys)

        def watch(session: RawSession, timeout: float) -> Any:
            request = events_pb2.WatchEventsRequest(session=session.ref, with_contents=True)
            stream = events_pb2_grpc.EventServiceStub(session.channel).WatchEvents(request, timeout=timeout)
            opened.callback(stream.cancel)
            return stream

        def is_refused() -> bool:
            with pytest.raises(grpc.RpcError) as error:
                for _ in watch(session, 1.0):
                    pass
            if error.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                return False  # not all of the other streams have arrived
            return refusal_of(error.value) == ("RESOURCE_EXHAUSTED", "LIMIT_EXCEEDED")

        for session_number in range(streams // 4 + 1):
            session = opened.enter_context(
                RawSession(
                    events.server.tcp,
                    namespace,
                    engine_id=f"{session_number}",
                    credentials=events.site.credentials("acme-far"),
                )
            )
            if session_number < streams // 4:
                for _ in range(4):
                    watch(session, 3600.0)
        wait_until(is_refused)
        with RawSession(
            events.server.tcp,
            namespace_of(PART),
            engine_id="z",
            credentials=events.site.credentials("zeta-engine"),
        ) as other:
            request = events_pb2.WatchEventsRequest(session=other.ref)
            assert next(events_pb2_grpc.EventServiceStub(other.channel).WatchEvents(request, timeout=60)).phase
        grown = events.server.own_bytes() - before[events.server.pid]
        assert grown < number * block_bytes + streams * 4 * MIB + 2 * SLACK


def test_a_tenant_declares_many_addresses(events: Events) -> None:
    """A tenant has a limited number of topics; the engine of another one is published."""
    with contextlib.ExitStack() as opened:
        clients = [opened.enter_context(events.engine("acme-far", f"10.8.0.{number}:1")) for number in range(80)]
        store(clients[0], KEYS[600:700])
        for client in clients:
            client.wait_until_connected(60)
        wait_until_served(events)
        topics = set()
        deadline = time.monotonic() + 10
        with subscriber(events.publish, b"kv@10.8.0.") as receive:
            store(clients[0], KEYS[700:710])
            while len(topics) < 64 and time.monotonic() < deadline:
                topics.add(receive()[0])
        assert len(topics) == 64
