"""Fakes of the offload core's interfaces: request, block pool and server."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

from kvtier.client.offload import CacheGroup, EngineRequest, FreeBlock, LookupId

__all__ = ["FULL", "STATE", "WINDOW", "FakePool", "RecordingServer", "Request"]

FULL = CacheGroup(0, 4, None)
WINDOW = CacheGroup(1, 4, 7)
STATE = CacheGroup(2, 4, None, is_state=True)


@dataclass
class Request:
    """A request of ``count`` blocks of four tokens, and one more token."""

    count: int
    request_id: str = "r"
    may_load: bool = True
    may_save: bool = True
    request_level: bool = False

    @property
    def server_name(self) -> str:
        return f"server's {self.request_id}"

    @property
    def total_tokens(self) -> int:
        return 4 * self.count + 1

    def final_blocks(self, group: CacheGroup) -> int:
        return self.count

    def key(self, group: CacheGroup, position: int) -> bytes:
        assert position < self.count
        return b"%d.%d" % (position, group.index)


class FakePool:
    """A block pool: each block has one reference of a request, unless it is in ``queue``."""

    def __init__(self, num_blocks: int = 100) -> None:
        self.num_blocks = num_blocks
        self.refs = [1] * num_blocks
        self.queue: list[FreeBlock] = []
        self.released: list[int] = []
        self.names: dict[int, bytes] = {}
        self.held: dict[int, FreeBlock] = {}

    def free(self, *blocks: FreeBlock) -> None:
        """Frees blocks and appends them to the eviction queue."""
        ids = {block.block_id for block in blocks}
        self.queue = [block for block in self.queue if block.block_id not in ids] + list(blocks)
        for block in blocks:
            self.refs[block.block_id] = 0

    def hold(self, block_ids: Sequence[int]) -> None:
        for block in block_ids:
            self.refs[block] += 1
        self.held = {block.block_id: block for block in self.queue if self.refs[block.block_id]} | self.held
        self.queue = [block for block in self.queue if not self.refs[block.block_id]]

    def put_back(self, block_ids: Sequence[int], behind: Collection[int]) -> None:
        self.release(block_ids)
        held = [self.held.pop(block) for block in block_ids]
        stay = list(takewhile(lambda block: block.key is None or block.block_id in behind, self.queue))
        back = [block for block in held if not self.refs[block.block_id]]
        self.queue = stay + back + self.queue[len(stay) :]

    def release(self, block_ids: Sequence[int]) -> None:
        self.released += block_ids
        for block in block_ids:
            self.refs[block] -= 1

    def references(self, block_id: int) -> int:
        return self.refs[block_id]

    def cached_key(self, block_id: int) -> bytes | None:
        return self.names.get(block_id)

    def free_block(self, block_id: int) -> FreeBlock | None:
        return next((block for block in self.queue if block.block_id == block_id), None)

    def free_blocks(self) -> Iterator[FreeBlock]:
        yield from list(self.queue)


class RecordingServer:
    """A server that records the requests of the core."""

    def __init__(self) -> None:
        self.there = True
        self.asked: list[tuple[int, str, int, int]] = []
        self.dropped: list[int] = []
        self.abandoned: list[int] = []
        self.ended: list[str] = []
        self.emptied = 0

    def start_lookup(self, lookup: LookupId, request: EngineRequest, start: int, limit: int) -> bool:
        if self.there:
            self.asked.append((lookup, request.request_id, start, limit))
        return self.there

    def drop_lookup(self, lookup: LookupId) -> None:
        self.dropped.append(lookup)

    def abandon_lookup(self, lookup: LookupId) -> None:
        self.abandoned.append(lookup)

    def end_request(self, request: EngineRequest) -> None:
        self.ended.append(request.request_id)

    def empty(self) -> None:
        self.emptied += 1
