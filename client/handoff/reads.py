"""From what a claim was granted to what workers read into which block."""

from __future__ import annotations

from ..offload import BlockRead, BlockTables, CacheGeometry
from .matching import Usable

__all__ = ["plan_pull"]


def plan_pull(
    geometry: CacheGeometry, usable: Usable, lease_id: int, tables: BlockTables, start: int, end: int
) -> list[BlockRead]:
    """Returns the read that fills all blocks that the engine allocated for [``start``, ``end``) tokens, the last one as a part.

    Nothing when the claim lacks one of them, or ``start`` lies within a block: the engine will take every one for loaded.
    """
    read = BlockRead(lease_id)
    for group in geometry.groups:
        if start % group.block_tokens:
            return []
        for position in range(start // group.block_tokens, -(-end // group.block_tokens)):
            block_id = tables[group.index][position]
            if block_id == geometry.null_block:
                continue
            item = usable[group.index].get(position)
            if item is None:
                return []
            read.indices.append(item)
            read.groups.append(group.index)
            read.block_ids.append(block_id)
    return [read] if read.indices else []
