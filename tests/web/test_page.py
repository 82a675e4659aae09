"""The status page in a browser, beside a real server under load (`make test-web`).

Screenshots are in build/web.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness.payloads import key_of, namespace_of
from harness.server_process import MIB, ServerProcess
from web.browser import Browser
from web.load import PART, run_engines

from kvtier.client import Client, NotConnected

pytestmark = pytest.mark.web

REFUSED = "net::ERR_CONNECTION_REFUSED"
ENOUGH_KEYS = 15_000


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    """A server with a small CPU tier, and the page on a port that survives restarts."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    config = f'metrics = "127.0.0.1:{port}"'
    with ServerProcess(tmp_path, region=16 * MIB, lmdb=64 * MIB, config=config) as process:
        process.url = f"http://127.0.0.1:{port}/"  # type: ignore[attr-defined]
        yield process.start()


def open_page(browser: Browser, server: ServerProcess) -> None:
    """Opens the page of a server and waits for its values."""
    browser.open(server.url)  # type: ignore[attr-defined]
    browser.wait(lambda: browser.text("#state") == "serving", "the page has no figures")


def status_json(server: ServerProcess) -> dict[str, Any]:
    """The output of `kvtier status --json`."""
    command = [sys.executable, "-m", "kvtier.server", "status", "--json", "--endpoint", server.endpoint]
    values: dict[str, Any] = json.loads(subprocess.run(command, capture_output=True, check=True, timeout=30).stdout)
    return values


SHOWN = """
const rows = (place) => Object.fromEntries([...document.querySelectorAll(`#${place} tbody tr`)].map((line) => [
  line.dataset.key,
  Object.fromEntries([...line.children].map((cell) =>
    [cell.dataset.name ?? cell.dataset.scale, cell.dataset.value ?? cell.innerText])),
]));
const text = (id) => document.getElementById(id).innerText;
return {
  version: text("version"), epoch: text("epoch"), leases: text("leases"), stores: text("stores"), holds: text("holds"),
  keys: text("key-sub"), rate: Number(document.getElementById("total-rate").dataset.value),
  tiers: rows("tiers"), misses: rows("misses"), sessions: rows("sessions"),
  handoffs: rows("handoffs"), curve: rows("curve-table"),
};
"""


def expected(status: dict[str, Any]) -> dict[str, Any]:
    """The expected page for a status, in the form of `SHOWN`, without ages and bars."""
    hits = sum(tier["hits"] for tier in status["tiers"])
    tier_names = {
        "fill": "used_bytes",
        "damaged": "damaged_blocks",
        "health": "healthy",
        "stored": "stored_bytes",
        "loaded": "loaded_bytes",
        "disk_free": "free_disk_bytes",
    }
    tier_columns = ("health", "fill", "hits", "stored", "loaded", "jobs", "blocks", "damaged", "disk_free")
    counts = ("open", "published", "declined", "claimed", "claimed_bytes", "released", "expired", "dropped")
    return {
        "version": status["server_version"],
        "epoch": status["epoch"],
        "leases": f"{status['leases']:,}",
        "stores": f"{status['stores']:,}",
        "holds": f"{status['holds']:,}",
        "keys": f"{status['lookup_keys']:,} since start",
        "rate": hits / status["lookup_keys"],
        "tiers": {
            tier["name"]: {"tier": tier["name"]}
            | {column: json.dumps(tier[tier_names.get(column, column)]) for column in tier_columns}
            for tier in status["tiers"]
        },
        "misses": {miss["reason"]: json.dumps(miss["keys"]) for miss in status["misses"]},
        "sessions": {
            (it["engine_id"], it["client_name"], it["transport"], it["model"], it["namespace_id"], f"{it['leases']}")
            for it in status["sessions"]
        },
        "handoffs": {
            it["direction"]: {name: f"{it[name]}" for name in counts}
            for it in status["handoffs"]
            if it["published"] or it["declined"]
        },
        "curve": {
            tier["name"]: {f"{it['scale']:g}": it["hit_rate"] for it in tier["estimates"]} for tier in status["tiers"]
        },
    }


def shown(browser: Browser) -> dict[str, Any]:
    """The page's values, in the form of `expected`."""
    values: dict[str, Any] = browser.run(SHOWN)
    values["tiers"] = {key: {name: text.strip() for name, text in row.items()} for key, row in values["tiers"].items()}
    values["misses"] = {reason: row["keys"] for reason, row in values["misses"].items()}
    values["sessions"] = {
        (*row["engine"].split("\n"), row["transport"], *row["model"].split("\n"), row["leases"])
        for row in values["sessions"].values()
    }
    for row in values["handoffs"].values():
        del row["direction"]
    values["curve"] = {
        tier: {scale: float(value) for scale, value in row.items() if scale != "undefined"}
        for tier, row in values["curve"].items()
    }
    return values


def test_true_figures(server: ServerProcess, browser: Browser) -> None:
    """Every section shows the values of `kvtier status --json`, during and after the load."""
    with run_engines(server.endpoint) as stop:
        open_page(browser, server)
        before = server.wait_for(lambda status: status.lookup_keys > ENOUGH_KEYS and status.tiers[0].evictions, 60)
        seen = browser.run("return Number(document.querySelector('[data-key=cpu] [data-name=hits]').dataset.value)")
        assert seen > 0
        for scheme in ("light", "dark"):
            for width in (1280, 390):
                browser.look(scheme=scheme, width=width)
                browser.wait(lambda: browser.visible("#plot path"), "no curve")
                assert browser.run("return document.documentElement.scrollWidth <= innerWidth"), "it scrolls sideways"
                browser.screenshot(f"{scheme}-{width}")
        stop.set()
        server.wait_for(lambda status: status.holds == 0 and status.stores == 0 and status.leases == 0, 20)
        status: dict[str, Any] = {}

        def agrees() -> bool:
            nonlocal status
            status = status_json(server)
            return shown(browser) == expected(status)

        try:
            browser.wait(agrees, "the page shows other figures")
        except AssertionError:
            assert shown(browser) == expected(status)
            raise
        assert status["lookup_keys"] >= before.lookup_keys
        assert len(status["sessions"]) == 2
        assert {miss["reason"] for miss in status["misses"]} >= {"evicted", "never_stored"}
        assert all(len(tier["estimates"]) == 5 for tier in status["tiers"])
        paths = browser.run("return [...document.querySelectorAll('#plot path')].map((path) => path.dataset.tier)")
        assert paths == ["cpu", "lmdb"]
        fills = browser.run(
            "return [...document.querySelectorAll('#tiers .bar > span')].map((fill) => fill.style.width)"
        )
        assert [float(fill.rstrip("%")) / 100 for fill in fills] == pytest.approx(
            [tier["fill"] for tier in status["tiers"]], abs=1e-4
        )
        assert "16.0 MiB" in browser.text("[data-key=cpu] [data-name=fill]")
        assert browser.text("[data-key=lmdb] [data-name=stored]").splitlines()[0].endswith("B/s")
        assert browser.text("#sessions [data-name=age]").endswith((" s", "min"))
    assert browser.console_messages() == []


def test_updates_in_place(server: ServerProcess, browser: Browser) -> None:
    """Values change in place: rows stay the same nodes, and the focus stays."""
    with run_engines(server.endpoint, 1):
        open_page(browser, server)
        browser.wait(lambda: browser.visible("#sessions tbody tr"), "no session")
        browser.run("document.querySelector('[data-key=cpu]').mark = 1; document.getElementById('pause').focus()")
        hits = "[data-key=cpu] [data-name=hits]"
        seen: list[str] = []
        for _ in range(3):
            seen.append(browser.value(hits))
            browser.wait(lambda: browser.value(hits) not in seen, "values do not change")
        assert browser.run("return document.querySelector('[data-key=cpu]').mark") == 1
        assert browser.run("return document.activeElement.id") == "pause"
    browser.wait(lambda: browser.text("#session-count") == "0", "the session that ended stays")
    assert browser.visible("#sessions-none")
    assert browser.console_messages() == []


def test_pause(server: ServerProcess, browser: Browser) -> None:
    """A user can pause and resume the page, also with the keyboard."""
    open_page(browser, server)
    asked = "return performance.getEntriesByName(`${location}status.json`).length"
    browser.wait(lambda: browser.run(asked) > 1, "it does not ask")
    browser.press("Tab", "Tab", "Enter")
    assert browser.run("return document.activeElement.id") == "pause"
    assert browser.run("return document.activeElement.getAttribute('aria-pressed')") == "true"
    stopped = browser.run(asked)
    browser.run("return new Promise((done) => setTimeout(done, 3000))")
    assert browser.run(asked) <= stopped + 1, "one question may have been under way"
    browser.press("Enter")
    browser.wait(lambda: browser.run(asked) > stopped + 2, "it does not go on")


def test_end_and_return(server: ServerProcess, browser: Browser) -> None:
    """The page reports a missing server, keeps its last values, and continues after a restart."""
    open_page(browser, server)
    first = browser.text("#epoch")
    server.kill()
    browser.wait(lambda: browser.text("#state") == "no answer", "it does not notice")
    assert browser.text("#notice").startswith("No answer from the server since ")
    assert browser.text("#epoch") == first
    assert browser.run("return document.body.classList.contains('stale')")
    browser.screenshot("gone")
    server.start()
    browser.wait(lambda: browser.text("#state") == "serving", "it does not come back")
    assert browser.text("#epoch") != first
    assert browser.text("#notice").startswith("The server was restarted")
    assert not browser.run("return document.body.classList.contains('stale')")
    assert all(REFUSED in message for message in browser.console_messages())


def test_hanging_server(server: ServerProcess, browser: Browser) -> None:
    """A hanging server is distinguished from one that is gone."""
    open_page(browser, server)
    server.suspend()
    try:
        browser.wait(lambda: browser.text("#state") == "no answer", "it does not notice", 30)
        assert browser.text("#notice").startswith("The server does not answer")
    finally:
        server.resume()
    browser.wait(lambda: browser.text("#state") == "serving", "it does not come back")


def test_draining(server: ServerProcess, browser: Browser) -> None:
    """A draining server is shown as such."""
    with Client(server.endpoint, namespace=namespace_of(PART), rank=0) as client:
        client.wait_until_connected(10)
        open_page(browser, server)
        # Under load, the server ends before the store: a drain waits three seconds for stores.
        with contextlib.suppress(NotConnected), client.write([key_of(1)]):
            browser.wait(lambda: browser.text("#stores") == "1", "the store is not shown")
            os.kill(server.pid, signal.SIGTERM)
            browser.wait(lambda: browser.text("#state") == "draining", "it does not notice")
            assert "refuses new work" in browser.text("#notice")
            browser.screenshot("draining")
    browser.wait(lambda: browser.text("#state") == "no answer", "the server does not end", 30)
