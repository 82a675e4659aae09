"""Readers of the event log in a runtime without a server: slow readers and concurrent replays."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from unittest import mock

import pytest
from harness.operations import run_to_end
from harness.payloads import key_of

from kvtier.cuda.host.region import HostRegion
from kvtier.server.core_runtime import TierRuntime
from kvtier.server.events import log_reader
from kvtier.server.events.log_reader import EventWatch, WatchPhase, WatchStep
from kvtier.tiers.core.call_specs import StoreSpec
from kvtier.tiers.core.event_log import KEEP_SECONDS, EventKind, event_scope
from kvtier.tiers.secondary_tier import NamespaceId
from kvtier.tiers.types import NamespaceSpec

SPEC = NamespaceSpec(NamespaceId(b"n" * 32), world_size=1, part_bytes=(4096,))
KEYS = [key_of(number) for number in range(24)]  # fit into the first extent


async def no_turn() -> None:
    await asyncio.sleep(0)


@pytest.fixture
async def runtime() -> AsyncIterator[TierRuntime]:
    runtime = TierRuntime(HostRegion.create(4 << 20), [])
    await runtime.start()
    yield runtime
    await runtime.close()


def store(runtime: TierRuntime, keys: list[bytes]) -> None:
    session = runtime.core.open_session(b"s", "e", None, SPEC)
    answer = run_to_end(runtime.core.prepare_store(session, keys, StoreSpec(lease_seconds=1e12), now=0))
    assert answer.store_id is not None
    run_to_end(runtime.core.complete_store(session, answer.store_id))
    runtime.run_commands()


def watching(runtime: TierRuntime, lock: asyncio.Lock | None = None) -> EventWatch:
    return EventWatch(runtime, event_scope(SPEC.id), turn=no_turn, check=lambda: None, lock=lock or asyncio.Lock())


def stored(steps: list[WatchStep]) -> list[bytes]:
    assert all(event.kind is EventKind.STORED for step in steps for event in step.events)
    return [key for step in steps for event in step.events for key in event.keys]


async def replay_of(steps: AsyncIterator[WatchStep]) -> list[WatchStep]:
    """Reads up to the end of the next replay."""
    replay: list[WatchStep] = []
    while not replay or replay[-1].phase is not WatchPhase.END:
        step = await anext(steps)
        replay = [step] if step.phase is WatchPhase.BEGIN else [*replay, step]
    return replay


async def test_a_reader_that_lost_events_gets_a_replay(runtime: TierRuntime) -> None:
    """B6.3 B6.5 The log keeps a limited number of keys for a reader that does not read."""
    watch = watching(runtime)
    async with contextlib.aclosing(watch.steps(None)) as steps:
        assert not stored(await replay_of(steps))
        with mock.patch("kvtier.tiers.core.event_log.MAX_KEYS", 16):
            for number in range(0, 24, 8):
                store(runtime, KEYS[number : number + 8])
                runtime.core.watch_events(watch._ring.scope).read(watch._ring.end, 1)  # another reader
        replay = await replay_of(steps)
        assert replay[0].phase is WatchPhase.BEGIN
        assert sorted(stored(replay)) == sorted(KEYS)
    watch.close()


async def test_a_stalled_replay_does_not_block_that_of_another_reader(
    runtime: TierRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B6.5 It ends after a time-out, and its reader gets a new one when it reads again."""
    monkeypatch.setattr(log_reader, "_STALLED_SECONDS", 0.05)
    monkeypatch.setattr(log_reader, "_SLICE", 8)
    store(runtime, KEYS)
    lock = asyncio.Lock()
    stalled, other = watching(runtime, lock), watching(runtime, lock)
    async with contextlib.aclosing(stalled.steps(None)) as first, contextlib.aclosing(other.steps(None)) as second:
        assert (await anext(first)).phase is WatchPhase.BEGIN
        assert lock.locked()
        assert sorted(stored(await replay_of(second))) == sorted(KEYS)
        assert sorted(stored(await replay_of(first))) == sorted(KEYS)
    stalled.close()
    other.close()
    assert not lock.locked()


async def test_without_readers_nothing_is_recorded(runtime: TierRuntime) -> None:
    """B6.5 A while after its last reader has left, a log is dropped with its cursors."""
    watch = watching(runtime)
    async with contextlib.aclosing(watch.steps(None)) as steps:
        cursor = (await replay_of(steps))[-1].cursor
    watch.close()
    tiers = runtime.core._events.tiers.values()
    assert all(tier.is_on for tier in tiers)
    runtime.core.tick(runtime.now() + 2 * KEEP_SECONDS)
    assert not any(tier.is_on for tier in tiers)
    store(runtime, KEYS)
    again = watching(runtime)
    async with contextlib.aclosing(again.steps(cursor)) as steps:
        assert sorted(stored(await replay_of(steps))) == sorted(KEYS)
    again.close()
