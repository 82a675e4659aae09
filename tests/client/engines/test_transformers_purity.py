"""KV in the transformers adapter is what the model would compute now, or it is a miss."""

from __future__ import annotations

import contextlib
import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from harness.tiny_llama import one_thread, tiny_llama  # noqa: F401 - a fixture
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, GenerationConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface
from transformers.models.llama import modeling_llama

from kvtier.client import KVTierError
from kvtier.client.engines.transformers import KVTierCache
from kvtier.client.engines.transformers.layout import CACHE_ARGUMENT, CacheLayout
from kvtier.client.engines.transformers.model_state import Snapshot
from kvtier.client.testing import FakeServer

BLOCK = 8
PROMPT = torch.randint(4, 64, (1, 40), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def model() -> Any:
    return tiny_llama()


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
    """A cache whose digest of the weights is known."""
    cache = KVTierCache(model, connect=server.client, block_tokens=BLOCK, **options)
    cache.wait_until_identified(60)
    return cache


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


def _insert(model: Any) -> None:
    layer = model.model.layers[0].mlp
    layer.gate_proj = torch.nn.Sequential(layer.gate_proj, torch.nn.Hardtanh(-0.5, 0.5))


def _parametrize(model: Any) -> None:
    class Twice(torch.nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return weight * 2

    torch.nn.utils.parametrize.register_parametrization(model.model.layers[0].self_attn.k_proj, "weight", Twice())


def _bias(model: Any) -> None:
    model.model.layers[0].self_attn.k_proj.register_parameter("bias", torch.nn.Parameter(torch.ones(16)))


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
    _insert,
    _parametrize,
    _bias,
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
    "patch",
    [(modeling_llama, "apply_rotary_pos_emb"), (modeling_llama.LlamaMLP, "forward")],
    ids=["function", "method"],
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


def _silu(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.silu(x) * FACTORS["mlp"]


FACTORS = {"mlp": 1.0}


class _Helper:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.silu(x) * self.factor

    __call__ = scaled


class _Slots:
    __slots__ = ("factor",)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.silu(x)


def _activation(model: Any, function: Any) -> None:
    mlp = model.model.layers[0].mlp
    del mlp.act_fn
    mlp.act_fn = function


def _bound(model: Any) -> Callable[[], object]:
    helper = _Helper(1.0)
    _activation(model, helper.scaled)
    return lambda: vars(helper).update(factor=3.0)


def _closure(model: Any) -> Callable[[], object]:
    factor = 1.0

    def change() -> None:
        nonlocal factor
        factor = 3.0

    _activation(model, lambda x: torch.nn.functional.silu(x) * factor)
    return change


def _default_value(model: Any) -> Callable[[], object]:
    factor = torch.ones(1)
    _activation(model, lambda x, factor=factor: torch.nn.functional.silu(x) * factor)
    return lambda: factor.fill_(3.0)


def _global(model: Any) -> Callable[[], object]:
    FACTORS["mlp"] = 1.0
    _activation(model, _silu)
    return lambda: FACTORS.update(mlp=3.0)


def _same_address(model: Any) -> Callable[[], object]:
    _activation(model, _Helper(1.0))

    def change() -> None:
        """Replaces the object by another one, usually at its address."""
        for _ in range(100):
            before = id(model.model.layers[0].mlp.act_fn)
            _activation(model, _Helper(3.0))
            if id(model.model.layers[0].mlp.act_fn) == before:
                break

    return change


@pytest.mark.parametrize("prepare", [_bound, _closure, _default_value, _global, _same_address])
def test_what_a_function_of_a_module_refers_to_is_compared(
    model: Any, server: FakeServer, prepare: Callable[[Any], Callable[[], object]]
) -> None:
    change = prepare(model)
    with _cache(model, server) as cache:
        for hit in (0, 32):
            _kept(cache)
            assert cache.last_hit.tokens == hit
        change()
        for hit in (0, 32):
            assert _same(_kept(cache), _plain(model))
            assert cache.last_hit.tokens == hit


def test_a_weight_that_changes_in_inference_mode(model: Any, cache: KVTierCache) -> None:
    with torch.inference_mode():
        _weight(model).mul_(2.0)
    assert _same(_kept(cache), _plain(model))
    assert cache.last_hit.tokens == 0


def test_the_precision_of_products(model: Any, cache: KVTierCache) -> None:
    """Torch's newer functions for it make the older one raise."""
    try:
        torch.backends.mkldnn.matmul.fp32_precision = "bf16"
        expected = _plain(model)
        for hit in (0, 32):
            assert _same(_kept(cache), expected, 0.1)
            assert cache.last_hit.tokens == hit
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = "none"


class _Adapter(torch.nn.Module):
    """A low-rank adapter of a linear layer, with the switches of peft."""

    def __init__(self, base: torch.nn.Module, rank: int = 4) -> None:
        super().__init__()
        self.base = base
        self.down = torch.nn.Parameter(torch.randn(rank, base.in_features, generator=torch.Generator().manual_seed(2)))
        self.up = torch.nn.Parameter(torch.randn(base.out_features, rank, generator=torch.Generator().manual_seed(3)))
        self.scaling, self.disabled = {"default": 0.5}, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        delta = 0.0 if self.disabled else x @ self.down.T @ self.up.T * self.scaling["default"]
        return self.base(x) + delta

    @torch.no_grad()
    def merge(self) -> None:
        self.base.weight += self.up @ self.down * self.scaling["default"]
        self.disabled = True


def _adapt(model: Any) -> _Adapter:
    layer = model.model.layers[0].self_attn
    layer.v_proj = _Adapter(layer.v_proj).eval()
    return layer.v_proj


def test_an_adapter_has_its_own_namespace_and_the_model_gets_its_own_again(model: Any, cache: KVTierCache) -> None:
    """An adapter that is added, disabled, enabled, scaled and merged."""
    adapter = _adapt(model)

    def check(hit: int) -> None:
        assert _same(_kept(cache), _plain(model))
        assert cache.last_hit.tokens == hit

    check(0)
    adapter.disabled = True
    check(0)
    adapter.disabled = False
    check(32)
    adapter.scaling["default"] = 1.0
    check(0)
    adapter.scaling = {"default": 0.5}
    check(32)
    adapter.disabled = True
    check(32)
    adapter.disabled = False
    adapter.merge()
    check(0)
    check(32)


def test_another_process_with_the_adapter_disabled_finds_nothing(server: FakeServer) -> None:
    """The weights are equal, and only a flag of a module differs."""
    with _cache(model := tiny_llama(), server) as first:
        _adapt(model)
        _kept(first)
    for disabled, hit in ((False, 0), (True, 0), (False, 32), (True, 32)):
        other = tiny_llama()
        _adapt(other).disabled = disabled
        with _cache(other, server) as cache:
            assert _same(_kept(cache), _plain(other))
            assert cache.last_hit.tokens == hit


@pytest.mark.parametrize("change", [_frequencies, _epsilon, _scale, _eager, _bias, _config, _insert])
@pytest.mark.usefixtures("cache")
def test_another_process_with_another_model_finds_nothing(server: FakeServer, change: Callable[[Any], None]) -> None:
    """Also if no parameter differs, but a buffer, an attribute or the kernel of attention."""
    other = tiny_llama()
    change(other)
    with _cache(other.eval(), server) as second:
        assert _same(_kept(second), _plain(other))
        assert second.last_hit.tokens == 0
    with _cache(tiny_llama(), server) as third:
        _kept(third)
        assert third.last_hit.tokens == 32


@pytest.mark.usefixtures("cache")
def test_each_weight_counts_for_another_process(server: FakeServer) -> None:
    """One changed element of one parameter is enough: no sample of the weights is taken."""
    other = tiny_llama()
    with torch.no_grad():
        other.model.layers[1].mlp.down_proj.weight[17, 5] += 1.0
    with _cache(other, server) as second:
        assert _same(_kept(second), _plain(other))
        assert second.last_hit.tokens == 0


def _observed(hook: str) -> Callable[[Any], Any]:
    return lambda model: getattr(model.model.layers[0].self_attn.v_proj, hook)(lambda *_: None)


def _all_modules(_: Any) -> Any:
    return torch.nn.modules.module.register_module_forward_hook(lambda *_: None)


def _replaced_forward(model: Any) -> None:
    layer = model.model.layers[0].mlp
    original = layer.forward
    layer.forward = lambda x: original(x) * 0.5


def _set_attribute(value: Any) -> Callable[[Any], None]:
    return lambda model: setattr(model.model.layers[0].mlp, "helper", value)


def _inference(model: Any) -> None:
    with torch.inference_mode():
        model.model.layers[0].mlp.up_proj.weight = torch.nn.Parameter(torch.ones(64, 32), requires_grad=False)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_observed("register_forward_hook"), "has the forward hook"),
        (_observed("register_forward_pre_hook"), "has the forward hook"),
        (_all_modules, "all modules has the forward hook"),
        (_replaced_forward, "the method `forward` of model.model.layers.0.mlp is replaced"),
        (_inference, "created in inference mode"),
        (_set_attribute(_Slots()), "mlp.helper is a _Slots, whose content kvtier cannot compare"),
        (_set_attribute(np.ones(300)), "mlp.helper is a ndarray, whose"),
        (_set_attribute([{str(number): number for number in range(5000)}]), "mlp.helper.0 is a dict, whose"),
        (lambda model: model.train(), "training mode"),
        (lambda model: model.model.layers[1].train(), "training mode"),
    ],
)
def test_kv_that_cannot_be_identified_is_not_used(
    model: Any,
    server: FakeServer,
    cache: KVTierCache,
    caplog: pytest.LogCaptureFixture,
    change: Callable[[Any], Any],
    reason: str,
) -> None:
    """While such a reason holds, the server is not called, with one warning."""
    handle = change(model)
    calls = len(server.calls)
    try:
        for _ in range(2):
            assert _same(_kept(cache), _plain(model))
            assert cache.last_hit.tokens == 0
            assert cache.save(PROMPT, cache.restore(PROMPT)[0]) == 0
        assert len(server.calls) == calls
        assert [reason in record.message for record in caplog.records] == [True]
    finally:
        if isinstance(handle, torch.utils.hooks.RemovableHandle):
            handle.remove()
    if isinstance(handle, torch.utils.hooks.RemovableHandle):
        _kept(cache)
        assert cache.last_hit.tokens == 32


def test_a_model_in_training_mode_is_used_after_eval(server: FakeServer) -> None:
    """The mode at construction does not count."""
    with _cache(tiny_llama(), server) as first:
        _kept(first)
    with _cache(other := tiny_llama().train(), server) as cache:
        _kept(cache)
        assert cache.last_hit.tokens == 0
        other.eval()
        assert _same(_kept(cache), _plain(other))
        assert cache.last_hit.tokens == 32


def test_hooks_that_only_observe_can_be_named(model: Any, server: FakeServer) -> None:
    seen = []

    def observe(*_: Any) -> None:
        seen.append(1)

    model.register_forward_hook(observe)
    with _cache(model, server, observers=[observe]) as cache:
        for hit in (0, 32):
            _kept(cache)
            assert cache.last_hit.tokens == hit
    assert seen


def test_hooks_beside_the_named_ones_stop_the_cache(model: Any, server: FakeServer) -> None:
    def observe(*_: Any) -> None: ...

    model.register_forward_hook(observe)
    model.model.layers[0].mlp.register_forward_hook(lambda *arguments: arguments[2] * 0.5)
    with _cache(model, server, observers=[observe]) as cache:
        for _ in range(2):
            assert _same(_kept(cache), _plain(model))
            assert cache.last_hit.tokens == 0


@pytest.mark.parametrize("module", ["transformers", "transformers.utils", "transformers.utils.output_capturing.other"])
def test_only_hooks_of_transformers_that_record_outputs_are_accepted(
    model: Any, server: FakeServer, module: str
) -> None:
    """Other hooks of the library may change the KV."""

    def changes(*arguments: Any) -> Any:
        return arguments[2] * 0.5

    changes.__module__ = module
    model.model.layers[0].mlp.register_forward_hook(changes)
    with _cache(model, server) as cache:
        _kept(cache)
        _kept(cache)
        assert cache.last_hit.tokens == 0


def test_a_replaced_attention_function_is_noticed(model: Any, cache: KVTierCache) -> None:
    original = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def patched(*arguments: Any, **options: Any) -> Any:
        output, weights = original(*arguments, **options)
        return output * 0.5, weights

    AttentionInterface.register("sdpa", patched)
    try:
        assert _same(_kept(cache), _plain(model))
        assert cache.last_hit.tokens == 0
    finally:
        AttentionInterface.register("sdpa", original)


def test_a_cache_of_a_batch_is_not_stored(model: Any, server: FakeServer) -> None:
    computed = DynamicCache()
    with _cache(model, server) as cache, torch.inference_mode():
        model(input_ids=PROMPT.repeat(2, 1), **{CACHE_ARGUMENT: computed})
        assert cache.save(PROMPT, computed) == 0
        assert cache.restore(PROMPT)[1].tokens == 0


def test_a_dispatch_mode_of_torch_stops_the_cache(cache: KVTierCache) -> None:
    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
            return function(*arguments, **(options or {}))

    with Mode():
        assert cache.restore(PROMPT)[1].tokens == 0
    assert cache.restore(PROMPT)[1].tokens == 32


def test_a_mode_of_torch_stops_the_cache(model: Any, cache: KVTierCache) -> None:
    """A mode can replace each function of torch."""

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
            return function(*arguments, **(options or {}))

    with Mode():
        assert _same(_kept(cache), _plain(model))
        assert cache.last_hit.tokens == 0
    _kept(cache)
    assert cache.last_hit.tokens == 32


def test_a_sparse_change_that_torch_does_not_count_can_be_declared(model: Any, cache: KVTierCache) -> None:
    """`.data` does not count changes, and not every element is read at each call."""
    model.lm_head.weight.data[33] += 1.0
    _weight(model).data[3, 3] += 1.0
    cache.model_changed()
    assert _same(_kept(cache), _plain(model))
    assert cache.last_hit.tokens == 0


def test_a_declared_change_also_makes_earlier_states_unknown(model: Any, cache: KVTierCache) -> None:
    """The earlier states have the declared change too, for example the one without an adapter."""
    _kept(cache)
    scaling = model.model.layers[0].self_attn.scaling
    model.model.layers[0].self_attn.scaling = scaling * 2
    _kept(cache)
    _weight(model).data[3, 3] += 1.0
    cache.model_changed()
    model.model.layers[0].self_attn.scaling = scaling
    assert _same(_kept(cache), _plain(model))
    assert cache.last_hit.tokens == 0


def test_weights_that_change_during_a_generation_are_not_stored(model: Any, cache: KVTierCache) -> None:
    """Neither in the namespace of before the change nor in the next one."""
    other = PROMPT.flip(1)

    @torch.no_grad()
    def update(*_: Any) -> torch.Tensor:
        _weight(model).mul_(1.01)
        return torch.zeros(1, dtype=torch.bool)

    cache.generate(other, max_new_tokens=3, stopping_criteria=[update])
    assert _same(_kept(cache, other), _plain(model, other))
    assert cache.last_hit.tokens == 0


def test_a_change_between_restore_and_save_is_not_stored(model: Any, cache: KVTierCache) -> None:
    other = PROMPT.flip(1)
    for restored in (cache.restore(other)[0], DynamicCache()):
        with torch.inference_mode():
            model(input_ids=other, **{CACHE_ARGUMENT: restored})
        _other(model)
        assert cache.save(other, restored) == 0
        assert cache.restore(other)[1].tokens == 0


def test_a_cache_that_was_computed_with_a_hook_is_not_stored(model: Any, cache: KVTierCache) -> None:
    """Also if the hook is removed before `save`, and if the cache is one of the caller."""
    other = PROMPT.flip(1)
    for own in (False, True):
        handle = model.model.layers[0].mlp.register_forward_hook(lambda *arguments: arguments[2] * 0.5)
        restored = cache.restore(other)[0]
        computed = DynamicCache() if own else restored
        with torch.inference_mode():
            model(input_ids=other, **{CACHE_ARGUMENT: computed})
        handle.remove()
        assert cache.save(other, computed) == 0
    assert _same(_kept(cache, other), _plain(model, other))
    assert cache.last_hit.tokens == 0


def test_a_default_of_the_model_counts_beside_a_given_configuration(model: Any, cache: KVTierCache) -> None:
    """`generate` takes the model's value for each setting that the given configuration lacks."""
    settings = GenerationConfig(max_new_tokens=3, do_sample=False)
    model.generation_config.guidance_scale = 2.0
    cache.generate(PROMPT, generation_config=settings)
    assert cache.bypassed == {"of the setting guidance_scale=2.0": 1}
    model.generation_config.guidance_scale = None
    cache.generate(PROMPT, generation_config=settings)
    assert cache.last_hit.tokens == 32


@torch.no_grad()
def _other(model: Any) -> None:
    _weight(model).mul_(1.5)


def test_replaced_weights_leave_the_memory(model: Any, cache: KVTierCache) -> None:
    """The adapter keeps no tensor alive, and `swap_tensors` and conversions by swapping work."""
    storage = weakref.ref(_weight(model).untyped_storage())
    model.load_state_dict(_other_weights(model), assign=True)
    gc.collect()
    assert storage() is None
    removed = weakref.ref(model.model.layers[1].mlp.up_proj.weight.untyped_storage())
    _kept(cache)
    model.model.layers[1].mlp = copy.deepcopy(model.model.layers[0].mlp)
    _kept(cache)
    gc.collect()
    assert removed() is None


@pytest.mark.parametrize(
    "options",
    [
        {"guidance_scale": 2.0},
        {"num_beams": 2},
        {"num_return_sequences": 2, "do_sample": True},
        {"use_cache": False},
        {"prefill_chunk_size": 16},
        {"prompt_lookup_num_tokens": 3},
        {"output_hidden_states": True, "return_dict_in_generate": True},
        {"position_ids": torch.arange(1, 41)[None]},
        {"inputs_embeds": torch.ones(1, 40, 32)},
        {"attention_mask": torch.tensor([[0] * 8 + [1] * 32])},
    ],
)
def test_arguments_that_change_the_kv_bypass_the_cache(
    model: Any, server: FakeServer, caplog: pytest.LogCaptureFixture, options: dict[str, Any]
) -> None:
    """Nothing is stored or loaded, with one warning. The result is that of the model."""
    common = {"max_new_tokens": 3, "do_sample": False} | options
    with _cache(model, server) as cache:
        calls = len(server.calls)
        for _ in range(2):
            torch.manual_seed(0)
            output = cache.generate(PROMPT, **common)
            torch.manual_seed(0)
            mask = {"attention_mask": torch.ones_like(PROMPT)} | common
            expected = model.generate(PROMPT, **mask)
            assert torch.equal(getattr(output, "sequences", output), getattr(expected, "sequences", expected))
        assert len(server.calls) == calls
        assert [record.message for record in caplog.records if "without the cache" in record.message][1:] == []
        _kept(cache)
        assert cache.last_hit.tokens == 0


def test_padding_in_the_prompt_is_masked_as_the_model_does_it(model: Any, cache: KVTierCache) -> None:
    """Without a mask `generate` masks the padding token, so the KV is not that of the tokens."""
    padded = PROMPT.clone()
    padded[0, :4] = model.config.pad_token_id
    for _ in range(2):
        assert _same(_scores(cache, padded, 4), _scores(model, padded, 4))
        assert cache.last_hit.tokens == 0


def test_blocks_of_an_earlier_state_leave_the_server(model: Any, server: FakeServer, cache: KVTierCache) -> None:
    """In a training loop they would fill the tiers. The blocks of the first state stay."""
    for _ in range(6):
        _other(model)
        _kept(cache)
    assert len({name[0] for name in server._blocks}) <= 5
    cache.close()
    assert len({name[0] for name in server._blocks}) == 1


def test_types_of_few_bits_and_meta_tensors(model: Any) -> None:
    """Types that torch cannot concatenate are read. What is not in memory is an obstacle."""
    layer = model.model.layers[0].mlp
    layer.register_buffer("scale", torch.ones(300, 2).to(torch.float8_e4m3fn))
    layer.register_buffer("phase", torch.ones(300, dtype=torch.complex128))
    layer.register_buffer("mask", torch.ones(300, dtype=torch.bool))
    snapshot = Snapshot(model)
    assert snapshot.is_current()
    assert not snapshot.obstacles
    layer.scale.view(torch.uint8).data[:] = 0
    assert not snapshot.is_current()
    layer.scale = torch.ones(300, device="meta")
    layer.phase = torch.ones(300).to_sparse()
    assert len(Snapshot(model).obstacles) == 2


def test_a_missing_block_ends_the_hit(model: Any, server: FakeServer, cache: KVTierCache) -> None:
    """Blocks behind a missing block are not restored, although the server has them."""
    key = cache.keys(PROMPT)[2]
    for name in [name for name in server._blocks if key in name]:
        del server._blocks[name]
    assert _same(_kept(cache), _plain(model))
    assert cache.last_hit.tokens == 2 * BLOCK


def test_a_restore_releases_its_lease(server: FakeServer, cache: KVTierCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a hit, a miss, and a failed read the server has no lease."""
    cache.restore(PROMPT)
    assert cache.last_hit.tokens == 32
    cache.restore(PROMPT.flip(1))
    assert not server._leases
    for error in (MemoryError, RuntimeError, KVTierError):
        monkeypatch.setattr(CacheLayout, "copy_in", Mock(side_effect=error("no memory")))
        assert cache.restore(PROMPT)[1].tokens == cache.last_hit.tokens == 0
        assert not server._leases
