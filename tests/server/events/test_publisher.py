"""Publisher of events, read with real ZeroMQ sockets and decoded with structs equal to vLLM's."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
import zmq
from harness.indexer import TOPIC, ArrayBatch, Indexer, engine, hash_of, publishing
from harness.launch import refused_start
from harness.payloads import key_of, namespace_of, payload
from harness.polling import wait_until
from harness.ports import ReservedPort
from harness.server_process import MIB, ServerProcess
from harness.traffic import wait_connected

from kvtier.client import Client

PART = 64 << 10
NAMESPACE = namespace_of(PART, MIB >> 3)
KEYS = [key_of(number, number % 2) for number in range(20)]


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
        with engine(server, NAMESPACE):
            held = on("CPU", KEYS[:10]) | on("STORAGE", KEYS[:10])
            indexer.read_until(lambda: indexer.known.get(TOPIC) == held)
            assert indexer.known[b"kvtier"] == set(), "the engine's topic replaces that of the server"
            store(client, KEYS[10:])
            client.flush(KEYS)
            client.reset(wait=30)
            indexer.read_until(lambda: indexer.known[TOPIC] == on("STORAGE", KEYS))
            with engine(server, NAMESPACE, "10.1.2.4:8000"):
                other = b"kv@10.1.2.4:8000@served"
                indexer.read_until(lambda: indexer.known.get(other) == on("STORAGE", KEYS))
            indexer.read_until(lambda: not indexer.known[other])
            assert indexer.known[TOPIC] == on("STORAGE", KEYS)
        indexer.read_until(lambda: not indexer.known[TOPIC])
        assert indexer.sizes == {(0, 16), (1, 16)}
        assert not any(event.token_ids for event in indexer.stored[TOPIC]), "no engine has described blocks"


@pytest.mark.parametrize(
    ("host", "readers"),
    {
        "*": ["127.0.0.1", "[::1]"],
        "[::]": ["127.0.0.1", "[::1]"],
        "[::1]": ["[::1]"],
        "localhost": ["localhost"],
    }.items(),
)
def test_readers_of_both_families(tmp_path: Path, host: str, readers: list[str]) -> None:
    """Messages and replays reach readers over IPv4 and IPv6, also of a wildcard address."""
    with ReservedPort() as publish, ReservedPort() as replay:
        ports = f'publish = "tcp://{host}:{publish.number}"\nreplay = "tcp://{host}:{replay.number}"'
        with (
            ServerProcess(tmp_path, config=f"[events]\ninsecure = true\n{ports}") as server,
            zmq.Context() as context,
        ):
            server.start()
            for reader in readers:
                with (
                    Client(server.endpoint, namespace=NAMESPACE) as client,
                    context.socket(zmq.SUB) as subscriber,
                    context.socket(zmq.DEALER) as dealer,
                ):
                    for sock, port in ((subscriber, publish), (dealer, replay)):
                        sock.set(zmq.LINGER, 0)
                        sock.set(zmq.IPV6, 1)
                        sock.set(zmq.RCVTIMEO, 60_000)
                        if sock is subscriber:
                            sock.subscribe(b"")
                        sock.connect(f"tcp://{reader}:{port.number}")
                    wait_connected(client)

                    def arrives() -> bool:
                        """Stores until the subscription has reached the publisher.

                        A block that is stored and removed between two messages has none.
                        """
                        store(client, KEYS)
                        found = subscriber.poll(500)
                        if not found:
                            client.reset(wait=30)
                            found = subscriber.poll(500)
                        return bool(found)

                    wait_until(arrives, 60)
                    assert subscriber.recv_multipart()[0] == b"kvtier"
                    dealer.send_multipart([b"", bytes(8)])
                    assert dealer.recv_multipart()[1] == b"kvtier"


@pytest.mark.parametrize("which", ["publish", "replay"])
def test_an_address_in_use_ends_the_start(tmp_path: Path, which: str) -> None:
    with ReservedPort() as free, socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"tcp://*:{taken.getsockname()[1]}"
        events = {"publish": f"tcp://127.0.0.1:{free.number}", which: address}
        config = tmp_path / "kvtier.toml"
        config.write_text("".join(f'events.{name} = "{text}"\n' for name, text in events.items()))
        reason = refused_start(tmp_path, "--insecure", "--config", f"{config}")
    assert reason == f"cannot publish events on {address}: Address already in use"


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
        with engine(server, NAMESPACE):
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
