"""Lookups that wait for room in the CPU tier: order, pins, and the bound of leases."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
from core_rig import HIT, MISS, Rig, keys, ready_blocks
from harness.operations import Steps, run_to_end
from simulation import EXTENT, ModelTier

from kvtier.tiers.core.bulk_eviction import EvictionRequest
from kvtier.tiers.core.call_specs import LookupSpec, StoreSpec
from kvtier.tiers.core.commands import RoomOffered, Waiter
from kvtier.tiers.core.conversation_actions import BlockAction
from kvtier.tiers.core.manager import TierManager
from kvtier.tiers.core.room_queue import MAX_WAITERS
from kvtier.tiers.core.running_lookup import LookupAnswer
from kvtier.tiers.core.settings import TierSettings
from kvtier.tiers.errors import InvalidItem
from kvtier.tiers.eviction.quotas import Tenant
from kvtier.tiers.secondary_tier import NamespaceId, Outcome
from kvtier.tiers.types import EngineSession, NamespaceSpec, tenant_of

SLOTS, FAR = EXTENT // 4096, 1e9
ALICE, BOB = b"A" * 16, b"B" * 16


def spec_of(tenant: bytes) -> NamespaceSpec:
    return NamespaceSpec(NamespaceId(tenant + b"n" * 16), world_size=1, part_bytes=(4096, 16384))


@dataclass
class Crowd:
    """Clients of one core, whose blocks are on the disk and not in the CPU tier."""

    part: float = 1.0
    tenants: list[Tenant] = field(default_factory=list)
    retained_part: float = 0.5
    extents: int = 1

    def __post_init__(self) -> None:
        settings = TierSettings(
            eviction={"cpu": "lru"},
            leased_part=self.part,
            tenants=self.tenants,
            retained_part=self.retained_part,
        )
        self.core = TierManager(self.extents * EXTENT, EXTENT, [ModelTier("disk", 1 << 30)], settings=settings)
        self.core.add_memory(0, EXTENT)
        self.room = self.core._lookups.room
        self.now = 0.0
        self.offered: list[object] = []

    def open(self, name: str, tenant: bytes = ALICE) -> EngineSession:
        return self.core.open_session(name.encode(), name, None, spec_of(tenant))

    def run(self) -> None:
        for command in self.core.take_commands():
            if isinstance(command, RoomOffered):
                self.offered.append(command.waiter)
            elif hasattr(command, "blocks"):
                self.core.job_finished(command.job_id, [Outcome.DONE] * len(command.blocks))
                self.run()

    def put_on_disk(self, session: EngineSession, names: list[bytes]) -> None:
        for name in names:
            answer = run_to_end(self.core.prepare_store(session, [name], StoreSpec(lease_seconds=60), now=0))
            assert answer.store_id is not None
            run_to_end(self.core.complete_store(session, answer.store_id))
            self.run()

    def begin(self, session: EngineSession, names: list[bytes], *, may_wait: bool = True) -> Steps[LookupAnswer]:
        deadline = FAR if may_wait else 0.0
        seconds = 60 - self.now  # at the end of a turmoil all leases expire
        operation = self.core.lookup(
            session, names, LookupSpec(lease_seconds=seconds, deadline=deadline), now=self.now, slice_keys=1000
        )
        return Steps(operation, "lookup")

    def step(self, lookup: Steps[LookupAnswer]) -> bool:
        """Steps a lookup until it waits or ends; returns whether it waits."""
        more = lookup.step(self.now)
        while more and (lookup.waiter is None or lookup.waiter.is_offered):
            more = lookup.step(self.now)
        self.run()
        return more

    def end(self, lookup: Steps[LookupAnswer]) -> None:
        """The client gives its lease back, after its answer or in the middle."""
        lease = lookup.state.lease
        lookup.operation.close()
        if lease is not None and self.core._lookups.leases.is_open(lease):
            self.core.release(lookup.state.session, lease.id)
        self.run()


def full(crowd: Crowd) -> tuple[Steps[LookupAnswer], EngineSession]:
    """A lookup that has pinned all slots."""
    session = crowd.open("first")
    names = keys(*range(SLOTS))
    crowd.put_on_disk(session, names)
    lookup = crowd.begin(session, names)
    assert not crowd.step(lookup)
    return lookup, session


def waiting(crowd: Crowd, number: int, *, tenant: bytes = ALICE, blocks: int = 2) -> Steps[LookupAnswer]:
    """A lookup of blocks that only the disk has, which waits for room."""
    session = crowd.open(f"{tenant[:1].decode()}{number}", tenant)
    lookup = crowd.begin(session, keys(*range(500 + 10 * number, 500 + 10 * number + blocks)))
    assert crowd.step(lookup)
    assert lookup.waiter is not None
    return lookup


def crowd_of(
    waiters: list[bytes], *, blocks: int = 2, **options: object
) -> tuple[Crowd, Steps[LookupAnswer], list[Steps[LookupAnswer]]]:
    crowd = Crowd(**options)  # type: ignore[arg-type]
    for number, tenant in enumerate(waiters):
        session = crowd.open(f"writer{number}", tenant)
        crowd.put_on_disk(session, keys(*range(500 + 10 * number, 500 + 10 * number + blocks)))
    holder, _ = full(crowd)
    lookups = [waiting(crowd, n, tenant=tenant, blocks=blocks) for n, tenant in enumerate(waiters)]
    crowd.offered.clear()
    return crowd, holder, lookups


@pytest.mark.parametrize("how", ["memory", "evict", "delete", "release", "demote", "reset"])
def test_new_room_is_offered_at_once(how: str) -> None:
    """Retained blocks fill the tier. The lookup does not wait for the next tick."""
    crowd = Crowd(retained_part=1.0, extents=2 if how == "memory" else 1)
    session = crowd.open("writer")
    crowd.put_on_disk(session, keys(500, 501))
    other = crowd.open("other", BOB)
    names = keys(*range(SLOTS))
    crowd.put_on_disk(other, names)
    targets = [(other.namespace.id, names)]
    loads = crowd.begin(other, names)
    assert not crowd.step(loads)
    crowd.end(loads)
    assert run_to_end(crowd.core.act_on_keys(BlockAction.RETAIN, targets, 1000.0)).kept == 0
    lookup = waiting(crowd, 0)
    crowd.offered.clear()
    if how == "memory":
        crowd.core.add_memory(EXTENT, EXTENT)
    elif how == "evict":
        run_to_end(crowd.core.evict(EvictionRequest(tiers=[0], retained=True)).run())
    elif how == "reset":
        crowd.core.reset(other)
    else:
        run_to_end(crowd.core.act_on_keys(BlockAction[how.upper()], targets))
    crowd.run()
    assert crowd.offered == [lookup.waiter]
    assert not crowd.step(lookup)
    assert lookup.answer.statuses() == HIT * 2


def test_waiters_come_first_come_first_served() -> None:
    """Only the head is offered room; each end of a wait offers it to the next."""
    crowd, holder, lookups = crowd_of([ALICE] * 4)
    crowd.end(holder)
    for lookup in lookups:
        assert crowd.offered.pop() is lookup.waiter
        assert not crowd.offered, "no thundering herd"
        assert not crowd.step(lookup)
        assert lookup.answer.lease is not None
    assert not len(crowd.room)


def test_tenants_take_turns() -> None:
    """A tenant with many waiting lookups delays another tenant by one of them."""
    crowd, holder, lookups = crowd_of([ALICE, ALICE, ALICE, ALICE, BOB])
    crowd.end(holder)
    order = []
    for _ in lookups:
        waiter = crowd.offered.pop()
        crowd.offered.clear()
        lookup = next(each for each in lookups if each.waiter is waiter)
        order.append(lookups.index(lookup))
        crowd.offered.clear()
        assert not crowd.step(lookup)
        crowd.end(lookup)
    assert order.index(4) <= 1


@pytest.mark.parametrize("number", [1, 2, 3])
def test_only_the_head_gives_up_its_turn(number: int) -> None:
    """A waiter behind the head changes nothing if it yields."""
    crowd, holder, lookups = crowd_of([ALICE, BOB, ALICE, BOB])
    waiters = [lookup.waiter for lookup in lookups if lookup.waiter is not None]
    crowd.room.yield_turn(waiters[number])
    crowd.run()
    head = [crowd.room.may_take(waiter.namespace, waiter, may_wait=True) for waiter in waiters]
    assert head == [True, False, False, False]
    assert not crowd.offered
    crowd.end(holder)


def test_a_head_that_gives_up_its_turn_stays_the_first_one_of_its_tenant() -> None:
    """Else another lookup of the tenant would take a part, and both would lack the rest."""
    crowd, _, [first, second, _, *others] = crowd_of([ALICE, ALICE, ALICE, BOB, BOB])
    assert second.waiter is not None
    crowd.end(first)
    crowd.end(others[0])
    assert crowd.room.may_take(second.waiter.namespace, second.waiter, may_wait=True)
    crowd.room.yield_turn(second.waiter)
    assert not crowd.room.may_take(second.waiter.namespace, second.waiter, may_wait=True)
    crowd.end(others[1])
    assert crowd.room.may_take(second.waiter.namespace, second.waiter, may_wait=True)


def test_a_lookup_without_a_wait_takes_no_room_of_a_waiter() -> None:
    """Its blocks are misses, and the room goes to the lookup that waits."""
    crowd, holder, [lookup] = crowd_of([ALICE])
    crowd.end(holder)
    late = crowd.open("late")
    crowd.put_on_disk(late, [])
    hasty = crowd.begin(late, keys(500, 501), may_wait=False)
    assert not crowd.step(hasty)
    assert hasty.answer.statuses() == MISS * 2
    assert not crowd.step(lookup)
    assert lookup.answer.statuses()[:1] != MISS


def test_a_lookup_without_a_wait_passes_the_line_of_other_tenants() -> None:
    """It takes room at once, although a lookup of another tenant has the turn."""
    crowd, holder, [lookup] = crowd_of([ALICE])
    bob = crowd.open("bob", BOB)
    crowd.end(holder)
    crowd.put_on_disk(bob, keys(700, 701))
    crowd.put_on_disk(bob, keys(*range(1000, 1000 + SLOTS)))  # evicts the first two
    hasty = crowd.begin(bob, keys(700, 701), may_wait=False)
    assert not crowd.step(hasty)
    assert hasty.answer.statuses() == HIT * 2
    assert not crowd.step(lookup)
    assert lookup.answer.statuses() == HIT * 2


def test_the_head_keeps_what_it_gets() -> None:
    """A lookup that needs much room gets it bit by bit, although others look up too."""
    crowd, holder, [lookup] = crowd_of([ALICE], blocks=8)
    assert holder.state.lease is not None
    # The holder exchanges its lease for one on fewer blocks.
    smaller = crowd.begin(holder.state.session, keys(*range(SLOTS - 4)))
    assert not crowd.step(smaller)
    crowd.end(holder)
    assert crowd.step(lookup)
    assert lookup.state.lacks_room
    assert lookup.state.position == 4
    crowd.end(smaller)
    assert not crowd.step(lookup)
    answer = lookup.answer
    assert answer.lease is not None
    assert answer.lease.hits == 8
    crowd.run()
    assert answer.statuses() == HIT * 8


def test_after_the_wait_the_rest_is_a_miss() -> None:
    """A lookup that may wait no longer answers with what it has."""
    crowd, holder, [lookup] = crowd_of([ALICE], blocks=4)
    crowd.now = FAR
    assert not crowd.step(lookup)
    assert lookup.answer.statuses() == MISS * 4
    crowd.end(lookup)
    crowd.end(holder)
    assert not crowd.core.leases()


@pytest.mark.parametrize("tenants", [[ALICE, BOB], [ALICE, BOB, BOB]])
def test_after_the_wait_a_lookup_takes_room_before_the_head_of_another_tenant(tenants: list[bytes]) -> None:
    """Else one waiting lookup could keep all others from the disk. Its own tenant comes first."""
    crowd, holder, [_, *lookups] = crowd_of(tenants)
    crowd.end(holder)
    crowd.now = FAR
    last = lookups[-1]
    assert not crowd.step(last)
    assert last.answer.statuses() == (HIT if len(lookups) == 1 else MISS) * 2


@pytest.mark.parametrize("number", range(3))
def test_a_waiter_that_leaves_passes_its_turn_on(number: int) -> None:
    """A cancelled lookup leaves the queue wherever it was, and leaks neither pins nor its place."""
    crowd, holder, lookups = crowd_of([ALICE] * 3)
    crowd.end(lookups.pop(number))
    crowd.end(holder)
    for lookup in lookups:
        assert lookup.waiter in crowd.offered
        assert not crowd.step(lookup)
        crowd.end(lookup)
    assert not len(crowd.room)
    assert not crowd.core.leases()
    assert not crowd.core._lookups.leases.leased_bytes


def test_a_tenant_has_a_limit_of_waiters() -> None:
    """Further lookups do not wait, and another tenant can."""
    crowd = Crowd()
    alice, bob = crowd.open("a"), crowd.open("b", BOB)
    waiters = [crowd.room.enter(alice, 0.0, FAR) for _ in range(MAX_WAITERS)]
    assert None not in waiters
    assert crowd.room.enter(alice, 0.0, FAR) is None
    assert crowd.room.enter(bob, 0.0, FAR) is not None


def test_leases_of_a_tenant_pin_a_part() -> None:
    """Blocks beyond the part are misses, also in the CPU tier; other tenants have room."""
    crowd = Crowd(part=0.5)
    session = crowd.open("first")
    crowd.put_on_disk(session, keys(*range(SLOTS)))
    lookup = crowd.begin(session, keys(*range(SLOTS)), may_wait=False)
    assert not crowd.step(lookup)
    assert lookup.answer.statuses() == HIT * (SLOTS // 2) + MISS * (SLOTS - SLOTS // 2)
    again = crowd.begin(session, keys(*range(SLOTS // 2)), may_wait=False)
    assert not crowd.step(again)
    assert again.answer.statuses() == HIT * (SLOTS // 2), "a block counts once"
    other = crowd.open("other", BOB)
    crowd.put_on_disk(other, keys(*range(4)))
    assert crowd.step(crowd.begin(other, keys(*range(4)))) is False
    crowd.end(lookup)
    crowd.end(again)
    assert len(crowd.core._lookups.leases.leased_bytes) == 1


@pytest.mark.parametrize("part", [0.5, 1.0])
def test_a_lookup_that_can_never_fit_does_not_wait(part: float) -> None:
    """A prefix of more than the memory, or than leases may pin, gets at once what fits."""
    crowd = Crowd(part=part)
    session = crowd.open("first")
    names = keys(*range(2 * SLOTS))
    crowd.put_on_disk(session, names)
    lookup = crowd.begin(session, names)
    assert not crowd.step(lookup)
    assert lookup.answer.lease is not None
    assert int(part * SLOTS) - 8 <= lookup.answer.lease.hits <= int(part * SLOTS)  # type: ignore[union-attr]


def test_a_tenant_at_its_bound_does_not_hold_the_line() -> None:
    """Its waiting lookup yields to another tenant's, which has room."""
    crowd = Crowd(part=0.5)
    alice, bob = crowd.open("a"), crowd.open("b", BOB)
    crowd.put_on_disk(bob, keys(*range(4)))
    crowd.put_on_disk(alice, keys(*range(SLOTS)))
    held = crowd.begin(alice, keys(*range(SLOTS // 2)))
    assert not crowd.step(held)
    lookup = crowd.begin(alice, keys(*range(SLOTS // 2, SLOTS // 2 + 4)))
    assert crowd.step(lookup)
    assert lookup.state.is_over_budget
    theirs = crowd.begin(bob, keys(*range(4)))
    if crowd.step(theirs):
        crowd.core.tick(1.0)
        crowd.run()
        assert crowd.step(lookup)
        assert theirs.waiter in crowd.offered
        assert not crowd.step(theirs)
    assert theirs.answer.lease is not None


def test_lookups_after_a_withdrawal() -> None:
    """A lookup that its client has withdrawn is refused, and its lease ends."""
    rig = Rig()
    rig.session.withdraw(7)
    with pytest.raises(InvalidItem):
        run_to_end(rig.core.lookup(rig.session, keys(1), LookupSpec(lease_seconds=60, grant_id=7), now=0))
    with pytest.raises(InvalidItem):
        run_to_end(rig.core.prepare_store(rig.session, keys(1), StoreSpec(lease_seconds=60, grant_id=7), now=0))


class Turmoil:
    """Clients of three tenants that look up, read, release, cancel and wait in a random order."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.crowd = Crowd(part=self.rng.choice((0.3, 0.5, 1.0)))
        self.tenants = (ALICE, BOB, b"C" * 16)
        self.sessions = [self.crowd.open(f"{n}", self.rng.choice(self.tenants)) for n in range(12)]
        self.holders: list[Steps[LookupAnswer]] = []
        self.waiting: list[Steps[LookupAnswer]] = []
        self.overtaken: dict[Steps[LookupAnswer], int] = {}
        """Per waiting lookup the number of lookups of its session that began later and got room."""
        for tenant in self.tenants:
            self.crowd.put_on_disk(self.crowd.open(f"writer {tenant!r}", tenant), keys(*range(3 * SLOTS)))

    def look_up(self) -> None:
        start = self.rng.randrange(3 * SLOTS - 12)
        names = keys(*range(start, start + self.rng.randrange(1, 12)))
        self._step(self.crowd.begin(self.rng.choice(self.sessions), names, may_wait=self.rng.random() < 0.8))

    def _step(self, lookup: Steps[LookupAnswer]) -> None:
        before, waiter = lookup.state.position, lookup.waiter
        is_waiting = self.crowd.step(lookup)
        if is_waiting and waiter is None:
            self.waiting.append(lookup)
            self.overtaken[lookup] = 0
        if is_waiting:
            return
        if waiter is not None:
            self._served(lookup, waiter)
        assert lookup.state.position >= before
        if lookup.state.lease is not None:
            self.holders.append(lookup)

    def _served(self, lookup: Steps[LookupAnswer], waiter: Waiter) -> None:
        self.waiting.remove(lookup)
        del self.overtaken[lookup]
        for other in self.waiting:
            assert other.waiter is not None
            is_of_session = other.waiter.session_id == waiter.session_id
            self.overtaken[other] += is_of_session and other.waiter.since < waiter.since

    def retry(self) -> None:
        for lookup in [each for each in self.waiting if each.waiter is not None and each.waiter.is_offered]:
            self._step(lookup)

    def release(self) -> None:
        if self.holders:
            self.crowd.end(self.holders.pop(self.rng.randrange(len(self.holders))))

    def cancel(self) -> None:
        if self.waiting:
            lookup = self.waiting.pop(self.rng.randrange(len(self.waiting)))
            del self.overtaken[lookup]
            self.crowd.end(lookup)

    def withdraw(self) -> None:
        """A client withdraws a grant: the lease ends, also that of a paused lookup."""
        found = [each.state.lease for each in (*self.holders, *self.waiting)]
        leases = [each for each in found if each and self.crowd.core._lookups.leases.is_open(each)]
        if leases:
            self.crowd.core._lookups.end([self.rng.choice(leases)])
            self.crowd.run()

    def check(self) -> None:
        core, leased = self.crowd.core, Counter[bytes]()
        pinned = {block for lease in core.leases() for block in lease.items if block is not None}
        for block in pinned:
            leased[tenant_of(block.namespace)] += block.allocated_bytes
        assert core._lookups.leases.leased_bytes == leased
        bound = self.crowd.part * EXTENT
        assert all(nbytes <= bound for nbytes in leased.values())
        assert len(self.crowd.room) == len(self.waiting) == core.stats().room.waiting
        assert max(self.overtaken.values(), default=0) == 0, "first come first served within a session"
        if not self.waiting:
            assert not self.crowd.room._lines

    def end(self) -> None:
        """When all leases end, each waiting lookup is served in turn, and nothing is left."""
        while self.holders:
            self.release()
        for _ in range(10 * len(self.waiting) + 10):
            self.retry()
            while self.holders:
                self.release()
            self.crowd.now += 1
            self.crowd.core.tick(self.crowd.now)
            self.crowd.run()
        assert not self.waiting, f"{len(self.waiting)} lookups starve"
        self.check()
        assert not self.crowd.core.leases()
        assert not any(block.pins for block in ready_blocks(self.crowd.core))


@pytest.mark.parametrize("seed", range(60))
def test_turmoil(seed: int) -> None:
    """No lookup starves or overtakes, and nothing leaks."""
    turmoil = Turmoil(seed)
    events = (turmoil.look_up, turmoil.retry, turmoil.release, turmoil.cancel, turmoil.withdraw)
    for step in range(150):
        turmoil.rng.choices(events, (6, 6, 4, 1, 1))[0]()
        turmoil.check()
        turmoil.crowd.now += step % 2
    turmoil.end()
