"""Traces for the comparison of eviction policies: variants of a trace, and synthetic traces."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence

__all__ = ["MADE_UP", "Trace", "variants_of"]

Trace = Sequence[Sequence[int]]
"""Per request the ids of its chained blocks. Blocks with equal ids have equal prefixes."""


def variants_of(trace: Trace) -> dict[str, Trace]:
    """Returns parts of a trace, samples of its conversations, and shuffled conversations."""
    half, third = len(trace) // 2, len(trace) // 3
    return {
        "as it is": trace,
        "first half": trace[:half],
        "second half": trace[half:],
        "middle third": trace[third : 2 * third],
        "1/2 of conversations": _sampled(trace, 0.5),
        "1/4 of conversations": _sampled(trace, 0.25),
        "conversations shuffled": _shuffled(trace),
    }


def _conversations(trace: Trace) -> list[int]:
    """Numbers the conversations. Requests that share more than the first block form one."""
    last: dict[int, int] = {}
    numbers: list[int] = []
    for request, blocks in enumerate(trace):
        known = next((place for place, block in enumerate(blocks) if block not in last), len(blocks))
        numbers.append(numbers[last[blocks[known - 1]]] if known > 1 else request)
        last.update(dict.fromkeys(blocks, request))
    return numbers


def _sampled(trace: Trace, share: float) -> Trace:
    rng = random.Random(1)
    kept = [rng.random() < share for _ in trace]
    return [blocks for blocks, number in zip(trace, _conversations(trace), strict=True) if kept[number]]


def _shuffled(trace: Trace) -> Trace:
    """Moves each conversation to a random time. The pauses within it do not change."""
    rng = random.Random(2)
    starts = [rng.randrange(len(trace)) for _ in trace]
    order = [(starts[number] + request - number, request) for request, number in enumerate(_conversations(trace))]
    return [trace[request] for _, request in sorted(order)]


class _Ids:
    """Generates new block ids."""

    def __init__(self) -> None:
        self._next = 0

    def take(self, count: int) -> list[int]:
        self._next += count
        return list(range(self._next - count, self._next))


def _agents() -> Trace:
    """40 parallel agents, 3 to 40 steps each, short pauses, 30 system prompts (Zipf)."""
    rng, ids = random.Random(3), _Ids()
    prompts = [ids.take(rng.randint(4, 24)) for _ in range(30)]
    weights = [1 / (rank + 1) for rank in range(30)]
    live: list[tuple[list[int], int]] = []
    trace = []
    while len(trace) < 12_000:
        while len(live) < 40:
            live.append((rng.choices(prompts, weights)[0] + ids.take(rng.randint(1, 6)), rng.randint(3, 40)))
        chain, steps = live.pop(min(int(rng.expovariate(1 / 8)), 39))
        trace.append(chain + ids.take(1))
        if steps > 1:
            live.append((chain + ids.take(rng.randint(1, 4)), steps - 1))
    return trace


def _tools() -> Trace:
    """400 slowly changing tool prompts (Zipf). A quarter of the calls have a second turn."""
    rng, ids = random.Random(4), _Ids()
    root = ids.take(1)
    prompts = [root + ids.take(rng.randint(2, 20)) for _ in range(400)]
    weights = [1 / (rank + 1) for rank in range(400)]
    waiting: list[tuple[int, int, list[int]]] = []
    trace: list[list[int]] = []
    while len(trace) < 20_000:
        now = len(trace)
        if now % 4000 == 3999:
            for _ in range(40):
                prompts[rng.randrange(400)] = root + ids.take(rng.randint(2, 20))
        chain = heapq.heappop(waiting)[2] if waiting and waiting[0][0] <= now else rng.choices(prompts, weights)[0]
        chain = chain + ids.take(max(1, int(rng.expovariate(1 / 6))))
        trace.append(chain + ids.take(1))
        if rng.random() < 0.25:
            heapq.heappush(waiting, (now + int(rng.lognormvariate(5, 1)), now, chain))
    return trace


def _scans() -> Trace:
    """2,000 documents (Zipf), and bursts of long prompts that occur only once."""
    rng, ids = random.Random(5), _Ids()
    documents = [ids.take(rng.randint(3, 40)) for _ in range(2000)]
    weights = [(rank + 1) ** -0.9 for rank in range(2000)]
    trace: list[list[int]] = []
    while len(trace) < 12_000:
        if rng.random() < 0.02:
            trace += [ids.take(rng.randint(20, 100)) for _ in range(20)]
        else:
            trace.append(rng.choices(documents, weights)[0] + ids.take(1))
    return trace


def _loop() -> Trace:
    """400 prompts, repeated in a cycle."""
    rng, ids = random.Random(6), _Ids()
    prompts = [ids.take(rng.randint(4, 30)) for _ in range(400)]
    return [prompts[number % 400] for number in range(8000)]


MADE_UP: dict[str, Callable[[], Trace]] = {"agents": _agents, "tools": _tools, "scans": _scans, "loop": _loop}
