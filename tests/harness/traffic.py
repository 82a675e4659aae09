"""What an engine does with a server, in a few lines."""

from __future__ import annotations

import time

from harness.payloads import assert_serves, key_of, namespace_of, payload

from kvtier.client import Client, DurableStatus

__all__ = ["PART", "assert_stored", "store", "wait_connected"]

PART = 64 << 10
"""Size of a block, in bytes."""


def wait_connected(client: Client, seconds: float = 60.0) -> None:
    """Waits for a session, over attempts that fail: the server may be starting, and the machine busy."""
    deadline = time.monotonic() + seconds
    while not client.connected:
        assert time.monotonic() < deadline, "the client does not find the server"
        time.sleep(0.01)


def store(endpoint: str, count: int = 8, *, flush: bool = True) -> list[bytes]:
    """Stores blocks as an engine would; returns their keys."""
    keys = [key_of(number) for number in range(count)]
    with Client(endpoint, namespace=namespace_of(PART)) as client:
        wait_connected(client)
        client.store(keys, [payload(key, PART) for key in keys])
        if flush:
            statuses = client.flush(keys, wait=30)
            assert set(statuses) == {DurableStatus.DURABLE}
    return keys


def assert_stored(endpoint: str, keys: list[bytes]) -> None:
    """Fails unless all these blocks read back bit-identical."""
    with Client(endpoint, namespace=namespace_of(PART)) as client:
        wait_connected(client)
        assert_serves(client, keys)
