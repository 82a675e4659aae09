"""Disk store: slab files, index and free pages, changed in a crash-safe order.

A store first writes to free pages and then adds the block to the index. A removal first removes
blocks from the index and then frees their pages. So a record never refers to another block's pages,
no matter when the process is killed.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import lmdb

from ..lmdb.environment import Durability
from ..secondary_tier import BlockBytes, TierOpenError
from ..storage.batching import BATCH_BLOCKS
from ..storage.checksum import checksum_of
from ..storage.disk_space import ROOM_BYTES, DiskRefusal
from .format import PAGE_BYTES, PageRun, SlabRecord, pages_for
from .free_space import FreePages
from .index import Index
from .slabs import Slabs

__all__ = ["DiskStore", "Recovered", "recover"]


@dataclass(frozen=True, slots=True)
class Recovered:
    """Blocks found by `recover`, and blocks that cannot be used."""

    blocks: list[tuple[int, bytes, int]]
    """Record number, name and size of each block, oldest first."""
    free: list[PageRun]
    damaged: list[bytes]
    """Names with damaged records, or with pages that a newer block claims."""
    lost: list[bytes]
    """Names of blocks whose pages are missing in the files."""
    outside: list[bytes]
    """Names of blocks with pages beyond the size limit, because the limit was reduced."""
    last_number: int
    missing: str | None
    """How many blocks the index lacks, for operators."""


def recover(index: Index, slabs: Slabs) -> Recovered:
    """Reads the index. Raises `lmdb.Error`."""
    blocks: list[tuple[int, bytes, int]] = []
    claims: list[tuple[int, int, int, bytes]] = []
    damaged, lost, outside = [], [], []
    last_number = 0
    intact: list[bytes] = []
    for name, record in index.scan():
        if record is None:
            damaged.append(name)
            continue
        intact.append(name)
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
    return Recovered(blocks, free, damaged, lost, outside, last_number, index.lost(intact))


def _claimed_twice(claims: list[tuple[int, int, int, bytes]]) -> set[bytes]:
    """Returns the older block of each pair that claims the same page, due to a damaged index."""
    names: set[bytes] = set()
    last = (0, 0, 0, b"")
    for claim in claims:
        if claim[0] < last[1]:
            elder, last = sorted((last, claim), key=lambda it: it[2])
            names.add(elder[3])
        else:
            last = claim
    return names


def _between(used: list[tuple[int, int]], extents: list[PageRun]) -> list[PageRun]:
    """Returns the unused pages of the extents. Both arguments must be sorted."""
    free: list[PageRun] = []
    at = 0
    for extent in extents:
        page = extent.start
        while at < len(used) and used[at][0] < extent.end:
            start, end = used[at]
            if start > page:
                free.append(PageRun(page, start - page))
            page, at = end, at + 1
        if page < extent.end:
            free.append(PageRun(page, extent.end - page))
    return free


MIN_SLAB_BYTES = 1 << 30
MAX_SLABS = 64
INDEX_PAGES = 2
"""Limit of new pages of the index per record."""


class DiskStore:
    """An open store. Any thread may use `index` and `slabs`. To call a method, hold `writing`."""

    def __init__(
        self, directory: Path, size_bytes: int, durability: Durability, *, repair: bool, slab_bytes: int | None
    ) -> None:
        """Opens or creates a store of up to `size_bytes` in `directory`. Raises `TierOpenError`."""
        self.writing = threading.Lock()
        self.index = Index(directory, size_bytes, durability, repair=repair)
        self.payload_bytes = max(0, size_bytes - self.index.size_bytes) // PAGE_BYTES * PAGE_BYTES
        """Limit of all slab files together."""
        self.quarantined_bytes = 0
        """Bytes of corrupt blocks. Their pages are not reused until the store is reopened."""
        self._refusal = DiskRefusal(directory)
        self._power = durability == "power"
        self._number = 0
        try:
            wanted = slab_bytes or max(MIN_SLAB_BYTES, 1 << (size_bytes // MAX_SLABS).bit_length())
            slab_pages = self.index.slab_pages(wanted // PAGE_BYTES)
            self.slabs = Slabs(directory, self.payload_bytes // PAGE_BYTES, slab_pages)
        except (OSError, lmdb.Error) as error:
            self.index.close()
            raise TierOpenError(f"cannot open the disk store in {directory}: {error}") from error
        self._slab_pages = slab_pages
        self._space: FreePages | None = None

    @property
    def refusal(self) -> str | None:
        """Why the files cannot grow, for operators; None if they can."""
        return self._refusal.text or self.index.space.refusal.text

    def describe(self, error: OSError | lmdb.Error) -> str:
        """Returns the text of an error, for operators."""
        return self._refusal.describe(error) if isinstance(error, OSError) else str(error)

    def recover(self) -> Recovered | None:
        """Finds the blocks and the free pages, and truncates files to the limit.

        Later calls do nothing and return None. Raises `lmdb.Error`, `OSError`.
        """
        if self._space is not None:
            return None
        found = recover(self.index, self.slabs)
        unusable = [*found.damaged, *found.lost, *found.outside]
        for start in range(0, len(unusable), BATCH_BLOCKS):
            self.index.remove(unusable[start : start + BATCH_BLOCKS])
        self.index.set_tally(name for _, name, _ in found.blocks)
        self.slabs.trim()
        self._number = found.last_number
        self._space = FreePages(self._slab_pages)
        self._space.give_back(found.free)
        return found

    def put(self, blocks: Sequence[BlockBytes]) -> list[bool]:
        """Writes blocks and adds them to the index together; returns per block if there was room.

        Raises `OSError`, `lmdb.Error`. If the call raises, none of the blocks is present.
        """
        space = self._recovered()
        # Before the slabs take the last bytes of the disk: removals must always find room.
        self.index.space.ensure(INDEX_PAGES * len(blocks))
        if self._refusal.error is not None:
            self._grow(space, ROOM_BYTES // PAGE_BYTES)
        sizes = [block.sizes for block in blocks]
        places = self._place(space, list(map(pages_for, sizes)))
        placed = [
            (block, its_sizes, tuple(runs))
            for block, its_sizes, runs in zip(blocks, sizes, places, strict=True)
            if runs is not None
        ]
        records: list[tuple[bytes, SlabRecord]] = []

        def sum_up() -> None:
            for block, its_sizes, runs in placed:
                self._number += 1
                name = block.namespace + block.key
                records.append((name, SlabRecord(self._number, checksum_of(name, block.parts), its_sizes, runs)))

        try:
            self.slabs.write([(runs, block.parts) for block, _, runs in placed], meanwhile=sum_up)
            if self._power:
                self.slabs.sync()
            replaced = self.index.put(records)
        except (OSError, lmdb.Error) as error:
            # After these two errors the index does not refer to the pages, so they are free. After
            # other errors it may, so the pages are not reused until the store is reopened.
            if isinstance(error, (OSError, lmdb.MapFullError)):
                space.give_back(run for _, _, runs in placed for run in runs)
            raise
        self._free(space, replaced)
        return [runs is not None for runs in places]

    def remove(self, names: Sequence[bytes]) -> None:
        """Removes blocks. Raises `lmdb.Error`, in which case nothing changed."""
        space = self._recovered()
        self._free(space, self.index.remove(names))

    def drop(self, name: bytes, packed: bytes, *, quarantine: bool) -> bool:
        """Removes a block if the record still equals `packed`; returns whether it was removed."""
        if self.index.get([name]) != [packed]:
            return False
        removed = self.index.remove([name])
        if quarantine:
            self.quarantined_bytes += sum(run.pages for record in removed for run in record.runs) * PAGE_BYTES
        elif self._space is not None:
            self._free(self._space, removed)
        return True

    def close(self) -> None:
        try:
            self.slabs.sync()
        finally:
            self.slabs.close()
            self.index.close()

    def _recovered(self) -> FreePages:
        self.recover()
        assert self._space is not None
        return self._space

    def _free(self, space: FreePages, records: Sequence[SlabRecord]) -> None:
        space.give_back(run for record in records for run in record.runs)

    def _place(self, space: FreePages, wanted: list[int]) -> list[list[PageRun] | None]:
        """Allocates one run for all blocks if possible, or else separate runs for each block."""
        run = self._take(space, sum(wanted))
        if run is None:
            return [self._place_one(space, pages) for pages in wanted]
        places: list[list[PageRun] | None] = []
        start = run.start
        for pages in wanted:
            places.append([PageRun(start, pages)])
            start += pages
        return places

    def _place_one(self, space: FreePages, pages: int) -> list[PageRun] | None:
        if run := self._take(space, pages):
            return [run]
        while pages > space.free_pages and self._grow(space, pages - space.free_pages, at_once=True):
            pass
        return space.gather(pages)

    def _take(self, space: FreePages, pages: int) -> PageRun | None:
        run = space.take(pages)
        while run is None and pages <= self._slab_pages and self._grow(space, pages):
            run = space.take(pages)
        return run

    def _grow(self, space: FreePages, pages: int, *, at_once: bool = False) -> bool:
        """Extends the files. After a refusal, tries again only when due, unless `at_once`."""
        if not at_once and not self._refusal.retry_due():
            return False
        try:
            grown = self.slabs.grow(pages)
        except OSError as error:
            self._refusal.record(error)
            return False
        self._refusal.record(None)
        if grown is None:
            return False
        space.give_back([grown])
        return True
