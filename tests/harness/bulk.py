"""The bulk process of a real server, and raw streams to it."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from kvtier.client import Client, Credentials, StoreStatus
from kvtier.client.namespace import Namespace
from kvtier.client.part_streams import PartSender
from kvtier.client.transport.grpc_methods import LOCATE, path_of, serialize
from kvtier.protos.v1 import cache_pb2, common_pb2, transfer_pb2
from kvtier.protos.wire.packed_keys import pack_keys
from kvtier.protos.wire.socket_frames import (
    CALLS_PROTOCOL,
    PULL,
    PUSH,
    STREAMS_PROTOCOL,
    Purpose,
    pack_call,
    pack_data_head,
    pack_end,
)

from .auth_site import Site, make_site
from .payloads import key_of, payload
from .polling import wait_until
from .raw import RawSession, RawSocket, hello_of
from .server_process import MIB, ServerProcess, bulk_pid
from .signals import stop

__all__ = [
    "ROUTES",
    "Route",
    "bulk_pid",
    "data_frame",
    "fresh",
    "kill_bulk",
    "locate",
    "prepare",
    "pull_call",
    "push_call",
    "serving",
    "store_all",
    "tls_route",
    "wait_for_bulk",
    "wait_until_received",
]

ROUTES = ("unix", "tcp", "tls")


def wait_for_bulk(client: Any, seconds: float = 60.0) -> None:
    """Waits until a client's streams use the bulk process."""
    route = client._transport._sockets

    def found() -> bool:
        with contextlib.suppress(AttributeError):
            session = client._transport.session
            if session is not None:
                route.search(session)
        return bool(route.found)

    wait_until(found, seconds)


def kill_bulk(server: ServerProcess, number: int = signal.SIGKILL) -> int:
    """Sends a signal to the bulk process; returns its pid."""
    pid = bulk_pid(server.pid)
    assert pid is not None
    if number == signal.SIGSTOP:
        stop(pid)
    else:
        os.kill(pid, number)
    return pid


def fresh(salt: str, count: int = 24) -> list[bytes]:
    """Returns keys that no other test uses."""
    return [key_of(number, salt=salt) for number in range(count)]


def store_all(client: Client, keys: list[bytes]) -> None:
    """Stores blocks of 1 MiB with payloads that depend on the key."""
    assert set(client.store(keys, [payload(key, MIB) for key in keys])) == {StoreStatus.GRANTED}


def locate(session: RawSession, store_id: int = 0) -> transfer_pb2.LocateResponse:
    call = session.channel.unary_unary(path_of(LOCATE), serialize, transfer_pb2.LocateResponse.FromString)
    answer: transfer_pb2.LocateResponse = call(
        transfer_pb2.LocateRequest(session=session.ref, store_id=store_id), timeout=60
    )
    return answer


def wait_until_received(client: Client, source: PartSender, nbytes: int) -> None:
    """Waits until the server has received this many bytes of a client's store."""
    channel = client._transport._channel  # type: ignore[attr-defined]
    call = channel.unary_unary(path_of(LOCATE), serialize, transfer_pb2.LocateResponse.FromString)
    request = transfer_pb2.LocateRequest(session=source._ref, store_id=source._store_id)
    wait_until(lambda: call(request, timeout=60).received_bytes >= nbytes)


@dataclass(frozen=True)
class Route:
    """A running server, and one of the ways to its sockets."""

    name: str
    server: ServerProcess
    endpoint: str
    credentials: Credentials

    def session(self, namespace: Namespace, engine_id: str) -> RawSession:
        return RawSession(self.endpoint, namespace, engine_id=engine_id, credentials=self.credentials)

    def client(self, namespace: Namespace, **more: Any) -> Client:
        return Client(self.endpoint, namespace=namespace, transport="tcp", credentials=self.credentials, **more)

    def address(self, session: RawSession) -> str | tuple[str, int]:
        """The socket for calls and streams, once the bulk process serves."""
        answer: Any = wait_until(lambda: (found := locate(session)).unix_suffix and found)
        return ("127.0.0.1", answer.socket_port) if self.name != "unix" else f"{self.server.path}{answer.unix_suffix}"

    def dial(self, session: RawSession, purpose: Purpose, ref: common_pb2.SessionRef | None = None) -> RawSocket:
        """A connection that has sent its hello, for `ref` instead of the session if it is given."""
        protocol = CALLS_PROTOCOL if purpose is Purpose.CALLS else STREAMS_PROTOCOL
        context = self.credentials.socket_context(protocol) if self.name == "tls" else None
        hello = hello_of(ref or session.ref, purpose, self.credentials.socket_token())
        return RawSocket(self.address(session), hello, context)

    def open(self, session: RawSession, purpose: Purpose = Purpose.STREAMS) -> RawSocket:
        """A connection that the server has accepted."""
        connection = self.dial(session, purpose)
        try:
            assert connection.answer() == (0, b"")
        except BaseException:
            connection.socket.close()
            raise
        return connection


def tls_route(site: Site, holder: str | None = "acme-far") -> Route:
    return Route("tls", site.server, site.server.tcp, site.credentials(holder))


@contextlib.contextmanager
def serving(route: str, directory: Path, **options: Any) -> Iterator[Route]:
    """Runs a server with TCP, or with TLS and tokens for the route "tls".

    With tokens, the tenant of the tests gets almost all memory, as it does without them.
    """
    if route == "tls":
        options["config"] = f'{options.get("config", "")}\n[tenants.acme]\nquota = {{cpu = "90%"}}'
        site = make_site(directory, **options)
        with site.server.start():
            yield tls_route(site)
        return
    with ServerProcess(directory, tcp=True, **options).start() as server:
        yield Route(route, server, server.tcp if route == "tcp" else server.endpoint, Credentials())


def prepare(session: RawSession, keys: list[bytes]) -> int:
    """Prepares a store of these blocks; returns its id."""
    request = cache_pb2.PrepareStoreRequest(session=session.ref, keys=pack_keys(keys))
    store_id: int = session.cache.PrepareStore(request, timeout=60).store_id
    assert store_id
    return store_id


def push_call(store_id: int, *frames: bytes, complete: bool = False, number: int = 1) -> bytes:
    """The frames of a whole Push if `frames` are given; otherwise its first frame.

    `number`: number of the call. The default is that of the first call of a `RawSocket`.
    """
    request = transfer_pb2.PushRequest(store_id=store_id, complete=complete).SerializeToString()
    return b"".join((pack_call(number, PUSH, request), *frames, pack_end(number) if frames else b""))


def pull_call(lease_id: int, items: Iterable[int], number: int = 1) -> bytes:
    """The first frame of a Pull."""
    return pack_call(number, PULL, transfer_pb2.PullRequest(lease_id=lease_id, items=items).SerializeToString())


def data_frame(data: bytes, offset: int = 0, checksum: int | None = None, number: int = 1) -> bytes:
    checksum = xxhash.xxh3_64_intdigest(data) if checksum is None else checksum
    return pack_data_head(number, offset, len(data), checksum) + data
