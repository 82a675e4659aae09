"""Block runs, request chains, rank buckets and clock: data structures of the `forecast` policy."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from itertools import count, islice
from typing import Generic

from .policy import T
from .reuse_model import BINS, Kind

__all__ = ["BlockRun", "RankBucket", "RequestChain", "StaleChains", "UseClock", "children_first", "end_of_whole_run"]

_WINDOW = 1 << 17
"""After this many block uses, the rate of earlier uses counts half."""

_CALIBRATION = 1 << 13
"""The scale is fixed after this many block uses, so that it does not follow the load."""
_TOLERANCE = 16
"""The scale changes again if the rate has changed by more than this factor."""
_MAX_PASSES = 16
"""Limit of passes of ended requests. The runs of further ones keep the kind that they have."""
_USE_SHARE = 0.1
"""Part of the clock that counts uses, so that uses within one tick of a coarse clock have ages."""


class RequestChain(Generic[T]):
    """The blocks of one request, as runs in chain order, and the turn of the conversation."""

    __slots__ = (
        "last_block",
        "last_use",
        "length",
        "matched_length",
        "new_run",
        "pause",
        "runs",
        "source",
        "tail",
        "touched",
        "turn",
    )

    def __init__(self) -> None:
        self.last_use = 0.0
        """Clock of the request's last use."""
        self.length = 0
        self.matched_length = 0
        """Number of leading blocks up to the last block that an earlier request had used."""
        self.turn = 0
        """Turn of the conversation: number of earlier requests that this one continues."""
        self.pause = 0.0
        """Mean pause between the turns of the conversation; 0 if unknown."""
        self.runs: dict[BlockRun[T], None] = {}
        """The runs that have blocks or ghosts, until the request ends."""
        self.new_run: BlockRun[T] | None = None
        """The run of blocks that no earlier request had used, except the last block."""
        self.last_block: BlockRun[T] | None = None
        """A run of one block: the last block, which may be partly filled."""
        self.tail: BlockRun[T] | None = None
        """The run of the blocks that the request has used last."""
        self.source: BlockRun[T] | None = None
        """The run that had the blocks of `tail` before. Its next blocks extend `tail`."""
        self.touched: dict[BlockRun[T], None] = {}
        """The runs with new blocks since the last refresh."""

    @property
    def end_of_tail(self) -> int:
        """Position behind the last block of `tail`; 0 if `tail` has no blocks of this chain."""
        tail = self.tail
        return tail.start + len(tail.items) if tail is not None and tail.chain is self and tail.items else 0

    def attach(self, run: BlockRun[T]) -> None:
        """Appends a run, and sets the run that it follows in the prompt."""
        self.runs[run] = self.touched[run] = None
        if self.tail is not None and self.tail.items:
            run.follow(self.tail)
        self.tail = run

    def close(self) -> None:
        """Drops the runs when the request has ended, to break reference cycles."""
        self.runs, self.touched = {}, {}
        self.new_run = self.last_block = self.tail = self.source = None


class BlockRun(Generic[T]):
    """Consecutive blocks of one request with the same history: the unit of ranking."""

    __slots__ = (
        "at_risk",
        "bin",
        "bucket",
        "chain",
        "children",
        "due",
        "ghosts",
        "items",
        "kind",
        "parent",
        "pause",
        "places",
        "schedule",
        "start",
        "used_at",
    )

    def __init__(self, chain: RequestChain[T], items: list[T], start: int, pause: float, kind: Kind) -> None:
        self.chain = chain
        self.items = items
        """The resident blocks, head first."""
        self.places: dict[T, int] | None = None
        """Ascending number per item, from the first search for an item that is not the tail on."""
        self.start = start
        """Position of the first item in the chain."""
        self.pause = pause
        """Mean pause between uses of the blocks, in units of the clock; 0 if unknown."""
        self.kind = kind
        self.bin = 0
        self.used_at = 0.0
        """Clock of the use from which `bin` counts the age."""
        self.bucket: RankBucket[T] | None = None
        """The bucket of the run; None while the run has no items."""
        self.due = 0.0
        """Clock at which the run leaves its bin."""
        self.schedule: OrderedDict[BlockRun[T], None] | None = None
        """Where the run waits until it leaves its bin; None if its age is not followed."""
        self.at_risk = len(items)
        """Number of resident and evicted blocks without a later use (population at risk)."""
        self.ghosts = 0
        """Number of evicted blocks of the run that left a ghost."""
        self.parent: BlockRun[T] | None = None
        """The run before this one in the prompt; None if it has no items or is unknown."""
        self.children: dict[BlockRun[T], None] = {}

    def extend(self, items: Sequence[T]) -> None:
        if self.places is not None:
            first = self.places[self.items[-1]] + 1 if self.items else 0
            self.places.update(zip(items, count(first), strict=False))
        self.items += items
        self.at_risk += len(items)

    def clear(self) -> None:
        self.items, self.places, self.at_risk = [], None, 0

    def index(self, item: T) -> int:
        """Returns the index of an item of the run.

        A search in the list would compare all items of a prompt, once for each one that leaves it.
        """
        if self.items[-1] is item:
            return len(self.items) - 1
        if self.places is None:
            self.places = dict(zip(self.items, count(), strict=False))
        return bisect_left(self.items, self.places[item], key=self.places.__getitem__)

    def remove_slice(self, start: int, end: int) -> None:
        if self.places is not None:
            for item in self.items[start:end]:
                del self.places[item]
        del self.items[start:end]

    def remove_all(self, items: list[T]) -> None:
        """Removes items of the run: consecutive ones at once, others with a copy of the list."""
        start = 0 if self.items[0] is items[0] else self.index(items[0])
        if self.items[start : start + len(items)] == items:
            self.remove_slice(start, start + len(items))
            return
        taken = set(items)
        self.items = [item for item in self.items if item not in taken]
        if self.places is not None:
            for item in taken:
                del self.places[item]

    def follow(self, parent: BlockRun[T] | None) -> None:
        """Sets the parent."""
        if parent is self or parent is self.parent:
            return
        if self.parent is not None:
            del self.parent.children[self]
        self.parent = parent
        if parent is not None:
            parent.children[self] = None

    def restart_age(self) -> None:
        """Sets the bin to 0 if the request was used after the use from which the bin counts."""
        if self.used_at != self.chain.last_use:
            self.used_at, self.bin = self.chain.last_use, 0

    def replace_by(self, other: BlockRun[T] | None) -> None:
        """Removes a run without items from the tree of runs. `other` gets its children."""
        for child in list(self.children):
            child.follow(other)
        self.follow(None)


class StaleChains(Generic[T]):
    """Long chains that were used, and whose runs are not all refreshed yet.

    A pass goes over all runs of a chain, some at a time. If the chain is used meanwhile, another
    pass follows, because its turn and its length have changed.
    """

    def __init__(self) -> None:
        self._waiting: dict[RequestChain[T], None] = {}
        """Chains of open requests that were used after their last pass began."""
        self._passes: dict[RequestChain[T], Iterator[BlockRun[T]]] = {}
        """The runs that are left of each pass, the first pass first."""

    def used(self, chain: RequestChain[T]) -> None:
        self._waiting[chain] = None

    def closed(self, chain: RequestChain[T]) -> None:
        """Begins the last pass of a chain that is about to be closed."""
        if chain in self._waiting and (chain in self._passes or len(self._passes) < _MAX_PASSES):
            self._begin(chain)
        self._waiting.pop(chain, None)

    def take(self, most: int) -> list[BlockRun[T]]:
        """Examines up to `most` runs; returns those of them that are to be refreshed."""
        taken: list[BlockRun[T]] = []
        while most > 0 and (self._passes or self._waiting):
            if not self._passes:
                self._begin(next(iter(self._waiting)))
            chain, left = next(iter(self._passes.items()))
            runs = list(islice(left, most))
            most -= len(runs)
            taken += (run for run in runs if run.chain is chain)
            if not runs:
                del self._passes[chain]
        return taken

    def _begin(self, chain: RequestChain[T]) -> None:
        """Begins a pass over all runs except the last block, whose last use has refreshed it."""
        self._waiting.pop(chain, None)
        runs = list(chain.runs)
        if chain.last_block in chain.runs:
            runs.remove(chain.last_block)
        self._passes[chain] = iter(runs)


class RankBucket(Generic[T]):
    """Runs of one kind and one age bin, about in the order of last use; all have one value."""

    __slots__ = ("bin", "kind", "rank", "runs")

    def __init__(self, kind: Kind, number: int, serial: int) -> None:
        self.kind = kind
        self.bin = number
        self.runs: OrderedDict[BlockRun[T], None] = OrderedDict()
        self.rank = (0.0, serial)
        """Value of the runs, and a serial number that makes ranks unique."""

    def in_order(self) -> Iterator[BlockRun[T]]:
        """Yields the oldest run first, or the youngest first if the value rises with age."""
        rising = self.bin + 1 < BINS and self.kind.values[self.bin + 1] > self.kind.values[self.bin]
        return reversed(self.runs) if rising else iter(self.runs)


def end_of_whole_run(items: Sequence[T], start: int, run: BlockRun[T] | None) -> int:
    """Returns where `run` ends in `items` if `items` has all of it from `start` on; otherwise 0."""
    if run is None or not run.items:
        return 0
    end = start + len(run.items)
    # The last item is compared first, so that alternating runs cost one comparison each.
    if end > len(items) or items[end - 1] is not run.items[-1] or items[start:end] != run.items:
        return 0
    return end


def children_first(runs: Iterable[BlockRun[T]]) -> Iterator[BlockRun[T]]:
    """Yields each run once, in the given order, but a run after all runs that follow it."""
    seen: set[BlockRun[T]] = set()
    for run in runs:
        if run in seen:
            continue
        seen.add(run)
        path = [(run, iter(run.children))]
        while path:
            last, children = path[-1]
            child = next((child for child in children if child not in seen), None)
            if child is None:
                path.pop()
                yield last
            else:
                seen.add(child)
                path.append((child, iter(child.children)))


class UseClock:
    """Time, scaled so that it advances by about one per block use.

    A tenth of it counts block uses instead of time. The scale makes the policy independent of the
    unit and of the speed of a workload. If the caller reports no time, each block use advances the
    clock by one.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._time: float | None = None
        self._seconds = 0.0
        self._uses = 0
        self._calibrated = 0
        self._rate = 1.0

    def advance(self, uses: int, time: float) -> None:
        """Counts block uses at a time in seconds."""
        passed = 0.0 if self._time is None else max(0.0, time - self._time)
        self._time = time
        self._seconds += passed
        self._uses += uses
        if not self._seconds:
            self.now += uses
            return
        rate = self._uses / self._seconds
        if self._calibrated < _CALIBRATION or not self._rate / _TOLERANCE < rate < self._rate * _TOLERANCE:
            self._rate = rate
            self._calibrated += uses
        due = min(passed * self._rate, _WINDOW / 2)
        self.now += due + _USE_SHARE * (uses - due)
        if self._uses >= _WINDOW:
            self._uses //= 2
            self._seconds /= 2
