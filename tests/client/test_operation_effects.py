"""Effects of operations: calls, their deadlines and streams, with a scripted transport."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import xxhash
from harness.payloads import key_of, namespace_of

from kvtier.client.effects import Call, Connect, Pull, Push
from kvtier.client.errors import DeadlineExceeded, KVTierError, LeaseLost, LimitExceeded, NotConnected, SessionLost
from kvtier.client.operations import Operations
from kvtier.client.results import HandoffDirection, HoldName, KeyStatus, StoreStatus
from kvtier.client.session.session import ClientSession
from kvtier.client.timeouts import Timeouts
from kvtier.protos.v1 import cache_pb2, common_pb2, handoff_pb2, session_pb2, transfer_pb2
from kvtier.protos.wire.packed_keys import pack_keys, unpack_key_list

PART = 8
KEYS = [key_of(1), key_of(2)]
TIMEOUTS = Timeouts(connect=1.0, call=2.0, transfer=3.0)
GRANTED, PRESENT, NO_ROOM = StoreStatus.GRANTED, StoreStatus.PRESENT, StoreStatus.NO_ROOM
HIT, MISS, PENDING = KeyStatus.HIT, KeyStatus.MISS, KeyStatus.HIT_PENDING
BROKEN = NotConnected("the stream broke")
DONE = cache_pb2.CompleteLoadResponse()


class Script:
    """Performs operations. The results of effects are given: an answer, an error, or a function."""

    def __init__(self) -> None:
        capabilities = session_pb2.CapabilitiesResponse()
        capabilities.limits.max_frame_bytes = 1 << 20
        self.session = ClientSession(common_pb2.SessionRef(session_id=bytes(16)), capabilities, None, "")
        self.invalidated: list[ClientSession] = []
        self.withdrawn: list[int] = []
        self.effects: list[Any] = []
        self.operations = Operations(namespace_of(PART), TIMEOUTS, self)  # type: ignore[arg-type]

    def invalidate(self, session: ClientSession) -> None:
        self.invalidated.append(session)

    def withdraw(self, session: ClientSession, grant_id: int) -> None:
        assert session is self.session
        self.withdrawn.append(grant_id)

    def perform(self, operation: Generator[Any, Any, Any], *results: Any) -> Any:
        left = iter(results)
        try:
            effect = next(operation)
            while True:
                if isinstance(effect, Connect):
                    effect = operation.send(self.session)
                    continue
                self.effects.append(effect)
                result = next(left, AssertionError(f"no result for {effect}"))
                if callable(result):
                    result = result(effect)
                effect = operation.throw(result) if isinstance(result, Exception) else operation.send(result)
        except StopIteration as end:
            assert next(left, None) is None, "fewer effects than results"
            return end.value

    def calls(self) -> list[str]:
        return [each.method if isinstance(each, Call) else type(each).__name__ for each in self.effects]


@pytest.fixture
def script() -> Script:
    return Script()


def buffers() -> list[np.ndarray]:
    return [np.zeros(PART, np.uint8) for _ in KEYS]


def found(*statuses: KeyStatus, lease_id: int = 5, hits: int = 0) -> cache_pb2.LookupResponse:
    return cache_pb2.LookupResponse(
        lease_id=lease_id, statuses=bytes(statuses), prefix_hits=hits, sources=bytes(len(statuses))
    )


def granted(*statuses: StoreStatus, store_id: int = 6) -> cache_pb2.PrepareStoreResponse:
    return cache_pb2.PrepareStoreResponse(store_id=store_id, statuses=bytes(statuses))


def sends(parts: int, error: Exception | None = None) -> Callable[[Pull], Exception | None]:
    """The server sends some parts, and then the stream ends or breaks."""

    def send(pull: Pull) -> Exception | None:
        for number in range(parts):
            payload = bytes([number + 1]) * PART
            checksum = xxhash.xxh3_64_intdigest(payload)
            frame = transfer_pb2.PullResponse(offset_bytes=number * PART, payload=payload, xxh3_64=checksum)
            pull.sink.take(frame)
        return error

    return send


WAITS: dict[str, tuple[Callable[[Operations], Any], Any]] = {
    "CacheService/BeginRequest": (
        lambda do: do.begin_request("r", KEYS, {"prompt_tokens": 1, "wait": 5.0}),
        cache_pb2.BeginRequestResponse(policy=cache_pb2.OFFLOAD_POLICY_BLOCK_LEVEL, lookup=found(MISS)),
    ),
    "CacheService/Lookup": (
        lambda do: do.lookup(KEYS, {"wait": 5.0}),
        found(MISS),
    ),
    "CacheService/Prefetch": (
        lambda do: do.prefetch(KEYS, {"wait": 5.0}),
        cache_pb2.PrefetchResponse(),
    ),
    "CacheService/Flush": (lambda do: do.flush(KEYS, wait=5.0), cache_pb2.FlushResponse()),
    "CacheService/Reset": (lambda do: do.reset(wait=5.0, retire=False), cache_pb2.ResetResponse()),
    "CacheService/FinishRequest": (lambda do: do.finish_request("r", wait=5.0), cache_pb2.FinishRequestResponse()),
    "HandoffService/ClaimHold": (
        lambda do: do.claim(HoldName("e", "r"), "", [], wait=5.0, min_blocks=0, lease=None),
        handoff_pb2.ClaimHoldResponse(direction=handoff_pb2.HANDOFF_DIRECTION_PREFILL_TO_DECODE),
    ),
}


@pytest.mark.parametrize("method", WAITS)
def test_a_call_that_waits_gets_the_time_of_its_wait(script: Script, method: str) -> None:
    """In addition to the time for an answer. The server gets the same wait."""
    begin, answer = WAITS[method]
    script.perform(begin(script.operations), answer)
    [call] = script.effects
    assert (call.method, call.timeout, call.request.wait.seconds) == (method, TIMEOUTS.call + 5.0, 5)


GRANTING: dict[str, Callable[[Operations], Any]] = {
    **{name: begin for name, (begin, _) in WAITS.items() if name.endswith(("BeginRequest", "Lookup", "ClaimHold"))},
    "CacheService/PrepareStore": lambda do: do.store(KEYS, buffers(), {}),
}


@pytest.mark.parametrize("method", GRANTING)
@pytest.mark.parametrize(
    ("error", "is_unknown"),
    [
        (DeadlineExceeded("no answer"), True),
        (SessionLost("the connection has ended"), True),
        (LimitExceeded("too many", "LIMIT_EXCEEDED"), False),
        (SessionLost("unknown", "UNKNOWN_SESSION"), False),
    ],
)
def test_a_grant_without_a_known_answer_is_withdrawn(
    script: Script, method: str, error: KVTierError, *, is_unknown: bool
) -> None:
    """Only if the server gave no reason. A session that lost a connection does not end."""
    for _ in range(2):
        with pytest.raises(type(error)):
            script.perform(GRANTING[method](script.operations), error)
    grants = [call.request.grant_id for call in script.effects]
    assert 0 < grants[0] < grants[1]
    assert script.withdrawn == (grants if is_unknown else [])
    assert script.invalidated == ([script.session] * 2 if error.reason == "UNKNOWN_SESSION" else [])


@pytest.mark.parametrize("first", [MISS, PENDING])
def test_a_load_without_a_leading_hit_keeps_no_lease(script: Script, first: KeyStatus) -> None:
    """The lookup can have granted a lease on later blocks, or on blocks that are being promoted."""
    loading = script.operations.load(KEYS, buffers(), request_id="", wait=0.0)
    assert script.perform(loading, found(first, HIT), cache_pb2.ReleaseLeaseResponse()) == 0
    assert script.calls() == ["CacheService/Lookup", "CacheService/ReleaseLease"]
    assert script.effects[1].request.lease_ids == [5]


def test_a_load_without_a_lease_has_nothing_to_release(script: Script) -> None:
    loading = script.operations.load(KEYS, buffers(), request_id="", wait=0.0)
    assert script.perform(loading, found(MISS, MISS, lease_id=0)) == 0


def test_a_load_whose_stream_breaks(script: Script) -> None:
    """The second stream sends the missing part only. A call of its own confirms and releases."""
    into = buffers()
    loading = script.operations.load(KEYS, into, request_id="", wait=0.0)
    assert script.perform(loading, found(HIT, HIT, hits=2), sends(1, BROKEN), sends(1), DONE) == 2
    assert script.calls() == ["CacheService/Lookup", "Pull", "Pull", "CacheService/CompleteLoad"]
    first, second = script.effects[1].request, script.effects[2].request
    assert (list(first.items), first.complete) == ([0, 1], True)
    assert (list(second.items), second.complete) == ([1], False)
    assert script.effects[3].request.release
    assert into[0].tolist() == [1] * PART


@pytest.mark.parametrize("error", [LimitExceeded("slow down", "RATE_LIMITED"), DeadlineExceeded("too slow")])
def test_a_load_whose_stream_is_refused(script: Script, error: KVTierError) -> None:
    """No second stream. The lease ends at once if the server answers, else in the background."""
    loading = script.operations.load(KEYS, buffers(), request_id="", wait=0.0)
    results = [found(HIT, HIT, hits=2), error]
    if error.reason:
        results.append(cache_pb2.WithdrawGrantsResponse())
    with pytest.raises(type(error)):
        script.perform(loading, *results)
    grant = script.effects[0].request.grant_id
    if error.reason:
        assert script.calls() == ["CacheService/Lookup", "Pull", "CacheService/WithdrawGrants"]
        assert script.effects[2].request.grant_ids == [grant]
    assert script.withdrawn == ([] if error.reason else [grant])


def pushed(nbytes: int, *, completed: bool = False) -> transfer_pb2.PushResponse:
    return transfer_pb2.PushResponse(received_bytes=nbytes, completed=completed)


def test_a_store_whose_stream_breaks(script: Script) -> None:
    """The second stream begins after the bytes that the server has. A call ends the store."""
    storing = script.operations.store(KEYS, buffers(), {})
    statuses = script.perform(
        storing,
        granted(GRANTED, GRANTED),
        BROKEN,
        transfer_pb2.LocateResponse(received_bytes=PART),
        pushed(PART),
        cache_pb2.CompleteStoreResponse(),
    )
    assert statuses == bytes([GRANTED, GRANTED])
    pushes = [each for each in script.effects if isinstance(each, Push)]
    assert [(push.start, push.complete) for push in pushes] == [(0, True), (PART, False)]
    assert script.calls()[-1] == "CacheService/CompleteStore"


def test_a_store_that_has_ended_when_its_stream_breaks(script: Script) -> None:
    """The client stores what the server lacks under a new grant, and reports what has no room."""
    storing = script.operations.store(KEYS, buffers(), {"request_id": "r", "retain_for": 4.0})
    lost = LeaseLost("no such store", "STORE_NOT_FOUND")
    results = [granted(GRANTED, GRANTED), BROKEN, lost, cache_pb2.WithdrawGrantsResponse()]
    statuses = script.perform(storing, *results, granted(PRESENT, NO_ROOM, store_id=0))
    assert statuses == bytes([GRANTED, NO_ROOM])
    first, again = (each.request for each in script.effects if getattr(each, "method", "").endswith("PrepareStore"))
    assert again.grant_id > first.grant_id
    assert (again.request_id, again.retain_for.seconds) == ("r", 4)


def test_a_store_of_some_keys_that_has_ended_when_its_stream_breaks(script: Script) -> None:
    """The second store has the keys and bytes of the blocks that the server still lacks."""
    keys, sent = [key_of(number) for number in range(6)], bytearray()
    first, second = granted(PRESENT, GRANTED, NO_ROOM, GRANTED, GRANTED, GRANTED), granted(NO_ROOM, PRESENT, GRANTED)
    lost = LeaseLost("no such store", "STORE_NOT_FOUND")

    def receive(push: Push) -> transfer_pb2.PushResponse:
        for frame in push.frames():
            sent.extend(frame.payload)
        return pushed(PART, completed=True)

    with ExitStack() as held:
        writing = script.perform(script.operations.begin_write(held, keys, {}), first)
        writing.batch.memory[: 4 * PART] = b"".join(bytes([number]) * PART for number in (1, 3, 4, 5))
        writing.batch.failed.add(0)  # the block of the second key
        results = [BROKEN, lost, cache_pb2.WithdrawGrantsResponse(), second, receive]
        script.perform(script.operations.end_write(writing), *results)
    assert writing.batch.statuses == bytes([PRESENT, GRANTED, NO_ROOM, NO_ROOM, GRANTED, GRANTED])
    assert sent == bytes([5]) * PART
    again = [each.request for each in script.effects if getattr(each, "method", "").endswith("PrepareStore")][1]
    assert again.keys == pack_keys(keys[3:])


def test_a_stream_does_not_complete_a_store_with_failed_blocks(script: Script) -> None:
    """The call that completes the store names the blocks that the caller did not write."""
    with ExitStack() as held:
        writing = script.perform(script.operations.begin_write(held, KEYS, {}), granted(GRANTED, GRANTED))
        writing.batch.failed.add(1)
        script.perform(script.operations.end_write(writing), pushed(2 * PART), cache_pb2.CompleteStoreResponse())
    _, push, completion = script.effects
    assert not push.complete
    assert list(completion.request.failed_items) == [1]


def test_holds_in_several_calls(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    """The positions of missing holds count from the first hold of each call."""
    monkeypatch.setattr("kvtier.client.operations.handoff._HOLDS_PER_CALL", 2)
    holds = [HoldName("e", f"r{number}") for number in range(5)]
    answers = [handoff_pb2.RenewHoldsResponse(missing_holds=missing) for missing in ([1], [0, 1], [])]
    assert script.perform(script.operations.renew_holds(holds, extension=None), *answers) == holds[1:4]
    released = [handoff_pb2.ReleaseHoldsResponse()] * 3
    script.perform(script.operations.release_holds(iter(holds)), *released)
    for calls in (script.effects[:3], script.effects[3:]):
        assert [hold.request_id for call in calls for hold in call.request.holds] == [f"r{n}" for n in range(5)]


def test_a_publication_says_what_is_held(script: Script) -> None:
    answer = handoff_pb2.PublishHoldResponse(status=handoff_pb2.PUBLISH_STATUS_PUBLISHED, pending_blocks=1)
    answer.remaining.FromMilliseconds(1500)
    direction = HandoffDirection.DECODE_TO_PREFILL
    publication = script.perform(
        script.operations.publish("r", KEYS, [3, 4], num_tokens=9, direction=direction, hold_for=2.0), answer
    )
    assert (publication.remaining, publication.pending_blocks) == (1.5, 1)
    request = script.effects[0].request
    assert (unpack_key_list(request.keys), list(request.positions), request.num_tokens) == (KEYS, [3, 4], 9)
    assert (request.direction, request.duration.seconds) == (direction, 2)
