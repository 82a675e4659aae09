"""Connector with long timeouts (`engine_timeouts`): a `module_path` for vLLM's settings.

Every process of an engine imports it, however it was started. It is for engines only: there is no
way back. Its engines start only when they know their namespace, because tests count the hits of the
first requests.
"""

from __future__ import annotations

from typing import Any

from engine_timeouts import LONG_TIMEOUT_SECONDS, prepare_engine
from harness.polling import wait_until

from kvtier.client.engines.vllm import KVTierConnector as Connector

__all__ = ["KVTierConnector"]

prepare_engine()


class KVTierConnector(Connector):
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._await_namespace()

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Any) -> None:
        super().set_xfer_handshake_metadata_pp_aware(metadata)
        self._await_namespace()

    def _await_namespace(self) -> None:
        if self._scheduler is not None:
            resets = self._scheduler._server.resets
            wait_until(lambda: resets._done == resets._started, LONG_TIMEOUT_SECONDS)
