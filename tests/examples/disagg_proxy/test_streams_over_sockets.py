"""Streams of D with an abnormal end, and clients that do not read their stream."""

from __future__ import annotations

import asyncio
import json

import pytest
from disagg_proxy import reply
from disagg_proxy.transfer import first_turn
from harness.disagg_site import Site
from harness.fake_engine import ANSWER, DONE, PROMPT_TOKENS, FakeEngine, RecordedRequest, close_midway, stream
from harness.polling import async_wait_until
from harness.running_proxy import PATH, RunningProxy, data_of

ERROR = b'data: {"error": {"message": "EngineCore died", "code": 500}}\n\n'
TEXT = b'data: {"choices": [{"index": 0, "text": "x", "finish_reason": null}]}\n\n'


async def _outcome(proxy: RunningProxy, outcome: str) -> float:
    return await proxy.metric("requests_total", outcome=outcome, route=PATH)


async def _wait_for_outcome(proxy: RunningProxy, outcome: str) -> None:
    """The proxy counts a request just after the end of its answer."""

    async def counted() -> bool:
        return await _outcome(proxy, outcome) == 1

    await async_wait_until(counted)


async def test_a_stream_without_an_end_is_broken(site: Site) -> None:
    """D closed the stream properly, but without its end: the client gets an error, no `[DONE]`."""
    site.decode[0].script.append(close_midway(len(ANSWER) + 1, cleanly=True))
    async with site.proxy() as proxy:
        answer = await proxy.turn(stream=True)
        assert data_of(answer.text)[-1]["error"]["code"] == 502
        assert "[DONE]" not in answer.text
        await _wait_for_outcome(proxy, "broken")
        await proxy.turn()
        await _wait_for_outcome(proxy, "ok")
    assert site.prefill[0].seen[1].handoff == first_turn()


async def test_an_end_without_a_blank_line_is_one(site: Site) -> None:
    """`[DONE]` may be the last bytes: the answer is complete, and its hold is recorded."""

    async def unended(engine: FakeEngine, asked: RecordedRequest, writer: asyncio.StreamWriter) -> None:
        *events, done = engine.events(asked)
        await stream(*events, done.rstrip())(engine, asked, writer)

    site.decode[0].script.append(unended)
    async with site.proxy() as proxy:
        answer = await proxy.turn(stream=True)
        assert answer.text.endswith("data: [DONE]\n\n")
        await proxy.turn()
        assert await proxy.metric("turns_total", reuse="hit") == 1


@pytest.mark.parametrize("length", [None, 100])
async def test_half_an_event_does_not_show_what_engines_tell_one_another(site: Site, length: int | None) -> None:
    """A last event without its blank line, whole or partial, is not forwarded unread."""

    async def newer(engine: FakeEngine, asked: RecordedRequest, writer: asyncio.StreamWriter) -> None:
        held = engine.params("d's own name", PROMPT_TOKENS, prefilled=False)
        last = b"data: " + json.dumps({"kv_transfer_params": held, "choices": []}).encode()
        await stream(TEXT, last[:length])(engine, asked, writer)

    site.decode[0].script.append(newer)
    async with site.proxy() as proxy:
        answer = await proxy.turn(stream=True)
    assert "kv_transfer_params" not in answer.text
    assert [*data_of(answer.text)][-1]["error"]["code"] == 502


async def test_an_error_in_the_middle_is_no_success(site: Site) -> None:
    """D reports an error in an event and closes properly: forwarded, and counted as an error."""
    gate, received = asyncio.Event(), b""
    site.decode[0].script.append(stream(TEXT, ERROR, DONE, gate=gate))
    async with site.proxy() as proxy:
        body = {"model": "m", "prompt": "Tell me", "conversation_id": "c", "stream": True}
        async with proxy.http.stream("POST", PATH, json=body) as answer:
            async for chunk in answer.aiter_bytes():
                received += chunk
                gate.set()
        assert received == TEXT + ERROR + DONE
        await _wait_for_outcome(proxy, "broken")
        assert await _outcome(proxy, "ok") == 0
        await proxy.turn()
    assert site.prefill[0].seen[1].handoff == first_turn()


async def _without_reading(proxy: RunningProxy) -> asyncio.StreamWriter:
    """A client that asks for a stream and does not read it."""
    host, port = proxy.url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port), limit=1)
    body = json.dumps({"prompt": "x", "conversation_id": "c", "stream": True}).encode()
    writer.write(f"POST {PATH} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
    return writer


MORE_THAN_BUFFERS = 128 << 20


class Endless:
    """A practically endless stream; ``sent``: bytes that the proxy has read of it."""

    sent = 0
    is_cut_off = False

    async def __call__(self, engine: FakeEngine, asked: RecordedRequest, writer: asyncio.StreamWriter) -> None:
        event = b": " + b"x" * 65536 + b"\n\n"
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n")
        try:
            while self.sent < MORE_THAN_BUFFERS:
                writer.write(event)
                await writer.drain()
                self.sent += len(event)
        finally:
            self.is_cut_off = True


async def test_a_client_that_does_not_read_is_gone(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not keep its slot, nor D's: D is disconnected after a while."""
    monkeypatch.setattr(reply, "SEND_TIMEOUT_S", 0.3)
    endless = Endless()
    site.decode[0].script.append(endless)
    async with site.proxy() as proxy:
        writer = await _without_reading(proxy)
        await async_wait_until(lambda: endless.is_cut_off)

        async def counted() -> bool:
            return await _outcome(proxy, "client_gone") == 1

        await async_wait_until(counted)
        writer.transport.abort()


async def test_a_slow_client_slows_d_down(site: Site) -> None:
    """The proxy does not buffer: it reads no faster than the client."""
    endless = Endless()
    site.decode[0].script.append(endless)
    async with site.proxy() as proxy:
        writer = await _without_reading(proxy)
        before = -1

        async def stands_still() -> bool:
            nonlocal before
            before, now = endless.sent, before
            await asyncio.sleep(0.3)
            return endless.sent == before == now > 0

        await async_wait_until(stands_still)
        assert endless.sent < MORE_THAN_BUFFERS
        writer.transport.abort()
        await async_wait_until(lambda: endless.is_cut_off)
