"""One engine process of the demo: vLLM on the CPU, with kvtier's connector.

    python engine_vllm.py JOB.json

Prints events as lines of JSON; the last one is the result. vLLM logs to standard error.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "auto")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

from engine_transformers import say

SETTLE_SECONDS = 2.0


def main() -> None:
    """Runs the job."""
    job = json.loads(Path(sys.argv[1]).read_text())
    say("imports vLLM")
    from vllm import LLM, SamplingParams

    say("starts vLLM")
    engine = LLM(
        model=job["model"],
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=8192,
        block_size=job["block_tokens"],
        enable_prefix_caching=True,
        disable_log_stats=False,
        seed=0,
        kv_transfer_config={
            "kv_connector": "KVTierConnector",
            "kv_connector_module_path": "kvtier.client.engines.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"endpoint": job["endpoint"]},
        },
    )
    say(f"runs a prompt of {len(job['prompt']):,} tokens")
    sampling = SamplingParams(temperature=0.0, max_tokens=job["new_tokens"], ignore_eos=True, detokenize=False)
    request = engine.generate([{"prompt_token_ids": job["prompt"]}], sampling, use_tqdm=False)[0]
    say("waits until its blocks are stored")
    time.sleep(SETTLE_SECONDS)
    cached = request.num_cached_tokens or 0
    say(
        "done",
        computed=len(job["prompt"]) - cached,
        loaded={"": cached} if cached else {},  # vLLM does not know the tier; the server does
        first_token_seconds=request.metrics.first_token_latency,
        output=list(request.outputs[0].token_ids),
    )


if __name__ == "__main__":
    main()
