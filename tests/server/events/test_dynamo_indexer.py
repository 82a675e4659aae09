"""Dynamo's real indexer reads the publisher of a real server, and finds blocks by tokens.

Needs the indexer in the environment that ROUTER_DIR names: `make test-remote`. The indexer listens
on all interfaces, because it has no setting for its address.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from harness.indexer import engine
from harness.payloads import namespace_of, payload
from harness.polling import wait_until
from harness.ports import ReservedPort
from harness.server_process import ServerProcess

from kvtier.client import Client, make_key
from kvtier.client.events import BlockContent, describe_blocks
from kvtier.protos.v1 import admin_pb2, admin_pb2_grpc
from kvtier.protos.wire.block_contents import pack_tokens

pytestmark = pytest.mark.router

PART = 64 << 10
BLOCK = 16
NAMESPACE = namespace_of(PART)
PROMPT = list(range(1000, 1000 + 12 * BLOCK))
OTHER = list(range(9000, 9000 + 4 * BLOCK))


class DynamoIndexer:
    """A process of `dynamo.indexer`, and its HTTP calls."""

    def __init__(self, directory: Path, port: int) -> None:
        found = os.environ.get("ROUTER_DIR")
        if not found:
            pytest.skip("ROUTER_DIR is not set: make test-remote")
        self._url = f"http://127.0.0.1:{port}"
        self._log = directory / "indexer.log"
        command = [f"{found}/bin/python", "-m", "dynamo.indexer", "--port", str(port)]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        wait_until(self._is_up, 60, otherwise=self._log.read_text)

    def _is_up(self) -> bool:
        assert self.process.poll() is None, self._log.read_text()
        try:
            with urllib.request.urlopen(f"{self._url}/health", timeout=5):  # noqa: S310 - http
                return True
        except OSError:
            return False

    def post(self, path: str, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(  # noqa: S310 - http
            self._url + path, json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=30) as answer:  # noqa: S310 - http
            return json.load(answer)

    def follow(self, publish: str, replay: str) -> None:
        """Registers the publisher as that of worker 1."""
        body = {"endpoint": publish, "replay_endpoint": replay, "block_size": BLOCK, "dp_rank": 0}
        self.post("/register", body | {"instance_id": 1, "model_name": "served"})

    def forget(self) -> None:
        self.post("/unregister", {"instance_id": 1, "model_name": "served"})

    def found(self, tokens: list[int]) -> tuple[int, int]:
        """Returns how many leading tokens the CPU tier has, and the CPU tier or the disk."""
        answer = self.post("/query", {"model_name": "served", "token_ids": tokens})
        worker = answer["instances"].get("1", {})
        return worker.get("cpu", 0), worker.get("disk", 0)

    def wait_for(self, tokens: list[int], cpu: int, disk: int) -> None:
        """Waits until `found` returns the tokens of these numbers of blocks."""
        wanted = (cpu * BLOCK, disk * BLOCK)
        wait_until(
            lambda: self.found(tokens) == wanted,
            60,
            otherwise=lambda: f"{self.found(tokens)}, wanted {wanted}: {self._log.read_text()[-3000:]}",
        )


@contextmanager
def site(directory: Path) -> Iterator[tuple[ServerProcess, DynamoIndexer, tuple[str, str]]]:
    """A server that publishes on the loopback, an indexer, and the publisher's addresses."""
    with ReservedPort() as http, ReservedPort() as publish, ReservedPort() as replay:
        ports = (publish.number, replay.number, http.number)
        for reserved in (publish, replay, http):
            reserved.close()  # ZeroMQ and the indexer cannot share a port with the reservation
        addresses = (f"tcp://127.0.0.1:{ports[0]}", f"tcp://127.0.0.1:{ports[1]}")
        indexer = DynamoIndexer(directory, ports[2])
        config = f'[events]\ninsecure = true\npublish = "{addresses[0]}"\nreplay = "{addresses[1]}"\n'
        try:
            with ServerProcess(directory, config=config).start() as server:
                yield server, indexer, addresses
        finally:
            indexer.process.kill()
            indexer.process.wait()


def keys_of(tokens: list[int]) -> list[bytes]:
    """Returns keys of the blocks of a prompt, with chained hashes as engines make them."""
    ends = range(BLOCK, len(tokens) + 1, BLOCK)
    return [make_key(hashlib.sha256(repr(tokens[:end]).encode()).digest()) for end in ends]


def store(client: Client, tokens: list[int], *, first: int = 0, described: bool = True) -> None:
    """Stores the blocks of a prompt from a position on."""
    keys = keys_of(tokens)
    if described:
        contents = [
            BlockContent(
                keys[number - 1] if number else None, pack_tokens(tokens[number * BLOCK : (number + 1) * BLOCK])
            )
            for number in range(first, len(keys))
        ]
        assert describe_blocks(client, keys[first:], contents)
    client.store(keys[first:], [payload(key, PART) for key in keys[first:]])


def wait_until_followed(client: Client, indexer: DynamoIndexer) -> None:
    """Stores prompts until the indexer finds one: it registers before its subscription is sent."""
    prompts: list[list[int]] = []

    def is_followed() -> bool:
        prompts.append(list(os.urandom(BLOCK)))
        store(client, prompts[-1])
        return any(indexer.found(tokens) != (0, 0) for tokens in prompts)

    wait_until(is_followed, 60, interval=0.2)


def evict(server: ServerProcess, tier: str) -> None:
    stub = admin_pb2_grpc.AdminServiceStub(server._channel)
    for _ in stub.Evict(admin_pb2.EvictRequest(tiers=[tier])):
        pass


def test_the_indexer_finds_the_blocks_of_a_prompt_and_loses_them(tmp_path: Path) -> None:
    """B6.9 Each store, eviction and reset changes what Dynamo's indexer knows of each medium."""
    with site(tmp_path) as (server, indexer, addresses), Client(server.endpoint, namespace=NAMESPACE) as client:
        client.wait_until_connected(60)
        with engine(server, NAMESPACE):
            indexer.follow(*addresses)
            wait_until_followed(client, indexer)
            store(client, PROMPT[: 8 * BLOCK])
            client.flush(keys_of(PROMPT[: 8 * BLOCK]))
            indexer.wait_for(PROMPT, 8, 8)
            assert indexer.found(OTHER) == (0, 0)
            assert indexer.found(PROMPT[: 3 * BLOCK] + OTHER) == (3 * BLOCK, 3 * BLOCK)
            store(client, PROMPT, first=8)
            client.flush(keys_of(PROMPT))
            indexer.wait_for(PROMPT, 12, 12)
            store(client, OTHER, described=False)
            client.reset(wait=30)
            indexer.wait_for(PROMPT, 0, 12)
            assert indexer.found(OTHER) == (0, 0), "without tokens it finds nothing"
            buffers = [bytearray(PART) for _ in range(5)]
            assert client.load(keys_of(PROMPT)[:5], buffers, wait=30) == 5
            indexer.wait_for(PROMPT, 5, 12)
            evict(server, "cpu")
            indexer.wait_for(PROMPT, 0, 12)
            evict(server, "lmdb")
            indexer.wait_for(PROMPT, 0, 0)


def test_a_late_indexer_and_one_that_registers_again(tmp_path: Path) -> None:
    """B6.8 B6.9 Both read the replay. After a restart, only what engines store again has tokens."""
    with site(tmp_path) as (server, indexer, addresses), Client(server.endpoint, namespace=NAMESPACE) as client:
        client.wait_until_connected(60)
        store(client, PROMPT)
        with engine(server, NAMESPACE):
            indexer.follow(*addresses)

            def is_found() -> bool:
                # The indexer asks for the replay when it sees a message with a later sequence.
                store(client, [int.from_bytes(os.urandom(3), "big"), *OTHER[1:]], described=False)
                return indexer.found(PROMPT)[0] == len(PROMPT)

            wait_until(is_found, 60, interval=0.2)
        client.flush(keys_of(PROMPT))
        server.kill()
        server.start()
        client.wait_until_connected(60)
        with engine(server, NAMESPACE):
            indexer.forget()
            indexer.follow(*addresses)
            store(client, OTHER)
            client.flush(keys_of(OTHER))
            indexer.wait_for(OTHER, 4, 4)
            assert indexer.found(PROMPT) == (0, 0), "the disk has the blocks, but their tokens are lost"
