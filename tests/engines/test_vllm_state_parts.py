"""State-space groups in vLLM's own cache manager, without a model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import SamplingParams, __version__
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.single_type_kv_cache_manager import MambaManager
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request

from kvtier.client.engines.failures import Unsupported
from kvtier.client.engines.vllm.compat import release_of
from kvtier.client.engines.vllm.groups import resolve_geometry
from kvtier.client.engines.vllm.ranks import parts_of
from kvtier.client.engines.vllm.scheduler.block_pool import VllmBlockPool
from kvtier.client.engines.vllm.scheduler.requests import RequestRegistration, VllmRequest
from kvtier.client.offload import BlockTables, CacheGeometry, CacheGroupKind, PrefixHit
from kvtier.client.offload.loads import lacks_blocks, plan_reads
from kvtier.client.offload.saves import SavePlanner, SaveProgress

TOKENS, BLOCKS = 16, 64
FULL = FullAttentionSpec(block_size=TOKENS, num_kv_heads=1, head_size=8, dtype=torch.float32)
NEEDS_032 = pytest.mark.skipif(
    release_of(__version__) != (0, 32), reason="vLLM 0.33 has no prefix cache with the mode `all`"
)
WINDOW = SlidingWindowSpec(block_size=TOKENS, num_kv_heads=1, head_size=8, dtype=torch.float32, sliding_window=32)


def _state(**fields: Any) -> MambaSpec:
    return MambaSpec(
        **{
            "block_size": TOKENS,
            "shapes": ((3, 8), (2, 4, 4)),
            "dtypes": (torch.float32, torch.bfloat16),
            "page_size_padded": FULL.page_size_bytes,
            "mamba_cache_mode": "align",
            **fields,
        }
    )


# The state at a boundary inside a step has its own block: Mamba2 does so on GPUs.
CHECKPOINTED = _state(num_prefill_checkpoint_blocks=1, prefill_checkpoint_alignment=1)


class Engine:
    """vLLM's cache manager with groups of these specs, driven like its scheduler does."""

    def __init__(self, *specs: Any, hash_tokens: int = TOKENS, interval: int | None = None) -> None:
        groups = [KVCacheGroupSpec([f"layer.{number}"], spec) for number, spec in enumerate(specs)]
        self.config = KVCacheConfig(BLOCKS, [], groups, prefix_cache_retention_interval=interval)
        self.geometry = resolve_geometry(_config(prefix_match_unit=hash_tokens), self.config)
        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(hash_tokens, sha256)
        self.manager = KVCacheManager(self.config, 4096, TOKENS, hash_tokens)
        self.pool = VllmBlockPool(self.geometry)
        self.pool.bind(self.manager.block_pool)
        self.planner = SavePlanner(self.geometry, 1, 1.0, 600.0, self.pool)
        self.progress = SaveProgress()
        self.offered: set[tuple[bytes, int]] = set()
        self.handed: set[tuple[bytes, int]] = set()
        self.state_at: dict[int, int] = {}

    def request(self, tokens: list[int]) -> tuple[Request, VllmRequest]:
        request = Request("r", tokens, SamplingParams(max_tokens=100), None, block_hasher=self.hasher)
        view = VllmRequest(request, RequestRegistration("r"), self.geometry, may_load=True, may_save=True)
        return request, view

    def step(self, request: Request, view: VllmRequest, tokens: int) -> None:
        """Schedules this many tokens, plans the step's saves, computes."""
        self.manager.new_step_starts()
        assert self.manager.allocate_slots(request, tokens) is not None
        end = request.num_computed_tokens + tokens
        self.compute(end)
        self.planner.step_ends(self.progress, end)
        job = self.planner.plan(view, self.progress, end, self.tables, 0.0)
        for entries in self.manager.take_boundary_state_offloads().values():
            for group, block_id, boundary in entries:
                if boundary % TOKENS == 0:
                    self.handed.add((view.key(self.geometry.groups[group], boundary // TOKENS - 1), block_id))
        if job is not None:
            for key, block_id, number in zip(job.keys, job.block_ids, job.groups, strict=True):
                group = self.geometry.groups[number]
                if group.is_state:
                    self.offered.add((key, block_id))
                    assert key == view.key(group, self.state_at[block_id] // TOKENS - 1), "a state under another's name"
            self.planner.report({job.job_id: 1}, {}, 0.0)
        request.num_computed_tokens = end

    def compute(self, end: int) -> None:
        """Records the state that a step leaves in each block, like vLLM's workers."""
        for manager, table in zip(self.manager.coordinator.single_type_managers, self.tables(), strict=True):
            if not isinstance(manager, MambaManager):
                continue
            if manager.mamba_cache_mode == "all":
                self.state_at |= {block: (position + 1) * TOKENS for position, block in enumerate(table)}
                continue
            for position, column in manager._checkpoints.values():
                self.state_at[table[column]] = position
            self.state_at[table[(end - 1) // TOKENS]] = end

    def tables(self) -> BlockTables:
        return self.manager.get_block_ids("r")


def _config(**cache: Any) -> Any:
    parallel = SimpleNamespace(decode_context_parallel_size=1, tensor_parallel_size=1, pipeline_parallel_size=1)
    settings = {
        "enable_prefix_caching": True,
        "prefix_caching_hash_algo": "sha256",
        "block_size": TOKENS,
        "prefix_match_unit": None,
    }
    return SimpleNamespace(
        parallel_config=parallel,
        cache_config=SimpleNamespace(**settings | cache),
        speculative_config=None,
        kv_transfer_config=object(),
    )


def _geometry(*specs: Any) -> CacheGeometry:
    groups = [KVCacheGroupSpec([f"layer.{number}"], spec) for number, spec in enumerate(specs)]
    return resolve_geometry(_config(), KVCacheConfig(BLOCKS, [], groups))


@pytest.mark.parametrize(
    ("spec", "hash_tokens", "chunks"),
    [
        # as the scheduler cuts a prompt: at blocks, and before its last one
        (_state(), TOKENS, [16, 32, 16, 16, 5]),
        (_state(), TOKENS, [48, 32, 5]),
        (_state(), TOKENS, [10, 6, 16, 48, 5]),  # a block larger than a step
        (CHECKPOINTED, TOKENS, [85]),
        (CHECKPOINTED, TOKENS, [32, 53]),
        # the state in the block is that of token 84, inside the next block
        (CHECKPOINTED, 4, [32, 53]),
        pytest.param(_state(mamba_cache_mode="all"), TOKENS, [16, 64, 5], marks=NEEDS_032),
    ],
)
@pytest.mark.parametrize("interval", [None, 0])
def test_what_the_engine_hands_off_is_offered(
    spec: MambaSpec, hash_tokens: int, chunks: list[int], interval: int | None
) -> None:
    """B4.10 Each state at a block's end is offered under its hash, from the block that has it."""
    engine = Engine(FULL, spec, hash_tokens=hash_tokens, interval=interval)
    request, view = engine.request(list(range(sum(chunks))))
    for chunk in chunks:
        engine.step(request, view, chunk)
    for token in range(40):
        request.append_output_token_ids(1000 + token)
        engine.step(request, view, 1)
    assert engine.offered >= engine.handed
    assert len(engine.offered) >= 3, "two blocks of the answer at least, and one of the prompt"
    if interval is None and spec.mamba_cache_mode == "align":
        assert engine.offered == engine.handed
    if interval == 0:
        assert len(engine.handed) < len(engine.offered), "what vLLM itself does not keep is stored too"


def test_only_the_state_at_the_end_of_a_hit_is_loaded() -> None:
    """B4.10 vLLM allocates the blocks that a hit needs: all of them, a window, or one state."""
    engine = Engine(FULL, WINDOW, _state())
    request, _ = engine.request(list(range(100)))
    engine.manager.allocate_slots(request, 0, num_external_computed_tokens=80, delay_cache_blocks=True)
    items = {group: {position: (7, 10 * group + position) for position in range(5)} for group in (0, 1)}
    found = PrefixHit(80, items | {2: {4: (7, 24)}})
    assert not lacks_blocks(engine.geometry, engine.pool, engine.tables(), 0, 80)
    [read] = plan_reads(engine.geometry, found, engine.tables(), 0, 80)
    assert [index for index, group in zip(read.indices, read.groups, strict=True) if group == 2] == [24]
    assert [index for index, group in zip(read.indices, read.groups, strict=True) if group == 1] == [13, 14]
    state_table = engine.tables()[2]
    assert list(state_table[:4]) == [0] * 4
    assert state_table[4] == read.block_ids[-1]


def test_a_hit_that_full_attention_alone_has_is_not_taken_for_one_of_the_window() -> None:
    """B4.10 Hits start from full attention; a window's missing blocks are filled too."""
    engine = Engine(FULL, WINDOW, _state())
    request, view = engine.request(list(range(100)))
    for chunk in (32, 32, 32, 4):
        engine.step(request, view, chunk)
    engine.manager.free(request)
    window = [block for block in engine.manager.block_pool.blocks if block.block_hash and block.block_hash[-1] == 1]
    for block in window:
        engine.manager.block_pool._maybe_evict_cached_block(block)
    again, _ = engine.request([*range(96), *range(200, 248)])
    blocks, local, _, diverged = engine.manager.get_computed_blocks_for_connector(again)
    assert (local, diverged) == (96, True)
    engine.manager.new_step_starts()
    assert engine.manager.allocate_slots(
        again, 0, local, blocks, num_external_computed_tokens=16, delay_cache_blocks=True
    )
    assert lacks_blocks(engine.geometry, engine.pool, engine.tables(), 96, 112)


def test_states_are_read_from_specs() -> None:
    """Kinds, sizes and formats of groups; the parts of a state are in the namespace."""
    geometry = _geometry(_state(), FULL, WINDOW)
    assert [group.kind for group in geometry.groups] == [
        CacheGroupKind.STATE,
        CacheGroupKind.FULL,
        CacheGroupKind.WINDOW,
    ]
    assert geometry.groups[0].part_bytes == 3 * 8 * 4 + 2 * 4 * 4 * 2, "without padding"
    assert geometry.leading_group.index == 1
    config = KVCacheConfig(BLOCKS, [], [])
    half = _state(dtypes=(torch.float32, torch.float16))
    assert parts_of(_geometry(half), config).digest != parts_of(_geometry(_state()), config).digest


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (_state(mamba_cache_mode="none"), "--mamba-cache-mode align"),
        (
            ChunkedLocalAttentionSpec(
                TOKENS, num_kv_heads=1, head_size=8, dtype=torch.float32, attention_chunk_size=64
            ),
            "Chunked",
        ),
    ],
)
def test_groups_that_cannot_be_served_are_refused(spec: Any, reason: str) -> None:
    """One reason is logged, and all is a miss."""
    with pytest.raises(Unsupported, match=reason):
        _geometry(FULL, spec)


def test_drafts_over_states_are_refused() -> None:
    """The block of an accepted token's state is known only after the step; so it is refused."""
    config = _config()
    config.speculative_config = SimpleNamespace(use_eagle_block_drop=lambda: False)
    groups = [KVCacheGroupSpec(["a"], _state(num_speculative_blocks=2))]
    with pytest.raises(Unsupported, match="speculative"):
        resolve_geometry(config, KVCacheConfig(BLOCKS, [], groups))
