"""What other sizes of a tier would answer: a live miss-ratio curve, from a sample of the keys.

Of a request whoever uses a block uses all before it, so that in the order of last use heads lie above their tails: a block that
is above the line of a size has its whole prefix above it, and what is counted are hits of unbroken prefixes (`stack.Stack`).

Tiers evict by policies that are better than that order, and lose blocks for other reasons as well. What they really answered, of
the same lookups, says by how much: of the hits that are lost for want of room by the order of last use, the tier loses a part,
and that part is taken to be the same at all sizes (docs/decisions/0021). At its own size the estimate is what was measured.

No clock: old lookups fade by the number of keys that were looked up since.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

from ..negotiation import NamespaceId
from ..types import GROUP_INDEX_BYTES, MissReason, NamespaceSpec
from .request_log import OutcomeRun

__all__ = ["MAX_SAMPLES", "SCALES", "HitRatio", "MissRatioCurves", "Name", "ReuseDistanceSampler"]


MAX_SAMPLES = 8192
"""Keys that a stack holds at most; then it goes on with half of them. A key takes some 300 bytes."""


_GENERATIONS = 32
"""A generation is this part of the smallest size, or a single block: it is above a line or below it as a whole."""


_FAR = 1024
"""So many generations without a block are stepped over one by one; more are jumped."""


_HASHES = 1 << 64


Name = tuple[NamespaceId, bytes]


class ReuseDistanceSampler:
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
        most: int = MAX_SAMPLES,
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


SCALES = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Sizes that are estimated, as parts of what the tier has."""


_OWN = SCALES.index(1.0)


_REACH = 16.0
"""The stack goes so deep, in sizes of the tier: what is asked for again beyond is taken for something new."""


SAMPLED = 4
"""Of 256 keys, so many are in the sample at first."""


WINDOW_KEYS = 1 << 21
"""Looked-up keys after which those before count half."""


_MIN_SAMPLED = 64
"""References of the sample before which nothing is said."""


_CHOOSES = -1 - GROUP_INDEX_BYTES
"""The byte of a key that says whether it is in the sample."""


_JUDGED = 4096
"""Stored keys of which is seen whether that byte chooses as many as it should."""


_DOUBT = 0.01
"""A difference of ratios that says nothing."""


@dataclass(frozen=True, slots=True)
class HitRatio:
    """What a tier would answer if it had another size."""

    scale: float
    """The size, as part of what it has."""
    hit_ratio: float
    """Part of the looked-up keys that it, or a tier above it, would answer: between 0 and 1."""


class StoredBlock(Protocol):
    """The attributes of a block that the curve reads."""

    @property
    def key(self) -> bytes: ...
    @property
    def name(self) -> Name: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def hold_only(self) -> bool: ...


class MissRatioCurves:
    """One curve per tier, of the lookups of late.

    Args:
        capacities: of the tiers, in bytes, in lookup order.
        where: says which tier has a block, by its position, or None: asked of blocks that were stored before anything was counted.
        sampled: of 256 keys, how many are in the sample at first.
        window: looked-up keys after which those before count half.
        hash_of: spreads keys evenly over the integers of 64 bits, with their sign.
    """

    def __init__(
        self,
        capacities: Sequence[int],
        where: Callable[[NamespaceId, bytes], int | None],
        *,
        sampled: int = SAMPLED,
        window: int = WINDOW_KEYS,
        hash_of: Callable[[bytes], int] = hash,
    ) -> None:
        self._capacities = tuple(capacities)
        self._where = where
        self._sampled = sampled
        self._window = window
        self._hash_of = hash_of
        self._hashes = False
        """Whether keys are hashed to choose among them: those of some engines are no hashes themselves."""
        self._stored = self._chosen = 0
        """Keys that were stored, and those of them that are in the sample, since this was last judged."""
        self._begin()

    def _begin(self) -> None:
        # A tier answers for no less than those above it, which have their blocks first.
        above = accumulate((0, *self._capacities), max)
        rate, hash_of = self._sampled / 256, self._hash_of
        self._stacks = [
            ReuseDistanceSampler(
                [max(most, int(scale * own)) for scale in (*SCALES, _REACH)], rate=rate, hash_of=hash_of
            )
            for most, own in zip(above, self._capacities, strict=False)
        ]
        self._keys = 0.0
        """Keys that were looked up, of late."""
        self._answered = [0.0] * len(self._capacities)
        """Of these, how many each tier answered."""
        self._until_fade = self._window

    def looked_up(self, namespace: NamespaceSpec, keys: Sequence[bytes], runs: Collection[OutcomeRun]) -> None:
        """Takes note of a lookup and what its keys met, before what is missing is stored.

        One that a tier has to be asked about comes again, and counts then.
        """
        for run in runs:
            if run.outcome is None:
                return
        for run in runs:
            if not isinstance(run.outcome, MissReason) and run.outcome is not None:
                self._answered[run.outcome] += run.count
        self._keys += len(keys)
        for key in self._sample(keys):
            self._refer(namespace, key)
        self._until_fade -= len(keys)
        if self._until_fade <= 0:
            self._fade()

    def stored(self, blocks: Collection[StoredBlock]) -> None:
        """Takes note of blocks that come: from now on they are there to be found."""
        sample = self._sample([block.key for block in blocks])
        if sample:
            chosen = set(sample)
            for block in blocks:
                if block.key in chosen and not block.hold_only:
                    self.put(block.name, block.nbytes)
        if not self._hashes:
            self._judge(len(blocks), len(sample))

    def of(self, tier: int) -> tuple[HitRatio, ...]:
        """Returns the curve of a tier, by its position in the lookup order; nothing before there is enough to go by."""
        stack = self._stacks[tier]
        expected = self._keys * stack.rate
        if expected < _MIN_SAMPLED:
            return ()
        # A key that is asked for all the time is in the sample or not, and tilts it. Every size has it: so is the difference a hit.
        hits = list(accumulate(stack.hits, initial=expected - sum(stack.hits)))
        modelled = [min(1.0, max(0.0, count / expected)) for count in hits[1:-1]]
        measured = min(1.0, sum(self._answered[: tier + 1]) / self._keys)
        most, own = modelled[-1], modelled[_OWN]
        lost = min(1.0, (max(0.0, most - measured) + _DOUBT) / (most - own + _DOUBT))
        return tuple(
            HitRatio(scale, min(1.0, max(0.0, measured + lost * (ratio - own))))
            for scale, ratio in zip(SCALES, modelled, strict=False)
        )

    def _sample(self, keys: Sequence[bytes]) -> list[bytes]:
        """Returns those of some keys that are in the sample."""
        most = self._sampled
        if self._hashes:
            hash_of = self._hash_of
            return [key for key in keys if hash_of(key) % 256 < most]
        # A key is a content hash and the index of its group: the last byte of the hash chooses, at a third of the price of `hash`.
        return [key for key in keys if key[_CHOOSES] < most]

    def _judge(self, stored: int, chosen: int) -> None:
        """Sees whether the byte that chooses is one of a hash; where it is not, begins anew and hashes keys."""
        self._stored += stored
        self._chosen += chosen
        if self._stored < _JUDGED:
            return
        expected = self._stored * self._sampled / 256
        if not expected / 4 <= self._chosen <= 4 * expected:
            self._hashes = True
            self._begin()
        self._stored = self._chosen = 0

    def _refer(self, namespace: NamespaceSpec, key: bytes) -> None:
        """Counts a reference to a key of the sample."""
        name = (namespace.id, key)
        known = [stack.touch(name) for stack in self._stacks]
        if all(known):
            return
        tier = self._where(namespace.id, key)
        for number, stack in enumerate(self._stacks):
            if not known[number] and stack.takes(key):
                stack.miss(_OWN if tier is not None and tier <= number else None)
        if tier is not None or any(known):
            self.put(name, namespace.part_bytes_of(key) * namespace.world_size)

    def put(self, name: Name, nbytes: int) -> None:
        """Puts a block of the sample that comes on top of the stacks that do not know it."""
        for stack in self._stacks:
            if name not in stack and stack.takes(name[1]):
                stack.add(name, nbytes)

    def _fade(self) -> None:
        self._until_fade = self._window
        self._keys /= 2
        self._answered = [count / 2 for count in self._answered]
        for stack in self._stacks:
            stack.fade()
