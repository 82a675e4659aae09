"""Server of readers in this process: how many there may be, and what each costs."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import zmq
from harness.indexer import Indexer, engine, publishing
from harness.payloads import filled, key_of, namespace_of, payload
from harness.polling import async_wait_until, wait_until
from harness.zmtp_peer import GREETING, RawPeer, frame, ready, subscription

from kvtier.client import Client
from kvtier.server.events import reader_connection
from kvtier.server.events.reader_connection import ReaderConnection, ReplayConnection, SubscriberConnection
from kvtier.server.events.readers import ReaderServer
from kvtier.server.events.recent_messages import Message, RecentMessages

SCOPE = b"s" * 16
SUBSCRIBES = GREETING + ready(b"SUB") + subscription(b"")
REQUEST = frame(b"", flags=1) + frame(bytes(8))
REQUESTS = GREETING + ready(b"DEALER") + REQUEST


class Site:
    def __init__(self, server: ReaderServer, kind: type[ReaderConnection], family: int, where: str) -> None:
        self.server, self.kind, self.where = server, kind, where
        self._listener = socket.socket(family)
        self._listener.bind(where if family == socket.AF_UNIX else ("127.0.0.1", 0))
        self._listener.listen()
        if family == socket.AF_INET:
            self.where = f"127.0.0.1:{self._listener.getsockname()[1]}"
        server.listen(self._listener, kind)
        self.peers: list[RawPeer] = []

    def connect(self, data: bytes, receive_buffer: int | None = None) -> RawPeer:
        peer = RawPeer(self.where, receive_buffer=receive_buffer)
        peer.socket.sendall(data)
        self.peers.append(peer)
        return peer

    @property
    def readers(self) -> int:
        return len(self.server._readers[self.kind])

    def close(self) -> None:
        for peer in self.peers:
            peer.close()
        asyncio.get_running_loop().remove_reader(self._listener)
        self._listener.close()


@contextlib.asynccontextmanager
async def site(
    tmp_path: Path, kind: type[ReaderConnection], *, most: int = 4, tcp: bool = False, max_bytes: int = 1 << 20
) -> AsyncIterator[Site]:
    server = ReaderServer(max_bytes, most)
    made = Site(server, kind, socket.AF_INET if tcp else socket.AF_UNIX, str(tmp_path / "s"))
    try:
        yield made
    finally:
        made.close()
        await async_wait_until(lambda: not server._all())


async def closed(peer: RawPeer) -> None:
    await async_wait_until(peer.has_been_closed)


@pytest.mark.parametrize(("tcp", "most"), [(False, 4), (True, 2)])
async def test_the_number_of_subscribers(tmp_path: Path, *, tcp: bool, most: int) -> None:
    """One address has half of the places. Further subscribers are refused, until others leave."""
    async with site(tmp_path, SubscriberConnection, tcp=tcp) as made:
        admitted = [made.connect(SUBSCRIBES) for _ in range(most)]
        await async_wait_until(lambda: made.readers == most)
        await closed(made.connect(SUBSCRIBES))
        assert made.readers == most
        admitted[0].close()
        await async_wait_until(lambda: made.readers == most - 1)
        made.connect(SUBSCRIBES)
        await async_wait_until(lambda: made.readers == most)


class BusyListener(socket.socket):
    """Listening socket without a free descriptor for a connection."""

    has_descriptors = False

    def accept(self) -> tuple[socket.socket, object]:
        if not self.has_descriptors:
            raise OSError(errno.EMFILE, "too many open files")
        return super().accept()


async def test_connections_that_cannot_be_accepted_are_reported(tmp_path: Path) -> None:
    """At each attempt, and the end when a connection is accepted again."""
    reports: list[str] = []
    with BusyListener(socket.AF_UNIX) as listener, contextlib.closing(socket.socket(socket.AF_UNIX)) as peer:
        server = ReaderServer(1 << 20, 4, report=reports.append)
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        server._accept(listener, SubscriberConnection)
        server._accept(listener, SubscriberConnection)
        cause, again = reports
        assert again == cause
        assert "are not accepted" in cause
        assert "too many open files" in cause
        listener.has_descriptors = True
        peer.connect(str(tmp_path / "s"))
        await async_wait_until(lambda: bool(server._new))
        assert reports == [cause, cause, ""]
        asyncio.get_running_loop().remove_reader(listener)
        peer.close()
        await async_wait_until(lambda: not server._all())


async def test_an_idle_reader_of_replays_gives_its_place_to_another_one(tmp_path: Path) -> None:
    """Readers request a replay rarely, and ZeroMQ's clients connect again."""
    async with site(tmp_path, ReplayConnection, most=2) as made:
        first = made.connect(REQUESTS)
        await async_wait_until(lambda: made.readers == 1)
        made.connect(REQUESTS)
        await async_wait_until(lambda: made.readers == 2)
        made.connect(REQUESTS)
        await closed(first)
        assert made.readers == 2


async def test_new_connections_replace_the_oldest_ones(tmp_path: Path) -> None:
    """Those that have not subscribed to anything; a subscriber stays."""
    async with site(tmp_path, SubscriberConnection) as made:
        reader = made.connect(SUBSCRIBES)
        await async_wait_until(lambda: made.readers == 1)
        idle = [made.connect(GREETING + ready(b"SUB")) for _ in range(64)]
        await async_wait_until(lambda: len(made.server._new) == 64)
        made.connect(b"")
        await closed(idle[0])
        assert len(made.server._new) == 64
        assert not reader.has_been_closed()


async def test_a_subscriber_that_does_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no queue; after a time-out its connection ends. Another reader gets everything."""
    async with site(tmp_path, SubscriberConnection, max_bytes=64 << 10) as made:
        made.connect(SUBSCRIBES, receive_buffer=4096)
        await async_wait_until(lambda: made.readers == 1)
        (connection,) = made.server._readers[SubscriberConnection]
        for _ in range(500):
            made.server.publish(SCOPE, b"topic", bytes(4000))
            await asyncio.sleep(0)
        assert connection.waits_for_room
        assert len(connection._sending) < 8000
        assert len(connection.messages._messages) < 20
        made.server.sweep()
        assert made.readers == 1
        monkeypatch.setattr(reader_connection, "_STALLED_SECONDS", -1.0)
        reader = made.connect(SUBSCRIBES)
        await async_wait_until(lambda: made.readers == 2)
        made.server.publish(SCOPE, b"topic", b"last")
        reader.socket.setblocking(False)
        read = bytearray()

        def has_last() -> bool:
            with contextlib.suppress(BlockingIOError):
                read.extend(reader.socket.recv(1 << 16))
            return read.endswith(frame(b"last"))

        await async_wait_until(has_last)
        made.server.sweep()
        await async_wait_until(lambda: made.readers == 1)


async def test_a_peer_that_sends_single_bytes(tmp_path: Path) -> None:
    """Each piece counts as 64 bytes, so its connection ends after about 1,000 of them."""
    async with site(tmp_path, SubscriberConnection) as made:
        peer = made.connect(SUBSCRIBES)
        await async_wait_until(lambda: made.readers == 1)
        (connection,) = made.server._readers[SubscriberConnection]
        pieces = 0
        while connection.is_open:
            credit = connection._credit
            peer.socket.sendall(frame(b"")[pieces % 2 :][:1])
            pieces += 1
            await async_wait_until(lambda before=credit: connection._credit < before or not connection.is_open)
            assert pieces < 8000


async def test_a_topic_that_no_reader_wants(tmp_path: Path) -> None:
    """They are passed over; a subscription ends when it is cancelled as often as made."""
    async with site(tmp_path, SubscriberConnection) as made:
        peer = made.connect(GREETING + ready(b"SUB") + subscription(b"b") * 2 + frame(b"\0b"))
        await async_wait_until(lambda: made.readers == 1)
        for number in range(1000):
            made.server.publish(SCOPE, b"a", b"%d" % number)
        made.server.publish(SCOPE, b"b-topic", b"wanted")
        (connection,) = made.server._readers[SubscriberConnection]
        await async_wait_until(lambda: connection.is_idle)
        with contextlib.closing(peer.frames()) as frames:
            found = [body for _, body in (next(frames) for _ in range(4))]
        assert found[1:] == [b"b-topic", (1000).to_bytes(8, "big"), b"wanted"]
        peer.socket.sendall(frame(b"\0b") + frame(b"\0other"))
        await async_wait_until(lambda: not connection._subscriptions)  # type: ignore[attr-defined]


def test_the_ring_counts_what_messages_cost() -> None:
    """Small messages have a limit, too, and the newest one may be larger than the ring."""
    ring = RecentMessages(100_000)
    for _ in range(10_000):
        ring.add(Message(b"t", b""))
    assert ring.end - ring.first == 100_000 // 257
    ring.add(Message(b"t", bytes(200_000)))
    assert ring.first == ring.end


def test_the_process_for_readers_is_killed(tmp_path: Path) -> None:
    """A new one begins at 0 with all blocks, on the same addresses; engines notice nothing."""
    namespace = namespace_of(4096)
    keys = [key_of(number) for number in range(10)]
    with publishing(tmp_path) as (server, context), Client(server.endpoint, namespace=namespace) as client:
        client.store(keys, [payload(key, 4096) for key in keys])
        with engine(server, namespace, "a:1"):
            first = Indexer(context, tmp_path)
            first.read_until(lambda: len(first.known.get(b"kv@a:1@served", ())) >= len(keys))
            children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
            child = next(int(pid) for pid in children if b"events.readers" in Path(f"/proc/{pid}/cmdline").read_bytes())
            os.kill(child, signal.SIGKILL)
            wait_until(lambda: not Path(f"/proc/{child}").exists())
            second = Indexer(context, tmp_path)
            second.read_until(lambda: len(second.known.get(b"kv@a:1@served", ())) >= len(keys))
        assert client.load(keys, filled(len(keys), 4096)) == len(keys)


async def test_a_queue_that_is_full_waits(tmp_path: Path) -> None:
    """A reader with libzmq gets each message once and in order, from many that are sent at once."""
    async with site(tmp_path, SubscriberConnection) as made:
        with zmq.Context() as context, context.socket(zmq.SUB) as sub:
            sub.set(zmq.LINGER, 0)
            sub.subscribe(b"")
            sub.connect(f"ipc://{tmp_path}/s")
            await async_wait_until(lambda: made.readers == 1)
            for number in range(300):
                made.server.publish(SCOPE, b"t", bytes(300) + b"%d" % number)
            found: list[bytes] = []

            def has_all() -> bool:
                with contextlib.suppress(zmq.Again):
                    while True:
                        found.append(sub.recv_multipart(zmq.NOBLOCK)[2])
                return len(found) == 300

            await async_wait_until(has_all)
            assert found == [bytes(300) + b"%d" % number for number in range(300)]
