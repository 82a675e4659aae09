"""KV in the transformers adapter is what the model would compute now, or it is a miss."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, MptConfig, MptForCausalLM
from transformers.models.llama import modeling_llama

from kvtier.client.engines.transformers import KVTierCache
from kvtier.client.engines.transformers.cache_layout import CACHE_ARGUMENT
from kvtier.client.testing import FakeServer

BLOCK = 8
PROMPT = torch.randint(4, 64, (1, 40), generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Tiny models are slower with more threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _llama(seed: int = 0, **settings: Any) -> Any:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        pad_token_id=0,
        initializer_range=0.3,
        **settings,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def model() -> Any:
    return _llama()


@pytest.fixture
def server() -> FakeServer:
    return FakeServer()


@pytest.fixture
def cache(model: Any, server: FakeServer) -> Iterator[KVTierCache]:
    """A cache whose server has the blocks of PROMPT."""
    with _cache(model, server) as cache:
        _kept(cache)
        _kept(cache)
        assert cache.last_hit.tokens == 32
        yield cache


def _cache(model: Any, server: FakeServer, **options: Any) -> KVTierCache:
    return KVTierCache(model, connect=server.client, block_tokens=BLOCK, **options)


def _plain(model: Any, prompt: torch.Tensor = PROMPT, tokens: int = 6) -> Any:
    """Scores of a generation without kvtier."""
    return _scores(model, prompt, tokens, attention_mask=torch.ones_like(prompt))


def _kept(cache: KVTierCache, prompt: torch.Tensor = PROMPT, tokens: int = 6) -> Any:
    return _scores(cache, prompt, tokens)


def _scores(model: Any, prompt: torch.Tensor, tokens: int, **options: Any) -> torch.Tensor:
    output = model.generate(
        prompt,
        do_sample=False,
        min_new_tokens=tokens,
        max_new_tokens=tokens,
        return_dict_in_generate=True,
        output_logits=True,
        **options,
    )
    return torch.cat(output.logits).float()


def _same(scores: torch.Tensor, other: torch.Tensor, rounding: float = 1e-4) -> bool:
    return bool((scores - other).abs().max() <= rounding * other.abs().max())


def _weight(model: Any) -> torch.nn.Parameter:
    return model.model.layers[0].self_attn.k_proj.weight


def _loss(model: Any) -> None:
    model(input_ids=PROMPT, labels=PROMPT).loss.backward()


def _step(optimizer: Callable[..., Any], **options: Any) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        _loss(model)
        optimizer(model.parameters(), lr=0.1, **options).step()

    return change


def _other_weights(model: Any) -> Any:
    return {name: value * 1.5 for name, value in model.state_dict().items()}


@torch.no_grad()
def _view(model: Any) -> None:
    _weight(model).view(-1)[::2].add_(1.0)


@torch.no_grad()
def _tied(model: Any) -> None:
    model.lm_head.weight = model.model.embed_tokens.weight
    model.lm_head.weight.mul_(2.0)


def _numpy(model: Any) -> None:
    _weight(model).detach().numpy()[:] *= 2.0


def _data(model: Any) -> None:
    _weight(model).data.mul_(2.0)


def _data_of_one_step(model: Any) -> None:
    """As engines of distributed training write a small step: each weight changes a little."""
    for parameter in model.parameters():
        parameter.data.add_(torch.full_like(parameter, 1e-3))


def _new_data(model: Any) -> None:
    _weight(model).data = _weight(model).data * 2.0


def _transposed(model: Any) -> None:
    projection = model.model.layers[0].self_attn.q_proj
    projection.weight.data = projection.weight.data.T


@torch.no_grad()
def _set(model: Any) -> None:
    _weight(model).set_(_weight(model).detach() * 2.0)


def _swap(model: Any) -> None:
    torch.utils.swap_tensors(_weight(model), torch.nn.Parameter(_weight(model).detach() * 2.0))


def _new_parameter(model: Any) -> None:
    model.model.layers[0].self_attn.k_proj.weight = torch.nn.Parameter(_weight(model).detach() * 2.0)


def _frequencies(model: Any) -> None:
    model.model.rotary_emb.inv_freq.mul_(0.5)


def _frequencies_by_data(model: Any) -> None:
    model.model.rotary_emb.inv_freq.data[-1] *= 0.5


def _new_frequencies(model: Any) -> None:
    model.model.rotary_emb.register_buffer("inv_freq", model.model.rotary_emb.inv_freq * 0.5, persistent=False)


def _new_module(model: Any) -> None:
    model.model.layers[0].mlp = copy.deepcopy(model.model.layers[1].mlp)


def _scale(model: Any) -> None:
    model.model.layers[0].self_attn.scaling *= 0.5


def _epsilon(model: Any) -> None:
    model.model.norm.variance_epsilon = 0.5
    model.model.layers[0].input_layernorm.variance_epsilon = 0.5


def _eager(model: Any) -> None:
    model.set_attn_implementation("eager")


def _own_class(model: Any) -> None:
    class Half(type(model.model.layers[0].mlp)):  # type: ignore[misc]
        def forward(self, x: torch.Tensor) -> Any:
            return super().forward(x) * 0.5

    model.model.layers[0].mlp.__class__ = Half


def _config(model: Any) -> None:
    model.config.rms_norm_eps = 0.25


def _quantize(model: Any) -> None:
    layer = model.model.layers[0].mlp
    layer.gate_proj = torch.nn.Sequential(layer.gate_proj, torch.nn.Hardtanh(-0.5, 0.5))


def _parametrize(model: Any) -> None:
    class Twice(torch.nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return weight * 2

    torch.nn.utils.parametrize.register_parametrization(model.model.layers[0].self_attn.k_proj, "weight", Twice())


def _delta(model: Any) -> None:
    delta = torch.nn.Parameter(torch.zeros(16, 32))
    model.model.layers[0].self_attn.k_proj.register_parameter("bias", torch.nn.Parameter(torch.ones(16)))
    del delta


CHANGES: list[Callable[[Any], Any]] = [
    _step(torch.optim.SGD),
    _step(torch.optim.SGD, foreach=True),
    _step(torch.optim.AdamW, fused=True),
    _step(torch.optim.AdamW, foreach=True),
    lambda model: model.load_state_dict(_other_weights(model)),
    lambda model: model.load_state_dict(_other_weights(model), assign=True),
    torch.no_grad()(lambda model: _weight(model).mul_(2.0)),
    torch.no_grad()(lambda model: torch._foreach_mul_([*model.parameters()], 1.5)),
    _view,
    _tied,
    _numpy,
    _data,
    _data_of_one_step,
    _new_data,
    _transposed,
    _set,
    _swap,
    _new_parameter,
    _frequencies,
    _frequencies_by_data,
    _new_frequencies,
    _new_module,
    _scale,
    _epsilon,
    _eager,
    _own_class,
    _config,
    _quantize,
    _parametrize,
    _delta,
    lambda model: model.resize_token_embeddings(72),
    lambda model: model.compile(backend="eager"),
    lambda model: model.double(),
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_the_model_is_noticed(model: Any, cache: KVTierCache, change: Callable[[Any], Any]) -> None:
    """After a change nothing is found that was stored before; what is stored then is found."""
    change(model)
    model.eval()
    expected = _plain(model)
    assert _same(_kept(cache), expected)
    assert cache.last_hit.tokens == 0
    assert _same(_kept(cache), expected)
    assert cache.last_hit.tokens == 32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_may_get_another_element_type(model: Any, cache: KVTierCache, dtype: torch.dtype) -> None:
    model.to(dtype)
    expected = _plain(model)
    for hit in (0, 32):
        assert _same(_kept(cache), expected, 0.1)
        assert cache.last_hit.tokens == hit


@pytest.mark.parametrize(
    "patch", [(modeling_llama, "apply_rotary_pos_emb"), (modeling_llama.LlamaMLP, "forward")], ids=["function", "method"]
)
def test_patched_code_is_noticed(
    model: Any, cache: KVTierCache, patch: tuple[Any, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As libraries of kernels replace functions and methods of transformers."""
    original = getattr(*patch)

    def patched(*arguments: Any, **options: Any) -> Any:
        output = original(*arguments, **options)
        return tuple(part * 0.5 for part in output) if isinstance(output, tuple) else output * 0.5

    with monkeypatch.context() as context:
        context.setattr(*patch, patched)
        assert _same(_kept(cache), _plain(model))
        assert cache.last_hit.tokens == 0
    assert _same(_kept(cache), _plain(model))
    assert cache.last_hit.tokens == 32


@pytest.mark.parametrize(
    "setting",
    [
        lambda: torch.autocast("cpu", torch.bfloat16),
        lambda: _default_dtype(torch.float64),
        lambda: torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
    ],
    ids=["autocast", "default_dtype", "kernels"],
)
def test_settings_of_torch_have_their_own_namespace(model: Any, cache: KVTierCache, setting: Any) -> None:
    """KV that was computed under a setting of torch is found under the same setting only."""
    with setting():
        expected = _plain(model)
        for hit in (0, 32):
            assert _same(_kept(cache), expected, 0.1)
            assert cache.last_hit.tokens == hit
    assert _same(_kept(cache), _plain(model))
    assert cache.last_hit.tokens == 32


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    yield
    torch.set_default_dtype(before)
