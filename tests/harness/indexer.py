"""An indexer of the server's published events, and servers that publish."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import zmq

from kvtier.client import Namespace
from kvtier.protos.v1 import session_pb2, session_pb2_grpc

from .server_process import ServerProcess

__all__ = ["TOPIC", "ArrayBatch", "Indexer", "engine", "hash_of", "publishing"]

ADDRESS = "10.1.2.3:8000"
TOPIC = b"kv@10.1.2.3:8000@served"
WAIT_SECONDS = 60


class KVCacheEvent(msgspec.Struct, omit_defaults=True, tag=True):
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


class ArrayStored(BlockStored, array_like=True, tag="BlockStored"):
    pass


class ArrayRemoved(BlockRemoved, array_like=True, tag="BlockRemoved"):
    pass


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
        self.stored: dict[bytes, list[Any]] = {}
        """Stored events per topic."""
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
                assert event.lora_id is None
                assert len(event.token_ids) in (0, event.block_size * len(event.block_hashes))
                self.stored.setdefault(topic, []).append(event)
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
def engine(server: ServerProcess, namespace: Namespace, address: str = ADDRESS) -> Iterator[None]:
    """A session of an engine that declares its address."""
    stub = session_pb2_grpc.SessionServiceStub(server._channel)
    stream = stub.Open(
        session_pb2.OpenRequest(
            protocol_version=2,
            engine_id=address,
            namespace=namespace.to_proto(),
            engine_address=address,
            served_model="served",
        )
    )
    next(stream)
    try:
        yield
    finally:
        stream.cancel()
