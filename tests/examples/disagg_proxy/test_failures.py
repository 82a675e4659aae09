"""Failing engines and disconnecting clients: retries, error responses, recorded holds."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import httpx
import pytest
from disagg_proxy.transfer import first_turn, hold_only
from harness.disagg_site import Site
from harness.fake_engine import (
    ANSWER,
    DONE,
    Behaviour,
    FakeEngine,
    RecordedRequest,
    close_connection,
    close_midway,
    fail,
    hang,
    hold_back,
    send_answer,
)
from harness.polling import async_wait_until
from harness.running_proxy import PATH, RunningProxy, data_of

TEXT = "".join(ANSWER)
TIMEOUT_S = 2.0
"""Timeout for an engine that hangs; others must answer within it on a busy machine."""


async def send_invalid(_: FakeEngine, __: RecordedRequest, writer: asyncio.StreamWriter) -> None:
    await send_answer(writer, 200, b"<html>")


async def error_event(_: FakeEngine, __: RecordedRequest, writer: asyncio.StreamWriter) -> None:
    """A stream whose first event is an error, as vLLM sends it when its engine dies."""
    error = json.dumps({"error": {"message": "EngineCore died", "code": 500}}).encode()
    await send_answer(writer, 200, b"data: " + error + b"\n\n" + DONE, "text/event-stream")


def _text(answer: httpx.Response) -> str:
    """Returns the text that the client reads, streamed or not."""
    if answer.headers["content-type"].startswith("text/event-stream"):
        return "".join(chunk["choices"][0]["text"] for chunk in data_of(answer.text))
    text: str = answer.json()["choices"][0]["text"]
    return text


async def _conversation_engine(proxy: RunningProxy, engines: list[FakeEngine]) -> FakeEngine:
    """Runs a first turn, and returns the conversation's engine."""
    await proxy.turn()
    (home,) = [engine for engine in engines if engine.seen]
    return home


def _other(engines: list[FakeEngine], engine: FakeEngine) -> FakeEngine:
    return engines[1 - engines.index(engine)]


async def test_connections_are_used_again(site: Site) -> None:
    """If an engine closes an idle connection, the next request uses a new one, and is no retry."""
    async with site.proxy(replace(site.settings(), check_interval=60.0)) as proxy:
        engine = site.prefill[0]
        for _ in range(3):
            await proxy.turn()
        assert engine.connections < len(engine.seen)
        before = engine.connections
        engine.close_connections()
        assert _text(await proxy.turn()) == TEXT
        assert engine.connections == before + 1
        assert "disagg_proxy_retries_total{" not in (await proxy.http.get("/metrics")).text


# ---- P


@pytest.mark.parametrize(
    ("behaviour", "cause"), [(fail(500), "status"), (close_connection, "broken"), (send_invalid, "broken")]
)
async def test_another_p_does_it(site: Site, behaviour: Behaviour, cause: str) -> None:
    """P fails, disconnects or sends nonsense: another P gets the same, the hold included."""
    async with site.proxy(replace(site.settings(prefills=2), check_interval=60.0)) as proxy:
        home = await _conversation_engine(proxy, site.prefill)
        other = _other(site.prefill, home)
        home.script.append(behaviour)
        answer = await proxy.turn()
        assert _text(answer) == TEXT
        assert other.seen[0].body == home.seen[1].body
        assert other.seen[0].params["remote_request_id"] is not None
        assert site.decode[0].seen[1].params["remote_engine_id"] == other.engine_id
        assert await proxy.metric("retries_total", cause=cause, role="prefill") == 1


async def test_a_p_that_is_down_is_not_asked(site: Site) -> None:
    """The first request that finds it down goes to another P, and later ones until it is back."""
    async with site.proxy(replace(site.settings(prefills=2), check_interval=60.0)) as proxy:
        home = await _conversation_engine(proxy, site.prefill)
        await home.stop()
        for _ in range(3):
            assert _text(await proxy.turn()) == TEXT
        assert len(_other(site.prefill, home).seen) == 3
        assert await proxy.metric("retries_total", cause="connect", role="prefill") == 1
        await home.start()
        await proxy.wait_health(home, up=True)
        await proxy.turn()
        assert len(home.seen) == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_without_p_d_computes_and_holds(site: Site, *, stream: bool) -> None:
    """Without a P, D is only told to hold the conversation, and the next turn uses that hold."""
    async with site.proxy() as proxy:
        site.prefill[0].script.append(fail(503))
        assert _text(await proxy.turn(stream=stream)) == TEXT
        given = site.decode[0].seen[0].handoff
        given.pop("kvtier", None)
        assert given == hold_only()
        await proxy.turn()
        assert site.prefill[0].seen[1].params["remote_request_id"] in site.decode[0].holds
        assert await proxy.metric("fallbacks_total", cause="status") == 1
        assert await proxy.metric("turns_total", reuse="hit") == 1


async def test_without_p_and_conversation_d_holds_nothing(site: Site) -> None:
    """No later turn would use the hold."""
    async with site.proxy() as proxy:
        await site.prefill[0].stop()
        await proxy.wait_health(site.prefill[0], up=False)
        assert _text(await proxy.turn(None)) == TEXT
        assert await proxy.metric("fallbacks_total", cause="down") == 1
        assert await proxy.metric("retries_total", cause="connect", role="prefill") == 0
    assert site.decode[0].seen[0].params is None


async def test_no_p_at_all_is_no_fallback(site: Site) -> None:
    """A proxy for decode engines only: turns are held, for a P that is added later."""
    async with site.proxy(site.settings(prefills=0)) as proxy:
        assert _text(await proxy.turn()) == TEXT
        assert "disagg_proxy_fallbacks_total{" not in (await proxy.http.get("/metrics")).text


async def test_a_p_that_hands_nothing_over(site: Site) -> None:
    """P without a connector answers without params: D computes, and says so in the metrics.

    Another P would do no better.
    """

    async def plain(engine: FakeEngine, asked: RecordedRequest, writer: asyncio.StreamWriter) -> None:
        await send_answer(
            writer, 200, json.dumps({**engine.complete_answer(asked), "kv_transfer_params": None}).encode()
        )

    async with site.proxy(site.settings(prefills=2)) as proxy:
        for engine in site.prefill:
            engine.script.append(plain)
        assert _text(await proxy.turn()) == TEXT
        assert await proxy.metric("fallbacks_total", cause="nothing_handed_over") == 1
    assert sum(len(engine.seen) for engine in site.prefill) == 1
    assert site.decode[0].seen[0].handoff == hold_only()


@pytest.mark.parametrize("status", [400, 401, 404, 422, 429])
async def test_what_p_refuses_is_refused(site: Site, status: int) -> None:
    """A 4xx is forwarded unchanged, because other engines would answer the same."""
    async with site.proxy(site.settings(prefills=2)) as proxy:
        for engine in site.prefill:
            engine.script.append(fail(status, "too long"))
        answer = await proxy.turn(stream=True)
        assert (answer.status_code, answer.json()) == (status, {"error": {"message": "too long", "code": status}})
        assert answer.headers["x-engine"] == "yes"
        assert await proxy.metric("requests_total", outcome="client_error", route=PATH) == 1
    assert sum(len(engine.seen) for engine in site.prefill) == 1
    assert not site.decode[0].seen


# ---- D


@pytest.mark.parametrize(
    ("behaviour", "stream", "cause"),
    [
        (fail(500), False, "status"),
        (fail(503), True, "status"),
        (close_connection, False, "broken"),
        (close_connection, True, "broken"),
        (close_midway(0), True, "broken"),
        (close_midway(0, cleanly=True), True, "broken"),
        (error_event, True, "status"),
        (send_invalid, False, "broken"),
    ],
)
async def test_another_d_does_it(site: Site, behaviour: Behaviour, cause: str, *, stream: bool) -> None:
    """D fails before its first byte: another D gets P's blocks, and another name for its hold."""
    async with site.proxy(replace(site.settings(decodes=2), check_interval=60.0)) as proxy:
        home = await _conversation_engine(proxy, site.decode)
        other = _other(site.decode, home)
        home.script.append(behaviour)
        answer = await proxy.turn(stream=stream)
        assert (answer.status_code, _text(answer)) == (200, TEXT)
        first, second = home.seen[1].params, other.seen[0].params
        assert first["remote_request_id"] == second["remote_request_id"]
        if stream:
            assert first["kvtier"]["hold_as"] != second["kvtier"]["hold_as"]
        assert await proxy.metric("retries_total", cause=cause, role="decode") == 1
        await proxy.turn()
        assert site.prefill[0].seen[2].params["remote_engine_id"] == other.engine_id


async def test_a_d_that_is_down_is_not_asked(site: Site) -> None:
    """Its conversations continue at another D, from its hold at kvtier."""
    async with site.proxy(site.settings(decodes=2)) as proxy:
        home = await _conversation_engine(proxy, site.decode)
        await home.stop()
        await proxy.wait_health(home, up=False)
        assert _text(await proxy.turn()) == TEXT
        assert site.prefill[0].seen[1].params["remote_engine_id"] == home.engine_id
        assert await proxy.metric("retries_total", cause="connect", role="decode") == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_what_d_refuses_is_refused(site: Site, *, stream: bool) -> None:
    """A 4xx of D is forwarded, and not retried."""
    async with site.proxy(site.settings(decodes=2)) as proxy:
        for engine in site.decode:
            engine.script.append(fail(422))
        answer = await proxy.turn(stream=stream)
        assert (answer.status_code, answer.json()["error"]["code"]) == (422, 422)
    assert sum(len(engine.seen) for engine in site.decode) == 1


async def test_the_last_error_is_forwarded(site: Site) -> None:
    """Every D fails: the client gets the last D's error, or 502 if none could be reached."""
    async with site.proxy(site.settings(decodes=2)) as proxy:
        for engine in site.decode:
            engine.script.append(fail(500, "dead"))
        said = await proxy.turn()
        assert (said.status_code, said.json()["error"]["message"]) == (500, "dead")
        for engine in site.decode:
            await engine.stop()
        gone = await proxy.turn(stream=True)
        assert (gone.status_code, gone.json()["error"]["type"]) == (502, "server_error")
        assert await proxy.metric("requests_total", outcome="engine_error", route=PATH) == 2
        for engine in site.decode:
            await engine.start()


async def test_an_error_event_of_every_d_is_passed_on(site: Site) -> None:
    """If no other D is left, the client gets the engine's own error."""
    async with site.proxy() as proxy:
        site.decode[0].script.append(error_event)
        answer = await proxy.turn(stream=True)
    assert "EngineCore died" in answer.text


async def test_d_dies_in_the_middle(site: Site) -> None:
    """After the first byte there is no retry: the client gets an error and no `[DONE]`.

    The turn is not recorded.
    """
    async with site.proxy(site.settings(decodes=2)) as proxy:
        home = await _conversation_engine(proxy, site.decode)
        home.script.append(close_midway(2))
        answer = await proxy.turn(stream=True)
        *came, error = data_of(answer.text)
        assert [chunk["choices"][0]["text"] for chunk in came] == list(ANSWER[:2])
        assert error["error"]["code"] == 502
        assert "[DONE]" not in answer.text
        assert not _other(site.decode, home).seen
        assert await proxy.metric("requests_total", outcome="broken", route=PATH) == 1
        await proxy.turn()
        assert site.prefill[0].seen[2].handoff == site.prefill[0].seen[1].handoff, "the turn before it"


async def test_d_dies_after_the_end(site: Site) -> None:
    """After the end marker the answer is complete, and its hold is recorded."""
    site.decode[0].script.append(close_midway(len(ANSWER) + 2))
    async with site.proxy() as proxy:
        answer = await proxy.turn(stream=True)
        assert (_text(answer), answer.text.endswith("[DONE]\n\n")) == (TEXT, True)
        await proxy.turn()
        assert await proxy.metric("turns_total", reuse="hit") == 1


async def test_d_stalls_in_the_middle(site: Site) -> None:
    """Silence for longer than `--decode-timeout` has the same result, and D is disconnected."""
    async with site.proxy(replace(site.settings(), decode_timeout=TIMEOUT_S)) as proxy:
        site.decode[0].script.append(hold_back(2, asyncio.Event()))
        answer = await proxy.turn(stream=True)
        assert data_of(answer.text)[-1]["error"]["code"] == 502
        await site.decode[0].seen[0].gone.wait()


# ---- clients


async def _disconnects(proxy: RunningProxy, engine: FakeEngine, **body: Any) -> None:
    """A client that disconnects when its request has reached the engine."""
    before = len(engine.seen)
    turn = asyncio.create_task(proxy.turn(**body))
    await async_wait_until(lambda: len(engine.seen) > before)
    turn.cancel()
    await asyncio.gather(turn, return_exceptions=True)


async def _gone(proxy: RunningProxy) -> bool:
    return await proxy.metric("requests_total", outcome="client_gone", route=PATH) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_leaves_during_prefill(site: Site, *, stream: bool) -> None:
    """P is disconnected, so that it aborts; D gets no request."""
    site.prefill[0].script.append(hang)
    async with site.proxy() as proxy:
        await _disconnects(proxy, site.prefill[0], stream=stream)
        await site.prefill[0].seen[0].gone.wait()
        await async_wait_until(lambda: _gone(proxy))
        assert await proxy.metric("instance_outstanding", role="prefill", instance=site.prefill[0].url) == 0
        assert await proxy.metric("instance_up", role="prefill", instance=site.prefill[0].url) == 1
    assert not site.decode[0].seen


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_leaves_during_the_answer(site: Site, *, stream: bool) -> None:
    """D is disconnected, so that it aborts; no hold is recorded, and the next turn is a miss."""
    site.decode[0].script.append(hold_back(2, asyncio.Event()) if stream else hang)
    async with site.proxy() as proxy:
        await _disconnects(proxy, site.decode[0], stream=stream)
        await site.decode[0].seen[0].gone.wait()
        await async_wait_until(lambda: _gone(proxy))
        assert (await proxy.health())["conversations"] == 0
        await proxy.turn()
    assert site.prefill[0].seen[1].handoff == first_turn()


async def test_a_client_leaves_while_its_request_is_read(site: Site) -> None:
    """An incomplete request reaches no engine."""
    async with site.proxy() as proxy:
        host, port = proxy.url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(f"POST {PATH} HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{{".encode())
        await writer.drain()
        writer.close()
        await writer.wait_closed()
        await async_wait_until(lambda: _gone(proxy))
    assert not site.prefill[0].seen
