"""Contract of tiers in a store that several servers share over the network.

Subclass `SharedTierContract`, fill in the hooks of the store, and pytest runs the tests.
`KeyValueContract` has more tests for a store with one value per block.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
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
    NO_SPACE,
    OTHER_SPACE,
    PARTS,
    SPACE,
    content,
    empty,
    fetch,
    full,
    held,
    key,
)
from harness.polling import wait_until

from kvtier.tiers.remote.circuit_breaker import PROBE_SECONDS
from kvtier.tiers.remote.network_tier import RemoteLimits
from kvtier.tiers.remote.value_codec import name_of
from kvtier.tiers.secondary_tier import BlockBytes, Medium, NamespaceId, Outcome, RequestInfo, SecondaryTier

__all__ = [
    "DEADLINE_SECONDS",
    "GENEROUS_SECONDS",
    "LIMITS",
    "PATIENT",
    "ROW",
    "ExpiringValueContract",
    "KeyValueContract",
    "SharedTierContract",
    "checked",
]

DEADLINE_SECONDS = 0.25
GENEROUS_SECONDS = 20.0
"""Limit for calls that must end in bounded time, for a busy machine. Without a deadline they would
never end."""

LIMITS = RemoteLimits(deadline_seconds=DEADLINE_SECONDS, ttl_seconds=1000)
PATIENT = RemoteLimits(deadline_seconds=10.0, ttl_seconds=1000)
"""For tests in which the store answers, so that they succeed on a busy machine."""
ROW = [key(number) for number in range(20)]


class SharedTierContract(ABC):
    """Tests of two servers at one store. The hooks act on the store itself."""

    visible_after_seconds: ClassVar[float] = 0.0
    """A lookup that begins this time after a store finds the block."""
    value_format: ClassVar[int] = 3
    smallest_value: ClassVar[int] = 0
    """Size of the smallest value that the store accepts."""
    limits: ClassVar[RemoteLimits] = PATIENT
    hasty_limits: ClassVar[RemoteLimits] = LIMITS
    """For tests in which the store does not answer."""

    @abstractmethod
    def start_store(self, directory: Path) -> None:
        """Starts an empty store, or starts it again without its values after `kill_store`."""

    @abstractmethod
    def kill_store(self) -> None:
        """Ends the store at once, as SIGKILL does. May be repeated."""

    @abstractmethod
    def make_tier(self, limits: RemoteLimits) -> SecondaryTier:
        """Opens the tier of one server. The store may be absent."""

    @abstractmethod
    def value_of(self, block: BlockBytes) -> bytes | None:
        """Returns the value of a block in the store. The block was stored by a job of its own."""

    @abstractmethod
    def replace_value(self, block: BlockBytes, value: bytes) -> None:
        """Replaces the value of a block that was stored by a job of its own."""

    @abstractmethod
    def freeze(self, *, frozen: bool) -> None:
        """Makes the store hang or answer again."""

    @abstractmethod
    def make_full(self) -> None:
        """Makes the store refuse further values for lack of memory."""

    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[None]:
        self.start_store(tmp_path)
        yield
        self.kill_store()

    @pytest.fixture
    def open_tier(self) -> Iterator[Callable[[], SecondaryTier]]:
        """Yields a function that opens tiers, and closes these at the end."""
        tiers: list[SecondaryTier] = []

        def make(limits: RemoteLimits = self.limits) -> SecondaryTier:
            tiers.append(self.make_tier(limits))
            return tiers[-1]

        yield make
        for tier in tiers:
            tier.close()

    @pytest.fixture
    def first(self, store: None, open_tier: Callable[[], SecondaryTier]) -> SecondaryTier:
        return open_tier()

    @pytest.fixture
    def hasty(self, store: None, open_tier: Callable[[RemoteLimits], SecondaryTier]) -> SecondaryTier:
        return open_tier(self.hasty_limits)

    @pytest.fixture
    def second(self, store: None, open_tier: Callable[[], SecondaryTier]) -> SecondaryTier:
        return open_tier()

    def test_the_tier_is_shared_and_remote(self, first: SecondaryTier) -> None:
        """A new tier lists no blocks, has no error, votes, and accepts the end of a request."""
        assert (first.shared, first.local, first.durable, first.medium) == (True, False, False, Medium.NETWORK)
        assert list(first.entries()) == []
        assert first.on_new_request(RequestInfo("request", SPACE)).why
        first.on_request_finished("request")
        assert first.free_disk_bytes() is None
        assert first.last_error is None

    def test_empty_jobs(self, first: SecondaryTier) -> None:
        assert (first.store([]), first.load([]), first.lookup([])) == ([], [], [])

    @pytest.mark.parametrize("sizes", [*PARTS, (0, 5000, 0)], ids=lambda sizes: f"{len(sizes)}x{sizes[0]}")
    def test_the_second_server_loads_what_the_first_stored(
        self, first: SecondaryTier, second: SecondaryTier, sizes: tuple[int, ...]
    ) -> None:
        """Bit by bit, with any size and number of parts, at once."""
        parts = content(sizes, sizes)
        assert second.lookup([(SPACE, ROW[0])]) == [False]
        assert first.store([full(ROW[0], parts)]) == [DONE]
        time.sleep(self.visible_after_seconds)
        assert second.lookup([(SPACE, ROW[0]), (SPACE, ROW[1]), (OTHER_SPACE, ROW[0])]) == [True, False, False]
        assert fetch(second, ROW[0], sizes) == parts

    def test_hundreds_of_blocks_in_a_job(self, first: SecondaryTier, second: SecondaryTier) -> None:
        """A job of several calls; outcomes are per block and in order."""
        blocks = {key(number): content(number, (number * 997 % 90_000 + 1,)) for number in range(900)}
        assert first.store([full(name, parts) for name, parts in blocks.items()]) == [DONE] * 900
        into = [empty(name, [len(part) for part in parts]) for name, parts in reversed(blocks.items())]
        assert (
            second.load([*into[:300], empty(key(1000), (5,)), *into[300:]]) == [DONE] * 300 + [MISSING] + [DONE] * 600
        )
        assert all(held(block) == blocks[block.key] for block in into)
        names = [(SPACE, key(number)) for number in range(2000)]
        assert second.lookup(names) == [True] * 900 + [False] * 1100

    def test_blocks_larger_than_a_call(self, first: SecondaryTier, second: SecondaryTier) -> None:
        parts = content("large", (20 * MIB, 1))
        assert first.store([full(ROW[0], parts), full(ROW[1], [b"x"])]) == [DONE, DONE]
        assert fetch(second, ROW[0], (20 * MIB, 1)) == parts

    def test_invalid_blocks_are_refused(self, first: SecondaryTier) -> None:
        """Other blocks of the job are stored and loaded."""
        bad = b"k" * 5000
        batch = [full(ROW[0], [b"a"]), full(bad, [b"x"]), full(ROW[1], [b""]), full(ROW[2], [b"b"])]
        assert first.store(batch) == [DONE, FAILED, FAILED, DONE]
        assert first.load([empty(bad, (1,)), empty(ROW[2], (1,)), empty(ROW[1], (1,))]) == [MISSING, DONE, MISSING]
        assert first.lookup([(SPACE, bad), (SPACE, ROW[0])]) == [False, True]

    def test_removal_leaves_the_block_to_others(self, first: SecondaryTier, second: SecondaryTier) -> None:
        first.store([full(ROW[0], [b"x"])])
        first.remove([(SPACE, ROW[0])])
        assert fetch(second, ROW[0], (1,)) == (b"x",)

    def test_a_slow_store_is_used(self, first: SecondaryTier) -> None:
        """An answer before the deadline is not too late."""
        first.store([full(ROW[0], [b"x"])])
        self.freeze(frozen=True)
        thaw = threading.Timer(0.2, lambda: self.freeze(frozen=False))
        thaw.start()
        assert fetch(first, ROW[0], (1,)) == (b"x",)
        thaw.join()
        assert first.last_error is None

    @pytest.mark.parametrize("damage", ["byte", "header", "format", "short", "long", "empty", "other block"])
    def test_a_wrong_value_is_never_loaded(self, first: SecondaryTier, second: SecondaryTier, damage: str) -> None:
        """It is not used again, other blocks are unaffected, and the block can be stored again."""
        sizes = (5000, 300)
        blocks = {name: content(name, sizes) for name in ROW[:3]}
        for name, parts in blocks.items():
            first.store([full(name, parts)])
        stored = full(ROW[1], blocks[ROW[1]])
        value = bytearray(self.value_of(stored) or b"")
        assert len(value) > sum(sizes)
        match damage:
            case "byte":
                value[-100] ^= 1
            case "header":
                value[5] ^= 1
            case "format":
                value[3] += 1
            case "short":
                del value[-1]
            case "long":
                value += b"x" * 100
            case "empty":
                del value[self.smallest_value :]
            case "other block":
                value = bytearray(self.value_of(full(ROW[0], blocks[ROW[0]])) or b"")
        self.replace_value(stored, bytes(value))
        assert second.load([empty(name, sizes) for name in ROW[:3]]) == [DONE, CORRUPT, DONE]
        assert second.load([empty(ROW[1], sizes)]) == [MISSING]
        assert second.store([stored]) == [DONE]
        assert fetch(second, ROW[1], sizes) == blocks[ROW[1]]

    def test_blocks_with_other_part_sizes_are_corrupt(self, first: SecondaryTier) -> None:
        for sizes in [(999,), (1001,), (500, 500)]:
            first.store([full(ROW[0], content(1, (1000,)))])
            assert first.load([empty(ROW[0], sizes)]) == [CORRUPT]

    def test_a_full_store_has_its_outcome(self, first: SecondaryTier, second: SecondaryTier) -> None:
        """Stored blocks stay readable; the error is shown."""
        first.store([full(ROW[0], content(0, (64 * KIB,)))])
        self.make_full()
        assert set(first.store([full(name, content(name, (MIB,))) for name in ROW[1:]])) <= {NO_SPACE, DONE}
        assert first.store([full(key(50), content(50, (4 * MIB,)))]) == [NO_SPACE]
        assert "full" in (first.last_error or "")
        assert fetch(second, ROW[0], (64 * KIB,)) == content(0, (64 * KIB,))

    def test_a_hanging_store_is_a_miss(self, hasty: SecondaryTier) -> None:
        """Each call ends at its deadline. After two, calls fail at once until a probe succeeds."""
        hasty.store([full(ROW[0], [b"x"])])
        self.freeze(frozen=True)
        started = time.monotonic()
        for number in range(200):  # without a breaker: 150 s
            answers = hasty.lookup([(SPACE, name) for name in ROW])
            assert answers[1:] == [False] * (len(ROW) - 1)
            assert not answers[0] or (number == 0 and self.visible_after_seconds), "answers without a call"
            assert hasty.load([empty(ROW[0], (1,))]) == [FAILED]
            assert hasty.store([full(ROW[1], [b"x"])]) == [FAILED]
        assert time.monotonic() - started < GENEROUS_SECONDS
        assert hasty.last_error
        self.freeze(frozen=False)
        wait_until(lambda: hasty.lookup([(SPACE, ROW[0])]) == [True])
        assert fetch(hasty, ROW[0], (1,)) == (b"x",)
        wait_until(lambda: checked(hasty) is None)

    def test_a_killed_store_is_a_miss(self, first: SecondaryTier, tmp_path: Path) -> None:
        """In the middle of loads: they end within the deadline, and work again after a restart."""
        sizes = (MIB,)
        first.store([full(name, content(name, sizes)) for name in ROW])
        outcomes: list[Outcome] = []
        loading, killed = threading.Event(), threading.Event()

        def load() -> None:
            while not killed.is_set():
                into = [empty(name, sizes) for name in ROW]
                done = first.load(into)
                assert all(
                    held(block) == content(block.key, sizes)
                    for block, outcome in zip(into[::7], done[::7], strict=True)
                    if outcome is DONE
                )
                outcomes.extend(done)
                loading.set()

        threads = [threading.Thread(target=load) for _ in range(2)]
        for thread in threads:
            thread.start()
        assert loading.wait(GENEROUS_SECONDS)
        self.kill_store()
        assert first.load([empty(name, sizes) for name in ROW]) == [FAILED] * len(ROW)
        killed.set()
        for thread in threads:
            thread.join(GENEROUS_SECONDS)
            assert not thread.is_alive()
        assert set(outcomes) <= {DONE, FAILED}
        self.start_store(tmp_path)
        wait_until(lambda: first.load([empty(ROW[0], sizes)]) == [MISSING])
        assert first.store([full(ROW[0], [b"new"])]) == [DONE]
        assert fetch(first, ROW[0], (3,)) == (b"new",)

    def test_a_store_may_appear_later(self, open_tier: Callable[[], SecondaryTier], tmp_path: Path) -> None:
        """A server starts without it. The status shows the store's return without any traffic."""
        self.kill_store()
        tier = open_tier()
        assert tier.lookup([(SPACE, ROW[0])]) == [False]
        assert tier.store([full(ROW[0], [b"x"])]) == [FAILED]
        assert tier.last_error
        self.start_store(tmp_path)
        try:
            time.sleep(PROBE_SECONDS)

            wait_until(lambda: tier.store([full(ROW[0], [b"x"])]) == [DONE])
            wait_until(lambda: checked(tier) is None)
            assert fetch(tier, ROW[0], (1,)) == (b"x",)
        finally:
            self.kill_store()

    def test_threads_work_at_the_same_time(self, first: SecondaryTier, second: SecondaryTier) -> None:
        """Stores of both servers for the same blocks, loads and lookups; no wrong byte."""
        sizes = (70_000, 5)
        stored, wrong, loads = threading.Event(), [], []

        def store(tier: SecondaryTier) -> None:
            for _ in range(10):
                outcomes = tier.store([full(name, content(name, sizes)) for name in ROW])
                wrong.extend(outcome for outcome in outcomes if outcome is not DONE)

        def load(tier: SecondaryTier) -> None:
            while not (stored.is_set() and loads):
                into = [empty(name, sizes) for name in ROW]
                done = [block for block, outcome in zip(into, tier.load(into), strict=True) if outcome is DONE]
                loads.extend(done)
                wrong.extend(block.key for block in done if held(block) != content(block.key, sizes))

        writers = [threading.Thread(target=store, args=(tier,)) for tier in (first, second)]
        readers = [threading.Thread(target=load, args=(tier,)) for tier in (first, second)]
        for thread in writers + readers:
            thread.start()
        for thread in writers:
            thread.join()
        stored.set()
        for thread in readers:
            thread.join()
        assert wrong == []


def checked(tier: SecondaryTier) -> str | None:
    """Returns the error of a tier after a check of all nodes, which servers repeat."""
    tier.free_disk_bytes()
    return tier.last_error


class KeyValueContract(SharedTierContract):
    """Tests of two servers at a store with one value per block."""

    @abstractmethod
    def write(self, name: bytes, value: bytes) -> None:
        """Writes a value, replacing an existing one."""

    @abstractmethod
    def read(self, name: bytes) -> bytes | None: ...

    def name_of(self, namespace: NamespaceId, key: bytes) -> bytes:
        return name_of(namespace, key, self.value_format)

    def value_of(self, block: BlockBytes) -> bytes | None:
        return self.read(self.name_of(block.namespace, block.key))

    def replace_value(self, block: BlockBytes, value: bytes) -> None:
        self.write(self.name_of(block.namespace, block.key), value)

    def test_a_value_is_written_once(self, first: SecondaryTier, second: SecondaryTier) -> None:
        """Keys name the content, so a second store keeps the value."""
        parts = content("once", (5000,))
        first.store([full(ROW[0], parts)])
        name = self.name_of(SPACE, ROW[0])
        before = self.read(name)
        assert second.store([full(ROW[0], parts), full(ROW[1], [b"x"])]) == [DONE, DONE]
        assert self.read(name) == before

    def test_names_have_format_tenant_namespace_and_key(self, first: SecondaryTier) -> None:
        """So permissions can be given per tenant, and another format sees none of the values."""
        namespace, name = NamespaceId(bytes(range(32))), b"\xff\x00"
        first.store([full(name, [b"x"], namespace)])
        assert (
            self.read(
                b"kvtier/%d/000102030405060708090a0b0c0d0e0f/101112131415161718191a1b1c1d1e1f/ff00" % self.value_format
            )
            is not None
        )

    def test_a_wrong_value_is_deleted(self, first: SecondaryTier, second: SecondaryTier) -> None:
        """So that no other server reads it."""
        first.store([full(ROW[0], content(0, (500,)))])
        name = self.name_of(SPACE, ROW[0])
        self.write(name, (self.read(name) or b"")[:-1] + b"?")
        assert second.load([empty(ROW[0], (500,))]) == [CORRUPT]
        assert self.read(name) is None


class ExpiringValueContract(KeyValueContract):
    """Tests of a store whose values have a time to live."""

    @abstractmethod
    def ttl_of(self, name: bytes) -> float: ...

    def test_a_repeated_store_starts_the_life_again(self, first: SecondaryTier, second: SecondaryTier) -> None:
        for tier in (first, second):
            tier.store([full(ROW[0], content("once", (5000,)))])
        assert 900 < self.ttl_of(self.name_of(SPACE, ROW[0])) <= 1000

    def test_values_expire(self, store: None, open_tier: Callable[[RemoteLimits], SecondaryTier]) -> None:
        """Each value has a time to live, which a load and a repeated store start again."""
        short, long = open_tier(RemoteLimits(ttl_seconds=500)), open_tier(RemoteLimits(ttl_seconds=5000))
        short.store([full(ROW[0], [b"x"]), full(ROW[1], [b"y"])])
        names = [self.name_of(SPACE, ROW[0]), self.name_of(SPACE, ROW[1])]
        assert all(0 < self.ttl_of(name) <= 500 for name in names)
        assert fetch(long, ROW[0], (1,)) == (b"x",)
        long.store([full(ROW[1], [b"y"])])
        assert all(4000 < self.ttl_of(name) <= 5000 for name in names)

    def test_clocks_of_hosts_may_differ(
        self, first: SecondaryTier, second: SecondaryTier, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """By years: the store alone counts the time to live, and no value has a date."""
        now = time.time()
        for skew in (1e8, -1e8):
            monkeypatch.setattr(time, "time", lambda skew=skew: now + skew)
            first.store([full(ROW[0], [b"x"])])
            assert 900 < self.ttl_of(self.name_of(SPACE, ROW[0])) <= 1000
            monkeypatch.setattr(time, "time", lambda: now)
            assert fetch(second, ROW[0], (1,)) == (b"x",)
