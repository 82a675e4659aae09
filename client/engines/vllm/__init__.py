"""vLLM's connector to kvtier (vLLM 0.32 and 0.33; a newer one is tried, with a warning).

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "KVTierConnector", "kv_role": "kv_both",
        "kv_connector_module_path": "kvtier.client.engines.vllm", "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"endpoint": "unix:/run/kvtier/kvtier.sock"}}'

Where things are: ``connector`` is what vLLM makes, ``scheduler_hooks`` and ``worker_hooks`` are what it calls there
(``containment``: none of it raises); ``scheduler`` translates for ``client/offload``, which decides (``requests`` is what it sees
of vLLM, ``remote`` how it reaches the server, with ``lookup``, ``calls`` and ``resets``); ``handoffs`` translates for
``client/handoff`` (with ``holds``, and ``peers``: the servers of other hosts); ``worker`` copies (with ``layout``,
``copies``, ``reports``, ``sleep``); ``groups`` and ``namespace`` say what an engine's blocks are; ``metadata`` travels between the
two. ``stats`` and ``metrics`` are what vLLM publishes of it, ``events`` what it tells of single blocks. ``compat`` and ``versions``
know which vLLM this is.

An engine's settings are in ``config``, a request's in ``settings``. By default a block is stored as soon as it is full; with
``lazy_offload`` when the engine is about to evict it: fewer copies, but what an engine still holds is lost with it, and no other
engine finds it; and of windows and states only those are stored that vLLM itself keeps a name for, so that hits of a hybrid model
end where earlier prompts and answers did.

Requests that engines hand to each other (prefill and decode) need no other connector and no role: ``kv_transfer_params`` says of
each request what is to become of it, ``bidirectional_kv_xfer`` whether decode engines hand on as well. See ``docs/handoffs.md``.

Limits, of which vLLM gives a connector no way around:

- ``reset_prefix_cache(reset_connector=True)`` drops what is looked up and empties the server's CPU tier, not the tiers below, which
  keep their data (B3.19). An engine whose weights are updated in place (RL) would find the old weights' KV there: restart it from
  other files, give it another ``tenant``, or use a server without tiers below. See ``docs/engines.md``.
- ``reset_prefix_cache(reset_running_requests=True)`` raises, in vLLM, while saves are in flight, for they hold references to their
  blocks, and no hook precedes it. Call it again when they have ended: idle steps do that, within milliseconds.
- An engine in the caller's process (``VLLM_ENABLE_V1_MULTIPROCESSING=0``) takes no steps between calls, so its last saves end with
  the next call, and until then a reset says False and a sleep is refused: call ``llm_engine.step()`` until they have ended.
- Requests with a LoRA adapter are computed as if nothing were cached, and not saved: an adapter's name does not tell its weights.
"""

from .connector import KVTierConnector

__all__ = ["KVTierConnector"]
