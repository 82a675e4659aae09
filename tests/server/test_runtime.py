"""The shell around the core."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

from kvtier.cuda.region import HostRegion
from kvtier.protos.v1.cache_pb2 import PrepareStoreRequest
from kvtier.server.config import LeaseConfig, LimitConfig, RetentionConfig
from kvtier.server.edge import Edge
from kvtier.server.runtime import TierRuntime
from kvtier.server.services.cache import CacheService
from kvtier.tiers.answers import Session, StoreStatus
from kvtier.tiers.base import BlockBytes, Entry, NamespaceId, Outcome, RequestInfo, SecondaryTier, Vote
from kvtier.tiers.blocks import NamespaceSpec
from kvtier.tiers.rules import vote

REGION = 64 << 10
PART = 4096
SPEC = NamespaceSpec(NamespaceId(b"n" * 16), world_size=1, part_bytes=(PART,))


class Gated(SecondaryTier):
    """Takes its time, until it is let go."""

    type: ClassVar[str] = "gated"
    durable: ClassVar[bool] = False

    def __init__(self) -> None:
        super().__init__("gated", 1 << 20)
        self.gate = threading.Event()
        self.ended = threading.Event()

    def on_new_request(self, request: RequestInfo) -> Vote:
        return vote(self.rules, request)

    def entries(self) -> Iterator[Entry]:
        return iter(())

    def store(self, blocks: Sequence[BlockBytes]) -> list[Outcome]:
        assert self.gate.wait(10)
        self.ended.set()
        return [Outcome.DONE] * len(blocks)

    def load(self, blocks: Sequence[BlockBytes]) -> list[Outcome]:
        return [Outcome.MISSING] * len(blocks)

    def remove(self, keys: Sequence[tuple[NamespaceId, bytes]]) -> None:
        pass

    def close(self) -> None:
        pass


def run(scenario: Any) -> None:
    """Runs a scenario with a runtime whose region holds 16 blocks, all of them."""

    async def main() -> None:
        tier = Gated()
        region = HostRegion.create(REGION)
        runtime = TierRuntime(region, [tier])
        await runtime.start()
        try:
            await scenario(runtime, tier)
        finally:
            tier.gate.set()
            await runtime.close()

    asyncio.run(main())


def keys(first: int, count: int) -> list[bytes]:
    """Returns keys."""
    return [number.to_bytes(4, "big") + bytes(4) for number in range(first, first + count)]


async def store_beside_a_finished_job(runtime: TierRuntime, tier: Gated) -> Session:
    """Fills the region: a part with blocks whose job has ended without the loop knowing, the rest with a store in flight."""
    core = runtime.core
    session = core.open_session(b"s", "e", None, SPEC)
    await asyncio.sleep(0)  # the region's memory is announced through the loop
    assert core.stats().tiers[0].available_bytes == REGION
    blocks = REGION // PART // 4  # no more than may wait for a tier
    first = core.prepare_store(session, keys(0, 16), request_id="", expires_at=1e12)
    assert first.store_id is not None
    core.complete_store(session, first.store_id, range(blocks, 16))
    lease = core.prepare_store(session, keys(100, 16 - blocks), request_id="", expires_at=1e12)
    assert len(lease.slots) == 16 - blocks, "the rest of the region is being written to"
    runtime.pump()
    tier.gate.set()
    assert tier.ended.wait(10)
    deadline = runtime.now() + 10
    while not runtime._finished:
        assert runtime.now() < deadline
    answer = core.prepare_store(session, keys(200, 1), request_id="", expires_at=1e12)
    assert answer.statuses == bytes([StoreStatus.NO_ROOM]), "the core has not heard of it"
    return session


def test_what_threads_have_finished_can_be_taken_in_at_any_time() -> None:
    """B3.20: `get_finished_jobs` polls, and the blocks of what it finds are free for the very next store."""

    async def scenario(runtime: TierRuntime, tier: Gated) -> None:
        session = await store_beside_a_finished_job(runtime, tier)
        runtime.get_finished_jobs()
        answer = runtime.core.prepare_store(session, keys(200, 1), request_id="", expires_at=1e12)
        assert answer.statuses == bytes([StoreStatus.GRANTED])
        assert not any(hasattr(thing, "get_finished") for thing in (runtime, runtime.core, tier))

    run(scenario)


def test_finished_jobs_are_taken_in_before_room_is_made() -> None:
    """B3.4: PrepareStore sees what threads have finished, before the loop comes round to it."""

    async def scenario(runtime: TierRuntime, tier: Gated) -> None:
        session = await store_beside_a_finished_job(runtime, tier)
        registry: Any = SimpleNamespace(refuse_if_draining=lambda: None, get=lambda _: session)
        service = CacheService(runtime, registry, Edge(LimitConfig(), LeaseConfig(), RetentionConfig()))
        answer = await service.PrepareStore(PrepareStoreRequest(keys=keys(200, 1)), SimpleNamespace())  # type: ignore[arg-type]
        assert answer.statuses == bytes([StoreStatus.GRANTED])

    run(scenario)
