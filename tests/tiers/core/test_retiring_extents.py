"""Retiring extents: few pinned blocks do not keep all extents from the blocks of another size."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import pytest
from core_rig import GRANTED, HIT, NO_ROOM, PENDING, keys
from harness.operations import Steps, run_to_end
from simulation import EXTENT, ModelTier

from kvtier.tiers.core import retiring_pins, waiters
from kvtier.tiers.core.block import Block
from kvtier.tiers.core.call_specs import LookupSpec, StoreSpec
from kvtier.tiers.core.commands import ContinueWork, LoadFromTier, StoreInTier
from kvtier.tiers.core.conversation_actions import BlockAction
from kvtier.tiers.core.holds import Hold
from kvtier.tiers.core.leases import BlockLease
from kvtier.tiers.core.manager import TierManager
from kvtier.tiers.core.retiring_extents import GRACE_SECONDS
from kvtier.tiers.core.settings import TierSettings
from kvtier.tiers.core.victim_selection import SlotReclaimer
from kvtier.tiers.errors import LeaseNotFound, StoreNotFound
from kvtier.tiers.eviction.quotas import Tenant
from kvtier.tiers.secondary_tier import NamespaceId, Outcome
from kvtier.tiers.types import DurableStatus, EngineSession, HandoffDirection, MissReason, NamespaceSpec, StoreId

EXTENTS = 8
SMALL, LARGE = 4096, 16384
SLOTS = EXTENT // SMALL
ALICE, BOB = b"A" * 16, b"B" * 16
NO_TIME = 10_000.0


class Server:
    """A core of eight extents. Alice stores blocks of 4 KiB, Bob those of 16 KiB or other sizes."""

    def __init__(
        self,
        *tenants: Tenant,
        tiers: tuple[ModelTier, ...] = (),
        extents: int = EXTENTS,
        pool_starts: tuple[int, ...] = (0,),
    ) -> None:
        self.now = 0.0
        self.runs_jobs = True
        settings = TierSettings(tenants=tenants, estimates=False, pool_starts=pool_starts)
        self.core = TierManager(EXTENTS * EXTENT, EXTENT, tiers, settings=settings)
        self.core.add_memory(0, extents * EXTENT)
        self.alice, self.bob = self.open(ALICE, SMALL), self.open(BOB, LARGE)

    def open(self, tenant: bytes, part_bytes: int, name: str = "e") -> EngineSession:
        namespace = NamespaceId(tenant + part_bytes.to_bytes(16, "big"))
        spec = NamespaceSpec(namespace, world_size=1, part_bytes=(part_bytes,))
        return self.core.open_session(tenant + name.encode() + namespace, name, None, spec)

    def store(self, session: EngineSession, *numbers: int, retain: float = 0.0) -> bytes:
        spec = StoreSpec(lease_seconds=NO_TIME, retain_for=retain)
        answer = run_to_end(self.core.prepare_store(session, keys(*numbers), spec, now=self.now))
        if answer.store_id is not None:
            run_to_end(self.core.complete_store(session, answer.store_id))
        self.work()
        return answer.statuses

    def fill(self) -> list[list[int]]:
        """Stores a block of Alice in each slot; returns the numbers in each extent."""
        for start in range(0, EXTENTS * SLOTS, SLOTS):
            assert NO_ROOM not in self.store(self.alice, *range(start, start + SLOTS))
        extents: dict[int, list[int]] = {}
        for number, block in enumerate(map(self.block, range(EXTENTS * SLOTS))):
            assert block is not None
            assert block.slots[0] is not None
            extents.setdefault(block.slots[0] // EXTENT, []).append(number)
        return list(extents.values())

    def block(self, number: int) -> Block | None:
        return self.core._cpu_tier.blocks_of(self.alice.namespace.id).get(keys(number)[0])

    def lease(self, session: EngineSession, *numbers: int) -> BlockLease | None:
        spec = LookupSpec(lease_seconds=NO_TIME, prefix=False)
        return run_to_end(self.core.lookup(session, keys(*numbers), spec, now=self.now)).lease

    def publish(self, session: EngineSession, *numbers: int) -> Hold:
        direction = HandoffDirection.PREFILL_TO_DECODE
        hold = run_to_end(
            self.core.publish(
                session,
                "r",
                keys(*numbers),
                range(len(numbers)),
                num_tokens=16,
                direction=direction,
                duration=NO_TIME,
                now=self.now,
            )
        )
        assert isinstance(hold, Hold)
        return hold

    def open_store(self, session: EngineSession, number: int) -> StoreId:
        spec = StoreSpec(lease_seconds=NO_TIME)
        answer = run_to_end(self.core.prepare_store(session, keys(number), spec, now=self.now))
        assert answer.store_id is not None
        return answer.store_id

    def work(self) -> list[object]:
        """Runs all slices of work and jobs; returns the commands."""
        commands: list[object] = []
        while new := self.core.take_commands():
            commands += new
            for command in new:
                if isinstance(command, ContinueWork):
                    self.core.work()
                elif isinstance(command, StoreInTier | LoadFromTier) and self.runs_jobs:
                    self.core.job_finished(command.job_id, [Outcome.DONE] * len(command.blocks))
        return commands

    def wait(self, seconds: float) -> list[object]:
        """Advances the time by seconds, and runs what is due."""
        commands = []
        for _ in range(int(seconds)):
            self.now += 1
            self.core.tick(self.now)
            commands += self.work()
        return commands

    def retiring(self) -> list[int]:
        memory = self.core._cpu_tier.memory
        return [extent.offset for extent in memory.extents_after(None, 0) if extent.next_class]


def pinned(extents: list[list[int]]) -> list[int]:
    """Returns a number of each extent."""
    return [numbers[-1] for numbers in extents]


class Pins:
    """Pins of Alice on blocks, which she renews each second."""

    def __init__(self, server: Server, numbers: list[int]) -> None:
        self.server, self.numbers = server, numbers

    def begin(self) -> None: ...

    def renew(self) -> None: ...


class RenewedLease(Pins):
    lease: BlockLease | None = None

    def begin(self) -> None:
        self.lease = self.server.lease(self.server.alice, *self.numbers)

    def renew(self) -> None:
        assert self.lease is not None
        with contextlib.suppress(LeaseNotFound):
            self.server.core.renew(self.server.alice, self.lease.id, self.server.now + NO_TIME)


class NewLeases(RenewedLease):
    def renew(self) -> None:
        self.begin()


class RenewedHold(Pins):
    hold: Hold | None = None

    def begin(self) -> None:
        self.hold = self.server.publish(self.server.alice, *self.numbers)

    def renew(self) -> None:
        assert self.hold is not None
        assert self.server.core.renew_hold(self.hold.name, self.server.now)


class NewHolds(RenewedHold):
    def renew(self) -> None:
        self.begin()


class NewClaims(RenewedHold):
    """A hold whose blocks are claimed again and again."""

    def renew(self) -> None:
        assert self.hold is not None
        claim = self.server.core.claim(
            self.server.alice,
            self.hold.name,
            first_positions=(),
            request_id="",
            lease_seconds=NO_TIME,
            now=self.server.now,
        )
        run_to_end(claim)


class OpenStores(Pins):
    """A store that is not completed in each extent."""

    stores: Sequence[StoreId] = ()

    def begin(self) -> None:
        for number in self.numbers:
            block = self.server.block(number)
            assert block is not None
            self.server.core._cpu_tier.evict([block])
            self.stores = [*self.stores, self.server.open_store(self.server.alice, 500 + number)]

    def renew(self) -> None:
        for store_id in self.stores:
            with contextlib.suppress(StoreNotFound):
                self.server.core.renew_store(self.server.alice, store_id, self.server.now + NO_TIME)


class HeldParts(Pins):
    """Incomplete blocks, because the other rank stores none, and a hold on them."""

    hold: Hold | None = None

    def begin(self) -> None:
        server = self.server
        spec = NamespaceSpec(NamespaceId(ALICE + b"2" * 16), world_size=2, part_bytes=(SMALL,))
        session = server.core.open_session(b"two", "two", 0, spec)
        for number in self.numbers:
            block = server.block(number)
            assert block is not None
            server.core._cpu_tier.evict([block])
            server.store(session, 500 + number)
        self.hold = server.publish(session, *(500 + number for number in self.numbers))

    def renew(self) -> None:
        assert self.hold is not None
        assert self.server.core.renew_hold(self.hold.name, self.server.now)


@pytest.mark.parametrize("quota", [0, EXTENT], ids=["no-quotas", "quotas"])
@pytest.mark.parametrize("kind", [RenewedLease, NewLeases, RenewedHold, NewHolds, NewClaims, OpenStores, HeldParts])
def test_a_pinned_block_per_extent_keeps_no_tenant_out(kind: type[Pins], quota: int) -> None:
    """After the time for pins, blocks of another size find room, however the pins are made."""
    server = Server(*([Tenant("bob", BOB, {"cpu": quota})] if quota else []))
    pins = kind(server, pinned(server.fill()))
    pins.begin()
    server.work()
    assert server.store(server.bob, 1) == NO_ROOM
    statuses = NO_ROOM
    for _ in range(int(GRACE_SECONDS) + 2):
        server.wait(1)
        pins.renew()
        statuses = server.store(server.bob, 1)
    assert statuses != NO_ROOM
    assert server.lease(server.bob, 1) is not None


def test_an_extent_without_pins_left_goes_to_the_class_that_wants_it() -> None:
    """The end of the last pin wakes a lookup that waits for room. Only it gets the extent."""
    server = Server(tiers=(ModelTier("near", 1 << 20),))
    server.store(server.bob, 1)
    cpu_tier = server.core._cpu_tier
    cpu_tier.evict(list(cpu_tier.all_of(server.bob.namespace.id)))
    extents = server.fill()
    lease = server.lease(server.alice, *pinned(extents))
    assert lease is not None
    spec = LookupSpec(lease_seconds=60, deadline=NO_TIME)
    lookup = Steps(server.core.lookup(server.bob, keys(1), spec, now=0))
    lookup.step()
    server.work()
    lookup.step()  # the lookup was told of the eviction of the other blocks
    server.work()
    assert len(server.retiring()) == 1
    assert lookup.waiter is not None
    assert not lookup.waiter.is_offered
    server.core.release(server.alice, lease.id)
    assert server.store(server.alice, *range(300, 300 + SLOTS)) == GRANTED * SLOTS
    assert not server.retiring()
    assert lookup.waiter.is_offered
    assert lookup.finish().lease is not None


def test_the_blocks_of_a_retiring_extent_are_evicted() -> None:
    """Its readers go on; lookups do not find its blocks, and a store gets other slots for them."""
    server = Server()
    extents = server.fill()
    lease = server.lease(server.alice, *pinned(extents))
    assert lease is not None
    before = {number: server.block(number) for number in range(EXTENTS * SLOTS)}
    server.store(server.bob, 1)
    [offset] = server.retiring()
    [numbers] = [each for each in extents if before[each[0]] and server.block(each[0]) is None]
    kept = before[numbers[-1]]
    assert kept is not None
    assert kept.slots[0] is not None
    assert kept.slots[0] // EXTENT * EXTENT == offset
    assert kept.ready
    assert lease.read([pinned(extents).index(numbers[-1])], 0) == ([kept.slots[0]], [SMALL])
    again = server.lease(server.alice, *numbers)
    assert again is None
    assert server.core.stats().misses_by_reason == {MissReason.EVICTED: SLOTS}
    assert server.store(server.alice, numbers[-1]) != NO_ROOM
    fresh = server.block(numbers[-1])
    assert fresh is not None
    assert fresh.slots[0] is not None
    assert fresh.slots[0] // EXTENT * EXTENT != offset


def test_a_block_is_loaded_again_from_a_tier() -> None:
    """A block that leaves the index with its extent is a hit of the tier below."""
    server = Server(tiers=(ModelTier("near", 1 << 20),))
    extents = server.fill()
    lease = server.lease(server.alice, *pinned(extents))
    server.store(server.bob, 1)
    [numbers] = [each for each in extents if server.block(each[0]) is None]
    assert lease is not None
    again = server.lease(server.alice, numbers[-1])
    assert again is not None
    assert again.statuses() == PENDING
    server.work()
    assert again.statuses() == HIT
    assert again.items != [lease.items[pinned(extents).index(numbers[-1])]]


def test_a_store_in_a_retiring_extent_is_completed() -> None:
    """Its block is durable in the tier below. It leaves the CPU tier with its last pin."""
    server = Server(tiers=(ModelTier("near", 1 << 20),))
    extents = server.fill()
    numbers = pinned(extents)
    block = server.block(numbers[0])
    assert block is not None
    server.core._cpu_tier.evict([block])
    store_id = server.open_store(server.alice, 500)
    server.lease(server.alice, *(number for each in extents[1:] for number in each))
    server.store(server.bob, 1)
    written = server.block(500)
    assert written is not None
    assert [written.slots[0] // EXTENT * EXTENT] == server.retiring()  # type: ignore[operator]
    run_to_end(server.core.complete_store(server.alice, store_id))
    server.work()
    assert not server.retiring()
    assert server.block(500) is None
    assert run_to_end(server.core.flush(server.alice.namespace.id, keys(500))) == bytes([DurableStatus.DURABLE])


def test_an_extent_that_nobody_wants_any_more_stays_with_its_class() -> None:
    server = Server()
    lease = server.lease(server.alice, *pinned(server.fill()))
    assert lease is not None
    server.store(server.bob, 1)
    assert len(server.retiring()) == 1
    server.wait(GRACE_SECONDS + 2)
    assert not server.retiring()
    assert server.core._lookups.leases.is_open(lease)
    assert NO_ROOM not in server.store(server.alice, *range(900, 900 + SLOTS - 1))


def test_an_extent_that_the_class_does_not_use_goes_to_any_class() -> None:
    server = Server()
    extents = server.fill()
    lease = server.lease(server.alice, *pinned(extents))
    assert lease is not None
    server.store(server.bob, 1)
    server.core.release(server.alice, lease.id)
    server.work()
    assert server.core._cpu_tier.memory.extents_per_class(0)[LARGE] == 1
    server.wait(GRACE_SECONDS + 2)
    assert server.core._cpu_tier.memory.extents_per_class(0)[LARGE] == 0


def test_a_tenant_lets_few_extents_retire() -> None:
    """One extent of eight retires at a time for many sizes of a tenant. Another finds a place."""
    server = Server()
    extents = server.fill()
    server.lease(server.alice, *(number for each in extents for number in each[:2]))
    for size in range(2, 10):
        server.store(server.open(BOB, size * SMALL), 1)
    assert len(server.retiring()) == 1
    server.store(server.open(b"C" * 16, LARGE), 1)
    assert len(server.retiring()) == 2


def test_a_tenant_waits_before_it_lets_a_further_extent_retire() -> None:
    """Also if the pins end at once, so that it evicts leased blocks of others at a low rate."""
    server = Server()
    extents = server.fill()
    for size in range(2, 6):
        lease = server.lease(server.alice, *(n for each in extents for n in each if server.block(n)))
        server.store(server.open(BOB, size * SMALL), 1)
        assert lease is not None
        server.core.release(server.alice, lease.id)
        server.work()
    per_class = server.core._cpu_tier.memory.extents_per_class(0)
    assert per_class[SMALL] == EXTENTS - 1


def test_a_tenant_within_its_quota_loses_no_dense_extent() -> None:
    """Another tenant within its quota gets no extent of which more than half is guaranteed."""
    quotas = [Tenant("alice", ALICE, {"cpu": EXTENTS * EXTENT // 2}), Tenant("bob", BOB, {"cpu": EXTENT})]
    server = Server(*quotas, extents=EXTENTS // 2)  # the rest is not backed yet
    for start in range(0, EXTENTS // 2 * SLOTS, SLOTS):
        server.store(server.alice, *range(start, start + SLOTS))
    assert server.store(server.bob, 1) == NO_ROOM
    assert not server.retiring()
    server.core._cpu_tier.evict([b for n in range(SLOTS // 2 + 1) if (b := server.block(n))])
    server.wait(1)
    server.store(server.bob, 1)
    assert server.store(server.bob, 1) != NO_ROOM


def test_retained_blocks_keep_an_extent_only_from_tenants_without_quotas() -> None:
    for quota in (0, EXTENT):
        server = Server(*([Tenant("bob", BOB, {"cpu": quota})] if quota else []))
        extents = server.fill()
        spec = LookupSpec(prefix=False, retain_for=NO_TIME)
        run_to_end(server.core.prefetch(server.alice, keys(*pinned(extents)), spec, now=0))
        server.store(server.bob, 1)
        statuses = server.store(server.bob, 1)
        assert (statuses == NO_ROOM) is not bool(quota)


@pytest.mark.parametrize("how", ["store", "lookup", "conversation"])
def test_a_block_in_a_retiring_extent_is_not_retained(how: str) -> None:
    """It is being written, and leaves when its write has ended. The caller is told."""
    server = Server()
    pins = OpenStores(server, pinned(server.fill()))
    pins.begin()
    server.store(server.bob, 1)
    [extent] = server.retiring()
    [number] = [
        500 + number
        for number in pins.numbers
        if (block := server.block(500 + number)) is not None and (block.slots[0] or 0) // EXTENT * EXTENT == extent
    ]
    if how == "store":
        spec = StoreSpec(lease_seconds=NO_TIME, retain_for=NO_TIME)
        answer = run_to_end(server.core.prepare_store(server.alice, keys(number), spec, now=server.now))
        assert answer.not_retained == 1
    elif how == "lookup":
        search = LookupSpec(lease_seconds=NO_TIME, prefix=False, retain_for=NO_TIME)
        assert run_to_end(server.core.lookup(server.alice, keys(number), search, now=server.now)).not_retained == 1
    else:
        targets = [(server.alice.namespace.id, keys(number))]
        counts = run_to_end(server.core.act_on_keys(BlockAction.RETAIN, targets, NO_TIME))
        assert (counts.changed, counts.kept) == (0, 1)
    block = server.block(number)
    assert block is not None
    assert not block.retained
    for store_id in pins.stores:
        run_to_end(server.core.complete_store(server.alice, store_id))
    server.wait(1)
    assert server.block(number) is None


def test_a_search_that_finds_no_extent_is_repeated_after_a_tick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused stores of one tenant cost one search per second."""
    server = Server()
    for number in pinned(server.fill()):
        server.store(server.alice, number, retain=NO_TIME)
    searches: list[object] = []
    search = SlotReclaimer.extent_to_retire
    monkeypatch.setattr(
        SlotReclaimer,
        "extent_to_retire",
        lambda *arguments: searches.append(1) or search(*arguments),  # type: ignore[func-returns-value]
    )
    for _ in range(10):
        assert server.store(server.bob, 1) == NO_ROOM
    assert len(searches) == 1
    server.wait(1)
    server.store(server.bob, 1)
    assert len(searches) == 2


def test_a_search_for_pins_runs_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server()
    numbers = pinned(server.fill())
    leases = [server.lease(server.alice, *numbers) for _ in range(10)]
    monkeypatch.setattr(retiring_pins, "SLICE", 1)
    commands: list[object] = []
    assert set(leases) <= set(server.core.leases())
    for _ in range(int(GRACE_SECONDS) + 1):
        server.store(server.bob, 1)
        commands += server.wait(1)
    assert set(leases).isdisjoint(server.core.leases())
    assert sum(isinstance(command, ContinueWork) for command in commands) >= 9


def test_a_hold_with_a_repeated_key_ends_in_a_retiring_extent() -> None:
    """Its block is incomplete and pinned twice, and stays in the index until the hold has ended."""
    core = TierManager(EXTENT, EXTENT, ())
    core.add_memory(0, EXTENT)
    two_ranks = NamespaceSpec(NamespaceId(ALICE + bytes(16)), world_size=2, part_bytes=(SMALL,))
    large = NamespaceSpec(NamespaceId(BOB + bytes(16)), world_size=1, part_bytes=(LARGE,))
    first, other = core.open_session(b"a", "a", 0, two_ranks), core.open_session(b"b", "b", None, large)
    spec = StoreSpec(lease_seconds=NO_TIME)
    hold = run_to_end(
        core.publish(
            first,
            "r",
            keys(0) * 2,
            [0, 1],
            num_tokens=2,
            direction=HandoffDirection.PREFILL_TO_DECODE,
            duration=60,
            now=0,
        )
    )
    store = run_to_end(core.prepare_store(first, keys(0), spec, now=0))
    run_to_end(core.complete_store(first, store.store_id))
    assert run_to_end(core.prepare_store(other, keys(1), spec, now=0)).statuses == NO_ROOM
    for _ in range(5):
        core.take_commands()
        core.work()
    core.release_hold(hold.name, 1)
    assert run_to_end(core.prepare_store(other, keys(1), spec, now=1)).statuses == GRANTED
    core.tick(2)


def test_a_hold_keeps_a_block_until_a_slice_has_settled_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the block is evicted first, and a claim waits for it until its timeout."""
    core = TierManager(EXTENT, EXTENT, ())
    core.add_memory(0, EXTENT)
    session = core.open_session(b"a", "a", 0, NamespaceSpec(NamespaceId(ALICE + bytes(16)), 1, (SMALL,)))
    names = keys(0, 1, 2)
    hold = run_to_end(
        core.publish(
            session,
            "r",
            names,
            [0, 1, 2],
            num_tokens=3,
            direction=HandoffDirection.PREFILL_TO_DECODE,
            duration=60,
            now=0,
        )
    )
    assert isinstance(hold, Hold)
    monkeypatch.setattr(waiters, "SETTLE_SLICE", 1)
    store = run_to_end(core.prepare_store(session, names, StoreSpec(lease_seconds=NO_TIME), now=0))
    assert store.store_id is not None
    run_to_end(core.complete_store(session, store.store_id))
    blocks = set(filter(None, hold.items))
    late = set(hold.awaited)
    assert late, "the first slice has settled one block"
    assert all(block.ready for block in late)
    core._handoffs.release_blocks(hold, blocks)
    assert set(filter(None, hold.items)) == late
    core.take_commands()
    for _ in range(10):
        core.work()
    assert not hold.awaited
    assert not hold.pending
    core._handoffs.release_blocks(hold, blocks)
    assert not any(hold.items)


def test_leases_in_an_extent_that_retires_anew_have_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search for pins is in the middle when the extent stays with its class and retires again."""
    server = Server()
    numbers = pinned(server.fill())
    leases = [server.lease(server.alice, *numbers) for _ in range(10)]
    monkeypatch.setattr(retiring_pins, "SLICE", 1)
    core, pins = server.core, server.core._retiring_pins
    for second in range(1, int(GRACE_SECONDS) + 2):
        server.store(server.bob, 1)
        core.tick(float(second))
        if pins.runs:
            break
        while any(isinstance(command, ContinueWork) for command in core.take_commands()):
            core.work()
    assert pins.runs
    retiring = core._cpu_tier.retiring
    for retirement in retiring._all.values():
        retirement.begun_at = retiring._now
    is_open = core._lookups.leases.is_open
    left = [lease for lease in leases if lease is not None and is_open(lease)]
    assert left
    while pins.runs:
        core.work()
    assert all(map(is_open, left))


def test_an_extent_of_the_tenants_own_pool_retires() -> None:
    """Bob pins blocks in all extents of the pool. No extent of the common pool retires."""
    half = EXTENTS // 2
    server = Server(Tenant("bob", BOB, {"cpu": half * EXTENT}, {}, has_pool=True), pool_starts=(0, half * EXTENT))
    small, numbers = server.open(BOB, SMALL), list(range(half * SLOTS))
    for session in (server.alice, small):
        for start in range(0, len(numbers), SLOTS):
            assert NO_ROOM not in server.store(session, *numbers[start : start + SLOTS])
    assert server.lease(small, *numbers) is not None
    for _ in range(int(3 * GRACE_SECONDS)):
        if NO_ROOM not in server.store(server.bob, 9000):
            break
        server.wait(1)
    else:
        pytest.fail("Bob gets no room")
    assert all(map(server.block, numbers))
    memory = server.core._cpu_tier.memory
    assert {extent.slot_bytes for extent in memory.extents_after(None, 0)} == {SMALL}
    assert {extent.slot_bytes for extent in memory.extents_after(None, 1)} >= {SMALL, LARGE}
