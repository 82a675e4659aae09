"""Everything that the adapter imports from vLLM, and the check of vLLM's version.

The same code works with vLLM 0.32 and 0.33. `tests/engines/connector_api.py` lists the interfaces
of the two releases. They differ as follows:

- 0.33 renamed the third item of `yield_req_data`. The adapter does not use this function. It reads
  block tables from `scheduler_output.kv_connector_block_state`, which exists in both releases.
- Only 0.33 calls `unregister_kv_caches` and `restore_kv_caches` for sleep and wake.
- `BlockPool.touch` of 0.32 asserts more about the null block than that of 0.33. The adapter never
  touches that block.

With an older release, or a release that lacks an imported name, the import of this module raises
ImportError. With a newer release the import logs a warning.
"""

from __future__ import annotations

import contextlib
import functools
import re
import sys
import weakref
from typing import Any

Release = tuple[int, int]

_KNOWN: tuple[Release, ...] = ((0, 32), (0, 33))
SUPPORTED = "vLLM 0.32 and 0.33"


def release_of(version: str) -> Release | None:
    """Returns (major, minor), or None for a build without a release number ("0.1.dev7+g…")."""
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None or version.startswith("0.1.dev"):
        return None
    return int(match[1]), int(match[2])


def refuse_text(version: str, reason: str = "") -> str | None:
    """Returns why this vLLM is refused (too old, or `reason`), or None if it is accepted."""
    release = release_of(version)
    if not reason and (release is None or release >= _KNOWN[0]):
        return None
    return f"kvtier's connector works with {SUPPORTED}; this is vLLM {version}{f' ({reason})' if reason else ''}"


try:
    from vllm import __version__ as vllm_version
except ImportError as error:  # pragma: no cover - only without vLLM
    raise ImportError("kvtier.client.engines.vllm runs inside vLLM, which is not installed here") from error

if _too_old := refuse_text(vllm_version):
    raise ImportError(_too_old)

try:
    from vllm.distributed.kv_events import MEDIUM_CPU, AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
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

del _KVConnectorBlockState  # imported only to refuse a vLLM without block tables for connectors

if release_of(vllm_version) not in _KNOWN:
    init_logger("vllm." + __name__).warning(
        f"kvtier: this is vLLM {vllm_version}; the connector was tested with {SUPPORTED} only. It starts anyway: no name is missing"
    )

_watching: weakref.WeakSet[Any] = weakref.WeakSet()


def watch_engine_core(connector: Any) -> None:
    """Makes vLLM's `EngineCore` report names of weights and loads of LoRA adapters to `connector`.

    vLLM reports neither to connectors, so this function wraps two methods of the class:

    - `set_weight_version`, which vLLM calls at the end of a weight update: after a new name come
      `connector.weights_named()` and a reset of vLLM's prefix cache and connectors.
    - `add_lora`, which loads an adapter before its first request: it runs inside the context
      manager `connector.loading_adapter(lora_request)`.

    Without a method or its module, as in workers, nothing happens. `connector` is that of a
    scheduler.
    """
    engine_core: Any = getattr(sys.modules.get("vllm.v1.engine.core"), "EngineCore", None)
    if engine_core is None:
        return
    _watching.add(connector)
    for name, wrap in (("set_weight_version", _report_name), ("add_lora", _report_adapter)):
        method = getattr(engine_core, name, None)
        if method is not None and not hasattr(method, "__wrapped__"):
            setattr(engine_core, name, functools.wraps(method)(wrap(method)))


def _connectors_of(core: Any) -> list[Any]:
    own = getattr(core.scheduler, "connector", None)
    parts = getattr(own, "_connectors", ())  # those of a MultiConnector
    return [each for each in list(_watching) if each is own or each in parts]


def _report_name(method: Any) -> Any:
    def set_weight_version(core: Any, weight_version: str) -> None:
        changed = weight_version != getattr(core, "_weight_version", None)
        method(core, weight_version)
        if changed and (connectors := _connectors_of(core)):
            for each in connectors:
                each.weights_named()
            core.reset_prefix_cache(reset_connector=True)

    return set_weight_version


def _report_adapter(method: Any) -> Any:
    def add_lora(core: Any, lora_request: Any) -> Any:
        with contextlib.ExitStack() as loading:
            for each in _connectors_of(core):
                loading.enter_context(each.loading_adapter(lora_request))
            return method(core, lora_request)

    return add_lora
