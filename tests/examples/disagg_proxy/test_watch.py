"""Health checks and probes."""

from __future__ import annotations

import pytest
from disagg_proxy import watch
from harness.disagg_site import Site
from harness.fake_engine import fail, hang
from harness.polling import async_wait_until
from harness.running_proxy import Clock, run_proxy


async def test_a_probe_that_is_refused_tells_nothing(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    """The last result is kept (a key may have been changed); one warning for all refusals."""
    d, clock = site.decode[0], Clock()
    async with site.proxy(clock=clock) as proxy:
        for number in (1, 2):
            d.probe_script.append(fail(401))
            clock.ahead += 301.0
            await async_wait_until(lambda number=number: len(d.probes) == number + 1)  # type: ignore[misc]
            await async_wait_until(lambda: "refuses probes (status 401)" in caplog.text)
            assert (await proxy.health())["decode"][0]["engine_id"] == "d0"
        d.engine_id = "d0-again"

        async def is_asked_again() -> bool:
            clock.ahead += 301.0
            return (await proxy.health())["decode"][0]["engine_id"] == "d0-again"

        await async_wait_until(is_asked_again)
    assert caplog.text.count("refuses probes") == 1


async def test_an_engine_whose_health_hangs_is_down(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Silence counts as a failure, also at start: the proxy does not wait for it."""
    monkeypatch.setattr(watch, "HEALTH_TIMEOUT_S", 0.2)
    site.prefill[0].health = None
    async with site.proxy() as proxy:
        assert [engine["up"] for engine in (await proxy.health())["prefill"]] == [False]
        site.prefill[0].health = 200
        await proxy.wait_health(site.prefill[0], up=True)


async def test_a_probe_that_hangs_ends(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Health checks continue meanwhile, and the probe is repeated."""
    monkeypatch.setattr(watch, "PROBE_TIMEOUT_S", 3.0)
    d = site.decode[0]
    d.probe_script.append(hang)
    async with run_proxy(site.settings()) as proxy:
        await async_wait_until(lambda: len(d.probes) == 1)
        d.health = 500
        await proxy.wait_health(d, up=False)
        assert not d.probes[0].gone.is_set()
        d.health = 200
        await d.probes[0].gone.wait()
        await proxy.wait_discovered("d0")
