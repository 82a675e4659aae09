"""A server with a misbehaving tier: engines are served, and the status reports it."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from harness.bad_tiers import ERRORS
from harness.launch import refused_start
from harness.payloads import assert_serves, correct_hits, key_of, namespace_of, payload
from harness.polling import wait_until
from harness.server_process import MIB, ServerProcess
from harness.traffic import wait_connected

from kvtier.client import Client, DurableStatus, KeyStatus, OffloadPolicy, StoreStatus

PART = 64 << 10
NAMESPACE = namespace_of(PART)
REGION = 4 * MIB
"""Capacity of 64 blocks."""
OLD = [key_of(number, salt="old") for number in range(48)]
EXIT_LEFT_BEHIND = 3

BAD = """
[limits]
tier_stall = 1.0

[[tiers]]
type = "harness.bad_tiers:BadTier"
name = "bad"
size = "16MiB"
"""


class World:
    """A server whose first tier misbehaves, and an engine whose blocks are in the tiers only."""

    def __init__(self, server: ServerProcess) -> None:
        self.server = server
        self.directory = server.data_dir / "bad"
        self.client = Client(server.endpoint, namespace=NAMESPACE)
        self.numbers = iter(range(10**6))

    def start(self) -> None:
        self.server.start()
        wait_connected(self.client)
        self.store_durable(OLD)
        self.store_durable(self.new(64))
        assert self.client.lookup(OLD[:1]).statuses != bytes([KeyStatus.HIT]), "the CPU tier still has it"

    def misbehave(self, what: str, content: str = "") -> Path:
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self.directory / what
        path.write_text(content)
        return path

    def new(self, count: int) -> list[bytes]:
        return [key_of(next(self.numbers), salt="new") for _ in range(count)]

    def store(self, keys: list[bytes]) -> None:
        assert set(self.client.store(keys, [payload(key, PART) for key in keys])) == {StoreStatus.GRANTED}

    def store_durable(self, keys: list[bytes]) -> None:
        for start in range(0, len(keys), 8):
            self.store(keys[start : start + 8])
            assert set(self.client.flush(keys[start : start + 8])) == {DurableStatus.DURABLE}
            # The bad tier answers at once; a block that LMDB has dropped on a busy machine never
            # becomes durable.
            self.server.wait_for(lambda status: not status.tiers[2].queued_bytes)

    def overfill(self) -> None:
        """Stores until the bad tier hangs in a removal; cascades that it drops do not fill it."""

        def hangs() -> bool:
            for _ in range(5):
                self.store(self.new(8))
            return "remove: still running" in self.server.status().tiers[1].trouble

        wait_until(hangs, interval=0.1)

    def wait_trouble(self, what: str) -> None:
        self.server.wait_for(lambda status: what in status.tiers[1].trouble and not status.tiers[1].healthy)

    def wait_healthy(self) -> None:
        self.server.wait_for(lambda status: status.tiers[1].healthy)

    def health(self, tier: str) -> int:
        with grpc.insecure_channel(self.server.endpoint) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            answer = stub.Check(health_pb2.HealthCheckRequest(service=f"kvtier.tier.{tier}"), timeout=60)
        return int(answer.status)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """Yields a world that is not started."""
    tests = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, [tests, os.environ.get("PYTHONPATH")]))
    monkeypatch.setenv("PYTHONPATH", path)
    # LMDB has room for all blocks that `overfill` stores until a busy machine notices the hang.
    with ServerProcess(tmp_path, region=REGION, lmdb=1024 * MIB, config=BAD) as server:
        world = World(server)
        with world.client:
            yield world


@pytest.mark.slow
@pytest.mark.parametrize("work", ["store", "load", "remove"])
def test_a_hanging_tier_does_not_stop_engines(world: World, work: str) -> None:
    """Engines store and load as before, and the next tier serves the blocks.

    The status reports the tier until it recovers.
    """
    world.start()
    hang = world.misbehave(f"hang-{work}")
    # Loads of blocks that only the tiers have; stores; and enough of them for a removal.
    world.client.load(OLD[:4], [bytearray(PART) for _ in range(4)], wait=0.1)
    for _ in range(4):
        keys = world.new(8)
        world.store_durable(keys)
        # A block that was evicted, and whose load hangs until the server notices it, misses once.
        wait_until(lambda keys=keys: correct_hits(world.client, keys) == 8)  # type: ignore[misc]
    if work == "remove":
        world.overfill()
    world.wait_trouble(f"{work}: still running after 1 s")
    wait_until(lambda: world.health("bad") == health_pb2.HealthCheckResponse.NOT_SERVING)
    assert world.health("lmdb") == health_pb2.HealthCheckResponse.SERVING
    keys = world.new(8)
    world.store_durable(keys)
    assert_serves(world.client, keys)
    if work != "remove":
        assert_serves(world.client, OLD[8:16])
    else:
        world.client.lookup(OLD[8:16], wait=0.1)
    hang.unlink()
    world.wait_healthy()
    keys = world.new(8)
    world.store_durable(keys)
    wait_until(lambda: world.server.status().tiers[1].jobs == 0)
    assert_serves(world.client, keys)
    assert world.server.terminate() == 0


@pytest.mark.slow
@pytest.mark.parametrize("work", ["store", "load", "remove", "on_new_request", "on_request_finished", "close"])
def test_sigterm_ends_a_server_with_a_hanging_tier(world: World, work: str) -> None:
    """The time is bounded; log and exit code name the tier, and LMDB keeps its blocks."""
    world.start()
    world.misbehave(f"hang-{work}")
    world.client.begin_request("r")
    world.client.load(OLD[:4], [bytearray(PART) for _ in range(4)], wait=0.1)
    world.store(world.new(8))
    if work == "remove":
        world.overfill()
    world.client.finish_request("r")
    began = time.monotonic()
    assert world.server.terminate() == EXIT_LEFT_BEHIND
    print(f"ended {time.monotonic() - began:.1f} s after SIGTERM")
    lines = [json.loads(line) for line in world.server.log.splitlines()]
    [left] = [line for line in lines if "tier is not closed: a call does not end" in line["event"]]
    assert (left["tier"], left["operation"]) == ("bad", work)
    assert lines[-1]["tiers"] == ["bad"]
    assert "Traceback" not in world.server.log
    (world.directory / f"hang-{work}").unlink()
    world.server.start()
    wait_connected(world.client)
    # A busy machine may make a tier look hung, and its blocks then miss for a while.
    wait_until(lambda: _hits(world.client, OLD[-8:]) == 8)
    assert_serves(world.client, OLD[-8:])


def _hits(client: Client, keys: list[bytes]) -> int:
    with client.lookup(keys, wait=30) as lease:
        return lease.prefix_hits


def test_a_slow_vote_does_not_block_the_loop(world: World) -> None:
    """The request begins without that vote, and other calls are answered."""
    world.start()
    hang = world.misbehave("hang-on_new_request")
    begun = [world.client.begin_request(f"{n}", kv_transfer_params={"do_remote_decode": True}) for n in range(20)]
    assert {request.policy for request in begun} == {OffloadPolicy.REQUEST_LEVEL}, "LMDB's vote"
    assert {request.votes[0].policy for request in begun} == {OffloadPolicy.BLOCK_LEVEL}
    world.store_durable(world.new(8))
    world.wait_trouble("on_new_request: still running after 1 s")
    for number in range(20):
        world.client.finish_request(f"{number}")
    hang.unlink()
    wait_until(lambda: "do_remote_decode" in _vote_of(world))
    world.wait_healthy()
    assert world.server.terminate() == 0


def _vote_of(world: World) -> str:
    request = world.client.begin_request("again", kv_transfer_params={"do_remote_decode": True})
    world.client.finish_request("again")
    return str(request.votes[0].why)


@pytest.mark.parametrize("error", ERRORS)
def test_exceptions_of_a_tier_affect_only_that_tier(world: World, error: str) -> None:
    """It raises any exception in every method.

    Engines and the other tier work, and the status reports it.
    """
    world.start()
    raising = [world.misbehave(f"raise-{work}", error) for work in ("store", "load", "remove", "on_new_request")]
    world.client.begin_request("r")
    keys = world.new(16)
    world.store_durable(keys)
    assert_serves(world.client, keys)
    world.client.load(OLD[:4], [bytearray(PART) for _ in range(4)], wait=1)
    world.client.finish_request("r")
    world.wait_trouble(f"store failed: {error}: odd")
    world.misbehave("raise-close", error)
    for path in raising:
        path.unlink()
    assert world.server.terminate() == 0


def test_invalid_entries_of_a_tier_are_ignored(world: World) -> None:
    """The server starts without them, counts and reports them, and they use no capacity."""
    world.misbehave("lie-entries")
    world.misbehave("raise-last-entry", "OddError")
    world.server.start()
    wait_connected(world.client)
    tier = world.server.status().tiers[1]
    assert "22 of the listed blocks are invalid and ignored" in tier.trouble
    assert (tier.blocks, tier.used_bytes) == (1, 4096)
    wait_until(lambda: "22 of the listed blocks are invalid and ignored" in world.server.log)
    world.store_durable(world.new(8))
    assert world.server.terminate() == 0


@pytest.mark.slow
def test_no_call_fails_or_waits_while_a_tier_hangs(world: World) -> None:
    """Several engines store and load concurrently."""
    world.start()
    world.misbehave("hang-store")
    world.misbehave("hang-load")
    world.client.load(OLD[:4], [bytearray(PART) for _ in range(4)], wait=0.1)
    world.store(world.new(8))
    world.wait_trouble("still running after")
    failures: list[BaseException] = []

    def engine(number: int) -> None:
        try:
            with Client(world.server.endpoint, namespace=NAMESPACE) as client:
                wait_connected(client)
                for step in range(10):
                    keys = [key_of(step * 4 + n, salt=f"engine {number}") for n in range(4)]
                    client.store(keys, [payload(key, PART) for key in keys])
                    assert set(client.flush(keys)) == {DurableStatus.DURABLE}
                    assert_serves(client, keys)
        except BaseException as error:  # noqa: BLE001 - told to the test
            failures.append(error)

    threads = [threading.Thread(target=engine, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert world.server.terminate() == EXIT_LEFT_BEHIND


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("raise KeyError('x')", "tier odd: KeyError: 'x'"),
        ("raise BaseException('odd')", "tier odd: BaseException: odd"),
        ("self.name = 'other'", "tier odd: its `name` is 'other'"),
        ("pass", "tier odd: its `name` is None; has it called SecondaryTier.__init__?"),
        ("SecondaryTier.__init__(self, name, 0)", "tier odd: its `capacity_bytes` is 0;"),
        ("SecondaryTier.__init__(self, name, 1e9)", "tier odd: its `capacity_bytes` is 1000000000.0;"),
        ("SecondaryTier.__init__(self, name, 1); self.type = None", "tier odd: its `type` is None; it must be a str"),
        ("SecondaryTier.__init__(self, name, 1); self.durable = 1", "tier odd: its `durable` is 1; it must be a bool"),
        ("SecondaryTier.__init__(self, name, 1); self.medium = 2", "tier odd: its `medium` is 2; it must be a Medium"),
        ("SecondaryTier.__init__(self, name, 1); self.gather_bytes = 1", "tier odd: it has `gather_bytes` although"),
    ],
)
def test_an_unusable_tier_class_stops_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, reason: str
) -> None:
    """The constructor raises or returns an unusable object; the error is one line."""
    (tmp_path / "odd_tier.py").write_text(
        "from harness.bad_tiers import BadTier, SecondaryTier\n"
        f"class Odd(BadTier):\n    def __init__(self, name, **_):\n        {source}\n"
    )
    tests = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, [str(tmp_path), tests, os.environ.get("PYTHONPATH")]))
    monkeypatch.setenv("PYTHONPATH", path)
    config = tmp_path / "kvtier.toml"
    config.write_text('[[tiers]]\ntype = "odd_tier:Odd"\nname = "odd"\nsize = "16MiB"\n')
    assert refused_start(tmp_path, "--config", str(config)).startswith(reason)
