"""Contract of every tier, including the CPU tier: blocks come back bit by bit, within the capacity.

Subclass `TierContract`, fill in the hooks, and pytest runs the rest. `contracts.secondary_tier` has
more tests for a `SecondaryTier`.
"""

from __future__ import annotations

import random
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar, Protocol

import pytest

from kvtier.tiers.secondary_tier import BlockBytes, NamespaceId, Outcome

KIB, MIB = 1 << 10, 1 << 20
SPACE = NamespaceId(b"tag of a tenant." + b"namespace number")
OTHER_SPACE = NamespaceId(b"tag of a tenant." + b"namespace-number")
DONE, MISSING, CORRUPT, NO_SPACE, FAILED = Outcome


def content(seed: object, sizes: Sequence[int]) -> tuple[bytes, ...]:
    """Returns the parts of a block, the same for equal seeds."""
    source = random.Random(repr(seed))
    return tuple(source.randbytes(size) for size in sizes)


def full(key: bytes, parts: Sequence[bytes], namespace: NamespaceId = SPACE) -> BlockBytes:
    """Returns a block to store."""
    return BlockBytes(namespace, key, tuple(memoryview(part) for part in parts))


def empty(key: bytes, sizes: Sequence[int], namespace: NamespaceId = SPACE) -> BlockBytes:
    """Returns a block to load into."""
    return BlockBytes(namespace, key, tuple(memoryview(bytearray(size)) for size in sizes))


def held(block: BlockBytes) -> tuple[bytes, ...]:
    return tuple(bytes(part) for part in block.parts)


def fetch(tier: Tier, key: bytes, sizes: Sequence[int], namespace: NamespaceId = SPACE) -> tuple[bytes, ...]:
    """Loads one block, which must succeed."""
    block = empty(key, sizes, namespace)
    assert tier.load([block]) == [DONE]
    return held(block)


class Tier(Protocol):
    """A `SecondaryTier`, or an adapter of the CPU tier with the same methods."""

    capacity_bytes: int

    def store(self, blocks: Sequence[BlockBytes]) -> list[Outcome]: ...

    def load(self, blocks: Sequence[BlockBytes]) -> list[Outcome]: ...

    def remove(self, keys: Sequence[tuple[NamespaceId, bytes]]) -> None: ...

    def close(self) -> None: ...


def key(number: int, *, group: int = 0) -> bytes:
    """Returns a key as in engines: a hash and the index of a group."""
    return number.to_bytes(16, "big") + group.to_bytes(4, "big")


PARTS = [
    (1,),
    (4095,),
    (4096,),
    (4097,),
    (64 * KIB,),
    (300_001,),
    (2 * MIB,),
    (1000,) * 3,
    (64 * KIB,) * 8,
    (5,) * 40,
]
"""Part sizes of test blocks, the same for all ranks."""


class TierContract(ABC):
    names: ClassVar[tuple[bytes, ...]] = (
        *(bytes(5), bytes(6), b"\xff" * 36 + bytes(4), b"\xff" * 37 + bytes(4), b"k" + bytes(4), b"k" + bytes(5)),
    )
    large_block: ClassVar[int] = 300_000
    bad_key: ClassVar[bytes] = b"k" * 5000
    """A key that the tier refuses."""

    @abstractmethod
    def make_tier(self, directory: Path, size_bytes: int) -> Tier:
        """Opens a tier whose storage is in `directory` and may use `size_bytes`."""

    def assert_trouble(self, tier: Tier, *, expected: bool) -> None:  # noqa: B027 - the CPU tier reports none
        """Checks whether the tier reports trouble, if it can."""

    @pytest.fixture
    def tier(self, no_leaks: None, tmp_path: Path) -> Iterator[Tier]:
        """Yields an empty tier of 64 MiB.

        Closes it, and checks that no thread or descriptor is left.
        """
        tier = self.make_tier(tmp_path, 64 * MIB)
        yield tier
        tier.close()

    def test_empty_batches_have_no_outcomes(self, tier: Tier) -> None:
        assert tier.store([]) == []
        assert tier.load([]) == []
        tier.remove([])

    @pytest.mark.parametrize("sizes", PARTS, ids=lambda sizes: f"{len(sizes)}x{sizes[0]}")
    def test_blocks_come_back_bit_by_bit(self, tier: Tier, sizes: tuple[int, ...]) -> None:
        """A block has any size and number of ranks; each part returns to its place."""
        parts = content(sizes, sizes)
        assert tier.store([full(key(1), parts)]) == [DONE]
        assert fetch(tier, key(1), sizes) == parts

    def test_a_stored_block_is_a_copy(self, tier: Tier) -> None:
        """The buffers of a finished store may be reused."""
        buffer = bytearray(b"a" * 70_000)
        tier.store([full(key(1), [buffer])])
        buffer[:] = b"b" * 70_000
        assert fetch(tier, key(1), (70_000,)) == (b"a" * 70_000,)

    def test_hundreds_of_blocks_in_a_batch(self, tier: Tier) -> None:
        """They can be loaded in another order."""
        blocks = {key(number): content(number, (number * 97 % 60_000 + 1,)) for number in range(500)}
        assert tier.store([full(name, parts) for name, parts in blocks.items()]) == [DONE] * 500
        into = [empty(name, [len(part) for part in parts]) for name, parts in reversed(blocks.items())]
        assert tier.load(into) == [DONE] * 500
        assert all(held(block) == blocks[block.key] for block in into)

    def test_a_missing_block_has_its_outcome(self, tier: Tier) -> None:
        """Outcomes are per block and in order; other blocks are loaded."""
        tier.store([full(key(1), [b"aa"]), full(key(2), [b"bb"])])
        batch = [empty(key(2), (2,)), empty(key(9), (2,)), empty(key(1), (2,))]
        assert tier.load(batch) == [DONE, MISSING, DONE]
        assert held(batch[0]) == (b"bb",)
        assert held(batch[2]) == (b"aa",)

    def test_an_invalid_key_is_refused(self, tier: Tier) -> None:
        """Other blocks of the batch are stored."""
        batch = [full(key(1), [b"a"]), full(self.bad_key, [b"x"]), full(key(2), [b"b"])]
        assert tier.store(batch) == [DONE, FAILED, DONE]
        assert tier.load([empty(key(1), (1,)), empty(self.bad_key, (1,)), empty(key(2), (1,))]) == [DONE, MISSING, DONE]

    def test_keys_with_common_beginnings_are_separate(self, tier: Tier) -> None:
        """Keys have any bytes."""
        assert tier.store([full(name, [b"=" + name]) for name in self.names]) == [DONE] * len(self.names)
        for name in self.names:
            assert fetch(tier, name, (len(name) + 1,)) == (b"=" + name,)

    def test_equal_keys_of_two_namespaces_are_separate(self, tier: Tier) -> None:
        tier.store([full(key(1), [b"1"], SPACE), full(key(1), [b"2"], OTHER_SPACE), full(key(2), [b"3"], SPACE)])
        assert fetch(tier, key(1), (1,), SPACE) == (b"1",)
        assert fetch(tier, key(1), (1,), OTHER_SPACE) == (b"2",)
        assert tier.load([empty(key(2), (1,), OTHER_SPACE)]) == [MISSING]
        tier.remove([(SPACE, key(1))])
        assert fetch(tier, key(1), (1,), OTHER_SPACE) == (b"2",)

    def test_a_repeated_store_keeps_one_block(self, tier: Tier) -> None:
        """Its bytes are those of its key."""
        parts = content("again", (5000, 5000))
        for _ in range(3):
            assert tier.store([full(key(1), parts), full(key(2), [b"x"])]) == [DONE, DONE]
        assert fetch(tier, key(1), (5000, 5000)) == parts
        assert fetch(tier, key(2), (1,)) == (b"x",)

    def test_concurrent_loads_and_stores(self, tier: Tier) -> None:
        """Loads see whole blocks while a thread stores, replaces and removes others."""
        sizes = (70_000, 70_000)
        fixed = {key(number): content(number, sizes) for number in range(20)}
        tier.store([full(name, parts) for name, parts in fixed.items()])
        stop, wrong, loads = threading.Event(), [], [0, 0, 0]

        def load(reader: int) -> None:
            source = random.Random(reader)
            while not stop.is_set():
                batch = [empty(name, sizes) for name in source.sample(sorted(fixed), 4)]
                outcomes = tier.load(batch)
                wrong.extend(block.key for block in batch if held(block) != fixed[block.key])
                wrong.extend(outcome for outcome in outcomes if outcome is not DONE)
                loads[reader] += 1

        readers = [threading.Thread(target=load, args=(reader,)) for reader in range(3)]
        for reader in readers:
            reader.start()
        until, number = time.monotonic() + 1.0, 0
        try:
            while time.monotonic() < until or (min(loads) == 0 and number < 10_000):
                names = [key(100 + moving % 60) for moving in range(number, number + 8)]
                parts = content(number, (150_000,))
                assert tier.store([full(name, parts) for name in names]) == [DONE] * 8
                tier.remove([(SPACE, key(100 + number % 60))])
                number += 8
        finally:  # the threads must end before the tier is closed
            stop.set()
            for reader in readers:
                reader.join()
        assert wrong == []
        assert min(loads) > 0

    def test_the_capacity_is_usable(self, tier: Tier) -> None:
        """64 KiB blocks fill the capacity.

        Then each removal makes room for one store, for a long time.
        """
        size = 64 * KIB
        count = tier.capacity_bytes // size
        data = content("fill", (size,))
        for start in range(0, 3 * count, 32):
            numbers = range(start, start + 32)
            tier.remove([(SPACE, key(number - count)) for number in numbers if number >= count])
            assert tier.store([full(key(number), data) for number in numbers]) == [DONE] * 32
        assert fetch(tier, key(numbers[-1] - count // 2), (size,)) == data

    @pytest.mark.parametrize("size", [1, 3000, 64 * KIB, None], ids=str)
    def test_a_full_tier_keeps_its_blocks(self, no_leaks: None, tmp_path: Path, size: int | None) -> None:
        """It reports NO_SPACE, never exceeds its capacity, and stores new blocks after removals."""
        size = size or self.large_block
        tier = self.make_tier(tmp_path, 4 * MIB)
        stored: list[bytes] = []
        outcomes: list[Outcome] = []
        while NO_SPACE not in outcomes:
            names = [key(number) for number in range(len(stored), len(stored) + max(1, min(100, 100_000 // size)))]
            outcomes = tier.store([full(name, content(name, (size,))) for name in names])
            assert set(outcomes) <= {DONE, NO_SPACE}
            stored += [name for name, outcome in zip(names, outcomes, strict=True) if outcome is DONE]
            assert len(stored) * size <= 4 * MIB
        self.assert_trouble(tier, expected=True)
        for name in stored[::7]:
            assert fetch(tier, name, (size,)) == content(name, (size,))
        half = len(stored) // 2
        for start in range(0, half, 10):
            tier.remove([(SPACE, name) for name in stored[start : min(half, start + 10)]])
        # The space of the last removal may be usable only by a later transaction.
        for number in range(max(4, half // 2)):
            outcomes = tier.store([full(key(1_000_000 + number), content(number, (size,)))])
        assert outcomes == [DONE]
        self.assert_trouble(tier, expected=False)
        assert fetch(tier, stored[-1], (size,)) == content(stored[-1], (size,))
        tier.close()
