"""Calls with many keys: their work is bounded, and they run in slices."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator, Sequence
from inspect import GEN_CLOSED, getgeneratorstate
from pathlib import Path
from typing import Any

import pytest
from harness.operations import run_to_end
from harness.payloads import key_of
from harness.push_frames import encode_push_frame
from harness.service_calls import PART, SPEC, Calls, broker_of, duration, serving, transfers_of, until
from harness.shared_tier import SharedDirectory

from kvtier.cuda.host.socket_io import checksum
from kvtier.protos.v1 import cache_pb2, transfer_pb2
from kvtier.protos.v1.common_pb2 import PackedKeys
from kvtier.protos.wire.packed_keys import pack_keys, slices_of_keys, unpack_offsets
from kvtier.server.bulk.messages import Begin, Caller, End, Granted, Refusal
from kvtier.server.config.schema import LimitConfig
from kvtier.server.core_runtime import TierRuntime
from kvtier.server.refused import Refused
from kvtier.server.rpc import request_checks
from kvtier.server.services import long_calls
from kvtier.tiers.core.block_matcher import OTHER_COST
from kvtier.tiers.core.call_specs import LookupSpec
from kvtier.tiers.core.commands import Change
from kvtier.tiers.core.completions import Durability
from kvtier.tiers.core.leases import BlockLease
from kvtier.tiers.core.operations import Operation
from kvtier.tiers.core.running_lookup import LOOKUP_SLICE
from kvtier.tiers.errors import InvalidItem, InvalidKey, LeaseNotFound, StoreNotFound
from kvtier.tiers.secondary_tier import NamespaceId, TierFilter
from kvtier.tiers.types import (
    DurableStatus,
    EngineSession,
    JobId,
    KeyStatus,
    LeaseId,
    StoreId,
    StoreStatus,
)

MANY = 4096
CHANGES = 200
KEYS = [key_of(number) for number in range(MANY)]
KEY_TURNS = MANY // long_calls._KEY_SLICE
"""Turns in which a call reads and checks its keys, before it pins a block."""


@pytest.fixture(autouse=True)
def one_slice_per_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of turns does not depend on the speed of the machine."""
    monkeypatch.setattr("kvtier.server.rpc.slice_scheduler._TURN_SECONDS", 0.0)


async def change(runtime: TierRuntime) -> None:
    """Wakes all waiting calls, and lets them run."""
    runtime.notify_change()
    for _ in range(20):
        await asyncio.sleep(0)


async def turns_of(call: asyncio.Task[Any]) -> int:
    """Returns how many turns of the event loop a call takes."""
    turns = 0
    while not call.done():
        turns += 1
        await asyncio.sleep(0)
    return turns


def test_a_repeated_key_is_flushed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """65,536 times the same pending key in each of four calls: a change costs one read per call."""

    async def scenario() -> None:
        async with serving() as calls:
            calls.store(KEYS[:1])
            read = calls.statuses_read(monkeypatch)
            flushes = [asyncio.create_task(calls.flush(KEYS[:1] * 65536, 0.9)) for _ in range(4)]
            await asyncio.sleep(0)
            for _ in range(CHANGES):
                await change(calls.runtime)
            answers = await asyncio.gather(*flushes)
            assert len(read) <= 4 * (CHANGES + 10)
            assert answers == [bytes([DurableStatus.PENDING]) * 65536] * 4

    asyncio.run(scenario())


def test_a_change_costs_a_flush_only_the_keys_that_it_settles(monkeypatch: pytest.MonkeyPatch) -> None:
    """A flush of many pending keys reads each of them twice, and one more for each change."""

    async def scenario() -> None:
        async with serving() as calls:
            first, second = calls.store(KEYS[:100]), calls.store(KEYS[100:])
            read = calls.statuses_read(monkeypatch)
            flush = asyncio.create_task(calls.flush([*KEYS, *KEYS], 30))
            for _ in range(CHANGES):
                await change(calls.runtime)
            for store in (first, second):
                assert not flush.done()
                run_to_end(calls.runtime.core.complete_store(calls.session, store))
                await change(calls.runtime)
            assert await flush == bytes([DurableStatus.VOLATILE]) * 2 * MANY
            assert len(read) <= 2 * MANY + 2 * (CHANGES + 100)

    asyncio.run(scenario())


def test_a_flush_tells_settled_keys_behind_a_pending_one() -> None:
    """At the end of the wait each key has its current status."""

    async def scenario() -> None:
        async with serving() as calls:
            calls.store(KEYS[:1])
            store = calls.store(KEYS[1:1000])
            flush = asyncio.create_task(calls.flush(KEYS[:1000], 0.5))
            await change(calls.runtime)
            run_to_end(calls.runtime.core.complete_store(calls.session, store))
            calls.runtime.notify_change()
            assert await flush == bytes([DurableStatus.PENDING] + [DurableStatus.VOLATILE] * 999)

    asyncio.run(scenario())


def stop_ticks(runtime: TierRuntime) -> None:
    """Afterwards only `change` wakes waiting calls."""
    assert runtime._ticker is not None
    runtime._ticker.cancel()


def test_few_calls_of_a_tenant_wait_for_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each change wakes all of them. Further flushes and resets are answered at once."""
    monkeypatch.setattr("kvtier.server.services.long_calls._MAX_WAITING", 2)

    async def run() -> None:
        async with serving() as calls:
            calls.store(KEYS[:1])
            waiting = [asyncio.create_task(calls.flush(KEYS[:1], 3600)) for _ in range(2)]
            await until(lambda: calls.long_calls._waiting.total() == 2)
            waiting[0].cancel()
            await asyncio.gather(waiting[0], return_exceptions=True)
            waiting[0] = asyncio.create_task(calls.flush(KEYS[:1], 3600))
            await until(lambda: calls.long_calls._waiting.total() == 2)
            assert await calls.flush(KEYS[:1], 3600) == bytes([DurableStatus.PENDING])
            reset = await calls.service.Reset(cache_pb2.ResetRequest(wait=duration(3600)), None)
            assert reset.pending_blocks == 1
            for each in waiting:
                each.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
            assert not calls.long_calls._waiting

    asyncio.run(run())


def test_a_flush_misses_no_change_during_its_slices() -> None:
    """All blocks are stored before the flush has asked for its last keys."""

    async def scenario() -> None:
        async with serving() as calls:
            stop_ticks(calls.runtime)
            store = calls.store(KEYS)
            first = run_to_end(calls.runtime.core.flush(SPEC.id, KEYS[:1]))
            flush = asyncio.create_task(calls.flush(KEYS, 30))
            for _ in range(3):
                await asyncio.sleep(0)
            run_to_end(calls.runtime.core.complete_store(calls.session, store))
            calls.runtime.notify_change()
            assert first == bytes([DurableStatus.PENDING])
            assert await asyncio.wait_for(flush, 10) == bytes([DurableStatus.VOLATILE]) * MANY

    asyncio.run(scenario())


@pytest.mark.parametrize("expired", [False, True])
def test_a_query_of_shared_tiers_misses_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, expired: bool
) -> None:
    """The answers arrive, or also expire, before the call has asked for its last keys."""

    async def scenario() -> None:
        async with serving(SharedDirectory("far", tmp_path, 1 << 20, durability="process")) as calls:
            core, stored = calls.runtime.core, KEYS[512:1024]
            stop_ticks(calls.runtime)
            run_to_end(core.complete_store(calls.session, calls.store(stored)))
            calls.runtime.run_commands()
            await until(lambda: not calls.runtime._begin_queued_stores())
            scheduler, original = calls.long_calls._scheduler, core.lookup_finished
            answered = 0

            def lookup_finished(job_id: JobId, found: Sequence[bool]) -> None:
                nonlocal answered
                original(job_id, found)
                answered += len(found)
                if expired and answered == len(stored):
                    core.tick(calls.runtime.now() + 60)

            turn = scheduler.turn

            async def turn_after_answers(session: EngineSession) -> float:
                turn_ends = await turn(session)
                if scheduler.turns > 1:
                    await until(lambda: answered >= len(stored))
                return turn_ends

            monkeypatch.setattr(core, "lookup_finished", lookup_finished)
            monkeypatch.setattr(scheduler, "turn", turn_after_answers)
            now = calls.runtime.now()
            query = core.query_shared_tiers(calls.session, KEYS[:1024], prefix=False, deadline=now + 30, now=now)
            await asyncio.wait_for(calls.long_calls.run(calls.session, query), 10)
            assert core.lacking(calls.session, KEYS[:1], TierFilter()) == KEYS[:1]

    asyncio.run(scenario())


def test_long_calls_run_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other calls run between two slices of a flush; each slice has a bounded number of keys."""

    async def scenario() -> None:
        async with serving() as calls:
            slices: list[int] = []
            original = Durability._store_missing

            def store_missing(durability: Durability, namespace: NamespaceId, keys: Sequence[bytes]) -> None:
                slices.append(len(keys))
                original(durability, namespace, keys)

            monkeypatch.setattr(Durability, "_store_missing", store_missing)
            turns = await turns_of(asyncio.create_task(calls.flush(KEYS, 0)))
            assert sum(slices) == MANY
            assert max(slices) <= 256
            assert turns > len(slices)

    asyncio.run(scenario())


@pytest.mark.parametrize("call", ["Flush", "Lookup", "PrepareStore"])
@pytest.mark.parametrize("more", [b"", b"longer"])
def test_the_keys_of_a_request_are_read_in_slices(monkeypatch: pytest.MonkeyPatch, call: str, more: bytes) -> None:
    """Other calls run between two slices, also if the call is refused because of its last key."""

    async def scenario() -> None:
        async with serving() as calls:
            scheduler, slices = calls.long_calls._scheduler, list[tuple[int, int]]()

            def read(packed: PackedKeys, most: int) -> Iterator[tuple[bytes, list[bytes]]]:
                for joined, found in slices_of_keys(packed, most):
                    yield joined, found
                    slices.append((scheduler.turns, len(found)))

            monkeypatch.setattr(request_checks, "slices_of_keys", read)
            names = [more + KEYS[0], *KEYS * 15, *KEYS[:5]]
            kind: Any = getattr(cache_pb2, f"{call}Request")
            bad = KEYS[0][:-4] + b"\0\0\0\7"
            for last in (bad, names[-1]):
                slices.clear()
                all_keys = [*names[:-1], last]
                work = getattr(calls.service, call)(kind(keys=pack_keys(all_keys)), None)
                if last is bad:
                    with pytest.raises(InvalidKey):
                        await work
                    assert not calls.runtime.core.stores()
                    assert not calls.runtime.core.leases()
                else:
                    await work
                    assert sum(number for _, number in slices) == len(names)
                assert max(number for _, number in slices) <= long_calls._KEY_SLICE
                assert len({turn for turn, _ in slices}) == len(slices) >= 7
            slices.clear()
            packed = pack_keys(names)
            packed.keys += KEYS[0] if more else b"x"  # bytes without a length, or a part of a key
            with pytest.raises(Refused, match=r"keys: .* bytes") as refused:
                await getattr(calls.service, call)(kind(keys=packed), None)
            assert refused.value.reason == "INVALID_KEY"
            assert bool(slices) == bool(more)  # the lengths are added up in slices
            assert len({turn for turn, _ in slices}) == len(slices)

    asyncio.run(scenario())


def test_the_answer_of_a_flush_is_built_in_slices() -> None:
    """Also if all of its keys are the same one."""

    async def scenario() -> None:
        async with serving() as calls:
            run_to_end(calls.runtime.core.complete_store(calls.session, calls.store(KEYS[:1])))
            names = KEYS[:1] * 65535 + KEYS[1:2]
            flush = asyncio.create_task(calls.flush(names, 0))
            assert await turns_of(flush) > 65536 // 256
            assert flush.result() == bytes([DurableStatus.VOLATILE]) * 65536

    asyncio.run(scenario())


def test_stores_run_in_slices() -> None:
    """One store of all keys, with one answer. Other calls run between the slices."""

    async def scenario() -> None:
        async with serving() as calls:
            known = calls.store(KEYS[:300])
            run_to_end(calls.runtime.core.complete_store(calls.session, known))
            prepare = asyncio.create_task(calls.prepare([*KEYS, *KEYS[:5], *KEYS[-5:]]))
            assert await turns_of(prepare) > MANY // 512
            answer = prepare.result()
            present, granted, in_progress = StoreStatus.PRESENT, StoreStatus.GRANTED, StoreStatus.IN_PROGRESS
            expected = [present] * 300 + [granted] * (MANY - 300) + [present] * 5 + [in_progress] * 5
            assert answer.statuses == bytes(expected)
            slots = unpack_offsets(answer.slot_offsets)
            assert len(set(slots)) == MANY - 300
            store = calls.runtime.core.store(calls.session, StoreId(answer.store_id))
            assert [block.key for block in store.blocks] == KEYS[300:]
            assert store.slots() == list(slots)
            failed = [0, MANY - 301]
            complete = asyncio.create_task(calls.complete(answer.store_id, failed))
            assert await turns_of(complete) > MANY // 512
            found = run_to_end(
                calls.runtime.core.lookup(calls.session, KEYS, LookupSpec(prefix=False, lease_seconds=1e12), now=0)
            )
            missed = [number for number, status in enumerate(found.statuses()) if status != KeyStatus.HIT]
            assert missed == [300, MANY - 1]
            assert calls.pins() == set(KEYS) - {KEYS[300], KEYS[-1]}, "only the lookup pins blocks"

    asyncio.run(scenario())


def test_a_long_store_of_present_blocks_has_no_id() -> None:
    async def scenario() -> None:
        async with serving() as calls:
            run_to_end(calls.runtime.core.complete_store(calls.session, calls.store(KEYS)))
            answer = await calls.prepare(KEYS)
            assert (answer.store_id, set(answer.statuses)) == (0, {StoreStatus.PRESENT})
            await until(lambda: not calls.pins())
            assert not calls.runtime.core.stores()

    asyncio.run(scenario())


def test_a_cancelled_store_leaves_nothing() -> None:
    """The client disconnects between two slices, so it never gets the id of the store."""

    async def scenario() -> None:
        async with serving() as calls:
            prepare = asyncio.create_task(calls.prepare(KEYS))
            await until(calls.runtime.core.stores)
            prepare.cancel()
            with pytest.raises(asyncio.CancelledError):
                await prepare
            await until(lambda: not calls.runtime.core.stores())
            assert not calls.pins()
            assert len(unpack_offsets((await calls.prepare(KEYS)).slot_offsets)) == MANY

    asyncio.run(scenario())


def test_a_session_that_ends_during_a_long_store_leaves_nothing() -> None:
    async def scenario() -> None:
        async with serving() as calls:
            for call in ("prepare", "complete"):
                store = (await calls.prepare(KEYS)).store_id if call == "complete" else None
                work = calls.prepare(KEYS) if store is None else calls.complete(store, [])
                task = asyncio.create_task(work)
                for _ in range(12):
                    await asyncio.sleep(0)
                assert not task.done()
                calls.runtime.core.close_session(calls.session.id)
                calls.registry_ended = True
                await asyncio.wait([task])
                assert not calls.runtime.core.stores()
                calls.runtime.run_commands()
                await until(lambda: not calls.pins())
                calls.registry_ended = False
                calls.session = calls.runtime.core.open_session(b"s", "e", 0, SPEC)

    asyncio.run(scenario())


def test_a_store_that_is_being_completed_is_not_found() -> None:
    """Another completion, or a write, does not find the store; a cancellation does not stop it."""

    async def scenario() -> None:
        async with serving() as calls:
            store = (await calls.prepare(KEYS)).store_id
            complete = asyncio.create_task(calls.complete(store, []))
            for _ in range(12):
                await asyncio.sleep(0)
            with pytest.raises(StoreNotFound):
                await calls.complete(store, [])
            with pytest.raises(StoreNotFound):
                calls.runtime.core.renew_store(calls.session, StoreId(store), 1e12)
            complete.cancel()
            with pytest.raises(asyncio.CancelledError):
                await complete
            await until(lambda: not calls.runtime.core.stores())
            assert not calls.pins()
            assert set(await calls.flush(KEYS, 0)) == {DurableStatus.VOLATILE}

    asyncio.run(scenario())


def test_a_store_does_not_expire_during_its_completion() -> None:
    """All blocks of a completed store are hits, although its time ends between two slices."""

    async def scenario() -> None:
        async with serving() as calls:
            store = (await calls.prepare(KEYS)).store_id
            complete = asyncio.create_task(calls.complete(store, []))
            for _ in range(12):
                await asyncio.sleep(0)
            assert calls.runtime.core.stores()
            calls.runtime.core.tick(calls.runtime.now() + 1e6)
            await complete
            found = run_to_end(
                calls.runtime.core.lookup(calls.session, KEYS, LookupSpec(prefix=False, lease_seconds=1e12), now=0)
            )
            assert set(found.statuses()) == {KeyStatus.HIT}

    asyncio.run(scenario())


def test_releases_and_renewals_run_in_slices() -> None:
    """65,536 leases in one call, known or not, do not hold the event loop."""

    async def scenario() -> None:
        async with serving() as calls:
            release = cache_pb2.ReleaseLeaseRequest(lease_ids=range(1, 65537))
            assert await turns_of(asyncio.create_task(calls.service.ReleaseLease(release, None))) > 65536 // 1024
            touch = cache_pb2.TouchRequest(lease_ids=range(1, 65537))
            call = asyncio.create_task(calls.service.Touch(touch, None))
            assert await turns_of(call) > 65536 // 1024
            assert list(call.result().missing_lease_ids) == list(range(1, 65537))

    asyncio.run(scenario())


@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("known", [True, False])
def test_lookups_run_in_slices(*, prefix: bool, known: bool) -> None:
    """Other calls run between two slices of a lookup; the answer is of the whole lookup."""
    slice_keys = LOOKUP_SLICE if known or prefix else LOOKUP_SLICE // OTHER_COST

    async def scenario() -> None:
        async with serving() as calls:
            if known:
                run_to_end(calls.runtime.core.complete_store(calls.session, calls.store(KEYS)))
            calls.session.writers.add(1)
            call = asyncio.create_task(calls.look_up(KEYS, prefix=prefix, want_slots=True))
            assert await turns_of(call) > MANY // slice_keys
            answer = call.result()
            assert set(answer.statuses) == {KeyStatus.HIT if known else KeyStatus.MISS}
            assert len(answer.statuses) == len(answer.sources) == MANY
            assert len(unpack_offsets(answer.slot_offsets)) == answer.prefix_hits == (MANY if known else 0)

    asyncio.run(scenario())


@pytest.mark.parametrize("spare", [0, -1])
def test_an_answer_has_a_limited_number_of_slots(spare: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """If there are more, it has none, and the client prepares the load."""
    monkeypatch.setattr("kvtier.server.services.cache._MAX_SLOTS", 8 + spare)

    async def scenario() -> None:
        async with serving() as calls:
            run_to_end(calls.runtime.core.complete_store(calls.session, calls.store(KEYS[:8])))
            calls.session.writers.add(1)
            answer = await calls.look_up(KEYS[:8], want_slots=True)
            assert len(unpack_offsets(answer.slot_offsets)) == (0 if spare else 8)
            assert answer.prefix_hits == 8

    asyncio.run(scenario())


def test_a_client_cannot_count_more_than_its_lease_has() -> None:
    """CompleteLoad names the bytes that the client copied without PrepareLoad."""

    async def scenario() -> None:
        async with serving() as calls:
            run_to_end(calls.runtime.core.complete_store(calls.session, calls.store(KEYS[:2])))
            lease_id = (await calls.look_up(KEYS[:3])).lease_id
            await calls.service.CompleteLoad(cache_pb2.CompleteLoadRequest(lease_id=lease_id, copied_bytes=PART), None)
            assert calls.runtime.core.stats().tiers[0].loaded_bytes == 0, "this session does not map the region"
            calls.session.writers.add(1)
            for copied, counted in ((PART, 1), (2**64 - 1, 2), (PART, 2), (0, 2)):
                await calls.service.CompleteLoad(
                    cache_pb2.CompleteLoadRequest(lease_id=lease_id, copied_bytes=copied), None
                )
                assert calls.runtime.core.stats().tiers[0].loaded_bytes == counted * PART

    asyncio.run(scenario())


def test_prefetches_run_in_slices() -> None:
    """Other calls run between two slices. Blocks that are present are never pinned between them."""

    async def scenario() -> None:
        async with serving() as calls:
            run_to_end(calls.runtime.core.complete_store(calls.session, calls.store(KEYS)))
            call = asyncio.create_task(calls.service.Prefetch(cache_pb2.PrefetchRequest(keys=pack_keys(KEYS)), None))
            assert await turns_of(call) >= MANY // LOOKUP_SLICE
            assert call.result().present_blocks == MANY
            await until(lambda: not calls.pins())
            before = calls.long_calls._scheduler.turns
            call = asyncio.create_task(calls.service.Prefetch(cache_pb2.PrefetchRequest(keys=pack_keys(KEYS)), None))
            await until(lambda: calls.long_calls._scheduler.turns == before + KEY_TURNS + 2)
            assert not call.done()
            assert not calls.pins()
            call.cancel()
            await asyncio.wait([call])
            assert not calls.runtime.core.leases()

    asyncio.run(scenario())


def test_a_lease_that_ends_before_its_slots_are_read_is_a_miss() -> None:
    """The answer has no lease and no hits, and no hit is counted."""

    async def scenario() -> None:
        async with serving() as calls:
            core = calls.runtime.core
            run_to_end(core.complete_store(calls.session, calls.store(KEYS)))
            calls.session.writers.add(1)
            call = asyncio.create_task(calls.look_up(KEYS, want_slots=True))
            await until(lambda: bool(core.leases()))
            [lease] = core.leases()
            core.release(calls.session, lease.id)
            answer = await call
            assert (answer.lease_id, answer.prefix_hits, answer.slot_offsets) == (0, 0, b"")
            assert set(answer.statuses) == {KeyStatus.MISS}
            assert sum(tier.hits for tier in core.stats().tiers) == 0

    asyncio.run(scenario())


@pytest.mark.parametrize("ends", ["call", "session"])
@pytest.mark.parametrize("turns", [2, 4, 5, 7])
def test_a_lookup_that_ends_early_leaves_nothing(ends: str, turns: int) -> None:
    """The client disconnects, or its session ends, between two slices of the lookup or read."""

    async def scenario() -> None:
        async with serving() as calls:
            run_to_end(calls.runtime.core.complete_store(calls.session, calls.store(KEYS)))
            calls.session.writers.add(1)
            call = asyncio.create_task(calls.look_up(KEYS, want_slots=True))
            await until(lambda: calls.long_calls._scheduler.turns == KEY_TURNS + turns)
            assert not call.done()
            assert calls.pins()
            if ends == "call":
                call.cancel()
            else:
                calls.runtime.core.close_session(calls.session.id)
                calls.registry_ended = True
            await asyncio.wait([call])
            assert call.cancelled() or isinstance(call.exception(), Refused)
            await until(lambda: not calls.pins())
            assert not calls.runtime.core.leases()

    asyncio.run(scenario())


def test_loads_are_prepared_in_slices() -> None:
    """Other calls run between two slices. A refused item leaves the counted bytes as they were."""

    async def scenario() -> None:
        async with serving() as calls:
            run_to_end(calls.runtime.core.complete_store(calls.session, calls.store(KEYS)))
            calls.session.writers.add(1)
            lease_id = (await calls.look_up(KEYS)).lease_id
            request = cache_pb2.PrepareLoadRequest(lease_id=lease_id, items=[*range(MANY)] * 4)
            call = asyncio.create_task(calls.service.PrepareLoad(request, None))
            assert await turns_of(call) > 4 * MANY // 1024
            assert len(unpack_offsets(call.result().slot_offsets)) == 4 * MANY
            loaded = calls.runtime.core.stats().tiers[0].loaded_bytes
            assert loaded == 4 * MANY * PART
            with pytest.raises(InvalidItem):
                await calls.service.PrepareLoad(
                    cache_pb2.PrepareLoadRequest(lease_id=lease_id, items=[*range(MANY), MANY]), None
                )
            assert calls.runtime.core.stats().tiers[0].loaded_bytes == loaded

    asyncio.run(scenario())


def test_a_lease_that_ends_during_a_long_read_is_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its slots may have other blocks."""

    async def scenario() -> None:
        async with serving() as calls:
            core = calls.runtime.core
            run_to_end(core.complete_store(calls.session, calls.store(KEYS)))
            lease_id = LeaseId((await calls.look_up(KEYS)).lease_id)
            read = BlockLease.read

            def ending(lease: BlockLease, items: Sequence[int], rank: int, *, counted: bool) -> Any:
                assert len(items) < MANY
                found = read(lease, items, rank, counted=counted)
                if core.leases():
                    core.release(calls.session, lease_id)
                return found

            monkeypatch.setattr(BlockLease, "read", ending)
            with pytest.raises(LeaseNotFound):
                await calls.long_calls.read(calls.session, lease_id, range(MANY))

    asyncio.run(scenario())


def test_a_pull_is_prepared_in_slices() -> None:
    """Other calls run before the first frame. A pull whose session ends sends no frame."""

    async def scenario() -> None:
        async with serving() as calls:
            run_to_end(calls.runtime.core.complete_store(calls.session, calls.store(KEYS)))
            lease_id = (await calls.look_up(KEYS)).lease_id
            service: Any = transfers_of(calls)
            request = transfer_pb2.PullRequest(lease_id=lease_id, items=[*range(MANY)] * 4)

            async def first_frame() -> transfer_pb2.PullResponse:
                frame: transfer_pb2.PullResponse = await anext(service.Pull(request, None))
                return frame

            call = asyncio.create_task(first_frame())
            assert await turns_of(call) > 4 * MANY // 1024
            assert call.result().payload
            calls.registry_ended = True
            with pytest.raises(Refused):
                await first_frame()

    asyncio.run(scenario())


@pytest.mark.parametrize("push", [True, False])
def test_each_frame_of_a_stream_over_grpc_waits_for_a_turn(push: bool) -> None:  # noqa: FBT001
    """Before, 64 Pulls of a tenant left another one 0.2 calls per second instead of 590."""

    async def scenario() -> None:
        async with serving() as calls:
            store_id, keys = calls.store(KEYS[:8]), KEYS[:8]
            calls.validator.limits = LimitConfig(max_frame_bytes=PART)
            service: Any = transfers_of(calls)
            before = calls.long_calls.scheduler.turns
            if push:
                frame = encode_push_frame(0, checksum([memoryview(bytes(PART))]), [bytes(PART)], store_id=store_id)

                async def frames() -> AsyncIterator[bytes]:
                    for _ in keys:
                        yield frame

                assert (await service.Push(frames(), None)).received_bytes == 8 * PART
            else:
                run_to_end(calls.runtime.core.complete_store(calls.session, store_id))
                lease_id = (await calls.look_up(keys)).lease_id
                request = transfer_pb2.PullRequest(lease_id=lease_id, items=range(8))
                assert [bool(each.payload) async for each in service.Pull(request, None)] == [True] * 8 + [False]
            # The first frame of a Push tells which session it is.
            assert calls.long_calls.scheduler.turns - before == 8 - push

    asyncio.run(scenario())


def test_a_frame_that_repeats_bytes_writes_the_others_to_their_places() -> None:
    """A client that pushes again after a failure sends bytes that have arrived before."""
    content = random.Random(1).randbytes(2 * PART)
    ranges = [(0, 100), (50, PART + 10), (PART - 10, 2 * PART)]

    async def scenario() -> None:
        async with serving() as calls:
            store_id = calls.store(KEYS[:2])

            async def frames() -> AsyncIterator[bytes]:
                for start, end in ranges:
                    data = content[start:end]
                    yield encode_push_frame(start, checksum([memoryview(data)]), [data], store_id=store_id)

            await transfers_of(calls).Push(frames(), None)  # type: ignore[arg-type]
            slots = calls.runtime.core.store(calls.session, StoreId(store_id)).slots()
            memory = calls.runtime.region.memory
            assert b"".join(bytes(memory[slot : slot + PART]) for slot in slots) == content

    asyncio.run(scenario())


async def begin_stream(calls: Calls, *, push: bool) -> tuple[Begin, Granted]:
    """Returns the request of a long stream, and the expected answer."""
    store_id = (await calls.prepare(KEYS)).store_id
    store = calls.runtime.core.store(calls.session, StoreId(store_id))
    slots, sizes = store.slots(), [PART] * MANY
    caller = Caller(b"s", 1, None, [], is_local=True)
    if push:
        return Begin(1, caller, True, store_id, []), Granted(1, slots, sizes)
    await calls.complete(store_id, [])
    lease_id = (await calls.look_up(KEYS)).lease_id
    return Begin(1, caller, False, lease_id, [*range(MANY)] * 4), Granted(1, slots * 4, sizes * 4)


@pytest.mark.parametrize("push", [True, False])
def test_the_slots_of_a_stream_are_read_in_slices(*, push: bool) -> None:
    """Other calls run before the bulk process gets the slots of a long store or load."""

    async def scenario() -> None:
        async with serving() as calls:
            broker, sent = broker_of(calls)
            begin, granted = await begin_stream(calls, push=push)
            before = calls.long_calls._scheduler.turns
            broker.handle(begin)
            assert not sent
            await until(lambda: sent)
            assert sent == [granted]
            assert calls.long_calls._scheduler.turns - before == (4 if push else 16)

    asyncio.run(scenario())


@pytest.mark.parametrize("end", ["stream", "child", "session", "target", "item"])
@pytest.mark.parametrize("push", [True, False])
def test_a_stream_that_ends_before_its_grant_gets_no_slots(end: str, *, push: bool) -> None:
    """The client, the bulk process, the session, or the store or lease ends between two slices."""

    async def scenario() -> None:
        async with serving() as calls:
            broker, sent = broker_of(calls)
            begin, _ = await begin_stream(calls, push=push)
            if end == "item":
                begin.items.append(MANY)
            broker.handle(begin)
            stream, core = broker._streams[1], calls.runtime.core
            assert stream.granting is not None
            if end == "stream":
                broker.handle(End(1, "CANCELLED"))
            elif end == "child":
                broker.disconnected()
            elif end == "session":
                core.close_session(calls.session.id)
                calls.registry_ended = True
                broker.end_streams_of_session(b"s")
            elif end == "target" and push:
                run_to_end(core.complete_store(calls.session, StoreId(begin.target)))
            elif end == "target":
                core.release(calls.session, LeaseId(begin.target))
            await asyncio.wait([stream.granting])
            if end == "item" and push:
                assert [type(message) for message in sent] == [Granted]
            else:
                assert [type(message) for message in sent] == ([] if end in ("stream", "child") else [Refusal])
            broker.disconnected()
            assert not broker.writers.busy(begin.target)

    asyncio.run(scenario())


@pytest.mark.parametrize("how", ["cancelled", "session ended", "failed"])
def test_an_operation_is_closed_if_its_call_ends_early(how: str) -> None:
    """At once, and not by the garbage collector: the test still has the operation."""

    async def scenario() -> None:
        async with serving() as calls:
            closed: list[str] = []

            def steps() -> Operation[None]:
                try:
                    while True:
                        yield Change(1e12) if how == "cancelled" else None
                        if how == "failed":
                            calls.runtime.core.store(calls.session, StoreId(1))  # unknown
                except BaseException as error:
                    closed.append(type(error).__name__)
                    raise

            operation = steps()
            call = asyncio.create_task(calls.long_calls.run(calls.session, operation))
            await asyncio.sleep(0)
            if how == "cancelled":
                call.cancel()
            calls.registry_ended = how == "session ended"
            await asyncio.wait([call])
            assert closed == ["StoreNotFound" if how == "failed" else "GeneratorExit"]
            assert getgeneratorstate(operation) == GEN_CLOSED

    asyncio.run(scenario())
