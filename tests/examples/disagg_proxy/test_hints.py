"""Hints through the running proxy, with a real kvtier server behind stand-in engines."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from disagg_proxy import hints
from disagg_proxy.agents import Hint, HintAction
from disagg_proxy.fleet import Fleet
from disagg_proxy.hints import Hints
from disagg_proxy.metrics import Metrics
from disagg_proxy.pages import MAX_HINT_BYTES
from disagg_proxy.settings import Engine, Settings
from harness.disagg_site import Site
from harness.fake_engine import DONE, Behaviour, FakeEngine, RecordedRequest, fail, send_answer, stream
from harness.payloads import key_of, namespace_of, payload
from harness.polling import async_wait_until
from harness.running_proxy import Clock, RunningProxy
from harness.server_process import MIB, ServerProcess

from kvtier.client import AsyncClient, ConversationClient, ConversationInfo, KeyStatus, TierFilter

CHAT = "/v1/chat/completions"
PART = 64 << 10
ONLY_CPU = TierFilter(names=frozenset(["lmdb"]))
CALL = {"id": "1", "type": "function", "function": {"name": "search", "arguments": "{}"}}
TOOL_RESULT = [{"role": "user", "content": "x"}, {"role": "tool", "content": "y", "tool_call_id": "1"}]


@pytest.fixture(autouse=True)
async def grpc_poller() -> AsyncIterator[None]:
    """Starts gRPC's thread before a test counts its threads."""
    grpc.aio.init_grpc_aio()
    yield
    grpc.aio.shutdown_grpc_aio()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Yields a server whose CPU tier has room for 128 blocks. Its disk tier has room for all."""
    with ServerProcess(tmp_path_factory.mktemp("s"), region=8 * MIB).start() as server:
        yield server


@pytest.fixture
async def client(server: ServerProcess, request: pytest.FixtureRequest) -> AsyncIterator[AsyncClient]:
    """Yields the client of the stand-in engines. Its blocks are new."""
    async with AsyncClient(server.endpoint, namespace=namespace_of(PART, model=request.node.name)) as client:
        await client.wait_until_connected(60)
        yield client
        await client.reset(wait=60)
    await asyncio.get_running_loop().shutdown_default_executor()  # its thread would count as left behind


def keys_of(first: int, count: int = 8) -> list[bytes]:
    return [key_of(number) for number in range(first, first + count)]


def caching(client: AsyncClient, keys: list[bytes], *, calls: bool = False) -> Behaviour:
    """An engine that looks up and stores its blocks with the conversation that the proxy names."""

    async def behaviour(engine: FakeEngine, asked: RecordedRequest, writer: asyncio.StreamWriter) -> None:
        assert asked.params is not None
        request_id, name = uuid.uuid4().hex, asked.params["kvtier"]["conversation_id"]
        lease = await client.begin_request(request_id, keys, conversation_id=name, wait=30)
        hits = lease.prefix_hits
        await lease.release()
        await client.store(keys[hits:], [payload(key, PART) for key in keys[hits:]], request_id=request_id)
        await client.finish_request(request_id)
        await client.flush(keys, wait=60)
        await (calling if calls else answering)(engine, asked, writer)

    return behaviour


async def answering(engine: FakeEngine, asked: RecordedRequest, writer: asyncio.StreamWriter) -> None:
    await send_answer(writer, 200, json.dumps(engine.complete_answer(asked)).encode())


async def calling(engine: FakeEngine, asked: RecordedRequest, writer: asyncio.StreamWriter) -> None:
    """An answer that calls a tool."""
    choice = {"index": 0, "finish_reason": "tool_calls", "message": {"role": "assistant", "tool_calls": [CALL]}}
    await send_answer(writer, 200, json.dumps({**engine.complete_answer(asked), "choices": [choice]}).encode())


CALLING_STREAM = stream(
    *(
        b"data: " + json.dumps({"id": "1", "choices": [{"index": 0, **choice}]}).encode() + b"\n\n"
        for choice in ({"delta": {"tool_calls": [CALL]}}, {"delta": {}, "finish_reason": "tool_calls"})
    ),
    DONE,
)


async def hinted(proxy: RunningProxy, action: str, outcome: str = "ok", times: int = 1) -> None:
    """Waits until `times` hints had this outcome."""

    async def is_counted() -> bool:
        return await proxy.metric("hints_total", action=action, outcome=outcome) == times

    await async_wait_until(is_counted)


async def count_hints(proxy: RunningProxy) -> int:
    lines = (await proxy.http.get("/metrics")).text.splitlines()
    return sum(int(float(line.split()[-1])) for line in lines if line.startswith("disagg_proxy_hints_total{"))


async def in_cpu(client: AsyncClient, keys: list[bytes]) -> int:
    """Returns how many blocks the CPU tier has."""
    lease = await client.lookup(keys, prefix=False, exclude=ONLY_CPU)
    await lease.release()
    return lease.statuses.count(KeyStatus.HIT)


async def flood(client: AsyncClient) -> None:
    """Stores twice as many other blocks as the CPU tier has room for."""
    for start in range(1000, 1256, 32):
        keys = keys_of(start, 32)
        await client.store(keys, [payload(key, PART) for key in keys])
        await client.flush(keys, wait=60)


def listed(server: ServerProcess, name: str) -> ConversationInfo:
    """Returns the conversation that a client of the proxy calls `name`."""
    with ConversationClient(server.endpoint, timeout=60) as operator:
        return next(each for each in operator.list().conversations if each.conversation_id.endswith(f".{name}"))


async def test_blocks_survive_pressure_while_a_tool_runs(
    site: Site, server: ServerProcess, client: AsyncClient
) -> None:
    """Those of an agent between its requests, and those of no other conversation.

    The answer to the tool's result calls no tools, so it ends the retention.
    """
    agent, other = keys_of(0), keys_of(100)
    site.prefill[0].script.extend([caching(client, agent), caching(client, other), caching(client, agent)])
    site.decode[0].script.extend([calling, answering, answering])
    async with site.proxy(site.settings(hints=server.endpoint)) as proxy:
        await proxy.turn("agent", path=CHAT)
        await proxy.turn("other", path=CHAT)
        await hinted(proxy, "retain")
        retained = listed(server, "agent").retained_seconds
        assert retained is not None
        assert 60 < retained <= 300
        await flood(client)
        assert (await in_cpu(client, agent), await in_cpu(client, other)) == (8, 0)
        await proxy.turn("agent", path=CHAT, messages=TOOL_RESULT)
        await hinted(proxy, "prefetch")
        await hinted(proxy, "release")
        assert await count_hints(proxy) == 3
    assert listed(server, "agent").retained_seconds is None
    assert listed(server, "agent").requests == 2


@pytest.mark.parametrize("by", ["request", "hint"])
async def test_blocks_are_loaded_before_the_engine_needs_them(
    site: Site, server: ServerProcess, client: AsyncClient, by: str
) -> None:
    """When the tool's result arrives, or when the agent says that the tool is about to end."""
    keys = keys_of(0)

    async def waiting(engine: FakeEngine, asked: RecordedRequest, writer: asyncio.StreamWriter) -> None:
        async def is_loaded() -> bool:
            return await in_cpu(client, keys) == len(keys)

        await async_wait_until(is_loaded)
        await answering(engine, asked, writer)

    site.prefill[0].script.extend([caching(client, keys), waiting])
    async with site.proxy(site.settings(hints=server.endpoint)) as proxy:
        await proxy.turn(by, path=CHAT)
        await flood(client)
        assert await in_cpu(client, keys) == 0
        messages = TOOL_RESULT
        if by == "hint":
            sent = {"model": "m", "conversation_id": by, "hint": "prefetch"}
            answer = await proxy.http.post("/hints", json=sent)
            assert (answer.status_code, answer.json()) == (202, {"servers": 1})
            messages = []
        assert (await proxy.turn(by, path=CHAT, messages=messages)).status_code == 200
        await hinted(proxy, "prefetch")


async def test_decode_engines_without_prefill_engines_prefetch(site: Site, server: ServerProcess) -> None:
    """The hint goes to the server of the engine that gets the prompt."""
    site.decode[0].script.append(calling)
    async with site.proxy(site.settings(prefills=0, hints=server.endpoint)) as proxy:
        await proxy.turn("alone", path=CHAT, messages=TOOL_RESULT)
        await hinted(proxy, "prefetch", "conversation_not_found")
        await hinted(proxy, "retain", "conversation_not_found")


async def test_streams_that_call_tools(site: Site, server: ServerProcess, client: AsyncClient) -> None:
    """For the time that the request gives."""
    site.prefill[0].script.append(caching(client, keys_of(0)))
    site.decode[0].script.append(CALLING_STREAM)
    async with site.proxy(site.settings(hints=server.endpoint)) as proxy:
        headers = {"x-kv-cache-tool-seconds": "1000"}
        body = {"model": "m", "messages": [], "conversation_id": "streamed", "stream": True}
        assert (await proxy.http.post(CHAT, json=body, headers=headers)).status_code == 200
        await hinted(proxy, "retain")
    assert 900 < (listed(server, "streamed").retained_seconds or 0) <= 1000


@pytest.mark.parametrize("by", ["header", "hint"])
async def test_the_end_of_a_conversation_releases_its_blocks(
    site: Site, server: ServerProcess, client: AsyncClient, by: str
) -> None:
    """Also if the last answer calls tools."""
    site.prefill[0].script.extend([caching(client, keys_of(0))] * 2)
    site.decode[0].script.extend([calling] * 2)
    async with site.proxy(site.settings(hints=server.endpoint)) as proxy:
        await proxy.turn(by, path=CHAT)
        await hinted(proxy, "retain")
        if by == "header":
            body = {"model": "m", "messages": [], "conversation_id": by}
            await proxy.http.post(CHAT, json=body, headers={"x-kv-cache-conversation": "end"})
        else:
            sent = {"model": "m", "conversation_id": by, "hint": "release"}
            assert (await proxy.http.post("/hints", json=sent)).json() == {"servers": 1}
            assert (await proxy.http.post("/hints", json=sent)).json() == {"servers": 0}
        await hinted(proxy, "release")
    assert listed(server, by).retained_seconds is None


async def test_credentials_keep_hints_apart(site: Site, server: ServerProcess, client: AsyncClient) -> None:
    """A client cannot release the conversation of another client that chose the same name."""
    site.prefill[0].script.append(caching(client, keys_of(0)))
    site.decode[0].script.append(calling)
    async with site.proxy(site.settings(hints=server.endpoint)) as proxy:
        await proxy.turn("secret", path=CHAT)
        await hinted(proxy, "retain")
        sent = {"model": "m", "conversation_id": "secret", "hint": "release"}
        other = await proxy.http.post("/hints", json=sent, headers={"authorization": "Bearer other"})
        assert other.json() == {"servers": 0}
        assert (await proxy.http.post("/hints", json=sent)).json() == {"servers": 1}


@pytest.mark.parametrize("body", [b"", b"[]", b'{"conversation_id": "c"}', b'{"conversation_id": "c", "hint": "pin"}'])
async def test_invalid_hints_are_refused(site: Site, body: bytes) -> None:
    async with site.proxy() as proxy:
        assert (await proxy.http.post("/hints", content=body)).status_code == 400
        assert (await proxy.http.post("/hints", content=b" " * (MAX_HINT_BYTES + 1))).status_code == 413


@pytest.mark.parametrize("name", ["x-kv-cache-tool-seconds", "x-kv-cache-conversation"])
async def test_requests_with_invalid_headers_are_refused(site: Site, name: str) -> None:
    async with site.proxy() as proxy:
        answer = await proxy.http.post(CHAT, json={"messages": []}, headers={name: "nonsense"})
        assert answer.status_code == 400
        assert name in answer.json()["error"]["message"]


async def test_without_a_server_requests_are_served(
    site: Site, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The failures are logged and counted."""
    site.decode[0].script.append(calling)
    async with site.proxy(site.settings(hints=f"unix:{tmp_path}/none")) as proxy:
        for messages in ([], TOOL_RESULT):
            assert (await proxy.turn("c", path=CHAT, messages=messages)).status_code == 200
        for action in ("retain", "prefetch", "release"):
            await hinted(proxy, action, "unreachable")
    assert "got no retain of" in caplog.text


async def test_a_server_that_hangs_delays_no_request(
    site: Site, server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hints, "TIMEOUT_S", 0.2)
    site.decode[0].script.append(calling)
    server.suspend()
    try:
        async with site.proxy(site.settings(hints=server.endpoint)) as proxy:
            assert (await proxy.turn("c", path=CHAT)).status_code == 200
            await hinted(proxy, "retain", "unreachable")
    finally:
        server.resume()


async def test_failed_requests_send_no_hints(site: Site, server: ServerProcess) -> None:
    """Neither does a conversation without a name."""
    site.decode[0].script.extend([fail(400), calling])
    async with site.proxy(site.settings(hints=server.endpoint)) as proxy:
        await proxy.turn("c", path=CHAT)
        await proxy.turn(None, path=CHAT, messages=TOOL_RESULT)
        assert await count_hints(proxy) == 0


async def test_two_servers_get_the_hints_of_their_engines(
    site: Site, server: ServerProcess, client: AsyncClient, tmp_path: Path
) -> None:
    """Prefetches go to the server of the prefill engine, retentions to both."""
    site.prefill[0].script.append(caching(client, keys_of(0)))
    site.decode[0].script.append(calling)
    absent = f"unix:{tmp_path}/none"
    settings = Settings(
        prefill=(Engine(site.prefill[0].url, hints=server.endpoint),),
        decode=(Engine(site.decode[0].url, hints=absent),),
        check_interval=0.05,
    )
    async with site.proxy(settings) as proxy:
        await proxy.turn("two", path=CHAT, messages=TOOL_RESULT)
        await hinted(proxy, "retain")
        await hinted(proxy, "retain", "unreachable")
        assert await count_hints(proxy) == 3


def hints_total(metrics: Metrics, outcome: str) -> Any:
    return metrics.hints.labels("retain", outcome)._value.get()


async def test_hints_that_wait_too_long_are_dropped(server: ServerProcess) -> None:
    """The queue of a server has a limit, and old hints are not sent."""
    clock, metrics = Clock(), Metrics([Fleet([])], int)
    sending = Hints([server.endpoint], metrics, clock)
    sending.send([Hint(server.endpoint, HintAction.RETAIN, "c", 1.0)] * (hints.MAX_QUEUED + 2))
    assert hints_total(metrics, "dropped") == 2
    clock.ahead += hints.MAX_AGE_S + 1
    sent = Hint(server.endpoint, HintAction.RETAIN, "c", 1.0)
    async with sending.running():
        await async_wait_until(lambda: hints_total(metrics, "dropped") == hints.MAX_QUEUED + 2)
        sending.send([sent])
        await async_wait_until(lambda: hints_total(metrics, "conversation_not_found") == 1)
