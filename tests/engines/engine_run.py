"""Runs a vLLM engine through a list of steps: JSON job in, JSON results out.

Hit counts come from vLLM's own counters, not from the connector.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from harness.polling import wait_until

RESET_SECONDS = 240.0
STEP_SECONDS = 300.0


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    for module in job.get("prepare", ()):
        importlib.import_module(module).prepare_engine()
    from vllm import LLM

    llm = LLM(
        enforce_eager=True,
        enable_prefix_caching=True,
        disable_log_stats=False,
        skip_tokenizer_init=True,
        seed=0,
        **{"max_model_len": 4096, "dtype": "float32", **job["llm"]},
    )
    events = _subscribe(job["llm"].get("kv_events_config"))
    results: list[dict[str, Any]] = []
    seen: list[list[Any]] = []
    for step in job["steps"]:
        results.append(_step(llm, _continued(dict(step), results)))
        seen += _take_events(events)
        if results[-1].get("name"):
            results[-1]["events"], seen = seen, []
    _reset(llm, {})  # pending saves would end with the engine
    Path(sys.argv[2]).write_text(json.dumps(results))


def _continued(step: dict[str, Any], results: list[dict[str, Any]]) -> dict[str, Any]:
    """Prompts may begin with an earlier step's prompt and answer, and pull its held blocks."""
    named = {result["name"]: result for result in results if result.get("name")}
    earlier, holder = (named.get(step.pop(word, None)) for word in ("continues", "takes_over"))
    if earlier is not None:
        turns = zip(earlier["prompts"], earlier["rows"], step["prompts"], strict=True)
        step["prompts"] = [asked + row["tokens"] + prompt for asked, row, prompt in turns]
    if holder is not None:
        step["transfers"] = [row["transfer"] for row in holder["rows"]]
    return step


def _step(llm: Any, step: dict[str, Any]) -> dict[str, Any]:
    match step.pop("op"):
        case "generate":
            return _generate(llm, **step)
        case "reset":
            return _reset(llm, step)
        case "weights":
            return _update_weights(llm, **step)
        case "lookup":
            return _await_lookup(llm)
        case "shell":
            done = subprocess.run(step["command"], capture_output=True, text=True, check=True, timeout=STEP_SECONDS)
            return {"name": step.get("name"), "stdout": done.stdout}
        case unknown:
            raise ValueError(unknown)


def _reset(llm: Any, how: dict[str, Any]) -> dict[str, Any]:
    """Empties the engine's prefix cache, which it refuses while blocks are being saved."""
    wait_until(
        lambda: llm.reset_prefix_cache(**how), RESET_SECONDS, otherwise="the engine keeps its blocks", interval=0.05
    )
    return {}


def _update_weights(llm: Any, path: str, version: str | None = None) -> dict[str, Any]:
    """Changes the engine's weights in place, as a trainer does, and resets all caches."""
    llm.collective_rpc("reload_weights", kwargs={"weights_path": path})
    if version is not None:
        llm.update_weight_version(version)
    return _reset(llm, {"reset_connector": True})


def _await_lookup(llm: Any) -> dict[str, Any]:
    """Asks prompts of their own until the server answers a lookup."""
    deadline, number = time.monotonic() + RESET_SECONDS, 0

    def misses() -> float:
        return _counters(llm).get("vllm:kvtier_lookups:miss", 0)

    before = misses()
    while misses() == before:
        assert time.monotonic() < deadline, "the server answers no lookup"
        number += 1
        _generate(llm, [[5] * 64], max_tokens=1, salt=f"lookup {time.time()} {number}")
    return {}


def _generate(
    llm: Any,
    prompts: list[list[int]],
    name: str = "",
    max_tokens: int = 8,
    salt: str | None = None,
    settings: dict[str, Any] | None = None,
    transfers: list[dict[str, Any]] | None = None,
    adapter: dict[str, Any] | None = None,
    *,
    at_once: bool = False,
    meanwhile: list[str] | None = None,
) -> dict[str, Any]:
    """Generates from prompts. `meanwhile`: a command that runs at the same time."""
    from vllm import SamplingParams

    given = {"kvtier": settings} if settings else {}
    samplings = [
        SamplingParams(
            max_tokens=max_tokens,
            temperature=0.0,
            logprobs=3,
            detokenize=False,
            ignore_eos=True,
            extra_args={"kv_transfer_params": params} if params else None,
        )
        for params in [given | transfer for transfer in transfers or [{}] * len(prompts)]
    ]
    inputs: list[dict[str, Any]] = [
        {"prompt_token_ids": tokens, **({"cache_salt": salt} if salt else {})} for tokens in prompts
    ]
    before = _counters(llm)
    command = subprocess.Popen(meanwhile) if meanwhile else None
    start = time.perf_counter()
    asked = list(zip(inputs, samplings, strict=True))
    batches = [asked] if at_once else [[one] for one in asked]
    options = {"use_tqdm": False, "lora_request": _adapter(adapter) if adapter else None}
    outputs = [out for batch in batches for out in llm.generate(*map(list, zip(*batch, strict=True)), **options)]
    seconds = time.perf_counter() - start
    status = command.poll() if command else None  # None: the command has outlived the requests
    if command:
        command.wait(STEP_SECONDS)
    time.sleep(0.3)  # most saves end in these idle steps; a reset waits for the rest
    after = _counters(llm)
    return {
        "name": name,
        "prompts": prompts,
        "seconds": seconds,
        "meanwhile": status,
        "external_hits": after.get("vllm:external_prefix_cache_hits", 0)
        - before.get("vllm:external_prefix_cache_hits", 0),
        "preemptions": after.get("vllm:num_preemptions", 0) - before.get("vllm:num_preemptions", 0),
        "kvtier": {name: value for name, value in after.items() if name.startswith("vllm:kvtier_")},
        "rows": [{**describe(output), "transfer": output.kv_transfer_params} for output in outputs],
    }


def _adapter(fields: dict[str, Any]) -> Any:
    from vllm.lora.request import LoRARequest

    return LoRARequest(**fields)


def describe(output: Any) -> dict[str, Any]:
    completion = output.outputs[0]
    return {
        "tokens": list(completion.token_ids),
        "logprobs": [{str(token): p.logprob for token, p in step.items()} for step in completion.logprobs],
        "finish_reason": completion.finish_reason,
    }


def _counters(llm: Any) -> dict[str, float]:
    """All counters, with outcomes as NAME:OUTCOME, and the number of observations per histogram."""
    from vllm.v1.metrics.reader import Counter, Histogram

    found: dict[str, float] = {}
    for metric in llm.get_metrics():
        if isinstance(metric, Counter):
            outcome = metric.labels.get("outcome")
            found[f"{metric.name}:{outcome}" if outcome else metric.name] = metric.value
        elif isinstance(metric, Histogram):
            found[metric.name] = metric.count
    return found


def _subscribe(config: dict[str, Any] | None) -> Any:
    if config is None:
        return None
    import zmq

    socket = zmq.Context.instance().socket(zmq.SUB)
    socket.setsockopt(zmq.SUBSCRIBE, b"")
    with socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED) as greeted:
        socket.connect(config["endpoint"])
        assert greeted.poll(1000 * STEP_SECONDS), "the engine publishes nothing"
        socket.disable_monitor()
    return socket


def _take_events(socket: Any) -> list[list[Any]]:
    """Returns the engine's events so far: kind, medium and block hashes."""
    from msgspec.msgpack import Decoder
    from vllm.distributed.kv_events import KVEventBatch

    decoder, events = Decoder(type=KVEventBatch), []
    while socket is not None and socket.poll(200):
        for event in decoder.decode(socket.recv_multipart()[-1]).events:
            hashes = [str(block_hash) for block_hash in getattr(event, "block_hashes", ())]
            events.append([type(event).__name__, getattr(event, "medium", None), hashes])
    return events


if __name__ == "__main__":
    main()
