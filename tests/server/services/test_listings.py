"""Lists of leases and hand-offs: other calls run while the server describes many of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import pytest
from harness.operations import run_to_end
from harness.polling import async_wait_until

from kvtier.cuda.host.region import HostRegion
from kvtier.protos.v1 import admin_pb2
from kvtier.server.core_runtime import TierRuntime
from kvtier.server.rpc.sessions import SessionRegistry
from kvtier.server.rpc.slice_scheduler import SliceScheduler
from kvtier.server.services.admin import AdminService
from kvtier.server.services.admin_messages import build_status
from kvtier.server.services.long_calls import LongCalls
from kvtier.server.telemetry.loop_lag import LoopLag
from kvtier.tiers.core.call_specs import LookupSpec, StoreSpec
from kvtier.tiers.secondary_tier import NamespaceId
from kvtier.tiers.types import HandoffDirection, NamespaceSpec

SPEC = NamespaceSpec(NamespaceId(b"n" * 32), world_size=1, part_bytes=(4096,))
KEYS = [number.to_bytes(8, "big") for number in range(0, 4 << 32, 1 << 32)]
COUNT = 20


@pytest.fixture
async def service() -> AsyncIterator[Any]:
    """Yields an AdminService of a server with leases and holds of the same blocks."""
    runtime = TierRuntime(HostRegion.create(64 << 10), [])
    await runtime.start()
    await async_wait_until(lambda: runtime.core.stats().tiers[0].available_bytes == 64 << 10)
    core = runtime.core
    session = core.open_session(b"s", "e", None, SPEC)
    answer = run_to_end(core.prepare_store(session, KEYS, StoreSpec(lease_seconds=1e12), now=0))
    assert answer.store_id is not None
    run_to_end(core.complete_store(session, answer.store_id))
    for number in range(COUNT):
        run_to_end(core.lookup(session, KEYS, LookupSpec(lease_seconds=1e12), now=0))
        run_to_end(
            core.publish(
                session,
                f"r{number}",
                KEYS,
                range(4),
                num_tokens=64,
                direction=HandoffDirection.PREFILL_TO_DECODE,
                duration=60,
                now=runtime.now(),
            )
        )
    sessions = SessionRegistry(runtime, 1)
    turns = SliceScheduler(sessions)
    status = partial(build_status, runtime, sessions, 0.0, LoopLag(), turns.pause)
    yield AdminService(runtime, sessions, status, None, LongCalls(runtime, sessions, turns))  # type: ignore[arg-type]
    await runtime.close()


@pytest.mark.parametrize("what", ["leases", "handoffs", "status"])
async def test_other_calls_run_during_a_listing(service: Any, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A listing of 1,000 leases with 65,536 blocks each would stop the event loop for seconds."""
    monkeypatch.setattr("kvtier.server.rpc.slice_scheduler._TURN_SECONDS", -1.0)
    calls = {
        "leases": lambda: service.ListLeases(admin_pb2.ListLeasesRequest(), None),
        "status": lambda: service.GetStatus(admin_pb2.GetStatusRequest(), None),
        "handoffs": lambda: service.ListHandoffs(admin_pb2.ListHandoffsRequest(), None),
    }
    listing, turns = asyncio.ensure_future(calls[what]()), 0
    while not listing.done():
        turns += 1
        await asyncio.sleep(0)
    assert turns > COUNT
    if what == "status":
        assert (listing.result().leases, listing.result().holds) == (COUNT, COUNT)
        return
    found = getattr(listing.result(), what)
    assert [each.blocks for each in found] == [4] * COUNT
    assert [each.bytes for each in found] == [4 * 4096] * COUNT
