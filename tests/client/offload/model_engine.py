"""Model of an inference engine: block pool, prefix cache, block tables and KV content.

A label stands for the KV of a token. It depends on all tokens up to it, so a block with other
labels than its own is wrong. The next token is a function of the last label. Each rank has its own
copy of every block.

State groups work as in vLLM ("align"): a step reads the state from the block of the last token
before it, and writes the state at its end to the block of its last token. Blocks between them are
not allocated.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum

from kvtier.client.offload import CacheGeometry, CacheGroup, CacheGroupKind, FreeBlock

NULL = 0
GARBAGE = -1


class Script:
    """Labels of all tokens: the expected content of every block."""

    def __init__(self) -> None:
        self.meaning: dict[bytes, list[int]] = {}
        """Expected labels of the block of each key."""

    def labels(self, tokens: Sequence[int], known: Sequence[int] = ()) -> list[int]:
        labels = list(known)
        for token in tokens[len(labels) :]:
            labels.append(hash((labels[-1] if labels else 0, token)) & 0xFFFFFFFF)
        return labels

    def key(self, labels: Sequence[int], group: CacheGroup, position: int) -> bytes:
        start, end = position * group.block_tokens, (position + 1) * group.block_tokens
        key = b"%d/%d" % (labels[end - 1], group.index)
        self.meaning[key] = [labels[end - 1]] * group.block_tokens if group.is_state else list(labels[start:end])
        return key


def next_token(label: int) -> int:
    return label % 5


class Status(Enum):
    WAITING = 1
    LOADING = 2
    RUNNING = 3
    FINISHED = 4


@dataclass(eq=False, repr=False)
class ModelRequest:
    """A request of the engine.

    The first ``known`` of ``tokens`` are final; only workers know the rest.
    """

    request_id: str
    script: Script
    tokens: list[int]
    known: int
    max_tokens: int
    prompt: int
    groups: Sequence[CacheGroup]
    may_load: bool = True
    may_save: bool = True
    request_level: bool = False
    status: Status = Status.WAITING
    computed: int = 0
    executed: int = 0
    placeholders: int = 0
    preemptions: int = 0
    tables: list[list[int]] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    ends: set[int] = field(default_factory=set)
    """Token counts at which a step or a load ended: there a state exists."""

    def __repr__(self) -> str:
        return f"<{self.request_id} {self.status.name} {self.computed}/{self.known}>"

    @property
    def server_name(self) -> str:
        return f"server's {self.request_id}"

    @property
    def total_tokens(self) -> int:
        return self.known

    def final_blocks(self, group: CacheGroup) -> int:
        return self.known // group.block_tokens

    def key(self, group: CacheGroup, position: int) -> bytes:
        assert position < self.final_blocks(group), "a key of tokens that are not final"
        return self.script.key(self.all_labels(), group, position)

    def all_labels(self) -> list[int]:
        self.labels = self.script.labels(self.tokens, self.labels)
        return self.labels


class Pool:
    """Block pool: reference counts, prefix cache, and free blocks in eviction order."""

    def __init__(self, num_blocks: int, block_tokens: int, ranks: int) -> None:
        self.num_blocks = num_blocks
        self.refs = [0] * num_blocks
        self.content = [[[GARBAGE] * block_tokens for _ in range(num_blocks)] for _ in range(ranks)]
        self.named: dict[int, FreeBlock] = {}
        self.cached: dict[bytes, set[int]] = {}
        self.queue: OrderedDict[int, None] = OrderedDict((block, None) for block in range(num_blocks) if block != NULL)
        self.taken: list[int] = []
        """Allocated blocks; a test may clear the list."""

    def allocate(self, count: int) -> list[int] | None:
        if len(self.queue) < count:
            return None
        blocks = [self.queue.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self.forget(block)
            self.refs[block] += 1
        self.taken += blocks
        return blocks

    def forget(self, block: int) -> None:
        named = self.named.pop(block, None)
        if named is not None and named.key is not None:
            self.cached[named.key].discard(block)

    def name(self, block: int, group: int, key: bytes) -> None:
        if block not in self.named:
            self.named[block] = FreeBlock(block, group, key)
            self.cached.setdefault(key, set()).add(block)

    def find(self, key: bytes) -> int | None:
        return min(self.cached.get(key) or (), default=None)

    def wipe(self) -> None:
        """Resets the prefix cache."""
        self.named.clear()
        self.cached.clear()

    # ---- BlockPool

    def hold(self, block_ids: Sequence[int]) -> None:
        for block in block_ids:
            assert block != NULL
            self.queue.pop(block, None)
            self.refs[block] += 1

    def release(self, block_ids: Sequence[int]) -> None:
        for block in block_ids:
            assert self.refs[block] > 0, "released more often than held"
            self.refs[block] -= 1
            if not self.refs[block]:
                self.queue[block] = None
                self.queue.move_to_end(block, last=block in self.named)

    def put_back(self, block_ids: Sequence[int], behind: Collection[int]) -> None:
        self.release(block_ids)
        stay = list(itertools.takewhile(lambda block: block not in self.named or block in behind, self.queue))
        back = [block for block in block_ids if not self.refs[block] and block in self.named]
        for block in reversed(stay + back):
            self.queue.move_to_end(block, last=False)

    def references(self, block_id: int) -> int:
        return self.refs[block_id]

    def cached_key(self, block_id: int) -> bytes | None:
        named = self.named.get(block_id)
        return named.key if named is not None else None

    def free_block(self, block_id: int) -> FreeBlock | None:
        return self.named.get(block_id, FreeBlock(block_id, 0, None)) if block_id in self.queue else None

    def free_blocks(self) -> Iterator[FreeBlock]:
        for block in list(self.queue):
            yield self.named.get(block, FreeBlock(block, 0, None))


@dataclass
class Work:
    """Tokens [start, end) that a step computes.

    The last ``drafts`` are guesses; ``accepted`` are right.

    ``samples``: the request's last token is among them, so the step generates another token.
    """

    request: ModelRequest
    start: int
    end: int
    drafts: int
    samples: bool
    preemptions: int
    tables: list[list[int]]
    accepted: int = 0

    @property
    def right_end(self) -> int:
        """End of the right tokens."""
        return self.end - self.drafts + self.accepted


class Layout:
    """Cache groups of a model, and the blocks that a request needs of each."""

    def __init__(self, geometry: CacheGeometry) -> None:
        self.geometry = geometry

    def needed(self, group: CacheGroup, tokens: int) -> range:
        """Tokens whose KV the next token reads."""
        if group.is_state:
            return range(max(0, tokens - 1), tokens)
        return range(0 if group.retained_tokens is None else max(0, tokens - group.retained_tokens), tokens)

    def local_hit(self, pool: Pool, request: ModelRequest, groups: Sequence[CacheGroup] | None = None) -> int:
        """Length of the prefix that the engine has in every group."""
        step = self.geometry.step_tokens
        for hit in range((request.known - 1) // step * step, 0, -step):
            if all(
                pool.find(request.key(group, position)) is not None
                for group in groups or self.geometry.groups
                for position in range(group.first_needed_block(hit), hit // group.block_tokens)
            ):
                return hit
        return 0

    def hopeful_hit(self, pool: Pool, request: ModelRequest) -> int:
        """Local hit as vLLM reports it with state groups: usually that of full attention."""
        groups = self.geometry.groups
        full = [group for group in groups if group.kind is CacheGroupKind.FULL]
        if not full or not any(group.is_state for group in groups):
            return self.local_hit(pool, request)
        hit = self.local_hit(pool, request, full)
        ahead = any(self.local_hit(pool, request, [group]) > hit for group in groups)
        return self.local_hit(pool, request) if ahead else hit

    def compute(self, pool: Pool, work: Work) -> None:
        """Runs a request's part of a step on every rank, and checks all KV that it reads."""
        request = work.request
        while len(request.tokens) < work.right_end + work.samples:
            request.tokens.append(next_token(request.all_labels()[-1]))
        labels = request.all_labels()
        for content in pool.content:
            for group in self.geometry.groups:
                table, size = work.tables[group.index], group.block_tokens
                if group.is_state:
                    self.compute_state(content, work, table, size)
                    continue
                for at in self.needed(group, work.start):
                    assert table[at // size] != NULL, (
                        f"{request.request_id}: token {at} of group {group.index} is missing"
                    )
                    got = content[table[at // size]][at % size]
                    assert got == labels[at], f"{request.request_id}: wrong KV of token {at}, group {group.index}"
                for at in range(work.start, work.end):
                    content[table[at // size]][at % size] = labels[at] if at < work.right_end else GARBAGE

    def compute_state(self, content: list[list[int]], work: Work, table: list[int], size: int) -> None:
        labels, name = work.request.all_labels(), work.request.request_id
        if work.start:
            source = table[(work.start - 1) // size]
            assert source != NULL, f"{name}: the state at {work.start} is missing"
            assert content[source][:size] == [labels[work.start - 1]] * size, f"{name}: wrong state at {work.start}"
        target = table[(work.right_end - 1) // size]
        assert target != NULL, f"{name}: nowhere to leave the state at {work.right_end}"
        content[target][:size] = [labels[work.right_end - 1]] * size
