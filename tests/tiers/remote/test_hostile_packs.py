"""Packs that an attacker has written, or that the store changes, at a store in memory."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import pytest

pytest.importorskip("obstore", reason="needs the package obstore: kvtier[s3]")

from contracts.shared_tier import ROW
from contracts.tier import CORRUPT, DONE, MISSING, SPACE, content, empty, fetch, full, key
from harness.memory_bucket import MemoryBucket, pack_tier

from kvtier.tiers.remote import pack_directory, pack_finder, value_codec
from kvtier.tiers.remote.encryption import EncryptedValues, KeyRing
from kvtier.tiers.remote.object_store import StoreRefusedError, StoreUnavailableError
from kvtier.tiers.remote.pack_directory import KnownPack, PackDirectory
from kvtier.tiers.remote.pack_format import (
    MAX_ENTRIES,
    PackedValue,
    PackName,
    decode_index,
    encode_index,
    folder_of,
)
from kvtier.tiers.remote.pack_tier import PackTier
from kvtier.tiers.remote.value_codec import ValueCodec
from kvtier.tiers.secondary_tier import NamespaceId

OTHER_SPACE = NamespaceId(bytes([SPACE[0] ^ 1]) + SPACE[1:])
SECRET, FORGED = (
    EncryptedValues(lambda: KeyRing(others=(bytes(32),))),
    EncryptedValues(lambda: KeyRing(others=(bytes([7] * 32),))),
)
SIZES = (5000,)


class Clock:
    """A clock that a test moves."""

    now = 1_795_575_600.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def memory() -> MemoryBucket:
    return MemoryBucket()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def tier(memory: MemoryBucket, clock: Clock) -> Iterator[PackTier]:
    tier = pack_tier(memory, clock=clock)
    yield tier
    tier.close()


def store(
    memory: MemoryBucket, at: float, *keys: bytes, space: NamespaceId = SPACE, codec: ValueCodec = value_codec
) -> str:
    """Stores blocks as a server with this time would. Returns the path of the pack."""
    before = memory.paths()
    writer = pack_tier(memory, clock=lambda: at, codec=codec)
    writer._finder.update = lambda *_: None  # type: ignore[method-assign]
    assert writer.store([full(name, content(name, SIZES), space) for name in keys]) == [DONE] * len(keys)
    writer.close()
    [path] = set(memory.paths()) - set(before)
    return path


def plant(
    memory: MemoryBucket,
    at: float,
    entries: bytes,
    values: bytes = b"",
    *,
    space: NamespaceId = SPACE,
    codec: ValueCodec = value_codec,
) -> str:
    """Writes a pack with any entries, and with a valid seal."""
    name = PackName.new(folder_of(space, codec.FORMAT), at, len(entries) + codec.INDEX_SEAL_BYTES)
    memory.put(name.path, codec.seal_index(space, name.path, entries) + values)
    return name.path


HUGE = (1 << 64) - 1
BAD_ENTRIES: dict[str, bytes] = {
    "sizes of 2^64-1": encode_index([b"a", b"b", b"c"], [HUGE] * 3),
    "sum beyond 2^64": encode_index([b"a", b"b"], [1 << 63, 1 << 63]),
    "one byte too many": encode_index([b"a"], [101]),
    "size 0": encode_index([b"a"], [0]),
    "no key": encode_index([b""], [1]),
    "long key": encode_index([b"k" * 2000], [1]),
    "key twice": encode_index([b"a", b"a"], [1, 1]),
    "cut in a key": encode_index([b"abcdef"], [1])[:-1],
    "cut in a size": encode_index([b"a"], [1])[:5],
    "many": encode_index([b"%d" % number for number in range(MAX_ENTRIES + 1)], [1] * (MAX_ENTRIES + 1)),
}


@pytest.mark.parametrize("entries", BAD_ENTRIES.values(), ids=BAD_ENTRIES)
def test_an_impossible_index_hides_only_its_pack(
    memory: MemoryBucket, tier: PackTier, clock: Clock, entries: bytes
) -> None:
    """Packs of this namespace and of others are loaded; the pack is read once a minute."""
    plant(memory, clock.now, entries, b"v" * (100 if len(entries) < 3000 else len(entries)))
    store(memory, clock.now - 1, ROW[0])
    store(memory, clock.now - 1, ROW[1], space=OTHER_SPACE)
    assert tier.lookup([(SPACE, ROW[0]), (SPACE, b"a"), (OTHER_SPACE, ROW[1])]) == [True, False, True]
    assert fetch(tier, ROW[0], SIZES) == content(ROW[0], SIZES)
    assert tier.last_error is None
    reads = memory.calls.count("read")
    for _ in range(5):
        clock.now += pack_finder.REFRESH_SECONDS
        assert tier.lookup([(SPACE, b"a")]) == [False]
    assert memory.calls.count("read") == reads


def test_a_size_from_the_list_is_no_reason_to_read_or_allocate(
    memory: MemoryBucket, tier: PackTier, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store can lie about the size of an object, so the size of a block decides what is read."""
    plant(memory, clock.now, encode_index([ROW[0]], [1 << 60]), b"v" * 100)
    list_honestly = tier._bucket.listed
    monkeypatch.setattr(
        tier._bucket,
        "listed",
        lambda *given: [type(each)(each.path, (1 << 64) - 1, each.stored_at) for each in list_honestly(*given)],
    )
    assert tier.lookup([(SPACE, ROW[0])]) == [True]
    reads = memory.calls.count("read")
    assert tier.load([empty(ROW[0], SIZES)]) == [CORRUPT]
    assert memory.calls.count("read") == reads
    assert tier.lookup([(SPACE, ROW[0])]) == [False]


@pytest.mark.parametrize("hour", ["9999-12-31T23", "2027-11-25T03"])
def test_packs_of_later_times_are_ignored(memory: MemoryBucket, tier: PackTier, clock: Clock, hour: str) -> None:
    """They neither hide a good copy nor are they read, however many there are."""
    store(memory, clock.now - 1, ROW[0])
    for number in range(50):
        memory.put(f"{folder_of(SPACE)}{hour}/0000000-{number:016x}-40", b"x" * 80)
    memory.calls.clear()
    assert tier.lookup([(SPACE, ROW[0]), (SPACE, ROW[1])]) == [True, False]
    assert memory.calls.count("read") == 1
    assert fetch(tier, ROW[0], SIZES) == content(ROW[0], SIZES)


def test_a_time_ahead_does_not_win(memory: MemoryBucket, tier: PackTier, clock: Clock) -> None:
    """Within the tolerance for clocks, a pack of the present is preferred."""
    late = store(memory, clock.now + 600, ROW[0])
    present = store(memory, clock.now - 5, ROW[0])
    assert tier.lookup([(SPACE, ROW[0])]) == [True]
    found = tier._directory.find(SPACE, ROW[0])
    assert found is not None
    assert found.name.path == present
    assert late in tier._directory


@pytest.mark.parametrize("bad", ["value", "size", "short", "refused", "unavailable", "missing"])
@pytest.mark.parametrize("codec", [value_codec, SECRET], ids=["plain", "encrypted"])
def test_the_next_copy_is_tried(memory: MemoryBucket, clock: Clock, bad: str, codec: ValueCodec) -> None:
    """After a bad copy of a block, in the same load."""
    tier = pack_tier(memory, clock=clock, codec=codec)
    store(memory, clock.now - 9, ROW[0], codec=codec)
    path = store(memory, clock.now - 1, ROW[0], codec=codec)
    pack = memory.get(path)
    if bad == "size":
        memory.delete(path)
        plant(memory, clock.now - 1, encode_index([ROW[0]], [77]), b"v" * 77, codec=codec)
    assert tier.lookup([(SPACE, ROW[0])]) == [True]
    match bad:
        case "value":
            memory.put(path, pack[:-9] + bytes([pack[-9] ^ 1]) + pack[-8:])
        case "short":
            memory.put(path, pack[:-9])
        case "missing":
            memory.delete(path)
        case "refused":
            memory.before = lambda _, read: StoreRefusedError("status 403") if read == path else None
        case "unavailable":
            memory.before = lambda _, read: StoreUnavailableError("status 500") if read == path else None
    assert fetch(tier, ROW[0], SIZES) == content(ROW[0], SIZES)
    assert fetch(tier, ROW[0], SIZES) == content(ROW[0], SIZES)
    tier.close()


def test_many_bad_copies_end(memory: MemoryBucket, tier: PackTier, clock: Clock) -> None:
    """A load tries three copies. Each bad one is forgotten, so a good one is reached."""
    store(memory, clock.now - 99, ROW[0])
    for number in range(7):
        plant(memory, clock.now - number, encode_index([ROW[0]], [len(ROW[0]) + number]), b"v" * 99)
    assert tier.lookup([(SPACE, ROW[0])]) == [True]
    assert [tier.load([empty(ROW[0], SIZES)]) for _ in range(3)] == [[CORRUPT], [CORRUPT], [DONE]]


ATTACKS = ("forged", "renamed", "other namespace", "cut", "changed", "plain")


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_encrypted_pack_is_bound_to_its_name(memory: MemoryBucket, clock: Clock, attack: str) -> None:
    """Without the key no object is accepted as a pack, except the one with this name."""
    path = store(memory, clock.now - 5, ROW[0], ROW[1], codec=SECRET)
    pack = memory.get(path)
    name = PackName.parse(path)
    assert name is not None
    memory.delete(path)
    match attack:
        case "forged":
            plant(memory, clock.now, encode_index([ROW[0]], [50]), b"v" * 50, codec=FORGED)
        case "renamed":
            memory.put(PackName.new(folder_of(SPACE, 4), clock.now, name.index_bytes).path, pack)
        case "other namespace":
            memory.put(path.replace(folder_of(SPACE, 4), folder_of(OTHER_SPACE, 4)), pack)
        case "cut":
            memory.put(path, pack[: name.index_bytes])
        case "changed":
            memory.put(path, pack[:40] + bytes([pack[40] ^ 1]) + pack[41:])
        case "plain":
            entries = encode_index([ROW[0]], [50])
            memory.put(path, value_codec.seal_index(SPACE, path, entries) + b"v" * 50)
    tier = pack_tier(memory, clock=clock, codec=SECRET)
    names = [(space, each) for space in (SPACE, OTHER_SPACE) for each in ROW[:2]]
    assert tier.lookup(names) == [False] * 4
    assert tier.load([empty(each, SIZES, space) for space, each in names]) == [MISSING] * 4
    assert tier.last_error is None
    tier.close()


def test_an_encrypted_index_shows_no_keys(memory: MemoryBucket) -> None:
    assert ROW[0] not in memory.get(store(memory, time.time(), ROW[0], codec=SECRET))


def test_packs_of_an_added_key_are_found(memory: MemoryBucket, clock: Clock) -> None:
    """Although they were ignored before. A seal with an unknown key is not a damage."""
    store(memory, clock.now - 5, ROW[0], codec=SECRET)
    ring = KeyRing(others=(bytes([9] * 32),))
    tier = pack_tier(memory, clock=clock, codec=EncryptedValues(lambda: ring))
    assert tier.lookup([(SPACE, ROW[0])]) == [False]
    ring = KeyRing(others=(bytes([9] * 32), bytes(32)))
    assert tier.lookup([(SPACE, ROW[0])]) == [True]
    assert fetch(tier, ROW[0], SIZES) == content(ROW[0], SIZES)
    tier.close()


def test_foreign_names_do_not_stop_a_list(
    memory: MemoryBucket, tier: PackTier, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names that sort before a good pack, with path parts, other letters and every length."""
    monkeypatch.setattr(pack_finder, "MAX_LISTED", 5)
    path = store(memory, clock.now, ROW[0])
    for number in range(40):
        memory.put(f"{path.rpartition('/')[0]}/!{'é' * (number * 5)}/..{number}", b"x")
        memory.put(f"{folder_of(SPACE)}{folder_of(OTHER_SPACE)}{number}/1730250-0f1e2d3c4b5a6978-40", b"x")
    answers = [tier.lookup([(SPACE, ROW[0])]) for _ in range(40)]
    assert answers[-1] == [True]


def test_a_name_of_another_folder_is_no_pack() -> None:
    path = PackName.new(folder_of(OTHER_SPACE), 1e9, 64).path
    assert PackName.parse(path, folder_of(OTHER_SPACE)) is not None
    assert PackName.parse(path, folder_of(SPACE)) is None
    assert PackName.parse(f"{folder_of(SPACE)}x/{path.split('/', 4)[4]}", folder_of(SPACE)) is None


def test_a_pack_without_answers_is_ignored_for_a_minute(memory: MemoryBucket, tier: PackTier, clock: Clock) -> None:
    """After two reads. Blocks of other packs are found meanwhile."""
    bad = store(memory, clock.now - 1, ROW[0])
    store(memory, clock.now - 2, ROW[1])
    memory.before = lambda _, path: StoreUnavailableError("status 500") if path == bad else None
    for _ in range(8):
        answers = tier.lookup([(SPACE, ROW[0]), (SPACE, ROW[1])])
        clock.now += pack_finder.REFRESH_SECONDS
    assert answers == [False, True]
    assert memory.calls.count("read") <= 3


def test_a_namespace_without_answers_does_not_affect_another(
    memory: MemoryBucket, tier: PackTier, clock: Clock
) -> None:
    """In one lookup, and in one store."""
    bad = store(memory, clock.now - 1, ROW[0])
    store(memory, clock.now - 2, ROW[1], space=OTHER_SPACE)
    memory.before = lambda _, path: StoreUnavailableError("status 500") if path == bad else None
    assert tier.lookup([(SPACE, ROW[0]), (OTHER_SPACE, ROW[1])]) == [False, True]


class TestDirectory:
    def test_a_tenant_with_many_packs_drops_its_own(self) -> None:
        """The packs of another tenant stay, although they are older."""
        directory = PackDirectory(50_000)
        victim = _pack(OTHER_SPACE, 1.0, [b"kept"])
        directory.add(victim)
        for number in range(500):
            directory.add(_pack(SPACE, 100.0 + number, [key(number)]))
        assert directory.find(OTHER_SPACE, b"kept") is victim
        assert directory.dropped_until(OTHER_SPACE) == 0.0
        assert directory.dropped_until(SPACE) > 100.0
        assert directory.memory_bytes <= 50_000

    def test_copies_of_a_block_are_bounded(self) -> None:
        """The newest ones are known. All packs can be dropped afterwards."""
        directory = PackDirectory(1 << 30)
        packs = [_pack(SPACE, float(number), [b"same"]) for number in range(1000)]
        for pack in packs:
            directory.add(pack)
        tried: list[KnownPack] = []
        while (found := directory.find_other(SPACE, b"same", tried)) is not None:
            tried.append(found)
        assert tried == packs[: -pack_directory.MAX_COPIES - 1 : -1]
        for pack in packs:
            directory.drop(pack)
        assert directory.find(SPACE, b"same") is None
        assert directory.memory_bytes == 0


def _pack(space: NamespaceId, at: float, keys: Sequence[bytes]) -> KnownPack:
    name = PackName.new(folder_of(space), at, 64)
    return KnownPack(space, name, [PackedValue(each, 64, 10) for each in keys])


def test_an_index_fits_into_its_pack() -> None:
    places = decode_index(encode_index([b"a", b"b"], [60, 40]), 28, 128)
    assert [(place.key, place.offset_bytes, place.nbytes) for place in places] == [(b"a", 28, 60), (b"b", 88, 40)]
    with pytest.raises(ValueError, match="outside"):
        decode_index(encode_index([b"a", b"b"], [60, 40]), 28, 127)


def test_many_namespaces_of_a_tenant_forget_no_progress_of_others(
    tier: PackTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pack_finder, "MAX_NAMESPACES", 4)
    mine = tier._finder._progress(SPACE)
    for number in range(20):
        tier._finder._progress(NamespaceId(OTHER_SPACE[:16] + bytes([number]) * 16))
    assert len(tier._finder._spaces) == 4
    assert tier._finder._progress(SPACE) is mine
