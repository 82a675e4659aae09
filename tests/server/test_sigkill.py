"""The server is killed repeatedly while clients store, flush and load."""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from harness.payloads import assert_serves, filled, is_payload, key_of, namespace_of, payload
from harness.polling import polls, wait_until
from harness.server_process import MIB, ServerProcess

from kvtier.client import Client, DurableStatus, KVTierError, StoreStatus, Timeouts

PART_BYTES = (16 << 10, 4 << 10)
NAMESPACE = namespace_of(*PART_BYTES)
TIMEOUTS = Timeouts(connect=1.0, call=1.0, transfer=5.0)


@dataclass
class Load:
    """The work of several concurrent clients, and the keys that are known to be durable."""

    endpoint: str
    seed: int
    fresh_per_life: int
    """Number of blocks that each client stores per run of the server; then it only reads."""
    durable: dict[bytes, None] = field(default_factory=dict)
    """Keys that `flush` acknowledged, in order."""
    stored: dict[bytes, None] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    hits: int = 0
    refused: int = 0
    sessions: set[tuple[int, int]] = field(default_factory=set)
    """Client and epoch of each session."""
    life: int = 0
    stop: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, number: int) -> None:
        """Stores new blocks, flushes most of them, and loads old ones, until the load is over."""
        rng = random.Random(f"{self.seed}:{number}")
        transport = "grpc" if number == 0 else "auto"
        count = budget = 0
        life = -1
        with Client(self.endpoint, namespace=NAMESPACE, transport=transport, timeouts=TIMEOUTS) as client:
            while not self.stop.wait(0.001):  # leaves the processor to the server
                if life != self.life:
                    life, budget = self.life, self.fresh_per_life
                if client.connected:
                    session = client._transport.session
                    self.sessions |= {(number, session.ref.epoch)} if session else set()
                try:
                    if budget > 0 and client.connected and rng.random() < 0.5:
                        size = rng.randint(1, 12)
                        keys = [key_of(count + i, rng.randrange(2), salt=f"{number}") for i in range(size)]
                        count, budget = count + size, budget - size
                        self._store(client, keys, flush=rng.random() < 0.8)
                    else:
                        self._load(client, rng)
                except KVTierError:
                    self.refused += 1

    def _store(self, client: Client, keys: list[bytes], *, flush: bool) -> None:
        with self.lock:
            self.stored.update(dict.fromkeys(keys))
        statuses = client.store(keys, [payload(key, NAMESPACE.part_bytes_of(key)) for key in keys])
        if flush:
            granted = [key for key, status in zip(keys, statuses, strict=True) if status == StoreStatus.GRANTED]
            answers = client.flush(granted, wait=1.0)
            with self.lock:
                done = (k for k, status in zip(granted, answers, strict=True) if status == DurableStatus.DURABLE)
                self.durable.update(dict.fromkeys(done))

    def _load(self, client: Client, rng: random.Random) -> None:
        with self.lock:
            known = list(self.stored)
        if not known:
            return
        keys = rng.sample(known, min(len(known), 8))
        buffers = [filled(1, NAMESPACE.part_bytes_of(key))[0] for key in keys]
        hits = client.load(keys, buffers, wait=rng.choice((0, 0.5)))
        self.wrong += [
            f"{key.hex()} in life {self.life}"
            for key, found in zip(keys[:hits], buffers, strict=False)
            if not is_payload(key, found)
        ]
        self.hits += hits


@contextlib.contextmanager
def under(load: Load, clients: int) -> Iterator[None]:
    """Runs the clients; at the end all of them must have ended without an error."""
    threads = [threading.Thread(target=load.run, args=(number,), name=f"load-{number}") for number in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        load.stop.set()
        for thread in threads:
            thread.join(60)
    assert not any(thread.is_alive() for thread in threads), "a client hangs"


def seed_of(default: int) -> int:
    """Returns the seed, from TEST_SEED or a new one, and prints it."""
    seed = int(os.environ.get("TEST_SEED", default or random.SystemRandom().randrange(1 << 32)))
    print(f"TEST_SEED={seed}")
    return seed


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("tier", "kills"),
    [
        ("lmdb", 4),
        ("disk", 4),
        pytest.param("lmdb", 50, marks=pytest.mark.slow),
        pytest.param("disk", 20, marks=pytest.mark.slow),
    ],
)
def test_sigkill_loses_no_block_that_flush_acknowledged(tmp_path: Path, tier: str, kills: int) -> None:
    """After each of many SIGKILLs every flushed block reads back bit-identical; no read is wrong.

    The CPU tier is small, so that blocks are evicted from it and promoted again all the time.
    """
    seed = seed_of(0)
    rng = random.Random(seed)
    with ServerProcess(tmp_path, region=16 * MIB, lmdb=512 * MIB, tier=tier) as server:
        load = Load(server.endpoint, seed, fresh_per_life=24)
        began = time.monotonic()
        server.start()
        with under(load, clients=4), Client(server.endpoint, namespace=NAMESPACE, transport="shm") as reader:
            for life in range(kills):
                load.life = life
                # A busy machine may take longer for this than the server lives.
                wait_until(lambda: len(load.sessions) > 2 * load.life, otherwise="clients did not reconnect")
                time.sleep(rng.uniform(0.0, 0.6))
                server.kill()
                with load.lock:
                    acknowledged = list(load.durable)
                server.start()
                read_all(reader, acknowledged)
                assert not load.wrong
            wait_until(lambda: len(load.sessions) > 2 * kills, otherwise="clients did not reconnect")
        cpu, disk = server.status().tiers
        print(
            f"{kills} kills in {time.monotonic() - began:.1f} s; {len(load.durable)} blocks durable, {load.hits} hits, "
            f"{load.refused} calls refused; last life: {cpu.evictions} evictions, {disk.hits} promotions"
        )
        assert not load.wrong
        assert len(load.durable) > kills
        assert load.hits > kills
        assert disk.healthy
        assert not disk.evictions


@pytest.mark.slow
@pytest.mark.parametrize("tier", ["lmdb", "disk"])
def test_no_wrong_bytes_while_a_small_durable_tier_evicts(tmp_path: Path, tier: str) -> None:
    """A tier on disk that evicts may lose blocks at a SIGKILL, but no read returns wrong bytes."""
    seed, kills = seed_of(0), 8
    rng = random.Random(seed)
    with ServerProcess(tmp_path, region=16 * MIB, lmdb=16 * MIB, tier=tier) as server:
        load = Load(server.endpoint, seed, fresh_per_life=3000)
        server.start()
        with under(load, clients=3):
            for life in range(kills):
                load.life = life
                if life % 2:
                    server.wait_for(lambda status: status.tiers[1].evictions)
                time.sleep(rng.uniform(0.0, 0.8))
                server.kill()
                server.start()
                assert not load.wrong
        print(f"{len(load.stored)} blocks stored, {load.hits} hits")
        assert not load.wrong
        assert load.hits
        server.wait_for(lambda status: not status.leases and not status.stores and not status.sessions)


def read_all(client: Client, keys: list[bytes]) -> None:
    """Reads all blocks; repeats until the client is connected and the CPU tier has space."""
    for _ in polls():
        try:
            return assert_serves(client, keys, step=128)
        except (AssertionError, KVTierError) as error:
            failure = error
            if "wrong bytes" in str(error):
                break
    raise failure
