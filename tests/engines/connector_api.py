"""Names that vLLM calls on a connector, and names that this connector takes from vLLM.

`make test-engines` compares those of 0.32 with vLLM, and `make test-engines NEXT=1` those of 0.33.
"""

from __future__ import annotations

__all__ = ["HOOKS", "IMPORTS", "METRICS_CLASSES"]

_HOOKS_032: dict[str, str] = {
    "bind_connector_metadata": "connector_metadata",
    "bind_gpu_block_pool": "gpu_block_pool",
    "bind_kv_cache_manager": "kv_cache_manager",
    "build_connector_meta": "scheduler_output",
    "build_connector_worker_meta": "",
    "build_kv_connector_stats": "data",
    "build_prom_metrics": "vllm_config metric_types labelnames per_engine_labelvalues",
    "clear_connector_metadata": "",
    "finish_forward": "",
    "get_block_ids_with_load_errors": "",
    "get_external_cache_hit_sources": "request num_external_tokens",
    "get_finished": "finished_req_ids",
    "get_finished_count": "",
    "get_handshake_metadata": "",
    "get_kv_connector_kv_cache_events": "",
    "get_kv_connector_stats": "",
    "get_loaded_kv_cache_group_ids": "request",
    "get_mem_pool_context": "",
    "get_num_new_matched_tokens": "request num_computed_tokens",
    "get_required_kvcache_layout": "vllm_config",
    "get_transfer_results": "finished_req_ids",
    "handle_preemptions": "kv_connector_metadata",
    "has_connector_metadata": "",
    "has_pending_block_frees": "",
    "has_pending_push_work": "",
    "on_new_request": "request",
    "register_finished_partial_tail": "request block_ids partial_tail_offloads",
    "register_kv_caches": "kv_caches",
    "request_finished": "request block_ids",
    "request_finished_all_groups": "request block_ids",
    "requires_piecewise_for_cudagraph": "extra_config",
    "reset_cache": "",
    "reset_capture_state": "",
    "save_kv_layer": "layer_name kv_layer attn_metadata **kwargs",
    "set_host_xfer_buffer_ops": "copy_operation",
    "set_xfer_handshake_metadata": "metadata",
    "set_xfer_handshake_metadata_pp_aware": "metadata",
    "shutdown": "",
    "start_load_kv": "forward_context **kwargs",
    "take_events": "",
    "update_connector_output": "connector_output",
    "update_state_after_alloc": "request blocks num_external_tokens",
    "wait_for_layer_load": "layer_name",
    "wait_for_save": "",
}

HOOKS: dict[str, dict[str, str]] = {
    "0.32": _HOOKS_032,
    "0.33": _HOOKS_032
    | {"supports_sleep_mode": "kv_transfer_config", "unregister_kv_caches": "", "restore_kv_caches": ""},
}
"""Per release: the methods of ``KVConnectorBase_V1`` and ``SupportsHMA``, each with its
parameters."""

METRICS_CLASSES: dict[str, dict[str, str]] = {
    "KVConnectorStats": {"aggregate": "other", "is_empty": "", "reduce": "", "reset": "", "to_dict": ""},
    "KVConnectorPromMetrics": {
        "__init__": "vllm_config metric_types labelnames per_engine_labelvalues",
        "observe": "transfer_stats_data engine_idx",
    },
}
"""The methods of the classes in ``kv_connector/v1/metrics.py``: the same in both releases."""

IMPORTS: dict[str, str] = {
    "vllm": "__version__",
    "vllm.distributed.kv_events": "AllBlocksCleared BlockRemoved BlockStored KVCacheEvent MEDIUM_CPU",
    "vllm.distributed.kv_transfer.kv_connector.v1.base": "KVConnectorBase_V1 KVConnectorHandshakeMetadata "
    "KVConnectorMetadata KVConnectorRole KVConnectorTransferResults KVConnectorWorkerMetadata SupportsHMA",
    "vllm.distributed.kv_transfer.kv_connector.v1.metrics": "KVConnectorPromMetrics KVConnectorStats",
    "vllm.logger": "init_logger",
    "vllm.platforms": "current_platform",
    "vllm.v1.core.kv_cache_utils": "generate_block_hash_extra_keys get_block_hash get_group_id "
    "maybe_convert_block_hash resolve_block_hashes "
    "resolve_dcp_kv_block_size resolve_kv_cache_block_sizes",
    "vllm.v1.core.sched.output": "KVConnectorBlockState",
    "vllm.v1.kv_cache_interface": "FullAttentionSpec KVCacheConfig MambaSpec MLAAttentionSpec SlidingWindowSpec "
    "UniformTypeKVCacheSpecs group_kernel_blocks",
    "vllm.v1.metrics.cache_hit_source": "CacheHitSource",
}
"""Names that the adapter imports and both releases have."""
