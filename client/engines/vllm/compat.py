"""The one place that knows which vLLM this is: everything this adapter takes from it is imported here.

Written against 0.32 and 0.33 (``tests/engines/connector_api.json``). What differs between them needs no branch here:

- 0.33 renamed the third item of ``yield_req_data``, which is not used: block tables are read from
  ``scheduler_output.kv_connector_block_state``, which both have.
- 0.33 tells connectors of sleep and wake (``unregister_kv_caches``, ``restore_kv_caches``); 0.32 calls neither.
- 0.33 asserts less about the null block in ``BlockPool.touch``; this adapter never touches it in either.

An older release, and one that lacks what is imported here, is refused with one ImportError; a newer one is one warning.
"""

# vLLM is not in the environment that is checked:
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import re

__all__ = [
    "MEDIUM_CPU",
    "SUPPORTED",
    "AllBlocksCleared",
    "BlockStored",
    "CacheHitSource",
    "FullAttentionSpec",
    "KVCacheConfig",
    "KVCacheEvent",
    "KVConnectorBase_V1",
    "KVConnectorHandshakeMetadata",
    "KVConnectorMetadata",
    "KVConnectorPromMetrics",
    "KVConnectorRole",
    "KVConnectorStats",
    "KVConnectorTransferResults",
    "KVConnectorWorkerMetadata",
    "MLAAttentionSpec",
    "MambaSpec",
    "SlidingWindowSpec",
    "SupportsHMA",
    "UniformTypeKVCacheSpecs",
    "generate_block_hash_extra_keys",
    "get_block_hash",
    "get_group_id",
    "group_kernel_blocks",
    "init_logger",
    "is_known",
    "maybe_convert_block_hash",
    "refuse_text",
    "release_of",
    "resolve_block_hashes",
    "resolve_dcp_kv_block_size",
    "resolve_kv_cache_block_sizes",
    "unknown_text",
    "vllm_version",
]


Release = tuple[int, int]


_KNOWN: tuple[Release, ...] = ((0, 32), (0, 33))


SUPPORTED = "vLLM 0.32 and 0.33"


def release_of(version: str) -> Release | None:
    """Returns major and minor; None for a build that does not say, like one from a checkout without tags ("0.1.dev7+g…")."""
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None or version.startswith("0.1.dev"):
        return None
    return int(match[1]), int(match[2])


def is_known(version: str) -> bool:
    """Whether the adapter is tested with this release."""
    return release_of(version) in _KNOWN


def refuse_text(version: str, reason: str = "") -> str | None:
    """Returns why the connector cannot run in this vLLM: it is too old, or ``reason`` says what is missing; None where it may."""
    release = release_of(version)
    if not reason and (release is None or release >= _KNOWN[0]):
        return None
    return f"kvtier's connector works with {SUPPORTED}; this is vLLM {version}{f' ({reason})' if reason else ''}"


def unknown_text(version: str) -> str:
    """Returns what to say of a vLLM that is newer than what was tested, or does not say what it is."""
    return f"kvtier: this is vLLM {version}; the connector was made for {SUPPORTED}, and goes on: all that it needs is there"


try:
    from vllm import __version__ as vllm_version
except ImportError as error:  # pragma: no cover - only without vLLM
    raise ImportError("kvtier.client.engines.vllm runs inside vLLM, which is not installed here") from error


if _too_old := refuse_text(vllm_version):
    raise ImportError(_too_old)


try:
    from vllm.distributed.kv_events import MEDIUM_CPU, AllBlocksCleared, BlockStored, KVCacheEvent
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorBase_V1,
        KVConnectorHandshakeMetadata,
        KVConnectorMetadata,
        KVConnectorRole,
        KVConnectorTransferResults,
        KVConnectorWorkerMetadata,
        SupportsHMA,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
    from vllm.logger import init_logger
    from vllm.v1.core.kv_cache_utils import (
        generate_block_hash_extra_keys,
        get_block_hash,
        get_group_id,
        maybe_convert_block_hash,
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
    raise ImportError(refuse_text(vllm_version, str(error))) from error


del _KVConnectorBlockState  # imported only to refuse a vLLM that does not offer block tables to its connector


if not is_known(vllm_version):
    init_logger("vllm." + __name__).warning(unknown_text(vllm_version))
