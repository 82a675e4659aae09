"""Conversations through the running proxy, as P, D and the client see them."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest
from disagg_proxy.settings import Engine
from disagg_proxy.transfer import Address, first_turn, hold_only
from harness.disagg_site import Site
from harness.fake_engine import ANSWER, DONE, PROMPT_TOKENS, FakeEngine, RecordedRequest, hold_back, send_answer
from harness.polling import async_wait_until
from harness.running_proxy import PATH, Clock, RunningProxy, data_of

TOKENS = PROMPT_TOKENS + len(ANSWER) - 1
"""What D holds after a turn: all but the last token."""


def _is_miss(params: dict[str, Any] | None) -> bool:
    return params == first_turn()


async def test_three_turns(site: Site) -> None:
    """B2.22, B2.24 P computes the first turn, then continues from D's hold, and D from P's."""
    p, d = site.prefill[0], site.decode[0]
    async with site.proxy() as proxy:
        for number in range(3):
            answer = await proxy.turn(max_tokens=4)
            assert answer.status_code == 200
            assert answer.json()["choices"][0]["text"] == "".join(ANSWER)
            given, taken = p.seen[number].handoff, d.seen[number].params
            assert taken["do_remote_prefill"] is True
            assert taken["remote_engine_id"] == "p0"
            assert taken["remote_request_id"] in p.holds
            if number == 0:
                assert _is_miss(given)
                continue
            assert (given["do_remote_decode"], given["do_remote_prefill"]) == (True, False)
            assert (given["remote_engine_id"], given["remote_host"], given["remote_port"]) == ("d0", "host-of-d0", 7070)
            assert given["remote_request_id"] in d.holds
            assert given["remote_num_tokens"] == TOKENS
        assert len({asked.params["remote_request_id"] for asked in p.seen[1:]}) == 2
        assert await proxy.metric("turns_total", reuse="miss") == 1
        assert await proxy.metric("turns_total", reuse="hit") == 2
        assert await proxy.metric("requests_total", outcome="ok", route=PATH) == 3
        assert await proxy.metric("prefill_seconds_count") == 3


async def test_ps_word_reaches_d_as_it_is(site: Site) -> None:
    """B2.18 P's parameters are forwarded to D unchanged."""
    async with site.proxy() as proxy:
        await proxy.turn()
    d_got = site.decode[0].seen[0].handoff
    assert d_got == site.prefill[0].params(d_got["remote_request_id"], PROMPT_TOKENS, prefilled=True)


async def test_what_each_is_sent(site: Site) -> None:
    """B2.20, B2.23 P: one token, no stream.

    D: as the client had it. Neither sees the conversation's id.
    """
    async with site.proxy() as proxy:
        wish = {"max_tokens": 4, "min_tokens": 2, "stream": True, "stream_options": {"include_usage": True}, "seed": 1}
        await proxy.turn(**wish)
    at_p, at_d = site.prefill[0].seen[0].body, site.decode[0].seen[0].body
    at_p.pop("kv_transfer_params")
    at_d.pop("kv_transfer_params")
    assert at_p == {"model": "m", "prompt": "Tell me", "max_tokens": 1, "stream": False, "seed": 1}
    assert at_d == {"model": "m", "prompt": "Tell me", **wish}


async def test_streams_are_remembered_under_the_name_they_were_given(site: Site) -> None:
    """B2.22 D's stream does not report its hold, so the next turn uses the given name."""
    p, d = site.prefill[0], site.decode[0]
    async with site.proxy() as proxy:
        first = await proxy.turn(stream=True)
        await proxy.turn(stream=True)
    name = d.seen[0].params["kvtier"]["hold_as"]
    given = p.seen[1].params
    assert _is_miss(p.seen[0].handoff)
    assert given["remote_request_id"] == name
    assert name in d.holds
    assert (given["remote_engine_id"], given["remote_host"], given["remote_port"]) == ("d0", "host-of-d0", 7070)
    assert (given["do_remote_decode"], given["remote_num_tokens"], given["tp_size"]) == (True, TOKENS, 2)
    assert given["remote_block_ids"] == [[0]]
    assert d.seen[1].params["kvtier"]["hold_as"] != name
    assert first.headers["content-type"].startswith("text/event-stream")
    assert "".join(chunk["choices"][0]["text"] for chunk in data_of(first.text)) == "".join(ANSWER)
    assert first.text.endswith("data: [DONE]\n\n")
    assert "usage" not in first.text


async def test_usage_is_sent_on_request(site: Site) -> None:
    """The client gets the usage chunk if it asked for it."""
    async with site.proxy() as proxy:
        answer = await proxy.turn(stream=True, stream_options={"include_usage": True})
    assert data_of(answer.text)[-1]["usage"]["total_tokens"] == PROMPT_TOKENS + len(ANSWER)


async def test_streams_and_whole_answers_follow_one_another(site: Site) -> None:
    """A conversation may change between the two; chat works the same."""
    async with site.proxy() as proxy:
        for stream, path in (
            (True, PATH),
            (False, PATH),
            (True, "/v1/chat/completions"),
            (False, "/v1/chat/completions"),
        ):
            await proxy.turn(stream=stream, path=path)
        assert await proxy.metric("turns_total", reuse="hit") == 3
        assert await proxy.metric("requests_total", outcome="ok", route="/v1/chat/completions") == 2
        assert await proxy.metric("first_token_seconds_count", route="/v1/chat/completions") == 1
        assert await proxy.metric("duration_seconds_count", route="/v1/chat/completions") == 2
    assert [asked.path for asked in site.prefill[0].seen] == [asked.path for asked in site.decode[0].seen]


async def test_events_arrive_as_they_come(site: Site) -> None:
    """The client gets the first events while D computes the others."""
    gate, got = asyncio.Event(), b""
    site.decode[0].script.append(hold_back(2, gate))
    async with (
        site.proxy() as proxy,
        proxy.http.stream("POST", PATH, json={"prompt": "x", "stream": True, "conversation_id": "c"}) as answer,
    ):
        async for chunk in answer.aiter_bytes():
            got += chunk
            if got.count(b"\n\n") == 2:
                gate.set()
    assert got.endswith(DONE)
    assert got.count(b"\n\n") == len(ANSWER) + 1


async def test_answers_do_not_show_what_engines_tell_one_another(site: Site) -> None:
    """`kv_transfer_params` are removed from answers and chunks; those of chunks are used."""

    async def newer(engine: FakeEngine, _: RecordedRequest, writer: asyncio.StreamWriter) -> None:
        held = engine.params("d's own name", TOKENS, prefilled=False)
        last = {"choices": [{"index": 0, "text": "x", "finish_reason": "stop"}], "kv_transfer_params": held}
        await send_answer(writer, 200, b"data: " + json.dumps(last).encode() + b"\n\n" + DONE, "text/event-stream")

    async with site.proxy() as proxy:
        whole = await proxy.turn()
        site.decode[0].script.append(newer)
        streamed = await proxy.turn(stream=True)
        await proxy.turn()
    assert "kv_transfer_params" not in whole.text + streamed.text
    assert site.prefill[0].seen[2].params["remote_request_id"] == "d's own name"


async def test_the_address_that_the_proxy_knows(site: Site) -> None:
    """B2.22 The remote host is D's configured kvtier server, for answers and for streams."""
    settings = site.settings()
    settings = replace(settings, decode=(Engine(site.decode[0].url, Address("10.9.8.7", 7171)),))
    async with site.proxy(settings) as proxy:
        for stream in (False, True, False):
            await proxy.turn(stream=stream)
    told = [(asked.params["remote_host"], asked.params["remote_port"]) for asked in site.prefill[0].seen[1:]]
    assert told == [("10.9.8.7", 7171)] * 2


async def test_no_conversation_no_reuse(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    """B2.20 A warning; P and D serve the turn, but no hold is used."""
    async with site.proxy() as proxy:
        for stream in (False, True, False):
            assert (await proxy.turn(None, stream=stream)).status_code == 200
        assert await proxy.metric("turns_total", reuse="no_conversation_id") == 3
        assert (await proxy.health())["conversations"] == 0
    assert [_is_miss(asked.handoff) for asked in site.prefill[0].seen] == [True] * 3
    assert all(asked.params["remote_engine_id"] == "p0" for asked in site.decode[0].seen)
    assert all(asked.params["kvtier"] == {"hold": False} for asked in site.decode[0].seen), "no later turn uses it"
    assert sum("has no conversation_id" in record.message for record in caplog.records) == 3


async def test_branches_of_a_turn_use_the_same_hold(site: Site) -> None:
    """B2.21 Two concurrent turns, and a third one when they have ended."""
    p, gate = site.prefill[0], asyncio.Event()
    async with site.proxy() as proxy:
        await proxy.turn()
        site.decode[0].script.extend([hold_back(1, gate)] * 2)
        await async_wait_until(lambda: len(p.seen) == 1)
        both = [asyncio.create_task(proxy.turn(stream=True, prompt=f"Tell me {place}")) for place in ("here", "there")]
        await async_wait_until(lambda: len(p.seen) == 3)
        gate.set()
        await asyncio.gather(*both)
        await proxy.turn(prompt="Tell me more")
    assert not any(_is_miss(asked.handoff) for asked in p.seen[1:])
    assert len({asked.params["remote_request_id"] for asked in p.seen[1:]}) == 1


async def test_a_fresh_prompt_leaves_the_hold_to_its_branch(site: Site) -> None:
    """B2.21 A sub-task of the same conversation is a miss, and the next turn uses the hold."""
    async with site.proxy() as proxy:
        for prompt in ("Tell me", "A sub-task", "Tell me more"):
            await proxy.turn(prompt=prompt)
        assert await proxy.metric("turns_total", reuse="miss") == 2
        assert await proxy.metric("turns_total", reuse="hit") == 1
    assert [_is_miss(asked.handoff) for asked in site.prefill[0].seen] == [True, True, False]


async def test_an_entry_ends(site: Site) -> None:
    """B2.21 After 450 s the turn is a miss, with the right answer."""
    clock = Clock()
    async with site.proxy(clock=clock) as proxy:
        await proxy.turn()
        clock.ahead += 440.0
        await proxy.turn()
        clock.ahead += 451.0
        assert (await proxy.turn()).json()["choices"][0]["text"] == "".join(ANSWER)
        assert await proxy.metric("turns_total", reuse="expired") == 1
        assert await proxy.metric("entries_evicted_total", reason="expired") == 1
        assert await proxy.metric("turns_total", reuse="hit") == 1
    assert [_is_miss(asked.handoff) for asked in site.prefill[0].seen] == [True, False, True]


async def test_health_evicts(site: Site) -> None:
    """B2.24 `/health` reports engines that are up, and removes expired entries."""
    clock = Clock()
    async with site.proxy(clock=clock) as proxy:
        await proxy.turn("c1")
        clock.ahead += 300.0
        await proxy.turn("c2")
        assert await proxy.metric("entries") == 2
        clock.ahead += 200.0
        health = await proxy.health()
        assert (health["conversations"], health["evicted"], health["status"]) == (1, 1, "ok")
        assert health["decode"] == [
            {"url": site.decode[0].url, "up": True, "outstanding": 0, "engine_id": "d0"},
        ]
        assert health["prefill"] == [{"url": site.prefill[0].url, "up": True, "outstanding": 0}]
        assert await proxy.metric("entries_evicted_total", reason="expired") == 1


async def test_a_restart_of_the_proxy_is_a_miss(site: Site) -> None:
    """The table is lost; the next turn is computed, and the one after uses a hold again."""
    async with site.proxy() as proxy:
        await proxy.turn()
    async with site.proxy() as proxy:
        for _ in range(2):
            assert (await proxy.turn()).json()["choices"][0]["text"] == "".join(ANSWER)
    assert [_is_miss(asked.handoff) for asked in site.prefill[0].seen] == [True, True, False]


async def test_credentials_keep_conversations_apart(site: Site) -> None:
    """The same id under two API keys is two conversations; engines get the key."""
    async with site.proxy() as proxy:
        for key in ("one", "two", "one"):
            proxy.http.headers["authorization"] = f"Bearer {key}"
            await proxy.turn()
    assert [_is_miss(asked.handoff) for asked in site.prefill[0].seen] == [True, True, False]
    assert site.decode[0].seen[1].headers["authorization"] == "Bearer two"


async def test_models_keep_conversations_apart(site: Site) -> None:
    """The same id with two models is two conversations, because their blocks differ."""
    async with site.proxy() as proxy:
        for model in ("one", "two", "one"):
            await proxy.turn(model=model)
    assert [_is_miss(asked.handoff) for asked in site.prefill[0].seen] == [True, True, False]


async def test_one_id_for_a_request_everywhere(site: Site) -> None:
    """P and D log a request under the same id, the client's own if it has one."""
    async with site.proxy() as proxy:
        await proxy.turn()
        proxy.http.headers["x-request-id"] = "mine"
        await proxy.turn()
    ids = [[asked.headers["x-request-id"] for asked in engine.seen] for engine in (site.prefill[0], site.decode[0])]
    assert ids[0] == ids[1]
    assert ids[0][0]
    assert ids[0][1] == "mine"


async def test_odd_headers_do_no_harm(site: Site) -> None:
    """Headers outside ASCII and a balancer's cookies are not sent to engines."""

    async def with_cookie(_: FakeEngine, __: RecordedRequest, writer: asyncio.StreamWriter) -> None:
        await send_answer(writer, 200, b"{}", "application/json\r\nset-cookie: user=one")

    async with site.proxy() as proxy:
        site.decode[0].script.append(with_cookie)
        await proxy.turn()
        body = {"prompt": "x"}
        answer = await proxy.http.post(PATH, json=body, headers=[(b"x-odd", "é".encode()), (b"x-even", b"e")])
        assert answer.status_code == 200
    headers = site.decode[0].seen[1].headers
    assert (headers.get("x-odd"), headers["x-even"], headers.get("cookie")) == (None, "e", None)


async def test_several_answers_are_ds_alone(site: Site) -> None:
    """A hold covers one request: P is not used, nothing is held, and the entry stays."""
    async with site.proxy() as proxy:
        await proxy.turn()
        await proxy.turn(n=2)
        await proxy.turn(n=2, stream=True)
        await proxy.turn()
        assert await proxy.metric("turns_total", reuse="not_one_prompt") == 2
    assert [_is_miss(asked.handoff) for asked in site.prefill[0].seen] == [True, False]
    assert [not asked.handoff for asked in site.decode[0].seen] == [False, True, True, False]
    assert "stream_options" not in site.decode[0].seen[2].body


async def test_a_hold_without_blocks_is_not_recorded(site: Site) -> None:
    """B2.3 If D returned no blocks, the next turn is a miss, not a claim."""
    async with site.proxy() as proxy:

        async def nothing_held(engine: FakeEngine, asked: RecordedRequest, writer: asyncio.StreamWriter) -> None:
            params = engine.params("r", 0, prefilled=False)
            await send_answer(
                writer, 200, json.dumps({**engine.complete_answer(asked), "kv_transfer_params": params}).encode()
            )

        site.decode[0].script.append(nothing_held)
        await proxy.turn()
        await proxy.turn()
    assert [_is_miss(asked.handoff) for asked in site.prefill[0].seen] == [True, True]


async def test_where_d_holds_nothing_streams_are_not_remembered(site: Site) -> None:
    """B2.15 A probe finds that D does not hold; P would wait in vain for such a hold."""
    site.decode[0].bidirectional = False
    async with site.proxy() as proxy:
        await async_wait_until(lambda: bool(site.decode[0].probes))
        await proxy.turn(stream=True)
        await proxy.turn(stream=True)
    assert [_is_miss(asked.handoff) for asked in site.prefill[0].seen] == [True, True]


async def test_probes_hold_one_name(site: Site) -> None:
    """Each decode engine is probed with one token under one name, and again after a while."""
    clock = Clock()
    async with site.proxy(clock=clock):
        clock.ahead += 301.0
        await async_wait_until(lambda: len(site.decode[0].probes) == 2)
    probes = site.decode[0].probes
    assert {asked.body["max_tokens"] for asked in probes} == {1}
    assert {asked.body["model"] for asked in probes} == {"model-of-d0"}
    assert len({asked.params["kvtier"]["hold_as"] for asked in probes}) == 1
    assert probes[0].handoff == hold_only()
    assert not site.prefill[0].probes


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_identifies_d(site: Site, *, stream: bool) -> None:
    """Without a probe that tells: from a whole answer, or a chunk of a newer engine.

    The next stream is remembered under it.
    """
    d = site.decode[0]

    async def telling(engine: FakeEngine, asked: RecordedRequest, writer: asyncio.StreamWriter) -> None:
        body = {**engine.complete_answer(asked), "kv_transfer_params": engine.params("own", TOKENS, prefilled=False)}
        event = b"data: " + json.dumps(body).encode() + b"\n\n" + DONE
        await send_answer(writer, 200, event, "text/event-stream") if stream else await send_answer(
            writer, 200, json.dumps(body).encode()
        )

    d.bidirectional = False  # for the probe; its answers report a hold
    async with site.proxy() as proxy:
        await async_wait_until(lambda: bool(d.probes))
        d.script.append(telling)
        await proxy.turn("other", stream=stream)
        await proxy.wait_discovered("d0")
        await proxy.turn(stream=True)
        await proxy.turn()
    told = site.prefill[0].seen[2].params
    assert told["remote_engine_id"] == "d0"
    assert told["remote_request_id"] == d.seen[1].params["kvtier"]["hold_as"]


async def test_a_d_that_holds_nothing_any_more_is_believed(site: Site) -> None:
    """B2.15 The next probe replaces what D reported before; no extra probe is sent."""
    d, clock = site.decode[0], Clock()
    async with site.proxy(clock=clock) as proxy:
        d.bidirectional = False
        clock.ahead += 301.0
        await async_wait_until(lambda: len(d.probes) == 2)

        async def forgotten() -> bool:
            return "engine_id" not in (await proxy.health())["decode"][0]

        await async_wait_until(forgotten)
        d.health = 500
        await proxy.wait_health(d, up=False)  # several looks at its health later
        assert len(d.probes) == 2


async def test_a_restarted_d_has_a_new_identity(site: Site) -> None:
    """After a restart of D, streams use its new id; holds of its old life keep the old one."""
    p, d = site.prefill[0], site.decode[0]
    async with site.proxy() as proxy:
        await proxy.turn("old", stream=True)
        await d.stop()
        await proxy.wait_health(d, up=False)
        d.engine_id = "d0-again"
        await d.start()
        await proxy.wait_discovered("d0-again")
        await proxy.turn("old", stream=True)
        await proxy.turn("new", stream=True)
        await proxy.turn("new", stream=True)
    told = [asked.params["remote_engine_id"] for asked in p.seen]
    assert told == [None, "d0", None, "d0-again"]


@pytest.mark.slow
async def test_many_conversations_at_once(site: Site) -> None:
    """Each turn continues from D's hold of its own conversation."""
    p, d = site.prefill[0], site.decode[0]

    async def talk(proxy: RunningProxy, name: str) -> None:
        for number in range(3):
            answer = await proxy.turn(name, stream=number % 2 == 0, user=name)
            assert answer.status_code == 200

    async with site.proxy() as proxy:
        await asyncio.gather(*(talk(proxy, f"c{number}") for number in range(40)))
        assert await proxy.metric("turns_total", reuse="hit") == 80
        assert await proxy.metric("instance_outstanding", role="decode", instance=d.url) == 0
    pulled = [asked.params["remote_request_id"] for asked in p.seen if not _is_miss(asked.handoff)]
    assert len(set(pulled)) == 80
    named = {asked.params["kvtier"]["hold_as"]: asked.body["user"] for asked in d.seen if asked.body["stream"]}
    for asked in p.seen:
        name = asked.params["remote_request_id"]
        assert named.get(name, asked.body["user"]) == asked.body["user"]
