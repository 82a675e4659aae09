"""From what a lookup found to what workers read into which block. No I/O."""

# vLLM is not in the environment that is checked:
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Sequence

from .compat import CacheHitSource
from .groups import CacheGeometry
from .lookup import Lookup
from .metadata import BlockRead
from .saves import NULL_BLOCK

__all__ = ["count_sources", "plan_reads"]

_SOURCES = {"cpu": CacheHitSource.HOST, "lmdb": CacheHitSource.DISK, "disk": CacheHitSource.DISK}


def plan_reads(
    geometry: CacheGeometry, lookup: Lookup, block_ids: Sequence[Sequence[int]], start: int, end: int
) -> list[BlockRead]:
    """Returns the reads that fill all blocks that the engine allocated for [``start``, ``end``) tokens, one per lease.

    None at all when the lookup lacks one of them, for example because the engine took less than was offered and a sliding window
    now ends elsewhere: the engine will take every allocated block for loaded, so half a load is none. Likewise when it took part
    of a block.
    """
    if start % geometry.step_tokens or end % geometry.step_tokens:
        return []
    reads: dict[int, BlockRead] = {}
    for group in geometry.groups:
        found = lookup.items.get(group.index, {})
        for position in range(start // group.block_tokens, end // group.block_tokens):
            block_id = block_ids[group.index][position]
            if block_id == NULL_BLOCK:
                continue
            item = found.get(position)
            if item is None:
                return []
            lease_id, index = item
            read = reads.setdefault(lease_id, BlockRead(lease_id))
            read.indices.append(index)
            read.groups.append(group.index)
            read.block_ids.append(block_id)
    return list(reads.values())


def count_sources(geometry: CacheGeometry, lookup: Lookup, start: int, end: int) -> dict[CacheHitSource, int]:
    """Returns the tokens of [``start``, ``end``) by the kind of tier that had their block of the first group."""
    block_tokens = geometry.groups[0].block_tokens
    counts: dict[CacheHitSource, int] = {}
    for position in range(start // block_tokens, end // block_tokens):
        source = _SOURCES.get(lookup.sources.get(position, ""), CacheHitSource.EXTERNAL_UNSPECIFIED)
        counts[source] = counts.get(source, 0) + block_tokens
    return counts
