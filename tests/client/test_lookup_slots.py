"""Slots of a lookup: a scheduler looks up, and its workers copy without PrepareLoad."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness.payloads import key_of, namespace_of, payload
from harness.raw import RawSession
from harness.recorded_calls import record_calls
from harness.server_process import ServerProcess

from kvtier.client import Client, InvalidRequest, KeyStatus, LeaseLost, LeaseSlots, LookupResult, NotOwner
from kvtier.protos.v1 import cache_pb2
from kvtier.protos.wire.packed_keys import pack_keys, unpack_offsets

PART, RANKS = 4096, 2
WORLD = namespace_of(PART, 2 * PART, world_size=RANKS)
KEYS = [key_of(number, number % 2, salt="slots") for number in range(8)]
READ, PREPARED = ["CacheService/CompleteLoad"], ["CacheService/PrepareLoad", "CacheService/CompleteLoad"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("server")).start() as server:
        yield server


class Engine:
    """A scheduler and the workers of its ranks, which have stored all keys."""

    def __init__(self, server: ServerProcess) -> None:
        self.server = server
        self.clients: list[Client] = []
        self.scheduler = self.connect()
        self.workers = [self.connect(rank) for rank in range(RANKS)]
        for rank, worker in enumerate(self.workers):
            worker.store(KEYS, [payload(key, WORLD.part_bytes_of(key), rank) for key in KEYS])

    def connect(self, rank: int | None = None, **options: Any) -> Client:
        client = Client(
            self.server.endpoint, **{"namespace": WORLD, "engine_id": "tp", "rank": rank, "transport": "shm"} | options
        )
        self.clients.append(client)
        client.wait_until_connected(60)
        return client

    def read(
        self, rank: int, lease: LookupResult | int, items: list[int], slots: LeaseSlots | None = None
    ) -> list[str]:
        """Reads items of a lease and checks their bytes. Returns the calls of the worker."""
        worker = self.workers[rank]
        calls = record_calls(worker)
        with worker.read(lease, items, slots=slots) as batch:
            for item, view in zip(items, batch.views(), strict=True):
                assert bytes(view) == payload(KEYS[item], len(view), rank).tobytes()
        return calls

    def loaded_bytes(self) -> int:
        return self.server.tier("cpu").loaded_bytes


@pytest.fixture
def engine(server: ServerProcess) -> Iterator[Engine]:
    engine = Engine(server)
    yield engine
    for client in engine.clients:
        client.close()


def slots_of(found: LookupResult) -> LeaseSlots:
    """Returns the slots of a lookup as another process gets them."""
    assert found.slots is not None
    slots: LeaseSlots = pickle.loads(pickle.dumps(found.slots))  # noqa: S301 - as vLLM sends it
    return slots


def test_a_load_takes_two_calls(engine: Engine) -> None:
    """One of the scheduler, and one of each worker. Each copy is counted once."""
    asked = record_calls(engine.scheduler)
    lease = engine.scheduler.begin_request("r", KEYS, slots=True)
    assert asked == ["CacheService/BeginRequest"]
    before, slots = engine.loaded_bytes(), slots_of(lease)
    for rank in range(RANKS):
        assert engine.read(rank, lease.id, [1, 0, 7], slots) == READ
    assert engine.loaded_bytes() - before == RANKS * sum(WORLD.part_bytes_of(KEYS[item]) for item in (1, 0, 7))
    engine.scheduler.finish_request("r")


def test_a_worker_reads_its_own_lookup_without_a_further_call(engine: Engine) -> None:
    """The answer has only the slots of its own rank. A worker of another rank asks the server."""
    with engine.workers[1].lookup(KEYS, slots=True) as lease:
        assert len(slots_of(lease).offsets) == 8 * len(KEYS)
        assert engine.read(1, lease, [2, 3]) == READ
        assert engine.read(0, lease, [2, 3]) == engine.read(0, lease.id, [2], lease.slots) == PREPARED
    with engine.scheduler.lookup(KEYS, slots=True) as lease:
        assert engine.read(0, lease, [2, 3]) == READ


def test_a_scheduler_reads_nothing(engine: Engine) -> None:
    """It has no rank."""
    with (
        engine.scheduler.lookup(KEYS, slots=True) as lease,
        pytest.raises(InvalidRequest),
        engine.scheduler.read(lease, [0]),
    ):
        pass


def test_items_without_slots_are_prepared(engine: Engine) -> None:
    """Those behind the first miss, those that the lookup does not have, and all without `slots`."""
    keys = [*KEYS[:2], key_of(1, salt="missing"), *KEYS[3:]]
    with engine.scheduler.lookup(keys, prefix=False, slots=True) as lease:
        slots = slots_of(lease)
        assert len(slots.groups) == 2
        assert engine.read(1, lease.id, [1], slots) == READ
        assert engine.read(1, lease.id, [1, 3], slots) == engine.read(1, lease.id, [1]) == PREPARED
        for item in (2, -1, 8):
            with pytest.raises(InvalidRequest):
                engine.read(1, lease.id, [item], slots)
    with engine.scheduler.lookup(KEYS) as lease:
        assert lease.slots is None


def test_narrow_integers_of_numpy_name_the_same_items(engine: Engine) -> None:
    """A product of the item and the number of ranks exceeds eight bits."""
    keys = [KEYS[number % 2] for number in range(200)]
    with engine.scheduler.lookup(keys, slots=True) as lease:
        items = np.array([199, 130], dtype=np.uint8)
        with engine.workers[1].read(lease.id, items, slots=slots_of(lease)) as batch:
            for key, view in zip((KEYS[1], KEYS[0]), batch.views(), strict=True):
                assert bytes(view) == payload(key, len(view), 1).tobytes()


@pytest.mark.parametrize("offsets", [b"\0" * 7, "text", None])
def test_malformed_slots_are_not_used(engine: Engine, offsets: Any) -> None:
    with engine.scheduler.lookup(KEYS, slots=True) as lease:
        slots = slots_of(lease)
        assert engine.read(1, lease.id, [0], LeaseSlots(slots.epoch, slots.groups, offsets)) == PREPARED


def test_slots_of_another_number_of_ranks_are_not_used(engine: Engine) -> None:
    with engine.scheduler.lookup(KEYS, slots=True) as lease:
        slots = slots_of(lease)
        longer = LeaseSlots(slots.epoch, slots.groups, slots.offsets + slots.offsets[: 8 * len(KEYS)])
        assert engine.read(1, lease.id, [0], longer) == PREPARED


def test_a_copy_after_the_end_of_the_lease_is_a_miss(engine: Engine) -> None:
    """Also if other blocks have the slots by then."""
    lease = engine.scheduler.lookup(KEYS, slots=True)
    slots = slots_of(lease)
    lease.release()
    engine.scheduler.reset(wait=60)
    others = [key_of(number, salt="others") for number in range(64 << 8)]
    with engine.connect(namespace=namespace_of(PART, model="others"), rank=None, engine_id="others") as other:
        for start in range(0, len(others), 1024):
            other.store(others[start : start + 1024], [bytes(PART)] * 1024)
    with pytest.raises(LeaseLost), engine.workers[0].read(lease.id, [0], slots=slots) as batch:
        assert bytes(batch.views()[0]) == bytes(PART), "other bytes are there"


def test_a_lease_that_ends_during_the_copy_is_a_miss(engine: Engine) -> None:
    lease = engine.scheduler.lookup(KEYS, slots=True)
    with pytest.raises(LeaseLost), engine.workers[0].read(lease.id, [0], slots=slots_of(lease)):
        lease.release()
    with engine.scheduler.lookup(KEYS, lease=0.2, slots=True) as lease:
        engine.server.wait_for(lambda status: not status.leases)
        with pytest.raises(LeaseLost), engine.workers[0].read(lease.id, [0], slots=lease.slots):
            pass


def test_other_engines_cannot_use_the_slots(engine: Engine) -> None:
    with engine.scheduler.lookup(KEYS, slots=True) as lease:
        stranger = engine.connect(0, engine_id="stranger")
        with pytest.raises(NotOwner), stranger.read(lease.id, [0], slots=lease.slots):
            pass
        assert engine.read(0, lease.id, [0], lease.slots) == READ


@pytest.mark.parametrize("transport", ["grpc", "tcp"])
def test_a_session_without_the_region_gets_no_slots(engine: Engine, transport: str) -> None:
    """A worker without the region ignores slots, and receives the bytes."""
    remote = engine.connect(transport=transport)
    with remote.lookup(KEYS, slots=True) as lease:
        assert lease.prefix_hits == len(KEYS)
        assert lease.slots is None or not lease.slots.offsets  # it may name keys to verify
        assert engine.read(0, lease.id, [0], lease.slots) == PREPARED
    with engine.scheduler.lookup(KEYS, slots=True) as lease:
        engine.workers[1] = engine.connect(1, transport=transport)
        assert engine.read(1, lease.id, [0, 1], slots_of(lease)) == PREPARED


def test_a_session_that_no_longer_maps_the_region_gets_no_slots(engine: Engine) -> None:
    request = cache_pb2.LookupRequest(keys=pack_keys(KEYS), want_slots=True)
    with RawSession(engine.server.endpoint, WORLD, engine_id="tp", transport="shm") as raw:
        request.session.CopyFrom(raw.ref)
        assert not raw.cache.Lookup(request).slot_offsets
        attachment = raw.attach()
        assert len(unpack_offsets(raw.cache.Lookup(request).slot_offsets)) == RANKS * len(KEYS)
        attachment.close()
        engine.server.wait_for(lambda _: not raw.cache.Lookup(request).slot_offsets)


def test_blocks_on_their_way_from_disk_have_no_slots(engine: Engine) -> None:
    """A lookup that waits for them returns their slots."""
    stored = len(KEYS) // 2
    engine.workers[0].flush(KEYS, wait=60)
    engine.scheduler.reset(wait=60)
    for rank, worker in enumerate(engine.workers):
        worker.store(KEYS[:stored], [payload(key, WORLD.part_bytes_of(key), rank) for key in KEYS[:stored]])
    lease = engine.scheduler.lookup(KEYS, slots=True)
    assert lease.statuses[stored] == KeyStatus.HIT_PENDING
    slots = slots_of(lease)
    assert len(slots.groups) == stored
    assert engine.read(1, lease.id, [*range(stored)], slots) == READ
    with engine.scheduler.lookup(KEYS, wait=60, slots=True) as waited:
        assert waited.prefix_hits == len(KEYS)
        assert engine.read(1, waited.id, [*range(len(KEYS))], slots_of(waited)) == READ
    assert engine.read(1, lease.id, [*range(len(KEYS))], slots) == PREPARED
    lease.release()


def test_slots_of_an_earlier_run_of_the_server_are_not_used(tmp_path: Path) -> None:
    """The worker, which has a new session, copies nothing and makes no call."""
    with ServerProcess(tmp_path).start() as server:
        engine = Engine(server)
        lease = engine.scheduler.lookup(KEYS, slots=True)
        server.restart()
        engine.workers[0].close()
        engine.workers[0] = engine.connect(0)
        calls = record_calls(engine.workers[0])
        with pytest.raises(LeaseLost), engine.workers[0].read(lease.id, [0], slots=lease.slots):
            pass
        assert calls == []
        for client in engine.clients:
            client.close()
