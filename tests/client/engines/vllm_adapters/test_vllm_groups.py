"""vLLM's KV cache groups: which blocks a hit needs, and which groups are refused."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_config import TOKENS, engine_config, full, kv_cache, state, window
from vllm.v1.kv_cache_interface import FullAttentionSpec, UniformTypeKVCacheSpecs

from kvtier.client.engines.failures import Unsupported
from kvtier.client.engines.vllm.groups import is_known_to_scheduler, resolve_geometry

FOLDER = "/model"
CONFIG = engine_config(FOLDER, {})


class SinkSpec(FullAttentionSpec):
    """A kind of layer that kvtier does not know."""


@pytest.mark.parametrize("tokens", range(1, 11))
@pytest.mark.parametrize("retained", [0, 1, 4])
def test_a_hit_needs_the_blocks_that_the_window_of_the_next_token_reaches(tokens: int, retained: int) -> None:
    """B4.10 A token attends to itself and to the `sliding_window - 1` tokens before it.

    vLLM keeps `extra_retained_tokens` more, because a draft model may compute them again.
    """
    group = resolve_geometry(CONFIG, kv_cache(full(), window(tokens, retained))).groups[1]
    for hit in range(TOKENS, 6 * TOKENS, TOKENS):
        reached = {token // TOKENS for token in range(hit) if hit - token < tokens + retained}
        assert set(range(group.first_needed_block(hit), hit // TOKENS)) == reached


@pytest.mark.parametrize(
    ("speculative", "drops"),
    [
        (None, False),
        (SimpleNamespace(model="draft", use_eagle_block_drop=lambda: False), False),
        (SimpleNamespace(model="eagle", use_eagle_block_drop=lambda: True), True),
    ],
)
def test_the_last_block_of_a_hit_is_computed_again_if_the_draft_model_asks(speculative: Any, *, drops: bool) -> None:
    """B4.2 EAGLE's KV of a token depends on the next token, which the stored block lacks."""
    config = engine_config(FOLDER, {}, speculative=speculative)
    assert resolve_geometry(config, kv_cache()).drop_last_block is drops


@pytest.mark.parametrize("size", ["decode_context_parallel_size", "prefill_context_parallel_size"])
def test_context_parallel_engines_are_refused(size: str) -> None:
    """A rank has some of the tokens of a block, and the configuration does not say which."""
    with pytest.raises(Unsupported, match="context parallelism"):
        resolve_geometry(engine_config(FOLDER, {}, parallel={size: 2}), kv_cache())


@pytest.mark.parametrize(
    ("specs", "reason"),
    [
        ((full(), state("none")), "--mamba-cache-mode align"),
        ((full(), SinkSpec(block_size=TOKENS, num_kv_heads=1, head_size=8, dtype=torch.float32)), "SinkSpec layers"),
    ],
    ids=["states without a cache", "subclass"],
)
def test_layers_whose_blocks_cannot_be_reused_are_refused(specs: tuple[Any, ...], reason: str) -> None:
    """A subclass of a known kind may need other blocks, such as the first ones of a prompt."""
    with pytest.raises(Unsupported, match=reason):
        resolve_geometry(CONFIG, kv_cache(*specs))


def test_groups_without_keys_are_refused() -> None:
    """VLLM caches no blocks of such a group, so that blocks of a hit would be missing."""
    cache = kv_cache(full(), full())
    partly = SimpleNamespace(**vars(cache), prefix_cacheable_group_ids=(0,))
    with pytest.raises(Unsupported, match="cannot be addressed by content"):
        resolve_geometry(CONFIG, partly)  # type: ignore[arg-type]


def test_a_group_with_two_windows_is_refused() -> None:
    """A block of the group would be needed by some layers and not by others."""
    specs = {"layer.0": window(5), "layer.1": window(5)}
    cache = kv_cache(UniformTypeKVCacheSpecs(TOKENS, specs))
    cache.kv_cache_groups[0].layer_names[:] = specs
    (group,) = resolve_geometry(CONFIG, cache).groups
    assert (group.layers, group.retained_tokens) == (("layer.0", "layer.1"), 4)
    specs["layer.1"] = window(9)
    with pytest.raises(Unsupported, match="group 0 mixes attention windows"):
        resolve_geometry(CONFIG, cache)


def test_the_scheduler_does_not_know_layers_that_differ_from_the_first_of_their_group() -> None:
    """VLLM describes a group to the scheduler by one layer. The workers then tell their layers."""
    swapped = replace(state(), shapes=((3, 2), (4,)))
    for other, known in ((full(), True), (full(head_size=16), False), (swapped, False)):
        specs = {"layer.0": state() if other is swapped else full(), "layer.1": other}
        cache = kv_cache(UniformTypeKVCacheSpecs(TOKENS, specs))
        cache.kv_cache_groups[0].layer_names[:] = specs
        assert is_known_to_scheduler(CONFIG, cache) is known


@pytest.mark.parametrize("differs", [0, 1])
def test_the_scheduler_must_know_the_layers_of_each_group(differs: int) -> None:
    """And of each pipeline stage: vLLM describes the first one only."""
    cache = kv_cache(full(), full())
    assert is_known_to_scheduler(CONFIG, cache)
    assert not is_known_to_scheduler(engine_config(FOLDER, {}, parallel={"pipeline_parallel_size": 2}), cache)
    specs = {"layer.8": full(), "layer.9": full(head_size=16)}
    cache.kv_cache_groups[differs].kv_cache_spec = UniformTypeKVCacheSpecs(TOKENS, specs)
    cache.kv_cache_groups[differs].layer_names[:] = specs
    assert not is_known_to_scheduler(CONFIG, cache)


@pytest.mark.parametrize("empty", [0, 1])
def test_a_pipeline_stage_without_layers_of_a_group_knows_its_kind(empty: int) -> None:
    """The stage needs the blocks of its own layers, and counts those of all groups."""
    cache = kv_cache(full(), window(5))
    cache.kv_cache_groups[empty].layer_names.clear()
    geometry = resolve_geometry(CONFIG, cache)
    assert [group.retained_tokens for group in geometry.groups] == [None, 4]
    assert [bool(group.layers) for group in geometry.groups] == [empty == 1, empty == 0]
    assert geometry.groups[empty].page_bytes == ()


def test_a_state_has_the_bytes_of_its_tensors() -> None:
    """The padding, which makes pages of all groups equal, is not stored."""
    group = resolve_geometry(CONFIG, kv_cache(full(), state(padded=4096))).groups[1]
    assert (group.is_state, group.retained_tokens, group.page_bytes) == (True, None, (28,))
    assert group.formats != resolve_geometry(CONFIG, kv_cache(full(), state(width=5))).groups[1].formats


def test_states_with_a_draft_model_are_refused() -> None:
    """A rejected draft token would be part of a stored state."""
    config = engine_config(FOLDER, {}, speculative=SimpleNamespace(model="draft", use_eagle_block_drop=lambda: False))
    assert resolve_geometry(config, kv_cache(full(), window(5)))
    with pytest.raises(Unsupported, match="speculative decoding"):
        resolve_geometry(config, kv_cache(full(), state()))


def test_hashes_that_differ_between_processes_are_refused() -> None:
    """Python's own hash has another seed in each process, and a short one may collide."""
    for algorithm in ("builtin", "xxhash"):
        with pytest.raises(Unsupported, match=algorithm):
            resolve_geometry(engine_config(FOLDER, {}, cache={"prefix_caching_hash_algo": algorithm}), kv_cache())


def test_a_model_without_kv_is_refused() -> None:
    """There is nothing to store, in the whole model or in a pipeline stage."""
    empty = kv_cache()
    empty.kv_cache_groups[0].layer_names.clear()
    with pytest.raises(Unsupported, match="a pipeline stage has no layers"):
        resolve_geometry(CONFIG, empty)
    with pytest.raises(Unsupported, match="prefix caching is off"):
        resolve_geometry(engine_config(FOLDER, {}, cache={"enable_prefix_caching": False}), kv_cache())
