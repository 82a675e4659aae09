"""Attacks on the entrances for calls: unfinished and refused calls, streams, and hellos."""

from __future__ import annotations

import contextlib
import secrets
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from harness.auth_site import KEYS, PART, Site, connected, make_site, status_of
from harness.bulk import tls_route
from harness.payloads import assert_serves, namespace_of, payload
from harness.polling import wait_until
from harness.raw import RawSession, RawSocket, hello_of, refusal_of
from harness.server_process import MIB, ServerProcess
from harness.unfinished_grpc import UnfinishedCalls

from kvtier.client import Client
from kvtier.client.transport.grpc_methods import CHANNEL_OPTIONS
from kvtier.protos.endpoint import parse_endpoint
from kvtier.protos.v1 import cache_pb2
from kvtier.protos.wire.packed_keys import pack_keys
from kvtier.protos.wire.socket_frames import Purpose

CALLS = 40
CHECK = "/grpc.health.v1.Health/Check"
SECONDS = 6.0
"""A call of a victim during an attack takes milliseconds. A call that waits until a hostile request
gives way takes 8 s."""


def bearer(token: str) -> tuple[str, str]:
    return "authorization", f"Bearer {token}"


def invented() -> tuple[str, str]:
    return bearer(f"kvt_{secrets.token_urlsafe(32)}")


@contextlib.contextmanager
def unfinished(
    site: Site, method: str, *headers: list[tuple[str, str]], calls: int = CALLS, connections: int = 1
) -> Iterator[list[UnfinishedCalls]]:
    """Yields connections over TCP with calls that have sent 100 bytes of a request of 1 MiB."""
    context = ssl.create_default_context(cafile=site.authority.ca)
    context.set_alpn_protocols(["h2"])
    host, _, port = site.server.tcp.rpartition(":")
    with contextlib.ExitStack() as opened:
        yield [
            opened.enter_context(
                UnfinishedCalls(
                    (host, int(port)), method, calls // connections, 1 << 20, context=context, headers=headers or ((),)
                )
            )
            for _ in range(connections)
        ]


def check_health(site: Site, *, unix: bool) -> None:
    credentials = site.credentials("acme-far") if not unix else site.credentials()
    target = site.server.endpoint if unix else site.server.tcp
    with connected(credentials.channel(parse_endpoint(target), CHANNEL_OPTIONS)) as channel:
        answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=SECONDS)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


@pytest.fixture(scope="module")
def victims(site: Site) -> Iterator[dict[str, RawSession]]:
    """Sessions of the tenant "zeta" over gRPC: by the Unix socket, and by TCP."""
    with contextlib.ExitStack() as opened:
        yield {
            name: opened.enter_context(
                RawSession(
                    endpoint,
                    namespace_of(PART, tenant="zeta"),
                    engine_id=name,
                    credentials=site.credentials("zeta-engine"),
                )
            )
            for name, endpoint in (("unix", site.server.endpoint), ("tcp", site.server.tcp))
        }


def assert_serves_victims(site: Site, victims: dict[str, RawSession]) -> None:
    """Lookups and health checks are answered, over the Unix socket and over TCP."""
    for _ in range(5):
        for session in victims.values():
            session.cache.Lookup(cache_pb2.LookupRequest(session=session.ref, keys=pack_keys(KEYS)), timeout=SECONDS)
        for unix in (True, False):
            check_health(site, unix=unix)


def test_calls_under_invented_tokens_are_refused_before_they_are_received(
    site: Site, victims: dict[str, RawSession]
) -> None:
    """Forty calls without a request, each with another token, take no place of others."""
    tokens = [[invented()] for _ in range(CALLS)]
    with unfinished(site, "CacheService/Lookup", *tokens) as attack:
        assert all(each.receive_until(CALLS, SECONDS) for each in attack)
    with unfinished(site, "CacheService/Lookup", *tokens):
        assert_serves_victims(site, victims)


@pytest.mark.parametrize("connections", [1, 8])
def test_all_credentials_of_a_tenant_count_together(
    site: Site, victims: dict[str, RawSession], connections: int
) -> None:
    """Unfinished calls with valid tokens and doubled headers leave places to others."""
    token, reader = (bearer(site.tokens.token[name]) for name in ("acme-far", "acme-reader"))
    headers = [[token], [reader], [invented(), token], [("authorization", "Basic x"), reader]]
    with unfinished(site, "CacheService/Lookup", *headers, calls=160, connections=connections) as attack:
        for each in attack:
            each.send_for(0.1)
        assert_serves_victims(site, victims)


@pytest.mark.parametrize("connections", [1, 4])
def test_unfinished_health_checks_delay_neither_probes_nor_calls(
    site: Site, victims: dict[str, RawSession], connections: int
) -> None:
    """Health checks need no credentials, so they have places of their own."""
    with unfinished(site, CHECK, calls=200, connections=connections) as attack:
        for each in attack:
            each.send_for(0.1)
        assert_serves_victims(site, victims)
        assert all(each.receive_until(200 // connections) for each in attack)


@pytest.mark.parametrize(
    ("method", "holder"), [(CHECK, None), ("/kvtier.v1.SessionService/Capabilities", "acme-reader")]
)
def test_floods_of_calls_without_a_session_have_a_rate(
    site: Site, victims: dict[str, RawSession], method: str, holder: str | None
) -> None:
    """Four hundred calls at a time on four connections. Others get answers in between."""
    target, credentials = parse_endpoint(site.server.tcp), site.credentials(holder)
    answers, is_over = [0], threading.Event()

    def repeat(call: grpc.UnaryUnaryMultiCallable) -> None:
        def again(ended: grpc.Future) -> None:
            answers[0] += ended.code() is grpc.StatusCode.OK
            if not is_over.is_set():
                repeat(call)

        call.future(b"", timeout=60).add_done_callback(again)

    with contextlib.ExitStack() as opened:
        channels = [opened.enter_context(connected(credentials.channel(target, (("n", n),)))) for n in range(4)]
        began = time.monotonic()
        for number in range(400):
            repeat(channels[number % 4].unary_unary(method))
        for _ in range(2):
            assert_serves_victims(site, victims)
        counted, elapsed = answers[0], time.monotonic() - began
        is_over.set()
    assert 0 < counted <= 100 + 200 * (elapsed + 1.0)


def test_bursts_of_calls_cancel_no_calls_of_others(site: Site, victims: dict[str, RawSession]) -> None:
    """The gRPC library cancels calls if more than a thousand wait until the server accepts them."""
    codes, is_over, session = list[str](), threading.Event(), victims["tcp"]

    def look_up() -> None:
        while not is_over.is_set():
            request = cache_pb2.LookupRequest(session=session.ref, keys=pack_keys(KEYS))
            future = session.cache.Lookup.future(request, timeout=60)
            codes.append(future.code().name if future.exception() is not None else "OK")

    threads = [threading.Thread(target=look_up) for _ in range(8)]
    for thread in threads:
        thread.start()
    token = bearer(site.tokens.token["acme-far"])
    try:
        # One burst: a second one would add to what the server has not accepted yet.
        with unfinished(site, "CacheService/Lookup", [token], calls=3000, connections=20):
            before = len(codes)
            wait_until(lambda: len(codes) >= before + 48)
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
    assert set(codes) == {"OK"}


def test_streams_of_a_caller_are_limited(site: Site) -> None:
    """A tenant that watches the health hundreds of times leaves streams to others."""
    request = health_pb2.HealthCheckRequest()

    def watch(stub: health_pb2_grpc.HealthStub) -> str:
        running.append(stub.Watch(request, timeout=600))
        try:
            next(running[-1])
        except grpc.RpcError as error:
            return refusal_of(error)[0]
        return "OK"

    running: list[grpc.Call] = []
    with contextlib.ExitStack() as opened:
        stubs = []
        for name in ("acme-far", "zeta-engine"):
            channels = [
                opened.enter_context(
                    connected(site.credentials(name).channel(parse_endpoint(site.server.tcp), (("attack", number),)))
                )
                for number in range(2)
            ]
            stubs.append([health_pb2_grpc.HealthStub(channel) for channel in channels])
        outcomes = [watch(stubs[0][number % 2]) for number in range(200)]
        assert set(outcomes) == {"OK", "RESOURCE_EXHAUSTED"}
        assert outcomes.count("OK") <= 128
        assert watch(stubs[1][0]) == "OK"
        for call in running:
            call.cancel()
        wait_until(lambda: watch(stubs[0][0]) == "OK")
        running[-1].cancel()


def test_a_tenant_cannot_open_all_sessions(tmp_path: Path) -> None:
    """Of eight sessions it gets five. Another tenant and the owner of the Unix socket find some."""
    site = make_site(tmp_path, config="limits = {max_sessions = 8}")

    def open_one(name: str | None, tenant: str, endpoint: str) -> None:
        namespace = namespace_of(PART, tenant=tenant)
        credentials = site.credentials(name)
        opened.enter_context(RawSession(endpoint, namespace, engine_id=f"{name}", credentials=credentials))

    with site.server.start(), contextlib.ExitStack() as opened:
        for number in range(8):
            name = ("acme-far", "acme-reader")[number % 2]
            if number < 5:
                open_one(name, "acme", site.server.tcp)
            else:
                assert status_of(lambda name=name: open_one(name, "acme", site.server.tcp)) == "RESOURCE_EXHAUSTED"
        open_one("zeta-engine", "zeta", site.server.tcp)
        open_one(None, "zeta", site.server.endpoint)


def test_masses_of_refused_and_cancelled_calls_harm_none(site: Site, victims: dict[str, RawSession]) -> None:
    """Unknown methods, calls without a token, and calls that are cancelled at once."""
    with connected(site.credentials().channel(parse_endpoint(site.server.tcp), CHANNEL_OPTIONS)) as channel:
        unknown = channel.unary_unary("/kvtier.v1.CacheService/NoSuchCall")
        lookup = channel.unary_unary("/kvtier.v1.CacheService/Lookup")
        push = channel.stream_unary("/kvtier.v1.TransferService/Push")
        assert status_of(lambda: unknown(b"", timeout=SECONDS)) in {"UNIMPLEMENTED", "UNAUTHENTICATED"}
        assert status_of(lambda: lookup(b"", timeout=SECONDS)) == "UNAUTHENTICATED"
        assert status_of(lambda: push(iter([]), timeout=SECONDS)) == "UNAUTHENTICATED"
        for _ in range(100):
            for call in (unknown, lookup):
                call.future(bytes(1000), timeout=SECONDS).cancel()
                call.future(bytes(1000), timeout=SECONDS)
        assert_serves_victims(site, victims)


@pytest.mark.parametrize("purpose", [Purpose.CALLS, Purpose.STREAMS])
def test_silent_connections_of_two_addresses_keep_none_out(site: Site, purpose: Purpose) -> None:
    """A hundred from each. The oldest give way, so new clients are accepted."""
    route = tls_route(site, "zeta-engine")
    with (
        site.client("zeta-engine", tenant="zeta") as client,
        route.session(namespace_of(PART, tenant="zeta"), "far") as session,
        contextlib.ExitStack() as opened,
    ):
        client.wait_until_connected(60)
        address = route.address(session)
        assert not isinstance(address, str)
        for source in ("127.0.0.2", "127.0.0.3"):
            for _ in range(100):
                connection = socket.create_connection(address, 60, source_address=(source, 0))
                opened.enter_context(connection)
        for _ in range(5):
            newcomer: RawSocket = route.open(session, purpose)
            newcomer.socket.close()
        assert_connects(client)


def assert_connects(client: Client) -> None:
    client.lookup(KEYS).release()


def test_connections_over_tcp_leave_descriptors_to_others(tmp_path: Path) -> None:
    """A peer opens more connections for gRPC than the server may have descriptors."""
    prefix = ["prlimit", "--nofile=400:400"]
    with (
        ServerProcess(tmp_path, tcp=True, region=16 * MIB, lmdb=16 * MIB, prefix=prefix).start() as server,
        contextlib.ExitStack() as opened,
    ):
        host, _, port = server.tcp.rpartition(":")
        for _ in range(500):
            connection = opened.enter_context(socket.create_connection((host, int(port)), 60))
            with contextlib.suppress(OSError):
                connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0")
        with Client(server.endpoint, namespace=namespace_of(PART)) as client:
            client.wait_until_connected(60)
            client.store(KEYS, [payload(key, PART) for key in KEYS])
            assert_serves(client, KEYS)
        wait_until(lambda: 60 < server.descriptors() < 300)
        assert "Too many open files" not in server.log


@pytest.mark.parametrize("source", ["127.0.0.1", "127.0.0.2"])
def test_a_peer_cannot_hold_all_grpc_connections(tmp_path: Path, source: str) -> None:
    """It opens each connection again that the server closes. New clients over TCP find places.

    A client with a session keeps its connection, also if it has the attacker's address.
    """
    server = ServerProcess(tmp_path, tcp=True, region=16 * MIB, lmdb=16 * MIB, prefix=["prlimit", "--nofile=1200:1200"])
    is_over = threading.Event()

    def is_closed(connection: socket.socket) -> bool:
        try:
            return not connection.recv(1 << 16)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def hold(address: tuple[str, int]) -> None:
        with contextlib.ExitStack() as opened:
            held: list[socket.socket] = []
            while not is_over.wait(0.01):
                held = [each for each in held if not is_closed(each)]
                while len(held) < 170 and not is_over.wait(0.001):
                    with contextlib.suppress(OSError):
                        connection = socket.create_connection(address, 5, source_address=(source, 0))
                        held.append(opened.enter_context(connection))
                        connection.setblocking(False)
                        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0")

    with server.start(), Client(server.tcp, namespace=namespace_of(PART)) as first:
        first.wait_until_connected(60)
        [before] = server.status().sessions
        host, _, port = server.tcp.rpartition(":")
        threads = [threading.Thread(target=hold, args=((host, int(port)),)) for _ in range(2)]
        for thread in threads:
            thread.start()
        try:
            wait_until(lambda: "an address has too many" in server.log)
            for _ in range(3):
                with Client(server.tcp, namespace=namespace_of(PART)) as client:
                    client.wait_until_connected(60)
            assert_connects(first)
        finally:
            is_over.set()
            for thread in threads:
                thread.join()
        assert before.age.ToNanoseconds()
        server.wait_for(lambda status: [each.pid for each in status.sessions] == [before.pid])
        assert server.status().sessions[0].age.ToNanoseconds() > before.age.ToNanoseconds()


def test_connections_for_the_region_leave_descriptors_to_others(tmp_path: Path) -> None:
    """An engine keeps the connections of its ended sessions, so the server must count them."""
    server = ServerProcess(tmp_path, region=16 * MIB, lmdb=16 * MIB, prefix=["prlimit", "--nofile=1200:1200"])
    with server.start(), contextlib.ExitStack() as opened:
        for number in range(12):
            with RawSession(server.endpoint, namespace_of(PART, tenant="acme"), engine_id=f"{number}") as session:
                for _ in range(64):
                    region = opened.enter_context(contextlib.closing(socket.socket(socket.AF_UNIX)))
                    region.settimeout(20)
                    region.connect(f"{server.path}.shm")
                    region.sendall(hello_of(session.ref, Purpose.REGION))
                    assert region.recv(1000), "neither served nor refused"
        assert server.descriptors() < 300
        with Client(server.endpoint, namespace=namespace_of(PART, tenant="zeta")) as client:
            client.wait_until_connected(60)
            assert client.transport == "shm"
            client.store(KEYS, [payload(key, PART) for key in KEYS])
            assert_serves(client, KEYS)
        assert "Too many open files" not in server.log
