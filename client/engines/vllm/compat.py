"""The one place that knows which vLLM this is: everything this adapter takes from it is imported here.

Written against 0.32 and 0.33. What differs between them needs no branch here:

- 0.33 renamed the third item of ``yield_req_data`` and added sleep-mode hooks; neither is used (block tables are read from
  ``scheduler_output.kv_connector_block_state``, which both have).
- 0.33 asserts less about the null block in ``BlockPool.touch``; this adapter never touches it in either.
"""

from __future__ import annotations

try:
    from vllm import __version__ as vllm_version
except ImportError as error:  # pragma: no cover - only without vLLM
    raise ImportError("kvtier.client.engines.vllm runs inside vLLM, which is not installed here") from error

try:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorBase_V1,
        KVConnectorHandshakeMetadata,
        KVConnectorMetadata,
        KVConnectorRole,
        KVConnectorTransferResults,
        KVConnectorWorkerMetadata,
        SupportsHMA,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
    from vllm.logger import init_logger
    from vllm.v1.core.kv_cache_utils import (
        get_block_hash,
        get_group_id,
        resolve_block_hashes,
        resolve_dcp_kv_block_size,
        resolve_kv_cache_block_sizes,
    )
    from vllm.v1.core.sched.output import KVConnectorBlockState as _KVConnectorBlockState
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        MambaSpec,
        MLAAttentionSpec,
        SlidingWindowSpec,
        UniformTypeKVCacheSpecs,
        group_kernel_blocks,
    )
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
except ImportError as error:
    raise ImportError(f"kvtier's connector needs vLLM 0.32 or newer; this is vLLM {vllm_version} ({error})") from error

del _KVConnectorBlockState  # imported only to refuse a vLLM that does not offer block tables to its connector

__all__ = [
    "CacheHitSource",
    "FullAttentionSpec",
    "KVCacheConfig",
    "KVConnectorBase_V1",
    "KVConnectorHandshakeMetadata",
    "KVConnectorMetadata",
    "KVConnectorRole",
    "KVConnectorStats",
    "KVConnectorTransferResults",
    "KVConnectorWorkerMetadata",
    "MLAAttentionSpec",
    "MambaSpec",
    "SlidingWindowSpec",
    "SupportsHMA",
    "UniformTypeKVCacheSpecs",
    "get_block_hash",
    "get_group_id",
    "group_kernel_blocks",
    "init_logger",
    "resolve_block_hashes",
    "resolve_dcp_kv_block_size",
    "resolve_kv_cache_block_sizes",
    "vllm_version",
]
