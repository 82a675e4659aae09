"""Namespace of an engine: every property that changes the meaning of a block's bytes.

The scheduler computes the namespace and sends it to the workers. A worker uses it only if the
model's files on the worker's host are the same, and the worker holds the same layers. So all
workers of an engine have one namespace, and a difference never causes wrong tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from ... import Group, GroupKind, Namespace
from ...offload import CacheGeometry
from ...offload import CacheGroupKind as OffloadKind
from ..identity import SCHEME, WEIGHTS, identify_weights
from ..settings import NeutralSettings, digest_of_settings, plain_settings, settings_of_environment
from .compat import KVCacheConfig, vllm_version
from .ranks import Parts, resolve_ranks

__all__ = ["NEUTRAL", "describe_engine", "identify_model", "prepare_namespace"]

_KINDS = {
    OffloadKind.FULL: GroupKind.FULL_ATTENTION,
    OffloadKind.WINDOW: GroupKind.SLIDING_WINDOW,
    OffloadKind.STATE: GroupKind.STATE,
}
NEUTRAL = NeutralSettings(
    {
        "part of the namespace in another form": (
            *("model_config.model", "model_config.revision", "model_config.hf_token", "hf_config._name_or_path"),
            *("hf_config._commit_hash", "hf_text_config._name_or_path", "hf_text_config._commit_hash"),
            *("cache_config.prefix_caching_hash_algo", "cache_config.enable_prefix_caching"),
            *("cache_config.hash_block_size", "cache_config.kv_cache_layout"),
            *("cache_config.user_specified_block_size", "cache_config._block_size_resolved", "quant_config"),
            *("device_config.device", "device_config.device_type"),
        ),
        "names, sampling, output and texts": (
            *("model_config.served_model_name", "model_config.max_logprobs", "model_config.logprobs_mode"),
            *("model_config.use_fp64_gumbel", "model_config.return_sampling_mask", "model_config.logits_processors"),
            *("model_config.generation_config", "model_config.override_generation_config"),
            *("model_config.skip_tokenizer_init", "model_config.renderer_num_workers"),
            *("structured_outputs_config.*", "watermark_config.*", "reasoning_config.*"),
        ),
        "access to media and hubs": (
            *("model_config.allowed_local_media_path", "model_config.allowed_media_domains"),
            *("load_config.download_dir", "load_config.use_tqdm_on_load"),
        ),
        "how fast weights are read": (
            *("load_config.safetensors_load_strategy", "load_config.safetensors_prefetch_num_threads"),
            *("load_config.safetensors_prefetch_block_size", "parallel_config.max_parallel_loading_workers"),
        ),
        "memory, and how much of it": (
            *("model_config.enable_sleep_mode", "model_config.sleep_preserve_parameter_names"),
            *("model_config.sleep_mode_backend", "model_config.sleep_mode_offload_cudagraph"),
            *("model_config.enable_nccl_comm_suspend", "model_config.enable_cumem_allocator"),
            *("cache_config.gpu_memory_utilization", "cache_config.num_gpu_blocks_override"),
            *("cache_config.num_gpu_blocks", "cache_config.num_cpu_blocks", "cache_config.kv_cache_size_tokens"),
            *("cache_config.kv_cache_max_concurrency", "cache_config.kv_cache_memory_bytes"),
            *("cache_config.kv_offloading_size", "cache_config.kv_offloading_backend"),
            *("cache_config.prefix_cache_retention_interval", "cache_config.cache_hit_alignment_tokens"),
            "offload_config.*",
        ),
        "when tokens are computed": (
            *("scheduler_config.max_num_batched_tokens", "scheduler_config.max_num_scheduled_tokens"),
            *("scheduler_config.max_num_seqs", "scheduler_config.max_num_active_seqs", "scheduler_config.watermark"),
            *("scheduler_config.long_prefill_token_threshold", "scheduler_config.policy"),
            *("scheduler_config.long_prefill_token_threshold_adaptive", "scheduler_config.max_num_queued_reqs"),
            *("scheduler_config.max_num_queued_tokens", "scheduler_config.enable_chunked_prefill"),
            *("scheduler_config.max_num_encoder_input_tokens", "scheduler_config.encoder_cache_size"),
            *("scheduler_config.scheduler_reserve_full_isl", "scheduler_config.prefill_schedule_interval"),
            *("scheduler_config.async_scheduling", "scheduler_config.stream_interval", "shutdown_timeout"),
        ),
        "which process computes what, and how processes reach each other": (
            *("parallel_config.pipeline_parallel_size", "parallel_config.tensor_parallel_size"),
            *("parallel_config.world_size", "parallel_config.rank", "parallel_config.data_parallel_size"),
            *("parallel_config.data_parallel_size_local", "parallel_config.data_parallel_rank"),
            *("parallel_config.data_parallel_rank_local", "parallel_config.data_parallel_index"),
            *("parallel_config.data_parallel_master_ip", "parallel_config.data_parallel_rpc_port"),
            *("parallel_config.data_parallel_master_port", "parallel_config.data_parallel_backend"),
            *("parallel_config.data_parallel_external_lb", "parallel_config.data_parallel_hybrid_lb"),
            *("parallel_config._data_parallel_master_port_list", "parallel_config._coord_store_port"),
            *("parallel_config._api_process_count", "parallel_config._api_process_rank"),
            *("parallel_config.dp_sync_interval", "parallel_config.disable_nccl_for_dp_synchronization"),
            *("parallel_config.master_addr", "parallel_config.master_port", "parallel_config.node_rank"),
            *("parallel_config.nnodes", "parallel_config.distributed_executor_backend"),
            *("parallel_config.ray_workers_use_nsight", "parallel_config.ray_runtime_env"),
            *("parallel_config.placement_group", "parallel_config.numa_bind", "parallel_config.numa_bind_nodes"),
            *("parallel_config.numa_bind_cpus", "parallel_config.assigned_physical_gpu_ids"),
            *("parallel_config.distributed_timeout_seconds", "parallel_config.cpu_distributed_timeout_seconds"),
            *("parallel_config.enable_shm_tensor_arena", "parallel_config.disable_custom_all_reduce"),
            *(
                "parallel_config.enable_fault_tolerance",
                "fault_tolerance_config.*",
                "parallel_config.enable_elastic_ep",
            ),
            *("parallel_config.elastic_ep_max_dp_size", "parallel_config.enable_expert_parallel"),
            *("parallel_config.enable_eplb", "eplb_config.*", "parallel_config.expert_placement_strategy"),
            *("parallel_config.enable_ep_weight_filter", "parallel_config.enable_batch_sharded_sampling"),
            *(
                "parallel_config.enable_dbo",
                "parallel_config.ubatch_size",
                "parallel_config.dbo_decode_token_threshold",
            ),
            *("parallel_config.dbo_prefill_token_threshold", "pass_config.fuse_allreduce_rms"),
            "pass_config.fi_allreduce_fusion_max_size_mb",
            *("kv_transfer_config.kv_connector", "kv_transfer_config.engine_id", "kv_transfer_config.kv_role"),
            *("kv_transfer_config.kv_rank", "kv_transfer_config.kv_parallel_size", "kv_transfer_config.kv_ip"),
            *("kv_transfer_config.kv_port", "kv_transfer_config.kv_buffer_device", "kv_transfer_config.kv_buffer_size"),
            *("kv_transfer_config.kv_connector_extra_config", "kv_transfer_config.kv_connector_module_path"),
            *("kv_transfer_config.is_kv_consumer", "kv_transfer_config.is_kv_producer"),
            *("kv_transfer_config.kv_load_failure_policy", "instance_id", "ec_transfer_config.engine_id"),
        ),
        "graphs that replay the same kernels, and caches of compiled code": (
            *("model_config.enforce_eager", "speculative_config.enforce_eager", "compilation_config.cudagraph_mode"),
            *("compilation_config.cudagraph_num_of_warmups", "compilation_config.cudagraph_capture_sizes"),
            *("compilation_config.cudagraph_copy_inputs", "compilation_config.max_cudagraph_capture_size"),
            *("compilation_config.cudagraph_decoder_replay", "compilation_config.cudagraph_specialize_lora"),
            *("compilation_config.decoder_replay_cudagraph_capture_sizes", "compilation_config.splitting_ops"),
            *("compilation_config.decoder_replay_trim_threshold", "compilation_config.cudagraph_mm_encoder"),
            *(
                "compilation_config.debug_dump_path",
                "compilation_config.cache_dir",
                "compilation_config.local_cache_dir",
            ),
            *("compilation_config.compile_cache_save_format", "compilation_config.compile_sizes"),
            *("compilation_config.compile_ranges_endpoints", "inductor_compile_config.post_grad_custom_post_pass"),
            *("kernel_config.enable_flashinfer_autotune", "kernel_config.enable_rocm_segmented_attn_autotune"),
            *("kernel_config.enable_cutedsl_warmup", "kernel_config.enable_jit_warmup"),
        ),
        "state that vLLM keeps in its configuration while it runs": (
            *("compilation_config.enabled_custom_ops", "compilation_config.disabled_custom_ops"),
            *("compilation_config.traced_files", "compilation_config.compilation_time"),
            *("compilation_config.encoder_compilation_time", "compilation_config.static_forward_context"),
            "compilation_config.static_all_moe_layers",
        ),
        "metrics, logs, traces and events": (
            *("observability_config.*", "logging_config.*", "profiler_config.*", "kv_events_config.*"),
            "aux_output_config.*",
        ),
        "how many adapters an engine keeps": ("lora_config.max_loras", "lora_config.max_cpu_loras"),
        "addresses, ports, folders, logs and sizes in the environment": (
            *("environment.VLLM_DIST_IDENT", "environment.VLLM_PORT", "environment.VLLM_HOST_IP"),
            *("environment.VLLM_LOOPBACK_IP", "environment.VLLM_RPC_BASE_PATH", "environment.VLLM_API_KEY"),
            *("environment.VLLM_DP_RANK", "environment.VLLM_DP_RANK_LOCAL", "environment.VLLM_DP_SIZE"),
            *("environment.VLLM_DP_MASTER_IP", "environment.VLLM_DP_MASTER_PORT", "environment.VLLM_CACHE_ROOT"),
            *("environment.VLLM_CONFIG_ROOT", "environment.VLLM_ASSETS_CACHE", "environment.VLLM_MEDIA_CACHE"),
            *("environment.VLLM_XLA_CACHE_PATH", "environment.VLLM_DEBUG_DUMP_PATH", "environment.VLLM_LOGGING_LEVEL"),
            *("environment.VLLM_LOGGING_CONFIG_PATH", "environment.VLLM_CONFIGURE_LOGGING"),
            *("environment.VLLM_LOGGING_PREFIX", "environment.VLLM_LOGGING_STREAM", "environment.VLLM_LOGGING_COLOR"),
            *("environment.VLLM_LOG_STATS_INTERVAL", "environment.VLLM_USAGE_SOURCE", "environment.VLLM_DO_NOT_TRACK"),
            *("environment.VLLM_NO_USAGE_STATS", "environment.VLLM_USAGE_STATS_SERVER"),
            *("environment.VLLM_WORKER_MULTIPROC_METHOD", "environment.VLLM_ENABLE_V1_MULTIPROCESSING"),
            *("environment.VLLM_CPU_KVCACHE_SPACE", "environment.VLLM_CPU_OMP_THREADS_BIND"),
            *("environment.VLLM_CPU_NUM_OF_RESERVED_CPU", "environment.VLLM_NIXL_SIDE_CHANNEL_HOST"),
            *("environment.VLLM_NIXL_SIDE_CHANNEL_PORT", "environment.VLLM_ENGINE_READY_TIMEOUT_S"),
            *("environment.VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", "environment.VLLM_HTTP_TIMEOUT_KEEP_ALIVE"),
            *("environment.VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS", "environment.VLLM_SERVER_DEV_MODE"),
            *("environment.VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "environment.VLLM_ALLOW_RUNTIME_LORA_UPDATING"),
            *("environment.VLLM_LORA_RESOLVER_CACHE_DIR", "environment.VLLM_USE_MODELSCOPE"),
        ),
    }
)
"""vLLM's settings that do not change the KV of tokens. All others count, also those of later
versions. Which kernels sum in which order is a difference of rounding, as between two batches."""


def prepare_namespace(
    vllm_config: Any,
    kv_cache_config: KVCacheConfig,
    geometry: CacheGeometry,
    parts: Parts,
    tenant: str = "",
) -> Callable[[], Namespace]:
    """Returns a function that returns the namespace of this engine and tenant.

    The function reads files and raises OSError. It uses the configuration as it is now: an update
    of the weights writes into it.
    `parts`: the parts of all ranks. All data parallel engines have the same namespace, because
    their blocks are interchangeable. Raises Unsupported for settings that cannot be compared.
    """
    model, ranks = vllm_config.model_config, resolve_ranks(vllm_config, parts)
    groups = tuple(
        Group(name=g.name, kind=_KINDS[g.kind], block_tokens=g.block_tokens, part_bytes=part_bytes)
        for g, part_bytes in zip(geometry.groups, parts.part_bytes, strict=True)
    )
    attributes_of = describe_engine(vllm_config)
    namespace = Namespace(
        model=str(model.model),
        dtype=str(model.dtype).removeprefix("torch."),
        hash_scheme=f"vllm:{vllm_config.cache_config.prefix_caching_hash_algo}:{geometry.hash_tokens}",
        layout=f"vllm:{kv_cache_config.kv_cache_layout}",
        revision=str(model.revision or ""),
        world_size=ranks.parts,
        groups=groups,
        tenant=tenant,
        # Not the number of ranks: a rank can hold several parts, and ranks with the same bytes
        # share one part.
        attributes={"tensor_parallel_size": str(ranks.shards), "layers": parts.digest},
    )
    return lambda: replace(namespace, attributes={**namespace.attributes, **attributes_of()})


def describe_engine(vllm_config: Any) -> Callable[[], dict[str, str]]:
    """Returns a function that returns attributes for the model, weights and settings.

    Both raise as `prepare_namespace` does.
    """
    environment = settings_of_environment("VLLM_", NEUTRAL)
    settings = [plain_settings(vllm_config, NEUTRAL), environment]
    weights_of, model = identify_model(vllm_config), str(vllm_config.model_config.model)
    known = {
        # The attention back end defines the format inside a page. It may change between versions.
        "engine": f"vllm {vllm_version}",
        "device": _device_name(vllm_config),
        **SCHEME,
    }

    def attributes() -> dict[str, str]:
        weights = weights_of()
        # The tokenizer is usually in the folder of the model.
        return known | {WEIGHTS: weights, "settings": digest_of_settings(settings, {model: weights})}

    return attributes


def identify_model(vllm_config: Any) -> Callable[[], str]:
    """Returns a function that identifies the weights of the model and of a draft model.

    The function raises Unsupported if they cannot be identified, and OSError.
    """
    draft = getattr(vllm_config.speculative_config, "draft_model_config", None)
    models = [vllm_config.model_config, *([draft] if draft is not None else [])]
    folder = getattr(getattr(vllm_config, "load_config", None), "download_dir", None)
    names = [(str(model.model), str(model.revision or ""), _commit_of(model)) for model in models]
    # Weights can be in another place than the rest of the model.
    names += [(str(place), "", None) for model in models if (place := getattr(model, "model_weights", ""))]
    return lambda: " ".join(identify_weights(*name, folder=folder) for name in dict.fromkeys(names))


def _commit_of(model: Any) -> str | None:
    """Returns the commit of a model on a hub. It is preferred to a branch, which changes."""
    commit = getattr(model.revision, "resolved", None)
    if commit is None and not getattr(model, "hf_config_path", None):
        commit = getattr(getattr(model, "hf_config", None), "_commit_hash", None)
    return commit


def _device_name(vllm_config: Any) -> str:
    """Returns device type and instruction set or compute capability, without a CUDA context."""
    device = str(vllm_config.device_config.device_type)
    if device == "cpu":
        return f"cpu {torch.backends.cpu.get_cpu_capability()}"
    from vllm.platforms import current_platform

    return f"{device} {current_platform.get_device_capability()}"
