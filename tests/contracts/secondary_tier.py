"""Contract of every secondary tier, in addition to `contracts.tier`.

Subclass `SecondaryTierContract`, and pytest runs the tests.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
from abc import abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest
from contracts.tier import (
    CORRUPT,
    DONE,
    FAILED,
    KIB,
    MIB,
    MISSING,
    OTHER_SPACE,
    SPACE,
    Tier,
    TierContract,
    content,
    empty,
    fetch,
    full,
    held,
)

from kvtier.tiers.secondary_tier import BlockBytes, Entry, NamespaceId, OffloadPolicy, RequestInfo, SecondaryTier

__all__ = ["SecondaryTierContract"]

SHAPES = [(4080,), (100, 2000, 30_000), (2 * MIB, 1), (1, 0, 4096)]
"""Part sizes of test blocks, besides those of `contracts.tier`; ranks may differ."""


# Stores blocks forever, mostly replacing earlier ones. Prints what it is about to store and what is
# stored.
KILLED_CHILD = """
import random, sys
from pathlib import Path
from contracts.tier import DONE, MIB, content, full

{child_source}

tier = make(Path(sys.argv[1]), 64 * MIB)
list(tier.entries())
rnd, generation = random.Random(), int(sys.argv[2])
while True:
    batch = []
    for key in rnd.sample(range(40), rnd.randint(1, 8)):
        generation += 1
        sizes = (rnd.choice((1, 4080, 5000, 65536, 300001)), rnd.choice((7, 4096, 65536)))
        batch.append((key, generation, sizes))
    for key, number, sizes in batch:
        print("try", key, number, *sizes)
    sys.stdout.flush()
    outcomes = tier.store([full(b"%d" % key, content((key, number), sizes)) for key, number, sizes in batch])
    for (key, number, sizes), outcome in zip(batch, outcomes):
        assert outcome is DONE, outcome
        print("done", key, number, *sizes)
    sys.stdout.flush()
"""


class SecondaryTierContract(TierContract):
    names = (
        *TierContract.names,
        bytes(1),
        bytes(2),
        b"\xff" * 36,
        b"\xff" * 37,
        bytes(range(128)),
        b"k",
        b"k\0",
        b"k\0\0",
    )
    child_source: ClassVar[str]
    """For durable tiers: source text of `make(directory, size_bytes)`, like `make_tier`."""

    @abstractmethod
    def make_tier(self, directory: Path, size_bytes: int) -> SecondaryTier:
        """Opens a tier whose storage is in `directory` and may use `size_bytes`."""

    def corrupt(self, tier: SecondaryTier, namespace: NamespaceId, key: bytes) -> None:
        """Changes stored bytes of a block without the tier's knowledge."""
        pytest.skip("no way to corrupt a block of this tier")

    def swap(self, tier: SecondaryTier) -> None:
        """Gives the stored blocks "a" and "b" the bytes of each other."""
        pytest.skip("no way to swap blocks of this tier")

    def assert_trouble(self, tier: Tier, *, expected: bool) -> None:
        assert isinstance(tier, SecondaryTier)
        assert (tier.last_error is not None) is expected

    @pytest.fixture
    def tier(self, no_leaks: None, tmp_path: Path) -> Iterator[SecondaryTier]:
        """Yields an empty tier of 64 MiB.

        Closes it, and checks that no thread or descriptor is left.
        """
        tier = self.make_tier(tmp_path, 64 * MIB)
        assert list(tier.entries()) == []
        yield tier
        tier.close()

    def reopened(self, tier: SecondaryTier, directory: Path) -> SecondaryTier:
        """Closes a tier of 64 MiB and opens its storage again."""
        tier.close()
        if not tier.durable:
            pytest.skip("not durable")
        return self.make_tier(directory, 64 * MIB)

    def test_a_new_tier_is_sound(self, tier: SecondaryTier) -> None:
        """A new tier has a name, a type, a bounded capacity, and no trouble."""
        assert tier.name
        assert tier.type
        assert 0 < tier.capacity_bytes <= 64 * MIB
        assert tier.last_error is None

    def test_a_tier_votes_on_requests(self, tier: SecondaryTier) -> None:
        """The vote has a reason, and the tier accepts the end of the request."""
        vote = tier.on_new_request(RequestInfo("request", SPACE))
        assert vote.policy in OffloadPolicy
        assert vote.why
        tier.on_request_finished("request")

    @pytest.mark.parametrize("sizes", SHAPES, ids=lambda sizes: f"{len(sizes)}x{sizes[0]}")
    def test_parts_of_different_sizes_come_back(self, tier: SecondaryTier, sizes: tuple[int, ...]) -> None:
        """A block has any size and number of parts; each part returns to its place."""
        parts = content(sizes, sizes)
        assert tier.store([full(b"key", parts)]) == [DONE]
        assert fetch(tier, b"key", sizes) == parts

    def test_parts_may_be_views_into_one_buffer(self, tier: SecondaryTier) -> None:
        """A load writes nothing outside of them."""
        region = memoryview(bytearray(b"." * (100 * KIB)))
        data = content("region", (30 * KIB,))[0]
        region[KIB : 31 * KIB] = data
        assert tier.store([BlockBytes(SPACE, b"key", (region[KIB : 31 * KIB],))]) == [DONE]
        assert tier.load([BlockBytes(SPACE, b"key", (region[50 * KIB : 80 * KIB],))]) == [DONE]
        assert bytes(region[50 * KIB : 80 * KIB]) == data
        assert bytes(region[31 * KIB : 50 * KIB]) == b"." * (19 * KIB)
        assert bytes(region[80 * KIB :]) == b"." * (20 * KIB)

    @pytest.mark.parametrize("sizes", [(999,), (1001,), (500, 500), (1000, 1000), (1,)], ids=str)
    def test_a_block_with_other_part_sizes_is_corrupt(self, tier: SecondaryTier, sizes: tuple[int, ...]) -> None:
        """It is then missing; other blocks of the load are unaffected."""
        tier.store([full(b"key", content(1, (1000,))), full(b"other", [b"x"])])
        assert tier.load([empty(b"none", (2,)), empty(b"key", sizes), empty(b"other", (1,))]) == [
            MISSING,
            CORRUPT,
            DONE,
        ]
        assert tier.load([empty(b"key", (1000,))]) == [MISSING]

    def test_a_block_without_bytes_is_refused(self, tier: SecondaryTier) -> None:
        """It has no parts, or empty ones; other blocks of the batch are stored."""
        batch = [full(b"a", [b"a"]), full(b"none", []), full(b"nothing", [b"", b""]), full(b"b", [b"b"])]
        assert tier.store(batch) == [DONE, FAILED, FAILED, DONE]
        assert fetch(tier, b"a", (1,)) == (b"a",)
        assert fetch(tier, b"b", (1,)) == (b"b",)
        assert tier.load([empty(b"none", (1,))]) == [MISSING]

    def test_single_parts_may_be_empty(self, tier: SecondaryTier) -> None:
        """A rank may have no bytes of a block."""
        parts = (b"", b"x" * 5000, b"")
        assert tier.store([full(b"key", parts)]) == [DONE]
        assert fetch(tier, b"key", (0, 5000, 0)) == parts

    @pytest.mark.parametrize("sizes", [(70_000,), (10,), (300_000, 5)], ids=str)
    def test_a_store_replaces_the_block_of_its_key(self, tier: SecondaryTier, sizes: tuple[int, ...]) -> None:
        """The sizes may differ."""
        tier.store([full(b"key", content("old", (70_000,))), full(b"other", [b"x"])])
        new = content("new", sizes)
        assert tier.store([full(b"key", new)]) == [DONE]
        assert fetch(tier, b"key", sizes) == new
        assert fetch(tier, b"other", (1,)) == (b"x",)

    def test_the_last_block_of_a_repeated_key_stays(self, tier: SecondaryTier) -> None:
        tier.store([full(b"key", [b"1" * 9000]), full(b"other", [b"x"]), full(b"key", [b"2"])])
        assert fetch(tier, b"key", (1,)) == (b"2",)

    def test_removed_blocks_are_missing(self, tier: SecondaryTier) -> None:
        """Other blocks stay, and unknown keys are ignored."""
        tier.store([full(b"%d" % number, content(number, (5000,))) for number in range(10)])
        tier.remove([(SPACE, b"3"), (SPACE, b"unknown"), (OTHER_SPACE, b"4"), (SPACE, b"5"), (SPACE, b"5")])
        outcomes = tier.load([empty(b"%d" % number, (5000,)) for number in range(10)])
        assert [number for number, outcome in enumerate(outcomes) if outcome is MISSING] == [3, 5]
        assert outcomes.count(DONE) == 8
        tier.remove([(SPACE, b"3")])
        assert tier.store([full(b"3", [b"back"])]) == [DONE]
        assert fetch(tier, b"3", (4,)) == (b"back",)

    def test_a_corrupt_block_is_reported_and_dropped(self, tier: SecondaryTier) -> None:
        """Its bytes are never returned, and other blocks are unaffected."""
        sizes = (100_000, 30)
        blocks = {key: content(key, sizes) for key in (b"a", b"b", b"c")}
        tier.store([full(key, parts) for key, parts in blocks.items()])
        self.corrupt(tier, SPACE, b"b")
        assert tier.load([empty(key, sizes) for key in blocks]) == [DONE, CORRUPT, DONE]
        assert tier.load([empty(b"b", sizes)]) == [MISSING]
        assert tier.store([full(b"b", blocks[b"b"])]) == [DONE]
        for key, parts in blocks.items():
            assert fetch(tier, key, sizes) == parts

    def test_bytes_of_another_block_are_corrupt(self, tier: SecondaryTier) -> None:
        """A checksum includes the name of the block."""
        tier.store([full(b"a", [b"a" * 5000]), full(b"b", [b"b" * 5000])])
        self.swap(tier)
        assert tier.load([empty(b"a", (5000,)), empty(b"b", (5000,))]) == [CORRUPT, CORRUPT]

    def test_blocks_survive_a_restart(self, no_leaks: None, tmp_path: Path) -> None:
        """They are listed oldest first; a replaced block has the age of its replacement."""
        tier = self.make_tier(tmp_path, 64 * MIB)
        shapes = [(5000,), (64 * KIB, 64 * KIB), (1,), (300_000,), (10, 20, 30)]
        for number, sizes in enumerate(shapes * 4):
            tier.store([full(b"%d" % number, content(number, sizes))])
        tier.store([full(b"2", [b"new"]), full(b"else", [b"where"], OTHER_SPACE)])
        tier.remove([(SPACE, b"7"), (SPACE, b"8")])
        again = self.reopened(tier, tmp_path)
        try:
            order = [number for number in range(20) if number not in {2, 7, 8}]
            expected = [Entry(SPACE, b"%d" % number, sum(shapes[number % 5])) for number in order]
            expected += [Entry(SPACE, b"2", 3), Entry(OTHER_SPACE, b"else", 5)]
            assert list(again.entries()) == expected
            for number in order:
                assert fetch(again, b"%d" % number, shapes[number % 5]) == content(number, shapes[number % 5])
            assert fetch(again, b"2", (3,)) == (b"new",)
            assert fetch(again, b"else", (5,), OTHER_SPACE) == (b"where",)
            assert again.last_error is None
        finally:
            again.close()

    @pytest.mark.parametrize("seed", range(3))
    def test_random_operations_against_a_dict(self, no_leaks: None, tmp_path: Path, seed: int) -> None:
        """A long run of operations and restarts leaves the contents of the dict."""
        source = random.Random(seed)
        model: dict[bytes, tuple[int, ...]] = {}
        tier = self.make_tier(tmp_path, 64 * MIB)
        for step in range(150):
            keys = [b"%d" % number for number in source.sample(range(30), source.randint(1, 6))]
            match source.choice(["store", "store", "load", "remove", "restart"]):
                case "store":
                    shapes = [source.choice([(1,), (5000, 3), (70_000,), (300_000, 1)]) for _ in keys]
                    batch = [full(key, content(key, sizes)) for key, sizes in zip(keys, shapes, strict=True)]
                    assert tier.store(batch) == [DONE] * len(keys)
                    for key, sizes in zip(keys, shapes, strict=True):
                        model.pop(key, None)
                        model[key] = sizes
                case "load":
                    into = [empty(key, model.get(key, (9,))) for key in keys]
                    assert tier.load(into) == [DONE if key in model else MISSING for key in keys]
                    assert all(
                        held(block) == content(block.key, model[block.key]) for block in into if block.key in model
                    )
                case "remove":
                    tier.remove([(SPACE, key) for key in keys])
                    for key in keys:
                        model.pop(key, None)
                case "restart" if tier.durable and step % 4 == 0:
                    tier = self.reopened(tier, tmp_path)
                    assert [(entry.key, entry.nbytes) for entry in tier.entries()] == [
                        (key, sum(sizes)) for key, sizes in model.items()
                    ]
        tier.close()

    def test_sigkill_loses_no_stored_block(self, no_leaks: None, tmp_path: Path) -> None:
        """SIGKILL at any moment leaves no partial block."""
        if not hasattr(self, "child_source"):
            pytest.skip("not durable")
        acknowledged: dict[int, tuple[int, tuple[int, ...]]] = {}
        for life in range(6):
            tried: dict[int, dict[int, tuple[int, ...]]] = {}
            for what, key, number, sizes in self._run_and_kill(tmp_path, life * 1_000_000):
                if what == "try":
                    tried.setdefault(key, {})[number] = sizes
                else:
                    acknowledged[key] = (number, sizes)
            assert tried
            tier = self.make_tier(tmp_path, 64 * MIB)
            assert tier.last_error is None
            entries = {int(entry.key): entry.nbytes for entry in tier.entries()}
            assert set(acknowledged) <= set(entries)
            for key, nbytes in entries.items():
                possible = {number: sizes for number, sizes in tried.get(key, {}).items() if sum(sizes) == nbytes}
                if key in acknowledged:
                    last, sizes = acknowledged[key]
                    possible = {number: sizes for number, sizes in possible.items() if number > last} | {last: sizes}
                acknowledged[key] = self._which(tier, key, possible, nbytes)
            tier.close()

    def _run_and_kill(self, directory: Path, generation: int) -> Iterator[tuple[str, int, int, tuple[int, ...]]]:
        """Runs a child that stores until it is killed at a random moment; yields its output."""
        program = KILLED_CHILD.format(child_source=textwrap.dedent(self.child_source))
        path = [str(Path(__file__).resolve().parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
        child = subprocess.Popen(
            [sys.executable, "-c", program, str(directory), str(generation)],
            bufsize=0,  # `communicate` would skip lines that `readline` has buffered
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path)},
        )
        assert child.stdout
        first = child.stdout.readline()
        threading.Timer(random.Random(generation).uniform(0.005, 0.25), child.send_signal, [signal.SIGKILL]).start()
        rest, errors = child.communicate(timeout=60)
        assert child.returncode == -signal.SIGKILL, errors.decode()
        for line in (first + rest).decode().splitlines(keepends=True):
            if line.endswith("\n"):
                what, key, number, *sizes = line.split()
                yield what, int(key), int(number), tuple(int(size) for size in sizes)

    def _which(
        self, tier: SecondaryTier, key: int, possible: dict[int, tuple[int, ...]], nbytes: int
    ) -> tuple[int, tuple[int, ...]]:
        """Returns which of the possible generations of a block the tier holds, bit by bit."""
        fitting = {sizes for sizes in possible.values() if sum(sizes) == nbytes}
        assert len(fitting) == 1, (key, possible, nbytes)
        sizes = fitting.pop()
        parts = fetch(tier, b"%d" % key, sizes)
        found = [number for number, its in possible.items() if its == sizes and content((key, number), its) == parts]
        assert len(found) == 1, (key, possible)
        return found[0], sizes
