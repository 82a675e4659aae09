"""vLLM's block pool as the cores see it: names, references and the order of eviction."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from connector_fakes import FULL, WINDOW, FakeClient, make_request, make_step, scheduler_side
from vllm.v1.core.block_pool import BlockPool

from kvtier.client import make_key
from kvtier.client.engines.vllm.scheduler.block_pool import VllmBlockPool
from kvtier.client.engines.vllm.scheduler.requests import RequestRegistration, VllmRequest
from kvtier.client.engines.vllm.worker.reports import WorkerReport
from kvtier.client.offload import CacheGeometry, FreeBlock

GEOMETRY = CacheGeometry((FULL, WINDOW), 8, 4)
BLOCKS = 9  # one of them is vLLM's null block


def key(number: int, group: int = 0, tag: bytes = b"") -> bytes:
    return make_key(bytes([number]) * 32 + tag, group)


class Engine:
    """vLLM's pool, and the adapter over it."""

    def __init__(self, *, bound: bool = True) -> None:
        self.vllm: Any = BlockPool(BLOCKS, True, 4)
        self.pool = VllmBlockPool(GEOMETRY)
        if bound:
            self.pool.bind(self.vllm)

    def fill(self, request: Any, count: int, group: int = 0) -> list[int]:
        """Allocates blocks of a request, and caches the full ones."""
        blocks = self.vllm.get_new_blocks(count)
        self.vllm.cache_full_blocks(request, blocks, 0, min(count, len(request.block_hashes)), 4, group)
        return [block.block_id for block in blocks]

    def free(self, block_ids: Sequence[int]) -> None:
        self.vllm.free_blocks([self.vllm.blocks[number] for number in block_ids])

    def queue(self) -> list[int]:
        return [block.block_id for block in self.pool.free_blocks()]


def adapted(count: int) -> tuple[Any, VllmRequest]:
    request = make_request(count)
    return request, VllmRequest(request, RequestRegistration("r"), GEOMETRY, may_load=True, may_save=True)


@pytest.mark.parametrize(("cached", "tokens"), [(0, 0), (1, 0), (2, 8), (3, 8), (4, 16)])
def test_the_engines_own_hit_ends_at_a_step_of_the_scheduler(cached: int, tokens: int) -> None:
    """The estimate counts the leading blocks that the prefix cache has, in whole steps."""
    engine = Engine()
    request, view = adapted(4)
    assert engine.pool.cached_tokens(view) == 0
    engine.fill(SimpleNamespace(block_hashes=request.block_hashes[:cached]), cached)
    assert engine.pool.cached_tokens(view) == tokens
    assert VllmBlockPool(GEOMETRY).cached_tokens(view) == 0, "without a pool"


def test_a_block_is_found_in_its_group_only() -> None:
    """The same hash names another block in each group."""
    engine = Engine()
    request, view = adapted(2)
    first, second = engine.fill(request, 2)
    assert [engine.pool.cached_block(view, FULL, position) for position in (0, 1)] == [first, second]
    assert engine.pool.cached_block(view, WINDOW, 0) is None
    (third, _) = engine.fill(request, 2, group=1)
    assert engine.pool.cached_block(view, WINDOW, 0) == third
    assert VllmBlockPool(GEOMETRY).cached_block(view, FULL, 0) is None, "without a pool"


def test_a_held_block_is_not_free() -> None:
    """Only a block without references is reused for other content."""
    engine = Engine()
    request, _ = adapted(2)
    table = engine.fill(request, 2)
    assert not engine.pool.unused
    engine.pool.hold(table)
    engine.free(table)
    assert [engine.pool.references(number) for number in table] == [1, 1]
    assert engine.pool.free_block(table[0]) is None
    assert not engine.pool.unused
    assert not set(table) & set(engine.queue())
    engine.pool.release(table[::-1])
    assert engine.queue()[-2:] == table[::-1], "in the order of the call"
    assert engine.pool.unused
    assert engine.pool.num_blocks == BLOCKS


def test_an_unbound_pool_has_no_blocks() -> None:
    engine = Engine(bound=False)
    assert (engine.pool.unused, engine.pool.num_blocks, engine.queue()) == (True, 0, [])


def test_free_blocks_have_the_keys_of_their_content() -> None:
    """Without content there is no key, nor if the hash covers only the first tokens of a block."""
    engine = Engine()
    request, _ = adapted(2)
    table = engine.fill(request, 3)
    window = engine.fill(request, 1, group=1)
    assert engine.pool.cached_key(table[1]) == key(1)
    assert engine.pool.cached_key(table[2]) is None
    engine.vllm.blocks[table[2]].set_block_hash(key(2), num_tokens=10)
    assert engine.pool.cached_key(table[2]) is None
    engine.free([*table, *window])
    free = {block.block_id: block for block in engine.pool.free_blocks()}
    assert [free[number] for number in (*table, *window)] == [
        FreeBlock(table[0], 0, key(0)),
        FreeBlock(table[1], 0, key(1)),
        FreeBlock(table[2], 0, None),
        FreeBlock(window[0], 1, key(0, 1)),
    ]
    assert engine.pool.free_block(window[0]) == free[window[0]]
    assert sum(block.key is None for block in free.values()) == BLOCKS - 1 - 3


def test_free_blocks_of_an_adapter_have_its_tag() -> None:
    """Without the tag, the engine would store KV of an adapter under the key of the model."""
    engine = Engine()
    request, view = adapted(2)
    table = engine.fill(request, 2)
    engine.pool.learn_tag(view, b"tag")
    engine.free(table)
    assert engine.pool.free_block(table[0]) == FreeBlock(table[0], 0, key(0, tag=b"tag"))
    engine.pool.learn_tag(view, None)
    assert engine.pool.free_block(table[0]) == FreeBlock(table[0], 0, None), "its adapter is not known"


def test_tags_of_evicted_blocks_are_forgotten() -> None:
    """The table of tags does not grow with the number of requests; tags of cached blocks stay."""
    engine = Engine()
    request, view = adapted(2)
    table = engine.fill(request, 2, group=1)
    engine.pool.learn_tag(view, b"tag")
    hashes = [number.to_bytes(4, "big") * 8 for number in range(1 << 24, (1 << 24) + 5000)]
    long = SimpleNamespace(block_hashes=hashes)
    for _ in range(3):
        engine.pool.learn_tag(VllmRequest(long, RequestRegistration("l"), GEOMETRY, may_load=True, may_save=True), b"l")
    engine.pool.learn_tag(view, b"tag")
    assert len(engine.pool._tags) <= 5002
    engine.pool.learn_tag(
        VllmRequest(make_request(1), RequestRegistration("s"), GEOMETRY, may_load=True, may_save=True), b"s"
    )
    assert len(engine.pool._tags) == 2
    assert engine.pool.cached_key(table[1]) == key(1, 1, b"tag")


def test_blocks_are_put_back_near_the_front() -> None:
    """B4.7 vLLM evicts them next, but blocks without content and those in `behind` before them."""
    engine = Engine()
    request, _ = adapted(6)
    table = engine.fill(request, 6)
    engine.free(table[:4])
    empty = [number for number in engine.queue() if number not in table]
    assert engine.queue() == [*empty, *table[:4]]
    engine.pool.hold(table[2:4])
    engine.pool.put_back(table[2:4], {table[0]})
    assert engine.queue() == [*empty, table[0], table[2], table[3], table[1]]


def test_only_free_blocks_with_content_are_put_back() -> None:
    """A block that a request uses stays in use; one that lost its content is at the very front."""
    engine = Engine()
    request, _ = adapted(2)
    table = engine.fill(request, 3)  # the third has no content
    engine.pool.hold(table)
    engine.free(table[1:])
    engine.pool.put_back(table, ())
    queue = engine.queue()
    assert table[0] not in queue
    assert engine.pool.references(table[0]) == 1
    assert queue[0] == table[2]
    assert queue[-1] == table[1]
    assert len(queue) == len(set(queue)) == BLOCKS - 2
    engine.free(table[:1])
    assert engine.pool.unused


def test_lazy_mode_stores_the_blocks_that_vllm_evicts_next() -> None:
    """B4.7 They keep their place in the order of eviction."""
    with scheduler_side(FakeClient(), lazy_offload=True, batched_tokens=8) as (scheduler, _):
        vllm: Any = BlockPool(BLOCKS, True, 4)
        scheduler.bind_pool(vllm)
        request = make_request(8)
        blocks = vllm.get_new_blocks(8)
        vllm.cache_full_blocks(request, blocks, 0, 8, 4, 0)
        assert not scheduler.build_step(make_step({})).saves, "no block is free"
        vllm.free_blocks(blocks[::-1])
        (save,) = scheduler.build_step(make_step({})).saves
        assert (save.request_id, save.keys) == ("", [key(7), key(6), key(5), key(4)])
        assert vllm.get_num_free_blocks() == 4
        scheduler.saves_reported(WorkerReport({save.job_id: 1}))
        assert [block.block_id for block in vllm.free_block_queue.iter_blocks_after(None)] == [
            block.block_id for block in blocks[::-1]
        ]
        assert not scheduler.build_step(make_step({})).saves, "they are stored"
