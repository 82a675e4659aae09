"""Lazy mode on vLLM's own block pool (B4.7)."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from connector_fakes import FULL, FakeClient, make_request, make_step, single_engine
from engine_timeouts import Awaited
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

from kvtier.client import make_key
from kvtier.client.engines.vllm import lora
from kvtier.client.engines.vllm.background import RateLimitedLog
from kvtier.client.engines.vllm.config import ConnectorConfig
from kvtier.client.engines.vllm.scheduler.scheduler import SchedulerSide
from kvtier.client.engines.vllm.worker.reports import WorkerReport
from kvtier.client.offload import CacheGeometry


def _cached(pool: BlockPool, count: int, first: int = 0, tokens: int | None = None) -> list[Any]:
    """Allocates cached blocks, the n-th of a prompt; `tokens` in the last if it is partial."""
    blocks: list[Any] = pool.get_new_blocks(count)
    for number, block in enumerate(blocks, first):
        name = make_block_hash_with_group_id(bytes([number]) * 32, 0)  # type: ignore[arg-type]
        pool._insert_block_hash(name, block, num_tokens=tokens or 4 * (number + 1))
    return blocks


def _side(pool: BlockPool, *, batched_tokens: int = 8, held: float = 0.5) -> SchedulerSide:
    client: Any = FakeClient()
    side = SchedulerSide(
        client,
        CacheGeometry((FULL,), 4, 4),
        "ns",
        ConnectorConfig(lazy_offload=True, max_held_fraction=held),
        1,
        may_load=True,
        may_save=True,
        log=RateLimitedLog(),
        batched_tokens=batched_tokens,
        **single_engine(client),
    )
    side.bind_pool(pool)
    return side


def test_free_blocks_are_saved_before_they_are_evicted() -> None:
    """B4.7, B4.9 In eviction order, held during the copy, once each; the null block never."""
    pool = BlockPool(8, enable_caching=True, hash_block_size=4)
    side = _side(pool)
    blocks = _cached(pool, 6)
    assert not side.build_step(make_step({})).saves, "what is in use is not about to be evicted"
    pool.free_blocks(reversed(blocks))
    free = pool.get_num_free_blocks()
    (job,) = side.build_step(make_step({})).saves
    assert job.block_ids == [block.block_id for block in reversed(blocks)][:3], "and one that is empty goes first"
    assert job.keys == [make_key(bytes([number]) * 32, 0) for number in (5, 4, 3)]
    assert pool.get_num_free_blocks() == free - 3
    side.saves_reported(WorkerReport({job.job_id: 1}))
    assert pool.get_num_free_blocks() == free
    for _ in range(3):
        assert not side.build_step(make_step({})).saves, "the next two steps' blocks are stored"
    taken = [block.block_id for block in pool.get_new_blocks(3)]
    assert taken[1:] == job.block_ids[:2], "what is stored goes next, behind what is empty"
    (rest,) = side.build_step(make_step({})).saves
    assert rest.keys == [make_key(bytes([number]) * 32, 0) for number in (2, 1, 0)]
    side.saves_reported(WorkerReport({rest.job_id: 1}))
    for _ in range(3):
        assert not side.build_step(make_step({})).saves, "each is stored"
    side.close()


def test_a_block_that_is_reused_is_saved_for_what_it_holds_then() -> None:
    """B4.7 The engine evicts the block and reuses it: the new content is stored in turn."""
    pool = BlockPool(3, enable_caching=True, hash_block_size=4)
    side = _side(pool, held=1.0)
    for first in (0, 2):
        pool.free_blocks(_cached(pool, 2, first))
        (job,) = side.build_step(make_step({})).saves
        assert job.keys == [make_key(bytes([number]) * 32, 0) for number in (first, first + 1)]
        side.saves_reported(WorkerReport({job.job_id: 1}))
    side.close()


def test_the_beginning_of_a_block_is_not_saved_for_a_block() -> None:
    """In vLLM a block may have only the hash of its first tokens."""
    pool = BlockPool(3, enable_caching=True, hash_block_size=4)
    side = _side(pool)
    pool.free_blocks(_cached(pool, 1, tokens=2))
    assert not side.build_step(make_step({})).saves
    side.close()


def test_an_adapter_s_free_blocks_are_saved_under_its_tag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A free block does not name its request, so the connector keeps the tags of the hashes."""
    monkeypatch.setattr(lora, "InBackground", Awaited)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"weights")
    adapters = {name: SimpleNamespace(lora_name=name, lora_int_id=1, lora_path=str(tmp_path)) for name in "ab"}
    pool = BlockPool(3, enable_caching=True, hash_block_size=4)
    side = _side(pool, held=1.0)
    for name, adapter in adapters.items():  # both have one id, so the second is refused
        side.new_request(make_request(2, name, lora_request=adapter))
        if name == "a":
            pool.free_blocks(reversed(_cached(pool, 2)))
            (job,) = side.build_step(make_step({})).saves
            tag = side.adapters.tag_of(adapter)
            assert tag is not None
            assert job.keys == [make_key(bytes([number]) * 32 + tag, 0) for number in (1, 0)]
            side.saves_reported(WorkerReport({job.job_id: 1}))
            pool.reset_prefix_cache()
    pool.free_blocks(reversed(_cached(pool, 2)))
    assert not side.build_step(make_step({})).saves
    side.close()
