"""Digests of the parts in the region: recorded, compared and cleared by the server.

A client that maps the region records the digests of its own parts. The server does it for parts
that arrive over streams or come from tiers, and clears the digests of the slots that it grants. So
a part whose writer records no digest has none. `record` and `damaged` run on threads, because they
read all bytes.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from ..cuda.host.region import DIGEST_PAGE_BYTES, HostRegion
from ..protos.wire.part_digests import is_sampled, part_digest
from ..tiers.core.block import Block
from ..tiers.secondary_tier import BlockBytes, NamespaceId, Outcome
from ..tiers.types import tenant_of
from .telemetry.logs import get_logger
from .tier_host.worker import Finished, TierWorker

__all__ = ["DamageLog", "RegionDigests", "RegionJobs"]

_log = get_logger(__name__)

_LINES = 10
"""Log lines of a tenant per second."""


class RegionDigests:
    def __init__(self, region: HostRegion) -> None:
        self._memory, self._table = region.memory, region.digests
        self._whole: Counter[NamespaceId] = Counter()
        """Namespaces of which all parts get digests, by the number of sessions that want it."""

    @contextlib.contextmanager
    def all_of(self, namespace: NamespaceId) -> Iterator[None]:
        """Context in which `record` has no sample of a namespace, but all of its parts."""
        self._whole[namespace] += 1
        try:
            yield
        finally:
            self._whole[namespace] -= 1
            if not self._whole[namespace]:
                del self._whole[namespace]

    def of(self, offsets: Iterable[int]) -> list[int]:
        """Returns the digest of the part in each slot; 0 for none."""
        table = self._table
        return [table[offset // DIGEST_PAGE_BYTES] for offset in offsets]

    def clear(self, offsets: Iterable[int]) -> None:
        """Called before a client writes to slots."""
        table = self._table
        for offset in offsets:
            table[offset // DIGEST_PAGE_BYTES] = 0

    def record(self, blocks: Iterable[Block], rank: int | None = None) -> None:
        """Records the digests of the parts of blocks, of one rank or with None of all ranks.

        Blocks that the sample does not have get none, unless sessions want all. The caller pins the
        blocks. Parts without a slot are skipped.
        """
        for block in blocks:
            wanted = self._has_digest(block)
            for number, offset in self._slots(block, rank):
                self._table[offset // DIGEST_PAGE_BYTES] = self._digest(block, number, offset) if wanted else 0

    def bytes_of(self, blocks: Iterable[Block]) -> int:
        """Returns how many bytes of one rank `record` reads."""
        return sum(block.part_bytes for block in blocks if self._has_digest(block))

    def _has_digest(self, block: Block) -> bool:
        return is_sampled(block.key) or block.namespace in self._whole

    def damaged(self, blocks: Sequence[Block]) -> list[int]:
        """Returns the positions of the blocks with a part that does not match its digest.

        The caller pins the blocks.
        """
        return [number for number, block in enumerate(blocks) if self._is_damaged(block)]

    def _is_damaged(self, block: Block) -> bool:
        for number, offset in self._slots(block, None):
            digest = self._table[offset // DIGEST_PAGE_BYTES]
            if digest and digest != self._digest(block, number, offset):
                return True
        return False

    @staticmethod
    def _slots(block: Block, rank: int | None) -> Sequence[tuple[int, int]]:
        """Returns the rank and the offset of each part that has a slot."""
        slots = enumerate(block.slots) if rank is None else ((rank, block.slots[rank]),)
        return [(number, offset) for number, offset in slots if offset is not None]

    def _digest(self, block: Block, rank: int, offset: int) -> int:
        return part_digest(block.namespace, block.key, rank, self._memory[offset : offset + block.part_bytes])


class RegionJobs:
    """Stores and loads of the tiers, with blocks that the core has pinned.

    A tier gets no damaged bytes, and each loaded part gets a digest.
    """

    def __init__(
        self, region: HostRegion, digests: RegionDigests, remove_damaged: Callable[[Sequence[Block], str], object]
    ) -> None:
        """`remove_damaged` is called on a thread."""
        self._memory = region.memory
        self._digests = digests
        self._remove_damaged = remove_damaged

    def load(self, worker: TierWorker, blocks: Sequence[Block], finished: Finished) -> None:
        def ended(outcomes: Sequence[Outcome]) -> None:
            done = (block for block, outcome in zip(blocks, outcomes, strict=False) if outcome is Outcome.DONE)
            try:
                self._digests.record(done)
            finally:
                finished(outcomes)

        worker.load(lambda: self._bytes_of(blocks), len(blocks), ended)

    def store(self, worker: TierWorker, blocks: Sequence[Block], finished: Finished) -> None:
        """Starts a store, without the blocks that are damaged. Their outcome is CORRUPT.

        Blocks are compared before the store and after it, because the tier reads them in between.
        """
        damaged: set[Block] = set()

        def read() -> list[BlockBytes]:
            damaged.update(self._find_damaged(blocks, worker))
            return self._bytes_of(block for block in blocks if block not in damaged)

        def ended(outcomes: Sequence[Outcome]) -> None:
            try:
                if damaged:
                    left = iter(outcomes)
                    outcomes = [Outcome.CORRUPT if block in damaged else next(left, Outcome.FAILED) for block in blocks]
                done = [block for block, each in zip(blocks, outcomes, strict=False) if each is Outcome.DONE]
                if late := self._find_damaged(done, worker):
                    pairs = zip(blocks, outcomes, strict=False)
                    outcomes = [Outcome.CORRUPT if block in late else each for block, each in pairs]
            finally:
                finished(outcomes)

        worker.store(read, len(blocks), ended)

    def _find_damaged(self, blocks: Sequence[Block], worker: TierWorker) -> set[Block]:
        damaged = [blocks[number] for number in self._digests.damaged(blocks)]
        if damaged:
            self._remove_damaged(damaged, worker.tier.name)
        return set(damaged)

    def _bytes_of(self, blocks: Iterable[Block]) -> list[BlockBytes]:
        memory, found = self._memory, []
        for block in blocks:
            nbytes = block.part_bytes
            parts = tuple([memory[slot : slot + nbytes] for slot in block.slots if slot is not None])
            found.append(BlockBytes(block.namespace, block.key, parts))
        return found


class DamageLog:
    """Logs damaged and wrong blocks.

    A tenant gets few lines, because an engine can damage its own blocks.
    """

    def __init__(self) -> None:
        self._second = 0
        self._lines: Counter[bytes] = Counter()
        """Lines of this second, by the tag of the tenant."""

    def write(self, blocks: Sequence[Block], found_by: str, now: float, event: str = "block damaged in memory") -> None:
        """Logs the number of blocks, and who stored the first one. `now`: in seconds."""
        if int(now) != self._second:
            self._second, self._lines = int(now), Counter()
        tenant = tenant_of(blocks[0].namespace) if blocks else b""
        if not blocks or self._lines[tenant] >= _LINES:
            return
        self._lines[tenant] += 1
        block, origin = blocks[0], blocks[0].origin
        details = {"found_by": found_by, "namespace": block.namespace.hex(), "key": block.key.hex()}
        if origin is None:
            details["stored_by"] = "a tier"
        else:
            details |= {"stored_by": origin.engine_id, "seconds_ago": f"{now - origin.begun_at:.3f}"}
        _log.error(event, blocks=len(blocks), **details)
