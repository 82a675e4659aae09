"""Tiers that do not list their blocks, and lookups that leave tiers out."""

from typing import ClassVar

import pytest
from core_rig import HIT, MISS, PENDING, Rig, keys
from harness.operations import Steps, run_to_end
from simulation import ModelTier

from kvtier.tiers.core import presence_cache
from kvtier.tiers.core.call_specs import LookupSpec
from kvtier.tiers.core.commands import Change, LoadFromTier, LookupInTier, RemoveFromTier, StoreInTier
from kvtier.tiers.core.settings import TierSettings
from kvtier.tiers.errors import InvalidItem
from kvtier.tiers.secondary_tier import Medium, NamespaceId, Outcome, TierFilter
from kvtier.tiers.stats.request_log import OutcomeRun
from kvtier.tiers.types import KeyStatus, MissReason

RETRY = bytes([KeyStatus.RETRY])


class Shared(ModelTier):
    """A tier whose storage other servers write, too."""

    shared: ClassVar[bool] = True
    local: ClassVar[bool] = False
    medium: ClassVar[Medium] = Medium.NETWORK


def waits_for_answers(rig: Rig, names: list[bytes]) -> bool:
    """Returns whether a query of the shared tiers waits for an answer. With a deadline it ends."""
    query = Steps(rig.core.query_shared_tiers(rig.session, names, prefix=True, deadline=60, now=0))
    waits = query.step()
    assert not (waits and query.step(now=60))
    return waits


def statuses(rig: Rig, names: list[bytes], *, prefix: bool = True) -> bytes:
    """Looks up, releases the lease, and returns the statuses."""
    found = run_to_end(rig.core.lookup(rig.session, names, LookupSpec(prefix=prefix, lease_seconds=60), now=0))
    if found.lease is not None:
        rig.core.release(rig.session, found.lease.id)
    return found.statuses()


def questions(rig: Rig) -> list[LookupInTier]:
    return [command for command in rig.core.take_commands() if isinstance(command, LookupInTier)]


def test_an_unanswered_query_is_retry() -> None:
    """B3.15: RETRY until the tier has answered; then HIT_PENDING or MISS.

    The query is sent once.
    """
    rig = Rig(Shared("far", 1 << 20))
    assert statuses(rig, keys(0)) == RETRY
    [question] = questions(rig)
    assert statuses(rig, keys(0)) == RETRY
    assert questions(rig) == []
    rig.core.lookup_finished(question.job_id, [True])
    found = run_to_end(rig.core.lookup(rig.session, keys(0), LookupSpec(lease_seconds=60), now=0))
    assert found.statuses() == PENDING
    [load] = [command for command in rig.core.take_commands() if isinstance(command, LoadFromTier)]
    rig.core.job_finished(load.job_id, [Outcome.DONE])
    assert found.statuses() == HIT


def test_a_query_behind_a_block_without_room_is_a_miss() -> None:
    """Hits and misses by reason add up to the keys."""
    rig = Rig(ModelTier("near", 1 << 20), Shared("far", 1 << 20))
    rig.store_in_all_tiers(keys(0))
    full = keys(*range(100, 116))
    rig.store_in_all_tiers(full)
    run_to_end(rig.core.lookup(rig.session, full, LookupSpec(prefix=False, lease_seconds=60), now=0))
    before = rig.core.stats()
    spec = LookupSpec(lease_seconds=60, request_id="r")
    found = run_to_end(rig.core.lookup(rig.session, keys(100, 0, 1), spec, now=0))
    assert found.statuses() == HIT + 2 * MISS
    [record] = rig.core.explain("r")
    assert record.lookups[-1].outcomes() == (OutcomeRun(1, 0), OutcomeRun(2, MissReason.NO_ROOM))
    after = rig.core.stats()
    assert after.lookup_misses - before.lookup_misses == 2
    assert sum(tier.hits for tier in after.tiers) - sum(tier.hits for tier in before.tiers) == 1


def test_a_query_before_a_block_over_the_budget_stays_unanswered() -> None:
    """Only the queries behind the first block without room become misses."""
    rig = Rig(Shared("far", 1 << 20), settings=TierSettings(leased_part=0.25))
    rig.store(keys(0, 1, 2, 3))
    rig.store(keys(4))
    held = run_to_end(rig.core.lookup(rig.session, keys(0, 1, 2, 3), LookupSpec(lease_seconds=60), now=0))
    spec = LookupSpec(lease_seconds=60, request_id="r")
    found = run_to_end(rig.core.lookup(rig.session, keys(0, 50, 4, 51), spec, now=0))
    assert (held.statuses(), found.statuses()) == (HIT * 4, HIT + RETRY + MISS * 2)
    [record] = rig.core.explain("r")
    assert record.lookups[-1].outcomes() == (
        OutcomeRun(1, 0),
        OutcomeRun(1, None),
        OutcomeRun(2, MissReason.NO_ROOM),
    )


def test_a_negative_answer_is_a_miss() -> None:
    """B3.15: the answer is used for at most a second, until the next tick."""
    rig = Rig(Shared("far", 1 << 20))
    statuses(rig, keys(0))
    [question] = questions(rig)
    rig.core.lookup_finished(question.job_id, [False])
    assert statuses(rig, keys(0)) == MISS
    assert questions(rig) == []
    rig.core.tick(1)
    assert statuses(rig, keys(0)) == RETRY
    assert len(questions(rig)) == 1


def test_tiers_are_used_in_order() -> None:
    """B3.15: the CPU tier first, then as configured.

    A hit of an earlier tier does not wait for an open query of a later one.
    """
    near, far = ModelTier("near", 1 << 20), Shared("far", 1 << 20)
    for tiers, source in (((near, far), 1), ((far, near), 2)):
        rig = Rig(*tiers)
        rig.store_in_all_tiers(keys(0))
        assert (
            run_to_end(rig.core.lookup(rig.session, keys(0), LookupSpec(lease_seconds=60), now=0)).lease.sources
            == b"\0"
        )  # type: ignore[union-attr]
        rig.core.close_session(rig.session.id)
        rig.session = rig.open("again")
        rig.core.reset(rig.session)
        lease = run_to_end(rig.core.lookup(rig.session, keys(0), LookupSpec(lease_seconds=60), now=0)).lease
        assert lease.sources[0] == 1, "both have it: the first one is asked"
        assert rig.core.stats().tiers[source].name == "near"


@pytest.mark.parametrize("near_has_it", [True, False])
def test_a_hit_waits_for_earlier_tiers(*, near_has_it: bool) -> None:
    """B3.15: the block is loaded from the first tier that has it, whichever tier answers first."""
    rig = Rig(Shared("near", 1 << 20), Shared("far", 1 << 20))
    assert statuses(rig, keys(0)) == RETRY
    near, far = questions(rig)
    rig.core.lookup_finished(far.job_id, [True])
    assert statuses(rig, keys(0)) == RETRY
    assert waits_for_answers(rig, keys(0))
    rig.core.lookup_finished(near.job_id, [near_has_it])
    assert statuses(rig, keys(0)) == PENDING
    [load] = [command for command in rig.core.take_commands() if isinstance(command, LoadFromTier)]
    assert load.tier == (near if near_has_it else far).tier


def test_a_tick_between_two_answers_delays_nothing() -> None:
    """The negative answer is no longer valid. The hit of the later tier does not wait for it."""
    rig = Rig(Shared("near", 1 << 20), Shared("far", 1 << 20))
    statuses(rig, keys(0))
    near, far = questions(rig)
    rig.core.lookup_finished(near.job_id, [False])
    rig.core.tick(1)
    rig.core.lookup_finished(far.job_id, [True])
    assert not waits_for_answers(rig, keys(0))
    assert statuses(rig, keys(0)) == PENDING


@pytest.mark.parametrize("count", [1, 2])
def test_a_query_that_ends_asks_again_what_it_does_not_wait_for(count: int) -> None:
    """The first tier is asked again after a tick, although the second one has the blocks."""
    rig = Rig(Shared("first", 1 << 20), Shared("second", 1 << 20))
    query = Steps(
        rig.core.query_shared_tiers(rig.session, keys(*range(count)), prefix=True, deadline=60, now=0, slice_keys=1)
    )
    asked: list[LookupInTier] = []
    while len(asked) < 2 * count:
        assert query.step()
        asked += questions(rig)
    for question in asked:
        rig.core.lookup_finished(question.job_id, [question.tier == 2] * len(question.keys))
    rig.core.tick(1)
    rig.core.take_commands()
    again: list[LookupInTier] = []
    more = True
    while more:
        more = query.step()
        again += questions(rig)
        assert not any(secondary.presence_cache.take_queries() for secondary in rig.core._tier_jobs.secondaries)
    assert [(question.tier, len(question.keys)) for question in again] == [(1, 1)] * count


def test_a_search_for_missing_blocks_sends_its_queries() -> None:
    rig = Rig(Shared("far", 1 << 20))
    assert rig.core.lacking(rig.session, keys(0), TierFilter()) == keys(0)
    assert [question.keys for question in questions(rig)] == [[(rig.session.namespace.id, keys(0)[0])]]


def test_a_late_answer_is_not_waited_for() -> None:
    """A tier that does not answer delays the hits of later tiers by at most two ticks."""
    rig = Rig(Shared("near", 1 << 20), Shared("far", 1 << 20))
    statuses(rig, keys(0))
    _, far = questions(rig)
    rig.core.lookup_finished(far.job_id, [True])
    rig.core.tick(1)
    assert statuses(rig, keys(0)) == RETRY
    rig.core.tick(2)
    assert statuses(rig, keys(0)) == PENDING


def test_the_prefix_scan_continues_past_open_queries() -> None:
    """B3.17: all queries are sent at once; blocks behind an open one are not promoted."""
    near = ModelTier("near", 1 << 20)
    rig = Rig(near, Shared("far", 1 << 20))
    rig.store_in_all_tiers(keys(0, 2))
    rig.core.reset(rig.session)
    found = run_to_end(rig.core.lookup(rig.session, keys(0, 1, 2, 3), LookupSpec(lease_seconds=60), now=0))
    assert found.statuses() == PENDING + RETRY * 3
    commands = rig.core.take_commands()
    [question] = [command for command in commands if isinstance(command, LookupInTier)]
    assert [key for _, key in question.keys] == keys(1, 3)
    [load] = [command for command in commands if isinstance(command, LoadFromTier)]
    assert [block.key for block in load.blocks] == keys(0)
    rig.core.lookup_finished(question.job_id, [True, False])
    assert statuses(rig, keys(0, 1, 2, 3)) == PENDING * 3 + MISS


def test_queries_can_precede_the_lookup() -> None:
    """B3.17: a waiting lookup queries first and looks up when all answers are known."""
    rig = Rig(Shared("far", 1 << 20))
    query = Steps(rig.core.query_shared_tiers(rig.session, keys(0, 1), prefix=True, deadline=60, now=0))
    assert query.step()
    assert query.waiter == Change(60)
    [question] = questions(rig)
    assert len(question.keys) == 2
    # fewer answers than keys: the rest is not there
    rig.core.lookup_finished(question.job_id, [True])
    assert not query.step()
    assert statuses(rig, keys(0, 1)) == PENDING + MISS
    assert rig.core.stats().lookup_keys == 2
    assert not waits_for_answers(Rig(ModelTier("near", 1 << 20)), keys(0))


def test_open_queries_are_not_counted() -> None:
    """B3.15: hits and misses add up to the answered keys; RETRY is no answer."""
    rig = Rig(Shared("far", 1 << 20))
    statuses(rig, keys(0, 1))
    stats = rig.core.stats()
    assert (stats.lookup_keys, stats.lookup_misses) == (0, 0)


def test_a_failed_load_after_a_positive_answer_is_a_miss() -> None:
    """B3.18: another server removed the block meanwhile; the next lookup queries again."""
    rig = Rig(Shared("far", 1 << 20))
    statuses(rig, keys(0))
    [question] = questions(rig)
    rig.core.lookup_finished(question.job_id, [True])
    statuses(rig, keys(0))
    [load] = [command for command in rig.core.take_commands() if isinstance(command, LoadFromTier)]
    rig.core.job_finished(load.job_id, [Outcome.MISSING])
    assert statuses(rig, keys(0)) == RETRY


@pytest.mark.parametrize(
    ("without", "expected"),
    [
        (TierFilter(), PENDING),
        (TierFilter(names=frozenset({"near"})), MISS),
        (TierFilter(media=frozenset({Medium.DISK})), MISS),
        (TierFilter(media=frozenset({Medium.NETWORK})), PENDING),
        (TierFilter(remote=True), PENDING),
    ],
)
def test_tiers_can_be_left_out(without: TierFilter, expected: bytes) -> None:
    """B3.15: by name, medium or locality, for one lookup."""
    rig = Rig(ModelTier("near", 1 << 20))
    rig.store_in_all_tiers(keys(0))
    rig.core.reset(rig.session)
    found = run_to_end(rig.core.lookup(rig.session, keys(0), LookupSpec(lease_seconds=60, tiers=without), now=0))
    assert found.statuses() == expected


def test_a_remote_tier_can_be_left_out() -> None:
    """B3.15: by locality or medium; other keys are misses at once, and no query is sent."""
    rig = Rig(Shared("far", 1 << 20))
    for without in (TierFilter(remote=True), TierFilter(media=frozenset({Medium.NETWORK}))):
        found = run_to_end(rig.core.lookup(rig.session, keys(0), LookupSpec(lease_seconds=60, tiers=without), now=0))
        assert found.statuses() == MISS
        assert questions(rig) == []
    assert statuses(rig, keys(0)) == RETRY


def test_an_unknown_tier_cannot_be_left_out() -> None:
    """A misspelled name is an error, and so is the CPU tier, because all reads use it."""
    rig = Rig(ModelTier("near", 1 << 20))
    for name in ("neer", "cpu"):
        with pytest.raises(InvalidItem, match=name):
            run_to_end(
                rig.core.lookup(
                    rig.session,
                    keys(0),
                    LookupSpec(prefix=True, request_id="", lease_seconds=60, tiers=TierFilter(names=frozenset({name}))),
                    now=0,
                )
            )


def test_an_eviction_forgets_the_block_and_does_not_delete_it() -> None:
    """Other servers may use the block. If the store still has it, a lookup finds it again."""
    rig = Rig(Shared("far", 5 * 4096))
    rig.store_in_all_tiers(keys(0))
    rig.core.reset(rig.session)
    rig.core.take_commands()
    for number in range(1, 6):
        rig.store(keys(number))
        assert not [command for command in rig.finish_jobs() if isinstance(command, RemoveFromTier)]
    assert rig.core.stats().tiers[1].evictions == 1
    assert statuses(rig, keys(0)) == RETRY
    [question] = questions(rig)
    rig.core.lookup_finished(question.job_id, [True])
    assert statuses(rig, keys(0)) == PENDING


def test_stores_of_a_shared_tier_overlap() -> None:
    """As many as the tier permits; a tier that is not shared has one store at a time."""
    for make, permitted in ((ModelTier, 1), (Shared, 3)):
        tier = make("far", 1 << 30)
        tier.parallel_stores = permitted  # type: ignore[misc]
        rig = Rig(tier, extents=64)
        commands = []
        for number in range(5):
            rig.store(keys(number))
            commands += rig.core.take_commands()
        stores = [command for command in commands if isinstance(command, StoreInTier)]
        assert [len(command.blocks) for command in stores] == [1] * permitted
        for command in stores:
            rig.core.job_finished(command.job_id, [Outcome.DONE])
        while rig.finish_jobs():
            pass
        assert rig.core.stats().tiers[1].blocks == 5


def test_a_small_store_waits_for_more_blocks() -> None:
    """For two seconds, unless the blocks suffice, a reset runs or the server stops."""
    tier = Shared("far", 1 << 20)
    tier.gather_bytes = 4 * 4096
    rig = Rig(tier, extents=64)

    def stored() -> list[int]:
        commands = [command for command in rig.core.take_commands() if isinstance(command, StoreInTier)]
        for command in commands:
            rig.core.job_finished(command.job_id, [Outcome.DONE] * len(command.blocks))
        return [len(command.blocks) for command in commands]

    rig.store(keys(0))
    assert stored() == []
    assert rig.core.stats().tiers[1].jobs == 1
    rig.store(keys(1, 2, 3))
    assert stored() == [4]
    rig.core.tick(10)
    rig.store(keys(4))
    rig.core.tick(11)
    rig.store(keys(5))
    assert stored() == []
    rig.core.tick(12)
    assert stored() == [2]
    rig.store(keys(6))
    rig.core.flush_queues()
    assert stored() == [1]
    rig.store(keys(7))
    rig.core.reset(rig.session)
    assert stored() == [1]
    assert not rig.core.resetting(rig.session)
    assert rig.core.stats().tiers[1].jobs == 0


def test_a_block_that_the_store_lost_is_stored_again() -> None:
    """After a negative answer the server no longer counts the block as stored."""
    rig = Rig(Shared("far", 1 << 20))
    rig.store_in_all_tiers(keys(0))
    rig.core.reset(rig.session)
    assert statuses(rig, keys(0)) == PENDING, "its own store is an answer"
    rig.finish_jobs(Outcome.FAILED)
    assert statuses(rig, keys(0)) == RETRY, "after a failed load the store is asked"
    [question] = questions(rig)
    rig.core.lookup_finished(question.job_id, [False])
    assert statuses(rig, keys(0)) == MISS
    rig.store(keys(0))
    assert [type(command) for command in rig.core.take_commands()] == [StoreInTier]


@pytest.mark.parametrize(("answers", "kept"), [([], 1), ([False], 0)])
def test_a_block_is_only_lost_if_the_store_says_so(answers: list[bool], kept: int) -> None:
    """A store that has not answered may have the block: it is not stored again."""
    rig = Rig(Shared("far", 1 << 20))
    rig.store_in_all_tiers(keys(0))
    rig.core.reset(rig.session)
    rig.core.tick(11)
    assert statuses(rig, keys(0)) == RETRY
    [question] = questions(rig)
    rig.core.lookup_finished(question.job_id, answers)
    assert statuses(rig, keys(0)) == MISS
    assert rig.core.stats().tiers[1].blocks == kept


def test_a_positive_answer_expires() -> None:
    """Ten seconds after its own store, the server asks the store again."""
    rig = Rig(Shared("far", 1 << 20))
    rig.store_in_all_tiers(keys(0))
    rig.core.reset(rig.session)
    rig.core.tick(11)
    assert statuses(rig, keys(0)) == RETRY


def test_a_full_store_evicts_nothing_here() -> None:
    """The store evicts by itself; to forget other blocks would free no space."""
    rig = Rig(Shared("far", 1 << 20))
    rig.store_in_all_tiers(keys(0, 1))
    rig.store(keys(2))
    rig.finish_jobs(Outcome.NO_SPACE)
    assert rig.core.stats().tiers[1].blocks == 2
    assert rig.core.stats().tiers[1].dropped == 1


def test_a_block_of_an_earlier_tier_causes_no_query() -> None:
    """A query over the network would be useless, because the earlier tier loads the block."""
    rig = Rig(ModelTier("near", 1 << 20), Shared("far", 1 << 20))
    rig.store_in_all_tiers(keys(0))
    rig.core.reset(rig.session)
    rig.core.tick(11)
    assert not waits_for_answers(rig, keys(0))
    assert statuses(rig, keys(0)) == PENDING
    assert questions(rig) == []


def test_lookups_of_a_tenant_drop_no_answers_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the limit the tenant with most answers loses its oldest one."""
    monkeypatch.setattr(presence_cache, "MAX_ANSWERS", 8)
    cache = presence_cache.PresenceCache()
    alice, bob = NamespaceId(b"a" * 32), NamespaceId(b"b" * 32)
    for there in (True, False):
        for key in keys(0, 1, 2):
            cache.set((alice, key), there=there, now=0.0)
        for key in keys(*range(10, 100)):
            cache.set((bob, key), there=there, now=0.0)
        assert [cache.get((alice, key)) for key in keys(0, 1, 2)] == [there] * 3
        held = [key for key in keys(*range(10, 100)) if cache.get((bob, key)) is there]
        assert held == keys(*range(95, 100))
    cache.set((bob, keys(10)[0]), there=True, now=20.0)
    cache.tick(20.0)
    assert [name in cache for name in [(alice, keys(0)[0]), (bob, keys(10)[0])]] == [False, True]


def test_no_lookup_uses_the_old_answers_that_a_tick_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tick drops few old answers, of each tenant in turn. Later ticks drop the others."""
    monkeypatch.setattr(presence_cache, "DROPPED_PER_TICK", 4)
    cache = presence_cache.PresenceCache()
    alice, bob = NamespaceId(b"a" * 32), NamespaceId(b"b" * 32)
    names = [(tenant, key) for tenant in (alice, bob) for key in keys(*range(10))]
    cache.record_answers(names, [True] * len(names), now=0.0)
    cache.tick(9.0)
    assert all(name in cache and cache.get(name) for name in names)
    cache.tick(10.0)
    assert not any(name in cache or cache.get(name) for name in names)
    assert cache.take_queries() == names
    left = []
    for second in range(11, 20):
        left.append(sorted(len(own) for own in cache._present._of_tenant.values()))
        cache.tick(float(second))
    assert left == [[6, 10], [6, 6], [2, 6], [2, 2], [], [], [], [], []]
    cache.set(names[0], there=False, now=20.0)
    for second in range(20, 29):
        cache.tick(float(second))
        cache.get(names[0])
        assert not cache.must_wait(names[0]), "the tier lacked the block a short time ago"


@pytest.mark.parametrize("there", [False, True])
def test_old_answers_push_out_no_new_ones(*, there: bool) -> None:
    """Many tenants get more answers than ticks can drop. The answers for another one still fit."""
    cache = presence_cache.PresenceCache()
    cache.tick(0.0)
    tenants = [NamespaceId(bytes([number]) * 32) for number in range(33)]
    for second in range(70):
        for number in range(60):
            for tenant in tenants[1:]:
                cache.set((tenant, b"%d %d" % (second, number)), there=there, now=float(second))
        cache.tick(second + 1.0)
    names = [(tenants[0], b"%d" % number) for number in range(40_000)]
    cache.record_answers(names, [there] * len(names), 70.0)
    assert all(cache.get(name) is there for name in names)


def test_slices_of_other_work_are_no_ticks_of_the_answers() -> None:
    """A negative answer is used until the next tick, also while the core resets a namespace."""
    rig = Rig(Shared("far", 1 << 20))
    rig.core.tick(1)
    statuses(rig, keys(0))
    [question] = questions(rig)
    rig.core.lookup_finished(question.job_id, [False])
    for _ in range(20):
        rig.core.work()
    assert statuses(rig, keys(0)) == MISS
    assert questions(rig) == []
    rig.core.tick(2)
    assert statuses(rig, keys(0)) == RETRY


def test_expired_answers_are_asked_for_together() -> None:
    """The answer for the first key comes after the answers for all others have expired."""
    rig = Rig(Shared("far", 1 << 20))
    names = keys(*range(40))
    [first] = keys(0)
    operation = rig.core.query_shared_tiers(rig.session, names, prefix=False, deadline=60, now=0, slice_keys=10)
    query = Steps(operation)
    while query.step() and query.waiter is None:
        pass
    asked = questions(rig)
    assert [name for question in asked for name in question.keys] == [(rig.session.namespace.id, key) for key in names]
    rounds = 0
    for second in range(1, 20):
        rig.core.tick(second)
        late = [question for question in asked if (rig.session.namespace.id, first) in question.keys]
        for question in asked:
            if question not in late or second > 2:
                rig.core.lookup_finished(question.job_id, [False] * len(question.keys))
                asked = [other for other in asked if other is not question]
        rounds += 1
        more = query.step(now=second)
        while more and query.waiter is None:
            more = query.step(now=second)
        asked += questions(rig)
        if not more:
            break
    assert rounds < 8, "three slices, and not a round for each of 30 keys"


def test_a_call_that_waits_for_a_late_tier_asks_no_other_one_in_vain() -> None:
    """The answers of the other tier expire with each tick."""
    rig = Rig(Shared("late", 1 << 20), Shared("far", 1 << 20))
    names = keys(*range(60))
    query = Steps(rig.core.query_shared_tiers(rig.session, names, prefix=False, deadline=60, now=0))
    assert query.step()
    asked = []
    for second in range(1, 5):
        far = [question for question in questions(rig) if question.tier == 2]
        asked.append(sum(len(question.keys) for question in far))
        for question in far:
            rig.core.lookup_finished(question.job_id, [False] * len(question.keys))
        rig.core.tick(second)
        assert query.step(now=second)
        if query.waiter is None:
            assert query.step(now=second)
    assert asked == [60, 1, 1, 1]


def test_long_queries_are_sent_in_parts() -> None:
    """The core records the answers for 512 keys at once."""
    rig = Rig(Shared("far", 1 << 20))
    names = keys(*range(1200))
    assert rig.core.lacking(rig.session, names, TierFilter()) == names
    asked = questions(rig)
    assert [len(question.keys) for question in asked] == [512, 512, 176]
    for question in reversed(asked):
        rig.core.lookup_finished(question.job_id, [True] * len(question.keys))
    assert rig.core.lacking(rig.session, names, TierFilter()) == []


def test_a_stored_block_is_known_to_be_there() -> None:
    """The tier is not asked for a block that it has stored a moment ago."""
    rig = Rig(Shared("far", 1 << 20))
    rig.store_in_all_tiers(keys(0))
    rig.core.reset(rig.session)
    while rig.core.resetting(rig.session):
        rig.core.work()
    assert statuses(rig, keys(0)) == PENDING
    assert questions(rig) == []
