"""Stores whose bytes the server must have received, and leases that copies of the server read."""

import pytest
from core_rig import HIT, MISS, SPEC, Rig, keys
from harness.operations import run_to_end

from kvtier.tiers.core.call_specs import LookupSpec, StoreSpec
from kvtier.tiers.core.commands import EndReaders
from kvtier.tiers.core.in_flight_stores import Store
from kvtier.tiers.core.manager import TierManager

FAR = 1e9
PART = SPEC.part_bytes[0]


def prepare(rig: Rig, names: list[bytes]) -> Store:
    answer = run_to_end(rig.core.prepare_store(rig.session, names, StoreSpec(lease_seconds=FAR), now=0))
    assert answer.store_id is not None
    return rig.core.store(rig.session, answer.store_id)


def complete(rig: Rig, store: Store, failed: tuple[int, ...] = ()) -> list[int] | None:
    unreceived = run_to_end(rig.core.complete_store(rig.session, store.id, failed, slice_blocks=3))
    assert unreceived == (store.unreceived or ())
    return store.unreceived


def test_a_store_without_a_mapping_needs_all_bytes() -> None:
    """Other blocks fail, also those without a single missing byte if the client says so."""
    rig = Rig()
    rig.session.unmapped_from = 0
    names = keys(*range(8))
    store = prepare(rig, names)
    store.receive(0, 3 * PART)
    store.receive(3 * PART + 1, 4 * PART)
    store.receive(5 * PART, 8 * PART - 1)
    assert complete(rig, store, (1, 4)) == [3, 7]
    assert rig.look_up(names, prefix=False) == HIT + MISS + HIT + MISS * 2 + HIT * 2 + MISS


@pytest.mark.parametrize("streamed", [False, True])
def test_a_mapped_store_is_published_unless_it_is_streamed(*, streamed: bool) -> None:
    rig = Rig()
    store = prepare(rig, keys(1, 2))
    store.is_streamed = streamed
    store.receive(0, PART)
    assert complete(rig, store) == ([1] if streamed else None)
    assert rig.look_up(keys(1, 2)) == (HIT + MISS if streamed else HIT * 2)


def test_stores_that_begin_after_the_mapping_need_all_bytes() -> None:
    rig = Rig()
    earlier = prepare(rig, keys(1))
    rig.session.unmapped_from = rig.core._stores.table.begun
    later = prepare(rig, keys(2))
    assert complete(rig, earlier) is None
    assert complete(rig, later) == [0]


def ends(rig: Rig) -> list[EndReaders]:
    return [command for command in rig.core.take_commands() if isinstance(command, EndReaders)]


def evictable(core: TierManager, names: list[bytes]) -> bool:
    return all(not block.pins for block in core._cpu_tier.all_of(SPEC.id) if block.key in names)


@pytest.mark.parametrize("how", ["release", "expiry", "session"])
def test_a_lease_that_ends_while_it_is_read_keeps_its_pins(how: str) -> None:
    """Until its last reader has ended. The server is asked to end them."""
    rig = Rig()
    names = keys(*range(4))
    rig.store(names)
    lease = run_to_end(rig.core.lookup(rig.session, names, LookupSpec(lease_seconds=60), now=0)).lease
    assert lease is not None
    lease.readers = 2
    ends(rig)
    if how == "release":
        rig.core.release(rig.session, lease.id)
    elif how == "expiry":
        rig.core.tick(61)
    else:
        rig.core.close_session(rig.session.id)
    assert ends(rig) == [EndReaders(lease.id)]
    for pinned in (True, True, False):
        assert evictable(rig.core, names) is not pinned
        if pinned:
            rig.core.end_reader(lease)
