"""Stores in slices: they count as one use of the blocks, and leave nothing."""

import pytest
from core_rig import HIT, MISS, Rig, keys
from harness.operations import Steps, run_to_end
from simulation import ModelTier

from kvtier.tiers.core.call_specs import LookupSpec, StoreSpec
from kvtier.tiers.core.in_flight_stores import Store
from kvtier.tiers.core.stores import _UNPIN_COST
from kvtier.tiers.errors import StoreNotFound
from kvtier.tiers.secondary_tier import RequestInfo
from kvtier.tiers.types import StoreAnswer, StoreId

FAR = 1e9


def begin(rig: Rig, names: list[bytes], most: int, *, request_id: str = "") -> Steps[StoreAnswer]:
    options = StoreSpec(request_id=request_id, lease_seconds=FAR)
    return Steps(rig.core.prepare_store(rig.session, names, options, now=0, slice_keys=most))


def prepare(rig: Rig, names: list[bytes], most: int, *, request_id: str = "") -> StoreId | None:
    return begin(rig, names, most, request_id=request_id).finish().store_id


def complete(rig: Rig, store_id: StoreId, most: int) -> None:
    run_to_end(rig.core.complete_store(rig.session, store_id, slice_blocks=most))


@pytest.mark.parametrize("done", range(4))
def test_a_store_whose_completion_has_begun_does_not_expire(done: int) -> None:
    """The client has ended its writes in time, so the other slices publish their blocks."""
    rig = Rig()
    store_id = prepare(rig, keys(*range(8)), 8)
    assert store_id is not None
    completion = Steps(rig.core.complete_store(rig.session, store_id, slice_blocks=2))
    for _ in range(done + 1):
        assert completion.step()
    rig.core.tick(2 * FAR)
    completion.finish()
    assert rig.look_up(keys(*range(8))) == HIT * 8
    assert not rig.core.stats().quarantined_bytes


@pytest.mark.parametrize("done", range(1, 4))
def test_a_store_may_be_completed_while_it_is_prepared(done: int) -> None:
    """The client withdraws its grant. The preparation ends; the completion frees the slots."""
    rig = Rig()
    everything = free_slots(rig)
    preparation = begin(rig, keys(*range(12)), 3)
    for _ in range(3):
        assert preparation.step()
    [store] = rig.core._stores.table
    completion = Steps(rig.core.complete_store(rig.session, store.id, range(len(store.blocks)), slice_blocks=2))
    for _ in range(done):
        assert completion.step()
    with pytest.raises(StoreNotFound):
        preparation.step()
    assert rig.core._stores.table.is_open(store), "the completion goes on"
    completion.finish()
    while rig.core.work():
        pass
    assert (free_slots(rig), list(rig.core._cpu_tier._index)) == (everything, [])


@pytest.mark.parametrize("request_id", ["", "mine"])
def test_the_head_of_a_sliced_store_is_evicted_last(request_id: str) -> None:
    """With and without a request id, the tail of the store is evicted first (B4.9)."""
    rig = Rig(eviction={"cpu": "lru"})
    store_id = prepare(rig, keys(*range(16)), 4, request_id=request_id)
    assert store_id is not None
    complete(rig, store_id, 4)
    rig.store(keys(100, 101))
    assert rig.look_up(keys(*range(16))) == HIT * 14 + MISS * 2


def test_secondary_tiers_also_see_one_use() -> None:
    """The head of the store is evicted last there, too."""
    tier = ModelTier("near", 16 * 4096)
    rig = Rig(tier, extents=2, queue=1 << 20, eviction={"near": "lru"})
    store_id = prepare(rig, keys(*range(16)), 4)
    assert store_id is not None
    complete(rig, store_id, 4)
    rig.finish_jobs()
    while rig.finish_jobs():
        pass
    rig.store(keys(100, 101))
    below = rig.core._tier_jobs.secondaries[0].catalog
    assert [number for number in range(16) if below.get(rig.session.namespace.id, keys(number)[0]) is None] == [14, 15]


def requests_known(rig: Rig) -> set[object]:
    """Returns the requests that the eviction policy of the CPU tier regards as unfinished."""
    [queue] = rig.core._cpu_tier.queues.all()
    return set(queue.policy._requests._open)  # type: ignore[attr-defined]


@pytest.mark.parametrize("end", ["complete", "fail", "present", "close", "close early", "expire"])
def test_a_sliced_store_is_forgotten_at_its_end(end: str) -> None:
    """The eviction policy keeps no state of a store that has ended, and no pin is left."""
    rig = Rig(eviction={"cpu": "lru"})
    names = keys(*range(8))
    if end == "present":
        rig.store(names)
    if end == "close early":
        steps = begin(rig, names, 4)
        assert steps.step()
        assert steps.step()
        assert [type(each) for each in requests_known(rig)] == [Store]
    elif (store_id := prepare(rig, names, 3)) is not None:
        assert [type(each) for each in requests_known(rig)] == [Store]
        if end in ("complete", "fail"):
            run_to_end(rig.core.complete_store(rig.session, store_id, range(8) if end == "fail" else ()))
    if end == "expire":
        rig.core.tick(2 * FAR)
    elif end.startswith("close"):
        rig.core.close_session(rig.session.id)
    assert not requests_known(rig)
    assert not rig.core.stores()
    assert not sum(block.pins for block in rig.core._cpu_tier._index)


def test_the_pins_of_a_long_store_end_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other events run between two slices. The next store finds the blocks nevertheless."""
    monkeypatch.setattr("kvtier.tiers.core.sliced_work.SLICE", 3 * _UNPIN_COST)
    rig = Rig(extents=2)
    rig.store(keys(*range(10)))
    assert prepare(rig, keys(*range(10)), 10) is None
    blocks = [rig.core._cpu_tier.blocks_of(rig.session.namespace.id)[key] for key in keys(*range(10))]
    assert [block.pins for block in blocks] == [1] * 7 + [0] * 3, "the tail first"
    assert rig.store(keys(*range(10))) == bytes([2]) * 10
    while any(block.pins for block in blocks):
        rig.core.work()
    assert [block.ready for block in blocks] == [True] * 10


def free_slots(rig: Rig) -> int:
    return rig.core._cpu_tier.memory.free_slots((0, 4096))


@pytest.mark.parametrize("event", ["none", "writer gone", "late completion", "reset", "reader gone"])
@pytest.mark.parametrize("end", ["close", "expire"])
@pytest.mark.parametrize("at", range(4))
def test_a_long_store_of_a_lost_client_ends_in_slices(
    monkeypatch: pytest.MonkeyPatch, end: str, event: str, at: int
) -> None:
    """Its slots are free when all slices have run and no client can write to them (B4.5)."""
    monkeypatch.setattr("kvtier.tiers.core.sliced_work.SLICE", 3 * _UNPIN_COST)
    rig = Rig(eviction={"cpu": "lru"})
    core, lost, everything = rig.core, rig.session, free_slots(rig)
    store_id = prepare(rig, keys(*range(10)), 10)
    assert store_id is not None
    reader = rig.open("reader")
    lease = run_to_end(
        core.lookup(reader, keys(*range(10)), LookupSpec(prefix=False, lease_seconds=4 * FAR), now=0)
    ).lease
    assert lease is not None
    assert lease.pending == 10
    if end == "close":
        core.close_session(lost.id)
    else:
        core.tick(2 * FAR)
    assert not core.stores()
    assert core.stats().quarantined_bytes == 3 * 4096
    for slice_ in range(4):
        if slice_ == at and event == "writer gone":
            core.writer_gone(lost.id, hash("engine") & 0xFFFF)
        elif slice_ == at and event == "late completion":
            core.writer_done(lost, store_id)
        elif slice_ == at and event == "reset":
            core.reset(reader)
        elif slice_ == at and event == "reader gone":
            core.close_session(reader.id)
        core.work()
    while core.has_work():
        core.work()
    assert not lease.pending or event == "reader gone"
    assert not list(core._cpu_tier._index)
    if event not in ("writer gone", "late completion"):
        assert core.stats().quarantined_bytes == 10 * 4096
        assert free_slots(rig) == everything - 10
        core.writer_gone(lost.id, hash("engine") & 0xFFFF)
    assert core.stats().quarantined_bytes == 0
    assert free_slots(rig) == everything


def test_a_request_ends_with_the_last_slice_of_its_lost_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiers are notified once, when all of the store has ended (B3.11)."""
    monkeypatch.setattr("kvtier.tiers.core.sliced_work.SLICE", 3 * _UNPIN_COST)
    rig = Rig()
    rig.core.begin_request(rig.session, RequestInfo("mine", rig.session.namespace.id))
    prepare(rig, keys(*range(8)), 8, request_id="mine")
    rig.core.close_session(rig.session.id)
    assert rig.core._requests._requests
    for _ in range(3):
        rig.core.work()
    assert not rig.core._requests._requests


def test_many_stores_of_a_lost_client_end_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slice ends at most one store, also if the stores are small."""
    monkeypatch.setattr("kvtier.tiers.core.sliced_work.SLICE", 3 * _UNPIN_COST)
    rig = Rig(extents=8)
    assert prepare(rig, keys(*range(10)), 10) is not None
    for number in range(100, 106):
        assert prepare(rig, keys(number), 1) is not None
    rig.core.close_session(rig.session.id)
    writing = []
    while any(block.pins for block in rig.core._cpu_tier._index):
        writing.append(sum(block.pins for block in rig.core._cpu_tier._index))
        rig.core.work()
    assert writing == [15, 14, 13, 12, 11, 10, 7, 4, 1], "the latest first"
