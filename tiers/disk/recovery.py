"""What an index says when a disk store is opened: its blocks, and which pages are free. Reads no block."""

from __future__ import annotations

from dataclasses import dataclass

from .format import Run
from .index import Index
from .slabs import Slabs

__all__ = ["Recovered", "recover"]


@dataclass(frozen=True, slots=True)
class Recovered:
    """What was found."""

    blocks: list[tuple[int, bytes, int]]
    """Record number, name and bytes of each block, oldest first."""
    free: list[Run]
    damaged: list[bytes]
    """Names whose records are damaged, or claim pages that a younger block has."""
    lost: list[bytes]
    """Names of blocks whose pages the files do not have."""
    outside: list[bytes]
    """Names of blocks that lie beyond the bound, which has become smaller."""
    last_number: int


def recover(index: Index, slabs: Slabs) -> Recovered:
    """Goes through the index. Raises `lmdb.Error`."""
    blocks: list[tuple[int, bytes, int]] = []
    claims: list[tuple[int, int, int, bytes]] = []
    damaged, lost, outside = [], [], []
    last_number = 0
    for name, record in index.scan():
        if record is None:
            damaged.append(name)
            continue
        number = record.number
        last_number = max(last_number, number)
        if not all(map(slabs.within, record.runs)):
            outside.append(name)
            continue
        if not all(map(slabs.holds, record.runs)):
            lost.append(name)
            continue
        blocks.append((number, name, record.nbytes))
        claims += [(start, start + pages, number, name) for start, pages in record.runs]
    claims.sort()
    if twice := _claimed_twice(claims):
        damaged += twice
        blocks = [block for block in blocks if block[1] not in twice]
        claims = [claim for claim in claims if claim[3] not in twice]
    blocks.sort()
    free = _between([(start, end) for start, end, _, _ in claims], slabs.extents())
    return Recovered(blocks, free, damaged, lost, outside, last_number)


def _claimed_twice(claims: list[tuple[int, int, int, bytes]]) -> set[bytes]:
    """Returns the elder of any two blocks that claim the same page. There are none unless the index is damaged."""
    names: set[bytes] = set()
    last = (0, 0, 0, b"")
    for claim in claims:
        if claim[0] < last[1]:
            elder, last = sorted((last, claim), key=lambda it: it[2])
            names.add(elder[3])
        else:
            last = claim
    return names


def _between(used: list[tuple[int, int]], extents: list[Run]) -> list[Run]:
    """Returns the pages of the extents that nobody uses. Both are in order."""
    free: list[Run] = []
    at = 0
    for extent in extents:
        page = extent.start
        while at < len(used) and used[at][0] < extent.end:
            start, end = used[at]
            if start > page:
                free.append(Run(page, start - page))
            page, at = end, at + 1
        if page < extent.end:
            free.append(Run(page, extent.end - page))
    return free
