"""Attacks on the metrics port: fetches in a loop, slow readers, and pages of other sites."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPException
from pathlib import Path

import pytest
from harness.auth_site import KEYS, PART, Site, make_site, ready_line
from harness.http_get import get, get_raw
from harness.payloads import assert_serves, payload
from harness.polling import wait_until
from prometheus_client.parser import text_string_to_metric_families


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A server whose figures need no token."""
    made = make_site(tmp_path_factory.mktemp("m"), config='metrics = "127.0.0.1:0"')
    with made.server.start():
        yield made


@pytest.fixture(scope="module")
def port(site: Site) -> int:
    return int(ready_line(site.server)["metrics_port"])


def test_fetches_in_a_loop_are_bounded(site: Site, port: int) -> None:
    """Sixteen clients share the figures of a second, and get a limited number of answers.

    Calls, scrapes and probes are served meanwhile.
    """
    answers = dict.fromkeys(("/metrics", "/status.json", "/healthz", "/none"), 0)
    bodies: dict[str, set[bytes]] = {path: set() for path in answers}
    ended, lock = threading.Event(), threading.Lock()

    def fetch(path: str, *, keep: bool) -> None:
        connection = HTTPConnection("127.0.0.1", port, timeout=60)
        while not ended.is_set():
            with contextlib.suppress(OSError):
                connection.request("GET", path)
                body = connection.getresponse().read()
                with lock:
                    answers[path] += 1
                    bodies[path].add(body)
            if not keep:
                connection.close()
        connection.close()

    threads = [
        threading.Thread(target=fetch, args=(path,), kwargs={"keep": keep})
        for path in answers
        for keep in (True, False) * 2
    ]
    with site.client("zeta-engine", tenant="zeta") as client:
        client.wait_until_connected(60)
        began = uptime(port)
        for thread in threads:
            thread.start()
        try:
            client.store(KEYS, [payload(key, PART) for key in KEYS])
            for _ in range(20):
                assert_serves(client, KEYS)
                assert get(port, "/healthz")[2] == "ok\n"
            wait_until(lambda: answers["/metrics"] >= 50)
        finally:
            ended.set()
            for thread in threads:
                thread.join()
        seconds = uptime(port) - began + 2  # the two figures may be a second old
    assert answers["/metrics"] + answers["/status.json"] + answers["/none"] <= (50 + 200) * (seconds + 1)
    assert answers["/healthz"] <= (50 + 200) * (seconds + 1)
    for path in ("/metrics", "/status.json"):
        assert len(bodies[path]) <= seconds + 2, "collected more than once a second"


def test_a_flood_of_connections_delays_no_probe(site: Site, port: int) -> None:
    """Each asks for the health, many times. A probe from the same address gets its answer."""
    ended = threading.Event()

    def flood() -> None:
        kept: list[socket.socket] = []
        while not ended.is_set():
            with contextlib.suppress(OSError):
                kept.append(socket.create_connection(("127.0.0.1", port), 5))
                kept[-1].sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n" * 10)
            if len(kept) > 100:
                kept.pop(0).close()
        for connection in kept:
            connection.close()

    def has_given_way() -> bool:
        return len(list(Path(f"/proc/{site.server.pid}/task").iterdir())) > 64

    threads = [threading.Thread(target=flood) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        wait_until(has_given_way)
        answered = 0
        for _ in range(10):  # a slow machine may let a probe be the oldest connection
            with contextlib.suppress(OSError, HTTPException):
                answered += get(port, "/healthz")[2] == "ok\n"
        assert answered >= 5
    finally:
        ended.set()
        for thread in threads:
            thread.join()


@pytest.mark.parametrize("keep", [True, False], ids=["connections that stay", "new connections"])
def test_a_scraper_gets_figures_beside_a_flood_from_its_address(port: int, *, keep: bool) -> None:
    """A scraper that keeps its connection, as Prometheus does, and one that opens new ones."""
    ended = threading.Event()

    def flood() -> None:
        connection = HTTPConnection("127.0.0.1", port, timeout=60)
        while not ended.is_set():
            with contextlib.suppress(OSError, HTTPException):
                connection.request("GET", "/metrics")
                if keep:
                    connection.getresponse().read()
            if not keep:
                connection.close()
        connection.close()

    threads = [threading.Thread(target=flood) for _ in range(60 if keep else 4)]
    for thread in threads:
        thread.start()
    scraper = HTTPConnection("127.0.0.1", port, timeout=60)
    answered = 0
    try:
        for number in range(10):
            path = ("/metrics", "/status.json")[number % 2]
            with contextlib.suppress(OSError, HTTPException):
                answered += get(port, path)[0] == 200
            for _ in range(2):  # replaces a closed connection, as Prometheus does
                with contextlib.suppress(OSError, HTTPException):
                    scraper.request("GET", path)
                    answered += scraper.getresponse().read() != b""
                    break
                scraper.close()
    finally:
        ended.set()
        for thread in threads:
            thread.join()
        scraper.close()
    assert answered >= 15


def uptime(port: int) -> float:
    families = text_string_to_metric_families(get(port, "/metrics")[2])
    return float(next(family.samples[0].value for family in families if family.name == "kvtier_uptime_seconds"))


def test_slow_readers_occupy_a_bounded_number_of_threads(site: Site, port: int) -> None:
    """A hundred connections that read nothing hold at most 64 threads."""

    def threads() -> int:
        return len(list(Path(f"/proc/{site.server.pid}/task").iterdir()))

    before = threads()
    with contextlib.ExitStack() as opened:
        for _ in range(100):
            connection = opened.enter_context(socket.create_connection(("127.0.0.1", port), 60))
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            with contextlib.suppress(OSError):
                connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n" * 20)
        wait_until(lambda: threads() <= before + 64)
        assert get(port, "/healthz")[2] == "ok\n"
        assert get(port, "/metrics")[0] == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:9464", "127.0.0.1.evil.example", "localhost.evil", "[::1"]
)
def test_pages_of_other_sites_read_no_figures(port: int, host: str) -> None:
    """A page whose name was changed to this address (DNS rebinding) gets no figures."""
    browser = {"Host": host, "Accept-Language": "en"}
    for path, headers in (("/status.json", {"Host": host}), ("/status.json", browser), ("/metrics", browser)):
        assert get_raw(port, path, **headers)[0] == 421


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "[::1]:9464", "10.1.2.3:9464", "localhost:9464", "LOCALHOST.", "a.localhost"]
)
def test_known_names_are_served(port: int, host: str) -> None:
    for path in ("/", "/status.json", "/metrics"):
        assert get_raw(port, path, **{"Host": host, "Accept-Language": "en"})[0] == 200


def test_scrapers_may_use_any_name(port: int) -> None:
    """Prometheus uses for example the name of a service, and sends no header of a browser."""
    assert get_raw(port, "/metrics", Host="kvtier.inference.svc:9464")[0] == 200
    assert get_raw(port, "/healthz", Host="kvtier.inference.svc:9464")[0] == 200
