from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from contracts.tier import CORRUPT, DONE, MIB, MISSING, SPACE, content, empty, fetch, full, held

from kvtier.tiers.disk.format import PAGE_BYTES
from kvtier.tiers.disk.format import SlabRecord as DiskRecord
from kvtier.tiers.disk.tier import DiskTier
from kvtier.tiers.lmdb.format import BlockRecord as LMDBRecord
from kvtier.tiers.lmdb.format import chunk_prefix
from kvtier.tiers.lmdb.tier import LMDBTier
from kvtier.tiers.secondary_tier import TierError
from kvtier.tiers.storage.fsck import Finding, check

pytestmark = pytest.mark.usefixtures("no_leaks")

Tier = DiskTier | LMDBTier
SIZES = (100_000, 5000)


@pytest.fixture(params=[DiskTier, LMDBTier])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], Tier]]:
    """Returns a function that closes the previous tier and opens the store again."""
    tiers: list[Tier] = []

    def opened() -> Tier:
        if tiers:
            tiers.pop().close()
        tiers.append(request.param("tier", tmp_path, 64 * MIB, "process", repair=False))
        return tiers[0]

    yield opened
    tiers.pop().close()


@pytest.fixture
def tier(make: Callable[[], Tier]) -> Tier:
    """Returns a tier with the blocks "0" to "299"."""
    tier = make()
    list(tier.entries())
    assert set(tier.store([full(b"%d" % number, content(number, SIZES)) for number in range(300)])) == {DONE}
    return tier


def damage_bytes(tier: Tier, key: bytes) -> None:
    if isinstance(tier, DiskTier):
        (packed,) = tier._store.index.get([SPACE + key])
        assert packed
        path = tier._store.slabs._directory / "slab-00000"
        at = DiskRecord.unpack(SPACE + key, packed).runs[0].start * PAGE_BYTES
    else:
        with tier._store.env.begin() as txn:
            record = LMDBRecord.unpack(SPACE + key, txn.get(SPACE + key, db=tier._store.index))
            chunk = txn.get(chunk_prefix(record.record_id) + bytes(6), db=tier._store.data)
        path = tier._store.directory / "data.mdb"
        at = path.read_bytes().rindex(chunk)
    with path.open("r+b") as file:
        file.seek(at + 100)
        file.write(b"\0\xff")


def damage_record(tier: Tier, key: bytes) -> None:
    env, index = (
        (tier._store.index._env, tier._store.index._blocks)
        if isinstance(tier, DiskTier)
        else (tier._store.env, tier._store.index)
    )
    with env.begin(write=True) as txn:
        packed = bytearray(txn.get(SPACE + key, db=index))
        packed[6] ^= 1
        txn.put(SPACE + key, packed, db=index)


def findings_of(tier: Tier, *, repair: bool) -> list[Finding]:
    """Checks all of a tier; returns the findings."""
    return [finding for step in check(tier, repair=repair) for finding in step.findings]


def test_a_sound_tier_has_no_findings(tier: Tier) -> None:
    """All blocks are read, in slices of a few megabytes."""
    steps = list(check(tier, repair=True))
    assert sum(step.blocks for step in steps) == tier.blocks_to_check() == 300
    assert sum(step.nbytes for step in steps) == 300 * sum(SIZES)
    assert len(steps) >= 4
    assert [finding for step in steps for finding in step.findings] == []
    assert steps[-1].last is None


def test_an_empty_tier_is_checked_at_once(make: Callable[[], Tier]) -> None:
    assert [(step.blocks, step.last) for step in check(make(), repair=False)] == [(0, None)]


def test_damage_is_reported(tier: Tier) -> None:
    """Each damaged block is named with its problem; without repair nothing changes."""
    damage_bytes(tier, b"7")
    damage_bytes(tier, b"250")
    damage_record(tier, b"100")
    for _ in range(2):
        found = {finding.name: finding for finding in findings_of(tier, repair=False)}
        assert set(found) == {SPACE + b"7", SPACE + b"250", SPACE + b"100"}
        assert found[SPACE + b"7"].problem == "its bytes are not those that were stored"
        assert found[SPACE + b"100"].problem == "its index record is damaged"
        assert (found[SPACE + b"7"].nbytes, found[SPACE + b"100"].nbytes) == (sum(SIZES), 0)
        assert not any(finding.repaired for finding in found.values())
    assert tier.load([empty(b"7", SIZES), empty(b"8", SIZES)]) == [CORRUPT, DONE]


def test_repair_drops_damaged_blocks(tier: Tier, make: Callable[[], Tier]) -> None:
    """The other blocks stay, and a second check has no findings."""
    damage_bytes(tier, b"7")
    damage_record(tier, b"100")
    assert {(f.name, f.repaired) for f in findings_of(tier, repair=True)} == {
        (SPACE + b"7", True),
        (SPACE + b"100", True),
    }
    assert findings_of(tier, repair=True) == []
    assert tier.load([empty(b"7", SIZES), empty(b"100", SIZES)]) == [MISSING] * 2
    for number in (6, 8, 99, 101, 299):
        assert fetch(tier, b"%d" % number, SIZES) == content(number, SIZES)
    assert tier.store([full(b"7", content("back", SIZES))]) == [DONE]
    assert fetch(tier, b"7", SIZES) == content("back", SIZES)
    assert len(list(make().entries())) == 299


def test_repair_of_a_store_without_other_work(tier: Tier, make: Callable[[], Tier]) -> None:
    """`kvtier fsck` opens a store only to check it.

    Damage that other work would remove is found.
    """
    damage_bytes(tier, b"7")
    damage_record(tier, b"100")
    assert {f.name for f in findings_of(make(), repair=True)} == {SPACE + b"7", SPACE + b"100"}
    again = make()
    assert len(list(again.entries())) == 298
    assert again.store([full(b"new", content("new", SIZES))]) == [DONE]
    assert fetch(again, b"new", SIZES) == content("new", SIZES)
    assert findings_of(again, repair=False) == []


def test_blocks_of_a_truncated_slab_are_named(tmp_path: Path) -> None:
    tier = DiskTier("disk", tmp_path, 64 * MIB, "process")
    tier.store([full(b"%d" % number, content(number, (MIB,))) for number in range(4)])
    tier.close()
    with (tmp_path / "slab-00000").open("r+b") as file:
        file.truncate(2 * MIB)
    tier = DiskTier("disk", tmp_path, 64 * MIB, "process", repair=False)
    assert [f.problem for f in findings_of(tier, repair=False)] == ["its pages are beyond the end of the slab file"] * 2
    tier.close()


def test_a_tier_without_a_check_raises() -> None:
    """A tier class need not have a check."""
    with pytest.raises(TierError, match="is not Checkable"):
        check(object(), repair=False)


def test_a_check_during_other_work(tier: Tier) -> None:
    """With concurrent stores, replacements, removals and loads, only damaged blocks are found."""
    damage_bytes(tier, b"7")
    stop, wrong, rounds = threading.Event(), [], [0, 0]

    def load() -> None:
        source = random.Random(1)
        while not stop.is_set():
            into = [empty(b"%d" % number, SIZES) for number in source.sample(range(10, 100), 4)]
            wrong.extend(outcome for outcome in tier.load(into) if outcome is not DONE)
            wrong.extend(block.key for block in into if held(block) != content(int(block.key), SIZES))
            rounds[0] += 1

    def store() -> None:
        source = random.Random(2)
        while not stop.is_set():
            keys = [b"%d" % number for number in source.sample(range(100, 300), 8)]
            tier.remove([(SPACE, key) for key in keys[:4]])
            wrong.extend(
                outcome for outcome in tier.store([full(key, [bytes(60_000)]) for key in keys]) if outcome is not DONE
            )
            rounds[1] += 1

    workers = [threading.Thread(target=load), threading.Thread(target=store)]
    for worker in workers:
        worker.start()
    try:
        found = [findings_of(tier, repair=repair) for repair in (False, False, False, True, True)]
    finally:
        stop.set()
        for worker in workers:
            worker.join()
    assert [[finding.name for finding in one] for one in found] == [[SPACE + b"7"]] * 4 + [[]]
    assert [finding.repaired for one in found for finding in one] == [False, False, False, True]
    assert wrong == []
    assert min(rounds) > 3
    assert tier.last_error is None
    assert tier.load([empty(b"7", SIZES)]) == [MISSING]
