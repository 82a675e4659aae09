"""State machine of the catalog of a tier, compared with a list of its blocks."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from kvtier.tiers.core.catalog import Catalog, CatalogEntry, EntryState
from kvtier.tiers.eviction import POLICIES
from kvtier.tiers.eviction.queues import EvictionQueues
from kvtier.tiers.eviction.quotas import Quotas, Tenant
from kvtier.tiers.secondary_tier import NamespaceId
from kvtier.tiers.stats.eviction_history import EvictionHistory
from kvtier.tiers.types import TENANT_TAG_BYTES, MissReason

CAPACITY = 40
TTL = 30.0
SPACES = [NamespaceId(name * 32) for name in (b"q", b"l", b"r", b"s")]
"""Of a tenant with a quota, one with a limit, and two of tenants without."""
TENANTS = [
    Tenant("quota", SPACES[0][:TENANT_TAG_BYTES], {"disk": 12}, {}),
    Tenant("limit", SPACES[1][:TENANT_TAG_BYTES], {}, {"disk": 9}),
]
NUMBERS = st.integers(0, 30)


class CatalogMachine(RuleBasedStateMachine):
    policy = "lru"

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.quotas = Quotas("disk", CAPACITY, TENANTS)
        self.queues = EvictionQueues[CatalogEntry](self.quotas, POLICIES[self.policy], ttl=TTL)
        self.history = EvictionHistory()
        self.catalog = Catalog(CAPACITY, self.queues, self.history)
        self.entries: dict[tuple[NamespaceId, bytes], CatalogEntry] = {}
        self.evicted = 0

    def pick(self, number: int) -> CatalogEntry | None:
        """Returns one of the entries, None if there are none."""
        known = list(self.entries.values())
        return known[number % len(known)] if known else None

    def free(self, entry: CatalogEntry) -> bool:
        return entry.state is EntryState.HELD and not entry.loads and not entry.retained

    def gone(self, victims: list[CatalogEntry], reason: MissReason) -> None:
        for victim in victims:
            assert self.entries.pop(victim.name) is victim
            assert victim.state is EntryState.HELD
            assert not victim.loads
            assert self.history.reason_for(*victim.name) is reason
        if reason is MissReason.EVICTED:
            self.evicted += len(victims)

    @rule(
        space=st.sampled_from(SPACES),
        numbers=st.lists(NUMBERS, min_size=1, max_size=12),
        nbytes=st.integers(1, 6),
        request=st.sampled_from("abc"),
        pending=st.integers(0, 3),
    )
    def store(self, space: NamespaceId, numbers: list[int], nbytes: int, request: str, pending: int) -> None:
        """Stores blocks; the first `pending` of them do not end."""
        for place, number in enumerate(numbers):
            key = b"%d" % number
            if (space, key) not in self.entries:
                self.begin_store(space, key, nbytes, request)
                if place >= pending and (entry := self.entries.get((space, key))):
                    self.catalog.stored(entry)

    def begin_store(self, space: NamespaceId, key: bytes, nbytes: int, request: str) -> None:
        share = self.quotas.of(space)
        own = sum(entry.nbytes for entry in self.entries.values() if self.free(entry) and entry.queue.share is share)
        within = {each: max(0, each.excess) for each in self.quotas if each is not share}
        room = CAPACITY - self.catalog.used_bytes
        over = share.over_limit(nbytes)
        before = {each: each.used for each in self.quotas}
        retained = {entry.name for entry in self.entries.values() if entry.retained}
        victims = self.catalog.begin_store(space, key, nbytes)
        if victims is None:
            assert own + room < nbytes or over > own, "the share has enough blocks that can be evicted"
            return
        assert not retained.intersection(victim.name for victim in victims)
        self.gone(victims, MissReason.EVICTED)
        if room >= nbytes and not over:
            assert victims == [], "there was room"
        for other, excess in within.items():
            lost = before[other] - other.used
            assert lost <= excess, "a share lost blocks within its quota"
            assert not lost or not over, "a share at its limit took from another one"
        entry = self.catalog.get(space, key)
        assert entry is not None
        assert self.catalog.held(space, key) is None
        self.entries[space, key] = entry
        self.catalog.use([entry], request)

    @rule(number=NUMBERS)
    def end_store(self, number: int) -> None:
        entry = self.pick(number)
        if entry is not None and entry.state is EntryState.STORING:
            self.catalog.stored(entry)
            assert self.catalog.held(*entry.name) is entry

    @rule(number=NUMBERS, change=st.sampled_from([1, 1, -1]))
    def load(self, number: int, change: int) -> None:
        entry = self.pick(number)
        if entry is not None and entry.state is EntryState.HELD and entry.loads + change >= 0:
            entry.loads += change
            self.catalog.recount([entry])

    @rule(numbers=st.lists(NUMBERS, max_size=4), seconds=st.sampled_from([0.0, 0.0, 5.0, 60.0]))
    def use(self, numbers: list[int], seconds: float) -> None:
        used = list(dict.fromkeys(entry for number in numbers if (entry := self.pick(number))))
        self.catalog.use(used, "u", self.now + seconds if seconds else 0.0)

    @rule(numbers=st.lists(NUMBERS, max_size=4), seconds=st.sampled_from([0.0, 3.0]))
    def shorten(self, numbers: list[int], seconds: float) -> None:
        self.queues.shorten(
            list(dict.fromkeys(entry for number in numbers if (entry := self.pick(number)))), self.now + seconds
        )

    @rule(request=st.sampled_from("abcu"))
    def finish(self, request: str) -> None:
        self.catalog.finish(request)

    @rule(number=NUMBERS)
    def drop(self, number: int) -> None:
        entry = self.pick(number)
        if entry is not None:
            self.catalog.drop(entry)
            del self.entries[entry.name]

    @rule(space=st.sampled_from(SPACES))
    def retire(self, space: NamespaceId) -> None:
        self.catalog.retire(space)

    @rule(space=st.sampled_from(SPACES), nbytes=st.integers(1, 12))
    def make_room(self, space: NamespaceId, nbytes: int) -> None:
        share = self.quotas.of(space)
        own = sum(entry.nbytes for entry in self.entries.values() if self.free(entry) and entry.queue.share is share)
        victims = self.catalog.make_room(space, nbytes)
        self.gone(victims, MissReason.EVICTED)
        assert sum(victim.nbytes for victim in victims) >= min(nbytes, own)

    @precondition(lambda self: self.entries)
    @rule(seconds=st.sampled_from([0.5, 2.0, 20.0, 40.0]), used_elsewhere=st.sampled_from([None, 0.0, 15.0]))
    def tick(self, seconds: float, used_elsewhere: float | None) -> None:
        self.now += seconds
        used = None if used_elsewhere is None else self.now - used_elsewhere
        last = {entry.name: entry.used_at for entry in self.entries.values()}
        expired = self.catalog.tick(self.now, lambda _space, _key: used)
        self.gone(expired, MissReason.EXPIRED)
        assert not expired or used is None, "a block that the CPU tier used lately does not expire"
        assert all(last[entry.name] + TTL <= self.now for entry in expired)
        assert not any(
            entry.retained and self.queues.retained_until(entry) <= self.now - 1 for entry in self.entries.values()
        )

    @invariant()
    def books(self) -> None:
        """Every count equals the sum over the entries."""
        known = list(self.entries.values())
        assert len(self.catalog) == len(known)
        assert dict(self.catalog.counts()) == {
            space: count for space in SPACES if (count := sum(entry.namespace == space for entry in known))
        }
        assert self.catalog.used_bytes == sum(entry.nbytes for entry in known) <= CAPACITY
        assert self.catalog.evictions == self.evicted
        for share in self.quotas:
            mine = [entry for entry in known if entry.queue.share is share]
            assert share.used == sum(entry.nbytes for entry in mine)
            assert share.limit is None or share.used <= share.limit
            assert share.retained == sum(entry.nbytes for entry in mine if entry.retained)
            assert share.evictable == sum(entry.nbytes for entry in mine if self.free(entry))
            assert share.budget.used <= share.budget.bound

    @invariant()
    def lookups(self) -> None:
        for space in SPACES:
            mine = {key: entry for (owner, key), entry in self.entries.items() if owner == space}
            assert self.catalog.copy_of(space) == mine
            assert set(self.catalog.all_of(space)) == set(mine.values())
            names = [b"%d" % number for number in range(31)]
            assert self.catalog.keys_among(space, names) == set(mine)
            for key in names:
                assert self.catalog.get(space, key) is mine.get(key)
                held = key in mine and mine[key].state is EntryState.HELD
                assert self.catalog.has(space, key) == held
        for entry in self.entries.values():
            assert self.catalog.is_evictable(entry, retained=False) == self.free(entry)

    @invariant()
    def order(self) -> None:
        """Every entry that may be evicted is in the order of victims, once."""
        ordered = [entry for queue in self.queues.all() for entry in queue.victims()]
        assert len(ordered) == len(set(ordered))
        assert set(ordered) == {entry for entry in self.entries.values() if not entry.retained}


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_the_books_of_a_catalog(policy: str) -> None:
    machine = type("Machine", (CatalogMachine,), {"policy": policy})
    run_state_machine_as_test(machine, settings=settings(max_examples=40, stateful_step_count=60))
