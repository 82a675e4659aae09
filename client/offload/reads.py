"""From what a lookup found to what workers read into which block."""

from __future__ import annotations

from .engine import BlockPool, EngineRequest
from .groups import BlockTables, CacheGeometry, GroupKind
from .hits import Found
from .plans import BlockRead

__all__ = ["count_sources", "lacks_blocks", "name_blocks", "plan_reads"]


def plan_reads(geometry: CacheGeometry, found: Found, tables: BlockTables, start: int, end: int) -> list[BlockRead]:
    """Returns the reads that fill all blocks that the engine allocated for [``start``, ``end``) tokens, one per lease.

    None at all when the lookup lacks one of them, for example because the engine took less than was offered and a sliding window
    now ends elsewhere: the engine will take every allocated block for loaded, so half a load is none. Likewise when it took part
    of a block.
    """
    if start % geometry.step_tokens or end % geometry.step_tokens:
        return []
    reads: dict[int, BlockRead] = {}
    for group in geometry.groups:
        items = found.items.get(group.index, {})
        for position in range(start // group.block_tokens, end // group.block_tokens):
            block_id = tables[group.index][position]
            if block_id == geometry.null_block:
                continue
            item = items.get(position)
            if item is None:
                return []
            lease_id, index = item
            read = reads.setdefault(lease_id, BlockRead(lease_id))
            read.indices.append(index)
            read.groups.append(group.index)
            read.block_ids.append(block_id)
    return list(reads.values())


def lacks_blocks(geometry: CacheGeometry, pool: BlockPool, tables: BlockTables, start: int, end: int) -> bool:
    """Whether a sliding window lacks blocks from before ``start`` that a hit up to ``end`` needs.

    An engine with state groups may take for computed what full attention has, though a sliding window lost its blocks: it
    allocates those anew, and a lookup that began at ``start`` has never asked for them.
    """
    if not any(group.is_state for group in geometry.groups):
        return False
    return any(
        (block_id := tables[group.index][position]) != geometry.null_block and pool.known_as(block_id) is None
        for group in geometry.groups
        if group.kind is GroupKind.WINDOW
        for position in range(group.first_needed_block(end), start // group.block_tokens)
    )


def count_sources(geometry: CacheGeometry, found: Found, start: int, end: int) -> dict[str, int]:
    """Returns the tokens of [``start``, ``end``) by the tier that had their block of the leading group ("" where unknown)."""
    block_tokens = geometry.leading_group.block_tokens
    counts: dict[str, int] = {}
    for position in range(start // block_tokens, end // block_tokens):
        source = found.sources.get(position, "")
        counts[source] = counts.get(source, 0) + block_tokens
    return counts


def name_blocks(
    geometry: CacheGeometry, request: EngineRequest, tables: BlockTables, start: int, end: int
) -> list[tuple[int, bytes]]:
    """Returns the blocks of [``start``, ``end``) tokens, each with the key of its content."""
    return [
        (tables[group.index][position], request.key(group, position))
        for group in geometry.groups
        for position in range(start // group.block_tokens, end // group.block_tokens)
        if tables[group.index][position] != geometry.null_block
    ]
