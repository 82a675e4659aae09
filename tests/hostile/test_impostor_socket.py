"""Another user of the host waits at the socket of the server, before the server starts.

The impostor is a gRPC server of another user that records the tokens it receives, and the first
bytes of connections to the other sockets. No token may arrive, and each client reports why.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to start processes of two users")

TOKEN = "kvt_a_secret_token"  # noqa: S105 - of no server
IMPOSTOR = f"""
import socket, sys, threading
from concurrent.futures import ThreadPoolExecutor
import grpc

path = sys.argv[1]

def seen(what):
    if {TOKEN!r} in what:
        print("TOKEN", flush=True)
    print("contact", flush=True)

class Handler(grpc.GenericRpcHandler):
    def service(self, details):
        seen(str(details.invocation_metadata))
        return None

def record(listener):
    while True:
        connection, _ = listener.accept()
        connection.settimeout(5)
        try:
            seen(connection.recv(1 << 16).decode(errors="replace"))
        except OSError:
            pass

server = grpc.server(ThreadPoolExecutor(4), handlers=[Handler()])
server.add_insecure_port("unix:" + path)
server.start()
listener = socket.socket(socket.AF_UNIX)
listener.bind(path + ".shm")
listener.listen()
threading.Thread(target=record, args=(listener,), daemon=True).start()
print("ready", flush=True)
sys.stdin.read()
"""
CLIENTS = {
    "blocking": """
import sys, logging
logging.basicConfig(level=logging.WARNING)
from kvtier.client import Client, Group, KVTierError, Namespace
with Client(namespace=Namespace("m", "uint8", (Group(4096, 16),))) as client:
    try:
        client.wait_until_connected(2)
    except KVTierError as error:
        print(type(error).__name__, error)
""",
    "asyncio": """
import asyncio, logging
logging.basicConfig(level=logging.WARNING)
from kvtier.client import AsyncClient, Group, KVTierError, Namespace
async def main():
    async with AsyncClient(namespace=Namespace("m", "uint8", (Group(4096, 16),))) as client:
        try:
            await client.wait_until_connected(2)
        except KVTierError as error:
            print(type(error).__name__, error)
asyncio.run(main())
""",
    "conversations": """
from kvtier.client import ConversationClient, KVTierError
with ConversationClient() as client:
    try:
        print(client.list())
    except KVTierError as error:
        print(type(error).__name__, error)
""",
    "status": "from kvtier.server.cli import main; main(['status'])",
    "doctor": "from kvtier.server.cli import main; main(['doctor'])",
    "region": """
import sys
from kvtier.client.session.session import AttachError, Attachment
from kvtier.client.session.socket_calls import SocketTarget
from kvtier.protos.credentials import Credentials
from kvtier.protos.v1 import common_pb2
from kvtier.protos.wire.socket_frames import Purpose
path = sys.argv[1] + ".shm"  # as a server at a TCP address named it
target = SocketTarget(path, common_pb2.SessionRef(session_id=bytes(16), epoch=1), Credentials.from_environment())
for connect in (
    lambda: Attachment.connect(target, path),
    lambda: target.connect(Purpose.CALLS, 2),
    lambda: target.connect(Purpose.STREAMS, 2),
):
    try:
        connect()
    except (AttachError, OSError) as error:
        print(type(error).__name__, error)
""",
}


class Place(NamedTuple):
    """The default directory of a user, and the users of the case."""

    directory: Path
    victim: int
    impostor: int

    @property
    def path(self) -> str:
        return str(self.directory / "kvtier.sock")


def own(directory: Path, uid: int, mode: int) -> None:
    directory.mkdir()
    directory.chmod(mode)
    os.chown(directory, uid, uid)


def foreign(place: Place) -> None:
    own(place.directory, place.impostor, 0o755)


def writable(place: Place) -> None:
    own(place.directory, place.victim, 0o777)


def linked(place: Place) -> None:
    aside = place.directory.with_name(f"{place.directory.name}-aside")
    own(aside, place.impostor, 0o755)
    place.directory.symlink_to(aside)


@pytest.fixture
def place() -> Iterator[Place]:
    victim = 1_200_000_000 + os.getpid()
    made = Place(Path(f"/tmp/kvtier-{victim}"), victim, victim + 1)
    yield made
    for path in (made.directory, made.directory.with_name(f"{made.directory.name}-aside")):
        if path.is_symlink():
            path.unlink()
        shutil.rmtree(path, ignore_errors=True)


def environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("KVTIER_", "XDG_"))}
    return kept | {"HOME": "/nonexistent", "PYTHONDONTWRITEBYTECODE": "1", **more}


def start(script: str, uid: int, path: str, **more: str) -> subprocess.Popen[str]:
    """Runs a script as another user. Imports come first: that user may not read the packages."""
    prelude = (
        "import asyncio, os, sys, kvtier.client, kvtier.client.aio, kvtier.client.sync, kvtier.server.cli\n"
        "import grpc._channel, grpc._server, kvtier.server.commands.status, kvtier.server.commands.doctor\n"
        f"os.setgroups([]); os.setgid({uid}); os.setuid({uid}); os.umask(0)\n"
    )
    return subprocess.Popen(
        [sys.executable, "-c", prelude + script, path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd="/",
        env=environment(**more),
    )


def attack(place: Place, script: str, **more: str) -> tuple[list[str], str]:
    """Returns what the impostor has seen, and the output of a client of the victim."""
    impostor = start(IMPOSTOR, place.impostor, place.path)
    assert impostor.stdout is not None
    try:
        assert impostor.stdout.readline() == "ready\n"
        output, _ = start(script, place.victim, place.path, KVTIER_TOKEN=TOKEN, **more).communicate("", timeout=120)
    finally:
        seen, _ = impostor.communicate("")
    return seen.splitlines(), output


@pytest.mark.parametrize("arrange", [foreign, writable, linked])
@pytest.mark.parametrize("client", ["blocking", "status"])
def test_an_impostor_gets_no_token(place: Place, arrange: Callable[[Place], None], client: str) -> None:
    """The client says what is wrong with the directory, and does not call."""
    arrange(place)
    seen, output = attack(place, CLIENTS[client])
    assert seen == []
    assert "not connected to" in output
    assert "Traceback" not in output
    assert TOKEN not in output


@pytest.mark.parametrize("client", ["asyncio", "conversations", "doctor", "region"])
def test_no_client_trusts_an_impostor(place: Place, client: str) -> None:
    """Neither over gRPC nor over the sockets for calls, streams and the shared memory."""
    foreign(place)
    seen, output = attack(place, CLIENTS[client])
    assert "TOKEN" not in seen
    if client != "region":
        assert seen == []
    assert f"user {place.impostor}" in output
    assert "Traceback" not in output


def test_the_default_is_checked_if_it_is_named(place: Place) -> None:
    """To name the default directory does not mean that its owner is trusted."""
    foreign(place)
    seen, output = attack(place, CLIENTS["blocking"], KVTIER_ENDPOINT=f"unix:/tmp/../{place.path}")
    assert seen == []
    assert "not connected to" in output


def test_an_operator_may_choose_a_server_of_another_user(place: Place) -> None:
    """The recorder works: at a chosen path the client sends its token."""
    chosen = Place(Path(f"/tmp/kvtier-chosen-{os.getpid()}"), place.victim, place.impostor)
    try:
        foreign(chosen)
        seen, _ = attack(chosen, CLIENTS["blocking"], KVTIER_ENDPOINT=f"unix:{chosen.path}")
    finally:
        shutil.rmtree(chosen.directory)
    assert "TOKEN" in seen
