"""Everything that the adapter imports from SGLang.

The import of this module raises ImportError without SGLang, or if SGLang lacks an imported name.
"""

from __future__ import annotations

import logging
from typing import Any

__all__ = [
    "HiCacheStorage",
    "PoolHitPolicy",
    "PoolTransferResult",
    "StorageMetrics",
    "agree",
    "engine_settings",
    "is_split_by_heads",
    "logger",
    "sglang_version",
]

SUPPORTED = "0.5.23"

try:
    from sglang.srt.arg_groups.arg_utils import namespace_of
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolHitPolicy, PoolTransferResult
    from sglang.srt.observability.metrics_collector import StorageMetrics
    from sglang.srt.runtime_context import get_context, get_parallel
    from sglang.version import __version__ as sglang_version
except ImportError as error:
    raise ImportError(f"kvtier.client.engines.sglang runs inside SGLang {SUPPORTED}: {error}") from error

logger = logging.getLogger("sglang." + __name__)

if not sglang_version.startswith(SUPPORTED):
    logger.warning("kvtier: tested with SGLang %s; this is %s", SUPPORTED, sglang_version)


def engine_settings() -> dict[str, dict[str, Any]]:
    """Returns the engine's arguments as resolved now, by SGLang's groups: "model", "exec.moe" etc.

    ServerArgs itself has what the operator gave: `device` can be None, and an adapter a string.
    """
    context = get_context()
    groups = namespace_of(type(context.server_args))
    settings: dict[str, dict[str, Any]] = {}
    for name, value in context.resolved_server_args_dict().items():
        settings.setdefault(groups.get(name, ""), {})[name] = value
    return settings


def agree(text: str, ranks: int) -> str:
    """Returns the `text` of the first tensor parallel rank. All ranks call this function."""
    if ranks == 1:
        return text
    agreed: str = get_parallel().tp_group.broadcast_object(text, src=0)
    return agreed


def is_split_by_heads(pool: Any) -> bool:
    """Whether each tensor parallel rank has other KV heads in this host pool."""
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

    return isinstance(pool, MHATokenToKVPoolHost)
