"""Default timeouts of the client. Other tests use longer ones (`harness.long_timeouts`)."""

from __future__ import annotations

import dataclasses
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from harness.long_timeouts import DEFAULTS
from harness.payloads import namespace_of
from harness.polling import wait_until
from harness.server_process import ServerProcess

from kvtier.client import Client, Timeouts
from kvtier.client.session import session, socket_calls
from kvtier.client.transport import socket_connector, socket_streams

NAMESPACE = namespace_of(4096)

# Prints the time of two lookups and of a close without an answer.
_CLIENT = """
import sys, time
sys.path.insert(0, sys.argv[1])
from harness.payloads import key_of, namespace_of
from kvtier.client import Client, Unavailable
client = Client(sys.argv[2], namespace=namespace_of(4096))
for _ in range(2):
    began = time.monotonic()
    try:
        client.lookup([key_of(1)])
    except Unavailable:
        print(time.monotonic() - began)
began = time.monotonic()
client.close()
print(time.monotonic() - began)
"""


def test_defaults() -> None:
    """Calls without a copy wait at most two seconds."""
    assert {field.name: field.default for field in dataclasses.fields(Timeouts)} == {
        "connect": 2.0,
        "call": 2.0,
        "transfer": 60.0,
        "device": 5.0,
    }
    assert {
        (socket_connector, "_LOCATE_SECONDS"): 5.0,
        (session, "_ATTACH_SECONDS"): 2.0,
        (socket_calls, "_CONNECT_SECONDS"): 2.0,
        (socket_streams, "_CONNECT_SECONDS"): 5.0,
        (socket_streams, "_STALL_SECONDS"): 5.0,
    } == DEFAULTS


def test_a_server_that_never_answers(tmp_path: Path) -> None:
    """Calls and close end by the client's timeouts, not by those of gRPC."""
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / "s"))
        silent.listen()
        tests = str(Path(__file__).parent.parent)
        command = [sys.executable, "-c", _CLIENT, tests, f"unix:{tmp_path / 's'}"]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=200)
    took = [float(line) for line in done.stdout.splitlines()]
    assert len(took) == 3
    assert max(took) < 25


def test_a_client_is_closed_while_it_connects(tmp_path: Path) -> None:
    """Close does not wait for the answer."""
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / "s"))
        silent.listen()
        client = Client(f"unix:{tmp_path / 's'}", namespace=NAMESPACE, timeouts=Timeouts(connect=600, call=600))
        with silent.accept()[0]:
            began = time.monotonic()
            client.close()
            assert time.monotonic() - began < 60


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shm", "grpc"])
def test_silence_is_noticed(tmp_path: Path, transport: str) -> None:
    """An idle client notices a hanging server by its missing heartbeats."""
    config = "[sessions]\nheartbeat_interval = 1.0"
    with (
        ServerProcess(tmp_path, config=config).start() as server,
        Client(server.endpoint, namespace=NAMESPACE, transport=transport) as client,  # type: ignore[arg-type]
    ):
        client.wait_until_connected()
        server.suspend()
        wait_until(lambda: not client.connected, 30)
        server.resume()
        client.wait_until_connected()
