"""Connector and tier with long timeouts (`engine_timeouts`): a `module_path` for vLLM's settings.

Every process of an engine imports it, however it was started. It is for engines only: there is no
way back.
"""

from __future__ import annotations

from engine_timeouts import long_timeouts

from kvtier.client.engines.vllm import KVTierConnector
from kvtier.client.engines.vllm_tier import KVTierSecondaryTier

__all__ = ["KVTierConnector", "KVTierSecondaryTier"]

_for_good = long_timeouts()
_for_good.__enter__()
