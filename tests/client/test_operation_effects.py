"""Effects of operations: calls, their deadlines and streams, with a scripted transport."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import xxhash
from harness.payloads import key_of
from harness.scripted import PART, Script

from kvtier.client.effects import Copy, Pull, Push
from kvtier.client.errors import (
    ChecksumMismatch,
    DeadlineExceeded,
    KVTierError,
    LeaseLost,
    LimitExceeded,
    NotConnected,
    ServerError,
    SessionLost,
    Unavailable,
)
from kvtier.client.operations import Operations
from kvtier.client.results import HoldName, KeyStatus, StoreStatus
from kvtier.client.transport.grpc_methods import LOCATE
from kvtier.protos.v1 import cache_pb2, handoff_pb2, transfer_pb2
from kvtier.protos.wire.packed_keys import pack_keys, pack_offsets

KEYS = [key_of(1), key_of(2)]
GRANTED, PRESENT, NO_ROOM = StoreStatus.GRANTED, StoreStatus.PRESENT, StoreStatus.NO_ROOM
HIT, MISS, PENDING = KeyStatus.HIT, KeyStatus.MISS, KeyStatus.HIT_PENDING
BROKEN = NotConnected("the stream broke")
DONE = cache_pb2.CompleteLoadResponse()


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


GRANTING: dict[str, Callable[[Operations], Any]] = {
    "CacheService/BeginRequest": lambda do: do.begin_request("r", KEYS, {"prompt_tokens": 1}),
    "CacheService/Lookup": lambda do: do.lookup(KEYS, {}),
    "HandoffService/ClaimHold": lambda do: do.claim(HoldName("e", "r"), "", [], wait=0.0, min_blocks=0, lease=None),
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

    with script.operations.held() as held:
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
    with script.operations.held() as held:
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


def copy(effect: Any) -> None:
    assert isinstance(effect, Copy)
    effect.run()


def in_region(*statuses: KeyStatus, slots: Sequence[int]) -> cache_pb2.LookupResponse:
    answer = found(*statuses, hits=len(slots))
    answer.slot_offsets = pack_offsets(slots)
    return answer


def begin(script: Script, operation: str, *slots: int) -> tuple[Any, Any]:
    """Returns a load or store of both blocks, and the server's answer to its first call."""
    if operation == "load":
        answer: Any = in_region(HIT, HIT, slots=slots) if slots else found(HIT, HIT, hits=2)
        return script.operations.load(KEYS, buffers(), request_id="", wait=0.0), answer
    answer = granted(GRANTED, GRANTED)
    answer.slot_offsets = pack_offsets(slots)
    return script.operations.store(KEYS, buffers(), {}), answer


def test_a_load_from_the_region() -> None:
    """The lookup names the slots, one copy takes the blocks, and one call confirms and releases."""
    script, into = Script(region_bytes=64), buffers()
    script.memory[16:24], script.memory[40:48] = b"1" * PART, b"2" * PART
    loading = script.operations.load(KEYS, into, request_id="", wait=0.0)
    assert script.perform(loading, in_region(HIT, HIT, slots=[16, 40]), copy, DONE) == 2
    assert script.calls() == ["CacheService/Lookup", "Copy", "CacheService/CompleteLoad"]
    lookup = script.effects[0].request
    assert lookup.want_slots
    assert lookup.mode != cache_pb2.LOOKUP_MODE_EACH
    complete = script.effects[2].request
    assert (complete.lease_id, complete.release, complete.copied_bytes) == (5, True, 2 * PART)
    assert [each.tobytes() for each in into] == [b"1" * PART, b"2" * PART]


@pytest.mark.parametrize("hits", [1, 2])
def test_a_lookup_without_slots_is_completed_by_a_call(hits: int) -> None:
    """A server may name no slots, or fewer than are read."""
    script = Script(region_bytes=64)
    slots = pack_offsets([16, 40][:hits])
    located = cache_pb2.PrepareLoadResponse(slot_offsets=slots, part_sizes_bytes=pack_offsets([PART] * hits))
    results = [found(*[HIT, HIT][:hits], *[MISS][hits - 1 :], hits=hits), located, copy, DONE]
    loading = script.operations.load(KEYS, buffers(), request_id="", wait=0.0)
    assert script.perform(loading, *results) == hits
    assert list(script.effects[1].request.items) == list(range(hits))


@pytest.mark.parametrize("packed", [pack_offsets([16, 40])[:-1], pack_offsets([16, 40, 48]), bytes(1)])
def test_malformed_slots_of_a_lookup_are_not_used(packed: bytes) -> None:
    script = Script(region_bytes=64)
    answer = found(HIT, HIT, hits=2)
    answer.slot_offsets = packed
    located = cache_pb2.PrepareLoadResponse(
        slot_offsets=pack_offsets([16, 40]), part_sizes_bytes=pack_offsets([PART] * 2)
    )
    assert script.perform(script.operations.load(KEYS, buffers(), request_id="", wait=0.0), answer, located, copy, DONE)
    assert script.calls()[1] == "CacheService/PrepareLoad"


@pytest.mark.parametrize("slots", [[16, 64], [57, 16], [2**64 - 1, 16]])
def test_slots_of_a_lookup_outside_of_the_region_are_refused(slots: list[int]) -> None:
    script = Script(region_bytes=64)
    with pytest.raises(ServerError):
        script.perform(
            script.operations.load(KEYS, buffers(), request_id="", wait=0.0),
            in_region(HIT, HIT, slots=slots),
            cache_pb2.WithdrawGrantsResponse(),
        )
    assert script.calls() == ["CacheService/Lookup", "CacheService/WithdrawGrants"]


@pytest.mark.parametrize("slots", [[16, 8], [37, 16]])
def test_slots_in_the_memory_of_another_tenant_are_refused(slots: list[int]) -> None:
    """The client has mapped the region from offset 16 to 44 only."""
    script = Script(region_bytes=64)
    script.session.region.begin, script.session.region.end = 16, 44
    with pytest.raises(ServerError, match="tenant"):
        script.session.check_slots(slots, [PART, PART])
    script.session.check_slots([16, 36], [PART, PART])
    script.session.check_slots([], [])


@pytest.mark.parametrize(
    ("slots", "sizes"),
    [([16], [PART]), ([16, 40], [PART, 2 * PART]), ([16, 64], [PART, PART]), ([16, 57], [PART, PART])],
)
def test_slots_that_cannot_be_right_are_refused(slots: list[int], sizes: list[int]) -> None:
    """Fewer slots than items, a size that no part has, or memory outside of the region."""
    script = Script(region_bytes=64)
    located = cache_pb2.PrepareLoadResponse(slot_offsets=pack_offsets(slots), part_sizes_bytes=pack_offsets(sizes))
    with pytest.raises(ServerError), script.operations.held() as held:
        script.perform(script.operations.begin_read(held, 5, [0, 1]), located)
    assert script.calls() == ["CacheService/PrepareLoad"]


def test_a_store_to_the_region() -> None:
    """The blocks are copied to the granted slots, and one call completes the store."""
    script = Script(region_bytes=64)
    answer = granted(PRESENT, GRANTED)
    answer.slot_offsets = pack_offsets([48])
    parts = [np.full(PART, number, np.uint8) for number in (1, 2)]
    storing = script.operations.store(KEYS, parts, {})
    assert script.perform(storing, answer, copy, cache_pb2.CompleteStoreResponse()) == bytes([PRESENT, GRANTED])
    assert script.calls() == ["CacheService/PrepareStore", "Copy", "CacheService/CompleteStore"]
    assert (script.memory[48:56], sum(script.memory)) == (bytes([2] * PART), 2 * PART)


@pytest.mark.parametrize("operation", ["load", "store"])
def test_a_copy_that_fails_ends_the_grant(operation: str) -> None:
    script = Script(region_bytes=64)
    running, answer = begin(script, operation, 0, 8)
    with pytest.raises(ServerError):
        script.perform(running, answer, ServerError("a copy failed"), cache_pb2.WithdrawGrantsResponse())
    assert script.effects[-1].request.grant_ids == [script.effects[0].request.grant_id]


@pytest.mark.parametrize("operation", ["load", "store"])
def test_an_operation_that_is_closed_during_its_copy_ends_nothing(operation: str) -> None:
    """The event loop has ended, and a thread may still copy to or from the slots."""
    script = Script(region_bytes=64)
    running, answer = begin(script, operation, 0, 8)
    next(running)
    running.send(script.session)
    effect = running.send(answer)
    while not isinstance(effect, Copy):
        effect = running.send(script.session)
    running.close()
    assert script.withdrawn == ([1] if operation == "load" else [])


REFUSALS = [
    LimitExceeded("slow down", "RATE_LIMITED"),
    LimitExceeded("a message is too large"),
    DeadlineExceeded("too slow"),
    LeaseLost("it has ended", "LEASE_NOT_FOUND"),
    SessionLost("unknown", "UNKNOWN_SESSION"),
]


@pytest.mark.parametrize("error", REFUSALS, ids=repr)
@pytest.mark.parametrize("operation", ["load", "store"])
def test_a_stream_that_is_refused_is_not_repeated(script: Script, operation: str, error: KVTierError) -> None:
    """The operation raises the error of the server."""
    ended = [cache_pb2.WithdrawGrantsResponse()] if not isinstance(error, DeadlineExceeded | SessionLost) else []
    running, answer = begin(script, operation)
    with pytest.raises(type(error)):
        script.perform(running, answer, error, *ended)
    assert script.calls()[1:2] == ["Pull" if operation == "load" else "Push"]
    assert len(script.effects) == 2 + len(ended)


@pytest.mark.parametrize("breaks", [1, 2, 3])
@pytest.mark.parametrize(
    "error", [BROKEN, ChecksumMismatch("damaged"), LimitExceeded("busy", "LIMIT_EXCEEDED"), SessionLost("broke")]
)
def test_a_stream_that_breaks_is_repeated_twice(script: Script, error: KVTierError, breaks: int) -> None:
    """A load then has all parts, or fails with the error of its third stream."""
    loading = script.operations.load(KEYS, buffers(), request_id="", wait=0.0)
    results = [found(HIT, HIT, hits=2), *[error] * breaks]
    if breaks < 3:
        assert script.perform(loading, *results, sends(2), DONE) == 2
    else:
        ends = [] if isinstance(error, Unavailable) else [cache_pb2.WithdrawGrantsResponse()]
        with pytest.raises(type(error)):
            script.perform(loading, *results, *ends)
    assert script.calls().count("Pull") == min(breaks + 1, 3)


@pytest.mark.parametrize("breaks", [1, 2, 3])
def test_a_store_is_sent_at_most_three_times(script: Script, breaks: int) -> None:
    storing = script.operations.store(KEYS, buffers(), {})
    results = [granted(GRANTED, GRANTED)]
    for number in range(breaks):
        results += [BROKEN, *([transfer_pb2.LocateResponse(received_bytes=number)] if number < 2 else [])]
    if breaks < 3:
        done = [pushed(2 * PART - breaks + 1), cache_pb2.CompleteStoreResponse()]
        script.perform(storing, *results, *done)
    else:
        with pytest.raises(NotConnected):
            script.perform(storing, *results)
    pushes = [each for each in script.effects if isinstance(each, Push)]
    assert [push.start for push in pushes] == [0, 0, 1][: breaks + 1]


def test_a_store_that_the_server_has_received_is_completed(script: Script) -> None:
    """Only the answer of the stream was lost. The call makes the blocks visible."""
    storing = script.operations.store(KEYS, buffers(), {})
    located = transfer_pb2.LocateResponse(received_bytes=2 * PART)
    script.perform(storing, granted(GRANTED, GRANTED), BROKEN, located, cache_pb2.CompleteStoreResponse())
    assert script.calls() == ["CacheService/PrepareStore", "Push", LOCATE, "CacheService/CompleteStore"]


@pytest.mark.parametrize("is_added", [False, True])
def test_an_interrupted_begin_of_a_use_leaves_no_use(
    script: Script, monkeypatch: pytest.MonkeyPatch, *, is_added: bool
) -> None:
    """Otherwise the region would stay mapped after the end of the session."""
    begin = script.session.begin_use

    def interrupted(user: weakref.ref[object]) -> None:
        if is_added:
            begin(user)
        raise KeyboardInterrupt

    monkeypatch.setattr(script.session, "begin_use", interrupted)
    with pytest.raises(KeyboardInterrupt), script.operations.held() as held:
        held.use(script.session)
    assert not script.session._users
    assert script.withdrawn == []


def test_an_interrupted_end_of_a_use_leaves_no_use() -> None:
    """The region is unmapped when the session has ended and no other use is left."""
    script, closed = Script(region_bytes=PART), list[bool]()
    script.session._attachment.close = lambda: closed.append(True)  # type: ignore[union-attr, method-assign]
    other, interrupted = script.operations.held(), script.operations.held()
    for held in (other, interrupted):
        held.use(script.session)
    del interrupted, held
    script.session.end()
    assert not closed
    other.__exit__(None, None, None)
    assert closed


def test_a_dropped_reader_ends_its_use_when_it_is_collected() -> None:
    """The collector clears weak references to it before the generator ends."""
    script, closed = Script(region_bytes=PART), list[bool]()
    script.session._attachment.close = lambda: closed.append(True)  # type: ignore[union-attr, method-assign]

    def read() -> Iterator[None]:
        with script.operations.held() as held:
            held.use(script.session)
            yield

    cycle: list[Any] = [read()]
    next(cycle[0])
    cycle.append(cycle)
    script.session.end()
    del cycle
    assert not closed
    gc.collect()
    assert closed
    assert not script.session._users


def test_a_use_may_end_while_its_thread_holds_the_lock() -> None:
    """The collector can run within the session's own methods."""
    script = Script(region_bytes=PART)
    held = script.operations.held()
    held.use(script.session)
    with script.session._lock:
        held.__exit__(None, None, None)
    assert not script.session._users


@pytest.mark.parametrize(("error", "is_interrupted"), [(KeyboardInterrupt, True), (ValueError, False)])
def test_an_interrupted_write_is_withdrawn(script: Script, error: type[BaseException], *, is_interrupted: bool) -> None:
    """The caller handles an `Exception` itself, by `abort_write`."""
    held = script.operations.held()
    script.perform(script.operations.begin_write(held, KEYS, {}), granted(GRANTED, GRANTED))
    held.__exit__(error, error(), None)
    assert script.withdrawn == ([1] if is_interrupted else [])


@pytest.mark.parametrize("operation", ["load", "store"])
@pytest.mark.parametrize("step", [0, 1, 2])
def test_an_interrupted_operation_is_withdrawn(script: Script, operation: str, step: int) -> None:
    """In each of its steps: before the server has granted anything it ends what may come."""
    running, answer = begin(script, operation)
    effects = [None, script.session, answer]
    for result in effects[: step + 1]:
        running.send(result)
    with pytest.raises(KeyboardInterrupt):
        running.throw(KeyboardInterrupt())
    assert set(script.withdrawn) == ({1} if step else set())


@pytest.mark.parametrize("times", [1, 2, 3])
def test_a_load_is_repeated_if_its_lease_ended_with_a_broken_stream(script: Script, times: int) -> None:
    """The server may have confirmed it. A new lookup has a grant of its own."""
    lost = LeaseLost("no such lease", "LEASE_NOT_FOUND")
    results = [found(HIT, HIT, hits=2), sends(1, BROKEN), lost] * times
    loading = script.operations.load(KEYS, buffers(), request_id="r", wait=0.0)
    if times < 3:
        assert script.perform(loading, *results, found(MISS, MISS, lease_id=0)) == 0
    else:
        with pytest.raises(NotConnected):
            script.perform(loading, *results)
    grants = [each.request.grant_id for each in script.effects if getattr(each, "method", "").endswith("Lookup")]
    assert grants == list(range(1, min(times + 1, 3) + 1))


def test_a_stream_must_transfer_each_byte(script: Script) -> None:
    """A server that ends a stream early, or did not receive all bytes, has a defect."""
    loading = script.operations.load(KEYS, buffers(), request_id="", wait=0.0)
    with pytest.raises(ServerError):
        script.perform(loading, found(HIT, HIT, hits=2), sends(1), cache_pb2.WithdrawGrantsResponse())
    storing = script.operations.store(KEYS, buffers(), {})
    with pytest.raises(ServerError):
        script.perform(storing, granted(GRANTED, GRANTED), pushed(PART), cache_pb2.WithdrawGrantsResponse())


def test_a_completion_must_name_no_failed_block(script: Script) -> None:
    """Otherwise the server lacks bytes of a block that the caller has written."""
    storing = script.operations.store(KEYS, buffers(), {})
    failed = cache_pb2.CompleteStoreResponse(failed_items=[1])
    with pytest.raises(ServerError):
        script.perform(storing, granted(GRANTED, GRANTED), pushed(2 * PART), failed)


def test_a_store_needs_a_status_per_key(script: Script) -> None:
    storing = script.operations.store(KEYS, buffers(), {})
    with pytest.raises(ServerError):
        script.perform(storing, granted(GRANTED), cache_pb2.WithdrawGrantsResponse())
