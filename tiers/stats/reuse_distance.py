"""Sampled blocks in the order of their last use: at any size, a cache that evicts by that order holds those above a line (Mattson).

A sample of the keys, chosen by their hash, tells the hits of all sizes nearly as well as all keys do, with the sizes scaled
down alike (SHARDS, FAST '15). Here the stack is cut in generations, thin against the smallest size, and every size has a line
between two of them, which only ever moves up: a reference compares a few numbers, and nothing searches.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Sequence

from ..negotiation import NamespaceId

__all__ = ["MOST_SAMPLES", "Name", "Stack"]

MOST_SAMPLES = 8192
"""Keys that a stack holds at most; then it goes on with half of them. A key takes some 300 bytes."""
_GENERATIONS = 32
"""A generation is this part of the smallest size, or a single block: it is above a line or below it as a whole."""

_FAR = 1024
"""So many generations without a block are stepped over one by one; more are jumped."""

_HASHES = 1 << 64
Name = tuple[NamespaceId, bytes]


class Stack:
    """Sampled blocks in the order of their last use, and lines across it, one per size. All methods take constant time on average.

    Args:
        sizes: in bytes, ascending; of caches for all keys, not of the sample.
        rate: part of the keys that the caller offers: the sample, at first.
        most: blocks that are held at most. With more the rate is halved: of what is offered, the sample is what `takes` says.
        hash_of: spreads keys evenly over the integers of 64 bits, with their sign.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        *,
        rate: float,
        most: int = MOST_SAMPLES,
        hash_of: Callable[[bytes], int] = hash,
    ) -> None:
        self.rate = rate
        self._limit = _HASHES // 2
        """What the hash of a key is below if the key is in the sample."""
        self.hits = [0.0] * (len(sizes) + 1)
        """References by the smallest size that would have answered them; the last are of blocks that no size would have had."""
        self._sizes = list(sizes)
        self._most = most
        self._hash_of = hash_of
        self._blocks: OrderedDict[Name, tuple[int, int]] = OrderedDict()
        """Per block its generation and its size, in the order of last use."""
        self._generation = 0
        self._lived: dict[int, int] = {}
        """Per generation the bytes of its blocks that have not been used since."""
        self._lines = [0] * len(sizes)
        """Per size the oldest generation that it holds; descending."""
        self._held = [0] * len(sizes)
        """Per size the bytes of these generations."""
        self._fit()

    def __len__(self) -> int:
        return len(self._blocks)

    def takes(self, key: bytes) -> bool:
        """Whether a key that is offered is in the sample."""
        return self._hash_of(key) < self._limit

    def touch(self, name: Name) -> bool:
        """Counts a reference to a block, by where it was, and puts it on top, if it is known; returns whether it is."""
        known = self._blocks.get(name)
        if known is None:
            return False
        generation, nbytes = known
        level = 0
        for line in self._lines:
            if generation >= line:
                break
            level += 1
        self.hits[level] += 1
        if generation != self._generation:
            left = self._lived[generation] - nbytes
            if left:
                self._lived[generation] = left
            else:
                del self._lived[generation]
            self._blocks.move_to_end(name)
            self._put_on_top(name, nbytes, level)
        return True

    def miss(self, size: int | None) -> None:
        """Counts a reference to a block that is not known: one that the `size`-th size has all the same, or None has."""
        self.hits[-1 if size is None else size] += 1

    def add(self, name: Name, nbytes: int) -> None:
        """Puts a block on top that is in the sample and is not known."""
        self._put_on_top(name, nbytes, len(self._lines))
        if len(self._blocks) > self._most:
            self._halve()

    def __contains__(self, name: Name) -> bool:
        return name in self._blocks

    def fade(self) -> None:
        """Halves what past references count."""
        self.hits = [count / 2 for count in self.hits]

    def _put_on_top(self, name: Name, nbytes: int, sizes: int) -> None:
        """Puts a block above the lines of so many sizes, the smallest, that it was below of."""
        now = self._generation
        self._blocks[name] = now, nbytes
        lived = self._lived[now] = self._lived.get(now, 0) + nbytes
        held = self._held
        for number in range(sizes):
            held[number] += nbytes
        if lived >= self._slice:
            self._generation += 1
            for number, room in enumerate(self._room):
                if held[number] > room:
                    self._move_line(number)

    def _move_line(self, number: int) -> None:
        """Lets a size hold no more than it has room for."""
        lived, held, line = self._lived, self._held[number], self._lines[number]
        empty = 0
        while held > self._room[number]:
            gone = lived.get(line, 0)
            held -= gone
            line += 1
            empty = 0 if gone else empty + 1
            if empty > _FAR:  # as after hours in which the same few blocks were used
                alive = list(lived)  # in their order
                line = alive[bisect_left(alive, line)]
                empty = 0
        self._held[number], self._lines[number] = held, line
        self._generation = max(self._generation, line)  # what comes is not put below a line
        if number == len(self._lines) - 1:
            self._forget_below(line)

    def _forget_below(self, line: int) -> None:
        blocks = self._blocks
        while blocks:
            name, (generation, _) = next(iter(blocks.items()))
            if generation >= line:
                break
            del blocks[name]
            self._lived.pop(generation, None)

    def _halve(self) -> None:
        self.rate /= 2
        self._limit -= (self._limit + _HASHES // 2) // 2
        self._fit()
        self.fade()
        limit, hash_of = self._limit, self._hash_of
        for name in [name for name in self._blocks if hash_of(name[1]) >= limit]:
            del self._blocks[name]
        self._lived.clear()
        for generation, nbytes in self._blocks.values():
            self._lived[generation] = self._lived.get(generation, 0) + nbytes
        for number, line in enumerate(self._lines):
            self._held[number] = sum(nbytes for generation, nbytes in self._lived.items() if generation >= line)
            self._move_line(number)

    def _fit(self) -> None:
        """Scales all sizes down to the sample."""
        self._room = [size * self.rate for size in self._sizes]
        self._slice = self._room[0] / _GENERATIONS
