"""Clients that connect and stall, or send too much, are disconnected and do not disturb others."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import grpc
import pytest
from harness.auth_site import KEYS, PART, Site, make_site, ready_line
from harness.bulk import wait_for_bulk
from harness.payloads import assert_serves, namespace_of, payload
from harness.polling import wait_until
from harness.raw import RawSession, RawSocket, hello_of, refusal_of
from prometheus_client import CollectorRegistry

from kvtier.protos.v1 import cache_pb2
from kvtier.protos.wire.packed_keys import pack_keys
from kvtier.protos.wire.socket_frames import Purpose
from kvtier.server.rpc import socket_calls
from kvtier.server.telemetry import http
from kvtier.server.telemetry.http import MetricsServer


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Returns a server with all its sockets: Unix, TCP with TLS, bulk and HTTP."""
    made = make_site(
        tmp_path_factory.mktemp("h"), config='metrics = "127.0.0.1:0"\nlimits = {max_message_bytes = "8MiB"}'
    )
    with made.server.start(), made.client("acme-far") as bystander:
        bystander.store(KEYS, [payload(key, PART) for key in KEYS])
        wait_for_bulk(bystander)  # the bulk process then has descriptors of a client
        began = made.server.descriptors()
        yield made
        # Only our connections are left, and blocks are served.
        assert_serves(bystander, KEYS)
        wait_until(lambda: made.server.descriptors() <= began + 2, 40)
        assert '"call failed"' not in made.server.log


def dial(address: str) -> socket.socket:
    """Connects to HOST:PORT or the path of a Unix socket."""
    if address.startswith("/"):
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(address)
    else:
        host, _, port = address.rpartition(":")
        connection = socket.create_connection((host, int(port)))
    connection.settimeout(60)
    return connection


def is_closed_by_server(connection: socket.socket) -> bool:
    """Waits, and returns whether the server has closed the connection."""
    with contextlib.suppress(ConnectionError):
        while connection.recv(4096):
            pass
    return True


def metrics_port(site: Site) -> int:
    return int(ready_line(site.server)["metrics_port"])


@pytest.mark.slow
@pytest.mark.parametrize("said", [b"", b"\x16\x03", b"GET / HTTP/1.1\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"])
def test_stalled_tls_handshakes_are_closed(site: Site, said: bytes) -> None:
    """The server closes thirty stalled handshakes and serves calls meanwhile."""
    dawdlers = [dial(site.server.tcp) for _ in range(30)]
    for dawdler in dawdlers:
        dawdler.sendall(said)
    with site.client("acme-far") as client:
        client.lookup(KEYS).release()
    assert all(map(is_closed_by_server, dawdlers))
    for dawdler in dawdlers:
        dawdler.close()


def test_an_incomplete_local_call_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connection ends at the deadline, and its memory is freed."""
    # Executed at the start of the interpreter of the server process.
    (tmp_path / "sitecustomize.py").write_text(
        "import kvtier.server.rpc.socket_calls as calls\ncalls._REQUEST_SECONDS = 0.5\n"
    )
    assert socket_calls._REQUEST_SECONDS <= 60
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(socket_calls.__file__).parents[3]}")
    site = make_site(tmp_path)
    with site.server.start(), RawSession(site.server.endpoint, namespace_of(PART), engine_id="raw") as session:
        path = f"{site.server.path}.shm"
        halves = []
        request = cache_pb2.LookupRequest(session=session.ref, keys=pack_keys(KEYS))
        for cut in (1, 5, -1):
            half = RawSocket(path, hello_of(session.ref, Purpose.CALLS))
            assert half.answer()[0] == 0
            assert half.call("CacheService/Lookup", request)[0] == 0
            half.send(half.next_call(b"CacheService/Lookup", request.SerializeToString())[:cut])
            halves.append(half)
        began = time.monotonic()
        for half in halves:
            with half:
                assert half.is_ended()
        assert time.monotonic() - began < 25


@pytest.mark.slow
def test_stalled_scrapes_do_not_block_others(site: Site) -> None:
    """Connection number 65 ends the oldest one, so scrapes and probes are served."""
    port = metrics_port(site)
    dawdlers = [dial(f"127.0.0.1:{port}") for _ in range(http._MAX_CONNECTIONS)]
    for dawdler in dawdlers[:10]:
        dawdler.sendall(b"GET /metrics HTTP/1.1\r\nX: ")
    for path in ("metrics", "healthz") * 5:
        with urlopen(f"http://127.0.0.1:{port}/{path}", timeout=60) as answer:
            assert answer.status == 200
    dawdlers += [dial(f"127.0.0.1:{port}") for _ in range(http._MAX_CONNECTIONS)]
    assert all(map(is_closed_by_server, dawdlers[: http._MAX_CONNECTIONS]))
    for dawdler in dawdlers:
        dawdler.close()


def test_a_slow_http_request_is_closed_at_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that trickles in does not occupy its thread beyond the deadline."""
    monkeypatch.setattr(http, "_CONNECTION_SECONDS", 0.2)
    server = MetricsServer("127.0.0.1:0", CollectorRegistry())
    with contextlib.closing(server), contextlib.closing(dial(f"127.0.0.1:{server.port}")) as dawdler:
        dawdler.sendall(b"GET /metrics HTTP/1.1\r\nX: ")
        assert is_closed_by_server(dawdler)


def test_a_too_large_message_is_refused(site: Site) -> None:
    """The status is RESOURCE_EXHAUSTED, before authentication.

    The server's memory does not grow.
    """
    with RawSession(
        site.server.tcp, namespace_of(PART), engine_id="big", credentials=site.credentials("acme-far")
    ) as session:
        before = site.server.own_bytes()
        for _ in range(5):
            request = cache_pb2.LookupRequest(session=session.ref, keys=pack_keys([bytes(1 << 20)] * 20))
            with pytest.raises(grpc.RpcError) as refused:
                session.cache.Lookup(request, timeout=60)
            assert refusal_of(refused.value)[0] == "RESOURCE_EXHAUSTED"
        assert site.server.own_bytes() < before + (64 << 20)


def test_too_large_metadata_is_refused(site: Site) -> None:
    """A header of a hundred kilobytes fails its call; the server continues."""
    with RawSession(
        site.server.tcp, namespace_of(PART), engine_id="big", credentials=site.credentials("acme-far")
    ) as session:
        request = cache_pb2.LookupRequest(session=session.ref)
        with pytest.raises(grpc.RpcError) as refused:
            session.cache.Lookup(request, timeout=60, metadata=[("x-long", "y" * 100_000)])
        assert refusal_of(refused.value)[0] == "RESOURCE_EXHAUSTED"
        session.cache.Lookup(request, timeout=60)
