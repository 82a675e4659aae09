"""Stores and loads of an engine, in one call each."""

from __future__ import annotations

from harness.payloads import assert_serves, key_of, namespace_of, payload
from harness.polling import wait_until

from kvtier.client import Client, DurableStatus

__all__ = ["PART", "assert_stored", "store", "wait_connected"]

PART = 64 << 10
"""Bytes of a block."""


def wait_connected(client: Client, seconds: float = 60.0) -> None:
    """Waits for a session and retries: the server may be starting, and the machine busy."""
    wait_until(lambda: client.connected, seconds, otherwise="the client does not find the server")


def store(endpoint: str, count: int = 8, *, flush: bool = True) -> list[bytes]:
    keys = [key_of(number) for number in range(count)]
    with Client(endpoint, namespace=namespace_of(PART)) as client:
        wait_connected(client)
        client.store(keys, [payload(key, PART) for key in keys])
        if flush:
            statuses = client.flush(keys, wait=30)
            assert set(statuses) == {DurableStatus.DURABLE}
    return keys


def assert_stored(endpoint: str, keys: list[bytes]) -> None:
    """Checks that all these blocks read back bit by bit."""
    with Client(endpoint, namespace=namespace_of(PART)) as client:
        wait_connected(client)
        assert_serves(client, keys)
