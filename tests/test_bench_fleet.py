"""The simulation of a fleet loses no block, exceeds no limit, and agrees with the core."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from bench.fleet.host import LruTier
from bench.fleet.router import Router, RouterIndex
from bench.fleet.simulation import DESIGNS, Fleet, Settings
from bench.fleet.store import SharedStore, StoreLink
from bench.fleet.workload import Arrival, SessionTrace, arrivals_of
from bench.policies import Replay

ROOT = Path(__file__).resolve().parent.parent
ROUTINGS = ("round-robin", "sticky", "events")


def conversations(sessions: int = 40, seed: int = 1) -> tuple[list[list[int]], list[float]]:
    """Sessions of up to six turns with a system prompt of three blocks. A turn replaces a block."""
    rng = random.Random(seed)
    fresh = iter(range(10, 10**6))
    timed: list[tuple[float, list[int]]] = []
    for _ in range(sessions):
        now, chain = rng.uniform(0, 60), [1, 2, 3]
        for _ in range(rng.randint(1, 6)):
            chain = chain + [next(fresh) for _ in range(rng.randint(4, 8))]
            timed.append((now, [*chain, next(fresh)]))
            now += rng.uniform(1, 20)
    timed.sort()
    return [blocks for _, blocks in timed], [time for time, _ in timed]


TRACE, TIMES = conversations()
SESSIONS = SessionTrace(TRACE, TIMES)


def served(**settings: object) -> Fleet:
    """A small fleet with little memory and bandwidth, after two minutes."""
    small = {
        "hosts": 4,
        "cpu_blocks": 60,
        "bytes_per_token": 1 << 20,
        "store_blocks": 30,
        "minutes_per_failure": 0.5,
        "restart_seconds": 5.0,
    }
    fleet = Fleet(Settings(**{**small, **settings}))  # type: ignore[arg-type]  # the names are those of the fields
    fleet.run(arrivals_of(SESSIONS, 6.0, 120.0, seed=3))
    return fleet


@pytest.mark.parametrize("policy", ["lru", "forecast"])
@pytest.mark.parametrize("capacity", [20, 60, 1000])
def test_one_host_without_failures_is_a_replay(policy: str, capacity: int) -> None:
    fleet = Fleet(Settings(hosts=1, policy=policy, cpu_blocks=capacity, minutes_per_failure=0))
    fleet.run(SESSIONS.original())
    replay = Replay(policy, capacity)
    replay.run(TRACE, TIMES)
    assert (fleet.counters.cpu, fleet.counters.asked) == (replay.hits, replay.asked)
    assert 0 < replay.hits < replay.asked


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("design", DESIGNS)
def test_blocks_are_conserved_and_limits_hold(design: str, routing: str) -> None:
    """Each asked block has one source. No tier, store or link exceeds its limit."""
    fleet = served(design=design, routing=routing)
    counters, settings = fleet.counters, fleet.settings
    assert counters.requests == len(counters.first_token_seconds) > 100
    assert counters.asked == counters.cpu + counters.shared + counters.peer + counters.computed
    assert (counters.shared > 0) == (design == "shared")
    assert (counters.peer > 0) == (design == "peer")
    assert fleet.failures >= 3
    assert sum(fleet.computed_blocks) == counters.computed
    block_bytes = settings.bytes_per_token * 512
    assert counters.moved_bytes == (counters.shared + counters.peer) * block_bytes + counters.written_bytes
    for host in fleet.hosts:
        assert isinstance(host.tier, LruTier)
        assert host.tier.used == sum(host.tier.held.values()) <= settings.cpu_blocks
        for link in (host.incoming, host.outgoing):
            assert link.sent_bytes <= settings.nic_bytes_per_second * link.free_at * (1 + 1e-9)
    store = fleet.store.link
    assert store.moved_bytes <= settings.store_bytes_per_second * settings.hosts * store.free_at * (1 + 1e-9)
    assert fleet.store.used <= settings.store_blocks * settings.hosts


def test_tier_never_holds_more_than_its_capacity() -> None:
    """After each request, and the changes say what it holds."""
    tier, known = LruTier(25), dict[int, int]()
    for arrival in SESSIONS.original():
        for change in tier.use(arrival.keys, arrival.lengths):
            known[change.key] = known.get(change.key, 0) + change.stored
            assert known[change.key] == change.length
        assert sum(known.values()) == tier.used <= 25
    assert {key: length for key, length in known.items() if length} == tier.held
    tier.clear()
    assert tier.used == 0


@pytest.mark.parametrize("design", ["cpu", "peer"])
def test_index_of_the_router_equals_the_tiers(design: str) -> None:
    """When all events have arrived, also after failures."""
    fleet = served(design=design, routing="events", event_delay_seconds=2.0)
    fleet.index.deliver(float("inf"))
    held = {
        (key, number): length
        for number, host in enumerate(fleet.hosts)
        if isinstance(host.tier, LruTier)
        for key, length in host.tier.held.items()
    }
    assert held == {(key, host): size for key, hosts in fleet.index.holders.items() for host, size in hosts.items()}
    assert fleet.index.placements == sum(held.values())


def test_same_seed_same_result() -> None:
    first, second = (served(design="peer", routing="events") for _ in range(2))
    assert first.counters == second.counters
    assert first.counters != served(design="peer", routing="events", seed=2).counters


def test_sessions_and_shared_prompts() -> None:
    """Copies of a session have blocks of their own, except the system prompt."""
    assert len(SESSIONS.members) == 40
    assert all(shared == 1 for shared in SESSIONS.shared)
    assert all(lengths[0] == 3 for lengths in SESSIONS.lengths)
    arrivals = list(arrivals_of(SESSIONS, 5.0, 200.0, seed=1))
    assert 0.7 < len(arrivals) / 1000 < 1.3
    assert [each.time for each in arrivals] == sorted(each.time for each in arrivals)
    users: dict[int, set[int]] = {}
    for each in arrivals:
        for key in each.keys[1:]:
            users.setdefault(key, set()).add(each.user)
    assert len({each.keys[0] for each in arrivals}) == 1
    assert all(len(each) == 1 for each in users.values())


def test_store_shows_blocks_late_and_forgets_unused_ones() -> None:
    store = SharedStore(10, StoreLink(100.0, 0.0), visible_after_seconds=1.0, ttl_seconds=50.0)
    store.store(1, 4, now=0.0)
    assert store.prefix([1], 0, now=0.5) == 0
    assert store.prefix([1, 2], 0, now=1.0) == 1
    store.loaded([1], now=40.0)
    assert store.prefix([1], 0, now=80.0) == 1
    assert store.prefix([1], 0, now=91.0) == 0
    store.store(2, 8, now=91.0)
    assert (1 in store, 2 in store, store.used) == (False, True, 8)


def test_store_link_serves_loads_first() -> None:
    """A load waits for earlier loads, and for stores only up to the bytes in flight."""
    link = StoreLink(100.0, in_flight_bytes=50.0)
    assert link.store(0.0, 1000) == 10.0
    assert link.load(0.0, 100) == 1.5
    assert link.load(0.0, 100) == 2.5
    assert link.store_wait(0.0) == 12.0


def test_router_prefers_the_longest_prefix_unless_the_host_is_busy() -> None:
    fleet = Fleet(Settings(hosts=3, cpu_blocks=100, event_delay_seconds=1.0, minutes_per_failure=0))
    index = RouterIndex(delay_seconds=1.0)
    router = Router("events", fleet.hosts, index, penalty=1.0, seed=1)
    index.publish(0.0, 2, fleet.hosts[2].tier.use([7, 8], [4, 4]))
    index.deliver(0.5)
    assert index.source([7, 8], 0.0) is None
    index.deliver(1.0)
    assert index.source([7, 8, 9], 0.0) == 2
    arrival = Arrival(1.0, 0, [7, 8, 9], [4, 4, 1])
    assert router.choose(arrival, 1.0, blocks_per_second=10.0) == 2
    fleet.hosts[2].busy_until = 3.0
    assert router.choose(arrival, 1.0, blocks_per_second=10.0) != 2


@pytest.mark.slow
def test_command_writes_rows(tmp_path: Path) -> None:
    source, path = tmp_path / "trace.jsonl", tmp_path / "rows.json"
    trace, times = conversations(6)
    lines = [
        {"timestamp": time * 1000, "hash_ids": blocks, "input_length": 512 * len(blocks)}
        for blocks, time in zip(trace, times, strict=True)
    ]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = [sys.executable, "-m", "bench.fleet", "--trace", str(source), "--json", str(path)]
    command += ["--hosts", "2", "--seconds", "4", "--jobs", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    head, *rows = json.loads(path.read_text())
    assert head["index_bytes_per_key"] > 100
    assert {row["part"] for row in rows} >= {"designs", "network", "store", "failures", "load", "policy"}
    for row in rows:
        assert row["hits"] == pytest.approx(row["cpu"] + row["shared"] + row["peer"], abs=2e-3)
        assert row["requests"] > 0
