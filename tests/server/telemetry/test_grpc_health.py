"""The health service: statuses and watchers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from unittest.mock import Mock

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from harness.polling import async_wait_until

from kvtier.server import app
from kvtier.server.rpc.call_rules import CallRules
from kvtier.server.rpc.interceptor import RefusalInterceptor
from kvtier.server.telemetry.grpc_health import Health, tier_service
from kvtier.tiers.stats.snapshots import ManagerStats, TierStats

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICES = ("kvtier.v1.CacheService", "kvtier.v1.AdminService")


def stats(*, memory: int = 1, cpu: bool = True, lmdb: bool = True) -> ManagerStats:
    """Returns the figures of a server with two tiers."""
    return ManagerStats(
        (
            TierStats("cpu", "cpu", 10, memory, 0, healthy=cpu),
            TierStats("lmdb", "lmdb", 10, 10, 0, healthy=lmdb),
        )
    )


@pytest.fixture
async def health() -> AsyncIterator[tuple[Health, health_pb2_grpc.HealthStub]]:
    """Yields a health service behind the server's interceptor, and a client of it."""
    health = Health(SERVICES)
    server = grpc.aio.server(interceptors=[RefusalInterceptor(CallRules(lambda *_: None))])
    await health.register(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield health, health_pb2_grpc.HealthStub(channel)
    await server.stop(0)


Fixture = tuple[Health, health_pb2_grpc.HealthStub]


async def status_of(stub: health_pb2_grpc.HealthStub, service: str) -> int:
    answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=60)
    return int(answer.status)


async def statuses(stub: health_pb2_grpc.HealthStub) -> list[int]:
    """Returns the status of the server and its services."""
    return [await status_of(stub, service) for service in ("", *SERVICES)]


async def test_status_at_start_and_shutdown(health: Fixture) -> None:
    """Nothing serves before the first update and after the begin of the shutdown."""
    ours, stub = health
    assert await statuses(stub) == [NOT_SERVING] * 3
    await ours.update(stats())
    assert await statuses(stub) == [SERVING] * 3
    await ours.shut_down()
    await ours.update(stats(lmdb=False))
    await ours.update(stats())
    assert await statuses(stub) == [NOT_SERVING] * 3
    assert await status_of(stub, tier_service("lmdb")) == NOT_SERVING


async def test_a_tier_in_trouble_is_not_serving(health: Fixture) -> None:
    """The status is that of the tier's own name, until it recovers; the server keeps serving."""
    ours, stub = health
    for lmdb in (True, False, True):
        await ours.update(stats(lmdb=lmdb))
        assert await status_of(stub, "kvtier.tier.lmdb") == (SERVING if lmdb else NOT_SERVING)
        assert await status_of(stub, "kvtier.tier.cpu") == SERVING
        assert await statuses(stub) == [SERVING] * 3


async def test_a_smaller_region_is_reported(health: Fixture) -> None:
    """The server still serves; without any memory it does not."""
    ours, stub = health
    await ours.update(stats(cpu=False))
    assert await status_of(stub, "kvtier.tier.cpu") == NOT_SERVING
    assert await statuses(stub) == [SERVING] * 3
    await ours.update(stats(cpu=False, memory=0))
    assert await statuses(stub) == [NOT_SERVING] * 3
    assert await status_of(stub, "kvtier.tier.lmdb") == SERVING


async def test_an_unknown_service_is_not_found(health: Fixture) -> None:
    """The health protocol requires NOT_FOUND."""
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await status_of(health[1], "kvtier.tier.nvme")
    assert refusal.value.code() == grpc.StatusCode.NOT_FOUND


async def test_watchers_see_every_change(health: Fixture) -> None:
    """A watcher of a tier gets every change of its status, and nothing else."""
    ours, stub = health
    await ours.update(stats())
    watch = stub.Watch(health_pb2.HealthCheckRequest(service="kvtier.tier.lmdb"))
    assert (await watch.read()).status == SERVING
    for lmdb in (True, False):
        await ours.update(stats(lmdb=lmdb))
    assert (await asyncio.wait_for(watch.read(), 60)).status == NOT_SERVING
    watch.cancel()


async def test_the_watch_loop_survives_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a failed read of the figures, tokens and health are still updated."""
    monkeypatch.setattr(app, "_WATCH_SECONDS", 0.001)
    monkeypatch.setattr(app, "_log", Mock())
    backend, looked = Mock(), asyncio.Event()
    backend.metrics.calls.total = 0
    backend.runtime.now.return_value = 0.0
    backend.runtime.stats.side_effect = [ZeroDivisionError("planted"), *[stats()] * 1000]
    backend.access.refresh = lambda _: looked.set()
    health = Health(SERVICES)
    watch = asyncio.create_task(app._watch(backend, health))
    await asyncio.wait_for(looked.wait(), 60)
    await async_wait_until(lambda: watch.done() or health._sent.get("") == SERVING)
    assert not watch.done()
    backend.metrics.failed.assert_called_once_with("watch")
    watch.cancel()
