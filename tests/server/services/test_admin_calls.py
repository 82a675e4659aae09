"""Evict and Drain as calls: refusals and cancellation."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest
from harness.payloads import key_of, namespace_of, payload
from harness.polling import async_wait_until
from harness.server_process import ServerProcess

from kvtier.client import Client, DurableStatus
from kvtier.protos.error_reasons import reason_of
from kvtier.protos.v1 import admin_pb2, admin_pb2_grpc
from kvtier.server.drain import Drain
from kvtier.server.refused import Refused
from kvtier.server.services.admin import _MAX_EVICTIONS, AdminService
from kvtier.tiers.core.bulk_eviction import EvictionProgress

PART = 4096
BLOCKS = 4096


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("s")).start() as server:
        yield server


@pytest.fixture
def stub(server: ServerProcess) -> Iterator[admin_pb2_grpc.AdminServiceStub]:
    """Yields its AdminService, after some thousand small blocks have been stored."""
    with grpc.insecure_channel(server.endpoint) as channel:
        stub = admin_pb2_grpc.AdminServiceStub(channel)
        if blocks(stub) < BLOCKS:
            keys = [key_of(number) for number in range(BLOCKS)]
            with Client(server.endpoint, namespace=namespace_of(PART), engine_id="e") as client:
                client.store(keys, [payload(key, PART) for key in keys])
                assert set(client.flush(keys, wait=30)) == {DurableStatus.DURABLE}
        yield stub


def blocks(stub: admin_pb2_grpc.AdminServiceStub) -> int:
    answer = stub.GetStatus(admin_pb2.GetStatusRequest(), timeout=60)
    return int(answer.tiers[0].blocks)


def test_the_stream_reports_progress(stub: admin_pb2_grpc.AdminServiceStub) -> None:
    """The last answer is the result and is the only one marked as done.

    The default is all tiers.
    """
    steps = list(stub.Evict(admin_pb2.EvictRequest(dry_run=True), timeout=60))
    assert [step.done for step in steps] == [False] * (len(steps) - 1) + [True]
    last = steps[-1]
    assert [tier.tier for tier in last.tiers] == ["cpu", "lmdb"]
    assert [tier.blocks for tier in last.tiers] == [BLOCKS, BLOCKS]
    assert all(tier.looked_at == tier.total == BLOCKS for tier in last.tiers)


def test_invalid_evictions_are_refused(stub: admin_pb2_grpc.AdminServiceStub) -> None:
    """An unknown tier, an invalid id or a negative time is named, and no block is evicted."""
    negative = admin_pb2.EvictRequest()
    negative.unused_for.FromSeconds(-1)
    for request in (
        admin_pb2.EvictRequest(tiers=["tape"]),
        admin_pb2.EvictRequest(namespace_id=b"short"),
        negative,
    ):
        with pytest.raises(grpc.RpcError) as refused:
            list(stub.Evict(request, timeout=60))
        assert reason_of(refused.value.trailing_metadata()) == "INVALID_ARGUMENT"
    assert blocks(stub) == BLOCKS


def test_an_unknown_drain_mode_is_refused(stub: admin_pb2_grpc.AdminServiceStub) -> None:
    """A newer client that means something else by it must not end this server."""
    request = admin_pb2.DrainRequest.FromString(bytes((1 << 3, 99)))
    with pytest.raises(grpc.RpcError) as refused:
        list(stub.Drain(request, timeout=60))
    assert reason_of(refused.value.trailing_metadata()) == "INVALID_ARGUMENT"
    assert blocks(stub) == BLOCKS


def test_concurrent_evictions_are_limited(stub: admin_pb2_grpc.AdminServiceStub) -> None:
    """Some wait, more are refused; afterwards new ones are accepted."""
    calls = [stub.Evict(admin_pb2.EvictRequest(dry_run=True), timeout=60) for _ in range(4 * _MAX_EVICTIONS)]
    reasons = []
    for call in calls:
        try:
            assert list(call)[-1].done
        except grpc.RpcError as error:
            reasons.append(reason_of(error.trailing_metadata()))
    assert set(reasons) == {"LIMIT_EXCEEDED"}
    assert len(reasons) <= 3 * _MAX_EVICTIONS
    assert list(stub.Evict(admin_pb2.EvictRequest(dry_run=True), timeout=60))[-1].done


def test_a_disconnect_stops_the_eviction(server: ServerProcess, stub: admin_pb2_grpc.AdminServiceStub) -> None:
    """The log has the evicted bytes, and the server accepts the next call."""
    before = server.log.count("evicted on demand")
    call = stub.Evict(admin_pb2.EvictRequest(dry_run=True), timeout=60)
    next(call)
    call.cancel()
    server.wait_for(lambda _: server.log.count("evicted on demand") > before)
    assert list(stub.Evict(admin_pb2.EvictRequest(tiers=["cpu"]), timeout=60))[-1].tiers[0].blocks == BLOCKS
    assert blocks(stub) == 0


class _Sessions(SimpleNamespace):
    @property
    def draining(self) -> bool:
        return bool(self.drain_began.is_set())


def _drainage(*, complete: bool = True) -> tuple[Drain, Any, list[str]]:
    async def drain(_: float) -> bool:
        return complete

    ended: list[str] = []
    sessions: Any = _Sessions(drain_began=asyncio.Event(), ended=asyncio.Event())
    runtime: Any = SimpleNamespace(drain=drain)
    return Drain(runtime, sessions, lambda: ended.append("end")), sessions, ended


async def test_a_failed_eviction_ends_with_an_error() -> None:
    """The error follows the progress, and the next call is served."""
    fails = asyncio.Event()

    async def run(*_: object) -> None:
        await fails.wait()
        raise RuntimeError("a defect")

    eviction = SimpleNamespace(tiers=[EvictionProgress(0, total=2)], run=lambda: None)
    runtime: Any = SimpleNamespace(
        core=SimpleNamespace(evict=lambda _: eviction),
        stats=lambda: SimpleNamespace(tiers=[SimpleNamespace(name="cpu")]),
        now=lambda: 0.0,
        run_commands=lambda: None,
    )
    service = AdminService(
        runtime,
        cast(Any, None),
        cast(Any, None),
        cast(Any, SimpleNamespace(ending=False)),
        cast(Any, SimpleNamespace(run=run)),
    )
    steps = service.Evict(admin_pb2.EvictRequest(), cast(Any, None))
    assert not (await anext(steps)).done
    fails.set()
    with pytest.raises(RuntimeError, match="a defect"):
        await anext(steps)
    assert service._evictions == 0


async def test_a_final_drain_cannot_be_undone() -> None:
    """UNDO and STAY are too late; the drain is done when the sessions have ended."""
    drainage, sessions, ended = _drainage()
    drainage.end()
    assert (ended, sessions.draining, drainage.done) == (["end"], True, False)
    with pytest.raises(Refused):
        drainage.undo()
    drainage.stay()
    await drainage.finish()
    assert (drainage.done, drainage.complete, sessions.ended.is_set()) == (True, True, True)


async def test_a_staying_drain_can_be_undone() -> None:
    """The server is drained when running work has ended; UNDO works at any time and repeatedly."""
    drainage, sessions, ended = _drainage(complete=False)
    drainage.stay()
    assert (sessions.draining, drainage.done) == (True, False)
    drainage.undo()
    assert (sessions.draining, drainage.done) == (False, True)
    drainage.undo()
    drainage.stay()
    await async_wait_until(lambda: drainage.done)
    assert (sessions.draining, drainage.complete, ended) == (True, False, [])
    drainage.undo()
    assert (sessions.draining, drainage.complete) == (False, True)


async def test_a_signal_ends_a_drained_server() -> None:
    """It drains again, and then ends its sessions."""
    drainage, sessions, _ = _drainage()
    drainage.stay()
    await drainage.finish()
    assert (drainage.ending, drainage.done, sessions.ended.is_set()) == (True, True, True)


async def test_the_end_waits_for_running_work() -> None:
    """Sessions end after the drain, and the result says whether it finished in time."""
    drainage, sessions, _ = _drainage(complete=False)
    await drainage.finish()
    assert (drainage.complete, sessions.ended.is_set()) == (False, True)


def test_undo_after_the_end_is_refused(tmp_path: Path) -> None:
    """With a real server: the call is refused or finds no server."""
    with ServerProcess(tmp_path).start() as server, grpc.insecure_channel(server.endpoint) as channel:
        stub = admin_pb2_grpc.AdminServiceStub(channel)
        next(stub.Drain(admin_pb2.DrainRequest(mode=admin_pb2.DRAIN_MODE_END), timeout=60))
        with pytest.raises(grpc.RpcError) as refused:
            list(stub.Drain(admin_pb2.DrainRequest(mode=admin_pb2.DRAIN_MODE_UNDO), timeout=60))
        assert refused.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
        assert server.wait() == 0
