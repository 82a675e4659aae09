"""HTTP endpoint: `/metrics` for Prometheus, `/healthz` for supervisors, and the status page.

HTTP threads share the interpreter with the event loop. So the number of connections, of answers and
of collections per second is limited, independently of the number of clients.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import itertools
import json
import logging
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Generic, TypeVar

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from ...protos.endpoint import network_of, parse_endpoint
from .status_page import SECURITY_HEADERS, StatusPage

__all__ = ["BoundedHTTPServer", "MetricsServer", "MetricsServerError", "OnceASecond", "on_loop"]

_CONNECTION_SECONDS = 30.0
"""Maximum lifetime of a connection; then the server closes it. A scrape takes less time."""
_MAX_CONNECTIONS = 64
_CONNECTIONS_PER_SECOND = 200.0
_ANSWERS_PER_SECOND = 50.0
"""Further answers of connections. An answer takes the interpreter for 0.3 to 0.5 ms. Eight clients
that fetched in a loop without this limit raised the p99 of calls from 2.5 to 230 ms."""
_PROBES_PER_SECOND = 50.0
"""The same for further health probes."""


class _Pace:
    """Rate limit with a burst of a second. Threads wait for their turn. Thread-safe.

    A connection with fewer answers is served first, so that a scraper does not wait for clients
    that fetch in a loop.
    """

    def __init__(self, per_second: float) -> None:
        self._interval = 1.0 / per_second
        self._lock = threading.Lock()
        self._next = 0.0
        self._numbers = itertools.count()
        self._waiting: dict[object, tuple[int, int, threading.Event]] = {}
        """Number of answers, arrival, and event of each waiting connection."""

    def wait(self, connection: object = None, answers: int = 0, is_open: Callable[[], bool] = lambda: True) -> bool:
        """Waits for the turn of a connection that has had this number of answers.

        Returns False if the connection is not open, or after `forget`.
        """
        mine = answers, next(self._numbers), threading.Event()
        with self._lock:
            self._waiting[connection] = mine
        if not is_open():
            self.forget(connection)
        while True:
            with self._lock:
                if self._waiting.get(connection) is not mine:
                    return False
                now, seconds = time.monotonic(), None
                if min(self._waiting.values()) is mine:
                    turn = max(self._next, now - 1.0)
                    if turn <= now:
                        self._next = turn + self._interval
                        del self._waiting[connection]
                        self._wake_next()
                        return True
                    seconds = turn - now
            mine[2].wait(seconds)
            mine[2].clear()

    def forget(self, connection: object) -> None:
        """Ends the wait of a connection that is closed."""
        with self._lock:
            found = self._waiting.pop(connection, None)
            if found is not None:
                found[2].set()
                self._wake_next()

    def _wake_next(self) -> None:
        if self._waiting:
            min(self._waiting.values())[2].set()


@dataclass(slots=True)
class _Connection:
    network: str
    closes_at: float
    answers: int = 0


class BoundedHTTPServer(ThreadingHTTPServer):
    """HTTP server with at most 64 connections, each for at most 30 s.

    If 64 connections are open, the server closes one of the network with most of them when it
    accepts a new one: that with the most answers, or the oldest of these. So health probes and
    scrapers can always connect.
    """

    request_queue_size = 128
    _connections: dict[socket.socket, _Connection]
    """Open connections, the oldest first."""
    _lock: threading.Lock
    _accepted: _Pace

    def server_activate(self) -> None:
        self._connections, self._lock, self._accepted = {}, threading.Lock(), _Pace(_CONNECTIONS_PER_SECOND)
        super().server_activate()

    def process_request(self, request: Any, client_address: Any) -> None:
        self._accepted.wait()
        closed = None
        with self._lock:
            if len(self._connections) >= _MAX_CONNECTIONS:
                ((fullest, _),) = Counter(each.network for each in self._connections.values()).most_common(1)
                closed = max(
                    (each for each, found in self._connections.items() if found.network == fullest),
                    key=lambda each: self._connections[each].answers,
                )
                del self._connections[closed]
            closes_at = time.monotonic() + _CONNECTION_SECONDS
            self._connections[request] = _Connection(network_of(client_address[0]), closes_at)
        if closed is not None:
            self.shut_down(closed)
        super().process_request(request, client_address)

    def count_answer(self, request: socket.socket) -> int | None:
        """Counts an answer; returns the number of earlier ones, None if closed."""
        with self._lock:
            found = self._connections.get(request)
            if found is None:
                return None
            found.answers += 1
            return found.answers - 1

    def is_open(self, request: socket.socket) -> bool:
        """Returns whether the server has not closed the connection."""
        with self._lock:
            return request in self._connections

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._connections.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Closes connections that are too old. The base class calls this several times a second."""
        now = time.monotonic()
        with self._lock:
            late = [request for request, found in self._connections.items() if found.closes_at <= now]
        for request in late:
            self.shut_down(request)

    def shut_down(self, request: socket.socket) -> None:
        """Wakes the thread that serves the connection; the thread then closes the connection."""
        with contextlib.suppress(OSError):
            request.shutdown(socket.SHUT_RDWR)


T = TypeVar("T")

Health = Callable[[], str | None]

_REQUEST_SECONDS = 10.0
_MAX_AGE_SECONDS = 1.0
"""Maximum age of figures. All clients within this time get the same."""
_FORMATS = {True: "application/openmetrics-text; version=1.0.0", False: ""}
"""Accepted formats of metrics. With further ones, clients could cause more collections."""
_BROWSER_HEADERS = ("Accept-Language", "Origin", "Referer", "Sec-Fetch-Mode")
"""Headers of which a browser sends at least one, and a scraper none."""
_TEXT = "text/plain; charset=utf-8"


class MetricsServerError(Exception):
    """The endpoint cannot listen on its address; the message is one line."""


def on_loop(loop: asyncio.AbstractEventLoop, read: Callable[[], T], timeout: float = 2.0) -> Callable[[], T]:
    """Wraps `read` so that other threads run it on the event loop, which owns the state.

    The wrapper raises `TimeoutError` if the loop does not run `read` in time, and `RuntimeError` if
    the loop is closed.
    """

    def read_on_loop() -> T:
        result: Future[T] = Future()

        def run() -> None:
            if not result.set_running_or_notify_cancel():
                return
            try:
                result.set_result(read())
            except BaseException as error:  # noqa: BLE001 - raised again by the thread that waits
                result.set_exception(error)

        loop.call_soon_threadsafe(run)
        try:
            return result.result(timeout)
        except TimeoutError:
            result.cancel()
            raise

    return read_on_loop


class OnceASecond(Generic[T]):
    """Result or exception of `read`, which is called at most once a second. Thread-safe.

    While a thread reads, the others wait for its result.
    """

    def __init__(self, read: Callable[[], T]) -> None:
        self._read = read
        self._lock = threading.Lock()
        self._result: Future[T] | None = None
        self._read_at = 0.0

    def __call__(self) -> T:
        with self._lock:
            if self._result is None or time.monotonic() - self._read_at >= _MAX_AGE_SECONDS:
                result: Future[T] = Future()
                try:
                    result.set_result(self._read())
                except Exception as error:  # noqa: BLE001 - raised for each caller
                    result.set_exception(error)
                self._result, self._read_at = result, time.monotonic()
            result = self._result
        return result.result()


class MetricsServer:
    """Serves metrics, health and the optional status page on its own threads until `close`.

    `health` returns None if the server is healthy, otherwise the reason. HTTP threads call
    `health`. Raises `MetricsServerError` if the address is not available.
    """

    def __init__(
        self,
        address: str,
        registry: CollectorRegistry,
        health: Health = lambda: None,
        admits: Callable[[str | None], bool] = lambda _: True,
        *,
        page: StatusPage | None = None,
        names: Collection[str] | None = None,
    ) -> None:
        """`admits` checks the `Authorization` header; `/healthz` and page files are exempt.

        `names`: names in the header `Host`, besides IP addresses and localhost, with which
        browsers may read figures; None: all names. So a page of another site whose name has
        changed to this address (DNS rebinding) cannot read them.
        """
        endpoint = parse_endpoint(address)
        try:
            self._server = _Server((endpoint.host, endpoint.port), registry, health)
            self._server.admits = admits
            self._server.page = page
            if page is not None:
                self._server.status_json = OnceASecond(page.status_json)
            self._server.names = names
        except OSError as error:
            raise MetricsServerError(f"metrics = {address}: cannot listen: {error.strerror}") from None
        self.port: int = self._server.server_address[1]
        """Port that the server listens on. If the address has port 0, the kernel chooses a port."""
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="kvtier-metrics", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stops listening and waits for the accepting thread, but not for requests. Idempotent."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(BoundedHTTPServer):
    daemon_threads = True
    admits: Callable[[str | None], bool]
    page: StatusPage | None = None
    status_json: Callable[[], bytes]
    names: Collection[str] | None = None
    block_on_close = False

    def __init__(self, address: tuple[str, int], registry: CollectorRegistry, health: Health) -> None:
        self.figures = {accept: OnceASecond(partial(_encoded, registry, accept)) for accept in _FORMATS.values()}
        self.health = health
        self.answers, self.probes = _Pace(_ANSWERS_PER_SECOND), _Pace(_PROBES_PER_SECOND)
        self.address_family, *_ = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0]
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        """Binds without the reverse DNS lookup of `HTTPServer`, which can take seconds."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if self.server_address[0] == "::":  # accepts IPv4 too, also with net.ipv6.bindv6only = 1
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def shut_down(self, request: socket.socket) -> None:
        super().shut_down(request)
        for pace in (self.answers, self.probes):
            pace.forget(request)

    def handle_error(self, request: object, client_address: object) -> None:
        logging.getLogger(__name__).debug("a request failed: %s", sys.exc_info()[1])


def _encoded(registry: CollectorRegistry, accept: str) -> tuple[str, bytes]:
    """Collects the metrics. Returns their content type and text."""
    encode, content_type = choose_encoder(accept)
    return content_type, encode(registry)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = _REQUEST_SECONDS
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        page = self.server.page
        file = page.file(path) if page else None
        if file:
            self._answer(HTTPStatus.OK, *file)
        elif path != "/healthz" and not self.server.admits(self.headers.get("Authorization")):
            body = b"this path requires a token with the role metrics\n"
            self._answer(HTTPStatus.UNAUTHORIZED, _TEXT, body)
        elif path != "/healthz" and not self._is_for_us(path):
            body = b"the name of the server in the request is not known; use an IP address or localhost\n"
            self._answer(HTTPStatus.MISDIRECTED_REQUEST, _TEXT, body)
        elif path == "/status.json" and page:
            self._send_status()
        elif path == "/metrics":
            accept = _FORMATS["application/openmetrics-text" in self.headers.get("Accept", "")]
            self._answer(HTTPStatus.OK, *self.server.figures[accept]())
        elif path == "/healthz":
            unhealthy = self._unhealthy()
            status = HTTPStatus.SERVICE_UNAVAILABLE if unhealthy else HTTPStatus.OK
            self._answer(status, _TEXT, f"{unhealthy or 'ok'}\n".encode())
        else:
            paths = "/, /status.json, /metrics, /healthz" if page else "/metrics, /healthz"
            self._answer(HTTPStatus.NOT_FOUND, _TEXT, f"{paths}\n".encode())

    def _is_for_us(self, path: str) -> bool:
        """Returns whether a browser may read this path under the name in the header `Host`.

        Scrapers may use any name, for example that of a service in Kubernetes.
        """
        names = self.server.names
        if names is None or (path == "/metrics" and not any(name in self.headers for name in _BROWSER_HEADERS)):
            return True
        return all(_is_known(host, names) for host in self.headers.get_all("Host", []))

    def do_HEAD(self) -> None:
        self.do_GET()

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Sends errors of the base class as plain text and closes the connection."""
        status = HTTPStatus(code)
        if status is HTTPStatus.NOT_IMPLEMENTED:  # the handler has no do_METHOD
            status = HTTPStatus.METHOD_NOT_ALLOWED
        # Without a version, the base class would send no headers in answer to an invalid request.
        self.request_version = self.protocol_version
        self.close_connection = True
        text = "only GET and HEAD" if status is HTTPStatus.METHOD_NOT_ALLOWED else status.phrase.lower()
        self._answer(status, _TEXT, f"{text}\n".encode())

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        """Logs nothing, because scrapes are frequent."""

    def _send_status(self) -> None:
        try:
            status, body = HTTPStatus.OK, self.server.status_json()
        except Exception as error:  # noqa: BLE001 - the page reports a loop that does not answer
            status = HTTPStatus.SERVICE_UNAVAILABLE
            body = json.dumps({"error": f"no answer from the server: {type(error).__name__}"}).encode()
        self._answer(status, "application/json", body)

    def version_string(self) -> str:
        """Value of the `Server` header, without versions."""
        return "kvtier"

    def _is_open(self) -> bool:
        return self.server.is_open(self.request)

    def _unhealthy(self) -> str | None:
        try:
            return self.server.health()
        except Exception as error:  # noqa: BLE001 - a loop that does not answer is unhealthy
            return f"no answer from the server: {type(error).__name__}"

    def _answer(self, status: HTTPStatus, content_type: str, body: bytes) -> None:
        is_probe = getattr(self, "path", "").partition("?")[0] == "/healthz"
        pace = self.server.probes if is_probe else self.server.answers
        answers = self.server.count_answer(self.request)
        # The first answer of a connection has waited with its connection. If it waited again, then
        # a flood of connections from its address would close its connection before its turn.
        if answers is None or (answers and not pace.wait(self.request, answers, self._is_open)):
            raise ConnectionAbortedError("the connection has given way to another one")
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        for name, value in SECURITY_HEADERS.items():
            self.send_header(name, value)
        if status is HTTPStatus.UNAUTHORIZED:
            self.send_header("WWW-Authenticate", "Bearer")
        if status is HTTPStatus.METHOD_NOT_ALLOWED:
            self.send_header("Allow", "GET, HEAD")
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            with contextlib.suppress(ConnectionError):
                self.wfile.write(body)


def _is_known(host: str, names: Collection[str]) -> bool:
    """Returns whether a value of `Host` is an IP address, localhost, or one of the names."""
    name = host.rpartition("]")[0].removeprefix("[") or host.partition(":")[0]
    name = name.lower().removesuffix(".")
    if name == "localhost" or name.endswith(".localhost") or name in names:
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
