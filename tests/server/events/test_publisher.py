"""Publisher of events, read with real ZeroMQ sockets and decoded with structs equal to vLLM's."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from harness.payloads import key_of, namespace_of, payload
from harness.server_process import MIB, ServerProcess

from kvtier.client import Client
from kvtier.protos.v1 import session_pb2, session_pb2_grpc

PART = 64 << 10
NAMESPACE = namespace_of(PART, MIB >> 3)
KEYS = [key_of(number, number % 2) for number in range(20)]
ADDRESS = "10.1.2.3:8000"
TOPIC = b"kv@10.1.2.3:8000@served"
WAIT_SECONDS = 60


class KVCacheEvent(msgspec.Struct, omit_defaults=True, tag=True):
    pass


class ArrayEvent(msgspec.Struct, array_like=True, omit_defaults=True, tag=True):
    pass


class BlockStored(KVCacheEvent):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None


class BlockRemoved(KVCacheEvent):
    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[BlockStored | BlockRemoved]
    data_parallel_rank: int | None = None


class ArrayStored(ArrayEvent, tag="BlockStored"):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None


class ArrayRemoved(ArrayEvent, tag="BlockRemoved"):
    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None


class ArrayBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[ArrayStored | ArrayRemoved]
    data_parallel_rank: int | None = None


def hash_of(key: bytes) -> int:
    return int.from_bytes(key[:-4][-8:], "big")


class Indexer:
    """A subscriber that asks for a replay first, as indexers do when they connect."""

    def __init__(self, context: zmq.Context[Any], directory: Path, batch: type[Any] = KVEventBatch) -> None:
        self._decode = msgspec.msgpack.Decoder(batch).decode
        self.subscriber = context.socket(zmq.SUB)
        self.subscriber.subscribe(b"")
        self.subscriber.connect(f"ipc://{directory}/pub")
        self.dealer = context.socket(zmq.DEALER)
        self.dealer.set(zmq.RCVTIMEO, 1000 * WAIT_SECONDS)
        self.dealer.connect(f"ipc://{directory}/replay")
        self.known: dict[bytes, set[tuple[str, Any, int]]] = {}
        self.sizes: set[tuple[int | None, int]] = set()
        self.next = 0

    def replay(self) -> None:
        """Applies the messages that the publisher kept, from the next expected one on."""
        self.dealer.send_multipart([b"", self.next.to_bytes(8, "big")])
        while True:
            _, topic, sequence, body = self.dealer.recv_multipart()
            if int.from_bytes(sequence, "big", signed=True) < 0:
                assert (topic, body) == (b"", b"")
                return
            self._apply(topic, int.from_bytes(sequence, "big"), body)

    def read_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WAIT_SECONDS
        while not condition():
            assert time.monotonic() < deadline, self.known
            if not self.subscriber.poll(200):
                self.replay()  # the subscription may have begun after the last message
                continue
            topic, sequence, body = self.subscriber.recv_multipart()
            number = int.from_bytes(sequence, "big")
            if number > self.next:
                self.replay()
            elif number == self.next:
                self._apply(topic, number, body)

    def _apply(self, topic: bytes, number: int, body: bytes) -> None:
        assert number == self.next
        self.next += 1
        known = self.known.setdefault(topic, set())
        for event in self._decode(body).events:
            names = {(event.medium, each, event.group_idx) for each in event.block_hashes}
            if type(event).__name__.endswith("Stored"):
                assert not names & known
                known |= names
                self.sizes.add((event.group_idx, event.block_size))
                assert (event.parent_block_hash, event.token_ids, event.lora_id) == (None, [], None)
            else:
                assert names <= known
                known -= names


@contextmanager
def publishing(directory: Path, more: str = "") -> Iterator[tuple[ServerProcess, zmq.Context[Any]]]:
    config = f'[events]\npublish = "ipc://{directory}/pub"\nreplay = "ipc://{directory}/replay"\n{more}'
    context: zmq.Context[Any] = zmq.Context()
    try:
        with ServerProcess(directory, config=config).start() as server:
            yield server, context
    finally:
        context.destroy(linger=0)


@contextmanager
def engine(server: ServerProcess, address: str = ADDRESS) -> Iterator[None]:
    """A session of an engine that declares its address."""
    stub = session_pb2_grpc.SessionServiceStub(server._channel)
    stream = stub.Open(
        session_pb2.OpenRequest(
            protocol_version=1,
            engine_id=address,
            namespace=NAMESPACE.to_proto(),
            engine_address=address,
            served_model="served",
        )
    )
    next(stream)
    try:
        yield
    finally:
        stream.cancel()


def store(client: Client, keys: list[bytes]) -> None:
    client.store(keys, [payload(key, client.namespace.part_bytes_of(key)) for key in keys])


def on(medium: str, keys: list[bytes]) -> set[tuple[str, Any, int]]:
    return {(medium, hash_of(key), key[-1]) for key in keys}


def test_each_engine_has_a_topic_with_all_blocks_of_its_namespace(tmp_path: Path) -> None:
    """B6.2 B6.8 Topics begin with what is held; a reset and the engine's end remove blocks."""
    with (
        publishing(tmp_path) as (server, context),
        Client(server.endpoint, namespace=NAMESPACE) as client,
    ):
        store(client, KEYS[:10])
        client.flush(KEYS[:10])
        indexer = Indexer(context, tmp_path)
        indexer.read_until(lambda: indexer.known.get(b"kvtier") == on("CPU", KEYS[:10]) | on("STORAGE", KEYS[:10]))
        with engine(server):
            held = on("CPU", KEYS[:10]) | on("STORAGE", KEYS[:10])
            indexer.read_until(lambda: indexer.known.get(TOPIC) == held)
            assert indexer.known[b"kvtier"] == set(), "the engine's topic replaces that of the server"
            store(client, KEYS[10:])
            client.flush(KEYS)
            client.reset(wait=30)
            indexer.read_until(lambda: indexer.known[TOPIC] == on("STORAGE", KEYS))
            with engine(server, "10.1.2.4:8000"):
                other = b"kv@10.1.2.4:8000@served"
                indexer.read_until(lambda: indexer.known.get(other) == on("STORAGE", KEYS))
            indexer.read_until(lambda: not indexer.known[other])
            assert indexer.known[TOPIC] == on("STORAGE", KEYS)
        indexer.read_until(lambda: not indexer.known[TOPIC])
        assert indexer.sizes == {(0, 16), (1, 16)}


def test_a_late_indexer_gets_everything_from_the_replay(tmp_path: Path) -> None:
    """B6.8 The replay from 0 tells the same as the messages; a malformed request is ignored."""
    with publishing(tmp_path) as (server, context), Client(server.endpoint, namespace=NAMESPACE) as client:
        store(client, KEYS)
        first = Indexer(context, tmp_path)
        first.read_until(lambda: on("CPU", KEYS) <= first.known.get(b"kvtier", set()))
        late = Indexer(context, tmp_path)
        late.dealer.send_multipart([b"", b"what?"])
        late.replay()
        assert on("CPU", KEYS) <= late.known[b"kvtier"]
        assert late.next >= first.next


def test_a_restart_begins_at_sequence_0_with_what_the_disk_kept(tmp_path: Path) -> None:
    """B6.8 A lower sequence tells indexers to rebuild."""
    with publishing(tmp_path) as (server, context):
        with Client(server.endpoint, namespace=NAMESPACE) as client:
            store(client, KEYS)
            client.flush(KEYS)
            before = Indexer(context, tmp_path)
            before.read_until(lambda: on("STORAGE", KEYS) <= before.known.get(b"kvtier", set()))
        server.kill()
        server.start()
        after = Indexer(context, tmp_path)
        with engine(server):
            after.read_until(lambda: after.known.get(TOPIC) == on("STORAGE", KEYS))


@pytest.mark.parametrize("form", ["int", "bytes"])
def test_the_array_form(tmp_path: Path, form: str) -> None:
    """B6.8 Older routers read events as arrays; hashes are numbers or bytes."""
    more = f'format = "array"\nhashes = "{form}"\ntopic = "other"\n'
    with publishing(tmp_path, more) as (server, context), Client(server.endpoint, namespace=NAMESPACE) as client:
        store(client, KEYS)
        indexer = Indexer(context, tmp_path, ArrayBatch)
        wanted = {("CPU", hash_of(key) if form == "int" else key[:-4], key[-1]) for key in KEYS}
        indexer.read_until(lambda: wanted <= indexer.known.get(b"other", set()))
        client.reset(wait=30)
        indexer.read_until(lambda: not any(medium == "CPU" for medium, _, _ in indexer.known[b"other"]))
