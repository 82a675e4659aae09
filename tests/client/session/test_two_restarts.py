"""Two restarts before the client notices: grants from before the first one stay invalid."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest
from harness.payloads import assert_serves, key_of, namespace_of, payload
from harness.polling import polls, wait_until
from harness.server_process import ServerProcess

from kvtier.client import Client
from kvtier.protos.v1 import session_pb2, session_pb2_grpc

PART_BYTES = 64 << 10
NAMESPACE = namespace_of(PART_BYTES)
NOISE = [key_of(number, salt="noise") for number in range(64)]

# Before the restarts it stores blocks, and starts a read and a write. After a line on stdin it ends
# both.
_CLIENT = """
import json, sys, time
sys.path.insert(0, sys.argv[1])
from harness.long_timeouts import long_timeouts
from harness.payloads import assert_serves, key_of, namespace_of, payload
from harness.polling import wait_until
from kvtier.client import Client, KVTierError
stored, written = ([key_of(number, salt=salt) for number in range(8)] for salt in ("stored", "written"))
said = {}

def tell(name, step, *arguments):
    try:
        step(*arguments)
        said[name] = "done"
    except KVTierError as error:
        said[name] = error.reason or type(error).__name__

with long_timeouts(), Client(sys.argv[2], namespace=namespace_of(64 << 10), transport=sys.argv[3]) as client:
    client.store(stored, [payload(key, 64 << 10) for key in stored])
    client.flush(stored)
    lease = client.lookup(stored)
    read, write = client.read(lease, range(8)), client.write(written)
    batch = write.__enter__()
    read.__enter__()
    said["epochs"] = [client.epoch]
    print("begun", flush=True)
    sys.stdin.readline()
    for view in batch.views():
        view[:] = b"\\xee" * len(view)
    tell("write", write.__exit__, None, None, None)
    tell("read", read.__exit__, None, None, None)
    wait_until(lambda: client.epoch not in (None, said["epochs"][0]))
    said["epochs"].append(client.epoch)
    tell("lease", client.read(lease, range(8)).__enter__)
    assert_serves(client, stored)
    said["written"] = client.lookup(written, prefix=False).prefix_hits
    print(json.dumps(said), flush=True)
    sys.stdin.readline()
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server that restarts quickly, with a heartbeat interval longer than both restarts."""
    folder = tmp_path_factory.mktemp("twice")
    with ServerProcess(folder, config="[sessions]\nheartbeat_interval = 5.0") as process:
        yield process.start()


@pytest.mark.parametrize("asleep", [True, False])
@pytest.mark.parametrize("transport", ["shm", "grpc"])
def test_old_grants_stay_invalid_after_two_restarts(server: ServerProcess, transport: str, *, asleep: bool) -> None:
    """A client that slept through both restarts, or not, uses no old lease, store or mapping."""
    command = [sys.executable, "-c", _CLIENT, str(Path(__file__).parents[2]), server.endpoint, transport]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout.readline() == "begun\n"
            if asleep:
                os.kill(child.pid, signal.SIGSTOP)
            epochs = [_restart(server) for _ in range(2)]
            os.kill(child.pid, signal.SIGCONT)
            child.stdin.write("\n")
            child.stdin.flush()
            said: dict[str, Any] = json.loads(child.stdout.readline())
            assert len({said["epochs"][0], *epochs}) == 3
            assert said["epochs"][1] == epochs[1]
            assert {said["write"], said["read"]} <= {"STALE_EPOCH", "SessionLost", "NotConnected"}
            assert (said["lease"], said["written"]) == ("LEASE_NOT_FOUND", 0)
            with Client(server.endpoint, namespace=NAMESPACE) as other:
                assert_serves(other, NOISE)  # nothing was written to the new server's slots
        finally:
            child.kill()
    status = server.wait_for(lambda status: not status.sessions)
    assert (status.leases, status.stores, status.quarantined_bytes) == (0, 0, 0)


def _restart(server: ServerProcess) -> int:
    """Kills and starts the server, and fills its slots with other blocks; returns the new epoch."""
    server.restart()
    with Client(server.endpoint, namespace=NAMESPACE) as other:
        other.store(NOISE, [payload(key, PART_BYTES) for key in NOISE])
        return server.status().epoch


class _Lives(session_pb2_grpc.SessionServiceServicer):
    """A server that restarts between the first `Capabilities` and `Open`."""

    def __init__(self) -> None:
        self.life = 1

    def Capabilities(self, request: Any, context: Any) -> session_pb2.CapabilitiesResponse:  # noqa: N802
        return session_pb2.CapabilitiesResponse(epoch=self.life, tiers=[f"tier of life {self.life}"])

    def Open(self, request: Any, context: Any) -> Iterator[session_pb2.OpenResponse]:  # noqa: N802
        self.life = 2
        answer = session_pb2.OpenResponse(session={"session_id": bytes(16), "epoch": 2})
        answer.heartbeat_interval.FromMilliseconds(100)
        for _ in polls(interval=0.1):
            if not context.is_active():
                return
            yield answer


class _Silent(session_pb2_grpc.SessionServiceServicer):
    """A server that sends one heartbeat per session and keeps the stream open."""

    def __init__(self) -> None:
        self.opened = 0

    def Capabilities(self, request: Any, context: Any) -> session_pb2.CapabilitiesResponse:  # noqa: N802
        return session_pb2.CapabilitiesResponse(epoch=1)

    def Open(self, request: Any, context: Any) -> Iterator[session_pb2.OpenResponse]:  # noqa: N802
        self.opened += 1
        answer = session_pb2.OpenResponse(session={"session_id": bytes(16), "epoch": 1})
        answer.heartbeat_interval.FromMilliseconds(100)
        yield answer
        wait_until(lambda: not context.is_active())


@contextlib.contextmanager
def _served(servicer: session_pb2_grpc.SessionServiceServicer, folder: Path) -> Iterator[str]:
    """Serves only sessions; yields the endpoint."""
    server = grpc.server(futures.ThreadPoolExecutor(4))
    session_pb2_grpc.add_SessionServiceServicer_to_server(servicer, server)
    endpoint = f"unix:{folder / 's'}"
    server.add_insecure_port(endpoint)
    server.start()
    yield endpoint
    server.stop(None).wait()


def test_a_restart_during_the_opening_of_a_session(tmp_path: Path) -> None:
    """The client asks for the capabilities again if the epoch has changed."""
    with _served(_Lives(), tmp_path) as endpoint, Client(endpoint, namespace=NAMESPACE) as client:
        client.wait_until_connected(60)
        session = client._transport.session
        assert (client.epoch, session.tiers) == (2, ("tier of life 2",))


def test_a_session_without_heartbeats_ends(tmp_path: Path) -> None:
    """If a connected server sends no heartbeats, it hangs, and the client opens a new session."""
    silent = _Silent()
    with _served(silent, tmp_path) as endpoint, Client(endpoint, namespace=NAMESPACE) as client:
        client.wait_until_connected(60)
        wait_until(lambda: silent.opened > 1)
