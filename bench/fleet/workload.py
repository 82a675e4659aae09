"""Workload of a fleet: copies of the sessions of a trace, with Poisson arrivals.

The blocks of a trace are grouped into segments. A segment is a run of blocks that every request
uses as a whole, so the simulation handles segments instead of blocks and loses nothing.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from ..traces import Trace

__all__ = ["Arrival", "SessionTrace", "arrivals_of"]

SHARED_BY = 3
"""Least number of sessions that use a shared prompt. All copies of the sessions have it."""


class Arrival(NamedTuple):
    """A request of one copy of a session."""

    time: float
    user: int
    """Identifies the copy of the session."""
    keys: Sequence[int]
    """The segments of the request, head first."""
    lengths: Sequence[int]
    """Blocks of each segment."""


class SessionTrace:
    """The sessions of a trace. Times are in seconds."""

    def __init__(self, trace: Trace, times: Sequence[float]) -> None:
        self.times = times
        self.segments = 0
        """Number of distinct segments."""
        self.paths, self.lengths = self._segmented(trace)
        sessions = _sessions(trace)
        self.members: list[list[int]] = [[] for _ in range(max(sessions, default=-1) + 1)]
        """Per session the numbers of its requests."""
        for request, session in enumerate(sessions):
            self.members[session].append(request)
        self.shared = self._shared(sessions)
        """Per request the number of its leading segments that belong to shared prompts."""
        self.blocks = sum(map(sum, self.lengths))
        """Blocks of all requests."""
        self.known = self.blocks - len({block for blocks in trace for block in blocks})
        """Blocks that an earlier request has used: the hits of an unlimited cache."""

    def original(self) -> Iterator[Arrival]:
        """Yields the requests of the trace as they are."""
        for request, (keys, lengths) in enumerate(zip(self.paths, self.lengths, strict=True)):
            yield Arrival(self.times[request], 0, keys, lengths)

    def _segmented(self, trace: Trace) -> tuple[list[list[int]], list[list[int]]]:
        following: dict[int, int] = {}
        heads: set[int] = set()
        for blocks in trace:
            heads.add(blocks[0])
            for block, successor in pairwise(blocks):
                if following.setdefault(block, successor) != successor:
                    heads.update((following[block], successor))
        ends = {blocks[-1] for blocks in trace}
        heads.update(following[end] for end in ends if end in following)
        numbers: dict[int, int] = {}
        paths, lengths = [], []
        for blocks in trace:
            starts = [place for place, block in enumerate(blocks) if block in heads]
            paths.append([numbers.setdefault(blocks[place], len(numbers)) for place in starts])
            lengths.append([stop - start for start, stop in zip(starts, [*starts[1:], len(blocks)], strict=True)])
        self.segments = len(numbers)
        return paths, lengths

    def _shared(self, sessions: Sequence[int]) -> list[int]:
        pairs = {(key, session) for path, session in zip(self.paths, sessions, strict=True) for key in path}
        users = Counter(key for key, _ in pairs)
        return [
            next((place for place, key in enumerate(path) if users[key] < SHARED_BY), len(path)) for path in self.paths
        ]


def _sessions(trace: Trace) -> list[int]:
    """Numbers the sessions. A request continues a request if it begins with at least half of it."""
    last: dict[int, int] = {}
    numbers: list[int] = []
    count = 0
    for request, blocks in enumerate(trace):
        known = next((place for place, block in enumerate(blocks) if block not in last), len(blocks))
        earlier = last[blocks[known - 1]] if known > 1 else -1
        if known > 1 and 2 * known >= len(trace[earlier]):
            numbers.append(numbers[earlier])
        else:
            numbers.append(count)
            count += 1
        last.update(dict.fromkeys(blocks, request))
    return numbers


def arrivals_of(trace: SessionTrace, requests_per_second: float, seconds: float, seed: int) -> Iterator[Arrival]:
    """Yields the requests of copies of the sessions in the order of time, for `seconds`.

    Copies start at random times, also before 0, so the number of live sessions is stationary.
    Requests before 0 are left out. Pauses within a session are those of the trace.
    """
    rng = random.Random(seed)
    rate = requests_per_second / max(1, len(trace.paths))
    queue: list[tuple[float, int, int, int]] = []
    copies = 0
    for session, members in enumerate(trace.members):
        first = trace.times[members[0]]
        span = trace.times[members[-1]] - first
        for _ in range(_poisson(rng, rate * (span + seconds))):
            start = rng.uniform(-span, seconds) - first
            place = next((at for at, request in enumerate(members) if start + trace.times[request] >= 0), None)
            if place is not None:
                queue.append((start + trace.times[members[place]], copies, session, place))
                copies += 1
    heapq.heapify(queue)
    while queue and queue[0][0] < seconds:
        time, copy, session, place = queue[0]
        members = trace.members[session]
        request = members[place]
        path, shared = trace.paths[request], trace.shared[request]
        offset = (copy + 1) * trace.segments
        yield Arrival(time, copy, path[:shared] + [key + offset for key in path[shared:]], trace.lengths[request])
        if place + 1 < len(members):
            pause = trace.times[members[place + 1]] - trace.times[request]
            heapq.heapreplace(queue, (time + pause, copy, session, place + 1))
        else:
            heapq.heappop(queue)


def _poisson(rng: random.Random, mean: float) -> int:
    """A Poisson number: arrivals at rate 1 before the time `mean`."""
    if mean > 500:
        return max(0, round(rng.gauss(mean, math.sqrt(mean))))
    count, passed = 0, rng.expovariate(1)
    while passed < mean:
        count += 1
        passed += rng.expovariate(1)
    return count
