from __future__ import annotations

from pathlib import Path

import pytest
from contracts.secondary_tier import SecondaryTierContract

from kvtier.tiers.base import NamespaceId, SecondaryTier
from kvtier.tiers.disk import DiskTier
from kvtier.tiers.disk_format import PAGE_BYTES, Record

pytestmark = pytest.mark.usefixtures("no_leaks")


class TestDiskTier(SecondaryTierContract):
    child_source = """
        from kvtier.tiers.disk import DiskTier

        def make(directory, size_bytes):
            return DiskTier("child", directory, size_bytes, "process")
    """

    def make_tier(self, directory: Path, size_bytes: int) -> DiskTier:
        return DiskTier("disk", directory, size_bytes, "process")

    def corrupt(self, tier: SecondaryTier, namespace: NamespaceId, key: bytes) -> None:
        assert isinstance(tier, DiskTier)
        damage_block(tier, key, namespace)


def record_of(tier: DiskTier, key: bytes, namespace: NamespaceId) -> Record:
    """Returns what the index holds of a block."""
    (packed,) = tier._store.index.get([namespace + key])
    assert packed
    return Record.unpack(namespace + key, packed)


def damage_block(tier: DiskTier, key: bytes, namespace: NamespaceId) -> None:
    run = record_of(tier, key, namespace).runs[0]
    with (tier._store.slabs._directory / "slab-00000").open("r+b") as file:
        file.seek(run.start * PAGE_BYTES + 100)
        file.write(b"\0\xff")
