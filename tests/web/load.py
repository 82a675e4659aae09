"""Load: conversations with several turns, and a handed-over request, larger than the CPU tier."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator

from harness.payloads import key_of, namespace_of, payload
from harness.traffic import wait_connected

from kvtier.client import Client, KVTierError

__all__ = ["PART", "run_engines"]

PART = 32 << 10
_CONVERSATIONS = 60
_TURN = 8
_LONGEST = 64


def _work(client: Client, seed: int, stop: threading.Event) -> None:
    rng = random.Random(seed)
    lengths = [_TURN] * _CONVERSATIONS
    content = payload(key_of(0), PART)
    for number in range(1 << 30):
        if stop.is_set():
            return
        chosen = min(int(rng.expovariate(4 / _CONVERSATIONS)), _CONVERSATIONS - 1)
        keys = [key_of(block, salt=f"{seed}:{chosen}") for block in range(lengths[chosen])]
        with contextlib.suppress(KVTierError):  # the server may be restarting
            with client.lookup(keys, request_id=f"r{number}") as lease:
                hits = lease.prefix_hits
            client.store(keys[hits:], [content] * (len(keys) - hits), request_id=f"r{number}")
            if number % 20 == 0:
                client.publish(f"r{number}", keys, range(len(keys)), num_tokens=16 * len(keys), hold_for=5)
            client.finish_request(f"r{number}")
        lengths[chosen] = lengths[chosen] + _TURN if lengths[chosen] < _LONGEST else _TURN
        stop.wait(0.004)


@contextlib.contextmanager
def run_engines(endpoint: str, engines: int = 2) -> Iterator[threading.Event]:
    """Runs engines until the end or until the event is set; then they stay connected and idle."""
    stop = threading.Event()
    with contextlib.ExitStack() as opened:
        opened.callback(stop.set)
        for number in range(engines):
            namespace = namespace_of(PART, model="Qwen/Qwen3-8B")
            name = f"vllm-{number}"
            client = opened.enter_context(
                Client(endpoint, namespace=namespace, name=f"worker {number}", engine_id=name, rank=0)
            )
            wait_connected(client)
            thread = threading.Thread(target=_work, args=(client, number, stop), daemon=True)
            thread.start()
            opened.callback(thread.join, 30)
            opened.callback(stop.set)
        yield stop
