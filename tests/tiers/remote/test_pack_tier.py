"""The tier with packs, at an object store in memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("obstore", reason="needs the package obstore: kvtier[s3]")

from contracts.pack_tier import PackTierContract
from contracts.shared_tier import ROW
from contracts.tier import DONE, FAILED, KIB, MIB, MISSING, SPACE, content, empty, fetch, full, key
from harness.memory_bucket import MemoryBucket, pack_tier

from kvtier.tiers.remote import pack_finder, value_codec
from kvtier.tiers.remote.bucket import StoredObject
from kvtier.tiers.remote.encryption import EncryptedValues, KeyRing
from kvtier.tiers.remote.network_tier import RemoteLimits
from kvtier.tiers.remote.object_store import StoreRefusedError, StoreUnavailableError
from kvtier.tiers.remote.pack_directory import KnownPack, PackDirectory
from kvtier.tiers.remote.pack_format import PackedValue, PackName, folder_of
from kvtier.tiers.remote.pack_tier import READ_BYTES, PackTier
from kvtier.tiers.remote.value_codec import ValueCodec
from kvtier.tiers.secondary_tier import NamespaceId, SecondaryTier

OLD, NEW = bytes(range(32)), bytes(range(32, 64))

# The library starts its threads at the first call, and they stay.
pack_tier(MemoryBucket()).free_disk_bytes()

pytestmark = pytest.mark.usefixtures("no_leaks")


class TestMemoryPackTier(PackTierContract):
    @pytest.fixture(autouse=True)
    def _store_before_its_start(self) -> None:
        self.memory = MemoryBucket()
        self.memory.is_up = False

    def start_store(self, directory: Path) -> None:
        self.delete(*self.paths())
        self.memory.is_up = True

    def kill_store(self) -> None:
        self.memory.is_up = False

    def make_tier(self, limits: RemoteLimits) -> SecondaryTier:
        return pack_tier(self.memory, limits)

    def paths(self) -> list[str]:
        return self.memory.paths()

    def get(self, path: str) -> bytes:
        return self.memory.get(path)

    def put(self, path: str, content: bytes) -> None:
        self.memory.put(path, content)

    def delete(self, *paths: str) -> None:
        self.memory.delete(*paths)

    def freeze(self, *, frozen: bool) -> None:
        self.memory.answers.clear() if frozen else self.memory.answers.set()

    def make_full(self) -> None:
        self.memory.is_full = True


def encrypted(*keys: bytes, tenant: bytes = SPACE[:16]) -> EncryptedValues:
    ring = KeyRing({tenant: keys})
    return EncryptedValues(lambda: ring)


class TestEncryptedPackTier(TestMemoryPackTier):
    """The contract, with two servers that have the same keys."""

    codec = EncryptedValues(lambda: KeyRing(others=(OLD,)))

    def make_tier(self, limits: RemoteLimits) -> SecondaryTier:
        return pack_tier(self.memory, limits, codec=self.codec)


class TestEncryption:
    @pytest.fixture
    def open_tier(self) -> Iterator[Callable[..., PackTier]]:
        """Yields a function that opens the tier of a server with a codec."""
        memory, tiers = MemoryBucket(), []

        def make(codec: ValueCodec = value_codec) -> PackTier:
            tiers.append(pack_tier(memory, codec=codec))
            return tiers[-1]

        yield make
        for tier in tiers:
            tier.close()

    def test_a_block_with_an_unknown_key_is_stored_again(self, open_tier: Callable[..., PackTier]) -> None:
        """It is a miss, and the pack stays: a server with both keys reads both packs."""
        first, second, both = (open_tier(encrypted(*keys)) for keys in ((OLD,), (NEW,), (NEW, OLD)))
        assert first.store([full(ROW[0], [b"x" * 50]), full(ROW[1], [b"y"])]) == [DONE, DONE]
        assert second.lookup([(SPACE, ROW[0])]) == [False]
        assert second.load([empty(ROW[0], (50,)), empty(ROW[1], (5,))]) == [MISSING, MISSING]
        assert second.store([full(ROW[0], [b"x" * 50])]) == [DONE]
        assert fetch(second, ROW[0], (50,)) == (b"x" * 50,)
        assert fetch(both, ROW[0], (50,)) == (b"x" * 50,)
        assert fetch(both, ROW[1], (1,)) == (b"y",)
        assert second.last_error is None

    def test_plain_and_encrypted_packs_do_not_meet(self, open_tier: Callable[..., PackTier]) -> None:
        """So a server with keys never loads a value that an attacker without them has planted."""
        for tier, data in ((open_tier(), b"plain"), (open_tier(encrypted(OLD)), b"coded")):
            assert tier.lookup([(SPACE, ROW[0])]) == [False]
            assert tier.store([full(ROW[0], [data])]) == [DONE]
            assert fetch(tier, ROW[0], (5,)) == (data,)

    def test_a_tenant_without_a_key_is_not_stored(self, open_tier: Callable[..., PackTier]) -> None:
        """Other tenants of the job are."""
        tier, other = open_tier(encrypted(OLD)), NamespaceId(bytes(32))
        assert tier.store([full(ROW[0], [b"x"], other), full(ROW[1], [b"y"])]) == [FAILED, DONE]
        assert tier.load([empty(ROW[0], (1,), other), empty(ROW[1], (1,))]) == [MISSING, DONE]
        assert tier.last_error is None

    def test_keys_that_vanish_during_a_store(self, open_tier: Callable[..., PackTier]) -> None:
        """The pack fails, and the tier says why."""
        rings = [KeyRing({SPACE[:16]: (OLD,)})]
        tier = open_tier(EncryptedValues(lambda: rings[0] if rings else KeyRing()))
        tier._finder.update = lambda *_: rings.clear()  # type: ignore[method-assign]
        assert tier.store([full(ROW[0], [b"x"])]) == [FAILED]
        assert "no key for this tenant" in (tier.last_error or "")


class Clock:
    """A clock that a test moves, from 3 o'clock on."""

    def __init__(self) -> None:
        self.now = 1_795_575_600.0

    def __call__(self) -> float:
        return self.now


def store_at(memory: MemoryBucket, written_at: float, *numbers: int) -> None:
    """Stores blocks as a server with this time would."""
    tier = pack_tier(memory, clock=lambda: written_at)
    assert tier.store([full(key(number), content(number, (100,))) for number in numbers]) == [DONE] * len(numbers)
    tier.close()


def test_lookups_of_known_blocks_make_no_call() -> None:
    """And of unknown ones a list at most every quarter of a second."""
    memory = MemoryBucket()
    clock = Clock()
    store_at(memory, clock.now, *range(10))
    tier = pack_tier(memory, clock=clock)
    assert tier.lookup([(SPACE, key(1))]) == [True]
    memory.calls.clear()
    for _ in range(10):
        assert tier.lookup([(SPACE, key(number)) for number in range(10)]) == [True] * 10
    assert memory.calls == []
    for _ in range(10):
        assert tier.lookup([(SPACE, key(77))]) == [False]
        clock.now += pack_finder.REFRESH_SECONDS / 5
    assert memory.calls.count("list") <= 3
    tier.close()


@pytest.mark.parametrize("behind", [-600, -10, 10, 600])
def test_packs_of_a_server_with_another_time_are_found(behind: float) -> None:
    """A difference of seconds does not matter; one of minutes delays the visibility to a minute."""
    memory, clock = MemoryBucket(), Clock()
    tier = pack_tier(memory, clock=clock)
    assert tier.lookup([(SPACE, key(1))]) == [False]
    clock.now += 30
    assert tier.lookup([(SPACE, key(1))]) == [False]
    store_at(memory, clock.now - behind, 1)
    clock.now += pack_finder.REFRESH_SECONDS
    if behind > pack_finder.OVERLAP_SECONDS:
        assert tier.lookup([(SPACE, key(1))]) == [False]
        clock.now += pack_finder.WIDE_EVERY_SECONDS
    assert tier.lookup([(SPACE, key(1))]) == [True]
    tier.close()


def test_a_new_server_finds_packs_of_the_last_days() -> None:
    """Newest first, hour by hour, until the time to live."""
    memory, clock = MemoryBucket(), Clock()
    hours = (0, 1, 2, 5, 40, 100, 200)
    for number, hour in enumerate(hours):
        store_at(memory, clock.now - hour * 3600 - 5, number)
    tier = pack_tier(memory, RemoteLimits(ttl_seconds=7 * 86400.0), clock=clock)
    memory.calls.clear()
    assert tier.lookup([(SPACE, key(0))]) == [True]
    assert "folders" not in memory.calls, "older hours are not needed"
    names = [(SPACE, key(number)) for number in range(len(hours))]
    for _ in range(len(hours)):  # each lookup works for a limited time
        answers = tier.lookup(names)
    assert answers == [True] * 6 + [False]
    assert fetch(tier, key(5), (100,)) == content(5, (100,))
    calls = len(memory.calls)
    assert tier.lookup([(SPACE, key(99))]) == [False]
    assert len(memory.calls) == calls, "the past has been read completely"
    tier.close()


def test_a_list_with_many_packs_is_continued(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next lookups find the newest packs, and all of an older hour."""
    monkeypatch.setattr(pack_finder, "MAX_LISTED", 3)
    memory, clock = MemoryBucket(), Clock()
    for number in range(14):
        store_at(memory, clock.now - (300 if number < 7 else 8000) + number, number)
    tier = pack_tier(memory, clock=clock)
    names = [(SPACE, key(number)) for number in range(14)]
    for _ in range(12):  # each lookup works for a limited time
        answers = tier.lookup(names)
    assert answers == [True] * 14
    store_at(memory, clock.now, 20)
    clock.now += pack_finder.WIDE_EVERY_SECONDS
    store_at(memory, clock.now, 21)
    for _ in range(2):
        clock.now += pack_finder.REFRESH_SECONDS
        tier.lookup([(SPACE, key(20)), (SPACE, key(21))])
    assert tier.lookup([(SPACE, key(20)), (SPACE, key(21))]) == [True, True]
    tier.close()


def test_packs_stored_during_a_pause_are_found() -> None:
    """The list after a pause begins at the list before it."""
    memory, clock = MemoryBucket(), Clock()
    tier = pack_tier(memory, clock=clock)
    assert tier.lookup([(SPACE, key(1))]) == [False]
    clock.now += 2 * pack_finder.WIDE_SECONDS
    store_at(memory, clock.now, 1)
    clock.now += 2 * pack_finder.WIDE_SECONDS
    assert tier.lookup([(SPACE, key(1))]) == [True]
    tier.close()


def test_packs_that_cannot_be_read_do_not_affect_others(caplog: pytest.LogCaptureFixture) -> None:
    """Their blocks are misses and can be stored. Each is tried again after a minute."""
    memory, clock = MemoryBucket(), Clock()
    for number in range(4):
        store_at(memory, clock.now - 1 - number, number)
    names = [(SPACE, key(number)) for number in range(5)]
    tier = pack_tier(memory, clock=clock)
    bad = {memory.paths()[1]: StoreRefusedError("status 403"), memory.paths()[2]: StoreUnavailableError("lost")}
    memory.before = lambda what, path: bad.get(path) if what == "read" else None
    assert tier.lookup(names) == [True, False, False, True, False]
    del bad[memory.paths()[2]]
    for _ in range(3):
        assert tier.lookup(names) == [True, True, False, True, False]
        clock.now += pack_finder.REFRESH_SECONDS
    assert tier.last_error is None
    assert [record.getMessage() for record in caplog.records].count(
        f"pack {memory.paths()[1]} cannot be read: status 403"
    ) == 1
    assert tier.store([full(key(4), content(4, (100,)))]) == [DONE]
    store_at(memory, clock.now, 5)
    clock.now += pack_finder.REFRESH_SECONDS
    assert tier.lookup([*names, (SPACE, key(5))]) == [True, True, False, True, True, True]
    bad.clear()
    clock.now += pack_finder.WIDE_EVERY_SECONDS
    assert tier.lookup(names) == [True] * 5
    tier.close()


def test_a_refused_list_leaves_the_known_blocks() -> None:
    """They are found and loaded; the status shows the error."""
    memory, clock = MemoryBucket(), Clock()
    tier = pack_tier(memory, clock=clock)
    assert tier.store([full(ROW[0], [b"x"])]) == [DONE]

    def refuse(*_: object) -> list[StoredObject]:
        raise StoreRefusedError("status 403")

    tier._bucket.listed = refuse  # type: ignore[method-assign]
    clock.now += pack_finder.REFRESH_SECONDS
    assert tier.lookup([(SPACE, ROW[0]), (SPACE, ROW[1])]) == [True, False]
    assert "403" in (tier.last_error or "")
    assert tier.load([empty(ROW[0], (1,)), empty(ROW[1], (1,))]) == [DONE, MISSING]
    tier.close()


def test_a_full_directory_drops_the_oldest_packs() -> None:
    """Its memory stays within the limit, and older packs are not read."""
    memory, clock = MemoryBucket(), Clock()
    for number in range(30):
        store_at(memory, clock.now - 10 * 3600 + number * 600, *range(10 * number, 10 * number + 10))
    tier = pack_tier(memory, clock=clock, directory_bytes=20_000)
    names = [(SPACE, key(number)) for number in range(300)]
    for _ in range(20):
        answers = tier.lookup(names)
    known = answers.count(True)
    assert 0 < known < 150
    assert answers == [False] * (300 - known) + [True] * known, "the newest ones"
    assert tier._directory.memory_bytes <= 20_000
    memory.calls.clear()
    tier.lookup(names)
    assert memory.calls == []
    tier.close()


def test_packs_have_the_configured_size() -> None:
    memory = MemoryBucket()
    tier = pack_tier(memory, pack_bytes=MIB)
    blocks = [full(key(number), content(number, (100 * KIB,))) for number in range(25)]
    assert tier.store(blocks) == [DONE] * 25
    sizes = [len(memory.get(path)) for path in memory.paths()]
    assert len(sizes) == 3
    assert max(sizes) <= MIB + 2 * KIB
    tier.close()


def test_large_loads_are_several_reads_and_small_gaps_are_read() -> None:
    """A read has at most 8 MiB; a large gap divides it."""
    memory = MemoryBucket()
    tier = pack_tier(memory, pack_bytes=32 * MIB)
    size = MIB // 2
    names = [key(number) for number in range(40)]
    tier.store([full(name, content(name, (size,))) for name in names])
    for wanted, reads in [(names, 3), (names[:3], 1), ([names[0], names[5]], 2)]:
        memory.calls.clear()
        assert tier.load([empty(name, (size,)) for name in wanted]) == [DONE] * len(wanted)
        assert memory.calls == ["read"] * reads
    assert 20 * MIB > 2 * READ_BYTES
    tier.close()


def test_a_failed_read_fails_its_blocks_only() -> None:
    """Blocks of other packs are loaded; the error is shown."""
    memory = MemoryBucket()
    tier = pack_tier(memory)
    tier.store([full(ROW[1], content(ROW[1], (500,)))])
    (bad,) = memory.paths()
    for name in (ROW[0], ROW[2]):
        tier.store([full(name, content(name, (500,)))])
    for error, shown in [(StoreRefusedError("status 403"), "cannot load"), (StoreUnavailableError("lost"), "lost")]:
        memory.before = lambda _, path, error=error: error if path == bad else None  # type: ignore[misc]
        assert tier.load([empty(name, (500,)) for name in ROW[:3]]) == [DONE, FAILED, DONE]
        assert shown in (tier.last_error or "")
    memory.before = lambda *_: None
    assert tier.load([empty(name, (500,)) for name in ROW[:3]]) == [DONE] * 3
    assert tier.last_error is None
    tier.close()


def test_a_job_ends_only_when_its_transfers_have_ended() -> None:
    """The server uses the memory of the blocks again after the job, even if one read fails."""
    memory = MemoryBucket()
    tier = pack_tier(memory)
    for name in ROW[:2]:
        tier.store([full(name, content(name, (500,)))])
    failing = memory.paths()[1]
    go_on = threading.Event()

    def before(_: str, path: str) -> StoreUnavailableError | None:
        if path == failing:
            return StoreUnavailableError("lost")
        assert go_on.wait(20)
        return None

    memory.before = before
    loading = threading.Thread(target=lambda: tier.load([empty(name, (500,)) for name in ROW[:2]]))
    loading.start()
    time.sleep(0.1)
    assert loading.is_alive()
    go_on.set()
    loading.join()
    tier.close()


def test_a_failed_buffer_is_not_used_again() -> None:
    """After a time-out the library can still be sending it."""
    memory = MemoryBucket()
    tier = pack_tier(memory)
    contents: list[memoryview] = []
    write = type(tier._bucket).write

    def failing(_: str, content: memoryview) -> None:
        contents.append(content)
        raise StoreUnavailableError("no answer")

    tier._bucket.write = failing  # type: ignore[method-assign]
    assert tier.store([full(ROW[0], content("a", (5000,)))]) == [FAILED]
    before = bytes(contents[0])
    tier._bucket.write = lambda path, content: write(tier._bucket, path, content)  # type: ignore[method-assign]
    assert tier.store([full(ROW[1], content("b", (5000,)))]) == [DONE]
    assert bytes(contents[0]) == before
    tier.close()


def test_a_block_twice_in_a_job() -> None:
    memory = MemoryBucket()
    tier = pack_tier(memory)
    block = full(ROW[0], content(0, (500,)))
    assert tier.store([block, full(ROW[1], [b"x"]), block]) == [DONE] * 3
    into = [empty(ROW[0], (500,)), empty(ROW[0], (500,))]
    assert tier.load(into) == [DONE, DONE]
    assert bytes(into[0].parts[0]) == bytes(into[1].parts[0]) == content(0, (500,))[0]
    tier.close()


def known_pack(number: int, keys: list[bytes], written_at: float) -> KnownPack:
    name = PackName(f"{folder_of(SPACE)}{number}", written_at, 100)
    return KnownPack(SPACE, name, [PackedValue(key, 100 + 10 * at, 10) for at, key in enumerate(keys)])


class TestDirectory:
    def test_the_newest_pack_with_a_block_counts(self) -> None:
        """In any order of additions."""
        old, new = known_pack(1, [b"a", b"b"], 1.0), known_pack(2, [b"a"], 2.0)
        for packs in ([old, new], [new, old]):
            directory = PackDirectory(1 << 20)
            for pack in packs:
                directory.add(pack)
            assert directory.find(SPACE, b"a") is new
            assert directory.find(SPACE, b"b") is old

    def test_memory_is_returned(self) -> None:
        """A pack that is added twice counts once."""
        directory = PackDirectory(1 << 20)
        packs = [known_pack(number, [key(number), key(number + 1)], number) for number in range(300)]
        for pack in packs + packs:
            directory.add(pack)
        assert directory.memory_bytes == sum(pack.memory_bytes for pack in packs)
        directory.forget(packs[7], key(8))
        directory.drop_before(100.0)
        assert directory.find(SPACE, key(99)) is None
        for pack in packs:
            directory.drop(pack)
        assert directory.memory_bytes == 0
        assert all(len(tenant.by_age) < 200 for tenant in directory._tenants.values())
        assert directory.find(SPACE, key(200)) is None

    def test_places_are_those_of_the_index(self) -> None:
        pack = known_pack(1, [b"z", b"a", b"m"], 1.0)
        assert [pack.place(name).offset_bytes for name in (b"z", b"a", b"m")] == [100, 110, 120]


@pytest.mark.parametrize(
    "path",
    [
        "kvtier/pack3/00/11/2026-11-25T03/1730250-0f1e2d3c4b5a6978-0",
        "kvtier/pack3/00/11/2026-11-25T03/1730250-0f1e2d3c4b5a6978-ffffff",
        "kvtier/pack3/00/11/2026-13-25T03/1730250-0f1e2d3c4b5a6978-2c4",
        "kvtier/pack3/00/11/2026-11-25T03/9930250-0f1e2d3c4b5a6978-2c4",
        "1730250-0f1e2d3c4b5a6978-2c4",
        "",
    ],
)
def test_other_names_are_no_packs(path: str) -> None:
    assert PackName.parse(path) is None


def test_names_sort_by_time() -> None:
    times = [1_795_575_599.999, 1_795_575_600.0, 1_795_575_600.001, 1_795_579_199.5, 1_795_579_200.0]
    names = [PackName.new(folder_of(SPACE), time, 64) for time in times]
    assert sorted(name.path for name in names) == [name.path for name in names]
    assert [PackName.parse(name.path) for name in names] == names
