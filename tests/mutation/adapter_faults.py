"""Faults in the adapters of vLLM and SGLang that no test found before."""

from __future__ import annotations

from harness.planting import Fault

__all__ = ["ADAPTER_FAULTS"]

_VLLM = "client/engines/vllm/"
_NAMESPACE = _VLLM + "namespace.py"
_GROUPS = _VLLM + "groups.py"
_LORA = _VLLM + "lora.py"
_SCHEDULER = _VLLM + "scheduler/scheduler.py"
_TIER = "client/engines/vllm_tier/"
_SGLANG = "client/engines/sglang/"

ADAPTER_FAULTS = (
    Fault("engines of other weights share blocks", _NAMESPACE, "{WEIGHTS: weights, ", "{"),
    *(
        Fault(
            f"engines with {what} share blocks",
            _NAMESPACE,
            '            *("model_config.served_model_name",',
            f'            *("{setting}", "model_config.served_model_name",',
        )
        for what, setting in (
            ("other overrides", "model_config.hf_overrides"),
            ("another dtype of the cache", "cache_config.cache_dtype"),
            ("another attention back end", "attention_config.backend"),
        )
    ),
    Fault(
        "engines with other layers share blocks",
        _NAMESPACE,
        ', "layers": parts.digest}',
        "}",
    ),
    Fault(
        "a window has a token too many",
        _GROUPS,
        "int(spec.sliding_window) - 1 +",
        "int(spec.sliding_window) +",
    ),
    Fault("a window has a token too few", _GROUPS, "int(spec.sliding_window) - 1 +", "int(spec.sliding_window) - 2 +"),
    Fault("retained tokens are not loaded", _GROUPS, "- 1 + int(spec.extra_retained_tokens)", "- 1"),
    Fault(
        "EAGLE's last block is used", _GROUPS, "speculative is not None and speculative.use_eagle_block_drop()", "False"
    ),
    Fault(
        "states with draft tokens are stored",
        _GROUPS,
        "if speculative is not None and any(group.is_state for group in groups):",
        "if False:",
    ),
    Fault("a group mixes windows", _GROUPS, "    if len(kinds) != 1:\n", "    if False:\n"),
    Fault(
        "an unknown kind of attention counts as full attention",
        _GROUPS,
        "if type(spec) in (FullAttentionSpec, MLAAttentionSpec, MambaSpec):",
        "if isinstance(spec, (FullAttentionSpec, MLAAttentionSpec, MambaSpec)):",
    ),
    Fault(
        "heads that are no multiple of the parts are divided",
        _VLLM + "layout.py",
        "or blocks.shape[-3] % pieces:",
        "or False:",
    ),
    Fault(
        "an adapter whose files changed during its load is identified",
        _LORA,
        "= self._loading if unchanged else None",
        "= self._loading",
    ),
    Fault(
        "two names of an adapter share blocks", _LORA, "repr((name, path, fingerprint))", "repr((path, fingerprint))"
    ),
    Fault(
        "a consumer loads nothing",
        _VLLM + "connector.py",
        "may_load=transfer.is_kv_consumer,",
        "may_load=transfer.is_kv_producer,",
    ),
    Fault(
        "a hand-off is stored by producers only",
        _SCHEDULER,
        "may_save=(self._may_save or handed_on) and served",
        "may_save=self._may_save and served",
    ),
    Fault(
        "a load is lost if the saves of its step cannot be planned",
        _SCHEDULER,
        "        except Exception as error:  # noqa: BLE001 - as the comment says\n",
        "        except ZeroDivisionError as error:\n",
    ),
    Fault(
        "blocks are pulled during a reset",
        _SCHEDULER,
        "hit = 0 if self._resetting else self._handoffs.match",
        "hit = self._handoffs.match",
    ),
    Fault(
        "a worker does not try again to enter a namespace",
        _VLLM + "connector.py",
        "        self._worker.reconnect(digest)\n        self._digest = digest  # if",
        "        self._digest = digest\n        self._worker.reconnect(digest)  # if",
    ),
    Fault(
        "the scheduler has no block pool after the handshake",
        _VLLM + "connector.py",
        "        self._scheduler.bind_pool(self._block_pool)\n",
        "",
    ),
    Fault(
        "engines with another environment share blocks",
        _NAMESPACE,
        "[plain_settings(vllm_config, NEUTRAL), environment]",
        "[plain_settings(vllm_config, NEUTRAL)]",
    ),
    Fault(
        "layers of two allocations are one run",
        _VLLM + "layout.py",
        "layer.storage.data_ptr() == first.storage.data_ptr()\n            and (layer",
        "(layer",
    ),
    Fault(
        "holds are claimed in the namespace of old weights",
        _SCHEDULER,
        "            self._handoffs.use(link.peers)\n",
        "",
    ),
    Fault(
        "missed blocks above the limit are never stored",
        "client/offload/saves.py",
        "                progress.miss(group.index, position, now)\n            else:\n                end",
        "                pass\n            else:\n                end",
    ),
    Fault(
        "engines of SGLang with other weights share pages",
        _SGLANG + "namespace.py",
        "{WEIGHTS: weights, ",
        "{",
    ),
    Fault(
        "pages of another size are copied",
        _SGLANG + "layout.py",
        "if tuple(sizes) != self.pieces * pages:",
        "if False:",
    ),
    Fault(
        "a lookup by SGLang without hits keeps its lease",
        _SGLANG + "links.py",
        "            self._found.add(lease, hits)\n        else:\n            lease.release()\n",
        "            self._found.add(lease, hits)\n",
    ),
    Fault(
        "SGLang loads with a lease that may expire",
        _SGLANG + "found_pages.py",
        "if found.until <= now or found.lease",
        "if found.lease",
    ),
    Fault(
        "an engine waits for any save instead of preempting",
        "client/offload/saves.py",
        "any(self._pool.references(block_id) == 1 for block_id, _ in self._in_flight)",
        "bool(self._in_flight)",
    ),
    Fault(
        "keys of a lookup are counted from the first block",
        _VLLM + "scheduler/prefix_lookups.py",
        "[position - lookup.start // g.block_tokens]",
        "[position]",
    ),
    Fault(
        "a load from a slow peer delays all loads",
        _VLLM + "worker/worker.py",
        "        if endpoint == OWN:\n            return self._threads[0]",
        "        if True:\n            return self._threads[0]",
    ),
    Fault(
        "free blocks with a partial hash get a key",
        _VLLM + "scheduler/block_pool.py",
        "if tokens % group.block_tokens == 0 and tag is not None else None",
        "if tag is not None else None",
    ),
    Fault(
        "the tier stores what a request does not want",
        _TIER + "manager.py",
        "if request.registration.settings.skip_save and not load:",
        "if False:",
    ),
    Fault(
        "keys of a load are hits while it runs",
        _TIER + "manager.py",
        "                request.known[key] = None\n",
        "                pass\n",
    ),
    Fault(
        "the tier uses old hits",
        _TIER + "tier_lookups.py",
        "            if now < pin.until:\n",
        "            if True:\n",
    ),
    Fault(
        "a row behind the primary tier is copied",
        _TIER + "transfers.py",
        "if not 0 <= row < self.rows:",
        "if not 0 <= row <= self.rows:",
    ),
    Fault(
        "a prefill engine holds its running state",
        "client/handoff/holds.py",
        "if state_tokens is not None and not same_prompt:",
        "if state_tokens is not None:",
    ),
    Fault(
        "an argument that changes the model is neutral",
        _SGLANG + "namespace.py",
        '"metrics, logs and traces": (',
        '"metrics, logs and traces": ("json_model_override_args", ',
    ),
    Fault(
        "only the first pool has a format",
        _SGLANG + "namespace.py",
        "[pool.describe() for pool in members]",
        "[pool.describe() for pool in members[:1]]",
    ),
    Fault(
        "a transfer without time has no bandwidth",
        _SGLANG + "stats.py",
        "max(seconds, 1e-9)",
        "min(seconds, 1e-9)",
    ),
    Fault(
        "a grant is withdrawn by the wrong name",
        _SGLANG + "deadlines.py",
        "self._transport.withdraw(session, grant_id)",
        "self._transport.withdraw(grant_id, session)",
    ),
    Fault(
        "a pool without a prefix has a page",
        _SGLANG + "storage.py",
        "if window.restores(length)), 0)",
        "if window.restores(length)), 1)",
    ),
    Fault(
        "a hit without the last block is never whole",
        _VLLM + "scheduler/prefix_lookups.py",
        "self._geometry.step_tokens if self._geometry.drop_last_block else 0",
        "0",
    ),
    Fault(
        "an empty hold counts as granted",
        _VLLM + "scheduler/hold_calls.py",
        '"granted" if lease.id else "empty"',
        '"granted"',
    ),
    Fault(
        "a claim that was dropped is made",
        _VLLM + "scheduler/hold_calls.py",
        "if number in self._open_claims and",
        "if",
    ),
    Fault(
        "a claim waits for a negative time",
        _VLLM + "scheduler/hold_calls.py",
        "max(0.0, deadline - time.monotonic())",
        "deadline - time.monotonic()",
    ),
    Fault(
        "a closed client opens the circuit of the new one",
        _VLLM + "scheduler/hold_calls.py",
        "if peers is self._peers:",
        "if True:",
    ),
    Fault(
        "the scheduler knows the layers of one group",
        _GROUPS,
        "pipeline_parallel_size == 1 and all(",
        "pipeline_parallel_size == 1 and any(",
    ),
    Fault(
        "a stage without layers has no kind",
        _GROUPS,
        "specs or [group.kv_cache_spec]",
        "specs",
    ),
    Fault(
        "slots of another group are filled",
        _VLLM + "worker/worker.py",
        "batch.memory, [offsets[row] for row in rows], after",
        "batch.memory, offsets[: len(rows)], after",
    ),
    Fault(
        "half of the greatest threshold is the limit",
        _VLLM + "config.py",
        "_MAX_TOKENS = 1 << 31",
        "_MAX_TOKENS = 1 << 30",
    ),
    Fault(
        "threads begin without their first call",
        _VLLM + "background.py",
        "if self._on_start is not None:",
        "if False:",
    ),
    Fault(
        "a pull waits although a block cannot come",
        "client/handoff/claims.py",
        "return all(position in usable",
        "return any(position in usable",
    ),
    Fault(
        "an engine awaits a peer only if all requests do",
        "client/handoff/core.py",
        "        return any(\n            state.params.pulls_early",
        "        return all(\n            state.params.pulls_early",
    ),
    Fault(
        "the smallest state limits what is held",
        "client/handoff/core.py",
        "self._state_tokens = max(",
        "self._state_tokens = min(",
    ),
    Fault(
        "a block without key is published",
        "client/handoff/holds.py",
        "            if key is None:\n                return None\n            held.keys",
        "            if False:\n                return None\n            held.keys",
    ),
    Fault(
        "a change of settings with one of weights is not measured",
        "client/engines/transformers/model_state.py",
        "self.structure += not all(isinstance(",
        "self.structure += not any(isinstance(",
    ),
    Fault(
        "blocks with extra have no regime",
        "client/engines/transformers/cache.py",
        "extra=self._extra + regimes.tag(regime))",
        "extra=self._extra or regimes.tag(regime))",
    ),
    Fault(
        "exclude_remote alone has no effect",
        _VLLM + "request_settings.py",
        "if not (self.exclude or self.exclude_media or self.exclude_remote):",
        "if not (self.exclude or self.exclude_media):",
    ),
)
