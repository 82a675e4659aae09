"""Prefetches (B3.21): promotions without a lease, within a limit, not counted in statistics."""

import pytest
from core_rig import HIT, MISS, Rig, keys
from harness.operations import Steps, run_to_end
from simulation import EXTENT, ModelTier
from tenants import PAGE, spec, tenant
from tenants import Rig as TenantRig
from tenants import keys as tenant_keys

from kvtier.tiers.core.call_specs import LookupSpec
from kvtier.tiers.core.commands import LoadFromTier
from kvtier.tiers.core.prefetches import PrefetchAnswer
from kvtier.tiers.secondary_tier import Outcome
from kvtier.tiers.types import EngineSession

FAR = 1e9


def prefetch(
    rig: Rig | TenantRig,
    names: list[bytes],
    *,
    session: EngineSession | None = None,
    most: int = 1000,
    retain_for: float = 0.0,
) -> PrefetchAnswer:
    if session is None:
        assert isinstance(rig, Rig)
        session = rig.session
    return run_to_end(rig.core.prefetch(session, names, LookupSpec(retain_for=retain_for), now=0, slice_keys=most))


def drop_from_cpu(rig: Rig) -> None:
    rig.core.reset(rig.session)
    while rig.core.resetting(rig.session):
        rig.core.work()


def disk_rig(*numbers: int, extents: int = 8) -> Rig:
    """Returns a rig whose blocks are only in the tier below."""
    rig = Rig(ModelTier("disk", 4 << 20), extents=extents, queue=4 << 20)
    rig.store_in_all_tiers(keys(*numbers))
    drop_from_cpu(rig)
    rig.core.take_commands()
    return rig


@pytest.mark.parametrize("most", [1000, 3])
def test_it_starts_promotions_and_leaves_no_lease(most: int) -> None:
    """The blocks are hits when their job has ended; the first missing key ends the prefetch."""
    rig = disk_rig(*range(8))
    answer = prefetch(rig, keys(*range(8), 90, 91), most=most)
    assert answer == PrefetchAnswer(present=0, started=8, missing=2, no_room=0, unanswered=0, not_retained=0)
    assert not rig.core.leases()
    rig.finish_jobs()
    assert rig.look_up(keys(*range(8))) == HIT * 8
    assert prefetch(rig, keys(*range(8))).present == 8


def test_blocks_without_a_lease_can_be_evicted() -> None:
    """A prefetch pins no block after its load."""
    rig = disk_rig(*range(8), extents=1)
    prefetch(rig, keys(*range(4)))
    rig.finish_jobs()
    rig.store(keys(*range(100, 116)))
    assert rig.look_up(keys(*range(100, 116))) == HIT * 16


def test_retained_blocks_stay_until_their_time() -> None:
    """Although other blocks flood the tier before the request comes."""
    rig = TenantRig(tiers=[ModelTier("disk", 2048 * PAGE)])
    rig.store("alice", range(8))
    session = rig.session(spec("alice"))
    rig.core.reset(session)
    while rig.core.resetting(session):
        rig.core.work()
    answer = prefetch(rig, tenant_keys(range(8)), session=session, retain_for=60)
    assert (answer.started, answer.not_retained) == (8, 0)
    rig.work()
    rig.store("alice", range(100, 740))
    assert set(tenant_keys(range(8))) <= rig.visible("alice")


def test_running_prefetches_take_at_most_a_quarter_of_the_memory() -> None:
    """Further blocks find no room until jobs have ended. A lookup has no such limit."""
    rig = disk_rig(*range(64), extents=8)
    budget = rig.core._lookups.prefetches
    most = budget.limit_bytes // 2 // 4096
    assert 0 < most < 64
    answer = prefetch(rig, keys(*range(64)), most=5)
    assert (answer.started, answer.no_room, answer.missing) == (most, 64 - most, 0)
    assert prefetch(rig, keys(*range(64))).started == 0
    assert MISS not in rig.look_up(keys(*range(64)))
    rig.finish_jobs()
    assert budget.loading_bytes == 0


def test_a_tenant_leaves_room_for_the_prefetches_of_others() -> None:
    """Each tenant gets as much as is then free, again when its jobs have ended."""
    numbers = range(400)
    rig = TenantRig(tiers=[ModelTier("disk", 2048 * PAGE)], extents=8)
    handler = rig.core._lookups
    for name in ("alice", "bob", "carol"):
        rig.store(name, numbers)
        session = rig.session(spec(name))
        rig.core.reset(session)
        while rig.core.resetting(session):
            rig.core.work()
    started = {}
    for name in ("alice", "bob", "alice", "carol"):
        answer = prefetch(rig, tenant_keys(numbers), session=rig.session(spec(name)), most=3)
        started.setdefault(name, []).append(answer.started)
    most = handler.prefetches.limit_bytes // PAGE
    assert started == {"alice": [most // 2, 0], "bob": [most // 4], "carol": [most // 8]}
    rig.work()
    assert handler.prefetches.loading_bytes == 0
    assert not handler.prefetches._by_tenant


@pytest.mark.parametrize("outcome", [Outcome.FAILED, Outcome.MISSING, Outcome.CORRUPT])
def test_a_failed_load_frees_its_memory(outcome: Outcome) -> None:
    """The blocks are misses afterwards, and the limit no longer counts them."""
    rig = disk_rig(*range(4))
    assert prefetch(rig, keys(*range(4))).started == 4
    rig.finish_jobs(outcome)
    assert rig.core._lookups.prefetches.loading_bytes == 0
    assert rig.core.stats().tiers[0].used_bytes == 0


def test_statistics_count_no_lookup() -> None:
    """Neither hits nor misses, also if a load fails or a slice finds a pending block."""
    rig = disk_rig(*range(8))
    before = rig.core.stats()
    prefetch(rig, keys(*range(8), 90), most=2)
    rig.finish_jobs(Outcome.FAILED)
    after = rig.core.stats()
    assert (after.lookup_keys, after.lookup_misses) == (before.lookup_keys, before.lookup_misses)
    assert [(tier.hits, tier.misses) for tier in after.tiers] == [(tier.hits, tier.misses) for tier in before.tiers]


def test_a_load_that_ends_between_two_slices_is_not_counted() -> None:
    """The lease of the slices then has a block that has failed."""
    rig = disk_rig(*range(8))
    prefetch = Steps(rig.core.prefetch(rig.session, keys(*range(8)), LookupSpec(), now=0, slice_keys=4), "lookup")
    while prefetch.step() and prefetch.state.position < 4:
        pass
    rig.finish_jobs(Outcome.FAILED)
    assert prefetch.finish().started == 8
    assert rig.core.stats().lookup_keys == rig.core.stats().lookup_misses == 0


def test_a_tenant_within_its_quota_keeps_its_blocks() -> None:
    """A prefetch evicts as a lookup does: only from shares above their quota."""
    rig = TenantRig(tenant("alice", quota=2 * EXTENT), tiers=[ModelTier("disk", 4096 * PAGE)])
    rig.store("bob", range(200, 240))
    session = rig.session(spec("bob"))
    rig.core.reset(session)
    while rig.core.resetting(session):
        rig.core.work()
    rig.store("alice", range(16))
    rig.store("bob", range(300, 700))
    assert prefetch(rig, tenant_keys(range(200, 240)), session=session).started > 0
    assert set(tenant_keys(range(16))) <= rig.visible("alice")


def test_a_reset_makes_every_key_missing() -> None:
    """No promotion starts meanwhile."""
    rig = disk_rig(*range(4))
    rig.store(keys(50))
    lease = run_to_end(rig.core.lookup(rig.session, keys(50), LookupSpec(lease_seconds=FAR), now=0)).lease
    assert lease is not None
    assert rig.core.reset(rig.session) == 1
    rig.core.take_commands()
    assert prefetch(rig, keys(*range(4))).missing == 4
    assert not any(isinstance(command, LoadFromTier) for command in rig.core.take_commands())
