"""Everything that the tier imports from vLLM, and the differences between versions.

- 0.33 calls a tier under a lock, possibly on another thread, but never makes two calls at once.
- After a reset, 0.33 delays promotions until the workers have flushed. Until then vLLM treats hits
  as misses (B3.19).
- Some versions use the names `BLOCK_LEVEL` and `block_ids` instead of `CHUNK_LEVEL` and `chunk_ids`
  (B3.1).
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

try:
    from vllm import __version__ as vllm_version
except ImportError as error:  # pragma: no cover - only without vLLM
    raise ImportError("kvtier.client.engines.vllm_tier runs inside vLLM, which is not installed here") from error

_NEEDS = f"kvtier as a tier of vLLM's own tiering needs vLLM 0.32 or 0.33; this is vLLM {vllm_version}"

try:
    from vllm.config import VllmConfig
    from vllm.platforms import current_platform
    from vllm.v1.kv_offload.base import Locality, LookupResult, OffloadPolicy, RequestOffloadingContext
    from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

    # The tier also needs these features: answers in a later step, and partial loads.
    _RELIED_ON = (LookupResult.RETRY, JobResult.__dataclass_fields__["successful_keys"])
except (ImportError, AttributeError, KeyError) as error:
    raise ImportError(f"{_NEEDS} ({error})") from error


def check_hooks(asked: frozenset[str], offered: frozenset[str]) -> None:
    """Raises ImportError, with the missing names, if vLLM asks for hooks that are not `offered`."""
    missing = asked - offered
    if missing:
        raise ImportError(f"{_NEEDS} (it asks a tier for {', '.join(sorted(missing))})")


def block_level_of(policies: Any) -> Any:
    """Returns this vLLM's policy that stores new blocks only (B3.1)."""
    return getattr(policies, "CHUNK_LEVEL", None) or policies.BLOCK_LEVEL


BLOCK_LEVEL = block_level_of(OffloadPolicy)


def rows_of(job: Any) -> list[int]:
    """Returns the job's rows in the primary tier, in the order of the job's keys."""
    rows = job.chunk_ids if hasattr(job, "chunk_ids") else job.block_ids
    return [int(row) for row in rows]


def end_token(req_context: Any, key: Any) -> int:
    """Returns the token at which the key's chunk ends in its request; 0 if unknown."""
    position = getattr(req_context, "get_offload_key_position", None)
    return (position(key) or 0) if position is not None else 0


def end_tokens(req_context: Any) -> Mapping[bytes, int]:
    """Returns by key, for all chunks of a request, the token at which the chunk ends.

    vLLM has no method for all keys, so this reads a private attribute; without it, no key is known.
    """
    return getattr(req_context, "_offload_key_positions", {})


def find_engine_config(engine_id: str) -> Any:
    """Returns the configuration of the engine that is being built, or None if it cannot be found.

    vLLM gives a tier only the offloading configuration, which does not identify the weights. The
    connector that builds the tier has the engine's configuration in a local variable. This function
    therefore searches the local variables of its callers.
    """
    frame = inspect.currentframe()
    while frame is not None:
        config = frame.f_locals.get("vllm_config")
        if (
            isinstance(config, VllmConfig)
            and getattr(getattr(config, "kv_transfer_config", None), "engine_id", None) == engine_id
        ):
            return config
        frame = frame.f_back
    return None
