"""Identity of a model in the transformers adapter: a digest in the background, and settings."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.tiny_llama import one_thread, tiny_llama  # noqa: F401 - a fixture
from transformers import BitsAndBytesConfig, LlamaConfig

from kvtier.client import Group, Namespace
from kvtier.client.engines.identity import SCHEME, WEIGHTS
from kvtier.client.engines.transformers import KVTierCache, model_identity
from kvtier.client.engines.transformers.cache import HASH_SCHEME
from kvtier.client.engines.transformers.layout import CACHE_ARGUMENT, CacheLayout
from kvtier.client.engines.transformers.model_identity import (
    NEUTRAL,
    ChangedWeights,
    WeightsDigest,
    engine_attributes,
    model_attributes,
)
from kvtier.client.engines.transformers.model_state import Snapshot
from kvtier.client.testing import FakeServer

BLOCK = 8
PROMPT = torch.randint(4, 64, (1, 40), generator=torch.Generator().manual_seed(1))
NOT_KNOWN = "the digest of the weights is not known yet"


def _weight(model: Any) -> torch.nn.Parameter:
    return model.model.layers[0].self_attn.k_proj.weight


def _cache(model: Any, server: FakeServer, **options: Any) -> KVTierCache:
    return KVTierCache(model, connect=server.client, block_tokens=BLOCK, **options)


def _hit(cache: KVTierCache) -> int:
    """Tokens of a hit, after a check that the answer is that of the model."""
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 3, "min_new_tokens": 3}
    expected = cache._model.generate(PROMPT, attention_mask=torch.ones_like(PROMPT), **options)
    assert torch.equal(cache.generate(PROMPT, **options), expected)
    return cache.last_hit.tokens


def _other_process(model: Any, server: FakeServer) -> int:
    with _cache(model, server) as cache:
        assert cache.wait_until_identified(60)
        return _hit(cache)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """The digest of the weights begins when this is set."""
    event, compute = threading.Event(), WeightsDigest.compute

    def gated(*arguments: Any) -> str:
        assert event.wait(60)
        return compute(*arguments)

    monkeypatch.setattr(WeightsDigest, "compute", gated)
    yield event
    event.set()


def test_nothing_waits_for_the_digest(gate: threading.Event) -> None:
    """Until it is known every request is a miss with a reason, and the server is not called."""
    server = FakeServer()
    with _cache(tiny_llama(), server) as cache:
        assert [_hit(cache), _hit(cache)] == [0, 0]
        assert cache.bypassed == {NOT_KNOWN: 2}
        assert not cache.wait_until_identified(0)
        assert (cache.client, cache.keys(PROMPT), cache.flush(PROMPT)) == (None, [], 0)
        assert not server.calls
        gate.set()
        assert cache.wait_until_identified(60)
        assert [_hit(cache), _hit(cache)] == [0, 32]
        assert cache.bypassed == {NOT_KNOWN: 2}
    assert _other_process(tiny_llama(), server) == 32


def test_kv_computed_before_the_digest_was_known_is_stored_after_it(gate: threading.Event) -> None:
    with _cache(model := tiny_llama(), FakeServer()) as cache:
        restored, hit = cache.restore(PROMPT)
        with torch.inference_mode():
            model(input_ids=PROMPT, **{CACHE_ARGUMENT: restored})
        assert hit.tokens == cache.save(PROMPT, restored) == 0
        gate.set()
        assert cache.wait_until_identified(60)
        assert cache.save(PROMPT, restored) == 5


def test_a_named_model_is_known_at_once() -> None:
    """No weights are read, so the constructor waits for the settings."""
    server = FakeServer()
    for hit in (0, 32):
        with _cache(tiny_llama(), server, name="m", revision="1") as cache:
            assert _hit(cache) == hit
            assert cache.client is not None


def test_a_closed_cache_stays_closed(gate: threading.Event) -> None:
    cache = _cache(tiny_llama(), FakeServer())
    cache.close()
    gate.set()
    assert not cache.wait_until_identified(60)
    assert cache._attributes.value is None  # the thread has ended early
    assert _hit(cache) == 0
    assert cache.client is None


@torch.no_grad()
def _counted(model: Any) -> None:
    _weight(model).mul_(2.0)


def _uncounted(model: Any) -> None:
    _weight(model).data.mul_(2.0)


def _replaced(model: Any) -> None:
    _weight(model).data = _weight(model).data * 2.0


@pytest.mark.parametrize("change", [_counted, _uncounted, _replaced])
def test_weights_that_change_during_the_digest_get_no_shared_identity(
    gate: threading.Event, change: Callable[[Any], None]
) -> None:
    """Neither that of the weights before the change nor that of the weights after it."""
    server, changed = FakeServer(), tiny_llama()
    with _cache(changed, server) as cache:
        change(changed)
        gate.set()
        cache.wait_until_identified(60)
        assert [_hit(cache), _hit(cache)] == [0, 32]
        assert _other_process(tiny_llama(), server) == 0
        other = tiny_llama()
        _counted(other)
        assert _other_process(other, server) == 0


def test_weights_that_change_during_the_digest_and_return(
    gate: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    """As a trainer swaps in averaged weights for a while. Only the digest sees them."""
    server, model = FakeServer(), tiny_llama()
    with _cache(model, server) as cache:
        _uncounted(model)
        gate.set()
        cache._attributes.wait(60)
        _weight(model).data.mul_(0.5)
        assert [_hit(cache), _hit(cache)] == [0, 32]
        assert ["has no identity" in record.message for record in caplog.records] == [True]
        other = tiny_llama()
        _counted(other)
        assert _other_process(other, server) == 0
        assert _other_process(tiny_llama(), server) == 0


def _at(tensor: int, change: Callable[[], object]) -> Callable[[], bool]:
    """Returns an `is_stopped` that makes a change before the tensor with this number is read."""
    numbers = iter(range(1000))

    def is_stopped() -> bool:
        if next(numbers) == tensor:
            change()
        return False

    return is_stopped


def _transpose(model: Any) -> None:
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.data = parameter.data.T.contiguous().T


LAST = "model.norm.weight"


@pytest.mark.parametrize("form", [lambda _: None, _transpose, lambda model: model.bfloat16()])
def test_the_bytes_that_are_hashed_are_compared(form: Callable[[Any], Any]) -> None:
    """A change in the middle is an error, if the tensor is read after it."""
    model = _formed(form)
    reader = WeightsDigest(Snapshot(model))
    with pytest.raises(ChangedWeights, match=f"model.{LAST} has changed"):
        reader.compute(_at(3, lambda: model.get_parameter(LAST).data.add_(1.0)))
    weight = _weight(model)
    reader = WeightsDigest(Snapshot(model))
    with pytest.raises(ChangedWeights, match=r"k_proj\.weight has changed"):
        reader.compute(_at(1, lambda: weight.data.mul_(2.0)))


def test_tensors_that_are_replaced_during_the_digest_do_not_count() -> None:
    model = tiny_llama()
    expected = WeightsDigest(Snapshot(model)).compute()
    assert WeightsDigest(Snapshot(model)).compute(_at(1, lambda: _replaced(model))) == expected


@pytest.mark.parametrize("change", [lambda storage: storage.resize_(0), lambda storage: storage.resize_(1 << 20)])
def test_memory_that_is_freed_during_the_digest_is_not_read(change: Callable[[Any], Any]) -> None:
    """As distributed training frees the memory of parameters in place."""
    model = tiny_llama()
    reader = WeightsDigest(Snapshot(model))
    with pytest.raises(ChangedWeights, match="other memory"):
        reader.compute(_at(1, lambda: change(_weight(model).untyped_storage())))


def _formed(form: Callable[[Any], Any]) -> Any:
    model = tiny_llama()
    form(model)
    return model


def test_the_form_of_memory_does_not_count() -> None:
    """Equal elements have one digest, also if they are in another order in memory, or in chunks."""
    digests = {WeightsDigest(Snapshot(_formed(form))).compute() for form in (lambda _: None, _transpose)}
    assert len(digests) == 1


@pytest.mark.parametrize("place", [0, 1, 700_000, -1])
def test_each_byte_of_a_large_tensor_counts(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is read in chunks, with some of the compared elements in each."""
    monkeypatch.setattr("kvtier.client.engines.transformers.model_identity._CHUNK_BYTES", 1 << 20)
    model = torch.nn.Linear(1000, 1000, bias=False)
    before = WeightsDigest(Snapshot(model)).compute()
    assert WeightsDigest(Snapshot(model)).compute() == before
    model.weight.data.view(-1)[place] += 1.0
    assert WeightsDigest(Snapshot(model)).compute() != before
    reader = WeightsDigest(Snapshot(model))
    with pytest.raises(ChangedWeights):
        reader.compute(_at(3, lambda: model.weight.data.add_(1.0)))


def test_replaced_weights_leave_the_memory_after_the_digest() -> None:
    """Also if it has failed."""
    model = tiny_llama()
    reader, storage = WeightsDigest(Snapshot(model)), weakref.ref(_weight(model).untyped_storage())
    _replaced(model)
    with pytest.raises(ChangedWeights):
        reader.compute(lambda: True)
    gc.collect()
    assert storage() is None


def test_a_digest_that_fails(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The process has a namespace of its own, with one warning."""

    def fail(*_: Any) -> str:
        raise RuntimeError("no memory")

    server = FakeServer()
    monkeypatch.setattr(WeightsDigest, "compute", fail)
    with _cache(tiny_llama(), server) as cache:
        assert cache.wait_until_identified(60)
        assert [_hit(cache), _hit(cache)] == [0, 32]
    assert [record.message for record in caplog.records] == [
        "kvtier: this process shares no blocks, because its model has no identity: no memory"
    ]
    assert _other_process(tiny_llama(), server) == 0


def test_a_fork_during_the_digest(gate: threading.Event) -> None:
    """The child has no such thread. It waits for nothing, and has right answers."""
    with _cache(tiny_llama(), FakeServer()) as cache:
        child = os.fork()
        if child == 0:  # pragma: no cover
            code = 1
            try:
                cache.wait_until_identified(600)
                code = 0 if _hit(cache) == 0 and cache._attributes.has_failed else 2
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        gate.set()
        assert cache.wait_until_identified(60)
        assert [_hit(cache), _hit(cache)] == [0, 32]


def _attributes(model: Any) -> dict[str, str]:
    return model_attributes(Snapshot(model), (), weights=True, is_stopped=lambda: False)()


def test_the_namespace_has_the_scheme_of_all_adapters() -> None:
    server, names = FakeServer(), []

    def connect(namespace: Any) -> Any:
        names.append(namespace)
        return server.client(namespace)

    with KVTierCache(tiny_llama(), connect=connect) as cache:
        cache.wait_until_identified(60)
    assert names[0].attributes.items() >= SCHEME.items()
    assert names[0].attributes.keys() >= {WEIGHTS, "settings", "state", "torch", "engine", "device"}


@pytest.mark.parametrize(
    ("settings", "counts"),
    [
        ({"setting_of_a_later_release": 1}, True),
        ({"rope_theta": 20000.0}, True),
        ({"attn_implementation": "eager"}, True),
        ({"pretraining_tp": 2}, True),
        ({"name_or_path": "/elsewhere", "architectures": ["X"], "transformers_version": "1.0"}, False),
        ({"use_cache": False, "_commit_hash": "1" * 40}, False),
    ],
)
def test_a_setting_counts_unless_it_is_neutral(settings: dict[str, Any], *, counts: bool) -> None:
    """Also a setting that kvtier does not know."""
    assert (_attributes(tiny_llama())["settings"] != _attributes(tiny_llama(**settings))["settings"]) is counts


class _OtherLlamaConfig(LlamaConfig):
    model_type = "other_llama"


@pytest.fixture(scope="module")
def settings() -> Callable[..., str]:
    """Returns the digest of the settings of a model whose configuration has these inner ones."""
    model = tiny_llama()
    config = vars(model.config).copy()

    def digest(**inner: Any) -> str:
        vars(model.config).clear()
        vars(model.config).update(config | inner)
        return model_attributes(Snapshot(model), (), weights=False, is_stopped=lambda: False)()["settings"]

    return digest


def _outer(inner: Any) -> LlamaConfig:
    config = LlamaConfig()
    vars(config)["thinker_config"] = inner
    return config


PLACES: dict[str, Callable[[Any], dict[str, Any]]] = {
    "itself": lambda inner: {"text_config": inner},
    "vision": lambda inner: {"vision_config": inner},
    "two levels": lambda inner: {"text_config": _outer(inner)},
    "list": lambda inner: {"layer_configs": [LlamaConfig(), inner]},
    "tuple": lambda inner: {"layer_configs": (inner,)},
    "table": lambda inner: {"layer_configs": {"full": {"0": inner}}},
    "numbers": lambda inner: {"layer_configs": {0: inner}},
}
"""Where a configuration can have an inner one."""


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_each_setting_of_an_inner_configuration_counts(
    settings: Callable[..., str], place: Callable[[Any], dict[str, Any]]
) -> None:
    """Also those that `to_dict` lacks, and its class: models take values from it."""
    before = settings(**place(LlamaConfig()))
    assert settings(**place(LlamaConfig())) == before
    assert settings(**place(_OtherLlamaConfig())) != before
    names = {*vars(LlamaConfig()), "quantization_config", "of_a_later_release"}
    for name in sorted(names if place is PLACES["itself"] else names & IN_EACH_PLACE):
        inner = LlamaConfig()
        vars(inner)[name] = {"another": "value"}
        assert (settings(**place(inner)) == before) is NEUTRAL.has("text_config", name), name


IN_EACH_PLACE = {"_attn_implementation_internal", "rope_parameters", "of_a_later_release"}


def _quantization(**settings: Any) -> BitsAndBytesConfig:
    return BitsAndBytesConfig(load_in_4bit=True, **settings)


ROPE = {"rope_type": "yarn", "factor": 4.0}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"quantization_config": {"bits": 4}}, {"quantization_config": {"bits": 8}}),
        ({"quantization_config": _quantization()}, {"quantization_config": _quantization(bnb_4bit_quant_type="nf4")}),
        ({"rope_parameters": ROPE}, {"rope_parameters": ROPE | {"beta_fast": 16.0}}),
        (
            {"rope_parameters": {"full_attention": ROPE}},
            {"rope_parameters": {"full_attention": ROPE | {"factor": 2.0}}},
        ),
        ({"text_config": LlamaConfig(rope_parameters=ROPE)}, {"text_config": LlamaConfig(rope_parameters=None)}),
    ],
)
def test_tables_of_settings_count(settings: Callable[..., str], one: dict[str, Any], other: dict[str, Any]) -> None:
    assert settings(**one) == settings(**one) != settings(**other)


def test_a_quantization_counts_in_all_its_attributes(settings: Callable[..., str]) -> None:
    """Also one that its `to_dict` lacks."""

    class Quantization(BitsAndBytesConfig):
        def to_dict(self) -> dict[str, Any]:
            return {"quant_method": "own"}

    one, other = Quantization(load_in_4bit=True), Quantization(load_in_8bit=True)
    for place in PLACES.values():
        assert settings(**place(one)) == settings(**place(one)) != settings(**place(other))


def test_tensors_that_the_model_changes_itself_do_not_count() -> None:
    model = tiny_llama()
    path = "model.model.rotary_emb.inv_freq"
    before = WeightsDigest(Snapshot(model), {path}).compute()
    model.model.rotary_emb.inv_freq.mul_(2.0)
    assert WeightsDigest(Snapshot(model), {path}).compute() == before
    assert WeightsDigest(Snapshot(model)).compute() != before


def test_files_that_settings_name_count(tmp_path: Path) -> None:
    scales = tmp_path / "scales.json"
    found = []
    for content in ("1", "2", "1"):
        scales.write_text(content)
        found.append(_attributes(tiny_llama(kv_scales=str(scales)))["settings"])
    assert found[0] == found[2] != found[1]


def test_settings_that_cannot_be_compared_are_not_shared() -> None:
    """A tensor in the configuration: the process has a namespace of its own."""
    server = FakeServer()
    for _ in range(2):
        model = tiny_llama()
        model.config.scales = torch.ones(3)
        with _cache(model, server) as cache:
            assert cache.wait_until_identified(60)
            assert [_hit(cache), _hit(cache)] == [0, 32]


def _act(factor: float) -> Callable[[Any], Any]:
    return lambda x: torch.nn.functional.silu(x) * factor


def _default(factor: float) -> Callable[[Any], Any]:
    def act(x: torch.Tensor, factor: float = factor) -> torch.Tensor:
        return torch.nn.functional.silu(x) * factor

    return act


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (_act(1.0), _act(2.0)),
        (_default(1.0), _default(2.0)),
        (lambda x: torch.nn.functional.silu(x) * 1.0, lambda x: torch.nn.functional.silu(x) * 2.0),
        (lambda x: torch.nn.functional.silu(x), lambda x: torch.nn.functional.gelu(x)),  # noqa: PLW0108
    ],
    ids=["closure", "default", "constant", "name"],
)
def test_functions_with_equal_names_and_other_code_are_distinguished(one: Any, other: Any) -> None:
    """Two processes that give a layer another activation function."""

    def state(function: Any) -> str:
        model = tiny_llama()
        mlp = model.model.layers[0].mlp
        del mlp.act_fn
        function.__qualname__ = "f"
        mlp.act_fn = function
        return _attributes(model)["state"]

    assert state(one) == state(one) != state(other)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (torch, "__version__"),
        (vars(model_identity)["transformers"], "__version__"),
        (torch.backends.cpu, "get_cpu_capability"),
    ],
)
def test_another_version_or_processor_has_another_namespace(
    module: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them may compute the KV with other kernels."""
    before = engine_attributes(torch.device("cpu"))
    monkeypatch.setattr(module, name, (lambda: "other") if name.startswith("get") else "0.0")
    assert engine_attributes(torch.device("cpu")) != before


class _BackEnds:
    """Settings of torch's back ends by path; those in `changed` have another value."""

    def __init__(self, path: str = "", changed: str = "") -> None:
        self._path, self._changed = path, changed

    def __getattr__(self, name: str) -> Any:
        path = f"{self._path}{name}"
        value = "other" if path == self._changed else "usual"
        if path in _SWITCHES:
            return (lambda: value) if name.endswith("_sdp_enabled") else value
        return _BackEnds(f"{path}.", self._changed)


_SWITCHES = (
    "fp32_precision",
    *("mkldnn.enabled", "mkldnn.fp32_precision", "mkldnn.matmul.fp32_precision", "mkldnn.conv.fp32_precision"),
    *("cudnn.allow_tf32", "cudnn.conv.fp32_precision", "cuda.matmul.fp32_precision"),
    *("cuda.matmul.allow_fp16_reduced_precision_reduction", "cuda.matmul.allow_bf16_reduced_precision_reduction"),
    *("cuda.flash_sdp_enabled", "cuda.mem_efficient_sdp_enabled", "cuda.math_sdp_enabled", "cuda.cudnn_sdp_enabled"),
)


def _run_settings(kind: str = "cpu") -> str:
    return model_identity.run_settings(torch.device(kind))


@pytest.mark.parametrize("switch", _SWITCHES)
def test_each_switch_of_a_back_end_counts(switch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them may choose another kernel, so KV that was computed under it is kept apart."""
    with monkeypatch.context() as usual:
        usual.setattr(torch, "backends", _BackEnds())
        before = _run_settings()
    with monkeypatch.context() as other:
        other.setattr(torch, "backends", _BackEnds(changed=switch))
        after = _run_settings()
    assert before != after


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("get_default_dtype", torch.float64),
        ("are_deterministic_algorithms_enabled", None),
        ("get_float32_matmul_precision", "medium"),
    ],
)
def test_each_setting_of_torch_counts(name: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before = _run_settings()
    monkeypatch.setattr(torch, name, lambda: value)
    assert _run_settings() != before


def test_autocast_of_the_models_device_counts() -> None:
    """Off, and each of its element types. That of another device has no effect."""
    found = [_run_settings()]
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype):
            found.append(_run_settings())
            assert _run_settings("cuda") == found[0]
    assert len(set(found)) == 3


def test_programs_may_use_either_kind_of_precision_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch refuses the older kind if the program has used the newer one."""

    def refuse() -> str:
        raise RuntimeError("mix of the legacy and new APIs")

    monkeypatch.setattr(torch, "get_float32_matmul_precision", refuse)
    before = _run_settings()
    monkeypatch.setattr(torch, "backends", _BackEnds(changed="cuda.matmul.fp32_precision"))
    assert _run_settings() != before


def test_another_kind_of_device_has_another_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two generations of a GPU have other kernels, and so have a GPU and a processor."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, device.index or 0))
    names = ["cuda:0", "cuda:1", "cpu"]
    assert len({engine_attributes(torch.device(name))["device"] for name in names}) == 3


def test_each_field_of_the_namespace() -> None:
    server, spaces = FakeServer(), []

    def connect(namespace: Any) -> Any:
        spaces.append(namespace)
        return server.client(namespace)

    model = tiny_llama()
    options: dict[str, Any] = {"name": "m", "revision": "7", "tenant": "red", "block_tokens": BLOCK}
    with KVTierCache(model, connect=connect, **options) as cache:
        assert cache.client is not None
        cache.model_changed()
        _hit(cache)
    layout = CacheLayout.probe(model, BLOCK)
    expected = Namespace(
        model="m",
        dtype="float32",
        groups=(Group(layout.part_bytes, BLOCK, "full_attention"),),
        layout=layout.describe(),
        hash_scheme=HASH_SCHEME,
        revision="7",
        tenant="red",
    )
    assert [replace(space, attributes={}) for space in spaces] == [expected] * 2
    common = {"engine", "device", "torch", *SCHEME}
    assert [space.attributes.keys() for space in spaces] == [
        common | {"settings", "state"},
        common | {"weights_version"},
    ]


def test_a_model_without_a_name_has_that_of_its_class() -> None:
    server, spaces = FakeServer(), []

    def connect(namespace: Any) -> Any:
        spaces.append(namespace)
        return server.client(namespace)

    for named in ({"revision": "7"}, {"name": "m"}, {}):
        with KVTierCache(tiny_llama(), connect=connect, **named) as cache:
            cache.wait_until_identified(60)
    assert [(space.model, space.revision) for space in spaces] == [
        ("LlamaForCausalLM", "7"),
        ("m", ""),
        ("LlamaForCausalLM", ""),
    ]
    assert all(WEIGHTS in space.attributes for space in spaces), "a name without revision can have any weights"
