"""Calls whose store, lease, session or caller ends before the call does."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from harness.operations import run_to_end
from harness.payloads import key_of, namespace_of
from harness.service_calls import PART, Calls, serving, transfers_of, until

from kvtier.protos.v1 import admin_pb2, cache_pb2, session_pb2, transfer_pb2
from kvtier.server.config.schema import LimitConfig, SessionConfig
from kvtier.server.refused import Refused
from kvtier.server.rpc.own_copies import Writers
from kvtier.server.rpc.sessions import SessionRegistry
from kvtier.server.services.admin import AdminService
from kvtier.server.services.devices import DeviceCopyCalls
from kvtier.server.services.session import SessionService
from kvtier.tiers.errors import LeaseNotFound, StoreNotFound
from kvtier.tiers.types import LeaseId, StoreId

KEYS = [key_of(number) for number in range(4)]
UNUSED: Any = None


@pytest.fixture
async def calls() -> AsyncIterator[Calls]:
    async with serving() as calls:
        yield calls


@pytest.fixture
async def lease(calls: Calls) -> LeaseId:
    """Returns a lease of stored blocks."""
    run_to_end(calls.runtime.core.complete_store(calls.session, calls.store(KEYS)))
    return LeaseId((await calls.look_up(KEYS)).lease_id)


async def test_a_load_under_an_expired_lease_is_not_confirmed(
    calls: Calls, lease: LeaseId, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lease has expired, and the core has not removed it yet."""
    request = cache_pb2.CompleteLoadRequest(lease_id=lease)
    await calls.service.CompleteLoad(request, UNUSED)
    later = calls.runtime.now() + 3600
    monkeypatch.setattr(calls.runtime, "now", lambda: later)
    with pytest.raises(LeaseNotFound, match="has expired"):
        await calls.service.CompleteLoad(request, UNUSED)


async def test_the_streams_of_a_store_end_before_its_completion(calls: Calls) -> None:
    """While a stream may write to the slots, the blocks are not readable."""
    store = calls.store(KEYS)
    ended: list[int] = []

    async def end_writers(store_id: int) -> None:
        assert calls.runtime.core.store(calls.session, StoreId(store_id)).blocks
        ended.append(store_id)

    calls.service._end_writers = end_writers
    await calls.complete(store, [])
    assert ended == [store]


async def test_a_draining_server_begins_no_request(calls: Calls) -> None:
    request = cache_pb2.BeginRequestRequest(request_id="r")
    await calls.service.BeginRequest(request, UNUSED)

    def refuse() -> None:
        raise Refused("DRAINING", "the server is shutting down")

    calls.registry.refuse_if_draining = refuse
    with pytest.raises(Refused, match="shutting down"):
        await calls.service.BeginRequest(request, UNUSED)


async def test_a_pull_ends_with_its_lease(calls: Calls, lease: LeaseId) -> None:
    """The slots of a released lease may be reused; frames sent before count for the rate limit."""
    counted: list[int] = []
    calls.validator.limits = LimitConfig(max_frame_bytes=PART)
    service = transfers_of(calls)
    limiter = SimpleNamespace(count_bytes=counted.append)
    calls.registry.stream = lambda _: contextlib.nullcontext(limiter)
    frames = service.Pull(transfer_pb2.PullRequest(lease_id=lease, items=range(4)), UNUSED)
    for number in range(2):
        assert (await anext(frames)).offset_bytes == number * PART
    assert counted == [PART]
    calls.runtime.core.release(calls.session, lease)
    with pytest.raises(LeaseNotFound):
        await anext(frames)
    assert counted == [PART, PART]


async def test_a_session_ends_with_its_credentials(calls: Calls) -> None:
    registry = SessionRegistry(calls.runtime, 8)
    config: Any = SimpleNamespace(sessions=SessionConfig(heartbeat_interval=0.001))
    service = SessionService(config, calls.runtime, registry, Path("/unused"), session_pb2.Devices())
    request = session_pb2.OpenRequest(protocol_version=2, engine_id="e", namespace=namespace_of(PART).to_proto())
    heartbeats = service.Open(request, SimpleNamespace(peer=lambda: "unix:"))
    for _ in range(2):
        assert (await anext(heartbeats)).session.session_id
    (session,) = registry.all()
    session.revoked = True
    with pytest.raises(Refused) as refused:
        await anext(heartbeats)
    assert refused.value.reason == "UNAUTHENTICATED"
    assert not registry.all()


async def test_the_connections_of_an_ended_session_no_longer_count(calls: Calls) -> None:
    """Each session can have as many as the first one, however many sessions have ended."""
    registry = SessionRegistry(calls.runtime, 8)
    config: Any = SimpleNamespace(sessions=SessionConfig(heartbeat_interval=0.001))
    service: Any = SessionService(config, calls.runtime, registry, Path("/unused"), session_pb2.Devices())
    request = session_pb2.OpenRequest(protocol_version=2, engine_id="e", namespace=namespace_of(PART).to_proto())
    counts, disconnected = [], list[int]()
    registry._max_connections = 16
    for _ in range(3):
        heartbeats = service.Open(request, SimpleNamespace(peer=lambda: "unix:"))
        session = (await anext(heartbeats)).session
        connected = 0
        with contextlib.suppress(Refused):
            while connected < 100:
                registry.connect(session.session_id, session.epoch, partial(disconnected.append, connected))
                connected += 1
        counts.append(connected)
        await heartbeats.aclose()
        assert not registry.all()
    assert 1 < counts[0] < 100
    assert counts == [counts[0]] * 3
    assert len(disconnected) == sum(counts)


@pytest.mark.parametrize("ends", [False, True])
async def test_a_copy_to_an_ended_store_is_not_confirmed(calls: Calls, *, ends: bool) -> None:
    """The store ends during the copy from the device: its slots no longer belong to the blocks."""
    store = calls.store(KEYS)

    async def copy(*_: object) -> None:
        if ends:
            run_to_end(calls.runtime.core.complete_store(calls.session, store))

    calls.registry.set_transport = lambda *_: None
    registration = SimpleNamespace(num_blocks=lambda _: len(KEYS), events=0)
    devices: Any = SimpleNamespace(get=lambda *_: registration, copy=copy)
    metrics: Any = SimpleNamespace(transfer=lambda *_: SimpleNamespace(inc=lambda _: None))
    writers = Writers(calls.runtime)
    service = DeviceCopyCalls(calls.runtime, calls.registry, calls.validator, metrics, devices, writers)
    request = transfer_pb2.StoreFromDeviceRequest(store_id=store, blocks=range(len(KEYS)))
    if ends:
        with pytest.raises(StoreNotFound):
            await service.StoreFromDevice(request, UNUSED)
    else:
        assert (await service.StoreFromDevice(request, UNUSED)).moved_bytes == len(KEYS) * PART


async def test_an_eviction_ends_with_its_call(calls: Calls, lease: LeaseId, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the client has cancelled the call, the server evicts no further blocks."""
    core = calls.runtime.core
    core.release(calls.session, lease)
    monkeypatch.setattr("kvtier.tiers.core.bulk_eviction.SLICE", 1)
    monkeypatch.setattr("kvtier.server.rpc.slice_scheduler._TURN_SECONDS", 0.0)
    blocks = core.stats().tiers[0].blocks
    service: Any = AdminService(calls.runtime, UNUSED, UNUSED, SimpleNamespace(ending=False), calls.long_calls)  # type: ignore[arg-type]
    steps = service.Evict(admin_pb2.EvictRequest(), UNUSED)
    assert not (await anext(steps)).done
    await until(lambda: core.stats().tiers[0].blocks < blocks)
    await steps.aclose()
    left = core.stats().tiers[0].blocks
    for _ in range(20):
        await asyncio.sleep(0)
    assert 0 < left == core.stats().tiers[0].blocks
    assert not service._evicting.locked()
