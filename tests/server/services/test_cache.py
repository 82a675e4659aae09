"""Calls of the cache service: what releases, withdrawals and failed waits leave behind."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from harness.payloads import key_of
from harness.polling import async_wait_until
from harness.service_calls import Calls, duration, serving

from kvtier.protos.v1 import cache_pb2
from kvtier.protos.wire.packed_keys import pack_keys
from kvtier.server.refused import Refused
from kvtier.tiers.errors import CoreError, InvalidItem

KEYS = [key_of(number) for number in range(2)]
RELEASES = {
    "CompleteLoad": cache_pb2.CompleteLoadRequest(lease_id=7),
    "CompleteStore": cache_pb2.CompleteStoreRequest(store_id=7),
    "FinishRequest": cache_pb2.FinishRequestRequest(request_id="r"),
    "ReleaseLease": cache_pb2.ReleaseLeaseRequest(lease_ids=[7]),
    "WithdrawGrants": cache_pb2.WithdrawGrantsRequest(grant_ids=[7]),
}
OTHERS = {
    "BeginRequest": cache_pb2.BeginRequestRequest(request_id="r"),
    "Flush": cache_pb2.FlushRequest(keys=pack_keys(KEYS)),
    "Lookup": cache_pb2.LookupRequest(keys=pack_keys(KEYS)),
    "Prefetch": cache_pb2.PrefetchRequest(keys=pack_keys(KEYS)),
    "PrepareLoad": cache_pb2.PrepareLoadRequest(lease_id=7),
    "PrepareStore": cache_pb2.PrepareStoreRequest(keys=pack_keys(KEYS)),
    "Reset": cache_pb2.ResetRequest(),
    "Touch": cache_pb2.TouchRequest(lease_ids=[7]),
}


async def refusal_at_the_limit(calls: Calls, method: str, request: Any) -> str:
    """Returns why a call is refused above the rate limit of its tenant; empty if it is not."""

    def get(_: object, *, is_release: bool = False) -> Any:
        if not is_release:
            raise Refused("RATE_LIMITED", "too many calls")
        return calls.session

    calls.registry.get = get
    try:
        await getattr(calls.service, method)(request, None)
    except Refused as refused:
        return refused.reason
    except CoreError as error:
        return type(error).__name__
    return ""


@pytest.mark.parametrize("method", RELEASES)
async def test_calls_that_release_may_exceed_the_rate_limit(method: str) -> None:
    """Else the slots and pins of a tenant above its limit would stay in use."""
    async with serving() as calls:
        assert await refusal_at_the_limit(calls, method, RELEASES[method]) != "RATE_LIMITED"


@pytest.mark.parametrize("method", OTHERS)
async def test_other_calls_may_not(method: str) -> None:
    async with serving() as calls:
        assert await refusal_at_the_limit(calls, method, OTHERS[method]) == "RATE_LIMITED"


def test_each_call_is_in_one_of_the_lists() -> None:
    methods = {method.name for method in cache_pb2.DESCRIPTOR.services_by_name["CacheService"].methods}
    assert methods == {*RELEASES, *OTHERS}


async def wait_for_block(calls: Calls, **fields: Any) -> asyncio.Future[cache_pb2.LookupResponse]:
    """Begins a lookup that waits for a block which is being stored."""
    request = cache_pb2.LookupRequest(keys=pack_keys(KEYS[:1]), wait=duration(600), **fields)
    answer = asyncio.ensure_future(calls.service.Lookup(request, None))
    await async_wait_until(lambda: bool(calls.runtime._waiting))
    return answer


async def test_a_lookup_that_waited_in_vain_leaves_no_lease() -> None:
    """The client does not get the lease's id."""
    async with serving() as calls:
        store = calls.store(KEYS[:1])
        answer = await wait_for_block(calls)
        await calls.complete(store, [0])
        assert not (await answer).lease_id
        assert not calls.runtime.core.leases()


@pytest.mark.parametrize("how", ["FinishRequest", "ReleaseLease", "WithdrawGrants"])
async def test_a_lookup_whose_lease_ends_waits_no_longer(how: str) -> None:
    """It answers that no block is a hit, and not after the 30 seconds that a call may wait."""
    async with serving() as calls:
        assert calls.runtime._ticker is not None
        calls.runtime._ticker.cancel()  # a tick would execute the commands that a call has left
        calls.store(KEYS[:1])
        answer = await wait_for_block(calls, request_id="r", grant_id=7)
        [lease] = calls.runtime.core.leases()
        request: Any = {
            "FinishRequest": cache_pb2.FinishRequestRequest(request_id="r"),
            "ReleaseLease": cache_pb2.ReleaseLeaseRequest(lease_ids=[lease.id]),
            "WithdrawGrants": cache_pb2.WithdrawGrantsRequest(grant_ids=[7]),
        }[how]
        await getattr(calls.service, how)(request, None)
        found = await asyncio.wait_for(answer, 20)
        assert (found.lease_id, found.prefix_hits) == (0, 0)
        stats = calls.runtime.core.stats()
        assert (sum(tier.hits for tier in stats.tiers), stats.lookup_misses) == (0, 1)


async def test_a_lookup_whose_session_ends_counts_no_hit() -> None:
    async with serving() as calls:
        core = calls.runtime.core
        other = core.open_session(b"other", "other", 0, calls.session.namespace)
        session, calls.session = calls.session, other
        calls.store(KEYS[:1])
        calls.session = session
        answer = await wait_for_block(calls)
        core.close_session(session.id)
        calls.registry_ended = True
        for event in list(calls.runtime._waiting.values()):
            for future in event:
                future.set_result(None)
        with pytest.raises(Refused):
            await answer
        stats = core.stats()
        assert (sum(tier.hits for tier in stats.tiers), stats.lookup_misses) == (0, 1)
        assert not core.leases()


async def test_a_withdrawal_may_arrive_before_its_call() -> None:
    """Calls of one client can overtake each other, because they use several connections."""
    async with serving() as calls:
        await calls.service.WithdrawGrants(cache_pb2.WithdrawGrantsRequest(grant_ids=[7]), None)
        with pytest.raises(InvalidItem):
            await calls.service.Lookup(cache_pb2.LookupRequest(keys=pack_keys(KEYS), grant_id=7), None)
        with pytest.raises(InvalidItem):
            await calls.service.PrepareStore(cache_pb2.PrepareStoreRequest(keys=pack_keys(KEYS), grant_id=7), None)
        assert not calls.runtime.core.leases()
        assert not calls.runtime.core.stores()
