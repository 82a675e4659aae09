"""Engines share blocks only if the same keys mean the same bytes; roles of engines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from connector_fakes import make_request
from connector_rig import MakeConnector, server_of
from engine_config import TOKENS, engine_config, full, kv_cache, state, window
from harness.polling import wait_until
from vllm import __version__ as vllm_version

from kvtier.client import Group, GroupKind, Namespace, make_key
from kvtier.client.engines.identity import SCHEME, WEIGHTS, namespace_digest
from kvtier.client.engines.vllm import namespace


@pytest.fixture
def digest_of(make: MakeConnector, model: Path) -> Callable[..., str]:
    """Returns the digest of an engine's namespace; the arguments are those of `engine_config`."""

    def digest_of(groups: Any = None, extra: dict[str, Any] | None = None, **changes: Any) -> str:
        return namespace_digest(server_of(make(engine_config(str(model), extra or {}, **changes), groups)).namespace)

    return digest_of


def test_engines_of_other_weights_share_nothing(digest_of: Callable[..., str], model: Path) -> None:
    """The content of the model's files counts, not the name of their folder."""
    first = digest_of()
    assert digest_of() == first
    (model / "model.safetensors").write_bytes(b"WEIGHTS")
    assert digest_of() != first


DIFFERENT: dict[str, dict[str, Any]] = {
    "dtype": {"model": {"dtype": torch.bfloat16}},
    "overrides": {"model": {"hf_overrides": {"rope_theta": 500000.0}}},
    "function as overrides": {"model": {"hf_overrides": full}},
    "quantization": {"model": {"quantization": "fp8"}},
    "length of contexts": {"model": {"max_model_len": 128}},
    "revision": {"model": {"revision": "v2"}},
    "class of the model": {"model": {"model_class_overrides": {"LlamaForCausalLM": "package:Other"}}},
    "dtype of the cache": {"cache": {"cache_dtype": "fp8_e4m3"}},
    "hashes": {"cache": {"prefix_caching_hash_algo": "sha256_cbor"}},
    "attention back end": {"attention": {"backend": "FLASH_ATTN"}},
    "format of the files": {"load": {"load_format": "dummy"}},
    "draft model": {"speculative": SimpleNamespace(model="draft", use_eagle_block_drop=lambda: False)},
    "tenant": {"extra": {"tenant": "other"}},
    "version of the weights": {"extra": {"weights_version": "2"}},
    "tokens of a block": {"groups": kv_cache(full(2))},
    "bytes of a block": {"groups": kv_cache(full(head_size=16))},
    "groups": {"groups": kv_cache(full(), full())},
    "layers": {"groups": kv_cache(layer="other")},
    "layout": {"groups": kv_cache(layout="NHD")},
    "window": {"groups": kv_cache(window(5))},
    "states": {"groups": kv_cache(full(), state())},
    "ranks": {"parallel": {"tensor_parallel_size": 2, "world_size": 2}},
}


@pytest.mark.parametrize("changes", DIFFERENT.values(), ids=DIFFERENT)
def test_engines_that_compute_or_lay_out_kv_differently_share_nothing(
    digest_of: Callable[..., str], changes: dict[str, Any]
) -> None:
    """One different setting suffices."""
    assert digest_of(**changes) != digest_of()


def test_engines_that_differ_outside_of_their_configuration_share_nothing(
    digest_of: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Environment, processor and version of vLLM decide about kernels and formats."""
    digests = {digest_of()}
    with monkeypatch.context() as changed:
        changed.setenv("VLLM_PORT", "5000")
        assert digest_of() in digests, "an address"
        changed.setenv("VLLM_NEW_KERNELS", "1")
        digests.add(digest_of())
    with monkeypatch.context() as changed:
        changed.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "other")
        digests.add(digest_of())
    with monkeypatch.context() as changed:
        changed.setattr(namespace, "vllm_version", "0.32.9")
        digests.add(digest_of())
    assert len(digests) == 4


def test_groups_of_another_form_share_nothing(digest_of: Callable[..., str]) -> None:
    """Bytes of a layer depend on its window; a state can have the same bytes in other shapes."""
    assert len({digest_of(kv_cache(window(tokens))) for tokens in range(4, 8)}) == 4
    states = [state(), state("all"), state(width=5)]
    assert len({digest_of(kv_cache(full(), spec)) for spec in states}) == 3
    swapped = replace(state(), shapes=((3, 2), (4,)))
    assert digest_of(kv_cache(full(), swapped)) != digest_of(kv_cache(full(), state()))


COUNTED: dict[str, tuple[str, ...]] = {
    "model_config": (
        *("code_revision", "config_format", "convert", "disable_cascade_attn", "disable_sliding_window", "dtype"),
        *(
            "hf_config",
            "hf_config_path",
            "hf_overrides",
            "max_model_len",
            "mm_processor_kwargs",
            "model_class_overrides",
        ),
        *("model_impl", "model_weights", "multimodal_config", "override_attention_dtype", "pooler_config"),
        *("quantization", "quantization_config", "rope_scaling", "rope_theta", "runner", "seed", "tokenizer"),
        *("tokenizer_mode", "tokenizer_revision", "trust_remote_code"),
    ),
    "hf_config": ("architectures", "rope_scaling", "rope_theta", "sliding_window", "quantization_config"),
    "cache_config": (
        *("block_size", "cache_dtype", "calculate_kv_scales", "kv_sharing_fast_prefill", "mamba_block_size"),
        *("mamba_cache_dtype", "mamba_cache_mode", "mamba_ssm_cache_dtype", "sliding_window"),
    ),
    "attention_config": ("backend", "flash_attn_version", "use_cudnn_prefill", "use_trtllm_attention"),
    "load_config": ("load_format", "model_loader_extra_config", "ignore_patterns"),
    "lora_config": ("max_lora_rank", "lora_dtype", "fully_sharded_loras", "default_mm_loras"),
    "speculative_config": ("method", "model", "num_speculative_tokens", "quantization", "draft_sample_method"),
    "scheduler_config": ("disable_chunked_mm_input", "disable_hybrid_kv_cache_manager"),
    "parallel_config": ("all2all_backend", "cp_kv_cache_interleave_size", "decode_context_parallel_size"),
    "compilation_config": ("backend", "custom_ops", "level", "mode", "pass_config", "use_inductor"),
    "pass_config": ("fuse_attn_quant", "fuse_norm_quant"),
    "kernel_config": ("linear_backend", "moe_backend"),
    "environment": (
        *("VLLM_ATTENTION_BACKEND", "VLLM_BATCH_INVARIANT", "VLLM_CPU_SGL_KERNEL", "VLLM_FLASH_ATTN_VERSION"),
        *("VLLM_KV_CACHE_LAYOUT", "VLLM_USE_DEEP_GEMM", "VLLM_USE_TRITON_AWQ"),
    ),
}
"""Settings that change the KV, or that may change it."""


@pytest.mark.parametrize("owner", COUNTED)
def test_settings_that_change_the_kv_are_not_neutral(owner: str) -> None:
    """Also one that a later version adds, except in parts that cannot change the KV at all."""
    neutral = [name for name in (*COUNTED[owner], "of_a_later_version") if namespace.NEUTRAL.has(owner, name)]
    assert not neutral


@pytest.mark.parametrize(
    "entry",
    [
        *("model_config.revision", "draft_model_config.revision", "model_config.max_logprobs"),
        *("model_config.allowed_local_media_path", "load_config.download_dir", "load_config.safetensors_load_strategy"),
        *("cache_config.gpu_memory_utilization", "offload_config.any", "scheduler_config.max_num_seqs"),
        *("parallel_config.master_port", "kv_transfer_config.engine_id", "compilation_config.cudagraph_mode"),
        *("model_config.enforce_eager", "compilation_config.compilation_time", "observability_config.any"),
        *("lora_config.max_loras", "environment.VLLM_PORT", "environment.VLLM_LOGGING_LEVEL", "any.instance_id"),
    ],
)
def test_settings_that_change_nothing_are_neutral(entry: str) -> None:
    """One or two of each reason; otherwise engines on two hosts would share nothing."""
    assert namespace.NEUTRAL.has(*entry.split("."))


def test_parts_of_the_configuration_that_are_neutral() -> None:
    """All other parts have settings that count."""
    entries = [entry for reason in namespace.NEUTRAL.reasons.values() for entry in reason]
    assert {entry.removesuffix(".*") for entry in entries if entry.endswith(".*")} == {
        *("aux_output_config", "eplb_config", "fault_tolerance_config", "kv_events_config", "logging_config"),
        *("observability_config", "offload_config", "profiler_config", "reasoning_config"),
        *("structured_outputs_config", "watermark_config"),
    }
    assert {entry for entry in entries if "." not in entry} == {"instance_id", "quant_config", "shutdown_timeout"}


def test_each_field_of_the_namespace(make: MakeConnector, model: Path) -> None:
    """An engine with two ranks, two groups, and a name of its weights."""
    parallel = {"tensor_parallel_size": 2, "world_size": 2}
    extra = {"tenant": "red", "weights_version": "7"}
    groups = kv_cache(full(), window(5), layout="NHD")
    made = make(engine_config(str(model), extra, parallel=parallel, model={"revision": "v2"}), groups)
    found = server_of(made).namespace
    assert replace(found, attributes={}) == Namespace(
        model=str(model),
        dtype="float32",
        groups=(
            Group(256, TOKENS, "full.0", GroupKind.FULL_ATTENTION),
            Group(256, TOKENS, "window_4.1", GroupKind.SLIDING_WINDOW),
        ),
        layout="vllm:NHD",
        hash_scheme="vllm:sha256:4",
        revision="v2",
        world_size=2,
        tenant="red",
    )
    attributes = dict(found.attributes)
    assert {len(attributes.pop(name)) for name in (WEIGHTS, "settings", "layers")} == {64}
    assert attributes == SCHEME | {
        "engine": f"vllm {vllm_version}",
        "device": f"cpu {torch.backends.cpu.get_cpu_capability()}",
        "tensor_parallel_size": "2",
        "weights_version": "7",
    }


NEUTRAL: dict[str, dict[str, Any]] = {
    "name": {"kv_transfer": {"engine_id": "another"}},
    "producer": {"kv_transfer": {"is_kv_consumer": False}},
    "consumer": {"kv_transfer": {"is_kv_producer": False}},
    "replica": {"parallel": {"data_parallel_rank": 3, "rank": 3}},
    "tokens of a step": {"scheduler": {"max_num_batched_tokens": 4096}},
    "limits": {"extra": {"lookup_timeout_s": 7.0, "max_held_fraction": 0.1}},
    "served name": {"model": {"served_model_name": "alias"}},
}


@pytest.mark.parametrize("changes", NEUTRAL.values(), ids=NEUTRAL)
def test_engines_that_differ_otherwise_share_blocks(digest_of: Callable[..., str], changes: dict[str, Any]) -> None:
    """Names, roles, ranks of replicas, limits and timeouts do not change the KV."""
    assert digest_of(**changes) == digest_of()


# ---- roles


@pytest.mark.parametrize(("consumer", "producer"), [(True, False), (False, True), (True, True)])
def test_a_consumer_loads_and_a_producer_saves(
    make: MakeConnector, model: Path, *, consumer: bool, producer: bool
) -> None:
    """`kv_role` decides whether an engine loads stored blocks, and whether it stores its own."""
    roles = {"is_kv_consumer": consumer, "is_kv_producer": producer}
    made = make(engine_config(str(model), {}, kv_transfer=roles))
    server, request = server_of(made), make_request(3)
    server.keys = {make_key(bytes([number]) * 32, 0) for number in range(2)}
    made.on_new_request(request)
    wait_until(lambda: made.get_num_new_matched_tokens(request, 0) == ((8, True) if consumer else (0, False)))
    assert made._scheduler is not None
    adapted = made._scheduler._requests["r"]
    assert adapted.may_save is producer
