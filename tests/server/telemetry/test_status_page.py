"""The status page over HTTP: files, access, and restrictions for browsers."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from harness.http_get import get_raw as get
from harness.launch import launch
from prometheus_client import CollectorRegistry

from kvtier.protos.v1.admin_pb2 import GetStatusResponse, MissCount, MissReason, TierStatus
from kvtier.server.telemetry import status_page
from kvtier.server.telemetry.http import MetricsServer
from kvtier.server.telemetry.status_page import SECURITY_HEADERS, StatusPage

ROOT = Path(__file__).parents[3]

FOLDER = Path(status_page.__file__).parent / "page"
FILES = sorted(FOLDER.iterdir())
STATUS = GetStatusResponse(
    server_version="1",
    epoch=0xABC,
    tiers=[TierStatus(name="cpu", hits=3, misses=1, capacity_bytes=8, used_bytes=2)],
    lookup_keys=4,
    misses=[MissCount(reason=MissReason.MISS_REASON_EVICTED, keys=1)],
)


Start = Callable[..., MetricsServer]


@pytest.fixture
def start(no_leaks: None) -> Iterator[Start]:  # noqa: ARG001 - is to watch
    """Returns a function that starts endpoints; closes them at the end."""
    servers: list[MetricsServer] = []

    def make(status: Callable[[], GetStatusResponse] = lambda: STATUS, **more: Callable[..., object]) -> MetricsServer:
        servers.append(MetricsServer("127.0.0.1:0", CollectorRegistry(), page=StatusPage(status), **more))
        return servers[-1]

    yield make
    for server in servers:
        server.close()


class TestServing:
    def test_page_and_its_files(self, start: Start) -> None:
        """`/` is the page; each file that it names is served with its type."""
        port = start().port
        status, headers, body = get(port, "/")
        assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
        named = set(re.findall(r'(?:src|href)="([^"#]+)"', body.decode()))
        assert {"page.js", "page.css", "icon.svg", "status.json"} <= named
        for name in named:
            assert get(port, f"/{name}")[0] == 200, name
        assert get(port, "/page.js")[1]["Content-Type"] == "text/javascript; charset=utf-8"
        assert get(port, "/page.css")[1]["Content-Type"] == "text/css; charset=utf-8"
        assert get(port, "/", "HEAD")[2] == b""

    def test_imported_scripts_are_served(self, start: Start) -> None:
        port = start().port
        scripts = [file.read_text() for file in FILES if file.suffix == ".js"]
        imported = {name for text in scripts for name in re.findall(r'from "\./([^"]+)"', text)}
        assert len(imported) >= 4
        for name in imported:
            assert get(port, f"/{name}")[0] == 200, name

    def test_figures_are_the_status_as_json(self, start: Start) -> None:
        status, headers, body = get(start().port, "/status.json")
        values = json.loads(body)
        assert (status, headers["Content-Type"], headers["Cache-Control"]) == (200, "application/json", "no-store")
        assert (values["epoch"], values["lookup_keys"]) == ("0000000000000abc", 4)
        assert values["misses"] == [{"reason": "evicted", "keys": 1}]
        assert (values["tiers"][0]["hit_rate"], values["tiers"][0]["fill"]) == (0.75, 0.25)

    def test_a_server_that_does_not_answer_gives_503(self, start: Start) -> None:
        """The answer names the reason; the page itself is served."""

        def fail() -> GetStatusResponse:
            raise TimeoutError

        port = start(fail).port
        status, _, body = get(port, "/status.json")
        assert (status, json.loads(body)) == (503, {"error": "no answer from the server: TimeoutError"})
        assert get(port, "/")[0] == 200

    def test_no_other_file_is_served(self, start: Start) -> None:
        """Any other path is not found, and methods that change something are refused."""
        port = start().port
        for path in ("/index.html", "/status_page.py", "/../status_page.py", "/%2e%2e/status_page.py", "/page"):
            assert get(port, path)[0] == 404, path
        for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
            assert get(port, "/status.json", method)[0] == 405, method

    def test_figures_need_admission(self, start: Start) -> None:
        """The page, which asks for a token, and the health status are public."""
        asked: list[str | None] = []

        def admits(authorization: str | None) -> bool:
            asked.append(authorization)
            return authorization == "Bearer secret"

        port = start(admits=admits).port
        for path in ("/status.json", "/metrics", "/nothing"):
            status, headers, body = get(port, path)
            assert (status, headers["WWW-Authenticate"]) == (401, "Bearer"), path
            assert b"cpu" not in body
            assert get(port, path, Authorization="Bearer wrong")[0] == 401, path
        assert get(port, "/status.json", Authorization="Bearer secret")[0] == 200
        assert get(port, "/metrics", Authorization="Bearer secret")[0] == 200
        assert len(asked) == 8
        for path in ("/", "/page.js", "/page.css", "/healthz"):
            assert get(port, path)[0] == 200, path
        assert len(asked) == 8


class TestTrust:
    def test_every_answer_restricts_the_browser(self, start: Start) -> None:
        """A browser may load only the page's own files."""
        port = start().port
        for path in ("/", "/page.js", "/status.json", "/metrics", "/nothing"):
            headers = get(port, path)[1]
            for name, value in SECURITY_HEADERS.items():
                assert headers[name] == value, (path, name)
            assert headers["Server"] == "kvtier"
        policy = SECURITY_HEADERS["Content-Security-Policy"]
        assert policy.startswith("default-src 'none'; ")
        for weakness in ("unsafe", "*", "data:", "http"):
            assert weakness not in policy

    @pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
    def test_files_are_self_contained(self, file: Path) -> None:
        """No external resource, no inline script or style, and no markup from text."""
        text = file.read_text()
        addresses = set(re.findall(r"https?://[^\s\"')]+", text))
        assert addresses <= {"http://www.w3.org/2000/svg"}, "the name of SVG, which is never fetched"
        for forbidden in (
            "innerHTML",
            "outerHTML",
            "insertAdjacent",
            "document.write",
            "eval(",
            "new Function",
            "DOMParser",
        ):
            assert forbidden not in text
        if file.suffix == ".html":
            assert not re.search(r"<script(?![^>]*\ssrc=)|<style|\sstyle=|\son\w+=|javascript:", text)


def test_same_as_the_command(tmp_path: Path) -> None:
    """A real server's page has the figures of `kvtier status --json`."""
    with launch(tmp_path, "--metrics", "127.0.0.1:0") as server:
        port = server.wait_ready()["metrics_port"]
        command = [sys.executable, "-m", "kvtier.server", "status", "--json", "--endpoint", f"unix:{tmp_path}/s"]
        told = json.loads(subprocess.run(command, capture_output=True, check=True, timeout=60).stdout)
        page = json.loads(get(port, "/status.json")[2])
        assert page.pop("uptime_seconds") >= told.pop("uptime_seconds") > 0
        # two readings at different times
        assert min(page.pop("loop_lag_seconds"), told.pop("loop_lag_seconds")) >= 0
        assert page == told
        assert server.end() == 0


def test_a_tier_with_an_error_is_in_trouble_everywhere() -> None:
    """Status page, commands, documentation and alerts use one word, so that a search finds all."""
    texts = [
        path
        for folder in ("server/telemetry/page", "server/commands", "server/doctor", "docs", "dashboards")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".js", ".html", ".py", ".md", ".yml") and "decisions" not in path.parts
    ]
    assert len(texts) > 50
    assert [
        path.name for path in texts if re.search(r"\b(degraded|unhealthy)\b", path.read_text(), re.IGNORECASE)
    ] == []
    assert "in trouble" in (ROOT / "server/telemetry/page/page.js").read_text()
