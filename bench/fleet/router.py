"""Router of a simulated fleet: three ways to choose a host, and the index that events feed."""

from __future__ import annotations

import random
import sys
import time
from collections import deque
from collections.abc import Sequence
from itertools import islice

from .host import Change, Host
from .workload import Arrival

__all__ = ["ROUTINGS", "Router", "RouterIndex", "index_bytes_per_key", "index_keys_per_second"]

ROUTINGS = ("round-robin", "sticky", "events")
CANDIDATES = 16
"""Holders of one segment that the router considers."""
SAMPLED = 8
"""Random hosts that the router considers in addition."""


class RouterIndex:
    """Which host holds which segments, as far as events have arrived. Events are delayed."""

    def __init__(self, delay_seconds: float) -> None:
        self._delay = delay_seconds
        self._pending: deque[tuple[float, int, list[Change]]] = deque()
        self.holders: dict[int, dict[int, int]] = {}
        """Per segment the hosts that hold it, each with the number of leading blocks."""
        self.events = self.keys = 0
        """Events of one or more consecutive blocks, and blocks in these events."""
        self.placements = self.most_placements = 0
        """Pairs of a block and a host: now, and the maximum."""

    def publish(self, now: float, host: int, changes: list[Change]) -> None:
        """Accepts the changes that one request has caused on a host."""
        if not changes:
            return
        removed = sum(change.stored < 0 for change in changes)
        self.events += removed + (removed < len(changes))
        self.keys += sum(abs(change.stored) for change in changes)
        self._pending.append((now + self._delay, host, changes))

    def deliver(self, now: float) -> None:
        """Applies the events that have arrived."""
        pending = self._pending
        while pending and pending[0][0] <= now:
            _, host, changes = pending.popleft()
            self._apply(host, changes)

    def forget(self, host: int, changes: list[Change]) -> None:
        """Removes the blocks of a host that has failed. Events under way count as delivered."""
        self.deliver(float("inf"))
        self._apply(host, changes)

    def distinct_keys(self) -> int:
        """Returns the number of distinct blocks."""
        return sum(max(hosts.values()) for hosts in self.holders.values())

    def matches(
        self, keys: Sequence[int], lengths: Sequence[int], sampled: Sequence[int], choice: float
    ) -> dict[int, int]:
        """Returns how many leading blocks each candidate holds, for example each sampled host.

        `choice` in [0, 1) selects the candidates if a segment has more holders than are considered.
        """
        found: dict[int, int] = {}
        end = sum(lengths)
        for key, length in zip(reversed(keys), reversed(lengths), strict=True):
            end -= length
            hosts = self.holders.get(key)
            if hosts is None:
                continue
            if len(hosts) > CANDIDATES:
                for host in sampled:
                    if host in hosts and host not in found:
                        found[host] = end + hosts[host]
            if len(found) < CANDIDATES:
                start = int(choice * max(0, len(hosts) - CANDIDATES + 1))
                for host in islice(hosts, start, start + CANDIDATES):
                    if host not in found:
                        found[host] = end + hosts[host]
        for host in sampled:
            found.setdefault(host, 0)
        return found

    def source(self, keys: Sequence[int], choice: float) -> int | None:
        """Returns a host with the longest prefix; `choice` in [0, 1) selects one of several."""
        for key in reversed(keys):
            hosts = self.holders.get(key)
            if hosts:
                return next(islice(hosts, int(choice * len(hosts)), None))
        return None

    def _apply(self, host: int, changes: list[Change]) -> None:
        holders = self.holders
        for key, length, stored in changes:
            self.placements += stored
            if length:
                holders.setdefault(key, {})[host] = length
            else:
                hosts = holders[key]
                del hosts[host]
                if not hosts:
                    del holders[key]
        self.most_placements = max(self.most_placements, self.placements)


class Router:
    """Chooses the host of each request.

    With `events` the router chooses the host with the highest number of known leading tokens, minus
    `penalty` times the tokens that the engines of the host have still to compute.
    """

    def __init__(self, routing: str, hosts: Sequence[Host], index: RouterIndex, penalty: float, seed: int) -> None:
        self._routing = routing
        self._hosts = hosts
        self._index = index
        self._penalty = penalty
        self._random = random.Random(seed)
        self._turn = 0

    def choose(self, arrival: Arrival, now: float, blocks_per_second: float) -> int:
        hosts, count = self._hosts, len(self._hosts)
        if self._routing == "events" and count > 1:
            sampled = [int(self._random.random() * count) for _ in range(SAMPLED)]
            best, highest = sampled[0], float("-inf")
            weight = self._penalty * blocks_per_second
            choice = self._random.random()
            for host, blocks in self._index.matches(arrival.keys, arrival.lengths, sampled, choice).items():
                queue = hosts[host].busy_until - now
                score = blocks - weight * queue if queue > 0 else float(blocks)
                if score > highest and hosts[host].up_at <= now:
                    best, highest = host, score
            return best
        if self._routing == "sticky":
            chosen = arrival.user * 2654435761 % 2**32 * count >> 32
        else:
            chosen = self._turn % count
            self._turn += 1
        for step in range(count):
            if hosts[(chosen + step) % count].up_at <= now:
                return (chosen + step) % count
        return chosen


def index_bytes_per_key(holders: int, keys: int = 100_000) -> float:
    """Measures a dict of keys of 16 bytes, each with `holders` hosts, in bytes per key."""
    index = {number.to_bytes(16, "big"): dict.fromkeys(range(holders), 1) for number in range(keys)}
    inner = sum(sys.getsizeof(name) + sys.getsizeof(hosts) for name, hosts in index.items())
    return (sys.getsizeof(index) + inner) / keys


def index_keys_per_second(keys: int = 200_000) -> float:
    """Measures how many stored and removed keys one thread applies per second of processor time."""
    index = RouterIndex(0.0)
    for key in range(keys):
        index.publish(0.0, key % 100, [Change(key, 1, 1)])
    for key in range(keys):
        index.publish(0.0, key % 100, [Change(key, 0, -1)])
    started = time.process_time()
    index.deliver(0.0)
    return 2 * keys / max(1e-9, time.process_time() - started)
