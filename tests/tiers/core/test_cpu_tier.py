"""The CPU tier under the contract of all tiers: the core and a real region, without other tiers."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import pytest
from contracts.tier import (
    DONE,
    FAILED,
    MIB,
    MISSING,
    NO_SPACE,
    SPACE,
    Tier,
    TierContract,
    content,
    empty,
    fetch,
    full,
    key,
)
from harness.operations import run_to_end

from kvtier.cuda.host.region import HostRegion
from kvtier.tiers.core.call_specs import LookupSpec, StoreSpec
from kvtier.tiers.core.manager import TierManager
from kvtier.tiers.core.slot_allocator import extent_bytes_for
from kvtier.tiers.errors import CoreError
from kvtier.tiers.secondary_tier import BlockBytes, NamespaceId, Outcome
from kvtier.tiers.types import EngineSession, KeyStatus, LeaseId, NamespaceSpec, StoreId, StoreStatus

NEVER = 1e9
HIT = bytes([KeyStatus.HIT])


class CPUTier:
    """The contract of a secondary tier, implemented by the CPU tier.

    A lock serializes the events of the core, as the event loop does; copies run outside it. A lease
    holds each stored block until it is removed; then it may be evicted.
    """

    def __init__(self, size_bytes: int) -> None:
        self.capacity_bytes = size_bytes
        self.region = HostRegion.create(size_bytes)
        self.region.back(0, size_bytes)
        self.core = TierManager(size_bytes, extent_bytes_for(size_bytes), ())
        self.core.add_memory(0, size_bytes)
        self._loop = threading.Lock()
        self._sessions: dict[tuple[NamespaceId, int, int], list[EngineSession]] = {}
        self._held: dict[tuple[NamespaceId, bytes], tuple[EngineSession, LeaseId]] = {}

    def store(self, blocks: Sequence[BlockBytes]) -> list[Outcome]:
        return [self._store(block) for block in blocks]

    def load(self, blocks: Sequence[BlockBytes]) -> list[Outcome]:
        return [self._load(block) for block in blocks]

    def remove(self, keys: Sequence[tuple[NamespaceId, bytes]]) -> None:
        with self._loop:
            for name in keys:
                if name in self._held:
                    self.core.release(*self._held.pop(name))

    def close(self) -> None:
        self.region.close()

    def ranks(self, block: BlockBytes) -> list[EngineSession]:
        """Returns a session per rank, in a namespace whose parts have the sizes of this block's."""
        [size] = {part.nbytes for part in block.parts}
        known = (block.namespace, len(block.parts), size)
        if known not in self._sessions:
            namespace = NamespaceId(hashlib.blake2b(block.namespace + size.to_bytes(8, "big"), digest_size=32).digest())
            spec = NamespaceSpec(namespace, len(block.parts), (size,))
            engine = f"{known}"
            self._sessions[known] = [
                self.core.open_session(f"{engine}/{rank}".encode(), engine, rank, spec)
                for rank in range(len(block.parts))
            ]
        return self._sessions[known]

    def _store(self, block: BlockBytes) -> Outcome:
        stores: list[tuple[EngineSession, StoreId]] = []
        try:
            for rank, part in enumerate(block.parts):
                with self._loop:
                    session = self.ranks(block)[rank]
                    answer = run_to_end(
                        self.core.prepare_store(session, [block.key], StoreSpec(lease_seconds=NEVER), now=0)
                    )
                if answer.statuses == bytes([StoreStatus.PRESENT]):
                    continue
                if answer.store_id is None:
                    self._abandon(stores)
                    return NO_SPACE
                self.region.memory[answer.slots[0] : answer.slots[0] + part.nbytes] = part
                stores.append((session, answer.store_id))
        except CoreError:
            return FAILED
        with self._loop:
            for session, store_id in stores:
                run_to_end(self.core.complete_store(session, store_id))
            self._hold(block)
        return DONE

    def _abandon(self, stores: list[tuple[EngineSession, StoreId]]) -> None:
        with self._loop:
            for session, store_id in stores:
                run_to_end(self.core.complete_store(session, store_id, failed=[0]))

    def _hold(self, block: BlockBytes) -> None:
        name = (block.namespace, block.key)
        if name not in self._held:
            session = self.ranks(block)[0]
            lease = run_to_end(self.core.lookup(session, [block.key], LookupSpec(lease_seconds=NEVER), now=0)).lease
            self._held[name] = (session, lease.id)

    def _load(self, block: BlockBytes) -> Outcome:
        with self._loop:
            session = self.ranks(block)[0]
            lease = run_to_end(self.core.lookup(session, [block.key], LookupSpec(lease_seconds=NEVER), now=0)).lease
            if lease is None:
                return MISSING
            assert lease.statuses() == HIT
            slots = [lease.slots([0], rank)[0] for rank in range(len(block.parts))]
        for slot, part in zip(slots, block.parts, strict=True):
            part[:] = self.region.memory[slot : slot + part.nbytes]
        with self._loop:
            self.core.release(session, lease.id)
        return DONE


class TestCPUTier(TierContract):
    large_block: ClassVar[int] = 100_000
    """Smaller than an extent of a region of 4 MiB."""
    bad_key: ClassVar[bytes] = key(1, group=3)

    def make_tier(self, directory: Path, size_bytes: int) -> CPUTier:
        return CPUTier(size_bytes)

    def test_concurrent_stores(self, tier: Tier) -> None:
        """Several engines store and read, partly the same blocks: each block is whole."""
        wrong: list[object] = []

        def engine(number: int) -> None:
            names = [key(number % 2 * 50 + n) for n in range(50)]
            for name in names:
                outcome = tier.store([full(name, content(name, (40_000,)))])
                into = empty(name, (40_000,))
                # A block that another engine is writing is neither granted nor ready.
                if outcome == [DONE]:
                    wrong.extend([name] if tier.load([into]) != [DONE] else [])

        threads = [threading.Thread(target=engine, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
        for number in range(100):
            assert fetch(tier, key(number), (40_000,)) == content(key(number), (40_000,))

    def test_unleased_blocks_are_evicted(self, tier: Tier) -> None:
        """Three times the capacity is stored: the oldest unleased blocks go and are counted."""
        assert isinstance(tier, CPUTier)
        data = content("x", (MIB,))
        for number in range(192):
            assert tier.store([full(key(number), data)]) == [DONE]
            tier.remove([(SPACE, key(number))])
        stats = tier.core.stats().tiers[0]
        assert stats.evictions >= 128
        assert stats.used_bytes <= stats.capacity_bytes
        assert tier.load([empty(key(191), (MIB,)), empty(key(0), (MIB,))]) == [DONE, MISSING]


@pytest.mark.parametrize("size", [0, 4 * MIB])
def test_a_part_of_an_impossible_size(size: int) -> None:
    """A namespace is refused if its parts are empty or larger than an extent."""
    tier = CPUTier(64 * MIB)
    assert tier.store([full(key(1), [bytes(size)])]) == [FAILED]
    tier.close()
