"""What other sizes of a tier would answer: a live miss-ratio curve, from a sample of the keys.

Of a request whoever uses a block uses all before it, so that in the order of last use heads lie above their tails: a block that
is above the line of a size has its whole prefix above it, and what is counted are hits of unbroken prefixes (`stack.Stack`).

Tiers evict by policies that are better than that order, and lose blocks for other reasons as well. What they really answered, of
the same lookups, says by how much: of the hits that are lost for want of room by the order of last use, the tier loses a part,
and that part is taken to be the same at all sizes (docs/decisions/0021). At its own size the estimate is what was measured.

No clock: old lookups fade by the number of keys that were looked up since.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate

from ..core.block import GROUP_INDEX_BYTES, Block, NamespaceSpec
from ..negotiation import NamespaceId
from .eviction_history import MissReason
from .request_log import Span
from .reuse_distance import Name, Stack

__all__ = ["SCALES", "Curves", "HitRatio"]

SCALES = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Sizes that are estimated, as parts of what the tier has."""
_OWN = SCALES.index(1.0)
_REACH = 16.0
"""The stack goes so deep, in sizes of the tier: what is asked for again beyond is taken for something new."""
SAMPLED = 4
"""Of 256 keys, so many are in the sample at first."""
WINDOW_KEYS = 1 << 21
"""Looked-up keys after which those before count half."""
_LEAST_SAMPLED = 64
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


class Curves:
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
            Stack([max(most, int(scale * own)) for scale in (*SCALES, _REACH)], rate=rate, hash_of=hash_of)
            for most, own in zip(above, self._capacities, strict=False)
        ]
        self._keys = 0.0
        """Keys that were looked up, of late."""
        self._answered = [0.0] * len(self._capacities)
        """Of these, how many each tier answered."""
        self._until_fade = self._window

    def looked_up(self, namespace: NamespaceSpec, keys: Sequence[bytes], spans: Collection[Span]) -> None:
        """Takes note of a lookup and what its keys met, before what is missing is stored.

        One that a tier has to be asked about comes again, and counts then.
        """
        for span in spans:
            if span.verdict is None:
                return
        for span in spans:
            if not isinstance(span.verdict, MissReason) and span.verdict is not None:
                self._answered[span.verdict] += span.count
        self._keys += len(keys)
        for key in self._sample(keys):
            self._refer(namespace, key)
        self._until_fade -= len(keys)
        if self._until_fade <= 0:
            self._fade()

    def stored(self, blocks: Collection[Block]) -> None:
        """Takes note of blocks that come: from now on they are there to be found."""
        sample = self._sample([block.key for block in blocks])
        if sample:
            chosen = set(sample)
            for block in blocks:
                if block.key in chosen and not block.private:
                    self.put(block.name, block.nbytes)
        if not self._hashes:
            self._judge(len(blocks), len(sample))

    def of(self, tier: int) -> tuple[HitRatio, ...]:
        """Returns the curve of a tier, by its position in the lookup order; nothing before there is enough to go by."""
        stack = self._stacks[tier]
        expected = self._keys * stack.rate
        if expected < _LEAST_SAMPLED:
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
