"""One engine process of the demo: SGLang on the CPU, with kvtier as storage of its HiCache.

    python engine_sglang.py JOB.json

Prints events as lines of JSON; the last one is the result. SGLang logs to standard error. SGLang
needs `tools/sglang_cpu` on `PYTHONPATH`, as in `make demo ENGINE=sglang`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")

from engine_transformers import say

SETTLE_SECONDS = 2.0


def main() -> None:
    """Runs the job."""
    job = json.loads(Path(sys.argv[1]).read_text())
    say("imports SGLang")
    import sglang

    say("starts SGLang")
    storage = {
        "backend_name": "kvtier",
        "module_path": "kvtier.client.engines.sglang",
        "class_name": "KVTierStorage",
        "interface_v1": 1,
        "endpoint": job["endpoint"],
    }
    engine = sglang.Engine(
        model_path=job["model"],
        device="cpu",
        attention_backend="torch_native",
        sampling_backend="pytorch",
        dtype="float32",
        skip_tokenizer_init=True,
        disable_cuda_graph=True,
        disable_overlap_schedule=True,
        disable_custom_all_reduce=True,
        max_total_tokens=8192,
        mem_fraction_static=0.3,
        page_size=job["block_tokens"],
        random_seed=0,
        log_level="warning",
        enable_hierarchical_cache=True,
        hicache_mem_layout="page_first_direct",
        hicache_io_backend="direct",
        hicache_write_policy="write_through",
        hicache_storage_prefetch_policy="wait_complete",
        hicache_storage_backend="dynamic",
        hicache_storage_backend_extra_config=json.dumps(storage),
    )
    say(f"runs a prompt of {len(job['prompt']):,} tokens")
    sampling = {"temperature": 0.0, "max_new_tokens": job["new_tokens"], "ignore_eos": True}
    start = time.perf_counter()
    answers = engine.generate(input_ids=job["prompt"], sampling_params=sampling, stream=True)
    answer = next(answers)
    first_token_seconds = time.perf_counter() - start
    for later in answers:
        answer = later
    say("waits until its blocks are stored")
    time.sleep(SETTLE_SECONDS)
    cached = answer["meta_info"]["cached_tokens"]
    say(
        "done",
        computed=len(job["prompt"]) - cached,
        loaded={"": cached} if cached else {},  # SGLang does not know the tier; the server does
        first_token_seconds=first_token_seconds,
        output=answer["output_ids"],
    )
    engine.shutdown()


if __name__ == "__main__":
    main()
