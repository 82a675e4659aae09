"""Parts of the transformers adapter without a server: hashes, layout, digests, refusals."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness.tiny_llama import SMALL, tiny_llama
from transformers import (
    DynamicCache,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from kvtier.client.engines.transformers.cache import block_hashes
from kvtier.client.engines.transformers.generate_settings import reason_to_bypass
from kvtier.client.engines.transformers.layout import CACHE_ARGUMENT, CacheLayout, UnsupportedModelError
from kvtier.client.engines.transformers.model_identity import WeightsDigest, model_attributes
from kvtier.client.engines.transformers.model_state import Snapshot


def _llama(seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    return tiny_llama(seed).to(dtype)


def test_hashes_are_the_same_in_every_process_and_release() -> None:
    """A block's hash depends on its tokens and those before it, in every release."""
    hashes = block_hashes(range(8), 4, extra=b"x")
    assert [name.hex()[:16] for name in hashes] == ["de647e7387760e1d", "0deb497316733429"]


def test_hashes_are_chained() -> None:
    """A changed token changes the hashes of its own block and of all later ones."""
    tokens = list(range(40))
    changed = [*tokens[:15], 99, *tokens[16:]]
    before, after = block_hashes(tokens, 8), block_hashes(changed, 8)
    assert [old == new for old, new in zip(before, after, strict=True)] == [True, False, False, False, False]


def test_hashes_cover_the_extra() -> None:
    """With another `extra` every hash differs; an incomplete block has no hash."""
    assert not set(block_hashes(range(16), 8)) & set(block_hashes(range(16), 8, extra=b"adapter"))
    assert len(block_hashes(range(15), 8)) == 1
    assert block_hashes([], 8) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_blocks_come_back_bit_identical(dtype: torch.dtype) -> None:
    """Blocks copied to slots and back are bit-identical leading blocks of a cache."""
    model = _llama(dtype=dtype)
    layout = CacheLayout.probe(model, block_tokens=4)
    cache = DynamicCache()
    with torch.inference_mode():
        model(input_ids=torch.arange(11)[None], **{CACHE_ARGUMENT: cache})
    memory = memoryview(bytearray(3 * layout.part_bytes))
    offsets = [2 * layout.part_bytes, 0]
    layout.copy_out(cache, [0, 1], memory, offsets)
    back = layout.cache_of(layout.copy_in(memory, offsets))
    assert back.get_seq_length() == 8
    for old, new in zip(cache.layers, back.layers, strict=True):
        assert torch.equal(old.keys[:, :, :8], new.keys)
        assert torch.equal(old.values[:, :, :8], new.values)


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        (MistralForCausalLM, MistralConfig(**SMALL, sliding_window=16)),
        (
            Gemma3ForCausalLM,
            Gemma3TextConfig(**SMALL, sliding_window=16, layer_types=["sliding_attention", "full_attention"]),
        ),
    ],
)
def test_models_with_other_caches_are_refused(kind: Any, config: Any) -> None:
    """A model with sliding windows is refused at once, with the reason."""
    with pytest.raises(UnsupportedModelError, match="only full attention"):
        CacheLayout.probe(kind(config).eval(), block_tokens=4)


def test_a_cache_of_another_shape_does_not_match() -> None:
    """A batch, a shorter cache, or another model's cache cannot be saved."""
    model = _llama()
    layout = CacheLayout.probe(model, block_tokens=4)
    one, two = DynamicCache(), DynamicCache()
    with torch.inference_mode():
        model(input_ids=torch.arange(8)[None], **{CACHE_ARGUMENT: one})
        model(input_ids=torch.arange(8)[None].repeat(2, 1), **{CACHE_ARGUMENT: two})
    assert layout.matches(one, 8)
    assert not layout.matches(one, 12)
    assert not layout.matches(two, 8)
    assert not layout.matches(DynamicCache(), 0)


def _pair(*, heads: int = 2, dim: int = 4, dtype: torch.dtype = torch.float32, tokens: int = 8, rows: int = 1) -> Any:
    """Returns keys and values of a layer, or of a batch of sequences."""
    values = torch.arange(2 * rows * heads * tokens * dim, dtype=dtype).view(2, rows, heads, tokens, dim)
    return SimpleNamespace(keys=values[0], values=values[1])


@pytest.mark.parametrize("place", [(0, "keys"), (0, "values"), (1, "keys"), (1, "values")])
@pytest.mark.parametrize(
    "odd", [{"heads": 1}, {"dim": 2}, {"dtype": torch.float16}, {"tokens": 7}, {"rows": 2}], ids=str
)
def test_each_tensor_of_a_cache_must_match(place: tuple[int, str], odd: dict[str, Any]) -> None:
    """A single other tensor would be stored as bytes of another meaning."""
    layers = [_pair(), _pair()]
    layout = CacheLayout([(layer.keys, layer.values) for layer in layers], block_tokens=4)
    cache = SimpleNamespace(layers=layers)
    assert layout.matches(cache, 8)
    setattr(layers[place[0]], place[1], _pair(**odd).keys)
    assert not layout.matches(cache, 8)
    for number in (1, 3):
        assert not layout.matches(SimpleNamespace(layers=[_pair() for _ in range(number)]), 8)


def test_layers_of_other_shapes_lie_one_after_the_other() -> None:
    """Blocks in any order come back, each layer with its own heads, and keys apart from values."""
    pairs = [(_pair(heads=heads, dim=dim).keys, _pair(heads=heads).values) for heads, dim in ((2, 4), (1, 4), (2, 2))]
    layout = CacheLayout(pairs, block_tokens=4)
    assert layout.part_bytes == sum(tensor.shape[1] * tensor.shape[3] * 4 * 4 for pair in pairs for tensor in pair)
    descriptions = {
        CacheLayout(order, 4).describe() for order in (pairs, pairs[::-1], pairs[:1], pairs[:1] * 2, pairs[1:2])
    }
    assert len(descriptions) == 5
    cache: Any = SimpleNamespace(layers=[SimpleNamespace(keys=keys, values=values) for keys, values in pairs])
    memory, offsets = memoryview(bytearray(3 * layout.part_bytes)), [2 * layout.part_bytes, 0]
    layout.copy_out(cache, [1, 0], memory, offsets)
    copies = layout.copy_in(memory, offsets[::-1])
    assert all(
        torch.equal(copy, tensor)
        for copy, tensor in zip(copies, (tensor for pair in pairs for tensor in pair), strict=True)
    )
    with pytest.raises(UnsupportedModelError, match=r"layer 1 has torch\.float16, layer 0 has torch\.float32"):
        CacheLayout([pairs[0], (pairs[1][0], pairs[1][1].half())], 4)


def test_weights_have_distinct_digests() -> None:
    """Other weights have another digest; equal weights of any origin have the same."""

    def digest(model: Any) -> str:
        return WeightsDigest(Snapshot(model)).compute()

    model = _llama()
    assert digest(model) == digest(copy.deepcopy(model)) == digest(_llama())
    assert digest(model) != digest(_llama(seed=1))
    assert digest(model) != digest(_llama(dtype=torch.bfloat16))
    frequencies = copy.deepcopy(model)
    frequencies.model.rotary_emb.inv_freq[0] *= 2  # a buffer
    attribute = copy.deepcopy(model)
    attribute.model.rotary_emb.original_inv_freq = attribute.model.rotary_emb.original_inv_freq * 2
    assert len({digest(model), digest(frequencies), digest(attribute)}) == 3


def test_digests_of_the_state_depend_on_the_kv() -> None:
    """Another rope or flag changes the digest; another path or class name does not."""

    def digest(model: Any) -> str:
        return str(model_attributes(Snapshot(model), (), weights=False, is_stopped=bool)())

    def model(**settings: Any) -> Any:
        return LlamaForCausalLM(LlamaConfig(**SMALL, **settings)).eval()

    assert digest(model()) == digest(model(name_or_path="/elsewhere", architectures=["X"]))
    assert digest(model()) != digest(model(rope_theta=20000.0))
    flag = model()
    flag.model.layers[0].mlp.flag = True
    assert digest(model()) != digest(flag)


@pytest.mark.parametrize(
    ("shape", "options", "plain"),
    [
        ((1, 9), {"max_new_tokens": 3, "do_sample": False, "temperature": 0.5}, True),
        ((1, 9), {"attention_mask": torch.ones(1, 9), "streamer": object()}, True),
        ((1, 9), {"guidance_scale": 1.0, "num_beams": 1, "use_cache": True, "output_attentions": False}, True),
        ((1, 9), {"pad_token_id": 1, "eos_token_id": [1, 2]}, True),
        ((1, 9), {"pad_token_id": 1, "eos_token_id": 2}, False),
        ((1, 9), {"attention_mask": torch.ones(1, 12)}, False),
        ((1, 9), {"attention_mask": torch.ones(1, 1, 9, 9)}, False),
        ((2, 9), {}, False),
        ((1, 9), {"num_beams": 2}, False),
        ((1, 9), {"generation_config": GenerationConfig(num_beams=2)}, False),
        ((1, 9), {"generation_config": GenerationConfig(guidance_scale=1.5)}, False),
        ((1, 9), {"num_return_sequences": 2, "do_sample": True}, False),
        ((1, 9), {"attention_mask": torch.tensor([[0] + [1] * 8])}, False),
        ((1, 9), {"guidance_scale": 1.5}, False),
        ((1, 9), {"negative_prompt_ids": torch.ones(1, 9)}, False),
        ((1, 9), {"pixel_values": torch.zeros(1)}, False),
        ((1, 9), {"inputs_embeds": torch.zeros(1, 9, 4)}, False),
        ((1, 9), {"position_ids": torch.arange(9)[None]}, False),
        ((1, 9), {CACHE_ARGUMENT: DynamicCache()}, False),
        ((1, 9), {"use_cache": False}, False),
        ((1, 9), {"cache_implementation": "static"}, False),
        ((1, 9), {"prefill_chunk_size": 4}, False),
        ((1, 9), {"prompt_lookup_num_tokens": 4}, False),
        ((1, 9), {"assistant_model": object()}, False),
        ((1, 9), {"custom_generate": "name"}, False),
        ((1, 9), {"token_healing": True}, False),
        ((1, 9), {"penalty_alpha": 0.6, "top_k": 4}, False),
        ((1, 9), {"dola_layers": "low"}, False),
        ((1, 9), {"output_hidden_states": True}, False),
        ((1, 9), {"output_attentions": True}, False),
    ],
)
def test_only_what_tokens_alone_decide_is_cached(
    shape: tuple[int, int], options: dict[str, Any], *, plain: bool
) -> None:
    """Batches, beams, padding, images and the caller's caches are computed without kvtier."""
    tokens = torch.ones(shape, dtype=torch.int64)
    assert (reason_to_bypass(tokens, options, GenerationConfig()) is None) is plain


COUNTED = (
    *("cache_config", "cache_implementation", "diversity_penalty", "dola_layers", "guidance_scale", "low_memory"),
    *("num_beam_groups", "num_beams", "num_return_sequences", "output_attentions", "output_hidden_states"),
    *("penalty_alpha", "prefill_chunk_size", "prompt_lookup_num_tokens", "token_healing", "use_cache"),
)
"""Settings of generation that change the KV, or fill other caches than one of one sequence."""


@pytest.mark.parametrize("way", ["argument", "generation_config", "model"])
@pytest.mark.parametrize("name", COUNTED)
def test_each_setting_that_changes_the_kv_is_computed_without_the_cache(name: str, way: str) -> None:
    """As argument of `generate`, in the configuration passed to it, or in that of the model."""
    tokens, settings = torch.ones((1, 9), dtype=torch.int64), GenerationConfig()
    assert reason_to_bypass(tokens, {}, settings) is None
    for value in (False, 2) if name == "use_cache" else (2, "other"):
        changed = GenerationConfig()
        setattr(changed, name, value)
        options = {"argument": {name: value}, "generation_config": {"generation_config": changed}, "model": {}}[way]
        assert reason_to_bypass(tokens, options, changed if way == "model" else settings), value


def test_a_setting_passed_to_generate_replaces_that_of_the_model() -> None:
    """As in transformers: a value that differs from the default of the class."""
    tokens, model, passed = torch.ones((1, 9), dtype=torch.int64), GenerationConfig(), GenerationConfig()
    model.guidance_scale = 3.0
    assert reason_to_bypass(tokens, {"generation_config": passed}, model)
    assert reason_to_bypass(tokens, {"guidance_scale": None}, model) is None
    passed.guidance_scale = 1.0
    assert reason_to_bypass(tokens, {"generation_config": passed}, model) is None


@pytest.mark.parametrize(
    ("pad", "end", "plain"),
    [
        (None, None, True),
        (1, None, False),
        (2, None, True),
        (1, 1, True),
        (1, [2, 1], True),
        ([1, 2], 2, False),
        (torch.tensor(1), torch.tensor([2]), False),
        (torch.tensor([1]), torch.tensor([1, 2]), True),
    ],
)
def test_padding_of_a_prompt_without_mask(pad: Any, end: Any, *, plain: bool) -> None:
    """Transformers masks tokens that are padding, unless they are also the end of a text."""
    settings = GenerationConfig()
    settings.pad_token_id, settings.eos_token_id = pad, end
    tokens = torch.tensor([[3, 1, 4]])
    assert (reason_to_bypass(tokens, {}, settings) is None) is plain
    assert reason_to_bypass(tokens, {"attention_mask": torch.ones_like(tokens)}, settings) is None


def test_a_setting_of_a_later_release_is_not_cached() -> None:
    """A setting that kvtier does not know may change the KV."""
    settings = GenerationConfig()
    settings.new_way_to_prefill = 3
    assert reason_to_bypass(torch.ones(1, 9, dtype=torch.int64), {}, settings)
