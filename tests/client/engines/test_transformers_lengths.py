"""Models whose KV depends on the length of the sequence, or that use no cache, in transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness.tiny_llama import SMALL, one_thread, tiny_llama  # noqa: F401 - a fixture
from transformers import (
    BartConfig,
    BartForCausalLM,
    BloomConfig,
    BloomForCausalLM,
    DynamicCache,
    GPT2Config,
    GPT2LMHeadModel,
    MptConfig,
    MptForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from kvtier.client.engines.transformers import KVTierCache, UnsupportedModelError
from kvtier.client.engines.transformers.layout import CACHE_ARGUMENT
from kvtier.client.engines.transformers.length_regimes import LengthRegimes
from kvtier.client.engines.transformers.model_state import StateTracker
from kvtier.client.testing import FakeServer

BLOCK = 8
LIMIT = 64
TOKENS = torch.randint(4, 64, (1, 400), generator=torch.Generator().manual_seed(1))
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 4,
    "long_factor": [2.0, 3.0, 4.0, 8.0],
    "factor": 4.0,
    "rope_theta": 10000.0,
    "original_max_position_embeddings": LIMIT,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": LIMIT}


def _llama(rope: dict[str, Any] | None, positions: int = LIMIT) -> Any:
    settings = {"rope_parameters": rope} if rope else {}
    return tiny_llama(max_position_embeddings=positions, **settings)


def _phi3() -> Any:
    torch.manual_seed(0)
    rope = LONG | {"partial_rotary_factor": 1.0}
    config = Phi3Config(
        **SMALL, max_position_embeddings=4 * LIMIT, original_max_position_embeddings=LIMIT, rope_parameters=rope
    )
    return Phi3ForCausalLM(config).eval()


def _long() -> Any:
    return _llama(LONG, 4 * LIMIT)


def _dynamic() -> Any:
    return _llama(DYNAMIC)


def _scores(model: Any, prompt: torch.Tensor, tokens: int = 4, **options: Any) -> torch.Tensor:
    output = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        min_new_tokens=tokens,
        max_new_tokens=tokens,
        return_dict_in_generate=True,
        output_logits=True,
        **options,
    )
    return torch.cat(output.logits)


def _same(scores: torch.Tensor, other: torch.Tensor) -> bool:
    return bool((scores - other).abs().max() <= 1e-4 * other.abs().max())


def _cache(model: Any, server: FakeServer, **options: Any) -> KVTierCache:
    """A cache whose digest of the weights is known."""
    cache = KVTierCache(model, connect=server.client, block_tokens=BLOCK, **options)
    cache.wait_until_identified(60)
    return cache


@pytest.mark.parametrize(
    ("make", "prompts"),
    [
        # Length of the prompt, new tokens, and hit. Up to 64 tokens the frequencies are constant.
        (
            _dynamic,
            [(56, 4, 0), (56, 4, 48), (400, 4, 0), (400, 4, 0), (56, 4, 48), (63, 1, 56), (64, 1, 0), (60, 9, 56)],
        ),
        (_dynamic, [(60, 9, 0), (56, 4, 0)]),
        # Long RoPE has two constant sets of frequencies.
        (
            _long,
            [(56, 4, 0), (400, 4, 0), (400, 4, 392), (56, 4, 48), (64, 1, 56), (65, 1, 64), (100, 9, 96), (60, 9, 56)],
        ),
        (_long, [(60, 9, 0), (100, 9, 0), (60, 2, 0)]),
        (_phi3, [(56, 4, 0), (400, 4, 0), (400, 4, 392), (56, 4, 48), (60, 9, 56), (100, 9, 96), (56, 4, 48)]),
        (_phi3, [(60, 9, 0), (56, 4, 0), (100, 9, 0)]),
        (lambda: _llama(YARN, 4 * LIMIT), [(56, 4, 0), (400, 4, 56), (60, 9, 56)]),
        (lambda: _llama(None), [(56, 4, 0), (400, 4, 56)]),
    ],
)
def test_kv_is_shared_only_among_lengths_at_which_it_is_equal(make: Any, prompts: list[tuple[int, int, int]]) -> None:
    """Dynamic and long RoPE: prompts on both sides of the limit, and answers that cross it.

    The model that computes the expected scores gets the same calls, because some models keep the
    frequencies of their last call.
    """
    reference = make()
    with _cache(make(), FakeServer()) as cache:
        for length, tokens, hit in prompts:
            prompt = TOKENS[:, :length]
            assert _same(_scores(cache, prompt, tokens), _scores(reference, prompt, tokens))
            assert cache.last_hit.tokens == hit, (length, tokens)


@pytest.mark.parametrize(("make", "extra"), [(_dynamic, b""), (_dynamic, b"salt"), (_long, b"salt"), (_phi3, b"")])
def test_blocks_by_hand_have_the_regime_of_the_whole_sequence(make: Any, extra: bytes) -> None:
    """`restore` and `save` around a forward pass, without `generate`."""
    model = make()
    with _cache(model, FakeServer(), extra=extra) as cache, torch.inference_mode():
        for length in (56, 300, 56, 300):
            tokens = TOKENS[:, :length]
            restored, hit = cache.restore(tokens)
            output = model(input_ids=tokens[:, hit.tokens :], **{CACHE_ARGUMENT: restored})
            cache.save(tokens, restored)
            assert _same(output.logits[:, -1], make()(input_ids=tokens).logits[:, -1])
        unknown = DynamicCache()
        model(input_ids=TOKENS[:, :60], **{CACHE_ARGUMENT: unknown})
        model(input_ids=TOKENS[:, 60:100], **{CACHE_ARGUMENT: unknown})
        assert cache.save(TOKENS[:, :100], unknown) == 0  # it may have keys of both kinds


@pytest.mark.parametrize(
    ("weights", "settings", "changes"), [(True, False, 0), (False, True, 1), (True, True, 1), (False, False, 0)]
)
def test_a_change_of_settings_needs_another_measurement(*, weights: bool, settings: bool, changes: int) -> None:
    """Also one together with a change of weights. New weights alone keep the lengths."""
    model = _dynamic()
    tracker = StateTracker(model)
    if weights:
        with torch.no_grad():
            model.lm_head.weight.mul_(2)
    if settings:
        model.config.rms_norm_eps = 0.5
    assert tracker.update() is not (weights or settings)
    assert tracker.structure == changes


@pytest.mark.parametrize("make", [_dynamic, _long])
@pytest.mark.parametrize(("restored", "saved"), [(100, 50), (40, 60), (60, 50), (None, 60)])
def test_the_whole_length_of_a_cache_counts(make: Any, restored: int | None, saved: int) -> None:
    """A cache that was computed for 100 tokens, of which fewer are to be stored."""
    model = make()
    with _cache(model, FakeServer()) as cache, torch.inference_mode():
        computed = DynamicCache() if restored is None else cache.restore(TOKENS[:, :restored])[0]
        model(input_ids=TOKENS[:, :100], **{CACHE_ARGUMENT: computed})
        assert cache.save(TOKENS[:, :saved], computed) == 0


@pytest.mark.parametrize(
    ("model", "ranges"),
    [
        (lambda: _llama(None), ((1, None),)),
        (lambda: _llama(YARN, 4 * LIMIT), ((1, None),)),
        (_dynamic, ((1, LIMIT - 1),)),
        (_long, ((1, LIMIT), (LIMIT + 1, None))),
        (
            lambda: GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=32)),
            ((1, 32),),
        ),
        (lambda: BloomForCausalLM(BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4)), ((1, None),)),
        (lambda: _mpt(128), ((1, 128),)),
        (lambda: _mpt(2048), ((1, 2048),)),
    ],
)
def test_regimes_are_measured(model: Any, ranges: Any) -> None:
    """With positions (RoPE), a table of positions (GPT-2), and ALiBi (BLOOM, MPT)."""
    assert LengthRegimes.probe(model().eval()).ranges == ranges


def test_a_model_that_takes_the_length_from_the_shape_is_found() -> None:
    """As old Qwen models, which scale attention by the logarithm of the length of the prompt."""
    model = _llama(None, 32)
    attention = model.model.layers[0].mlp
    inner = type(attention)

    class Scaled(inner):  # type: ignore[misc,valid-type]
        def forward(self, x: torch.Tensor) -> Any:
            return super().forward(x) * (2.0 if x.shape[1] > 32 else 1.0)

    attention.__class__ = Scaled
    assert LengthRegimes.probe(model).ranges == ((1, 32),)


def _mpt(positions: int) -> Any:
    torch.manual_seed(0)
    return MptForCausalLM(MptConfig(d_model=32, n_heads=4, n_layers=2, vocab_size=64, max_seq_len=positions)).eval()


def test_mpt_says_that_it_stores_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """MPT's default is to use no cache. With `use_cache=True` its blocks are stored and found."""
    model = _mpt(128)
    with _cache(model, FakeServer()) as cache:
        prompt = TOKENS[:, :40]
        for _ in range(2):
            cache.generate(prompt, max_new_tokens=2, do_sample=False)
            assert cache.last_hit.tokens == 0
        assert ["use_cache=False" in record.message for record in caplog.records] == [True]
        for hit in (0, 32):
            assert _same(_scores(cache, prompt, use_cache=True), _scores(model, prompt, use_cache=True))
            assert cache.last_hit.tokens == hit


@pytest.mark.parametrize(
    "model",
    [
        lambda: T5ForConditionalGeneration(
            T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
        ),
        lambda: BartForCausalLM(
            BartConfig(vocab_size=64, d_model=32, decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=64)
        ),
    ],
)
def test_encoder_decoder_models_are_refused_or_right(model: Any) -> None:
    model = model().eval()
    try:
        cache = _cache(model, FakeServer())
    except UnsupportedModelError:
        return
    with cache:
        for _ in range(2):
            assert _same(_scores(cache, TOKENS[:, :40]), _scores(model, TOKENS[:, :40]))
