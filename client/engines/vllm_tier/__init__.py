"""kvtier as a secondary tier of vLLM's own tiering (OffloadingConnector, vLLM 0.32 and newer).

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "OffloadingConnector",
        "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 10737418240,
            "secondary_tiers": [{
                "type": "KVTierSecondaryTier", "module_path": "kvtier.client.engines.vllm_tier",
                "endpoint": "unix:/run/kvtier/kvtier.sock"}]}}'

vLLM keeps a primary tier of `cpu_bytes_to_use` bytes in the engine's host memory, also copies its
chunks to kvtier, and loads missing chunks from kvtier. `manager.ManagerConfig` has the other
settings of a tier's table.

The connector in `kvtier.client.engines.vllm` copies directly between engine and kvtier and needs no
primary tier. Engines with the connector and engines with this tier share no blocks, because the
layouts differ.

Limits:

- vLLM asks for a request's policy before the server has seen the request. The tier answers with the
  server's last policy for a request of that kind.
- With LoRA adapters or context parallelism the tier is disabled. vLLM does not tell a tier which
  requests have an adapter.
- Of `kv_transfer_params["kvtier"]`, `min_hit_tokens` has no effect. The other keys apply to kvtier
  only, not to vLLM's own tiers. vLLM counts stores that `skip_save` prevents as failed.
- Chunks that vLLM finds in its own tiers are not looked up here, so they are not marked as used.
- A reset of vLLM's caches keeps kvtier's blocks, as in every secondary tier (B3.19). An engine
  whose weights are updated in place would find KV of the old weights: start it from other files, or
  with another `tenant`.
"""

from .manager import KVTierSecondaryTier

__all__ = ["KVTierSecondaryTier"]
