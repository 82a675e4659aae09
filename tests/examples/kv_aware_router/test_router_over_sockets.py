"""The router with real kvtier servers and stand-in engines."""

from __future__ import annotations

import asyncio
import hashlib
import json
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from harness.fake_engine import FakeEngine, RecordedRequest, close_connection, close_midway, send_answer
from harness.indexer import engine
from harness.payloads import namespace_of, payload
from harness.polling import async_wait_until
from harness.running_proxy import Clock, serve
from harness.server_process import ServerProcess
from kv_aware_router.app import ENGINE_HEADER, TOKENS_HEADER, make_app
from kv_aware_router.routing import Policy

from kvtier.client import Client, make_key
from kvtier.client.events import BlockContent, describe_blocks
from kvtier.protos.v1 import admin_pb2
from kvtier.protos.wire.block_contents import pack_tokens

BLOCK = 16
PART = 64 << 10
NAMESPACE = namespace_of(PART)
PROMPT = list(range(1000, 1000 + 10 * BLOCK))
PATH = "/v1/completions"


@dataclass
class Host:
    """A host: a kvtier server that publishes, a client of it, and an engine."""

    server: ServerProcess
    client: Client
    engine: FakeEngine

    @property
    def directory(self) -> Path:
        return self.server.directory

    @property
    def target(self) -> tuple[str, tuple[str, str]]:
        return self.engine.url, (f"ipc://{self.directory}/pub", f"ipc://{self.directory}/replay")

    def store(self, blocks: int, tokens: list[int] = PROMPT) -> None:
        """Stores the first blocks of a prompt, as an engine does."""
        ends = range(BLOCK, blocks * BLOCK + 1, BLOCK)
        keys = [make_key(hashlib.sha256(repr(tokens[:end]).encode()).digest()) for end in ends]
        parents = [None, *keys]
        contents = [
            BlockContent(parents[number], pack_tokens(tokens[end - BLOCK : end])) for number, end in enumerate(ends)
        ]
        describe_blocks(self.client, keys, contents)
        self.client.store(keys, [payload(key, PART) for key in keys])


@dataclass
class Site:
    hosts: list[Host]
    http: httpx.AsyncClient
    clock: Clock

    async def ask(self, prompt: Any = PROMPT, **more: Any) -> tuple[int, int]:
        """Sends a request; returns the number of its host, and the tokens that the router knew."""
        answer = await self.http.post(PATH, json={"model": "served", "prompt": prompt, **more})
        assert answer.status_code == 200, answer.text
        urls = [host.engine.url for host in self.hosts]
        return urls.index(answer.headers[ENGINE_HEADER]), int(answer.headers[TOKENS_HEADER])

    async def rows(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = (await self.http.get("/health")).json()["engines"]
        return rows

    async def wait_for_blocks(self, *numbers: int) -> None:
        """Waits until the indexes of the hosts have these numbers of blocks."""

        async def known() -> bool:
            return [row["blocks"] for row in await self.rows()] == list(numbers)

        await async_wait_until(known)


@asynccontextmanager
async def site(policy: Policy = Policy.PREFIX) -> AsyncIterator[Site]:
    """Two hosts and a router."""
    with ExitStack() as running, tempfile.TemporaryDirectory(prefix="kvr-") as directory:
        async with AsyncExitStack() as serving:
            hosts = []
            for name in "ab":
                own = Path(directory) / name
                own.mkdir()
                config = f'[events]\npublish = "ipc://{own}/pub"\nreplay = "ipc://{own}/replay"\n'
                server = running.enter_context(ServerProcess(own, config=config).start())
                client = running.enter_context(Client(server.endpoint, namespace=NAMESPACE))
                client.wait_until_connected(60)
                running.enter_context(engine(server, NAMESPACE, f"{name}:8000"))
                stand_in = FakeEngine(name)
                await stand_in.start()
                serving.callback(stand_in.close)
                serving.push_async_callback(stand_in.stop)
                hosts.append(Host(server, client, stand_in))
            clock = Clock()
            app = make_app([host.target for host in hosts], policy, clock)
            _, http = await serving.enter_async_context(serve(app))
            yield Site(hosts, http, clock)


async def test_a_conversation_goes_where_its_blocks_are() -> None:
    """B6.9 Stores of either host, an eviction and a reset change the choice."""
    async with site() as routed:
        first, second = routed.hosts
        await asyncio.to_thread(first.store, 3)
        await routed.wait_for_blocks(3, 0)
        assert [await routed.ask() for _ in range(2)] == [(0, 3 * BLOCK)] * 2
        await asyncio.to_thread(second.store, 5)
        await routed.wait_for_blocks(3, 5)
        assert await routed.ask() == (1, 5 * BLOCK)
        assert await routed.ask(PROMPT[: 3 * BLOCK]) == (1, 3 * BLOCK), "both have it: it has fewer requests"
        assert (await routed.ask([7, *PROMPT]))[1] == 0
        for server in (first.server, second.server):
            await asyncio.to_thread(_evict_all, server)
        await routed.wait_for_blocks(0, 0)
        assert (await routed.ask())[1] == 0


async def test_round_robin_for_comparison() -> None:
    """The choice ignores the blocks, but the headers tell what the host had."""
    async with site(Policy.ROUND_ROBIN) as routed:
        await asyncio.to_thread(routed.hosts[0].store, 3)
        await routed.wait_for_blocks(3, 0)
        assert [await routed.ask() for _ in range(4)] == [(0, 3 * BLOCK), (1, 0)] * 2
        rows = await routed.rows()
        assert [(row["requests"], row["known_tokens"]) for row in rows] == [(2, 6 * BLOCK), (2, 0)]


async def test_a_server_that_ends_has_no_blocks_and_one_that_starts_is_read_anew() -> None:
    """B6.8 The engine cannot load from a server that is away. A restart begins at sequence 0."""
    async with site() as routed:
        host = routed.hosts[0]
        await asyncio.to_thread(host.store, 4)
        await routed.wait_for_blocks(4, 0)
        host.server.kill()
        await routed.wait_for_blocks(0, 0)
        await asyncio.to_thread(host.server.start)
        await asyncio.to_thread(host.client.wait_until_connected, 60)
        await asyncio.to_thread(host.store, 6, [5, *PROMPT])
        await routed.wait_for_blocks(6, 0)
        assert await routed.ask([5, *PROMPT]) == (0, 6 * BLOCK)


async def test_a_router_that_starts_late_reads_the_replay() -> None:
    """B6.8 It knows the blocks of before without a new message."""
    async with site() as routed:
        await asyncio.to_thread(routed.hosts[1].store, 4)
        await routed.wait_for_blocks(0, 4)
        app = make_app([host.target for host in routed.hosts], Policy.PREFIX, routed.clock)
        async with serve(app) as (_, http):
            late = Site(routed.hosts, http, routed.clock)
            await late.wait_for_blocks(0, 4)
            assert await late.ask() == (1, 4 * BLOCK)


async def test_an_engine_that_fails_is_replaced() -> None:
    """Before the first byte by another engine; afterwards the client gets an error event."""
    async with site() as routed:
        await asyncio.to_thread(routed.hosts[0].store, 4)
        await routed.wait_for_blocks(4, 0)
        routed.hosts[0].engine.script.append(close_connection)
        assert await routed.ask() == (1, 0)
        assert await routed.ask() == (1, 0), "the engine rests"
        routed.clock.ahead += 60
        assert await routed.ask() == (0, 4 * BLOCK)
        routed.hosts[0].engine.script.append(close_midway(2))
        answer = await routed.http.post(PATH, json={"model": "served", "prompt": PROMPT, "stream": True})
        assert '"error"' in answer.text
        assert "[DONE]" not in answer.text


async def test_streams_are_passed_on_unchanged() -> None:
    async with site() as routed:
        answer = await routed.http.post(PATH, json={"model": "served", "prompt": PROMPT, "stream": True})
        assert answer.headers["content-type"].startswith("text/event-stream")
        chosen = routed.hosts[[host.engine.url for host in routed.hosts].index(answer.headers[ENGINE_HEADER])]
        assert answer.content == b"".join(chosen.engine.events(chosen.engine.seen[-1]))
        assert (await routed.http.get("/v1/models")).json()["data"][0]["id"].startswith("model-of-")


def _tokenizing(tokens: list[int]) -> Callable[..., Any]:
    async def behaviour(_: FakeEngine, asked: RecordedRequest, writer: asyncio.StreamWriter) -> None:
        assert asked.path == "/tokenize"
        await send_answer(writer, 200, json.dumps({"tokens": tokens, "count": len(tokens)}).encode())

    return behaviour


async def test_an_engine_tokenizes_texts() -> None:
    """If it cannot, the request goes to the least loaded engine."""
    async with site() as routed:
        await asyncio.to_thread(routed.hosts[1].store, 4)
        await routed.wait_for_blocks(0, 4)
        routed.hosts[0].engine.script.append(_tokenizing(PROMPT))
        messages = [{"role": "user", "content": "hello"}]
        answer = await routed.http.post("/v1/chat/completions", json={"model": "served", "messages": messages})
        assert answer.headers[TOKENS_HEADER] == str(4 * BLOCK)
        assert routed.hosts[0].engine.seen[0].body == {"model": "served", "messages": messages}
        routed.hosts[0].engine.script.append(close_connection)
        assert (await routed.ask("hello"))[1] == 0


async def test_tokenizing_takes_no_turn() -> None:
    """Round robin alternates between the engines, also if an engine is asked for the tokens."""
    async with site(Policy.ROUND_ROBIN) as routed:
        assert [(await routed.ask("some text"))[0] for _ in range(4)] == [0, 1, 0, 1]


async def test_bodies_that_are_no_request_are_refused() -> None:
    async with site() as routed:
        for raw in (b"{", b"[]", b'"text"'):
            answer = await routed.http.post(PATH, content=raw)
            assert answer.status_code == 400
        assert not any(host.engine.seen for host in routed.hosts)


def _evict_all(server: ServerProcess) -> None:
    for _ in server._admin.Evict(admin_pb2.EvictRequest()):
        pass
