"""kvtier as a secondary tier of vLLM's own tiering (vLLM 0.32 and newer), for users of its OffloadingConnector.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 10737418240,
            "secondary_tiers": [{"type": "KVTierSecondaryTier", "module_path": "kvtier.client.engines.vllm_tier",
                "endpoint": "unix:/run/kvtier/kvtier.sock"}]}}'

vLLM keeps a primary tier of ``cpu_bytes_to_use`` bytes in the engine's host memory, copies what is in it to kvtier as well, and
loads from kvtier what it lacks. The other settings of a tier's table are in ``config``.

Where things are: ``manager`` maps vLLM's hooks to ``lookups`` (what the store has) and ``transfers`` (jobs that copy);
``namespace`` says what is copied. What it shares with the connector is the connector's: ``kvtier.client.engines.vllm``, which
copies straight between the engine and kvtier and needs no primary tier. The two share no blocks: theirs are laid out differently.

Limits:

- vLLM wants a request's policy before the server can be asked: it is offloaded as the server wanted the last one of its kind.
- With LoRA adapters the tier is disabled: vLLM does not tell a tier which requests have one. So it is with context parallelism.
- Of ``kv_transfer_params["kvtier"]``, ``min_hit_tokens`` has no effect, and all of it is about kvtier only: vLLM's own tiers
  serve and keep what they have. vLLM counts what ``skip_save`` keeps from kvtier as stores that failed.
- Chunks that vLLM finds in its own tiers are not looked up here, and so not marked as used.
- A reset of vLLM's caches keeps what kvtier has, as it does with every secondary tier (B3.19). An engine whose weights are updated
  in place would find the old weights' KV: start it from other files, or with another ``tenant``.
"""

from .manager import KVTierSecondaryTier

__all__ = ["KVTierSecondaryTier"]
