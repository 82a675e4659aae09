"""Stream of events with a real server: failures of the program's own callbacks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from harness.payloads import key_of, namespace_of, payload
from harness.polling import wait_until
from harness.server_process import ServerProcess

from kvtier.client import Client
from kvtier.client.events import EventStream, HeldChange

PART = 64 << 10
NAMESPACE = namespace_of(PART)
KEYS = [key_of(number) for number in range(8)]


def test_the_stream_goes_on_after_callbacks_have_failed_several_times(tmp_path: Path) -> None:
    """B6.7 What the program knows at the end is right, also if the report of a failure fails."""
    known: set[bytes] = set()
    failures = 1

    def on_changes(changes: Sequence[HeldChange]) -> None:
        nonlocal failures
        if failures:
            failures -= 1
            raise ValueError("the callback has failed")
        for change in changes:
            if change.stored:
                known.update(change.keys)
            else:
                known.difference_update(change.keys)

    def on_error(text: str) -> None:
        raise ValueError(text)

    def store(keys: list[bytes]) -> None:
        client.store(keys, [payload(key, PART) for key in keys])

    with ServerProcess(tmp_path).start() as server, Client(server.endpoint, namespace=NAMESPACE) as client:
        client.wait_until_connected(60)
        stream = EventStream(client, on_changes, on_error, endpoint=server.endpoint)
        try:
            store(KEYS[:4])
            wait_until(lambda: known == set(KEYS[:4]))
            failures = 3  # of the next blocks, and of two reports of this failure
            store(KEYS[4:6])
            wait_until(lambda: not failures and known == set(KEYS[:6]))
            store(KEYS[6:])
            wait_until(lambda: known == set(KEYS))
        finally:
            stream.close()
