"""Splits a job into batches; a tier commits each batch in one transaction."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..secondary_tier import BlockBytes

__all__ = ["BATCH_BLOCKS", "batches"]

BATCH_BLOCKS = 512
"""Limit of blocks per transaction. It also limits how many pages a transaction adds and frees
(`lmdb.probe.UNWRITTEN_PAGES`)."""


def batches(blocks: Sequence[BlockBytes], limit_bytes: int) -> Iterator[list[BlockBytes]]:
    """Splits blocks, in order, into batches of limited size. A batch has no name twice."""
    batch: list[BlockBytes] = []
    names: set[bytes] = set()
    nbytes = 0
    for block in blocks:
        name, size = block.namespace + block.key, block.nbytes
        nbytes += size
        if batch and (nbytes > limit_bytes or len(batch) == BATCH_BLOCKS or name in names):
            yield batch
            batch, names, nbytes = [], set(), size
        batch.append(block)
        names.add(name)
    if batch:
        yield batch
