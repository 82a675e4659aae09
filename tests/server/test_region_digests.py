"""Digests in the region, and the jobs of tiers that record and compare them."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from kvtier.cuda.host.region import HostRegion
from kvtier.protos.wire.part_digests import SAMPLE, part_digest
from kvtier.server.region_digests import DamageLog, RegionDigests, RegionJobs
from kvtier.tiers.core.block import Block
from kvtier.tiers.core.manager import TierManager
from kvtier.tiers.secondary_tier import BlockBytes, NamespaceId, Outcome
from kvtier.tiers.types import NamespaceSpec, StoreOrigin

PART = 4096
SPEC = NamespaceSpec(NamespaceId(b"n" * 32), world_size=2, part_bytes=(PART,))


@pytest.fixture
def region() -> Iterator[HostRegion]:
    with HostRegion.create(64 * PART) as made:
        yield made


class Worker:
    """A worker whose tier moves each block that it gets, on another thread."""

    def __init__(self) -> None:
        self.tier = self
        self.name = "below"
        self.got: list[bytes] = []
        self.outcomes: list[Outcome] | None = None

    def store(self, read: Any, number: int, finished: Any) -> None:
        def run() -> None:
            blocks: Sequence[BlockBytes] = read()
            self.got = [block.key for block in blocks]
            finished([Outcome.DONE] * len(blocks) if self.outcomes is None else self.outcomes)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()

    load = store


def blocks_in(region: HostRegion, count: int) -> list[Block]:
    """Returns blocks whose parts are in the region, none of them in the sample."""
    core = TierManager(region.size_bytes, region.size_bytes, ())
    core.add_memory(0, region.size_bytes)
    keys = [bytes([number, 1, 0, 0, 0, 0]) for number in range(count)]
    assert not any(key[-5] % SAMPLE == 0 for key in keys)
    blocks = core._cpu_tier.find_or_add(SPEC, keys)
    for block in blocks:
        block.pins += 1
    core._cpu_tier.reserve(blocks)
    for number, block in enumerate(blocks):
        for rank, slot in enumerate(block.slots):
            assert slot is not None
            region.memory[slot : slot + PART] = bytes([number + 1, rank]) * (PART // 2)
    return blocks


def slot_of(block: Block, rank: int) -> int:
    slot = block.slots[rank]
    assert slot is not None
    return slot


def test_all_parts_of_a_namespace_or_the_sample(region: HostRegion) -> None:
    digests, [block] = RegionDigests(region), blocks_in(region, 1)
    offsets = [slot_of(block, rank) for rank in range(2)]
    digests.record([block])
    assert digests.of(offsets) == [0, 0]
    with digests.all_of(SPEC.id), digests.all_of(SPEC.id):
        pass
    digests.record([block])
    assert digests.of(offsets) == [0, 0]
    with digests.all_of(SPEC.id):
        digests.record([block], 1)
    parts = [region.memory[offset : offset + PART] for offset in offsets]
    assert digests.of(offsets) == [0, part_digest(SPEC.id, block.key, 1, parts[1])]
    assert part_digest(SPEC.id, block.key, 1, parts[1]) != part_digest(SPEC.id, block.key, 0, parts[1])
    digests.clear(offsets)
    assert digests.of(offsets) == [0, 0]


def test_the_bytes_that_a_record_reads(region: HostRegion) -> None:
    """Of one rank of each block that gets a digest, not of the first one only."""
    digests, blocks = RegionDigests(region), blocks_in(region, 3)
    blocks[0].part_bytes = 1
    assert digests.bytes_of(blocks) == 0
    with digests.all_of(SPEC.id):
        assert digests.bytes_of(blocks) == 1 + 2 * PART


def test_one_damaged_part_of_any_rank(region: HostRegion) -> None:
    digests, blocks = RegionDigests(region), blocks_in(region, 3)
    with digests.all_of(SPEC.id):
        digests.record(blocks)
    assert digests.damaged(blocks) == []
    region.memory[slot_of(blocks[1], 1) + 9] ^= 1
    assert digests.damaged(blocks) == [1]
    digests.clear([slot_of(blocks[1], 1)])
    assert digests.damaged(blocks) == []


@pytest.mark.parametrize("outcomes", [None, [Outcome.NO_SPACE, Outcome.DONE], [Outcome.FAILED] * 4, []])
def test_a_store_leaves_damaged_blocks_out(region: HostRegion, outcomes: list[Outcome] | None) -> None:
    """The tier's outcomes are those of the others. A failed job has one per block of the job."""
    digests, blocks = RegionDigests(region), blocks_in(region, 4)
    removed: list[tuple[list[Block], str]] = []
    jobs = RegionJobs(region, digests, lambda damaged, who: removed.append((list(damaged), who)))
    with digests.all_of(SPEC.id):
        digests.record(blocks)
    worker, ended = Worker(), list[Sequence[Outcome]]()
    worker.outcomes = outcomes
    for number in (0, 2):
        region.memory[slot_of(blocks[number], 0)] ^= 1
    jobs.store(worker, blocks, ended.append)  # type: ignore[arg-type]
    assert worker.got == [blocks[1].key, blocks[3].key]
    first, second = ([Outcome.DONE] * 2 if outcomes is None else [*outcomes, Outcome.FAILED, Outcome.FAILED])[:2]
    assert ended == [[Outcome.CORRUPT, first, Outcome.CORRUPT, second]]
    assert removed == [([blocks[0], blocks[2]], "below")]


def test_a_block_that_is_damaged_while_a_tier_reads_it(region: HostRegion) -> None:
    """The tier may have read the damaged bytes, so the block does not count as stored."""
    digests, blocks = RegionDigests(region), blocks_in(region, 3)
    removed: list[Block] = []
    jobs = RegionJobs(region, digests, lambda damaged, _: removed.extend(damaged))
    with digests.all_of(SPEC.id):
        digests.record(blocks)

    class Late(Worker):
        def store(self, read: Any, number: int, finished: Any) -> None:
            def late() -> Any:
                found = read()
                region.memory[slot_of(blocks[1], 1)] ^= 1
                return found

            super().store(late, number, finished)

    ended: list[Sequence[Outcome]] = []
    jobs.store(Late(), blocks, ended.append)  # type: ignore[arg-type]
    assert ended == [[Outcome.DONE, Outcome.CORRUPT, Outcome.DONE]]
    assert removed == [blocks[1]]


def test_a_load_records_digests_of_what_was_loaded(region: HostRegion) -> None:
    digests, blocks = RegionDigests(region), blocks_in(region, 3)
    jobs = RegionJobs(region, digests, lambda *_: pytest.fail("nothing is damaged"))
    worker, ended = Worker(), list[Sequence[Outcome]]()
    worker.outcomes = [Outcome.DONE, Outcome.MISSING]  # too few outcomes count as failures
    with digests.all_of(SPEC.id):
        jobs.load(worker, blocks, ended.append)  # type: ignore[arg-type]
    assert ended == [worker.outcomes]
    assert [all(digests.of([slot_of(block, 0), slot_of(block, 1)])) for block in blocks] == [True, False, False]


def test_few_lines_per_tenant(region: HostRegion, capsys: pytest.CaptureFixture[str]) -> None:
    """A line names the first block, and who stored it; another tenant has lines of its own."""
    log, [block] = DamageLog(), blocks_in(region, 1)
    block.origin = StoreOrigin("engine", 3.0)
    for _ in range(100):
        log.write([block, block], "reader", 7.5)
    lines = capsys.readouterr()
    text = lines.out + lines.err
    assert text.count("block damaged in memory") == 10
    assert block.key.hex() in text
    for word in ("engine", "reader", "4.500"):
        assert word in text
    block.namespace, block.origin = NamespaceId(b"m" * 32), None
    log.write([block], "reader", 7.9)
    log.write([block], "reader", 8.1)
    log.write([], "reader", 8.2)
    lines = capsys.readouterr()
    assert (lines.out + lines.err).count("a tier") == 2
