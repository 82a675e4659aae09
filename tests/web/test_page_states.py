"""The status page in a browser with fake servers: rare states, hostile names, accessibility."""

from __future__ import annotations

import importlib.util
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from google.protobuf.duration_pb2 import Duration
from prometheus_client import CollectorRegistry
from web.browser import Browser

from kvtier.protos.v1.admin_pb2 import (
    Downgrade,
    GetStatusResponse,
    HandoffTotals,
    HitRatioEstimate,
    MissCount,
    SessionStatus,
    ShareStatus,
    TierStatus,
)
from kvtier.server.config.units import human_size
from kvtier.server.printable import printable
from kvtier.server.telemetry.http import MetricsServer
from kvtier.server.telemetry.status_page import StatusPage

pytestmark = pytest.mark.web

HOSTILE = "<img src=x onerror=\"document.title='taken'\"><script>document.title='taken'</script>"


def curve(low: float, high: float) -> list[HitRatioEstimate]:
    """Estimates that rise from one ratio to another."""
    return [HitRatioEstimate(scale=2.0**step, hit_ratio=low + (high - low) * (step + 1) / 4) for step in range(-1, 4)]


def busy() -> GetStatusResponse:
    """A status with something in every section."""
    return GetStatusResponse(
        server_version="1.2.3",
        epoch=0xFEDCBA9876543210,
        uptime=Duration(seconds=93_784),
        leases=1234,
        stores=5,
        quarantined_bytes=3 << 20,
        namespaces=4,
        holds=7,
        downgrades=[
            Downgrade(feature="streams", cause="the bulk process does not run: it ended", remedy="see the log lines"),
            Downgrade(feature="shared_memory", cause="1 sessions have not mapped the shared memory: worker (pid 7)"),
        ],
        held_bytes=5 << 30,
        lookup_keys=1_000_000,
        misses=[
            MissCount(reason=reason, keys=50_000 // (reason * reason))  # type: ignore[arg-type]
            for reason in range(1, 12)
        ],
        handoffs=[
            HandoffTotals(
                direction=way, open=3, published=1000, claimed=900, claimed_bytes=9 << 40  # type: ignore[arg-type]
            )
            for way in (1, 2)
        ],
        tiers=[
            TierStatus(
                name="cpu", type="cpu", capacity_bytes=512 << 30, available_bytes=256 << 30, used_bytes=250 << 30,
                blocks=131_072, hits=600_000, misses=400_000, evictions=70_000, healthy=True, estimates=curve(0.3, 0.7),
                stored_bytes=9 << 40, loaded_bytes=11 << 40,
                shares=[
                    ShareStatus(tenant="", used_bytes=1 << 30),
                    ShareStatus(tenant="acme", quota_bytes=1 << 35, limit_bytes=1 << 38),
                ],
            ),
            TierStatus(
                name="disk-of-the-second-shelf", type="disk", capacity_bytes=8 << 40, available_bytes=8 << 40,
                used_bytes=3 << 40, blocks=999_999, hits=250_000, misses=150_000, jobs=42, queued_bytes=7 << 30,
                trouble="no space left on /var/lib/kvtier: 3 stores failed",
                estimates=curve(0.6, 0.71), damaged_blocks=2, stored_bytes=7 << 40, loaded_bytes=900 << 30,
                free_disk_bytes=5 << 40,
                shares=[
                    ShareStatus(tenant="", used_bytes=1 << 40),
                    ShareStatus(tenant="acme", quota_bytes=1 << 41, used_bytes=1 << 41),
                ],
            ),
        ],
        sessions=[
            SessionStatus(
                client_name=f"worker {number}", engine_id=f"prefill-{number // 2}", rank=number % 2, world_size=2,
                transport=("shm", "grpc", "cuda_ipc")[number % 3], model="meta-llama/Llama-3.1-70B-Instruct",
                tenant="acme" if number % 2 else "", namespace_id=bytes([number]) * 32, attached=number % 3 != 1,
                age=Duration(seconds=17 ** number % 200_000), leases=number, pid=number,
            )
            for number in range(6)
        ],
    )  # fmt: skip


Serve = Callable[..., str]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Serves the page of fake servers; returns its address."""
    servers: list[MetricsServer] = []

    def start(status: Callable[[], GetStatusResponse] = busy, **more: Callable[..., object]) -> str:
        servers.append(MetricsServer("127.0.0.1:0", CollectorRegistry(), page=StatusPage(status), **more))
        return f"http://127.0.0.1:{servers[-1].port}/"

    yield start
    for server in servers:
        server.close()


def open_page(browser: Browser, url: str, state: str = "in trouble") -> None:
    """Opens a page and waits for its state of the server."""
    browser.open(url)
    browser.wait(lambda: browser.text("#state") == state, "the page does not say what is so")


def findings(browser: Browser) -> list[str]:
    """Axe's findings: contrast, names, roles, order."""
    package = importlib.util.find_spec("axe_playwright_python")
    assert package.submodule_search_locations
    script = Path(package.submodule_search_locations[0]) / "axe.min.js"
    browser.run(script.read_text())
    violations = browser.run("return axe.run().then((results) => results.violations)")
    return [
        f"{found['id']}: {node['html'][:120]}: {node['failureSummary'][:200]}"
        for found in violations
        for node in found["nodes"]
    ]


def test_tier_in_trouble(serve: Serve, browser: Browser) -> None:
    """A tier in trouble is shown at the top; its row shows the reason."""
    open_page(browser, serve())
    trouble = "Tier disk-of-the-second-shelf is in trouble: no space left on /var/lib/kvtier"
    assert browser.text("#notice").startswith(trouble)
    row = "[data-key=disk-of-the-second-shelf]"
    assert browser.text(f"{row} [data-name=health]") == "trouble"
    assert browser.text(f"{row} [data-name=jobs]") == "42\n7.0 GiB"
    assert browser.text(f"{row} [data-name=disk_free]") == "5.0 TiB"
    assert browser.text("[data-key=cpu] [data-name=disk_free]") == "\N{EN DASH}"
    headings = [browser.text(f"#{name}") for name in ("h-curve", "h-tenants", "h-sessions")]
    assert headings == ["Hit rate at other sizes", "Tenants", "Sessions 6"]
    assert browser.text("#sessions [data-name=model]") == f"meta-llama/Llama-3.1-70B-Instruct\n{'0' * 64}"
    assert "(256.0 GiB ready)" in browser.text("[data-key=cpu] [data-name=fill]")
    assert browser.text("#uptime") == "1 d 2 h"
    assert browser.text("#quarantine") == "3.0 MiB in quarantine"
    assert "acme" in browser.text("#tenants")
    assert browser.console_messages() == []


def test_text_is_never_markup(serve: Serve, browser: Browser) -> None:
    """Names of engines and tiers, and causes, are shown as text; no markup in them runs."""

    def hostile() -> GetStatusResponse:
        session = SessionStatus(client_name=HOSTILE, engine_id=HOSTILE, transport=HOSTILE, model=HOSTILE)
        tier = TierStatus(name=HOSTILE, type=HOSTILE, trouble=HOSTILE, estimates=curve(0, 1))
        downgrade = Downgrade(feature=HOSTILE, cause=HOSTILE, remedy=HOSTILE)
        return GetStatusResponse(
            server_version=HOSTILE, tiers=[tier], sessions=[session], lookup_keys=1, downgrades=[downgrade]
        )

    open_page(browser, serve(hostile))
    assert browser.run("return document.title").startswith("kvtier 127.0.0.1:")
    assert browser.run("return document.querySelectorAll('img').length") == 1, "its own sign"
    assert HOSTILE in browser.text("#sessions [data-name=model]")
    assert HOSTILE in browser.text("#notice")
    assert HOSTILE in browser.text("#downgrades [data-name=cause]")
    assert browser.console_messages() == []


def test_control_characters_are_escaped(serve: Serve, browser: Browser) -> None:
    """The page escapes the same characters as the commands."""
    name = "a\x1b[2Jb\x9bc\u202ed\u2028e\u200bfg\nh\u3164i\U000e0100"

    def hostile() -> GetStatusResponse:
        session = SessionStatus(client_name=name, engine_id=f"e {name}", transport=name, model=name, tenant=name)
        share = ShareStatus(tenant=name)
        tier = TierStatus(name=name, type="cpu", trouble=name, estimates=curve(0, 1), shares=[share])
        return GetStatusResponse(tiers=[tier], sessions=[session], lookup_keys=1)

    open_page(browser, serve(hostile))
    shown = browser.run("return document.body.textContent")
    assert shown.count(printable(name)) >= 8
    assert not [character for character in shown if character not in "\n " and printable(character) != character]
    known = [code for code in range(0x30000) if unicodedata.category(chr(code)) not in ("Cn", "Cs", "Co")]
    escaped = browser.run(
        """
        const ofCode = (code) => String.fromCodePoint(code);
        return import("./format.js").then(
          ({ printable }) => arguments[0].map(ofCode).filter((it) => printable(it) !== it).map(printable));
        """,
        known,
    )
    assert escaped == [printable(chr(code)) for code in known if printable(chr(code)) != chr(code)]


def test_sizes_are_those_of_the_commands(serve: Serve, browser: Browser) -> None:
    """No size is rounded up to 1024 of a unit."""
    sizes = [0, 1, 0.4, 1023, 1023.7, 1024, 1500, 1 << 60]
    sizes += [factor + change for factor in (1 << 20, 1 << 30, 1 << 40) for change in (-1000, -1, 0, 1)]
    open_page(browser, serve())
    shown = browser.run("return import('./format.js').then(({ size }) => arguments[0].map(size))", sizes)
    assert shown == [human_size(size) for size in sizes]


def test_every_trouble_has_a_line(serve: Serve, browser: Browser) -> None:
    """Broken tiers come first, then a drain, dropped blocks and a slow event loop."""
    dropped = 7

    def troubled() -> GetStatusResponse:
        nonlocal dropped
        dropped += 5
        status = busy()
        status.draining = True
        status.loop_lag.FromSeconds(2)
        status.tiers[1].dropped_blocks = dropped
        status.tiers[1].stored_bytes = dropped << 30
        return status

    open_page(browser, serve(troubled), "draining")
    browser.wait(lambda: "in the last minute" in browser.text("#notice"), "dropped blocks are not shown")
    lines = [line for line in browser.text("#notice").splitlines() if line]
    assert len(lines) == 4
    for line, words in zip(lines, ("is in trouble: no space", "is draining", "did not store", "2.0 s"), strict=True):
        assert words in line
    row = "[data-key=disk-of-the-second-shelf]"
    assert "GiB/s" in browser.text(f"{row} [data-name=stored]")
    assert browser.text("[data-key=cpu] [data-name=stored]").startswith("0 B/s")
    browser.screenshot("troubles")


def test_downgrades_begin_and_end(serve: Serve, browser: Browser) -> None:
    """Each downgrade has a row with its cause and remedy; without any, there is no section."""
    status = busy()
    open_page(browser, serve(lambda: status))
    rows = "#downgrades tbody tr"
    assert browser.run(f"return document.querySelectorAll('{rows}').length") == 2
    assert browser.text(f"{rows}:nth-child(1)").split("\t") == [
        "streams", "the bulk process does not run: it ended", "see the log lines",
    ]  # fmt: skip
    assert browser.text(f"{rows}:nth-child(2)").startswith("shared memory")
    assert browser.text("#h-downgrades") == "Downgrades 2"
    del status.downgrades[:]
    browser.wait(lambda: not browser.visible("#downgrades-panel"), "an ended downgrade is still shown")


def test_policy_is_enforced(serve: Serve, browser: Browser) -> None:
    """Content-Security-Policy: injected scripts could neither run nor connect elsewhere."""
    open_page(browser, serve())
    done = browser.run(
        """
        const broken = [];
        document.addEventListener("securitypolicyviolation", (event) => broken.push(event.effectiveDirective));
        const script = document.createElement("script");
        try { script.text = "document.title = 'taken'"; } catch (error) { broken.push(error.name); }
        document.body.append(script);
        const pause = () => new Promise((done) => setTimeout(done, 200));
        return fetch("http://127.0.0.2:1/").catch(() => 0).then(pause).then(() => broken);
        """
    )
    assert "connect-src" in done
    assert {"TypeError", "script-src-elem"} & set(done)
    assert browser.run("return document.title") != "taken"
    browser.console_messages()


def test_token(serve: Serve, browser: Browser) -> None:
    """The page asks for a required token, refuses a wrong one, and shows nothing before."""
    open_page(browser, serve(admits=lambda said: said == "Bearer secret"), "locked")
    assert browser.visible("#token-text")
    assert browser.run("return document.activeElement.id") == "token-text"
    assert not browser.visible("#figures")
    assert findings(browser) == []
    browser.press(*"wrong", "Enter")
    browser.wait(lambda: "does not allow" in browser.text("#notice"), "a wrong token is not refused")
    browser.press(*"secret", "Enter")
    browser.wait(lambda: browser.text("#state") == "in trouble", "the right one is")
    assert not browser.visible("#token-text")
    assert all("401" in message for message in browser.console_messages())


def test_server_that_cannot_say(serve: Serve, browser: Browser) -> None:
    """An endpoint whose server does not answer is distinguished from a missing endpoint."""

    def fail() -> GetStatusResponse:
        raise TimeoutError

    open_page(browser, serve(fail), "no answer")
    assert browser.text("#notice").startswith("The server does not answer (no answer from the server: TimeoutError)")


def test_nothing_yet(serve: Serve, browser: Browser) -> None:
    """A new server shows an explanation in every empty section."""
    tier = TierStatus(name="cpu", type="cpu", capacity_bytes=1 << 30, available_bytes=1 << 30, healthy=True)
    open_page(browser, serve(lambda: GetStatusResponse(server_version="1", tiers=[tier])), "serving")
    for name in ("curve-none", "misses-none", "sessions-none", "handoffs-none"):
        assert browser.visible(f"#{name}"), name
    assert not browser.visible("#tenants-panel")
    assert not browser.visible("#downgrades-panel")
    assert "NaN" not in browser.text("body")
    assert "undefined" not in browser.text("body")
    browser.screenshot("empty")


def test_many_sessions(serve: Serve, browser: Browser) -> None:
    """A thousand sessions do not freeze the page."""

    def many() -> GetStatusResponse:
        sessions = [SessionStatus(client_name="same", engine_id=f"e{number % 9}") for number in range(1000)]
        return GetStatusResponse(tiers=[TierStatus(name="cpu", healthy=True)], sessions=sessions)

    open_page(browser, serve(many), "serving")
    assert browser.run("return document.querySelectorAll('#sessions tbody tr').length") == 1000
    assert browser.text("#session-count") == "1,000"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_everybody_can_read_it(serve: Serve, browser: Browser, scheme: str, width: int) -> None:
    """Axe finds nothing in both colour schemes, wide or narrow; no horizontal scrolling."""
    browser.look(scheme=scheme, width=width)
    open_page(browser, serve())
    browser.wait(lambda: browser.visible("#plot path"), "no curve")
    browser.screenshot(f"busy-{scheme}-{width}")
    assert findings(browser) == []
    assert browser.run("return document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_gone_can_be_read_too(serve: Serve, browser: Browser, scheme: str) -> None:
    """The values kept from an ended server stay readable."""
    alive = True

    def status() -> GetStatusResponse:
        if alive:
            return busy()
        raise TimeoutError

    browser.look(scheme=scheme)
    open_page(browser, serve(status))
    alive = False
    browser.wait(lambda: browser.text("#state") == "no answer", "it does not notice")
    browser.screenshot(f"gone-{scheme}")
    assert findings(browser) == []


def test_keyboard(serve: Serve, browser: Browser) -> None:
    """The keyboard reaches every control in reading order; a skip link is first."""
    open_page(browser, serve())
    reached = []
    for _ in range(5):
        browser.press("Tab")
        reached.append(browser.run("return document.activeElement.id || document.activeElement.getAttribute('href')"))
    assert reached == ["#figures", "pause", "metrics", "status.json", "healthz"]
