"""The connector, and the tier, of an engine that is patient (see `patience`): a `module_path` for vLLM's settings.

Every process of an engine imports it, however it was started. It is for engines only: there is no way back.
"""

from __future__ import annotations

from patience import patience

from kvtier.client.engines.vllm import KVTierConnector
from kvtier.client.engines.vllm_tier import KVTierSecondaryTier

__all__ = ["KVTierConnector", "KVTierSecondaryTier"]

_for_good = patience()
_for_good.__enter__()
