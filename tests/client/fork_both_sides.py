"""A process that forks while its client is in use.

Its arguments are endpoint, transport, number of forks, and a CA and a token if the server needs
them. Both sides of each fork use the client: the parent stores and loads, each child tries every
method. Prints a line of JSON.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from harness.payloads import filled, is_payload, key_of, namespace_of, payload

from kvtier.client import (
    AsyncClient,
    Client,
    ConversationClient,
    Credentials,
    ForkedClient,
    StoreStatus,
    Timeouts,
    Unavailable,
)

PART = 2048
"""Small, so that no block is evicted during the test."""
BATCH = 4
_CHILD_SECONDS = 60
_LOOP_FORKS = 4


def main(endpoint: str, transport: Any, forks: int, *access: str) -> None:
    credentials = Credentials(ca=access[0], token=access[1]) if access else Credentials()
    timeouts = Timeouts(connect=60.0, call=60.0, transfer=60.0)
    options: Any = {"namespace": namespace_of(PART), "credentials": credentials, "timeouts": timeouts}
    with (
        Client(endpoint, transport=transport, **options) as client,
        ConversationClient(endpoint, credentials=credentials, timeout=60.0) as agent,
    ):
        client.wait_until_connected(60)
        stop, failures = threading.Event(), list[str]()
        workers = [threading.Thread(target=_work, args=(client, name, stop, failures)) for name in ("a", "b")]
        for worker in workers:
            worker.start()
        codes = []
        for number in range(forks):
            _work_once(client, f"parent {number}", failures)
            if (pid := os.fork()) == 0:
                _child(client, agent, number)
            _work_once(client, f"parent beside child {number}", failures)
            codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        in_loop = asyncio.run(_fork_in_loop(endpoint, transport, options))
        stop.set()
        for worker in workers:
            worker.join()
        _work_once(client, "at the end", failures)
        print(json.dumps({"children": codes, "failures": failures, "in loop": in_loop}), flush=True)


async def _fork_in_loop(endpoint: str, transport: Any, options: Any) -> dict[str, list[Any]]:
    """Forks on the event loop of an `AsyncClient`; returns what children and parent have seen.

    A child may say nothing, because gRPC's own handlers can abort a process that is forked while
    another thread waits in `grpc.aio`.
    """
    keys, blocks = [key_of(number, salt="loop") for number in range(BATCH)], filled(BATCH, PART)
    seen: dict[str, list[Any]] = {"children": [], "hits": []}
    async with AsyncClient(endpoint, transport=transport, **options) as client:
        await client.store(keys, [payload(key, PART) for key in keys])
        for _ in range(_LOOP_FORKS):
            reader, writer = os.pipe()
            if (pid := os.fork()) == 0:
                signal.alarm(_CHILD_SECONDS)
                try:
                    await client.load(keys, blocks)
                except BaseException as error:  # noqa: BLE001 - reported to the parent
                    await client.close()
                    gc.collect()
                    os.write(writer, type(error).__name__.encode())
                os._exit(0)
            os.close(writer)
            with os.fdopen(reader) as file:
                seen["children"].append(file.read())
            os.waitpid(pid, 0)  # noqa: ASYNC222 - nothing else runs on this loop
            seen["hits"].append(await client.load(keys, blocks))
            if not all(is_payload(key, block) for key, block in zip(keys, blocks, strict=True)):
                seen["hits"].append("wrong bytes")
    return seen


def _work(client: Client, name: str, stop: threading.Event, failures: list[str]) -> None:
    number = 0
    while not stop.is_set():
        _work_once(client, f"{name} {number}", failures)
        number += 1


def _work_once(client: Client, salt: str, failures: list[str]) -> None:
    keys = [key_of(number, salt=f"{salt} {os.getpid()}") for number in range(BATCH)]
    # In about one of a thousand forks gRPC's own handlers end a call or connection of the parent;
    # in more of them on a busy machine. With TLS the error may name the broken record.
    try:
        statuses = client.store(keys, [payload(key, PART) for key in keys])
        found = filled(BATCH, PART)
        hits = client.load(keys, found)
    except Exception as error:  # noqa: BLE001 - each one is a failure of the test
        if not isinstance(error, Unavailable) and "TSI_DATA_CORRUPTED" not in str(error):
            failures.append(f"{salt}: {error!r}")
        client.wait_until_connected(60)
        return
    if set(statuses) != {StoreStatus.GRANTED} or hits != BATCH:
        failures.append(f"{salt}: {statuses} {hits}")
    if not all(is_payload(key, block) for key, block in zip(keys, found, strict=True)):
        failures.append(f"{salt}: wrong bytes")


def _child(client: Client, agent: ConversationClient, number: int) -> None:
    """Tries everything; ends with 0 if each method raised `ForkedClient`."""
    signal.alarm(_CHILD_SECONDS)
    keys, blocks = [key_of(1)], [np.zeros(PART, np.uint8)]
    calls: list[Callable[[], object]] = [
        lambda: client.lookup(keys),
        lambda: client.begin_request("r", keys),
        lambda: client.finish_request("r"),
        lambda: client.store(keys, blocks),
        lambda: client.load(keys, blocks),
        lambda: client.flush(keys),
        client.reset,
        client.wait_until_connected,
        agent.list,
    ]
    code = 0
    for position, call in enumerate(calls):
        try:
            call()
        except ForkedClient:
            continue
        except BaseException as error:  # noqa: BLE001 - reported by the exit code
            print(f"call {position} raised {error!r}", file=sys.stderr, flush=True)
        code = 10 + position
    if client.connected or client.epoch is not None:
        code = 2
    try:
        pickle.dumps(client)
    except TypeError as error:
        code = code if "in each process" in str(error) else 3
    client.close()
    agent.close()
    calls.clear()
    gc.collect()
    if number % 2:
        sys.exit(code)  # runs destructors and `atexit`, as a plain `os.fork` does
    os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), *sys.argv[4:])
