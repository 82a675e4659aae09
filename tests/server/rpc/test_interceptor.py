"""The interceptor of all calls: streams whose client disconnects, and failing handlers."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import sys
import time
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from harness.polling import stays

from kvtier.server.refused import Refused
from kvtier.server.rpc.call_rules import CallRules
from kvtier.server.rpc.interceptor import RefusalInterceptor

SOON = 30.0
"""Time in seconds for a busy machine to notice the end; a lost end takes a minute or longer."""

# A separate process: one that shares the server's event loop or gRPC core is noticed in another
# order.
_VANISHING = """
import time, grpc
for _ in range(8):
    with grpc.insecure_channel("{address}") as channel:
        call = channel.unary_stream("/test/Stream")(b"")
        next(call)
        time.sleep(0.1)  # until the window is full
        call.cancel()
        time.sleep(0.1)
"""


class Observed(list[tuple[str, str, float]]):
    """The calls that have ended.

    A client may know the end of a call before its handler has ended: wait for `ended`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ended = asyncio.Event()
        self.refusals: list[tuple[str, str]] = []

    def note_refusal(self, method: str, reason: str) -> None:
        self.refusals.append((method, reason))

    def note(self, *call: Any) -> None:
        self.append(call)
        self.ended.set()


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Turns the garbage collector off: no end may depend on it."""
    gc.disable()
    yield
    gc.enable()


@contextlib.asynccontextmanager
async def served(handler: Any) -> AsyncIterator[tuple[grpc.aio.Channel, Observed]]:
    """Yields a server of one call, `/test/Stream`, and the calls observed."""
    observed = Observed()
    server = grpc.aio.server(interceptors=[RefusalInterceptor(CallRules(observed.note, observed.note_refusal))])
    handlers = {"Stream": grpc.unary_stream_rpc_method_handler(handler)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield channel, observed
    finally:
        await server.stop(0)


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("answer_bytes", [1, 1 << 20], ids=["while it waits", "while it sends"])
@pytest.mark.parametrize("vanish", ["cancel", "close"])
async def test_a_stream_ends_with_its_client(answer_bytes: int, vanish: str) -> None:
    """Also while an answer waits that the client does not read."""
    fallen = asyncio.Event()

    async def stream(_request: bytes, _context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        try:
            while True:
                yield bytes(answer_bytes)
                if answer_bytes == 1:
                    await asyncio.Event().wait()
        finally:
            fallen.set()

    async with served(stream) as (channel, observed):
        call = channel.unary_stream("/test/Stream")(b"")
        await call.read()
        # Until the flow-control window is full.
        await asyncio.to_thread(stays, lambda: not fallen.is_set(), 0.1)
        began = time.monotonic()
        await channel.close() if vanish == "close" else call.cancel()
        await asyncio.wait_for(fallen.wait(), 60)
        assert time.monotonic() - began < SOON
        await asyncio.wait_for(observed.ended.wait(), 60)
        assert [(method, code) for method, code, *_ in observed] == [("/test/Stream", "CANCELLED")]


async def test_a_lost_client_is_not_logged_as_an_error(caplog: pytest.LogCaptureFixture) -> None:
    """The answer in flight or the end may be noticed first."""

    async def stream(_request: bytes, _context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        while True:
            yield bytes(1 << 20)

    async with served(stream) as (channel, observed):
        program = _VANISHING.format(address=channel._channel.target.decode())
        client = await asyncio.create_subprocess_exec(sys.executable, "-c", program)
        assert await client.wait() == 0
    assert {code for _, code, *_ in observed} == {"CANCELLED"}
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


@pytest.mark.parametrize(
    ("error", "code"), [(Refused("STORE_NOT_FOUND", "gone"), "NOT_FOUND"), (RuntimeError("defect"), "INTERNAL")]
)
async def test_answers_of_a_failing_stream_arrive(error: Exception, code: str) -> None:
    """The refusal follows them."""

    async def stream(_request: bytes, _context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        yield b"first"
        raise error

    async with served(stream) as (channel, observed):
        call = channel.unary_stream("/test/Stream")(b"")
        assert await call.read() == b"first"
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await call.read()
        assert refusal.value.code().name == code
        await asyncio.wait_for(observed.ended.wait(), 60)
        assert [call[:2] for call in observed] == [("/test/Stream", code)]
        assert observed.refusals == [("/test/Stream", getattr(error, "reason", "INTERNAL"))]


async def test_a_handler_may_write_its_answers() -> None:
    """The health service writes its answers instead of yielding them."""

    async def stream(_request: bytes, context: grpc.aio.ServicerContext) -> None:
        await context.write(b"first")
        await context.write(b"second")

    async with served(stream) as (channel, observed):
        assert [answer async for answer in channel.unary_stream("/test/Stream")(b"")] == [b"first", b"second"]
        await asyncio.wait_for(observed.ended.wait(), 60)
        assert observed[0][1] == "OK"


@pytest.mark.parametrize("metadata", [[("x", "y")] * 513, [("x", "y" * 1000)] * 33, [("x-bin", bytes(33 << 10))]])
async def test_a_call_whose_metadata_is_cut_off_has_no_handler(metadata: list[tuple[str, str | bytes]]) -> None:
    """It begins because its connection ended. A handler would read its metadata again."""
    asked: list[object] = []

    async def find(details: object) -> Any:
        asked.append(details)
        return grpc.unary_unary_rpc_method_handler(lambda *_: b"")

    interceptor = RefusalInterceptor(CallRules(lambda *_: None))
    cut_off: Any = SimpleNamespace(method="/test/Call", invocation_metadata=metadata)
    assert await interceptor.intercept_service(find, cut_off) is None
    assert not asked
    whole: Any = SimpleNamespace(method="/test/Call", invocation_metadata=[("authorization", "x" * 8000)] * 3)
    assert await interceptor.intercept_service(find, whole) is not None
