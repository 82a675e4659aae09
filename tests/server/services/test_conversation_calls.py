"""ConversationService runs long actions in slices, limits them, and leaves nothing behind."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from harness.operations import run_to_end
from harness.service_calls import SPEC, Calls, serving, until

from kvtier.protos.v1 import cache_pb2, conversation_pb2
from kvtier.protos.wire.packed_keys import pack_keys
from kvtier.server.config.tenants import tenant_tag
from kvtier.server.refused import Refused
from kvtier.server.services.conversation_calls import _MAX_WAITING, ConversationService
from kvtier.tiers.secondary_tier import NamespaceId
from kvtier.tiers.types import NamespaceSpec

MANY = 4096
KEYS = [b"%06d" % number + bytes(4) for number in range(MANY)]
OWN = NamespaceSpec(NamespaceId(tenant_tag("").ljust(32, b"n")), world_size=1, part_bytes=SPEC.part_bytes)


@pytest.fixture(autouse=True)
def one_slice_per_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of turns does not depend on the speed of the machine."""
    monkeypatch.setattr("kvtier.server.rpc.slice_scheduler._TURN_SECONDS", 0.0)


@asynccontextmanager
async def conversation() -> AsyncIterator[tuple[Calls, ConversationService]]:
    """Yields the service of a server that has a conversation "c" with many blocks."""
    async with serving() as calls:
        calls.session = calls.runtime.core.open_session(b"t", "e", 0, OWN)
        calls.registry.count_call_without_session = lambda _: None
        begin = cache_pb2.BeginRequestRequest(request_id="r", keys=pack_keys(KEYS), conversation_id="c")
        await calls.service.BeginRequest(begin, None)
        run_to_end(calls.runtime.core.complete_store(calls.session, calls.store(KEYS)))
        yield calls, ConversationService(calls.runtime, calls.registry, calls.validator, calls.long_calls)


def act(service: ConversationService, action: str) -> "asyncio.Task[conversation_pb2.ActOnConversationResponse]":
    request = conversation_pb2.ActOnConversationRequest(
        action=f"CONVERSATION_ACTION_{action}", conversation_id="c", retain_for={"seconds": 60}
    )
    return asyncio.create_task(service.ActOnConversation(request, None))  # type: ignore[arg-type]


async def turns_of(call: "asyncio.Task[object]") -> int:
    """Returns how often other tasks ran until a call had ended."""
    turns = 0
    while not call.done():
        turns += 1
        await asyncio.sleep(0)
    return turns


@pytest.mark.parametrize("action", ["RETAIN", "RELEASE", "DEMOTE", "PREFETCH", "PIN", "DELETE"])
def test_actions_run_in_slices(action: str) -> None:
    """Other calls run between two slices."""

    async def scenario() -> None:
        async with conversation() as (_, service):
            call = act(service, action)
            assert await turns_of(call) >= MANY // 256
            answer = call.result()
            counted = answer.changed_blocks + answer.shared_blocks + answer.kept_blocks + answer.missing_blocks
            assert counted == MANY

    asyncio.run(scenario())


def test_a_listing_runs_in_slices() -> None:
    async def scenario() -> None:
        async with conversation() as (_, service):
            request = conversation_pb2.ListConversationsRequest()
            call = asyncio.create_task(service.ListConversations(request, None))  # type: ignore[arg-type]
            assert await turns_of(call) >= MANY // 256
            assert call.result().conversations[0].tiers[0].blocks == MANY

    asyncio.run(scenario())


@pytest.mark.parametrize("action", ["PREFETCH", "DELETE"])
def test_a_call_that_ends_early_leaves_nothing(action: str) -> None:
    """No session, no lease and no pin. Later calls work."""

    async def scenario() -> None:
        async with conversation() as (calls, service):
            sessions = calls.runtime.core.stats().sessions
            call = act(service, action)
            for _ in range(5):
                await asyncio.sleep(0)
            call.cancel()
            await asyncio.wait([call])
            await until(lambda: not calls.pins())
            assert calls.runtime.core.stats().sessions == sessions
            assert not calls.runtime.core.leases()
            assert (await act(service, "DELETE")).changed_blocks > 0

    asyncio.run(scenario())


def test_too_many_actions_at_once_are_refused() -> None:
    """Afterwards calls are accepted again."""

    async def scenario() -> None:
        async with conversation() as (_, service):
            running = [act(service, "RETAIN") for _ in range(_MAX_WAITING)]
            await asyncio.sleep(0)
            with pytest.raises(Refused) as refused:
                await act(service, "RELEASE")
            assert refused.value.reason == "LIMIT_EXCEEDED"
            await asyncio.gather(*running)
            assert (await act(service, "RELEASE")).changed_blocks == MANY

    asyncio.run(scenario())
