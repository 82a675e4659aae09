"""Checksums of blocks: what they cover."""

from kvtier.tiers.secondary_tier import NamespaceId
from kvtier.tiers.storage.checksum import block_checksum

NAMESPACE = NamespaceId(bytes(16))


def test_a_checksum_covers_name_bytes_and_boundaries_of_parts() -> None:
    """Blocks with the same bytes in other parts, or with another name, have other checksums."""
    blocks = [(b"k", (b"ab", b"cd")), (b"k", (b"a", b"bcd")), (b"k", (b"abcd",)), (b"l", (b"ab", b"cd"))]
    sums = {block_checksum(NAMESPACE, key, tuple(map(memoryview, parts))) for key, parts in blocks}
    assert len(sums) == len(blocks)


def test_checksums_on_disks_stay_valid() -> None:
    """Stores of earlier releases have these checksums."""
    parts = (memoryview(b"ab"), memoryview(b"cd"))
    assert block_checksum(NAMESPACE, b"k", parts) == 0x7DB178496F9121D2
    assert block_checksum(NAMESPACE, b"k", parts[:1]) == 0xDC5F7EF3772D8A29
