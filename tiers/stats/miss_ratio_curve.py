"""Miss-ratio curves: estimate each tier's hit ratio for other sizes, from a sample of the keys.

The estimate starts from a simulated LRU cache (`ReuseDistanceSampler`). A request that uses a block
also uses all earlier blocks of the chain. So the last use of a block is never later than the last
use of the blocks before it. An LRU cache that has a block therefore also has the whole prefix of
the block, and every counted hit is a hit of an unbroken prefix.

The tiers' policies have more hits than LRU, and tiers lose blocks for other reasons than lack of
space too. Therefore the measured hit ratio corrects the estimate. Assumption: of the hits that LRU
loses for lack of space, a tier loses the same fraction at every size (docs/decisions/0021). At the
tier's current size, the estimate is equal to the measured ratio.

There is no clock: the weight of a lookup decreases with the number of keys looked up after it.
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
"""Limit of sampled blocks, about 300 bytes each. Beyond this limit the sampling rate is halved."""

_GENERATIONS = 32
"""Blocks are grouped by last use into generations of 1/32 of the smallest cache size, or of one
larger block. A simulated cache of any size contains only whole generations."""

_MAX_GAP = 1024
"""Up to this many empty generations are skipped one by one; a longer gap is skipped at once."""

_HASHES = 1 << 64

Name = tuple[NamespaceId, bytes]


class ReuseDistanceSampler:
    """Sampled LRU stack (Mattson, SHARDS): finds the smallest LRU cache that has each used block.

    All methods take constant time on average.

    Args:
        sizes: cache sizes in bytes, ascending, for all keys; the sampler scales them to its sample.
        rate: initial sampling rate of the keys that the caller offers.
        most: limit of sampled blocks. Beyond this limit the rate is halved.
        hash_of: maps keys evenly to signed 64-bit integers.
    """

    def __init__(
        self, sizes: Sequence[int], *, rate: float, most: int = MAX_SAMPLES, hash_of: Callable[[bytes], int] = hash
    ) -> None:
        self.rate = rate
        self._limit = _HASHES // 2
        """Keys with a hash below this limit are in the sample."""
        self.hits = [0.0] * (len(sizes) + 1)
        """Number of references per cache size. A reference counts at the smallest size whose cache
        has the block. The last entry counts references to blocks that no cache has."""
        self._sizes = list(sizes)
        self._most = most
        self._hash_of = hash_of
        self._blocks: OrderedDict[Name, tuple[int, int]] = OrderedDict()
        """Generation and size of each block, in LRU order."""
        self._generation = 0
        self._bytes_per_generation: dict[int, int] = {}
        """Bytes of the blocks last used in each generation."""
        self._size_marks = [0] * len(sizes)
        """Per cache size, the oldest generation in the cache; descending."""
        self._held = [0] * len(sizes)
        """Per cache size, the bytes of the generations in the cache."""
        self._fit()

    def takes(self, key: bytes) -> bool:
        return self._hash_of(key) < self._limit

    def touch(self, name: Name) -> bool:
        """Counts a reference and moves the block to the top; returns False for an unknown block."""
        known = self._blocks.get(name)
        if known is None:
            return False
        generation, nbytes = known
        level = 0
        for mark in self._size_marks:
            if generation >= mark:
                break
            level += 1
        self.hits[level] += 1
        if generation != self._generation:
            left = self._bytes_per_generation[generation] - nbytes
            if left:
                self._bytes_per_generation[generation] = left
            else:
                del self._bytes_per_generation[generation]
            self._blocks.move_to_end(name)
            self._put_on_top(name, nbytes, level)
        return True

    def miss(self, size: int | None) -> None:
        """Counts a reference to a block that is not in the stack.

        `size`: index of the smallest size at which the reference counts as a hit; None for none.
        """
        self.hits[-1 if size is None else size] += 1

    def add(self, name: Name, nbytes: int) -> None:
        self._put_on_top(name, nbytes, len(self._size_marks))
        if len(self._blocks) > self._most:
            self._halve()

    def __contains__(self, name: Name) -> bool:
        return name in self._blocks

    def decay(self) -> None:
        """Halves the weight of past references."""
        self.hits = [count / 2 for count in self.hits]

    def _put_on_top(self, name: Name, nbytes: int, sizes: int) -> None:
        """Puts a block on top of the stack. The `sizes` smallest caches did not have the block."""
        now = self._generation
        self._blocks[name] = now, nbytes
        bytes_per_generation = self._bytes_per_generation[now] = self._bytes_per_generation.get(now, 0) + nbytes
        held = self._held
        for number in range(sizes):
            held[number] += nbytes
        if bytes_per_generation >= self._slice:
            self._generation += 1
            for number, room in enumerate(self._room):
                if held[number] > room:
                    self._move_mark(number)

    def _move_mark(self, number: int) -> None:
        """Moves the mark of a size until the generations from the mark on fit into the size."""
        bytes_per_generation, held, mark = self._bytes_per_generation, self._held[number], self._size_marks[number]
        empty = 0
        while held > self._room[number]:
            gone = bytes_per_generation.get(mark, 0)
            held -= gone
            mark += 1
            empty = 0 if gone else empty + 1
            if empty > _MAX_GAP:  # for example if requests used only a few blocks for hours
                alive = list(bytes_per_generation)  # in insertion order
                mark = alive[bisect_left(alive, mark)]
                empty = 0
        self._held[number], self._size_marks[number] = held, mark
        self._generation = max(self._generation, mark)  # new blocks are never below a mark
        if number == len(self._size_marks) - 1:
            self._forget_below(mark)

    def _forget_below(self, mark: int) -> None:
        blocks = self._blocks
        while blocks:
            name, (generation, _) = next(iter(blocks.items()))
            if generation >= mark:
                break
            del blocks[name]
            self._bytes_per_generation.pop(generation, None)

    def _halve(self) -> None:
        self.rate /= 2
        self._limit -= (self._limit + _HASHES // 2) // 2
        self._fit()
        self.decay()
        limit, hash_of = self._limit, self._hash_of
        for name in [name for name in self._blocks if hash_of(name[1]) >= limit]:
            del self._blocks[name]
        self._bytes_per_generation.clear()
        for generation, nbytes in self._blocks.values():
            self._bytes_per_generation[generation] = self._bytes_per_generation.get(generation, 0) + nbytes
        for number, mark in enumerate(self._size_marks):
            self._held[number] = sum(
                nbytes for generation, nbytes in self._bytes_per_generation.items() if generation >= mark
            )
            self._move_mark(number)

    def _fit(self) -> None:
        self._room = [size * self.rate for size in self._sizes]
        self._slice = self._room[0] / _GENERATIONS


SCALES = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Estimated sizes, relative to the tier's capacity."""

_OWN = SCALES.index(1.0)

_STACK_DEPTH = 16.0
"""Depth of the stack, relative to the tier's capacity. The stack forgets deeper blocks, so
these count as new at their next use."""

SAMPLED = 4
"""Initial sampling rate: this many of 256 keys."""

WINDOW_KEYS = 1 << 21
"""After this many looked-up keys, earlier keys count half."""

_MIN_SAMPLED = 64
"""Least number of sampled references for an estimate."""

_SAMPLING_BYTE = -1 - GROUP_INDEX_BYTES
"""The byte of a key that decides whether the key is in the sample."""

_CHECK_EVERY = 4096
"""The distribution of the sampling byte is checked after this many stored keys."""

_NOISE = 0.01
"""Differences between two hit ratios below this value count as noise."""


@dataclass(frozen=True, slots=True)
class HitRatio:
    scale: float
    """Size relative to the tier's capacity."""
    hit_ratio: float
    """Fraction of the looked-up keys that this tier or an earlier tier would have."""


class StoredBlock(Protocol):
    @property
    def key(self) -> bytes: ...
    @property
    def name(self) -> Name: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def hold_only(self) -> bool: ...


class MissRatioCurves:
    """One miss-ratio curve per tier, of recent lookups.

    Args:
        capacities: capacity of each tier in bytes, in lookup order.
        where: returns the position of the tier that has a block, or None. Called for blocks that
            a stack does not contain, for example blocks stored before the sampling began.
        sampled: initial sampling rate: this many of 256 keys.
        window: after this many looked-up keys, earlier keys count half.
        hash_of: maps keys evenly to signed 64-bit integers.
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
        self._tier_of = where
        self._sampled = sampled
        self._window = window
        self._hash_of = hash_of
        self._hash_keys = False
        """Whether the sampling hashes the keys first. This is necessary if an engine uses keys that
        are not hashes, because the sampling byte of such keys is distributed unevenly."""
        self._stored = self._sampled_keys = 0
        """Numbers of stored keys and of sampled keys since the last check of the distribution."""
        self._begin()

    def _begin(self) -> None:
        # Earlier tiers are looked up first, so a tier's stack is at least as large as each of them.
        above = accumulate((0, *self._capacities), max)
        rate, hash_of = self._sampled / 256, self._hash_of
        self._samplers = [
            ReuseDistanceSampler(
                [max(most, int(scale * own)) for scale in (*SCALES, _STACK_DEPTH)], rate=rate, hash_of=hash_of
            )
            for most, own in zip(above, self._capacities, strict=False)
        ]
        self._keys = 0.0
        """Number of looked-up keys, with decay."""
        self._answered = [0.0] * len(self._capacities)
        """Number of these keys that each tier had."""
        self._keys_until_decay = self._window

    def looked_up(self, namespace: NamespaceSpec, keys: Sequence[bytes], runs: Collection[OutcomeRun]) -> None:
        """Records a lookup without RETRY keys. Call this before the missing blocks are stored."""
        for run in runs:
            if not isinstance(run.outcome, MissReason) and run.outcome is not None:
                self._answered[run.outcome] += run.count
        self._keys += len(keys)
        for key in self._sample(keys):
            self._count_reference(namespace, key)
        self._keys_until_decay -= len(keys)
        if self._keys_until_decay <= 0:
            self._decay()

    def stored(self, blocks: Collection[StoredBlock]) -> None:
        sample = self._sample([block.key for block in blocks])
        if sample:
            chosen = set(sample)
            for block in blocks:
                if block.key in chosen and not block.hold_only:
                    self.put(block.name, block.nbytes)
        if not self._hash_keys:
            self._check_distribution(len(blocks), len(sample))

    def of(self, tier: int) -> tuple[HitRatio, ...]:
        """Returns the curve of a tier by its position; empty until there is enough data."""
        sampler = self._samplers[tier]
        expected = self._keys * sampler.rate
        if expected < _MIN_SAMPLED:
            return ()
        # If a very frequent key is not in the sample, the sample has too few references. Such a key
        # hits at every size, so the missing references count as hits.
        hits = list(accumulate(sampler.hits, initial=expected - sum(sampler.hits)))
        modelled = [min(1.0, max(0.0, count / expected)) for count in hits[1:-1]]
        measured = min(1.0, sum(self._answered[: tier + 1]) / self._keys)
        most, own = modelled[-1], modelled[_OWN]
        lost = min(1.0, (max(0.0, most - measured) + _NOISE) / (most - own + _NOISE))
        return tuple(
            HitRatio(scale, min(1.0, max(0.0, measured + lost * (ratio - own))))
            for scale, ratio in zip(SCALES, modelled, strict=False)
        )

    def _sample(self, keys: Sequence[bytes]) -> list[bytes]:
        most = self._sampled
        if self._hash_keys:
            hash_of = self._hash_of
            return [key for key in keys if hash_of(key) % 256 < most]
        # To test one byte of the content hash takes a third of the time of `hash`.
        return [key for key in keys if key[_SAMPLING_BYTE] < most]

    def _check_distribution(self, stored: int, chosen: int) -> None:
        """Restarts the sampling with hashed keys if the sampling byte is distributed unevenly."""
        self._stored += stored
        self._sampled_keys += chosen
        if self._stored < _CHECK_EVERY:
            return
        expected = self._stored * self._sampled / 256
        if not expected / 4 <= self._sampled_keys <= 4 * expected:
            self._hash_keys = True
            self._begin()
        self._stored = self._sampled_keys = 0

    def _count_reference(self, namespace: NamespaceSpec, key: bytes) -> None:
        name = (namespace.id, key)
        known = [sampler.touch(name) for sampler in self._samplers]
        if all(known):
            return
        tier = self._tier_of(namespace.id, key)
        for number, sampler in enumerate(self._samplers):
            if not known[number] and sampler.takes(key):
                sampler.miss(_OWN if tier is not None and tier <= number else None)
        if tier is not None or any(known):
            self.put(name, namespace.part_bytes_of(key) * namespace.world_size)

    def put(self, name: Name, nbytes: int) -> None:
        """Adds a sampled block to the stacks that do not have it."""
        for sampler in self._samplers:
            if name not in sampler and sampler.takes(name[1]):
                sampler.add(name, nbytes)

    def _decay(self) -> None:
        self._keys_until_decay = self._window
        self._keys /= 2
        self._answered = [count / 2 for count in self._answered]
        for sampler in self._samplers:
            sampler.decay()
