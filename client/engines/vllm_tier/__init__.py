"""kvtier as a secondary tier of vLLM's own tiering (OffloadingConnector, vLLM 0.32 and newer).

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "OffloadingConnector",
        "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 10737418240,
            "secondary_tiers": [{
                "type": "KVTierSecondaryTier", "module_path": "kvtier.client.engines.vllm_tier",
                "endpoint": "unix:/run/kvtier/kvtier.sock"}]}}'

vLLM keeps a primary tier of `cpu_bytes_to_use` bytes in the engine's host memory. vLLM copies the
chunks of the primary tier to kvtier, and loads missing chunks from kvtier. `ManagerConfig` in
`config` lists all settings of a tier's table. "(B3.19)" and similar cite docs/behaviour.md.

The connector in `kvtier.client.engines.vllm` copies directly between engine and kvtier and needs no
primary tier. Engines with that connector and engines with this tier share no blocks, because the
layouts differ.

Limits:

- vLLM asks for a request's offload policy before the tier has asked the server. The tier therefore
  answers with the server's policy for the last request with the same `kv_transfer_params`, and with
  `request_level` if there was none.
- With LoRA adapters or context parallelism the tier is disabled. vLLM does not tell a tier which
  requests have an adapter.
- In `kv_transfer_params["kvtier"]`, `min_hit_tokens` has no effect. The other settings apply to
  kvtier only, not to vLLM's own tiers. vLLM counts a store that `skip_save` prevents as failed.
- vLLM does not look up a chunk in kvtier if it finds the chunk in its own tiers. At the end of the
  request, the tier marks such a chunk as used, if the server's CPU tier has the chunk.
- A reset of vLLM's caches keeps the blocks in kvtier, as in every secondary tier (B3.19). If an
  engine's weights are updated in place, the engine would find KV of the old weights. Restart the
  engine from other files, or with another `weights_version`. The connector needs no restart.
"""

from .manager import KVTierSecondaryTier

__all__ = ["KVTierSecondaryTier"]
