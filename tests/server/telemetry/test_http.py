"""The HTTP endpoint of metrics and health."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from http.client import HTTPConnection, HTTPResponse
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from kvtier.server.telemetry.http import MetricsServer, MetricsServerError, on_loop
from kvtier.server.telemetry.status_page import SECURITY_HEADERS

REGISTRY = CollectorRegistry()


@pytest.fixture
def server(no_leaks: None) -> Iterator[MetricsServer]:  # noqa: ARG001 - is to watch
    """The endpoint of an empty registry, on any port."""
    server = MetricsServer("127.0.0.1:0", REGISTRY)
    yield server
    server.close()


def get(port: int, path: str, method: str = "GET", **headers: str) -> tuple[int, str, str]:
    """Returns status, content type and body."""
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request(method, path, headers=headers)
        response = connection.getresponse()
        return response.status, response.headers["Content-Type"], response.read().decode()
    finally:
        connection.close()


class TestEndpoint:
    def test_health(self, no_leaks: None) -> None:
        """/healthz answers 200 while there is nothing to say, and 503 with what there is, be it an exception."""
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
            (b"GET /".ljust(65537, b"a"), 414),  # and not a byte that nobody reads: it would be a reset
            (b"GET / HTTP/1.1\r\n" + b"a: ".ljust(65537, b"a"), 431),
            (b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 101, 431),
        ],
        ids=lambda value: f"{value[:16]}" if isinstance(value, bytes) else "",
    )
    def test_refusals(self, server: MetricsServer, request_: bytes, status: int) -> None:
        """What is refused is refused in plain text, with the headers of every other answer, and ends the connection."""
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

    def test_port_in_use(self, server: MetricsServer) -> None:
        """A port that is taken is an error at once, in one line that names it."""
        with pytest.raises(MetricsServerError, match=rf"^metrics = 127.0.0.1:{server.port}: .*Address already in use$"):
            MetricsServer(f"127.0.0.1:{server.port}", REGISTRY)

    @pytest.mark.parametrize("address", ["no-such-host.invalid:1", "192.0.2.1:1"])
    def test_address_of_others(self, no_leaks: None, address: str) -> None:
        """So is an address that is not this host's."""
        with pytest.raises(MetricsServerError, match="cannot listen there"):
            MetricsServer(address, REGISTRY)

    def test_ipv6(self) -> None:
        """It listens on IPv6 where there is one."""
        try:
            server = MetricsServer("[::1]:0", REGISTRY)
        except MetricsServerError as error:
            pytest.skip(str(error))
        server.close()

    def test_idle_connection_does_not_hold_up_the_end(self) -> None:
        """A client that connects and says nothing keeps nobody from scraping or closing."""
        server = MetricsServer("127.0.0.1:0", REGISTRY)
        with socket.create_connection(("127.0.0.1", server.port)):
            assert get(server.port, "/metrics")[0] == 200
            started = time.monotonic()
            server.close()
            server.close()
            assert time.monotonic() - started < 9


class TestOnLoop:
    async def test_runs_on_the_loop(self) -> None:
        """What is read on the loop is read on its thread; its result and its exception come back."""
        loop = asyncio.get_running_loop()
        assert await asyncio.to_thread(on_loop(loop, threading.current_thread)) is threading.current_thread()
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(on_loop(loop, lambda: 1 // 0))

    async def test_gives_up_on_a_busy_loop(self) -> None:
        """A loop that is busy for too long is a timeout, and the read does not happen afterwards."""
        reads: list[int] = []
        read = on_loop(asyncio.get_running_loop(), lambda: reads.append(1), timeout=0.05)
        with ThreadPoolExecutor(1) as aside:
            assert isinstance(aside.submit(read).exception(20), TimeoutError), "this keeps the loop busy"
        await asyncio.sleep(0)
        assert not reads

    def test_closed_loop(self) -> None:
        """A loop that has ended is an error at once."""
        loop = asyncio.new_event_loop()
        loop.close()
        with pytest.raises(RuntimeError):
            on_loop(loop, lambda: 1)()
