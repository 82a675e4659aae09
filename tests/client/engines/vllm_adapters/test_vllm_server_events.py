"""KV events of the connector that follow a real server: other engines, evictions, restarts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from connector_fakes import FULL
from harness.payloads import namespace_of, payload
from harness.polling import wait_until
from harness.server_process import ServerProcess
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash

from kvtier.client import Client, EngineAddress, make_key
from kvtier.client.engines.vllm.scheduler import kv_events
from kvtier.client.engines.vllm.scheduler.kv_events import KVEvents
from kvtier.client.events import EventStream, HeldChange

PART = 16 << 10
NAMESPACE = namespace_of(PART)
HASHES = [bytes([number]) * 32 for number in range(24)]
KEYS = [make_key(each) for each in HASHES]


class Router:
    """A reader of the engine's events that does not tolerate a missing or repeated event."""

    def __init__(self, events: KVEvents) -> None:
        self._events = events
        self.known: set[tuple[str, Any]] = set()
        self.clears = 0
        self.removals = 0

    def read(self) -> None:
        """Takes the events of one step of the engine."""
        for event in self._events.take():
            if isinstance(event, AllBlocksCleared):
                self.known.clear()
                self.clears += 1
                continue
            assert isinstance(event, BlockStored | BlockRemoved)
            assert event.group_idx == 0
            names = {(str(event.medium), each) for each in event.block_hashes}
            if isinstance(event, BlockStored):
                assert (event.block_size, event.token_ids, len(names)) == (4, [], 1)
                assert not names & self.known
                self.known |= names
            else:
                assert names <= self.known
                self.known -= names
                self.removals += len(names)

    def read_until(self, known: set[tuple[str, Any]]) -> None:
        def is_known() -> bool:
            self.read()
            return self.known == known

        wait_until(is_known, 60, otherwise=lambda: f"{len(self.known)} known, {len(known)} wanted")


def on(medium: str, hashes: Sequence[bytes]) -> set[tuple[str, Any]]:
    return {(medium, maybe_convert_block_hash(BlockHash(each))) for each in hashes}


@contextmanager
def following(
    server: ServerProcess, gone_seconds: float = 60.0
) -> Iterator[tuple[KVEvents, Router, Client, list[str]]]:
    """The events of an engine, their reader, the engine's client, and the log."""
    log: list[str] = []

    def open_stream(client: Client, on_changes: Callable[[Sequence[HeldChange]], object]) -> EventStream:
        return EventStream(client, on_changes, log.append, endpoint=server.endpoint, gone_seconds=gone_seconds)

    with Client(server.endpoint, namespace=NAMESPACE) as client:
        events = KVEvents([FULL], open_stream, enabled=True)
        events.follow(client)
        try:
            yield events, Router(events), client, log
        finally:
            events.close()


def store(client: Client, keys: list[bytes]) -> None:
    client.store(keys, [payload(key, PART) for key in keys])


def test_other_engines_and_the_server_change_what_a_router_knows(tmp_path: Path) -> None:
    """B6.6 Blocks of this engine and of another, on each medium, and their removal."""
    with (
        ServerProcess(tmp_path).start() as server,
        following(server) as (_, router, own, log),
        Client(server.endpoint, namespace=NAMESPACE) as other,
        Client(server.endpoint, namespace=namespace_of(PART, model="other")) as stranger,
    ):
        store(stranger, KEYS[20:])
        store(own, KEYS[:8])
        store(other, KEYS[4:16])
        other.flush(KEYS[:16])
        router.read_until(on("CPU", HASHES[:16]) | on("STORAGE", HASHES[:16]))
        other.reset(wait=30)
        router.read_until(on("STORAGE", HASHES[:16]))
        assert router.removals == 16
        assert log == []


def test_after_a_restart_only_the_differences_are_published(tmp_path: Path) -> None:
    """B6.7 The CPU tier is empty, the disk has kept its blocks, and the stream goes on."""
    with ServerProcess(tmp_path).start() as server, following(server) as (_, router, client, _):
        store(client, KEYS)
        client.flush(KEYS)
        router.read_until(on("CPU", HASHES) | on("STORAGE", HASHES))
        server.kill()
        router.read()
        assert not router.removals, "a restart may take less time"
        server.start()
        router.read_until(on("STORAGE", HASHES))
        assert router.removals == len(KEYS)
        client.wait_until_connected(60)
        client.load(KEYS[:2], [bytearray(PART), bytearray(PART)], wait=30)
        router.read_until(on("STORAGE", HASHES) | on("CPU", HASHES[:2]))


def test_a_server_that_stays_away_has_no_blocks(tmp_path: Path) -> None:
    """B6.7 A router must not send requests to an engine whose cache is not there."""
    with ServerProcess(tmp_path).start() as server, following(server, 0.2) as (_, router, client, log):
        store(client, KEYS)
        client.flush(KEYS)
        router.read_until(on("CPU", HASHES) | on("STORAGE", HASHES))
        server.kill()
        router.read_until(set())
        server.start()
        router.read_until(on("STORAGE", HASHES))
        assert all("stream of events" in text for text in log)


def test_a_reset_clears_all_media_and_then_repeats_what_disks_have(tmp_path: Path) -> None:
    """B4.13 B6.6 vLLM clears its own cache as well, so one event covers all media."""
    with ServerProcess(tmp_path).start() as server, following(server) as (events, router, client, _):
        store(client, KEYS)
        client.flush(KEYS)
        router.read_until(on("CPU", HASHES) | on("STORAGE", HASHES))
        events.cleared()
        client.reset(wait=30)
        router.read_until(set())
        events.follow(client)
        router.read_until(on("STORAGE", HASHES))
        assert (router.clears, router.removals) == (1, 0)


def test_an_engine_that_takes_no_events_keeps_a_limited_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """B6.5 vLLM takes no events without requests; afterwards the router knows everything."""
    monkeypatch.setattr(kv_events, "_MAX_QUEUED", 4)
    with ServerProcess(tmp_path).start() as server, following(server) as (events, router, client, _):
        for start in range(0, len(KEYS), 4):
            store(client, KEYS[start : start + 4])
            client.flush(KEYS[start : start + 4])
        wait_until(lambda: len(events._events) >= 4, 60)
        assert len(events._events) < 4 + len(KEYS), "one change may be beyond the limit"
        router.read_until(on("CPU", HASHES) | on("STORAGE", HASHES))


def test_a_client_declares_the_address_of_its_engine() -> None:
    """B6.8 The server needs it for the topic of the engine."""
    identity = functools.partial(Client, "unix:/nowhere", namespace=NAMESPACE)
    with identity(published=EngineAddress("10.0.0.1:8000", "served")) as client:
        request = client._transport._connection._identity.open_request("grpc")  # type: ignore[attr-defined]
        assert (request.engine_address, request.served_model) == ("10.0.0.1:8000", "served")
