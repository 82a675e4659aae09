"""Records of slots: their limits, damage, and places of namespaces."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

import pytest
from harness.operations import run_to_end
from simulation import EXTENT

from kvtier.tiers.core import slot_records
from kvtier.tiers.core.bulk_eviction import EvictionRequest
from kvtier.tiers.core.call_specs import LookupSpec, StoreSpec
from kvtier.tiers.core.manager import TierManager
from kvtier.tiers.core.recovery import RecoveredBlocks
from kvtier.tiers.core.slot_records import MAX_KEY_BYTES, RecordsError, SlotRecords, session_tag
from kvtier.tiers.secondary_tier import NamespaceId
from kvtier.tiers.types import HOLD_ONLY_KEY_PREFIX, TENANT_TAG_BYTES, EngineSession, NamespaceSpec

NOW = 5000.0


def namespace(
    number: int = 0, *, tenant: int = 0, world_size: int = 1, part_bytes: tuple[int, ...] = (4096,)
) -> NamespaceSpec:
    tag = tenant.to_bytes(TENANT_TAG_BYTES, "big")
    name = number.to_bytes(4, "big")
    return NamespaceSpec(NamespaceId((tag + name).ljust(32, b".")), world_size, part_bytes)


def key(name: bytes, group: int = 0) -> bytes:
    return name + group.to_bytes(4, "big")


class Server:
    """A core with records, and the memory that outlives it."""

    def __init__(
        self,
        memory: bytearray | None = None,
        *,
        extents: int = 2,
        back: Callable[[int, int], bool] = lambda _, __: True,
    ) -> None:
        self.extents, self.region_bytes = extents, extents * EXTENT
        self.memory = memory or bytearray(SlotRecords.size_bytes(self.region_bytes, EXTENT))
        self.records = SlotRecords(memoryview(self.memory), self.region_bytes, EXTENT, back)
        if memory is None:
            self.records.format()
        self.records.check()
        self.core = TierManager(self.region_bytes, EXTENT, (), records=self.records, now=NOW)
        self.sessions = 0
        if memory is None:
            self.core.add_memory(0, self.region_bytes)

    def open(self, spec: NamespaceSpec, rank: int = 0) -> EngineSession:
        self.sessions += 1
        return self.core.open_session(b"%08d" % self.sessions, "engine", rank, spec)

    def store(self, spec: NamespaceSpec, names: list[bytes], ranks: Iterable[int] = (0,)) -> list[int]:
        """Returns the slots of the last rank."""
        for rank in ranks:
            session = self.open(spec, rank)
            answer = run_to_end(self.core.prepare_store(session, names, StoreSpec(lease_seconds=60), now=NOW))
            assert answer.store_id is not None
            run_to_end(self.core.complete_store(session, answer.store_id))
        return answer.slots

    def state_of(self, slot: int) -> int:
        """Returns where the state of a slot is."""
        return self.records._states_at + self.place_of(slot)

    def record_of(self, slot: int) -> int:
        """Returns where the record of a slot is."""
        return self.records._records_at + self.place_of(slot) * slot_records._RECORD.size

    def place_of(self, slot: int) -> int:
        extent, within = divmod(slot, EXTENT)
        return self.records._first_place(extent) + within // self.records._slot_bytes[extent]

    def namespace_at(self, spec: NamespaceSpec) -> int:
        return self.records._namespace_at(self.number_of(spec) & slot_records._INDEX_MASK)

    def number_of(self, spec: NamespaceSpec) -> int:
        return self.core._cpu_tier._index.of(spec.id).number

    def restart(self, writers: Iterable[int] = ()) -> tuple[Server, RecoveredBlocks]:
        server = Server(bytearray(self.memory), extents=self.extents)
        recovered = server.core.recover(writers)
        server.core.add_memory(0, self.region_bytes)
        return server, recovered

    def after_restart(self) -> list[tuple[NamespaceId, bytes]]:
        """Returns the blocks that a restart recovers."""
        return [block.name for block in self.restart()[1].blocks]


@pytest.mark.parametrize("length", [MAX_KEY_BYTES, MAX_KEY_BYTES + 1])
def test_blocks_with_long_keys_are_not_recorded(length: int) -> None:
    server, spec = Server(), namespace()
    names = [key(b"k" * (length - 4)), key(b"short")]
    slots = server.store(spec, names)
    found = [name for _, name in server.after_restart()]
    assert found == (names if length == MAX_KEY_BYTES else names[1:])
    again, _ = server.restart()
    free = again.core._cpu_tier.memory.free_slots((0, 4096))
    assert free == 2 * EXTENT // 4096 - len(found), f"only recovered blocks use slots, of {slots}"


@pytest.mark.parametrize("kind", ["long key", "many part sizes", "no place", "hold"])
def test_complete_blocks_that_are_not_recorded_use_no_memory_after_a_restart(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Their client has completed them, so it does not write any more, although it still runs."""
    server, name, spec = Server(), key(b"a"), namespace(world_size=2)
    if kind == "long key":
        name = key(b"k" * 200)
    elif kind == "many part sizes":
        spec = namespace(part_bytes=(4096, 8192) * slot_records._MAX_RUNS, world_size=2)
    elif kind == "no place":
        monkeypatch.setattr(server.records, "_unused", deque())
    else:
        name = HOLD_ONLY_KEY_PREFIX + name
    server.store(spec, [name], range(2))
    assert len(server.core._cpu_tier) == 1
    again, recovered = server.restart([session_tag(b"%08d" % number) for number in (1, 2)])
    assert (recovered.blocks, recovered.unusable_bytes) == ([], 0)
    assert again.core.stats().quarantined_bytes == 0


def test_a_part_stays_out_of_use_while_its_block_is_incomplete() -> None:
    server, spec = Server(), namespace(world_size=2)
    server.store(spec, [key(b"k" * 200)])
    again, recovered = server.restart([session_tag(b"%08d" % 1)])
    assert (recovered.blocks, recovered.unusable_bytes) == ([], 4096)
    again.core.former_writer_gone(session_tag(b"%08d" % 1))
    assert again.core.stats().quarantined_bytes == 0


def test_a_namespace_that_the_recovery_does_not_use_loses_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_records, "MAX_NAMESPACES", 8)
    server, spec = Server(), namespace()
    (slot,) = server.store(spec, [key(b"a")])
    server.memory[server.record_of(slot) + 10] ^= 1
    again, recovered = server.restart()
    assert recovered.blocks == []
    assert len(again.records._unused) == 8


@pytest.mark.parametrize("runs", [slot_records._MAX_RUNS, slot_records._MAX_RUNS + 1])
def test_namespaces_with_many_changes_of_part_sizes_are_not_recorded(runs: int) -> None:
    sizes = tuple(4096 if group % 2 else 8192 for group in range(runs))
    server, other = Server(), namespace(1)
    server.store(namespace(part_bytes=sizes), [key(b"a", runs - 1)])
    server.store(other, [key(b"b")])
    expected = [namespace().id, other.id] if runs == slot_records._MAX_RUNS else [other.id]
    assert [name for name, _ in server.after_restart()] == expected


def test_a_namespace_with_many_groups_of_one_size_is_recorded() -> None:
    server, spec = Server(), namespace(part_bytes=(4096,) * 256)
    server.store(spec, [key(b"a", 255)])
    (block,) = server.restart()[1].blocks
    assert block.namespace_index.spec == spec


def test_a_tenant_gets_at_most_as_many_namespaces_as_are_then_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenant with many namespaces leaves room for the namespaces of others."""
    monkeypatch.setattr(slot_records, "MAX_NAMESPACES", 8)
    server = Server()
    for number in range(8):
        server.store(namespace(number), [key(b"a")])
    assert len(server.after_restart()) == 4
    for number in range(8):
        server.store(namespace(number, tenant=1), [key(b"a")])
    assert len(server.after_restart()) == 6
    again, _ = server.restart()
    again.store(namespace(8), [key(b"a")])
    again.store(namespace(0, tenant=2), [key(b"a")])
    found = again.after_restart()
    assert len(found) == 7, "a restart counts the namespaces of each tenant"
    assert namespace(0, tenant=2).id in [name for name, _ in found]


def test_a_namespace_without_a_place_gets_one_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_records, "MAX_NAMESPACES", 1)
    server, first, second = Server(), namespace(), namespace(1)
    server.store(first, [key(b"a")])
    server.store(second, [key(b"b")])
    assert server.after_restart() == [(first.id, key(b"a"))]
    server.core.reset(server.open(first))
    server.store(second, [key(b"c")])
    assert server.after_restart() == [(second.id, key(b"c"))]


def test_a_reused_place_has_another_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """A leased block from before a reset keeps its record. It is not of the next namespace."""
    monkeypatch.setattr(slot_records, "MAX_NAMESPACES", 1)
    server, first, second = Server(), namespace(), namespace(1)
    server.store(first, [key(b"a")])
    session = server.open(first)
    lease = run_to_end(server.core.lookup(session, [key(b"a")], LookupSpec(lease_seconds=60), now=NOW)).lease
    assert lease is not None
    before = server.number_of(first)
    server.core.reset(session)
    server.store(second, [key(b"b")])
    assert server.number_of(second) != before
    assert slot_records._INDEX_MASK & (server.number_of(second)) == slot_records._INDEX_MASK & (before)
    assert server.after_restart() == [(second.id, key(b"b"))]
    again, _ = server.restart()
    assert again.after_restart() == [(second.id, key(b"b"))]


def test_generations_continue_after_a_restart_and_begin_again_at_their_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_records, "MAX_NAMESPACES", 1)
    monkeypatch.setattr(slot_records, "_MAX_GENERATION", 3)
    server, spec, numbers = Server(), namespace(), []
    for _ in range(4):
        server.store(spec, [key(b"a")])
        numbers.append(server.number_of(spec) >> slot_records._INDEX_BITS)
        server, _ = server.restart()
        server.core.reset(server.open(spec))
    assert numbers == [1, 2, 3, 1]


def test_many_namespaces_are_recovered() -> None:
    server = Server(extents=24)
    specs = [namespace(number, tenant=number % 7, part_bytes=(4096, 8192)) for number in range(300)]
    for number, spec in enumerate(specs):
        server.store(spec, [key(b"%d" % number)])
    again, recovered = server.restart()
    assert [block.name for block in recovered.blocks] == [(spec.id, key(b"%d" % n)) for n, spec in enumerate(specs)]
    assert recovered.lost == 0
    assert all(block.namespace_index.spec == spec for block, spec in zip(recovered.blocks, specs, strict=True))
    assert again.after_restart() == [block.name for block in recovered.blocks]


def test_namespaces_without_blocks_are_forgotten() -> None:
    server, spec = Server(), namespace()
    (slot,) = server.store(spec, [key(b"a")])
    server.memory[server.state_of(slot)] = slot_records._FREE[0]
    again, recovered = server.restart()
    assert recovered.blocks == []
    assert not again.records._numbers


def test_records_of_another_region_are_refused() -> None:
    server = Server(extents=2)
    with pytest.raises(RecordsError, match="belong to a region"):
        SlotRecords(memoryview(server.memory), 3 * EXTENT, EXTENT).check()
    with pytest.raises(RecordsError, match="belong to a region"):
        SlotRecords(memoryview(server.memory), 2 * EXTENT, 2 * EXTENT).check()


def test_records_of_another_layout_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server()
    monkeypatch.setattr(slot_records, "LAYOUT", slot_records.LAYOUT + 1)
    with pytest.raises(RecordsError, match="another layout"):
        server.records.check()


def test_memory_without_records_is_refused() -> None:
    memory = bytearray(SlotRecords.size_bytes(EXTENT, EXTENT))
    with pytest.raises(RecordsError, match="another layout"):
        SlotRecords(memoryview(memory), EXTENT, EXTENT).check()


@pytest.mark.parametrize("place", range(slot_records._HEADER.size))
def test_a_damaged_header_is_refused(place: int) -> None:
    server = Server()
    server.memory[place] ^= 1
    with pytest.raises(RecordsError):
        server.records.check()


@pytest.mark.parametrize("place", range(2 * slot_records._CLASS.size))
def test_a_damaged_slot_size_is_refused(place: int) -> None:
    """The second extent has no records."""
    server = Server()
    server.store(namespace(), [key(b"a")])
    server.memory[slot_records._PAGE + place] ^= 4
    with pytest.raises(RecordsError, match=f"extent {place // slot_records._CLASS.size} is damaged"):
        server.records.check()


def test_a_slot_size_larger_than_the_extent_is_refused() -> None:
    server = Server()
    pages = 2 * EXTENT // 4096
    slot_records._CLASS.pack_into(server.memory, slot_records._PAGE, pages, ~pages & 0xFFFFFFFF)
    with pytest.raises(RecordsError, match="extent 0 is damaged"):
        server.records.check()


def test_records_are_refused_while_a_client_is_not_kept() -> None:
    server = Server()
    server.store(namespace(), [key(b"a")])
    server.records.count_unkept(1)
    server.records.count_unkept(1)
    server.records.count_unkept(-1)
    with pytest.raises(RecordsError, match="could not be kept"):
        server.restart()
    server.records.count_unkept(-1)
    assert len(server.after_restart()) == 1


def test_no_records_begin_without_memory() -> None:
    with pytest.raises(RecordsError, match="memory is short"):
        Server(back=lambda _, __: False)


def test_records_that_lack_an_extent_are_refused() -> None:
    """They do not have the grants of this extent. If it is divided again, it may have records."""
    server = Server()
    is_short, server.records._back = [True], lambda _, __: not is_short[0]
    small, large = namespace(), namespace(1, part_bytes=(8192,))
    server.store(small, [key(b"a")])
    is_short[0] = False
    server.store(large, [key(b"b")])
    with pytest.raises(RecordsError, match="memory was short"):
        server.restart()
    server.core.reset(server.open(small))
    server.store(small, [key(b"c")])
    assert set(server.after_restart()) == {(large.id, key(b"b")), (small.id, key(b"c"))}


def test_records_are_refused_after_several_recoveries_that_have_not_ended() -> None:
    server = Server()
    server.store(namespace(), [key(b"a")])
    for _ in range(slot_records.MAX_ATTEMPTS - 1):
        server.records.count_recovery()
    assert len(server.after_restart()) == 1
    server.records.count_recovery()
    with pytest.raises(RecordsError, match="recoveries have failed"):
        server.restart()
    server.records.count_recovery(has_ended=True)
    assert len(server.after_restart()) == 1


@pytest.mark.parametrize("rank", range(3))
def test_a_block_with_a_torn_part_is_lost_with_all_its_parts(rank: int) -> None:
    server, spec = Server(), namespace(world_size=3)
    server.store(spec, [key(b"a"), key(b"b")], range(3))
    torn = server.core._cpu_tier.blocks_of(spec.id)[key(b"a")].slots[rank]
    assert torn is not None
    server.memory[server.record_of(torn) + 10] ^= 1
    again, recovered = server.restart()
    assert [block.key for block in recovered.blocks] == [key(b"b")]
    assert recovered.lost
    assert again.core._cpu_tier.memory.used_bytes() == 3 * 4096
    again.store(spec, [key(b"a")], range(3))
    assert [name for _, name in again.after_restart()] == [key(b"b"), key(b"a")]


def test_parts_of_two_stores_are_no_block() -> None:
    """A part that is older than the others is of an earlier block with this key."""
    server, spec = Server(), namespace(world_size=2)
    server.store(spec, [key(b"a")], range(2))
    first = bytes(server.memory)
    (block,) = server.core._cpu_tier.blocks_of(spec.id).values()
    server.core.remove_damaged([block])
    server.store(spec, [key(b"x")], range(2))
    server.core.remove_damaged(server.core._cpu_tier.blocks_of(spec.id).values())
    server.store(spec, [key(b"a")], range(2))
    (block,) = server.core._cpu_tier.blocks_of(spec.id).values()
    at = server.record_of(block.slots[0] or 0)
    server.memory[at : at + 104] = first[at : at + 104]
    assert server.after_restart() == []


def test_a_flipped_bit_brings_no_freed_block_back() -> None:
    server, spec = Server(), namespace()
    (slot,) = server.store(spec, [key(b"a")])
    server.core.reset(server.open(spec))
    server.store(spec, [key(b"b"), key(b"c")])
    gone = server.core._cpu_tier.blocks_of(spec.id)[key(b"c")]
    (slot,) = [slot for slot in gone.slots if slot is not None]
    server.core.remove_damaged([gone])
    for bit in range(8):
        server.memory[server.state_of(slot)] ^= 1 << bit
        assert [name for _, name in server.after_restart()] == [key(b"b")]
        server.memory[server.state_of(slot)] ^= 1 << bit


def test_recovered_blocks_count_as_used_at_the_restart() -> None:
    """An eviction of blocks that are unused for long keeps them."""
    server, spec = Server(), namespace()
    server.store(spec, [key(b"a")])
    again, _ = server.restart()
    eviction = again.core.evict(EvictionRequest(tiers=[0], unused_since=NOW - 1))
    run_to_end(eviction.run())
    assert len(again.core._cpu_tier) == 1


def test_a_damaged_namespace_loses_only_its_blocks() -> None:
    server, spec, other = Server(), namespace(), namespace(1)
    server.store(spec, [key(b"a")])
    server.store(other, [key(b"b")])
    server.memory[server.namespace_at(spec) + 20] ^= 1
    again, recovered = server.restart()
    assert [block.name for block in recovered.blocks] == [(other.id, key(b"b"))]
    assert recovered.lost == 1
    again.store(spec, [key(b"c")])
    assert again.after_restart() == [(other.id, key(b"b")), (spec.id, key(b"c"))]
