"""vLLM's KV connector for kvtier (vLLM 0.32 and 0.33; a newer release starts with a warning).

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "KVTierConnector",
        "kv_role": "kv_both", "kv_connector_module_path": "kvtier.client.engines.vllm",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"endpoint": "unix:/run/kvtier/kvtier.sock"}}'

`connector` is the class that vLLM creates, `hooks` what vLLM calls on it. `scheduler/` translates
between vLLM's scheduler and the cores in `client/offload` and `client/handoff`; `worker/` copies
blocks. `config` has an engine's settings, `request_settings` those of a request.

A block is stored as soon as it is full. With `lazy_offload` it is stored when the engine is about
to evict it: fewer copies, but blocks that the engine still holds are lost with it, and no other
engine finds them. Of sliding windows and states, lazy mode stores only the blocks that vLLM itself
keeps a hash for, so hits of a hybrid model end where earlier prompts and answers ended.

Prefill/decode disaggregation needs no other connector and no role: `kv_transfer_params` of a
request say what happens to its blocks, and `bidirectional_kv_xfer` makes decode engines publish as
well. See `docs/handoffs.md`.

Limits that come from vLLM's connector interface:

- `reset_prefix_cache(reset_connector=True)` drops lookups and empties the server's CPU tier. The
  tiers below keep their data (B3.19). An engine whose weights are updated in place (RL) would find
  KV of the old weights there: restart it from other files, change its `tenant`, or use a server
  without lower tiers. See `docs/engines.md`.
- `reset_prefix_cache(reset_running_requests=True)` raises in vLLM while saves are in flight,
  because they hold references to blocks and no hook precedes the call. Call it again: idle steps
  end the saves within milliseconds.
- An engine in the caller's process (`VLLM_ENABLE_V1_MULTIPROCESSING=0`) takes no steps between
  calls, so its last saves end with the next call. Until then a reset returns False and a sleep is
  refused. Call `llm_engine.step()` until they have ended.
- Requests with a LoRA adapter are neither loaded nor saved: an adapter's name does not identify its
  weights.
"""

from .connector import KVTierConnector

__all__ = ["KVTierConnector"]
