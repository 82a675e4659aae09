"""Discrete-event simulation of a fleet: requests, transfers, events of the router, failures."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from kvtier.tiers.secondary_tier import NamespaceId

from .host import CoreTier, CpuTier, Host, LruTier
from .router import Router, RouterIndex
from .store import SharedStore, StoreLink
from .workload import Arrival

__all__ = ["BLOCK_TOKENS", "DESIGNS", "Counters", "Fleet", "Settings"]

BLOCK_TOKENS = 512
DESIGNS = ("cpu", "shared", "peer")

_NAMESPACE = NamespaceId(bytes(32))


@dataclass(frozen=True, slots=True)
class Settings:
    """One simulated fleet. Sizes are in blocks of 512 tokens."""

    hosts: int = 1000
    design: str = "cpu"
    routing: str = "round-robin"
    policy: str = "lru"
    cpu_blocks: int = 3000
    """CPU tier of each host."""
    bytes_per_token: int = 327_680
    prefill_tokens_per_second: float = 10_000
    """Of all engines of a host."""
    nic_bytes_per_second: float = 12.5e9
    """In each direction."""
    latency_seconds: float = 0.002
    """Of one load."""
    patience_seconds: float = 2.0
    """A load that would begin later is a miss; a block that would be stored later is left out."""
    in_flight_bytes: int = 64 << 20
    """Of the stores of one host that the shared store has accepted."""
    store_bytes_per_second: float = 1e9
    """Bandwidth of the shared store per host of the fleet."""
    store_blocks: int = 1500
    """Capacity of the shared store per host of the fleet."""
    admission: str = "all"
    """Blocks that hosts write to the store: `all`, or `second_use`."""
    visible_after_seconds: float = 1.0
    ttl_seconds: float = 3600.0
    event_delay_seconds: float = 0.1
    penalty: float = 0.25
    """Known tokens that one queued token outweighs."""
    minutes_per_failure: float = 1.0
    """Time between failures in the whole fleet; 0: no failures."""
    restart_seconds: float = 30.0
    warm_up_seconds: float = 0.0
    """Start of the measurement."""
    seed: int = 1


@dataclass(slots=True)
class Counters:
    """Sums over the requests after the warm-up. Blocks, unless the name says otherwise."""

    requests: int = 0
    asked: int = 0
    cpu: int = 0
    shared: int = 0
    peer: int = 0
    computed: int = 0
    loads: int = 0
    """Transfers from the store or a peer, those included that would have begun too late."""
    slow_loads: int = 0
    """Loads that took longer than computing, or would have begun too late."""
    late_loads: int = 0
    """Loads that would have begun too late."""
    moved_bytes: float = 0.0
    written_bytes: float = 0.0
    """Part of `moved_bytes` that was written to the store."""
    writes_left_out: int = 0
    events: int = 0
    keys: int = 0
    first_token_seconds: list[float] = field(default_factory=list)


class Fleet:
    """Hosts, router and store. `run` serves requests in the order of their arrival."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        count = settings.hosts
        make: Callable[[], CpuTier] = (
            (lambda: LruTier(settings.cpu_blocks))
            if settings.policy == "lru"
            else (lambda: CoreTier(settings.policy, settings.cpu_blocks))
        )
        self.hosts = [Host(make(), settings.nic_bytes_per_second) for _ in range(count)]
        self.store = SharedStore(
            settings.store_blocks * count,
            StoreLink(settings.store_bytes_per_second * count, settings.in_flight_bytes * count),
            visible_after_seconds=settings.visible_after_seconds,
            ttl_seconds=settings.ttl_seconds,
        )
        self.index = RouterIndex(settings.event_delay_seconds)
        self.router = Router(settings.routing, self.hosts, self.index, settings.penalty, settings.seed)
        self.counters = Counters()
        self.received_bytes = [0.0] * count
        """Per host, after the warm-up."""
        self.computed_blocks = [0] * count
        """As `received_bytes`."""
        self.failures = 0
        self.ended_at = 0.0
        self._indexed = settings.design == "peer" or settings.routing == "events"
        self._block_bytes = settings.bytes_per_token * BLOCK_TOKENS
        self._blocks_per_second = settings.prefill_tokens_per_second / BLOCK_TOKENS
        self._random = random.Random(settings.seed + 1)
        interval = settings.minutes_per_failure * 60
        self._next_failure = interval or math.inf

    def run(self, arrivals: Iterable[Arrival]) -> None:
        warm = self.settings.warm_up_seconds <= 0
        for arrival in arrivals:
            now = arrival.time
            if not warm and now >= self.settings.warm_up_seconds:
                warm = True
                self._start_measuring()
            while now >= self._next_failure:
                self._fail_one(self._next_failure)
            if self._indexed:
                self.index.deliver(now)
            self._serve(arrival, now)
            self.ended_at = now
        self.counters.events, self.counters.keys = self.index.events, self.index.keys

    def _start_measuring(self) -> None:
        self.counters = Counters()
        self.received_bytes = [0.0] * len(self.hosts)
        self.computed_blocks = [0] * len(self.hosts)
        self.index.events = self.index.keys = 0

    def _serve(self, arrival: Arrival, now: float) -> None:
        settings, counters = self.settings, self.counters
        number = self.router.choose(arrival, now, self._blocks_per_second)
        host = self.hosts[number]
        keys, lengths = arrival.keys, arrival.lengths
        asked = sum(lengths)
        local = host.tier.prefix(keys, lengths, now)
        loaded, transfer = 0, 0.0
        if local < asked and settings.design != "cpu":
            find = self._from_store if settings.design == "shared" else self._from_peer
            loaded, transfer = find(number, arrival, local, now)
        changes = host.tier.use(keys, lengths)
        if self._indexed:
            self.index.publish(now, number, changes)
        if settings.design == "shared":
            self._write(host, arrival, now)
        computed = asked - local - loaded
        wait = max(0.0, host.busy_until - now)
        compute = computed / self._blocks_per_second
        host.busy_until = now + wait + compute
        self.computed_blocks[number] += computed
        counters.requests += 1
        counters.asked += asked
        counters.cpu += local
        counters.computed += computed
        counters.first_token_seconds.append(max(wait, transfer) + compute)

    def _from_store(self, number: int, arrival: Arrival, local: int, now: float) -> tuple[int, float]:
        """Loads what the CPU tier lacks; returns the number of blocks and the seconds."""
        skipped, before = _place(arrival.lengths, local)
        found = self.store.prefix(arrival.keys, skipped, now)
        blocks = sum(arrival.lengths[skipped : skipped + found]) - (local - before)
        if blocks <= 0:
            return 0, 0.0
        host = self.hosts[number]
        if max(self.store.link.load_wait(now), host.incoming.wait(now)) > self.settings.patience_seconds:
            self._late()
            return 0, 0.0
        nbytes = blocks * self._block_bytes
        end = max(self.store.link.load(now, nbytes), host.incoming.send(now, nbytes))
        self.store.loaded(arrival.keys[skipped : skipped + found], now)
        self.counters.shared += blocks
        return blocks, self._count_load(number, blocks, end - now)

    def _from_peer(self, number: int, arrival: Arrival, local: int, now: float) -> tuple[int, float]:
        """As `_from_store`, from the host that the router names."""
        source = self.index.source(arrival.keys, self._random.random())
        if source is None or source == number:
            return 0, 0.0
        peer, host = self.hosts[source], self.hosts[number]
        there = peer.tier.prefix(arrival.keys, arrival.lengths, now)
        blocks = there - local
        if blocks <= 0:
            return 0, 0.0
        if max(peer.outgoing.wait(now), host.incoming.wait(now)) > self.settings.patience_seconds:
            self._late()
            return 0, 0.0
        nbytes = blocks * self._block_bytes
        end = max(peer.outgoing.send(now, nbytes), host.incoming.send(now, nbytes))
        whole, _ = _place(arrival.lengths, there)
        peer.tier.use(arrival.keys[:whole], arrival.lengths[:whole])
        self.counters.peer += blocks
        return blocks, self._count_load(number, blocks, end - now)

    def _count_load(self, number: int, blocks: int, seconds: float) -> float:
        """Counts a transfer; returns its time with the latency."""
        seconds += self.settings.latency_seconds
        nbytes = blocks * self._block_bytes
        self.counters.loads += 1
        self.counters.slow_loads += seconds > blocks / self._blocks_per_second
        self.counters.moved_bytes += nbytes
        self.received_bytes[number] += nbytes
        return seconds

    def _late(self) -> None:
        self.counters.loads += 1
        self.counters.late_loads += 1
        self.counters.slow_loads += 1

    def _write(self, host: Host, arrival: Arrival, now: float) -> None:
        """Writes the segments that the store lacks, as far as its queue permits."""
        settings, store = self.settings, self.store
        for key, length in zip(reversed(arrival.keys), reversed(arrival.lengths), strict=True):
            if key in store:
                continue
            if settings.admission == "second_use" and not host.admission.admits(
                (_NAMESPACE, key.to_bytes(8, "big")), now
            ):
                continue
            if max(store.link.store_wait(now), host.outgoing.wait(now)) > settings.patience_seconds:
                self.counters.writes_left_out += length
                continue
            nbytes = length * self._block_bytes
            end = max(store.link.store(now, nbytes), host.outgoing.send(now, nbytes))
            store.store(key, length, end)
            self.counters.moved_bytes += nbytes
            self.counters.written_bytes += nbytes

    def _fail_one(self, now: float) -> None:
        self._next_failure = now + self.settings.minutes_per_failure * 60
        number = int(self._random.random() * len(self.hosts))
        changes = self.hosts[number].fail(now + self.settings.restart_seconds)
        if self._indexed:
            self.index.forget(number, changes)
        self.failures += 1


def _place(lengths: Iterable[int], blocks: int) -> tuple[int, int]:
    """Returns how many whole segments the first `blocks` blocks are, and the blocks of these."""
    place = before = 0
    for length in lengths:
        if before + length > blocks:
            break
        place += 1
        before += length
    return place, before
