"""Each field of a request reaches the core, and each field of the core's answer the client."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Generator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from harness.payloads import key_of
from harness.service_calls import PART, Calls, duration, serving

from kvtier.protos.v1 import cache_pb2
from kvtier.protos.wire.packed_keys import pack_keys, pack_offsets, unpack_offsets
from kvtier.server.refused import Refused
from kvtier.tiers.core.call_specs import LookupSpec, StoreSpec
from kvtier.tiers.core.prefetches import PrefetchAnswer
from kvtier.tiers.core.running_lookup import LookupAnswer
from kvtier.tiers.errors import InvalidItem
from kvtier.tiers.secondary_tier import OffloadPolicy, RequestInfo, TierFilter, Vote
from kvtier.tiers.types import KeyStatus, MissReason

KEYS = [key_of(1), key_of(2)]
NOW = 5000.0
HIT, MISS = KeyStatus.HIT, KeyStatus.MISS
EACH, PREFIX = cache_pb2.LOOKUP_MODE_EACH, cache_pb2.LOOKUP_MODE_PREFIX


class Core:
    """Records the arguments of the core's methods, and gives the answers of a test."""

    def __init__(self, calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
        self.arguments: dict[str, Any] = {}
        self._core, self._patch = calls.runtime.core, monkeypatch
        monkeypatch.setattr(calls.runtime, "now", lambda: NOW)

    def answer(self, method: str, answer: Any, *, in_steps: bool = True) -> None:
        def called(*positional: Any, **named: Any) -> Any:
            self.arguments = {"positional": positional[1:], **named}
            return self._in_steps(answer) if in_steps else answer

        self._patch.setattr(self._core, method, called)

    @staticmethod
    def _in_steps(answer: Any) -> Generator[None, float, Any]:
        yield
        return answer


@pytest.fixture
async def calls() -> AsyncIterator[Calls]:
    async with serving(region_bytes=16 * PART) as calls:
        yield calls


@pytest.fixture
def core(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> Core:
    core = Core(calls, monkeypatch)
    monkeypatch.setattr(calls.runtime.core, "excluded", lambda _: frozenset())
    return core


OPTIONS: dict[str, Any] = {
    "request_id": "r",
    "keys": pack_keys(KEYS),
    "exclude": cache_pb2.TierFilter(names=["near"], media=[cache_pb2.TIER_MEDIUM_DISK], remote=True),
    "min_hits": 3,
    "retain_for": duration(4),
    "lease_duration": duration(5),
    "wait": duration(6),
    "grant_id": 7,
}
TIERS = TierFilter(names=frozenset({"near"}), media=frozenset({2}), remote=True)  # type: ignore[arg-type]
SPEC = LookupSpec(
    request_id="r", tiers=TIERS, min_hits=3, retain_for=4.0, lease_seconds=5.0, deadline=NOW + 6, grant_id=7
)


@pytest.mark.parametrize(("mode", "prefix"), [(EACH, False), (PREFIX, True), (0, True)])
async def test_a_lookup(calls: Calls, core: Core, mode: int, *, prefix: bool) -> None:
    core.answer("lookup", LookupAnswer(2, None, retries=[1], not_retained=3))
    answer = await calls.service.Lookup(cache_pb2.LookupRequest(mode=mode, **OPTIONS), None)
    assert core.arguments == {"positional": (KEYS, replace(SPEC, prefix=prefix)), "now": NOW}
    assert answer == cache_pb2.LookupResponse(statuses=bytes([MISS, KeyStatus.RETRY]), sources=bytes(2))


@pytest.mark.parametrize("is_mapped", [True, False])
async def test_the_answer_of_a_lookup(calls: Calls, core: Core, *, is_mapped: bool) -> None:
    """Leading hits are counted, trailing misses have a source of 0, and only hits have slots.

    Only a session that maps the region gets slots.
    """
    lease = SimpleNamespace(id=9, pending=0, statuses=lambda: bytes([HIT, MISS, HIT, MISS]), sources=bytes([1, 0, 2]))
    core.answer("lookup", LookupAnswer(4, lease, not_retained=3))  # type: ignore[arg-type]

    async def slots(_: object, lease_id: int, hits: int) -> list[int]:
        assert (lease_id, hits) == (9, 1)
        return [64]

    calls.long_calls.slots = slots  # type: ignore[assignment,method-assign]
    if is_mapped:
        calls.session.writers.add(1)
    request = cache_pb2.LookupRequest(**{**OPTIONS, "keys": pack_keys([*KEYS, *KEYS])}, want_slots=True)
    answer = await calls.service.Lookup(request, None)
    assert answer == cache_pb2.LookupResponse(
        statuses=bytes([HIT, MISS, HIT, MISS]),
        prefix_hits=1,
        sources=bytes([1, 0, 2, 0]),
        lease_id=9,
        not_retained_blocks=3,
        slot_offsets=pack_offsets([64] if is_mapped else []),
    )


async def test_a_begun_request(calls: Calls, core: Core, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiers see the request's attributes; the lookup has the same options as one without."""
    begun: list[RequestInfo] = []
    votes = [
        ("near", Vote(OffloadPolicy.REQUEST_LEVEL, "x")),
        ("far", Vote(OffloadPolicy.BLOCK_LEVEL, "y")),
    ]

    def begin(_: object, info: RequestInfo) -> Any:
        begun.append(info)
        return SimpleNamespace(policy=OffloadPolicy.REQUEST_LEVEL, votes=votes)

    monkeypatch.setattr(calls.runtime.core, "begin_request", begin)
    core.answer("lookup", LookupAnswer(2, None))
    request = cache_pb2.BeginRequestRequest(
        mode=EACH,
        prompt_tokens=8,
        priority=9,
        kv_transfer_params_json='{"a": 1}',
        conversation_id="talk",
        **OPTIONS,
    )
    answer = await calls.service.BeginRequest(request, None)
    assert begun == [
        RequestInfo(
            request_id="r",
            namespace=calls.session.namespace.id,
            prompt_tokens=8,
            tenant=calls.session.tenant,
            priority=9,
            kv_transfer_params={"a": 1},
            retain_for=4.0,
            conversation_id="talk",
        )
    ]
    assert core.arguments == {"positional": (KEYS, replace(SPEC, prefix=False)), "now": NOW}
    assert answer == cache_pb2.BeginRequestResponse(
        policy=cache_pb2.OFFLOAD_POLICY_REQUEST_LEVEL,
        votes=[
            cache_pb2.TierVote(tier="near", policy=cache_pb2.OFFLOAD_POLICY_REQUEST_LEVEL, why="x"),
            cache_pb2.TierVote(tier="far", policy=cache_pb2.OFFLOAD_POLICY_BLOCK_LEVEL, why="y"),
        ],
        lookup=cache_pb2.LookupResponse(statuses=bytes([MISS, MISS]), sources=bytes(2)),
    )


async def test_a_prefetch(calls: Calls, core: Core) -> None:
    core.answer("prefetch", PrefetchAnswer(present=1, started=2, missing=3, no_room=4, unanswered=5, not_retained=6))
    fields = {name: OPTIONS[name] for name in ("request_id", "keys", "exclude", "retain_for", "wait")}
    answer = await calls.service.Prefetch(cache_pb2.PrefetchRequest(**fields), None)
    spec = LookupSpec(request_id="r", tiers=TIERS, retain_for=4.0)
    assert core.arguments == {"positional": (KEYS, spec), "now": NOW}
    assert answer == cache_pb2.PrefetchResponse(
        present_blocks=1,
        started_blocks=2,
        missing_blocks=3,
        no_room_blocks=4,
        unanswered_blocks=5,
        not_retained_blocks=6,
    )


async def test_a_store(calls: Calls, core: Core) -> None:
    """The server chooses the duration of its lease."""
    core.answer("prepare_store", SimpleNamespace(store_id=3, statuses=bytes([1, 2]), slots=[64], not_retained=4))
    fields = {name: OPTIONS[name] for name in ("request_id", "keys", "retain_for", "grant_id")}
    answer = await calls.service.PrepareStore(cache_pb2.PrepareStoreRequest(**fields), None)
    spec = StoreSpec(request_id="r", retain_for=4.0, lease_seconds=calls.validator.leases.default, grant_id=7)
    assert core.arguments == {"positional": (KEYS, spec), "now": NOW}
    assert unpack_offsets(answer.slot_offsets) == [64]
    answer.slot_offsets = b""
    assert answer == cache_pb2.PrepareStoreResponse(store_id=3, statuses=bytes([1, 2]), not_retained_blocks=4)


@pytest.mark.parametrize("retire", [True, False])
async def test_a_reset(calls: Calls, core: Core, *, retire: bool) -> None:
    core.answer("reset", 3, in_steps=False)
    assert (await calls.service.Reset(cache_pb2.ResetRequest(retire=retire), None)).pending_blocks == 3
    assert core.arguments == {"positional": (), "retire": retire}


async def test_a_reset_waits_for_its_last_block(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most until its deadline."""
    left = [2, 1, 0]
    monkeypatch.setattr(calls.runtime.core, "reset", lambda *_, **__: 3)
    monkeypatch.setattr(calls.runtime.core, "resetting", lambda _: left.pop(0))
    assert (await calls.service.Reset(cache_pb2.ResetRequest(wait=duration(60)), None)).pending_blocks == 0
    assert left == []
    assert (await calls.service.Reset(cache_pb2.ResetRequest(), None)).pending_blocks == 3


async def test_the_end_of_a_request(calls: Calls, core: Core) -> None:
    core.answer("finish_request", SimpleNamespace(settled=False, incomplete=3), in_steps=False)
    answer = await calls.service.FinishRequest(cache_pb2.FinishRequestRequest(request_id="r"), None)
    assert core.arguments == {"positional": ("r",)}
    assert answer == cache_pb2.FinishRequestResponse(settled=False, incomplete_blocks=3)
    with pytest.raises(Refused):
        await calls.service.FinishRequest(cache_pb2.FinishRequestRequest(), None)


@pytest.mark.parametrize("settles", [True, False])
async def test_the_end_of_a_request_waits_for_its_stores(
    calls: Calls, monkeypatch: pytest.MonkeyPatch, *, settles: bool
) -> None:
    """Until they have ended, at most for its wait."""
    finished = SimpleNamespace(settled=False, incomplete=3)
    waits: list[float] = []

    async def wait(seconds: float) -> None:
        waits.append(seconds)
        finished.settled = settles and len(waits) == 2
        clock[0] += 2.0

    clock = [NOW]
    monkeypatch.setattr(calls.runtime, "now", lambda: clock[0])
    monkeypatch.setattr(calls.runtime, "wait_for_change", wait)
    monkeypatch.setattr(calls.runtime.core, "finish_request", lambda *_: finished)
    answer = await calls.service.FinishRequest(cache_pb2.FinishRequestRequest(request_id="r", wait=duration(5)), None)
    assert answer.settled == settles
    assert waits == ([5.0, 3.0] if settles else [5.0, 3.0, 1.0])


REFUSED: dict[str, Callable[[Any], Any]] = {
    "a request without an id": lambda service: service.BeginRequest(cache_pb2.BeginRequestRequest(), None),
    "parameters that are no JSON": lambda service: service.BeginRequest(
        cache_pb2.BeginRequestRequest(request_id="r", kv_transfer_params_json="{"), None
    ),
    "parameters that are no object": lambda service: service.BeginRequest(
        cache_pb2.BeginRequestRequest(request_id="r", kv_transfer_params_json="[1]"), None
    ),
    "a tier that does not exist": lambda service: service.Lookup(
        cache_pb2.LookupRequest(exclude=cache_pb2.TierFilter(names=["x"])), None
    ),
    "a tier that does not exist, prefetch": lambda service: service.Prefetch(
        cache_pb2.PrefetchRequest(exclude=cache_pb2.TierFilter(names=["x"])), None
    ),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_a_wrong_request_is_refused(calls: Calls, name: str) -> None:
    """Nothing of it stays."""
    with pytest.raises((Refused, InvalidItem)):
        await REFUSED[name](calls.service)
    assert calls.runtime.core.explain("r") == []


@pytest.mark.parametrize("text", ["", "null", "{}"])
async def test_a_request_without_parameters(calls: Calls, text: str) -> None:
    request = cache_pb2.BeginRequestRequest(request_id="r", kv_transfer_params_json=text, keys=pack_keys(KEYS))
    await calls.service.BeginRequest(request, None)
    [record] = calls.runtime.core.explain("r")
    assert record.lookups[-1].outcomes()[0].outcome is MissReason.NEVER_STORED
