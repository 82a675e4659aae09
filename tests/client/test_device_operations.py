"""Operations on device blocks, with a scripted transport: registration, order, and failures."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
from harness.payloads import key_of
from harness.scripted import TIMEOUTS, Script

from kvtier.client.effects import Call, Copy
from kvtier.client.errors import DeadlineExceeded, DeviceUnavailable, InvalidRequest, KVTierError, LimitExceeded
from kvtier.client.operations import devices
from kvtier.client.results import KeyStatus, StoreStatus
from kvtier.client.session.session import ClientSession
from kvtier.cuda.device.driver_contract import HANDLE_BYTES
from kvtier.cuda.device.exports import DeviceExport, ExportedAllocation, Origin
from kvtier.cuda.device.layout import BlockLayout, LayoutRun
from kvtier.protos.v1 import cache_pb2, common_pb2, devices_pb2, session_pb2, transfer_pb2

KEYS = [key_of(number) for number in range(3)]
GRANTED, PRESENT = StoreStatus.GRANTED, StoreStatus.PRESENT
HIT, MISS = KeyStatus.HIT, KeyStatus.MISS
REFUSED = DeviceUnavailable("no such device", "DEVICE_UNAVAILABLE")
MOVED = transfer_pb2.StoreFromDeviceResponse()
LOADED = transfer_pb2.LoadToDeviceResponse()
CONFIRMED = cache_pb2.CompleteLoadResponse()
WITHDRAWN = cache_pb2.WithdrawGrantsResponse()


def buffers() -> Any:
    export = DeviceExport(
        "gpu",
        Origin("boot", 1, 2, 3),
        (ExportedAllocation(b"h" * HANDLE_BYTES, 1 << 10),),
        {4: BlockLayout(5, (LayoutRun(0, 6, 64, 7, 2, 8),))},
        (b"e" * HANDLE_BYTES,),
    )
    return SimpleNamespace(export=export)


def registration(number: int = 9, *, events: bool = True) -> transfer_pb2.RegisterDeviceBuffersResponse:
    order = devices_pb2.DEVICE_ORDER_EVENTS if events else devices_pb2.DEVICE_ORDER_UNSPECIFIED
    return transfer_pb2.RegisterDeviceBuffersResponse(buffers_id=number, order=order)


@pytest.fixture
def script() -> Script:
    """Buffers are registered, and the server can wait for their events."""
    script = Script()
    script.perform(script.operations.register_kv_buffers(buffers()), registration())
    return script


def store(script: Script, *results: Any, after: Any = None) -> bytes:
    operation = script.operations.store_from_device(
        KEYS, [7, 8, 9], {"request_id": "r", "retain_for": 4.0}, after=after
    )
    statuses: bytes = script.perform(operation, *results)
    return statuses


def load(script: Script, *results: Any, after: Any = None) -> int:
    operation = script.operations.load_to_device(KEYS, [7, 8, 9], request_id="r", wait=5.0, after=after)
    hits: int = script.perform(operation, *results)
    return hits


def granted(*statuses: StoreStatus) -> cache_pb2.PrepareStoreResponse:
    return cache_pb2.PrepareStoreResponse(store_id=6 if GRANTED in statuses else 0, statuses=bytes(statuses))


def found(*statuses: KeyStatus, lease_id: int = 5) -> cache_pb2.LookupResponse:
    hits = len([*statuses, MISS][: [*statuses, MISS].index(MISS)])
    return cache_pb2.LookupResponse(lease_id=lease_id, statuses=bytes(statuses), prefix_hits=hits)


def test_a_registration_describes_the_buffers(script: Script) -> None:
    """Each field of the export. The first one may also wait for the start of the copy worker."""
    [call] = script.effects
    assert (call.method, call.timeout) == ("TransferService/RegisterDeviceBuffers", TIMEOUTS.call + 30)
    run = devices_pb2.DeviceRun(
        allocation_index=0, offset_bytes=6, block_stride_bytes=64, piece_bytes=7, pieces=2, piece_stride_bytes=8
    )
    assert call.request == transfer_pb2.RegisterDeviceBuffersRequest(
        session=script.session.ref,
        device_uuid="gpu",
        origin=devices_pb2.ProcessOrigin(boot_id="boot", pid=1, pid_namespace=2, shm_device=3),
        allocations=[devices_pb2.DeviceAllocation(handle=b"h" * HANDLE_BYTES, size_bytes=1 << 10)],
        groups=[devices_pb2.DeviceGroup(group_index=4, num_blocks=5, runs=[run])],
        event_handles=[b"e" * HANDLE_BYTES],
    )


def test_a_store_moves_the_granted_blocks(script: Script) -> None:
    mark = SimpleNamespace(index=3)
    results = [granted(GRANTED, PRESENT, GRANTED), MOVED, cache_pb2.CompleteStoreResponse()]
    before = time.monotonic_ns()
    assert store(script, *results, after=mark) == bytes([GRANTED, PRESENT, GRANTED])
    _, prepare, move, complete = script.effects
    assert (prepare.request.request_id, prepare.request.retain_for.seconds) == ("r", 4)
    deadline = before + int(TIMEOUTS.device * 1e9)
    assert deadline <= move.request.deadline_nanoseconds <= deadline + time.monotonic_ns() - before
    move.request.deadline_nanoseconds = 0
    assert move == Call(
        "TransferService/StoreFromDevice",
        transfer_pb2.StoreFromDeviceRequest(
            session=script.session.ref,
            buffers_id=9,
            store_id=6,
            blocks=[7, 9],
            after=devices_pb2.DeviceAfter(event_index=3),
        ),
        TIMEOUTS.device + 2,
    )
    assert complete.request == cache_pb2.CompleteStoreRequest(session=script.session.ref, store_id=6)


def test_a_store_without_a_granted_block_moves_nothing(script: Script) -> None:
    assert store(script, granted(PRESENT, PRESENT, PRESENT)) == bytes([PRESENT] * 3)


def test_a_load_moves_the_leading_hits(script: Script) -> None:
    """The copy is confirmed, and the lease released."""
    assert load(script, found(HIT, HIT, MISS), LOADED, CONFIRMED, cache_pb2.ReleaseLeaseResponse()) == 2
    _, lookup, move, confirm, release = script.effects
    assert (lookup.request.request_id, lookup.request.wait.seconds, lookup.request.want_slots) == ("r", 5, False)
    assert lookup.request.mode != cache_pb2.LOOKUP_MODE_EACH
    assert move.request.deadline_nanoseconds
    move.request.deadline_nanoseconds = 0
    assert move.request == transfer_pb2.LoadToDeviceRequest(
        session=script.session.ref, buffers_id=9, lease_id=5, items=[0, 1], blocks=[7, 8]
    )
    assert confirm.request == cache_pb2.CompleteLoadRequest(session=script.session.ref, lease_id=5)
    assert release.request.lease_ids == [5]


@pytest.mark.parametrize("lease_id", [0, 5])
def test_a_load_without_a_leading_hit(script: Script, lease_id: int) -> None:
    """It moves nothing. A lease on later hits is released, and an error of this does not matter."""
    results = [LimitExceeded("slow down", "RATE_LIMITED")] if lease_id else []
    assert load(script, found(MISS, HIT, lease_id=lease_id), *results) == 0


@pytest.mark.parametrize(("events", "index"), [(False, 3), (True, None)])
def test_the_client_waits_for_a_mark_that_the_server_cannot_see(*, events: bool, index: int | None) -> None:
    script, waited = Script(), list[bool]()
    script.perform(script.operations.register_kv_buffers(buffers()), registration(events=events))
    mark = SimpleNamespace(index=index, wait=lambda: waited.append(True))
    done = cache_pb2.CompleteStoreResponse()
    store(script, lambda copy: copy.run(), granted(GRANTED, PRESENT, PRESENT), MOVED, done, after=mark)
    assert waited
    assert isinstance(script.effects[1], Copy), "before the store is granted"
    assert not script.effects[3].request.HasField("after")


@pytest.mark.parametrize("operation", [store, load])
@pytest.mark.parametrize("new", ["session", "buffers", "refused copy"])
def test_buffers_are_registered_again(script: Script, operation: Any, new: str) -> None:
    """With each session, each change of the buffers, and after a copy that the server refused."""
    if new == "session":
        capabilities = session_pb2.CapabilitiesResponse(devices={"offered": True})
        script.session = ClientSession(common_pb2.SessionRef(session_id=b"2" * 16), capabilities, None, "")
    elif new == "buffers":
        script.perform(script.operations.register_kv_buffers(buffers()), registration(10))
    else:
        first = [granted(GRANTED, PRESENT, PRESENT)] if operation is store else [found(HIT, MISS, MISS)]
        with pytest.raises(DeviceUnavailable):
            operation(script, *first, REFUSED, WITHDRAWN)
    script.effects.clear()
    renewed = [] if new == "buffers" else [registration(10)]
    if operation is store:
        done = [granted(GRANTED, PRESENT, PRESENT), MOVED, cache_pb2.CompleteStoreResponse()]
        operation(script, *renewed, *done)
    else:
        operation(script, found(HIT, MISS, MISS), *renewed, LOADED, CONFIRMED, cache_pb2.ReleaseLeaseResponse())
    [move] = [each.request for each in script.effects if each.method.endswith("Device")]
    assert move.buffers_id == 10
    if new != "buffers":
        [register] = [each for each in script.effects if each.method.endswith("Buffers")]
        assert (register.request.session, register.timeout) == (script.session.ref, TIMEOUTS.call)


@pytest.mark.parametrize("error", [REFUSED, DeadlineExceeded("no answer")])
def test_a_refused_registration_is_not_repeated_at_once(error: KVTierError, monkeypatch: pytest.MonkeyPatch) -> None:
    """For some seconds calls of the same session fail without a request to the server."""
    script, clock = Script(), [100.0]
    monkeypatch.setattr(devices, "time", SimpleNamespace(monotonic=lambda: clock[0], monotonic_ns=time.monotonic_ns))
    script.operations._buffers = buffers()
    for results in ([error], []):
        with pytest.raises(DeviceUnavailable) as refusal:
            store(script, *results)
        assert refusal.value.reason == "DEVICE_UNAVAILABLE"
    clock[0] += devices._RETRY_SECONDS
    store(script, registration(), granted(PRESENT, PRESENT, PRESENT))


def test_a_registration_that_waits_for_the_worker_raises_its_timeout() -> None:
    """The next call may try again at once."""
    script = Script()
    with pytest.raises(DeadlineExceeded):
        script.perform(script.operations.register_kv_buffers(buffers()), DeadlineExceeded("no answer"))
    store(script, registration(), granted(PRESENT, PRESENT, PRESENT))


@pytest.mark.parametrize("refuse", ["no buffers", "no devices"])
def test_copies_need_buffers_and_a_server_with_devices(refuse: str) -> None:
    script = Script()
    if refuse == "no devices":
        script.session.devices.offered = False
        script.session.devices.why_not = "no copy worker"
        script.operations._buffers = buffers()
    with pytest.raises(InvalidRequest if refuse == "no buffers" else DeviceUnavailable, match=refuse[:2]):
        store(script)


@pytest.mark.parametrize("operation", [store, load])
def test_keys_and_blocks_must_be_as_many(script: Script, operation: Any) -> None:
    do = script.operations
    if operation is store:
        begun = do.store_from_device(KEYS, [1, 2], {}, after=None)
    else:
        begun = do.load_to_device(KEYS, [1, 2], request_id="", wait=0.0, after=None)
    with pytest.raises(InvalidRequest):
        script.perform(begun)


@pytest.mark.parametrize("error", [LimitExceeded("slow down", "RATE_LIMITED"), DeadlineExceeded("no answer")])
def test_a_copy_that_fails_ends_its_grant(script: Script, error: KVTierError, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store waits for the server, which reads the blocks until it answers.

    If the server gave no answer, a load raises only when the server has stopped to write.
    """
    slept: list[float] = []
    times = SimpleNamespace(sleep=slept.append, monotonic=time.monotonic, monotonic_ns=time.monotonic_ns)
    monkeypatch.setattr(devices, "time", times)
    with pytest.raises(type(error)):
        store(script, granted(GRANTED, PRESENT, PRESENT), error, WITHDRAWN)
    assert slept == []
    waits = [WITHDRAWN] if error.reason else [lambda copy: copy.run()]
    with pytest.raises(type(error)):
        load(script, found(HIT, MISS, MISS), error, *waits)
    ended = [list(each.request.grant_ids) for each in script.effects if getattr(each, "method", "").endswith("Grants")]
    if error.reason:
        assert (slept, script.withdrawn, ended) == ([], [], [[1], [2]])
    else:
        assert (script.withdrawn, ended) == ([2], [[1]])
        [seconds] = slept
        assert TIMEOUTS.device < seconds <= TIMEOUTS.device + 1.0
