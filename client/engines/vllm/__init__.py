"""vLLM's connector to kvtier (vLLM 0.32 and newer).

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "KVTierConnector", "kv_role": "kv_both",
        "kv_connector_module_path": "kvtier.client.engines.vllm", "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"endpoint": "unix:/run/kvtier/kvtier.sock"}}'

Where things are: ``connector`` maps vLLM's hooks; ``scheduler`` decides (with ``lookup``, ``hits``, ``saves``); ``worker`` copies
(with ``layout``, ``copies``); ``groups`` and ``namespace`` say what an engine's blocks are; ``metadata`` travels between the two.
"""

from .connector import KVTierConnector

__all__ = ["KVTierConnector"]
