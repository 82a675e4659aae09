"""Leases, stores and requests that end together: closed at once, and ended in slices."""

from collections.abc import Iterator
from itertools import pairwise

import pytest
from core_rig import Rig, keys
from harness.operations import Steps, run_to_end
from simulation import ModelTier

from kvtier.tiers.core import endings
from kvtier.tiers.core.block import Block
from kvtier.tiers.core.call_specs import LookupSpec, StoreSpec
from kvtier.tiers.core.commands import LeaseSettled
from kvtier.tiers.core.leases import BlockLease
from kvtier.tiers.errors import LeaseNotFound, StoreNotFound
from kvtier.tiers.secondary_tier import RequestInfo
from kvtier.tiers.types import EngineSession, StoreId

WRITER = hash("engine") & 0xFFFF


@pytest.fixture(autouse=True)
def _small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endings, "SLICE", 4)
    monkeypatch.setattr(endings, "REQUEST_SLICE", 4)


def lease(rig: Rig) -> BlockLease:
    found = run_to_end(rig.core.lookup(rig.session, keys(0), LookupSpec(lease_seconds=60), now=0)).lease
    assert found is not None
    return found


def prepare(rig: Rig, number: int) -> StoreId:
    store_id = run_to_end(
        rig.core.prepare_store(rig.session, keys(number), StoreSpec(lease_seconds=60), now=0)
    ).store_id
    assert store_id is not None
    return store_id


def begin(rig: Rig, session: EngineSession, request_id: str) -> None:
    rig.core.begin_request(session, RequestInfo(request_id, session.namespace.id))


def end_leases(rig: Rig, end: str) -> None:
    """Ends the leases of the session: with it, by their expiry, or with their request."""
    if end == "session":
        rig.core.close_session(rig.session.id)
    elif end == "expiry":
        rig.core.tick(60)
    else:
        rig.core.finish_request(rig.session, "")


@pytest.mark.parametrize("end", ["session", "expiry", "request", "release"])
def test_a_call_that_waits_for_a_lease_learns_of_its_end(end: str) -> None:
    """Otherwise a Lookup with `wait` would sleep until its deadline."""
    rig = Rig()
    rig.store(keys(0))
    prepare(rig, 1)
    ready = lease(rig)
    spec = LookupSpec(lease_seconds=60)
    pending = [run_to_end(rig.core.lookup(rig.session, keys(0, 1), spec, now=0)).lease for _ in range(9)]
    rig.core.take_commands()
    if end == "release":
        for each in [ready, *pending]:
            assert each is not None
            rig.core.release(rig.session, each.id)
    else:
        end_leases(rig, end)
    commands = rig.core.take_commands()
    while rig.core.has_work():
        rig.core.work()
        commands += rig.core.take_commands()
    told = [command for command in commands if isinstance(command, LeaseSettled)]
    assert told == [LeaseSettled(each.id) for each in pending if each is not None]


def test_the_end_of_a_lookup_in_the_middle_tells_of_its_lease() -> None:
    """A client has withdrawn it, for example."""
    rig = Rig()
    prepare(rig, 0)
    lookup = Steps(rig.core.lookup(rig.session, keys(0, 1, 2), LookupSpec(lease_seconds=60), now=0, slice_keys=1))
    assert lookup.step()
    assert lookup.step()
    [started] = rig.core.leases()
    rig.core.take_commands()
    lookup.operation.close()
    assert LeaseSettled(started.id) in rig.core.take_commands()


class CountedItems(list[Block | None]):
    """Items of a lease that count how many of them were looked at."""

    seen = 0

    def __iter__(self) -> Iterator[Block | None]:
        for item in super().__iter__():
            self.seen += 1
            yield item


@pytest.mark.parametrize("end", ["session", "expiry", "request"])
def test_the_end_of_a_lease_looks_at_its_pending_items_only(end: str) -> None:
    """A lookup can name one block 65,536 times beside a pending one."""
    rig = Rig()
    rig.store(keys(0))
    prepare(rig, 1)
    names = [*keys(0) * 1000, *keys(1)]
    found = run_to_end(rig.core.lookup(rig.session, names, LookupSpec(lease_seconds=60), now=0)).lease
    assert found is not None
    assert (found.pending, len(found.items)) == (1, 1001)
    items = found.items = CountedItems(found.items)
    end_leases(rig, end)
    assert items.seen < 10
    assert rig.core.stats().tiers[0].hits == 1001, "pending blocks of an ended lease count as hits"


def test_the_end_of_a_lease_does_not_look_at_its_misses() -> None:
    """A lookup can have a single hit behind 65,535 misses."""
    rig = Rig()
    rig.store(keys(0))
    names = keys(*range(1, 1000), 0)
    found = run_to_end(rig.core.lookup(rig.session, names, LookupSpec(prefix=False, lease_seconds=60), now=0)).lease
    assert found is not None
    items = found.items = CountedItems(found.items)
    rig.core.close_session(rig.session.id)
    assert items.seen == 0


@pytest.mark.parametrize("end", ["session", "expiry", "request"])
def test_leases_that_end_together_end_in_slices(end: str) -> None:
    """No call finds them, and their pins leave with the slices."""
    rig = Rig()
    rig.store(keys(0))
    leases = [lease(rig) for _ in range(10)]
    other = rig.open("other")
    namesake = rig.core.open_session(b"namesake", "engine", None, rig.session.namespace)
    [block] = rig.core._cpu_tier._index
    end_leases(rig, end)
    assert rig.core.stats().leases == 0
    assert rig.core.stats().expired_leases == (10 if end == "expiry" else 0)
    for each in leases:
        with pytest.raises(LeaseNotFound):
            rig.core.renew(namesake, each.id, 1e9)
    left = [block.pins]
    while block.pins:
        rig.core.work()
        left.append(block.pins)
    assert len(left) >= 3
    assert max(before - after for before, after in pairwise(left)) <= 4
    assert not rig.core._lookups.leases.items_of(other)[1]


@pytest.mark.parametrize("end", ["session", "expiry", "expiry, then session"])
def test_slots_of_closed_stores_wait_for_their_writer(end: str) -> None:
    """No slot is free before the connection of its writer has ended."""
    rig = Rig()
    stores = [prepare(rig, number) for number in range(9)]
    if end.startswith("expiry"):
        rig.core.tick(60)
    if end.endswith("session"):
        rig.core.close_session(rig.session.id)
    assert not rig.core.stores()
    closed = len(rig.core._stores.table._closed)
    assert 0 < closed < len(stores)
    for _ in range(20):
        assert len(rig.core._stores.table._closed) >= closed - 4
        closed = len(rig.core._stores.table._closed)
        rig.core.work()
    assert rig.core.stats().quarantined_bytes == 9 * 4096
    rig.core.writer_gone(rig.session.id, WRITER)
    assert 0 < rig.core.stats().quarantined_bytes < 9 * 4096, "lifted in slices"
    for _ in range(20):
        rig.core.work()
    assert rig.core.stats().quarantined_bytes == 0


def test_a_writer_that_ends_between_the_slices_frees_all_slots() -> None:
    """The stores that end later do not wait for it."""
    rig = Rig()
    for number in range(9):
        prepare(rig, number)
    rig.core.close_session(rig.session.id)
    rig.core.writer_gone(rig.session.id, WRITER)
    for _ in range(20):
        rig.core.work()
    assert rig.core.stats().quarantined_bytes == 0
    assert not rig.core._stores.table.granted_bytes
    assert not rig.core._endings.sessions


def test_a_connection_that_begins_after_a_store_was_closed_is_no_writer() -> None:
    """The slots are free when the connections have ended that could write to them."""
    rig = Rig()
    for number in range(9):
        prepare(rig, number)
    rig.core.tick(60)
    rig.core.writer_attached(rig.session.id, WRITER + 1)
    rig.core.writer_gone(rig.session.id, WRITER)
    for _ in range(20):
        rig.core.work()
    assert rig.core.stats().quarantined_bytes == 0


def test_a_late_completion_of_a_closed_store_frees_its_slots() -> None:
    """The client has stopped writing, so its slots need no quarantine."""
    rig = Rig()
    stores = [prepare(rig, number) for number in range(9)]
    rig.core.tick(60)
    late = next(reversed(rig.core._stores.table._closed))
    assert late in stores
    with pytest.raises(StoreNotFound):
        rig.core.store(rig.session, late)
    assert rig.core.is_quarantined(late, rig.session.engine)
    rig.core.writer_done(rig.session, late)
    assert not rig.core.is_quarantined(late, rig.session.engine)
    for _ in range(20):
        rig.core.work()
    assert rig.core.stats().quarantined_bytes == 8 * 4096


def rig_of_ended_requests(tier: ModelTier) -> Rig:
    """Returns a core whose session has ended with ten requests."""
    rig = Rig(tier)
    for number in range(10):
        begin(rig, rig.session, f"r{number}")
    rig.core.close_session(rig.session.id)
    return rig


def test_requests_of_an_ended_session_end_in_slices() -> None:
    """Tiers are told of a bounded number per slice."""
    tier = ModelTier("near", 1 << 20)
    rig = rig_of_ended_requests(tier)
    told = [len(tier.finished)]
    while told[-1] < 10:
        rig.core.work()
        told.append(len(tier.finished))
    assert told == [4, 8, 10]
    assert not rig.core._requests._requests


@pytest.mark.parametrize(
    ("awaited", "ends"), [(0, [4, 8, 10]), (1, [2, 4, 6, 8, 10]), (6, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10])]
)
def test_a_slice_of_requests_counts_the_blocks_that_they_wait_for(
    monkeypatch: pytest.MonkeyPatch, awaited: int, ends: list[int]
) -> None:
    monkeypatch.setattr(endings, "_AWAITED_BLOCKS", 1)
    tier = ModelTier("near", 1 << 20)
    rig = Rig(tier)
    writer = rig.open("writer")
    run_to_end(rig.core.prepare_store(writer, keys(*range(6)), StoreSpec(lease_seconds=60), now=0))
    blocks = list(rig.core._cpu_tier._index)
    for number in range(10):
        begin(rig, rig.session, f"r{number}")
        request = rig.core._requests.get(rig.session.engine, f"r{number}")
        assert request is not None
        for block in blocks[:awaited]:
            rig.core._requests.wait_for(request, block)
    rig.core.close_session(rig.session.id)
    told = [len(tier.finished)]
    while told[-1] < 10:
        rig.core.work()
        told.append(len(tier.finished))
    assert told == ends


def test_a_request_of_an_ended_session_does_not_answer_for_a_new_session() -> None:
    """The old one ends before the new one begins, and the slices do not end the new one."""
    tier = ModelTier("near", 1 << 20)
    rig = rig_of_ended_requests(tier)
    session = rig.core.open_session(b"new", "engine", None, rig.session.namespace)
    for number in range(10):
        begin(rig, session, f"r{number}")
    assert sorted(tier.finished) == [f"r{number}" for number in range(10)]
    for _ in range(5):
        rig.core.work()
    assert len(tier.finished) == 10
    assert len(session.requests) == 10
    rig.core.finish_request(session, "r9")
    assert tier.finished[10:] == ["r9"]
