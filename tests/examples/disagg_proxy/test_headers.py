"""Request lines and headers: what engines get of the client's, and the client of the engines'."""

from __future__ import annotations

import asyncio
import json

import pytest
from harness.disagg_site import Site
from harness.fake_engine import ANSWER, FakeEngine, RecordedRequest, send_answer
from harness.running_proxy import PATH

OF_THE_CONNECTION = {
    "connection": "close, X-Hop",
    "x-hop": "1",
    "keep-alive": "timeout=5",
    "proxy-authorization": "Basic eDp5",
    "proxy-connection": "keep-alive",
    "te": "trailers",
    "trailer": "x",
    "upgrade": "h2c",
    "content-encoding": "identity",
    "cookie": "a=b",
    "x-data-parallel-rank": "1",
    "accept-encoding": "br",
    "content-type": "text/plain",
}


@pytest.mark.parametrize("host", ["x/reset_prefix_cache?", "x/v1/models", "x#", "[", "a b"])
async def test_what_engines_are_asked_is_not_the_hosts_business(site: Site, host: str) -> None:
    """A `Host` with `/` and `?` (Starlette 1.0.0 makes a URL of it) does not change the path."""
    async with site.proxy() as proxy:
        answer = await proxy.http.post(PATH, json={"prompt": "x", "stream": True}, headers={"host": host})
        assert answer.status_code == 200
        assert await proxy.metric("first_token_seconds_count", route=PATH) == 1
        nowhere = await proxy.http.get("/nowhere", headers={"host": host})
        assert nowhere.json()["error"]["message"] == "There is no GET /nowhere here."
    assert [asked.path for engine in (site.prefill[0], site.decode[0]) for asked in engine.seen] == [PATH] * 2


async def test_a_path_that_only_looks_like_one_is_not_passed_on(site: Site) -> None:
    """Starlette's routes accept a final line break; engines get the route's path anyway."""
    async with site.proxy() as proxy:
        answer = await proxy.http.post(f"{PATH}%0A", content=json.dumps({"prompt": "x"}))
        assert answer.status_code == 200
        assert await proxy.metric("requests_total", outcome="ok", route=PATH) == 1
    assert [asked.path for asked in site.decode[0].seen] == [PATH]


async def test_headers_of_the_connection_stay_on_it(site: Site) -> None:
    """Connection, encoding and balancer headers of the client are not sent to engines."""
    async with site.proxy() as proxy:
        headers = {**OF_THE_CONNECTION, "x-other": "2"}
        assert (await proxy.http.post(PATH, content=b'{"prompt": "x"}', headers=headers)).status_code == 200
    for engine in (site.prefill[0], site.decode[0]):
        got = engine.seen[0].headers
        assert got["x-other"] == "2"
        kept = {name for name in OF_THE_CONNECTION if got.get(name) == OF_THE_CONNECTION[name]}
        assert not kept
        assert (got["content-type"], got["accept-encoding"]) == ("application/json", "identity")
        assert not got.keys() & {"x-hop", "te", "upgrade", "trailer", "x-data-parallel-rank", "content-encoding"}


async def test_headers_of_an_engines_connection_stay_on_it(site: Site) -> None:
    """The same for responses; headers about the answer are forwarded."""

    async def chatty(engine: FakeEngine, asked: RecordedRequest, writer: asyncio.StreamWriter) -> None:
        more = "connection: x-hop\r\nx-hop: 1\r\nkeep-alive: timeout=5\r\nserver: engine\r\ncontent-encoding: identity"
        await send_answer(
            writer, 200, json.dumps(engine.complete_answer(asked)).encode(), f"application/json\r\n{more}"
        )

    site.decode[0].script.append(chatty)
    async with site.proxy() as proxy:
        answer = await proxy.turn()
    assert answer.json()["choices"][0]["text"] == "".join(ANSWER)
    assert answer.headers["x-engine"] == "yes"
    assert answer.headers.get("server") != "engine"
    assert not answer.headers.keys() & {"x-hop", "keep-alive", "content-encoding", "connection"}


async def test_headers_of_a_stream(site: Site) -> None:
    """The request's id is kept, and nothing on the way may cache the response."""

    async def named(engine: FakeEngine, asked: RecordedRequest, writer: asyncio.StreamWriter) -> None:
        event = b"".join(engine.events(asked))
        await send_answer(writer, 200, event, "text/event-stream\r\nx-request-id: theirs\r\ncache-control: public")

    site.decode[0].script.append(named)
    async with site.proxy() as proxy:
        answer = await proxy.turn(stream=True)
    assert (answer.headers["x-request-id"], answer.headers["cache-control"]) == ("theirs", "no-cache")
    assert "x-engine" not in answer.headers


async def test_a_header_names_the_source_of_missing_blocks(site: Site) -> None:
    """Both engines get it as a setting, with the client's own settings; it overrides theirs."""
    async with site.proxy() as proxy:
        body = {"prompt": "x", "kv_transfer_params": {"kvtier": {"min_hit_tokens": 5, "source": "c:1"}}}
        headers = {"x-kv-cache-source-host-port": "kv-b.example:7450"}
        assert (await proxy.http.post(PATH, json=body, headers=headers)).status_code == 200
    for engine in (site.prefill[0], site.decode[0]):
        settings = engine.seen[0].body["kv_transfer_params"]["kvtier"]
        assert (settings["source"], settings["min_hit_tokens"]) == ("kv-b.example:7450", 5)


@pytest.mark.parametrize("source", ["kv-b", "unix:/run/kvtier.sock", "kv-b:0", "kv-b:http"])
async def test_a_header_that_names_no_server_is_refused(site: Site, source: str) -> None:
    async with site.proxy() as proxy:
        answer = await proxy.http.post(PATH, json={"prompt": "x"}, headers={"x-kv-cache-source-host-port": source})
        assert answer.status_code == 400
        assert "x-kv-cache-source-host-port" in answer.json()["error"]["message"]
    assert not site.decode[0].seen
