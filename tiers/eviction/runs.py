"""What the forecast policy puts in line: not blocks but runs of them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Generic

from .policy import T
from .reuse_model import BINS, Kind

__all__ = ["BlockRun", "RankBucket", "RequestChain"]


class RequestChain(Generic[T]):
    """One request: what it used, and what that says."""

    __slots__ = ("body", "end", "known", "length", "runs", "time", "turn")

    def __init__(self) -> None:
        self.time = 0
        self.length = 0
        """Blocks so far."""
        self.known = 0
        """Blocks up to the last one that was used before."""
        self.turn = 0
        self.runs: list[BlockRun[T]] = []
        self.body: BlockRun[T] | None = None
        """The run of new blocks, and"""
        self.end: BlockRun[T] | None = None
        """the one behind it, of the last block."""

    def close(self) -> None:
        """Lets go of the runs, which hold on to it: nothing is added any more."""
        self.runs = []
        self.body = self.end = None


class BlockRun(Generic[T]):
    """Blocks of one request with the same past, in the order of their chain."""

    __slots__ = ("alive", "bin", "cell", "due", "ghosts", "items", "kind", "start", "trail", "uses")

    def __init__(self, trail: RequestChain[T], items: list[T], start: int, uses: int, kind: Kind) -> None:
        self.trail = trail
        self.items = items
        self.start = start
        """Place of the first item in the chain."""
        self.uses = uses
        self.kind = kind
        self.bin = 0
        """The bin of its age."""
        self.cell: RankBucket[T] | None = None
        """Where it stands while it has items."""
        self.due = 0
        """When it leaves its bin."""
        self.alive = len(items)
        """Blocks that are here or gone, and not used since."""
        self.ghosts = 0
        """How many of them left a ghost."""


class RankBucket(Generic[T]):
    """Runs of one kind and about one age, in the order of their last use."""

    __slots__ = ("bin", "kind", "rank", "runs")

    def __init__(self, kind: Kind, number: int, serial: int) -> None:
        self.kind = kind
        self.bin = number
        self.runs: OrderedDict[BlockRun[T], None] = OrderedDict()
        self.rank = (0.0, serial)
        """What its blocks are worth; the second number makes ranks differ."""

    def in_order(self) -> Iterator[BlockRun[T]]:
        """Yields the run to go first first: the oldest, but the youngest where waiting makes a block worth more."""
        rising = self.bin + 1 < BINS and self.kind.worth[self.bin + 1] > self.kind.worth[self.bin]
        return reversed(self.runs) if rising else iter(self.runs)
