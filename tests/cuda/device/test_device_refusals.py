"""Invalid device calls, and calls for other sessions' objects.

Refused with a reason, nothing is copied.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from devices.caller import PART, Caller, refusal_reason
from devices.kv import BLOCKS, JOINED
from devices.service import Service, keys_of
from harness.server_process import MIB

from kvtier.protos.v1 import cache_pb2, transfer_pb2
from kvtier.protos.wire.packed_keys import pack_keys
from kvtier.server.services.devices import _deadline_of

KEYS = keys_of(BLOCKS)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with Service(tmp_path_factory.mktemp("refusals"), region=32 * MIB) as running:
        yield running


@pytest.fixture
def start(service: Service) -> Iterator[Callable[[str], Caller]]:
    with contextlib.ExitStack() as closing:

        def one(engine_id: str) -> Caller:
            caller = Caller(service, engine_id)
            closing.callback(caller.close)
            return caller

        yield one


@pytest.fixture
def caller(start: Callable[[str], Caller]) -> Caller:
    made = start("one")
    made.register()
    return made


STORES = {
    "a block that is not there": {"blocks": [0, 1, BLOCKS]},
    "a block twice": {"blocks": [0, 1, 1]},
    "too few blocks": {"blocks": [0, 1]},
    "no blocks": {},
    "too many blocks": {"blocks": [0, 1, 2, 3]},
    "an item that is not there": {"blocks": [0], "items": [3]},
    "an item twice": {"blocks": [0, 1], "items": [0, 0]},
    "an event that is not there": {"blocks": [0, 1, 2], "after": {"event_index": 4}},
}


@pytest.mark.parametrize("name", STORES)
def test_invalid_stores(caller: Caller, name: str) -> None:
    """INVALID_ARGUMENT; the store continues and its slots are unchanged."""
    store_id = caller.prepare(keys_of(3, f"store {name}"))
    assert caller.store(store_id, **STORES[name]) == "INVALID_ARGUMENT"
    good = transfer_pb2.StoreFromDeviceRequest(
        session=caller.raw.ref, buffers_id=caller.buffers_id, store_id=store_id, blocks=[4, 2], items=[2, 0]
    )
    assert caller.calls.StoreFromDevice(good, timeout=60).moved_bytes == 2 * PART
    caller.discard(store_id, 3)
    assert caller.store(store_id, blocks=[0, 1, 2]) == "STORE_NOT_FOUND"


LOADS = {
    "a block that is not there": ({"blocks": [BLOCKS], "items": [0]}, "INVALID_ARGUMENT"),
    "a block twice": ({"blocks": [1, 1], "items": [0, 1]}, "INVALID_ARGUMENT"),
    "an item twice": ({"blocks": [1, 2], "items": [0, 0]}, "INVALID_ARGUMENT"),
    "an item that is not there": ({"blocks": [1], "items": [9]}, "INVALID_ARGUMENT"),
    "a miss": ({"blocks": [1], "items": [2]}, "INVALID_ARGUMENT"),
    "fewer blocks than items": ({"blocks": [1], "items": [0, 1]}, "INVALID_ARGUMENT"),
    "too late": ({"blocks": [1], "items": [0], "deadline_nanoseconds": 1}, "DEVICE_LOST"),
}


@pytest.mark.parametrize("name", LOADS)
def test_invalid_loads(caller: Caller, name: str) -> None:
    keys = keys_of(2, f"load {name}")
    caller.engine.client.store(keys, JOINED.parts(5)[:2])
    request = cache_pb2.LookupRequest(
        session=caller.raw.ref, keys=pack_keys([*keys, *keys_of(1, "never")]), mode=cache_pb2.LOOKUP_MODE_EACH
    )
    lease_id = caller.raw.cache.Lookup(request, timeout=60).lease_id
    fields, reason = LOADS[name]
    assert caller.load(lease_id, **fields) == reason
    assert caller.engine.contents() == caller.engine.expected(0)


def test_registering_again(caller: Caller) -> None:
    """Registering the same buffers again returns the same id; other buffers replace them."""
    first = caller.buffers_id
    caller.register()
    assert caller.buffers_id == first
    other = caller.registration()
    del other.event_handles[1:]
    assert caller.calls.RegisterDeviceBuffers(other, timeout=60).buffers_id != first
    assert caller.store(caller.prepare(keys_of(1, "replaced")), blocks=[0]) == "DEVICE_LOST"


def test_objects_of_other_sessions(caller: Caller, start: Callable[[str], Caller]) -> None:
    """Another session's registration, another engine's store or lease, and an unknown registration.

    Each has its reason.
    """
    other = start("another")
    other.register()
    keys = keys_of(1, "foreign")
    mine, theirs = caller.prepare(keys), other.prepare(keys_of(1, "theirs"))
    assert caller.store(theirs, blocks=[0]) == "NOT_OWNER"
    assert caller.store(mine, blocks=[0], buffers_id=other.buffers_id) == "NOT_OWNER"
    assert caller.load(1, blocks=[0], items=[0], buffers_id=other.buffers_id) == "NOT_OWNER"
    assert caller.store(mine, blocks=[0], buffers_id=5) == "DEVICE_LOST"
    assert caller.load(123, blocks=[0], items=[0]) == "LEASE_NOT_FOUND"
    unregister = transfer_pb2.UnregisterDeviceBuffersRequest(session=caller.raw.ref, buffers_id=other.buffers_id)
    assert refusal_reason(caller.calls.UnregisterDeviceBuffers, unregister) == "NOT_OWNER"
    unregister.buffers_id = caller.buffers_id
    caller.calls.UnregisterDeviceBuffers(unregister, timeout=60)
    assert caller.store(mine, blocks=[0]) == "DEVICE_LOST"
    caller.register()
    assert caller.store(mine, blocks=[0], session=other.raw.ref) == "NOT_OWNER"
    good = transfer_pb2.StoreFromDeviceRequest(
        session=caller.raw.ref, buffers_id=caller.buffers_id, store_id=mine, blocks=[0]
    )
    assert caller.calls.StoreFromDevice(good, timeout=60).moved_bytes == PART


Request = transfer_pb2.RegisterDeviceBuffersRequest

WRONG: dict[str, Callable[[Request], object]] = {
    "nothing": lambda request: request.ClearField("groups"),
    "a group twice": lambda request: request.groups.append(request.groups[0]),
    "a group that the namespace lacks": lambda request: setattr(request.groups[0], "group_index", 1),
    "parts of another size": lambda request: request.groups[0].runs.pop(),
    "pieces that overlap": lambda request: setattr(request.groups[0].runs[0], "block_stride_bytes", 8),
    "an allocation that is not there": lambda request: setattr(request.groups[0].runs[0], "allocation_index", 3),
    "blocks outside of their allocation": lambda request: setattr(request.groups[0], "num_blocks", 100),
    "sizes beyond everything": lambda request: setattr(request.groups[0].runs[0], "offset_bytes", 1 << 63),
    "a handle that is too short": lambda request: setattr(request.allocations[0], "handle", b"handle"),
    "an endless name": lambda request: setattr(request, "device_uuid", "x" * 1000),
    "too many handles": lambda request: request.event_handles.extend([bytes(64)] * 5000),
}


@pytest.mark.parametrize("name", WRONG)
def test_invalid_registrations(caller: Caller, name: str) -> None:
    """INVALID_ARGUMENT; the earlier registration stays valid."""
    request = caller.registration()
    WRONG[name](request)
    assert refusal_reason(caller.calls.RegisterDeviceBuffers, request) == "INVALID_ARGUMENT"
    store_id = caller.prepare(keys_of(1, name))
    good = transfer_pb2.StoreFromDeviceRequest(
        session=caller.raw.ref, buffers_id=caller.buffers_id, store_id=store_id, blocks=[0]
    )
    assert caller.calls.StoreFromDevice(good, timeout=60).moved_bytes == PART


@pytest.mark.parametrize(
    ("field", "value", "cause"),
    [("boot_id", "another", "other_host"), ("pid", 1, "cannot_open"), ("pid", 4_000_000, "exporter_gone")],
)
def test_memory_that_cannot_be_opened(caller: Caller, field: str, value: Any, cause: str) -> None:
    """DEVICE_UNAVAILABLE, starting with the likely cause.

    The copy worker stays alive and keeps nothing open.
    """
    request = caller.registration()
    setattr(request.origin, field, value)
    request.allocations[0].handle = bytes(64)
    with pytest.raises(Exception, match=cause):
        caller.calls.RegisterDeviceBuffers(request, timeout=60)
    assert refusal_reason(caller.calls.RegisterDeviceBuffers, request) == "DEVICE_UNAVAILABLE"


def test_events_of_another_shm(caller: Caller) -> None:
    """Without a shared /dev/shm the answer says that the caller waits; a named event is refused."""
    request = caller.registration()
    request.origin.shm_device = 1
    answer = caller.calls.RegisterDeviceBuffers(request, timeout=60)
    assert answer.order == 2  # DEVICE_ORDER_CALLER_WAITS
    caller.buffers_id = answer.buffers_id
    store_id = caller.prepare(keys_of(1, "another shm"))
    assert caller.store(store_id, blocks=[0], after={"event_index": 0}) == "INVALID_ARGUMENT"


def test_a_copy_may_begin_within_a_minute() -> None:
    """A client may set an earlier deadline, but no later one: blocks stay pinned until then."""
    minute = 60 * 10**9
    for wanted in (0, time.monotonic_ns() + 2 * minute):
        request = transfer_pb2.StoreFromDeviceRequest(deadline_nanoseconds=wanted)
        assert time.monotonic_ns() < _deadline_of(request) <= time.monotonic_ns() + minute
    assert _deadline_of(transfer_pb2.StoreFromDeviceRequest(deadline_nanoseconds=7)) == 7
