"""vLLM's KV connector for kvtier (vLLM 0.32 and 0.33; a newer release starts with a warning).

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "KVTierConnector",
        "kv_role": "kv_both", "kv_connector_module_path": "kvtier.client.engines.vllm",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"endpoint": "unix:/run/kvtier/kvtier.sock"}}'

vLLM creates the class in `connector` and calls the methods in `hooks`. `scheduler/` translates
between vLLM's scheduler and the cores in `client/offload` and `client/handoff`. `worker/` copies
blocks. `config` contains an engine's settings, and `request_settings` contains a request's
settings. "(B3.19)" and similar cite docs/behaviour.md.

By default a block is stored as soon as it is full. With `lazy_offload` a block is stored when the
engine is about to evict the block. Lazy mode copies fewer blocks than the default mode. However,
other engines do not find a block before it is stored, and unstored blocks are lost if the engine
ends. For sliding windows and states, lazy mode stores only blocks for which vLLM itself keeps a
hash. A hit of a hybrid model can therefore end only at the end of an earlier prompt or answer.

Prefill and decode engines use the same connector. The `kv_transfer_params` of each request say
whether the engine pulls the request's blocks from another engine, and whether the server holds them
for another engine. See `docs/handoffs.md`.

Limits that come from vLLM's connector interface:

- `reset_prefix_cache(reset_connector=True)` does not say whether the weights have changed, and to
  which. The connector assumes a change, and uses another namespace from then on. Engines share no
  blocks after a reset. See `docs/engines.md`.
- `reset_prefix_cache(reset_running_requests=True)` raises in vLLM while saves are in flight,
  because saves hold references to blocks. Repeat the call after a few milliseconds: the saves end
  in idle steps.
- An engine in the caller's process (`VLLM_ENABLE_V1_MULTIPROCESSING=0`) takes no steps between
  calls. Saves that are in flight at the end of a call therefore end only during the next call.
  Until then a reset returns False and a sleep is refused. Call `llm_engine.step()` until the saves
  have ended.
- If the files of a LoRA adapter change, requests with this adapter are neither loaded nor saved.
  See `lora`.
"""

from .connector import KVTierConnector

__all__ = ["KVTierConnector"]
