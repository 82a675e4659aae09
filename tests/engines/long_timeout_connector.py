"""Connector with long timeouts (`engine_timeouts`): a `module_path` for vLLM's settings.

Every process of an engine imports it, however it was started. It is for engines only: there is no
way back.
"""

from __future__ import annotations

from engine_timeouts import prepare_engine

from kvtier.client.engines.vllm import KVTierConnector

__all__ = ["KVTierConnector"]

prepare_engine()
