"""Batches of gRPC are freed, whether they succeed or fail and whether their call is cancelled."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any

import grpc
import pytest
from grpc._cython import cygrpc

from kvtier.server.rpc import grpc_batches
from kvtier.server.rpc.grpc_batches import free_all_batches

CALLS = 30
METHOD = "/test.Service/Call"


@pytest.fixture
def own() -> Iterator[Callable[..., Coroutine[Any, Any, None]]]:
    """Installs and returns grpcio's own coroutine; restores what was there at the end."""
    before = cygrpc.execute_batch
    cygrpc.execute_batch = getattr(grpc_batches._Batch, "original", before)
    yield cygrpc.execute_batch
    cygrpc.execute_batch = before


class Batches:
    """Stands in for grpcio's coroutine: counts batches that were started and that were freed."""

    def __init__(self, own: Callable[..., Coroutine[Any, Any, None]]) -> None:
        self.own = own
        self.started = self.freed = 0

    async def execute(self, call: Any, operations: Any, loop: Any) -> None:
        self.started += 1
        await self.own(call, operations, loop)
        self.freed += 1


@contextlib.asynccontextmanager
async def serving(ended: Callable[[BaseException], object]) -> AsyncIterator[grpc.aio.Channel]:
    """A server that answers a request with large messages without end; yields a channel to it."""

    async def call(_: Any, context: grpc.aio.ServicerContext) -> None:
        try:
            await context.send_initial_metadata(())
            await context.read()
            while True:
                await context.write(bytes(1 << 20))
        except BaseException as error:
            ended(error)
            raise

    server = grpc.aio.server()
    handler = grpc.stream_stream_rpc_method_handler(call)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Service", {"Call": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel
    await server.stop(None)


def test_this_grpcio_is_known(own: Any) -> None:
    assert free_all_batches()
    assert cygrpc.execute_batch is not own
    assert free_all_batches(), "may be called repeatedly"


def test_cancelled_and_failed_batches_are_freed(own: Any) -> None:
    """Clients cancel calls that wait for a request, and calls that send answers."""
    batches = Batches(own)
    cygrpc.execute_batch = batches.execute
    assert free_all_batches()

    async def cancel_calls() -> None:
        ended: list[BaseException] = []
        async with serving(ended.append) as channel:
            for number in range(CALLS):
                stream = channel.stream_stream(METHOD)()
                await stream.initial_metadata()
                if number % 2:
                    await stream.write(b"request")
                    await stream.read()
                stream.cancel()
            async with asyncio.timeout(60):
                while len(ended) < CALLS or batches.freed < batches.started:  # noqa: ASYNC110 - no event
                    await asyncio.sleep(0.01)

    asyncio.run(cancel_calls())


@pytest.mark.usefixtures("own")
def test_a_cancelled_call_ends_as_before() -> None:
    assert free_all_batches()

    async def run() -> BaseException:
        ended: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        async with serving(ended.set_result) as channel:
            stream = channel.stream_stream(METHOD)()
            await stream.write(b"request")
            await stream.read()
            stream.cancel()
            return await asyncio.wait_for(ended, 60)

    assert isinstance(asyncio.run(run()), asyncio.CancelledError | grpc.aio.InternalError)
