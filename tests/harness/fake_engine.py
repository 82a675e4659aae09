"""Fake vLLM engine with kvtier's connector over HTTP: records requests and fails on demand.

Uses asyncio's streams directly, so that it can close a connection anywhere in an answer, and detect
that the client has closed it.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from .polling import async_wait_until
from .ports import ReservedPort

__all__ = [
    "Behaviour",
    "FakeEngine",
    "RecordedRequest",
    "answer_normally",
    "close_connection",
    "close_midway",
    "fail",
    "hang",
    "hold_back",
    "send_answer",
    "stream",
]

ANSWER = ("Once", " upon", " a", " time")
PROMPT_TOKENS = 20


@dataclass
class RecordedRequest:
    """One request; ``gone`` if the client closed the connection before the end of the answer."""

    method: str
    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    gone: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def params(self) -> dict[str, Any] | None:
        return self.body.get("kv_transfer_params")

    @property
    def handoff(self) -> dict[str, Any]:
        """The parameters about another engine's blocks, without the settings for kvtier."""
        return {name: value for name, value in (self.params or {}).items() if name != "kvtier"}


Behaviour = Callable[["FakeEngine", RecordedRequest, asyncio.StreamWriter], Awaitable[None]]
"""Answers one request."""


class FakeEngine:
    """One engine. ``script`` has its next behaviours; after them it answers normally.

    ``health``: its health status, None for no answer. ``looks``: number of health requests.
    ``bidirectional``: whether it holds blocks after a pull, as a decode engine does.
    ``connections``: number of accepted connections.
    """

    def __init__(self, engine_id: str, *, bidirectional: bool = True) -> None:
        self.engine_id = engine_id
        self.bidirectional = bidirectional
        self.health: int | None = 200
        self.looks = 0
        self.connections = 0
        self.seen: list[RecordedRequest] = []
        self.probes: list[RecordedRequest] = []
        self.script: deque[Behaviour] = deque()
        self.probe_script: deque[Behaviour] = deque()
        self.holds: set[str] = set()
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()
        self._port = ReservedPort()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port.number}"

    async def start(self) -> None:
        """Starts; after ``stop`` on the same port."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self._port.number)

    def close_connections(self) -> None:
        for writer in list(self._open):
            writer.close()

    async def stop(self) -> None:
        """Stops and closes all connections."""
        loop = asyncio.get_running_loop()
        for listening in self._server.sockets:
            loop.remove_reader(listening.fileno())
        for _ in range(5):  # asyncio closes an accepted connection only once it is in `_serve`
            await asyncio.sleep(0)
        self._server.close()
        for writer in list(self._open):
            writer.transport.abort()
        await self._server.wait_closed()

    def close(self) -> None:
        """Releases the port, after ``stop``."""
        self._port.close()

    # ---- answers

    def params(self, name: str, tokens: int, *, prefilled: bool) -> dict[str, Any]:
        """The ``kv_transfer_params`` of a request that it holds."""
        self.holds.add(name)
        return {
            "do_remote_prefill": prefilled,
            "do_remote_decode": not prefilled,
            "remote_block_ids": [list(range(-(-tokens // 16)))],
            "remote_engine_id": self.engine_id,
            "remote_request_id": name,
            "remote_host": f"host-of-{self.engine_id}",
            "remote_port": 7070,
            "tp_size": 2,
            "remote_num_tokens": tokens,
            "remote_blocks_expiry_time": None if prefilled else 2e9,
        }

    def held(self, asked: RecordedRequest, answered: int) -> dict[str, Any] | None:
        """What it holds after a request."""
        params = asked.params or {}
        name = (params.get("kvtier") or {}).get("hold_as") or f"req-{uuid.uuid4().hex[:8]}"
        tokens = PROMPT_TOKENS + answered - 1
        if params.get("do_remote_decode"):
            return self.params(name, tokens, prefilled=True)
        if params.get("do_remote_prefill") and self.bidirectional:
            return self.params(name, tokens, prefilled=False)
        return None

    def complete_answer(self, asked: RecordedRequest) -> dict[str, Any]:
        tokens = min(asked.body.get("max_tokens") or len(ANSWER), len(ANSWER))
        return {
            "id": "cmpl-1",
            "choices": [{"index": 0, "text": "".join(ANSWER[:tokens]), "finish_reason": "length", "stop_reason": None}],
            "usage": _usage(tokens),
            "kv_transfer_params": self.held(asked, tokens),
        }

    def events(self, asked: RecordedRequest) -> list[bytes]:
        """A streamed answer. vLLM 0.32 leaves out ``kv_transfer_params`` in streams."""
        self.held(asked, len(ANSWER))
        chunks: list[dict[str, Any]] = [
            {"choices": [{"index": 0, "text": text, "finish_reason": None}]} for text in ANSWER
        ]
        chunks[-1]["choices"][0] |= {"finish_reason": "length", "stop_reason": None}
        if (asked.body.get("stream_options") or {}).get("include_usage"):
            chunks.append({"choices": [], "usage": _usage(len(ANSWER))})
        return [b"data: " + json.dumps({"id": "cmpl-1", **chunk}).encode() + b"\n\n" for chunk in chunks] + [DONE]

    # ---- server

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        self.connections += 1
        try:
            while (asked := await _read(reader)) is not None:
                await self._answer_while_connected(asked, reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self._open.discard(writer)
            writer.close()

    async def _answer_while_connected(
        self, asked: RecordedRequest, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        answering = asyncio.ensure_future(self._answer(asked, writer))
        ending = asyncio.ensure_future(_until_end(reader))
        await asyncio.wait((answering, ending), return_when=asyncio.FIRST_COMPLETED)
        if not answering.done():
            asked.gone.set()
        for task in (answering, ending):
            task.cancel()
        for result in await asyncio.gather(answering, ending, return_exceptions=True):
            if isinstance(result, Exception):
                raise result

    async def _answer(self, asked: RecordedRequest, writer: asyncio.StreamWriter) -> None:
        if asked.path == "/health":
            self.looks += 1
            await (hang(self, asked, writer) if self.health is None else send_answer(writer, self.health, b""))
        elif asked.path == "/v1/models":
            await send_answer(
                writer, 200, json.dumps({"object": "list", "data": [{"id": f"model-of-{self.engine_id}"}]}).encode()
            )
        elif asked.headers.get("content-type") != "application/json":  # as vLLM does
            await fail(415)(self, asked, writer)
        elif asked.body.get("prompt") == [1]:
            self.probes.append(asked)
            await (self.probe_script.popleft() if self.probe_script else answer_normally)(self, asked, writer)
        else:
            self.seen.append(asked)
            await (self.script.popleft() if self.script else answer_normally)(self, asked, writer)


DONE = b"data: [DONE]\n\n"


async def answer_normally(engine: FakeEngine, asked: RecordedRequest, writer: asyncio.StreamWriter) -> None:
    """Answers as an engine without a fault."""
    if asked.body.get("stream"):
        await _begin(writer)
        for event in engine.events(asked):
            await _chunk(writer, event)
        await _chunk(writer, b"")
    else:
        await send_answer(writer, 200, json.dumps(engine.complete_answer(asked)).encode())


def fail(status: int, message: str = "no") -> Behaviour:
    async def behaviour(_: FakeEngine, __: RecordedRequest, writer: asyncio.StreamWriter) -> None:
        await send_answer(writer, status, json.dumps({"error": {"message": message, "code": status}}).encode())

    return behaviour


async def hang(_: FakeEngine, __: RecordedRequest, ___: asyncio.StreamWriter) -> None:
    """Never answers; waits until the client closes the connection."""
    await asyncio.Event().wait()


async def close_connection(_: FakeEngine, __: RecordedRequest, writer: asyncio.StreamWriter) -> None:
    """Closes the connection before the first byte."""
    writer.transport.abort()


def close_midway(after: int, *, cleanly: bool = False) -> Behaviour:
    """Closes the connection after ``after`` events (0: after the head).

    ``cleanly``: ends the HTTP stream correctly, but without the final event.
    """

    async def behaviour(engine: FakeEngine, asked: RecordedRequest, writer: asyncio.StreamWriter) -> None:
        await _begin(writer)
        for event in engine.events(asked)[:after]:
            await _chunk(writer, event)
        if cleanly:
            await _chunk(writer, b"")
        else:
            await asyncio.sleep(0.05)  # lets the written bytes arrive
            writer.transport.abort()

    return behaviour


def stream(*events: bytes, gate: asyncio.Event | None = None) -> Behaviour:
    """Sends these events, one per chunk, and ends correctly. A gate is before the second event."""

    async def behaviour(_: FakeEngine, __: RecordedRequest, writer: asyncio.StreamWriter) -> None:
        await _begin(writer)
        for number, event in enumerate((*events, b"")):
            if number == 1 and gate is not None:
                await gate.wait()
            await _chunk(writer, event)

    return behaviour


def hold_back(after: int, gate: asyncio.Event) -> Behaviour:
    """Sends ``after`` events, and the others when the gate opens."""

    async def behaviour(engine: FakeEngine, asked: RecordedRequest, writer: asyncio.StreamWriter) -> None:
        await _begin(writer)
        for number, event in enumerate(engine.events(asked)):
            if number == after:
                await gate.wait()
            await _chunk(writer, event)
        await _chunk(writer, b"")

    return behaviour


async def send_answer(
    writer: asyncio.StreamWriter, status: int, body: bytes, content_type: str = "application/json"
) -> None:
    head = (
        f"HTTP/1.1 {status} X\r\ncontent-type: {content_type}\r\ncontent-length: {len(body)}\r\nx-engine: yes\r\n\r\n"
    )
    writer.write(head.encode() + body)
    await writer.drain()


def _usage(answered: int) -> dict[str, int]:
    return {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": answered, "total_tokens": PROMPT_TOKENS + answered}


async def _begin(writer: asyncio.StreamWriter) -> None:
    writer.write(
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
    )
    await writer.drain()


async def _chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
    await writer.drain()


async def _read(reader: asyncio.StreamReader) -> RecordedRequest | None:
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    except asyncio.IncompleteReadError:
        return None
    request, *lines = head.strip().split("\r\n")
    method, path, _ = request.split(" ", 2)
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    return RecordedRequest(method, path, headers, json.loads(body) if body else {})


async def _until_end(reader: asyncio.StreamReader) -> None:
    """Waits until the client closes the connection."""
    # To read would eat the next request.
    await async_wait_until(lambda: reader.at_eof() or reader.exception() is not None, 3600)
