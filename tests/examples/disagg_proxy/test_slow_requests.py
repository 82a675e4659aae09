"""Slow requests and invalid responses do not take engines away from other clients."""

from __future__ import annotations

import asyncio
import json
import socket
from dataclasses import replace

import pytest
from disagg_proxy import engines, watch
from disagg_proxy.fleet import Instance, Role
from disagg_proxy.transfer import hold_only
from harness.disagg_site import Site
from harness.fake_engine import ANSWER, Behaviour, FakeEngine, RecordedRequest, close_connection, hang, send_answer
from harness.polling import async_wait_until
from harness.running_proxy import PATH, RunningProxy

TIMEOUT_S = 1.0


async def send_oversized(engine: FakeEngine, asked: RecordedRequest, writer: asyncio.StreamWriter) -> None:
    """A valid answer beyond the proxy's limit."""
    await send_answer(writer, 200, json.dumps({**engine.complete_answer(asked), "more": "x" * 10_000}).encode())


async def _is_up_after_checks(proxy: RunningProxy, engine: FakeEngine, looks: int) -> bool:
    """Whether it gets requests after more than ``looks`` health checks."""
    await async_wait_until(lambda: engine.looks > looks)
    described = (await proxy.health())["prefill"] + (await proxy.health())["decode"]
    (is_up,) = [seen["up"] for seen in described if seen["url"] == engine.url]
    return bool(is_up)


async def test_a_prompt_that_is_slow_at_p_goes_to_d(site: Site) -> None:
    """P exceeds its timeout: no other P gets the prompt, D computes it, and P stays up."""
    settings = replace(site.settings(prefills=2), prefill_timeout=TIMEOUT_S, check_interval=60.0)
    async with site.proxy(settings) as proxy:
        looks = [engine.looks for engine in site.prefill]
        for engine in site.prefill:
            engine.script.append(hang)
        assert (await proxy.turn()).json()["choices"][0]["text"] == "".join(ANSWER)
        (slow,) = [engine for engine in site.prefill if engine.seen]
        await slow.seen[0].gone.wait()
        assert await _is_up_after_checks(proxy, slow, looks[site.prefill.index(slow)])
        assert await proxy.metric("retries_total", cause="timeout", role="prefill") == 1
        assert await proxy.metric("fallbacks_total", cause="timeout") == 1
    assert site.decode[0].seen[0].handoff == hold_only()


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_is_slow_is_asked_for_once(site: Site, *, stream: bool) -> None:
    """D exceeds its timeout: 504, no other D gets the request, and D stays up."""
    settings = replace(site.settings(decodes=2), decode_timeout=TIMEOUT_S, check_interval=60.0)
    async with site.proxy(settings) as proxy:
        looks = [engine.looks for engine in site.decode]
        for engine in site.decode:
            engine.script.append(hang)
        assert (await proxy.turn(stream=stream)).status_code == 504
        (slow,) = [engine for engine in site.decode if engine.seen]
        assert await _is_up_after_checks(proxy, slow, looks[site.decode.index(slow)])
        assert await proxy.metric("requests_total", outcome="engine_error", route=PATH) == 1


async def test_an_engine_that_does_not_read_a_large_request_times_out(no_leaks: None) -> None:  # noqa: ARG001
    """The body exceeds the buffers of the sockets, so that the request is never sent completely."""
    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        instance = Instance(f"http://127.0.0.1:{listening.getsockname()[1]}", Role.DECODE)
        client = engines.Engines(silence_s=0.3)
        async with asyncio.timeout(60):
            with pytest.raises(engines.EngineFailedError) as failed:
                await client.ask(instance, PATH, {"prompt": "x" * (32 << 20)}, {})
        assert failed.value.cause is engines.Cause.TIMEOUT
        assert instance.outstanding == 0
        await client.close()


@pytest.mark.parametrize("behaviour", [close_connection, send_oversized])
async def test_an_answer_that_breaks_takes_no_engine_down(
    site: Site, behaviour: Behaviour, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request breaks every engine's answer; the next request is served by them."""
    monkeypatch.setattr(engines, "MAX_ANSWER_BYTES", 5000)
    async with site.proxy(replace(site.settings(decodes=2), check_interval=60.0)) as proxy:
        looks = [engine.looks for engine in site.decode]
        for engine in site.decode:
            engine.script.append(behaviour)
        assert (await proxy.turn()).status_code == 502
        for engine, before in zip(site.decode, looks, strict=True):
            assert await _is_up_after_checks(proxy, engine, before)
        assert (await proxy.turn()).status_code == 200
        assert await proxy.metric("retries_total", cause="broken", role="decode") == 2


@pytest.mark.parametrize("health", [500, None])
async def test_an_unhealthy_engine_is_down(site: Site, monkeypatch: pytest.MonkeyPatch, health: int | None) -> None:
    """Its health is checked at once, not with the next check; no answer counts as down."""
    monkeypatch.setattr(watch, "HEALTH_TIMEOUT_S", 0.2)
    async with site.proxy(replace(site.settings(prefills=2), check_interval=60.0)) as proxy:
        for engine in site.prefill:
            engine.script.append(close_connection)
            engine.health = health
        assert (await proxy.turn()).status_code == 200
        for engine in site.prefill:
            await proxy.wait_health(engine, up=False)
