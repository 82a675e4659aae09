"""Peers that connect and dawdle, or send too much: each is hung up on or refused, and costs the others nothing."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import grpc
import pytest
from harness.bulk import wait_for_bulk
from harness.long_timeouts import wait_until
from harness.payloads import assert_serves, namespace_of, payload
from harness.raw import RawSession, refusal_of
from harness.trust_site import KEYS, PART, Site, make_site, ready_line
from prometheus_client import CollectorRegistry

from kvtier.protos.v1 import cache_pb2
from kvtier.protos.wire.attach import REPLY_BYTES, Purpose, pack_request
from kvtier.protos.wire.call_frames import pack_call
from kvtier.server.rpc import socket_calls
from kvtier.server.telemetry import http
from kvtier.server.telemetry.http import MetricsServer


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A server with all its doors."""
    made = make_site(
        tmp_path_factory.mktemp("h"), config='metrics = "127.0.0.1:0"\nlimits = {max_message_bytes = "8MiB"}'
    )
    with made.server.start(), made.client("acme-far") as bystander:
        bystander.store(KEYS, [payload(key, PART) for key in KEYS])
        wait_for_bulk(bystander)  # a process that the server has descriptors for
        began = made.server.descriptors()
        yield made
        # Nobody's connection is left but ours, and blocks are served.
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


def is_hung_up_on(connection: socket.socket) -> bool:
    """Waits, and returns whether the server has closed a connection."""
    with contextlib.suppress(ConnectionError):
        while connection.recv(4096):
            pass
    return True


def metrics_port(site: Site) -> int:
    """Returns the HTTP port."""
    return int(ready_line(site.server)["metrics_port"])


@pytest.mark.parametrize("said", [b"", b"\x16\x03", b"GET / HTTP/1.1\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"])
def test_a_handshake_of_tls_that_does_not_go_on(site: Site, said: bytes) -> None:
    """Thirty of them: all are hung up on, and calls go on meanwhile."""
    dawdlers = [dial(site.server.tcp) for _ in range(30)]
    for dawdler in dawdlers:
        dawdler.sendall(said)
    with site.client("acme-far") as client:
        client.wait_until_connected(60)
        client.lookup(KEYS).release()
    assert all(map(is_hung_up_on, dawdlers))
    for dawdler in dawdlers:
        dawdler.close()


def test_an_attach_that_does_not_say_what_for(site: Site) -> None:
    """Five seconds; three hundred at once do not keep an engine out for longer than that."""
    path = f"{site.server.path}.shm"
    dawdlers = [dial(path) for _ in range(100)]
    for number, dawdler in enumerate(dawdlers):
        dawdler.sendall(b"KVT1"[: number % 4])
    with site.client("acme-engine", unix=True, transport="shm") as client:
        client.wait_until_connected(60)
    assert all(map(is_hung_up_on, dawdlers))
    for dawdler in dawdlers:
        dawdler.close()


def test_a_local_call_that_stays_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest of a request has a time to come in; then its connection ends, and with it what it has kept in memory."""
    # In the server's process: told to by its interpreter's start.
    (tmp_path / "sitecustomize.py").write_text(
        "import kvtier.server.rpc.socket_calls as calls\ncalls._REQUEST_SECONDS = 0.5\n"
    )
    assert socket_calls._REQUEST_SECONDS <= 60
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(socket_calls.__file__).parents[2]}")
    site = make_site(tmp_path)
    with site.server.start(), RawSession(site.server.endpoint, namespace_of(PART), engine_id="raw") as session:
        path = f"{site.server.path}.shm"
        halves = []
        whole = pack_call(
            b"CacheService/Lookup", cache_pb2.LookupRequest(session=session.ref, keys=KEYS).SerializeToString()
        )
        for cut in (1, 5, len(whole) - 1):
            half = dial(path)
            half.sendall(pack_request(session.ref.session_id, session.ref.epoch, Purpose.CALLS))
            assert len(half.recv(REPLY_BYTES)) == REPLY_BYTES
            half.sendall(whole)
            assert half.recv(4096)
            half.sendall(whole[:cut])
            halves.append(half)
        began = time.monotonic()
        assert all(map(is_hung_up_on, halves))
        assert time.monotonic() - began < 25
        for half in halves:
            half.close()


def test_scrapes_that_dawdle(site: Site) -> None:
    """There are 64 connections, and one more ends the oldest: the next scrape, and a probe of the health, are served."""
    port = metrics_port(site)
    dawdlers = [dial(f"127.0.0.1:{port}") for _ in range(http._MAX_CONNECTIONS)]
    for dawdler in dawdlers[:10]:
        dawdler.sendall(b"GET /metrics HTTP/1.1\r\nX: ")
    for path in ("metrics", "healthz") * 5:
        with urlopen(f"http://127.0.0.1:{port}/{path}", timeout=60) as answer:
            assert answer.status == 200
    dawdlers += [dial(f"127.0.0.1:{port}") for _ in range(http._MAX_CONNECTIONS)]
    assert all(map(is_hung_up_on, dawdlers[: http._MAX_CONNECTIONS]))
    for dawdler in dawdlers:
        dawdler.close()


def test_a_connection_has_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slowly its request comes: then its thread is there for somebody else."""
    monkeypatch.setattr(http, "_CONNECTION_SECONDS", 0.2)
    server = MetricsServer("127.0.0.1:0", CollectorRegistry())
    with contextlib.closing(server), contextlib.closing(dial(f"127.0.0.1:{server.port}")) as dawdler:
        dawdler.sendall(b"GET /metrics HTTP/1.1\r\nX: ")
        assert is_hung_up_on(dawdler)


def test_a_message_too_large(site: Site) -> None:
    """RESOURCE_EXHAUSTED for a call, before anybody is asked who he is; the server does not grow by it."""
    with RawSession(
        site.server.tcp, namespace_of(PART), engine_id="big", credentials=site.credentials("acme-far")
    ) as session:
        before = site.server.own_bytes()
        for _ in range(5):
            request = cache_pb2.LookupRequest(session=session.ref, keys=[bytes(1 << 20)] * 20)
            with pytest.raises(grpc.RpcError) as refused:
                session.cache.Lookup(request, timeout=60)
            assert refusal_of(refused.value)[0] == "RESOURCE_EXHAUSTED"
        assert site.server.own_bytes() < before + (64 << 20)


def test_metadata_too_large(site: Site) -> None:
    """A header of a hundred kilobytes ends its call, not the server."""
    with RawSession(
        site.server.tcp, namespace_of(PART), engine_id="big", credentials=site.credentials("acme-far")
    ) as session:
        request = cache_pb2.LookupRequest(session=session.ref)
        with pytest.raises(grpc.RpcError) as refused:
            session.cache.Lookup(request, timeout=60, metadata=[("x-long", "y" * 100_000)])
        assert refusal_of(refused.value)[0] == "RESOURCE_EXHAUSTED"
        session.cache.Lookup(request, timeout=60)
