"""Requests that P and D get at the same time."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from disagg_proxy import exchange
from disagg_proxy.metrics import Outcome
from harness.disagg_site import Site
from harness.fake_engine import ANSWER, FakeEngine, RecordedRequest, answer_normally, fail, hang
from harness.polling import async_wait_until
from harness.running_proxy import PATH, RunningProxy


async def test_p_and_d_get_a_request_at_the_same_time(site: Site) -> None:
    """Once P is known. D learns the name of the hold from the proxy, and P's identity from P."""
    p, d = site.prefill[0], site.decode[0]
    async with site.proxy(replace(site.settings(), overlap=True)) as proxy:
        await proxy.turn("other")
        assert "remote_overlap" not in {**p.seen[0].params, **d.seen[0].params}
        gate = asyncio.Event()

        async def answer_late(engine: FakeEngine, asked: RecordedRequest, writer: asyncio.StreamWriter) -> None:
            await gate.wait()
            await answer_normally(engine, asked, writer)

        p.script.append(answer_late)
        d.script.append(answer_late)
        asking = asyncio.create_task(proxy.turn())
        await async_wait_until(lambda: len(p.seen) == len(d.seen) == 2)
        at_p, at_d = p.seen[1].params, d.seen[1].params
        gate.set()
        answer = await asking
        assert answer.json()["choices"][0]["text"] == "".join(ANSWER)
        assert at_p["remote_overlap"] is at_d["remote_overlap"] is True
        assert (at_p["do_remote_decode"], at_d["do_remote_prefill"]) == (True, True)
        name = at_p["kvtier"]["hold_as"]
        assert (at_d["remote_engine_id"], at_d["remote_host"], at_d["remote_request_id"]) == ("p0", "host-of-p0", name)
        await proxy.turn()
        assert p.seen[2].params["remote_request_id"] in d.holds, "P pulls D's hold of the turn before"
        assert p.seen[2].params["kvtier"]["hold_as"] != name


@pytest.mark.parametrize("how", ["fails", "refuses"])
async def test_d_answers_if_p_fails(site: Site, how: str) -> None:
    """D finds no hold, and computes the prompt."""
    async with site.proxy(replace(site.settings(), overlap=True)) as proxy:
        await proxy.turn("other")
        site.prefill[0].script.append(fail(500 if how == "fails" else 400))
        answer = await proxy.turn()
        assert answer.json()["choices"][0]["text"] == "".join(ANSWER)
        assert await proxy.metric("fallbacks_total", cause="status") == (how == "fails")
        assert len(site.prefill[0].seen) == 2


async def test_a_client_that_disconnects_aborts_both(site: Site) -> None:
    """P then releases its hold, and D its claim."""
    p, d = site.prefill[0], site.decode[0]
    async with site.proxy(replace(site.settings(), overlap=True)) as proxy:
        await proxy.turn("other")
        p.script.append(hang)
        d.script.append(hang)
        asking = asyncio.create_task(proxy.turn())
        await async_wait_until(lambda: len(p.seen) == len(d.seen) == 2)
        asking.cancel()
        await asyncio.gather(asking, p.seen[1].gone.wait(), d.seen[1].gone.wait(), return_exceptions=True)

        async def is_gone() -> bool:
            return await proxy.metric("requests_total", outcome="client_gone", route=PATH) == 1

        await async_wait_until(is_gone)


async def test_a_p_that_hangs_is_aborted_after_d_has_answered(site: Site) -> None:
    """D has given it up, and computed the prompt itself. The request is served."""
    p = site.prefill[0]
    async with site.proxy(replace(site.settings(), overlap=True)) as proxy:
        await proxy.turn("other")
        p.script.append(hang)
        answer = await proxy.turn()
        assert answer.status_code == 200
        await asyncio.wait_for(p.seen[1].gone.wait(), 60)
        await _wait_served(proxy, 2)


@pytest.mark.parametrize("stream", [False, True])
async def test_p_may_answer_after_d(site: Site, monkeypatch: pytest.MonkeyPatch, *, stream: bool) -> None:
    """The client already has D's whole answer. P is not aborted."""
    monkeypatch.setattr(exchange, "LATE_PREFILL_S", 60.0)
    p, gate = site.prefill[0], asyncio.Event()

    async def answer_late(engine: FakeEngine, asked: RecordedRequest, writer: asyncio.StreamWriter) -> None:
        await gate.wait()
        await asyncio.sleep(0.3)
        await answer_normally(engine, asked, writer)

    async with site.proxy(replace(site.settings(), overlap=True)) as proxy:
        await proxy.turn("other")
        p.script.append(answer_late)
        assert (await proxy.turn(stream=stream)).status_code == 200
        gate.set()

        async def has_answered() -> bool:
            return await proxy.metric("prefill_seconds_count") == 2

        await async_wait_until(has_answered)
        await _wait_served(proxy, 2)
        assert not p.seen[1].gone.is_set()
        assert await proxy.metric("instance_outstanding", role="prefill", instance=p.url) == 0


async def test_a_p_that_hangs_is_aborted_at_shutdown(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """The proxy does not wait for P."""
    monkeypatch.setattr(exchange, "LATE_PREFILL_S", 3600.0)
    p = site.prefill[0]
    async with site.proxy(replace(site.settings(), overlap=True)) as proxy:
        await proxy.turn("other")
        p.script.append(hang)
        await proxy.turn()
        await async_wait_until(lambda: len(p.seen) == 2)
        await _wait_served(proxy, 2)
        assert not p.seen[1].gone.is_set()
    await asyncio.wait_for(p.seen[1].gone.wait(), 60)


async def _wait_served(proxy: RunningProxy, number: int) -> None:
    """Waits until this number of requests has ended, and asserts that all have been served."""

    async def have_ended() -> bool:
        outcomes = [await proxy.metric("requests_total", outcome=one.value, route=PATH) for one in Outcome]
        return sum(outcomes) == number

    await async_wait_until(have_ended)
    assert await proxy.metric("requests_total", outcome="ok", route=PATH) == number
