"""The HTTP endpoint of metrics and health."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from http.client import HTTPResponse
from types import SimpleNamespace
from typing import Any

import pytest
from harness.http_get import get
from harness.polling import stays, wait_until
from prometheus_client import CollectorRegistry

from kvtier.protos.v1.admin_pb2 import GetStatusResponse
from kvtier.server.telemetry import http
from kvtier.server.telemetry.http import MetricsServer, MetricsServerError, OnceASecond, on_loop
from kvtier.server.telemetry.status_page import SECURITY_HEADERS, StatusPage

REGISTRY = CollectorRegistry()


@pytest.fixture
def server(no_leaks: None) -> Iterator[MetricsServer]:  # noqa: ARG001 - is to watch
    """Yields the endpoint of an empty registry, on a free port."""
    server = MetricsServer("127.0.0.1:0", REGISTRY)
    yield server
    server.close()


class TestEndpoint:
    def test_health_status(self, no_leaks: None) -> None:
        """The endpoint /healthz answers 200, or 503 with the problem or exception."""
        trouble: list[Any] = [None, "draining", TimeoutError()]

        def health() -> str | None:
            said = trouble.pop(0)
            if isinstance(said, Exception):
                raise said
            return said

        server = MetricsServer("127.0.0.1:0", REGISTRY, health)
        try:
            assert get(server.port, "/healthz")[::2] == (200, "ok\n")
            assert get(server.port, "/healthz")[::2] == (503, "draining\n")
            assert get(server.port, "/healthz")[::2] == (503, "no answer from the server: TimeoutError\n")
        finally:
            server.close()

    def test_other_requests(self, server: MetricsServer) -> None:
        """Other paths are not found, HEAD has no body, and other methods are refused."""
        assert get(server.port, "/")[0] == 404
        assert get(server.port, "/metrics", "HEAD")[::2] == (200, "")
        assert get(server.port, "/metrics?x=1")[0] == 200
        assert get(server.port, "/metrics", "POST") == (405, "text/plain; charset=utf-8", "only GET and HEAD\n")

    @pytest.mark.parametrize(
        ("request_", "status"),
        [
            (b"POST / HTTP/1.1\r\nContent-Length: 2\r\n\r\nhi", 405),
            (b"PUT /metrics HTTP/1.1\r\n\r\n", 405),
            (b"OPTIONS * HTTP/1.0\r\n\r\n", 405),
            (b"GET / HTTP/1.1 <b>\r\n\r\n", 400),
            (b"<script>\r\n\r\n", 400),
            (b"GET / HTTP/2.0\r\n\r\n", 505),
            (b"GET /".ljust(65537, b"a"), 414),  # an unread byte would reset the connection
            (b"GET / HTTP/1.1\r\n" + b"a: ".ljust(65537, b"a"), 431),
            (b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 101, 431),
        ],
        ids=lambda value: f"{value[:16]}" if isinstance(value, bytes) else "",
    )
    def test_refusals_are_plain_text(self, server: MetricsServer, request_: bytes, status: int) -> None:
        """They have the headers of every other answer, and the connection ends."""
        said = "only GET and HEAD" if status == 405 else HTTPStatus(status).phrase.lower()
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
            connection.sendall(request_)
            answer = HTTPResponse(connection)
            answer.begin()
            assert (answer.status, answer.read().decode()) == (status, f"{said}\n")
            assert answer.headers["Content-Type"] == "text/plain; charset=utf-8"
            assert answer.headers["Allow"] == ("GET, HEAD" if status == 405 else None)
            assert (answer.headers["Connection"], connection.recv(1)) == ("close", b"")
            assert {name: answer.headers[name] for name in SECURITY_HEADERS} == SECURITY_HEADERS
            assert "Python" not in answer.headers["Server"]

    def test_a_used_port_is_named(self, server: MetricsServer) -> None:
        """The error is one line."""
        with pytest.raises(MetricsServerError, match=rf"^metrics = 127.0.0.1:{server.port}: .*Address already in use$"):
            MetricsServer(f"127.0.0.1:{server.port}", REGISTRY)

    @pytest.mark.parametrize("address", ["no-such-host.invalid:1", "192.0.2.1:1"])
    def test_an_address_of_another_host_is_named(self, no_leaks: None, address: str) -> None:
        with pytest.raises(MetricsServerError, match="cannot listen: "):
            MetricsServer(address, REGISTRY)

    def test_listens_on_ipv6(self) -> None:
        """The test needs a host with IPv6."""
        try:
            server = MetricsServer("[::1]:0", REGISTRY)
        except MetricsServerError as error:
            pytest.skip(str(error))
        server.close()

    def test_an_idle_connection_delays_neither_scrapes_nor_the_end(self) -> None:
        server = MetricsServer("127.0.0.1:0", REGISTRY)
        with socket.create_connection(("127.0.0.1", server.port)):
            assert get(server.port, "/metrics")[0] == 200
            started = time.monotonic()
            server.close()
            server.close()
            assert time.monotonic() - started < 9


class TestOnceASecond:
    def test_all_threads_get_one_result(self) -> None:
        """They wait while one of them reads."""
        reads: list[int] = []

        def read() -> int:
            reads.append(1)
            time.sleep(0.05)
            return len(reads)

        cached = OnceASecond(read)
        with ThreadPoolExecutor(8) as executor:
            assert {each.result() for each in [executor.submit(cached) for _ in range(64)]} == {1}

    def test_a_result_ages(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Exceptions, too: a loop that does not answer is asked once a second."""
        now = 0.0
        monkeypatch.setattr(http, "time", SimpleNamespace(monotonic=lambda: now))
        results: list[Any] = [1, TimeoutError(), 3]

        def read() -> int:
            result = results.pop(0)
            if isinstance(result, Exception):
                raise result
            return int(result)

        cached = OnceASecond(read)
        assert [cached(), cached()] == [1, 1]
        now += 1
        for _ in range(2):
            with pytest.raises(TimeoutError):
                cached()
        now += 1
        assert cached() == 3


class TestPace:
    def test_turns_after_a_burst_wait(self) -> None:
        pace, began = http._Pace(20.0), time.monotonic()
        taken = 0
        while time.monotonic() - began < 0.3:
            assert pace.wait()
            taken += 1
        assert 21 <= taken <= 21 + 20 * (time.monotonic() - began) + 1

    def test_a_connection_with_fewer_answers_is_next(self) -> None:
        """It does not wait for connections that fetch in a loop."""
        pace, served = http._Pace(10.0), list[str]()
        for _ in range(11):
            pace.wait()

        def wait(name: str, answers: int) -> None:
            assert pace.wait(name, answers)
            served.append(name)

        with ThreadPoolExecutor(9) as threads:
            for number in range(8):
                threads.submit(wait, f"flood {number}", 100)
            wait_until(lambda: len(pace._waiting) == 8 - len(served))
            before = len(served)
            threads.submit(wait, "scraper", 1).result(60)
        assert served.index("scraper") <= before + 2

    def test_a_closed_connection_does_not_wait(self) -> None:
        pace = http._Pace(1.0)
        pace._next = time.monotonic() + 3600
        with ThreadPoolExecutor(2) as threads:
            waits = [threads.submit(pace.wait, name) for name in ("a", "b")]
            wait_until(lambda: len(pace._waiting) == 2)
            pace.forget("a")
            assert not waits[0].result(60)
            pace.forget("b")
            assert not waits[1].result(60)
        assert not pace.wait("c", is_open=lambda: False)


class TestHosts:
    def test_names_of_the_server_are_known(self) -> None:
        """The port and the case do not matter."""
        known = ["kv.example", "KV.example:9464", "10.0.0.1", "[fe80::1]:80", "localhost.", "x.localhost:1"]
        assert all(http._is_known(host, {"kv.example"}) for host in known)
        unknown = ["", "evil.example", "kv.example.evil", "10.0.0.1.evil", "::1.evil", "[evil]", "localhostx"]
        assert not any(http._is_known(host, {"kv.example"}) for host in unknown)

    def test_all_hosts_of_a_request_must_be_known(self) -> None:
        server = MetricsServer("127.0.0.1:0", REGISTRY, page=StatusPage(GetStatusResponse), names=set())
        try:
            with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
                connection.sendall(b"GET /status.json HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n")
                assert connection.recv(12) == b"HTTP/1.1 421"
        finally:
            server.close()


class TestOnLoop:
    async def test_reads_run_on_the_loop(self) -> None:
        """The result or exception is passed to the calling thread."""
        loop = asyncio.get_running_loop()
        assert await asyncio.to_thread(on_loop(loop, threading.current_thread)) is threading.current_thread()
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(on_loop(loop, lambda: 1 // 0))

    async def test_a_busy_loop_is_a_timeout(self) -> None:
        """The read does not happen afterwards."""
        reads: list[int] = []
        read = on_loop(asyncio.get_running_loop(), lambda: reads.append(1), timeout=0.05)
        with ThreadPoolExecutor(1) as aside:
            assert isinstance(aside.submit(read).exception(20), TimeoutError), "this keeps the loop busy"
        await asyncio.to_thread(stays, lambda: not reads, 0.02)

    def test_a_closed_loop_is_an_error(self) -> None:
        loop = asyncio.new_event_loop()
        loop.close()
        with pytest.raises(RuntimeError):
            on_loop(loop, lambda: 1)()
