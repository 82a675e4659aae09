"""The proxy of ``examples/disagg_proxy`` on a port of this process."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx
import uvicorn
from disagg_proxy.app import make_app
from disagg_proxy.settings import Settings
from starlette.types import ASGIApp

from .fake_engine import FakeEngine
from .polling import async_wait_until

__all__ = ["Clock", "RunningProxy", "data_of", "run_proxy", "serve"]

PATH = "/v1/completions"


class Clock:
    """Real time plus what a test adds."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead


class RunningProxy:
    def __init__(self, url: str, http: httpx.AsyncClient, clock: Clock) -> None:
        self.url = url
        self.http = http
        self.clock = clock

    async def turn(self, conversation_id: str | None = "c", *, path: str = PATH, **body: Any) -> httpx.Response:
        """Sends one turn; reads streams to their end."""
        named = {} if conversation_id is None else {"conversation_id": conversation_id}
        return await self.http.post(path, json={"model": "m", "prompt": "Tell me", **named, **body})

    async def health(self) -> dict[str, Any]:
        answer: dict[str, Any] = (await self.http.get("/health")).json()
        return answer

    async def metric(self, name: str, **labels: str) -> float:
        """A metric's value; 0 if it has no sample."""
        text = (await self.http.get("/metrics")).text
        wanted = "".join(f'{label}="{value}",' for label, value in sorted(labels.items())).rstrip(",")
        start = f"disagg_proxy_{name}{{{wanted}}} " if labels else f"disagg_proxy_{name} "
        return sum(float(line.removeprefix(start)) for line in text.splitlines() if line.startswith(start))

    async def wait_discovered(self, *engine_ids: str) -> None:
        """Waits until it has discovered these decode engines."""

        async def known() -> bool:
            return {engine.get("engine_id") for engine in (await self.health())["decode"]} >= set(engine_ids)

        await async_wait_until(known)

    async def wait_health(self, engine: FakeEngine, *, up: bool) -> None:
        """Waits until it has marked an engine as up or down."""

        async def noticed() -> bool:
            health = await self.health()
            return up in [seen["up"] for seen in health["prefill"] + health["decode"] if seen["url"] == engine.url]

        await async_wait_until(noticed)


@asynccontextmanager
async def run_proxy(settings: Settings, clock: Clock | None = None) -> AsyncIterator[RunningProxy]:
    """Runs a proxy inside of the context."""
    clock = clock or Clock()
    async with serve(make_app(settings, clock)) as (url, http):
        yield RunningProxy(url, http, clock)


@asynccontextmanager
async def serve(app: ASGIApp) -> AsyncIterator[tuple[str, httpx.AsyncClient]]:
    """Serves an application inside of the context. Yields its URL and a client of it."""
    config = uvicorn.Config(app, log_config=None, lifespan="on", ws="none", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    listening = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    try:
        await async_wait_until(lambda: server.started or serving.done())
        async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as http:
            yield url, http
    finally:
        server.should_exit = True
        await serving
        listening.close()


def data_of(stream: str) -> list[Mapping[str, Any]]:
    """The JSON of each event of a stream except for the final one."""
    events = [event.removeprefix("data: ") for event in stream.split("\n\n") if event]
    return [json.loads(event) for event in events if event != "[DONE]"]
