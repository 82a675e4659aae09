"""Services of the cache and of transfers in this process: one session, and no network."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration
from harness.operations import run_to_end
from harness.polling import async_wait_until

from kvtier.cuda.host.region import HostRegion
from kvtier.protos.credentials import Credentials
from kvtier.protos.peer_directory import PeerDirectory
from kvtier.protos.v1 import cache_pb2
from kvtier.protos.wire.packed_keys import pack_keys
from kvtier.server.bulk.broker import BulkBroker
from kvtier.server.bulk.messages import ToChild
from kvtier.server.config.schema import HandoffConfig, LeaseConfig, LimitConfig, RetentionConfig
from kvtier.server.core_runtime import TierRuntime
from kvtier.server.peers.sources import PeerSources
from kvtier.server.refused import Refused
from kvtier.server.rpc.own_copies import Writers
from kvtier.server.rpc.request_checks import RequestValidator
from kvtier.server.rpc.slice_scheduler import SliceScheduler
from kvtier.server.services.cache import CacheService
from kvtier.server.services.long_calls import LongCalls
from kvtier.server.services.transfer import TransferService
from kvtier.tiers.core.call_specs import StoreSpec
from kvtier.tiers.core.completions import Durability
from kvtier.tiers.secondary_tier import NamespaceId, SecondaryTier
from kvtier.tiers.types import DurableStatus, EngineSession, NamespaceSpec, StoreId

__all__ = ["PART", "SPEC", "Calls", "broker_of", "duration", "no_sources", "serving", "transfers_of", "until"]

PART = 4096
SPEC = NamespaceSpec(NamespaceId(b"n" * 32), world_size=1, part_bytes=(PART,))
REGION_BYTES = 4 * 4096 * PART


def no_sources(runtime: TierRuntime, long_calls: LongCalls) -> PeerSources:
    """The searches of a server that permits no source."""
    return PeerSources(
        None,
        runtime,
        PeerDirectory(()),
        Credentials(),
        1.0,
        scheduler=long_calls.scheduler,
        description_of=pytest.fail,
    )


class Calls:
    """The service of the cache, with one session, and counters of the core's work."""

    def __init__(self, runtime: TierRuntime) -> None:
        self.runtime = runtime
        self.session: EngineSession = runtime.core.open_session(b"s", "e", 0, SPEC)
        self.registry_ended = False
        self.registry: Any = SimpleNamespace(
            get=lambda _, **__: self.session,
            check=self._check,
            tenant_of=lambda _: None,
            refuse_if_draining=lambda: None,
        )
        self.validator = RequestValidator(LimitConfig(), LeaseConfig(), RetentionConfig(), HandoffConfig())

        async def end_writers(_: int) -> None: ...

        self.long_calls = LongCalls(runtime, self.registry, SliceScheduler(self.registry))
        sources = no_sources(runtime, self.long_calls)
        record = Writers(runtime).record_digests
        self.service: Any = CacheService(
            runtime, self.registry, self.validator, end_writers, record, self.long_calls, sources
        )

    def store(self, keys: Sequence[bytes]) -> StoreId:
        """Begins a store, so that the keys are pending."""
        answer = run_to_end(self.runtime.core.prepare_store(self.session, keys, StoreSpec(lease_seconds=1e12), now=0))
        assert answer.store_id is not None
        return answer.store_id

    async def flush(self, keys: Sequence[bytes], seconds: float) -> bytes:
        request = cache_pb2.FlushRequest(keys=pack_keys(keys), wait=duration(seconds))
        statuses: bytes = (await self.service.Flush(request, None)).statuses
        return statuses

    async def prepare(self, keys: Sequence[bytes]) -> cache_pb2.PrepareStoreResponse:
        answer: cache_pb2.PrepareStoreResponse = await self.service.PrepareStore(
            cache_pb2.PrepareStoreRequest(keys=pack_keys(keys)), None
        )
        return answer

    async def look_up(
        self, keys: Sequence[bytes], *, prefix: bool = False, want_slots: bool = False
    ) -> cache_pb2.LookupResponse:
        mode = cache_pb2.LOOKUP_MODE_PREFIX if prefix else cache_pb2.LOOKUP_MODE_EACH
        request = cache_pb2.LookupRequest(keys=pack_keys(keys), mode=mode, want_slots=want_slots)
        answer: cache_pb2.LookupResponse = await self.service.Lookup(request, None)
        return answer

    async def complete(self, store_id: int, failed: Sequence[int]) -> None:
        await self.service.CompleteStore(cache_pb2.CompleteStoreRequest(store_id=store_id, failed_items=failed), None)

    def pins(self) -> set[bytes]:
        """Returns the keys of pinned blocks."""
        return {key for key, block in self.runtime.core._cpu_tier.blocks_of(SPEC.id).items() if block.pins}

    def _check(self, session: EngineSession) -> None:
        if self.registry_ended:
            raise Refused("UNKNOWN_SESSION", "the session has ended")

    def statuses_read(self, monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
        """Returns a list that gets each key whose durability is read."""
        read: list[bytes] = []
        original = Durability.of

        def of(durability: Durability, namespace: NamespaceId, key: bytes) -> DurableStatus:
            read.append(key)
            return original(durability, namespace, key)

        monkeypatch.setattr(Durability, "of", of)
        return read


def duration(seconds: float) -> Duration:
    return Duration(seconds=int(seconds), nanos=int(seconds % 1 * 1e9))


@asynccontextmanager
async def serving(*tiers: SecondaryTier, region_bytes: int = REGION_BYTES) -> AsyncIterator[Calls]:
    runtime = TierRuntime(HostRegion.create(region_bytes), tiers)
    await runtime.start()
    try:
        # `until` would keep a core busy. Linux can then need seconds to make a huge page.
        await async_wait_until(lambda: runtime.core.stats().tiers[0].available_bytes == runtime.region.size_bytes)
        yield Calls(runtime)
    finally:
        await runtime.close()


async def until(condition: Callable[[], object]) -> None:
    for _ in itertools.count():
        if condition():
            return
        await asyncio.sleep(0)


def broker_of(calls: Calls) -> tuple[BulkBroker, list[ToChild]]:
    """Returns a broker, and the messages that it sends."""
    counter = SimpleNamespace(inc=lambda *_: None)
    metrics: Any = SimpleNamespace(
        transfer=lambda *_: counter,
        mismatches=lambda _: counter,
        calls=SimpleNamespace(observe=lambda *_: None),
        refused=lambda *_: None,
    )
    opened = SimpleNamespace(core=calls.session, limiter=None, transport="")
    calls.registry.find = lambda _: opened
    calls.registry.count_call = lambda _: None
    writers = Writers(calls.runtime)
    broker = BulkBroker(calls.runtime, calls.registry, calls.validator, metrics, writers, calls.long_calls)
    sent: list[ToChild] = []
    broker.connected(sent.append)
    return broker, sent


def transfers_of(calls: Calls) -> TransferService:
    """Returns the service of streams over gRPC."""
    calls.registry.stream = lambda _: contextlib.nullcontext()
    calls.registry.find = lambda _: None
    counter = SimpleNamespace(inc=lambda _: None)
    metrics: Any = SimpleNamespace(transfer=lambda *_: counter, mismatches=lambda _: counter)

    async def end_writers(_: int) -> None: ...

    bulk: Any = SimpleNamespace(end_writers=end_writers)
    bounds: Any = SimpleNamespace(check=lambda *_: None)
    return TransferService(calls.runtime, calls.registry, calls.validator, metrics, bulk, bounds, calls.long_calls)
