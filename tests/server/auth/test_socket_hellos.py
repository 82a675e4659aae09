"""New connections of the socket protocol: refused hellos, TLS, and limits before trust."""

from __future__ import annotations

import contextlib
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from harness.auth_site import KEYS, PART, Site, make_site
from harness.bulk import ROUTES, Route, bulk_pid, locate, pull_call, serving, tls_route, wait_for_bulk
from harness.certificates import Authority
from harness.payloads import assert_serves, namespace_of, payload
from harness.polling import wait_until
from harness.raw import RawSession, RawSocket, attach_reply, hello_of
from harness.server_process import own_bytes

from kvtier.client import Credentials
from kvtier.client.session.socket_calls import SocketTarget
from kvtier.protos.v1 import cache_pb2, common_pb2
from kvtier.protos.wire.packed_keys import pack_keys
from kvtier.protos.wire.socket_frames import CALLS_PROTOCOL, HELLO_BYTES, STREAMS_PROTOCOL, Purpose

NAMESPACE = namespace_of(PART)
PURPOSES = (Purpose.CALLS, Purpose.STREAMS)
UNAUTHENTICATED = ("UNAUTHENTICATED", "UNAUTHENTICATED")
UNKNOWN = ("UNAUTHENTICATED", "UNKNOWN_SESSION")
STALE = ("FAILED_PRECONDITION", "STALE_EPOCH")


@pytest.fixture(scope="module", params=ROUTES)
def route(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Route]:
    with serving(request.param, tmp_path_factory.mktemp("s")) as route:
        yield route
        assert '"call failed"' not in route.server.log
        assert "Traceback" not in route.server.log


def tls_session(site: Site) -> RawSession:
    return tls_route(site).session(NAMESPACE, "tls")


@pytest.mark.parametrize("purpose", PURPOSES)
def test_a_connection_needs_a_session_of_this_epoch(route: Route, session: RawSession, purpose: Purpose) -> None:
    for ref in strangers(session):
        with route.dial(session, purpose, ref) as connection:
            assert connection.refusal() in (UNKNOWN, STALE)
            assert connection.is_ended()
    route.open(session, purpose).socket.close()


def strangers(session: RawSession) -> list[common_pb2.SessionRef]:
    """Returns an unknown session, and one of another run of the server."""
    good = session.ref
    pairs = ((bytes(16), good.epoch), (good.session_id, good.epoch + 1), (bytes(16), 0))
    return [common_pb2.SessionRef(session_id=session_id, epoch=epoch) for session_id, epoch in pairs]


def test_the_region_is_handed_out_to_local_sessions_only(route: Route, session: RawSession) -> None:
    address = route.address(session)
    if isinstance(address, str):
        assert attach_reply(address, session.ref) == session.capabilities.region.size_bytes
        assert {attach_reply(address, ref) for ref in strangers(session)} == {None}
    else:
        with route.dial(session, Purpose.REGION) as connection:
            assert connection.is_ended()


def test_only_the_owner_can_connect_to_the_unix_socket(route: Route) -> None:
    assert Path(f"{route.server.path}.shm").stat().st_mode & 0o777 == 0o600


def client_hello(protocol: str) -> bytes:
    """Returns the first bytes of a TLS connection with this application protocol."""
    context = ssl.create_default_context()
    context.set_alpn_protocols([protocol])
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    with pytest.raises(ssl.SSLWantReadError):
        context.wrap_bio(incoming, outgoing, server_hostname="127.0.0.1").do_handshake()
    return outgoing.read()


@pytest.mark.parametrize(
    "first",
    [
        b"KVT2" + bytes(HELLO_BYTES),
        b"KVT4\2" + bytes(HELLO_BYTES),
        b"KVT3\7" + bytes(HELLO_BYTES),
        b"KVT3\2" + bytes(32) + b"\xff\xff" + bytes(1000),
        b"KVT3\3" + bytes(32) + b"\xff\xff" + bytes(1000),
        b"GET / HTTP/1.1\r\n\r\n" + bytes(HELLO_BYTES),
        b"\x16\x03\x01\x00\x20" + bytes(100),
    ],
)
def test_connections_that_begin_with_other_bytes_are_closed(route: Route, session: RawSession, first: bytes) -> None:
    """The client gets no answer of the protocol, except that TLS may send an alert."""
    with RawSocket(route.address(session), first) as connection, contextlib.suppress(ConnectionError):
        data, descriptors, _, _ = socket.recv_fds(connection.socket, 100, 1)
        assert (data[:1] in (b"", b"\x15"), descriptors) == (True, [])
        assert connection.is_ended()
    route.open(session).socket.close()


@pytest.mark.parametrize("purpose", PURPOSES)
@pytest.mark.parametrize(
    ("token", "expected"),
    [
        (None, UNAUTHENTICATED),
        ("old", UNAUTHENTICATED),
        ("zeta-engine", ("UNAUTHENTICATED", "UNKNOWN_SESSION")),
        ("unknown", UNAUTHENTICATED),
    ],
)
def test_a_remote_connection_needs_a_token_of_the_tenant(
    site: Site, purpose: Purpose, token: str | None, expected: tuple[str, str]
) -> None:
    """The audit log has the refusal."""
    site.tokens.token["unknown"] = "kvt_" + "x" * 43
    with tls_session(site) as session, tls_route(site, token).dial(session, purpose) as connection:
        assert connection.refusal() == expected
        assert connection.is_ended()


def test_a_connection_ends_with_its_token(tmp_path: Path) -> None:
    """Also if the token of the session itself stays valid."""
    site = make_site(tmp_path, heartbeat=0.2)
    with site.server.start(), tls_session(site) as session:
        route = tls_route(site, "acme-engine")
        request = cache_pb2.LookupRequest(session=session.ref, keys=pack_keys(KEYS))
        with route.open(session, Purpose.CALLS) as calls, route.open(session) as streams:
            assert calls.call("CacheService/Lookup", request)[0] == 0
            site.tokens.remove("acme-engine")
            wait_until(lambda: "tokens read again" in site.server.log)
            calls.send(b"")
            assert calls.call("CacheService/Lookup", request)[0] == 16
            streams.send(pull_call(1, [0]))
            assert streams.refusal() == UNAUTHENTICATED
        session.cache.Lookup(request, timeout=60)


def context_of(site: Site, *protocols: str) -> ssl.SSLContext:
    """Returns a client's context that offers these application protocols."""
    context = ssl.create_default_context(cafile=site.authority.ca)
    if protocols:
        context.set_alpn_protocols(protocols)
    return context


def old_context(site: Site) -> ssl.SSLContext:
    context = context_of(site, STREAMS_PROTOCOL)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    return context


BAD_CONTEXTS: dict[str, Callable[[Site], ssl.SSLContext]] = {
    "TLS 1.2": old_context,
    "no application protocol": context_of,
    "h2": lambda site: context_of(site, "h2"),
    "an older protocol": lambda site: context_of(site, "kvtier-streams/1"),
}


@pytest.mark.parametrize("case", BAD_CONTEXTS)
def test_other_versions_and_protocols_of_tls_are_refused(site: Site, case: str) -> None:
    with tls_session(site) as session:
        route = tls_route(site)
        hello = hello_of(session.ref, Purpose.STREAMS, route.credentials.socket_token())
        with (
            contextlib.suppress(ssl.SSLError, ConnectionError),
            RawSocket(route.address(session), hello, BAD_CONTEXTS[case](site)) as connection,
        ):
            assert connection.is_ended()
        route.open(session).socket.close()


@pytest.mark.parametrize("purpose", PURPOSES)
def test_the_application_protocol_selects_the_process(site: Site, purpose: Purpose) -> None:
    """A hello with the other purpose is refused, and a list of both protocols means calls."""
    other = CALLS_PROTOCOL if purpose is Purpose.STREAMS else STREAMS_PROTOCOL
    with tls_session(site) as session:
        route = tls_route(site)
        hello = hello_of(session.ref, purpose, route.credentials.socket_token())
        for protocols in ([other], [STREAMS_PROTOCOL, CALLS_PROTOCOL]):
            with RawSocket(route.address(session), hello, context_of(site, *protocols)) as connection:
                if purpose is Purpose.CALLS and len(protocols) == 2:
                    assert connection.answer() == (0, b"")
                elif CALLS_PROTOCOL in protocols:
                    assert connection.refusal()[0] == "INVALID_ARGUMENT"
                else:
                    assert connection.is_ended()


def test_a_client_verifies_the_servers_certificate(site: Site, tmp_path: Path) -> None:
    """As over gRPC: the CA must be known, and the host name must be that of the endpoint."""
    with tls_session(site) as session:
        address = tls_route(site).address(session)
        good = site.credentials("acme-far")
        other = Credentials(ca=Authority(tmp_path, "other").ca, token=good.token)
        for purpose in PURPOSES:
            SocketTarget(address, session.ref, good, "127.0.0.1").connect(purpose, 60).close()
            for credentials, name in ((other, "127.0.0.1"), (good, "localhost"), (good, "127.0.0.2")):
                with pytest.raises(ssl.SSLCertVerificationError):
                    SocketTarget(address, session.ref, credentials, name).connect(purpose, 60)


def test_a_client_certificate_can_be_required(tmp_path: Path) -> None:
    """Without one, or with one of another CA, there is no connection; with one its names count."""
    site = make_site(tmp_path, tls=f'client_ca = "{tmp_path / "ca.pem"}"')
    with site.tokens.path.open("a") as file:
        file.write('[[certificates]]\nname = "dns:engine-1"\ntenant = "acme"\nroles = ["engine"]\n')
    pair = site.authority.issue("engine-1", dns="engine-1")
    (tmp_path / "foreign").mkdir()
    foreign = Authority(tmp_path / "foreign", "foreign").issue("engine-1", dns="engine-1")
    with site.server.start():
        good = site.credentials(cert=pair.cert, key=pair.key)
        route = Route("tls", site.server, site.server.tcp, good)
        with route.session(NAMESPACE, "mutual") as session:
            address = route.address(session)
            bad = (site.credentials("acme-far"), site.credentials("acme-far", cert=foreign.cert, key=foreign.key))
            for purpose in PURPOSES:
                SocketTarget(address, session.ref, good, "127.0.0.1").connect(purpose, 60).close()
                for credentials in bad:
                    with pytest.raises((ssl.SSLError, ConnectionError)):
                        SocketTarget(address, session.ref, credentials, "127.0.0.1").connect(purpose, 60)


def is_closed(connection: RawSocket, seconds: float = 60.0) -> bool:
    """Returns whether the server closes the connection within this time; ignores its handshake."""
    connection.socket.settimeout(seconds)
    try:
        while connection.socket.recv(4096):
            pass
    except TimeoutError:
        return False
    except ConnectionError:
        pass
    return True


@pytest.mark.slow
def test_connections_without_a_hello_are_closed(route: Route, session: RawSession) -> None:
    """The server closes them after five seconds and serves its clients meanwhile."""
    address = route.address(session)
    firsts = [b"", b"KVT3", b"KVT3\2", b"KVT3\3\0", b"\x16\x03\x01", b"\x16\x03\x01\xff\xff" + bytes(60_000)]
    firsts += map(client_hello, (CALLS_PROTOCOL, STREAMS_PROTOCOL))
    began = time.monotonic()
    silent = [RawSocket(address, first) for first in firsts for _ in range(3)]
    with route.open(session, Purpose.CALLS) as connection:
        assert connection.call("CacheService/Lookup", cache_pb2.LookupRequest(session=session.ref))[0] == 0
        for each in silent:
            with each:
                assert is_closed(each)
        assert time.monotonic() - began < 25
        assert connection.call("CacheService/Lookup", cache_pb2.LookupRequest(session=session.ref))[0] == 0


@pytest.mark.slow
@pytest.mark.parametrize("route", ["tcp", "tls"], indirect=True)
@pytest.mark.parametrize("purpose", PURPOSES)
def test_new_connections_are_limited_per_address(route: Route, session: RawSession, purpose: Purpose) -> None:
    """Of forty clients without a hello the oldest eight are closed at once; accepted ones go on."""
    address = route.address(session)
    first = client_hello(f"kvtier-{purpose.name.lower()}/3") if route.name == "tls" else b"KVT3" + bytes([purpose])
    with route.client(NAMESPACE) as client, contextlib.ExitStack() as opened:
        wait_for_bulk(client)
        began = time.monotonic()
        silent = [opened.enter_context(RawSocket(address, first)) for _ in range(40)]
        client.store(KEYS, [payload(key, PART) for key in KEYS])
        assert_serves(client, KEYS)
        wait_until(lambda: sum(is_closed(each, 0.01) for each in silent) >= 8)
        closed = [is_closed(each, 0.01) for each in silent]
        assert not any(closed[20:]) or time.monotonic() - began > 4

        def accepted() -> bool:
            with contextlib.suppress(OSError, EOFError):
                route.open(session, purpose).socket.close()
                return True
            return False

        wait_until(accepted)


def test_unproven_clients_fill_no_memory(route: Route, session: RawSession) -> None:
    """The server reads at most 64 KiB of a connection before it has accepted its hello."""
    address = route.address(session)
    pids = [route.server.pid, bulk_pid(route.server.pid)]
    before = [own_bytes(pid) for pid in pids if pid is not None]
    firsts = [
        b"\x16\x03\x01\xff\xff",
        b"\x16\x03\x01\x40\x00\x01\x00\xff\xff",
        b"KVT3\2",
        b"KVT3\3",
        client_hello(CALLS_PROTOCOL),
    ]
    with contextlib.ExitStack() as opened:
        for number in range(30):
            connection = opened.enter_context(RawSocket(address, firsts[number % len(firsts)]))
            connection.socket.settimeout(0.05)
            with contextlib.suppress(OSError):
                for _ in range(256):
                    connection.send(b"\0" * 65_536)
        grown = [own_bytes(pid) - old for pid, old in zip(pids, before, strict=True) if pid is not None]
    assert max(grown) < 16 << 20
    wait_until(lambda: locate(session).unix_suffix)


@pytest.mark.parametrize("magic", [b"KVT1", b"KVC1", b"PRI *"])
def test_another_protocol_is_closed_at_once(site: Site, magic: bytes) -> None:
    """A client of an earlier version does not wait for a time-out."""
    text = "does not begin with a hello"
    before = site.server.log.count(text)
    with RawSocket(f"{site.server.path}.shm", magic.ljust(5)) as connection:
        assert connection.is_ended()
    wait_until(lambda: site.server.log.count(text) == before + 1)
