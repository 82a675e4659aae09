"""Streams of D that do not end as they should, and clients that do not read them."""

from __future__ import annotations

import asyncio
import json

import pytest
from disagg_proxy.transfer import first_turn
from harness.disagg_site import Site
from harness.running_proxy import PATH, RunningProxy, data_of
from harness.standin_engine import ANSWER, DONE, PROMPT_TOKENS, Seen, StandinEngine, cut_off, stream

ERROR = b'data: {"error": {"message": "EngineCore died", "code": 500}}\n\n'
TEXT = b'data: {"choices": [{"index": 0, "text": "x", "finish_reason": null}]}\n\n'


async def _outcome(proxy: RunningProxy, outcome: str) -> float:
    return await proxy.metric("requests_total", outcome=outcome, route=PATH)


async def test_a_stream_without_an_end_is_broken(site: Site) -> None:
    """It ended in good order, but D never said that it was done: an error for the client, no `[DONE]`, nothing remembered."""
    site.decode[0].script.append(cut_off(len(ANSWER) + 1, cleanly=True))
    async with site.proxy() as proxy:
        answer = await proxy.turn(stream=True)
        assert data_of(answer.text)[-1]["error"]["code"] == 502
        assert "[DONE]" not in answer.text
        assert await _outcome(proxy, "broken") == 1
        await proxy.turn()
        assert await _outcome(proxy, "ok") == 1
    assert site.prefill[0].seen[1].params == first_turn()


async def test_an_end_without_a_blank_line_is_one(site: Site) -> None:
    """`[DONE]` may be the last that comes: the answer is whole, and its hold is remembered."""

    async def unended(engine: StandinEngine, asked: Seen, writer: asyncio.StreamWriter) -> None:
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
    """A last event without its blank line, whole or cut off, is not passed on unread."""

    async def newer(engine: StandinEngine, asked: Seen, writer: asyncio.StreamWriter) -> None:
        held = engine.params("d's own name", PROMPT_TOKENS, prefilled=False)
        last = b"data: " + json.dumps({"kv_transfer_params": held, "choices": []}).encode()
        await stream(TEXT, last[:length])(engine, asked, writer)

    site.decode[0].script.append(newer)
    async with site.proxy() as proxy:
        answer = await proxy.turn(stream=True)
    assert "kv_transfer_params" not in answer.text
    assert [*data_of(answer.text)][-1]["error"]["code"] == 502


async def test_an_error_in_the_middle_is_no_success(site: Site) -> None:
    """D says in an event that it failed, and ends in good order: passed on, and counted as what it is."""
    site.decode[0].script.append(stream(TEXT, ERROR, DONE))
    async with site.proxy() as proxy:
        answer = await proxy.turn(stream=True)
        assert answer.text.encode() == TEXT + ERROR + DONE
        assert (await _outcome(proxy, "broken"), await _outcome(proxy, "ok")) == (1, 0)
        await proxy.turn()
    assert site.prefill[0].seen[1].params == first_turn()
