"""Stores that the CPU tier declines because the eviction policy values the present blocks more."""

from collections.abc import Iterator

import pytest
from core_rig import GRANTED, HIT, MISS, NO_ROOM, Rig, keys
from harness.operations import run_to_end
from simulation import ModelTier

from kvtier.tiers.core.call_specs import LookupSpec, StoreSpec
from kvtier.tiers.core.catalog import Catalog, CatalogEntry, EntryState
from kvtier.tiers.eviction import LRU, Forecast
from kvtier.tiers.eviction.queues import EvictionQueues
from kvtier.tiers.eviction.quotas import Quotas, Tenant
from kvtier.tiers.secondary_tier import NamespaceId, RequestInfo
from kvtier.tiers.stats.eviction_history import EvictionHistory
from kvtier.tiers.types import TENANT_TAG_BYTES, MissReason

POPULAR = keys(*range(12))
NEW = keys(*range(100, 108))


def serve(rig: Rig, request_id: str, names: list[bytes], *, retain_for: float = 0.0) -> bytes:
    """Serves a request as an engine does: looks up the blocks and stores all of them."""
    core, session = rig.core, rig.session
    core.begin_request(session, RequestInfo(request_id, session.namespace.id))
    run_to_end(core.lookup(session, names, LookupSpec(request_id=request_id, lease_seconds=60), now=0))
    answer = run_to_end(
        core.prepare_store(
            session, names, StoreSpec(request_id=request_id, lease_seconds=60, retain_for=retain_for), now=0
        )
    )
    if answer.store_id is not None:
        run_to_end(core.complete_store(session, answer.store_id))
    core.finish_request(session, request_id)
    return answer.statuses


def filled(*tiers: ModelTier, policy: str = "forecast") -> Rig:
    """Returns a core with room for 16 blocks, 12 of which many requests have used."""
    rig = Rig(*tiers, eviction={"cpu": policy})
    for number in range(8):
        serve(rig, f"popular-{number}", POPULAR)
        rig.finish_jobs()
    return rig


def test_a_block_worth_less_than_all_victims_is_declined() -> None:
    """The head of the new chain fills the free slots; the rest is declined, and counted."""
    rig = filled()
    assert serve(rig, "new", NEW) == GRANTED * 4 + NO_ROOM * 4
    assert rig.look_up(POPULAR) == HIT * 12
    cpu = rig.core.stats().tiers[0]
    assert (cpu.declined, cpu.dropped, cpu.evictions) == (4, 0, 0)


def test_the_miss_reason_of_a_declined_block_is_policy() -> None:
    rig = filled()
    serve(rig, "new", NEW)
    assert rig.look_up(NEW[4:]) == MISS * 4
    assert rig.core.stats().misses_by_reason[MissReason.POLICY] == 4


@pytest.mark.parametrize("policy", ["lru", "arc", "mq"])
def test_other_policies_decline_nothing(policy: str) -> None:
    rig = filled(policy=policy)
    assert serve(rig, "new", NEW) == GRANTED * 8


def test_nothing_is_declined_that_another_tier_can_store() -> None:
    """Blocks reach a secondary tier only through the CPU tier."""
    rig = filled(ModelTier("near", 1 << 20))
    assert serve(rig, "new", NEW) == GRANTED * 8


def test_retained_blocks_are_not_declined() -> None:
    rig = filled()
    assert serve(rig, "new", NEW, retain_for=50.0) == GRANTED * 8


def test_blocks_of_an_unknown_request_are_not_declined() -> None:
    rig = filled()
    assert rig.store(NEW) == GRANTED * 8


def test_declined_blocks_are_stored_once_they_are_used_more() -> None:
    """A declined block leaves a ghost, so the policy learns that requests use it again."""
    rig = filled()
    answers = [serve(rig, f"new-{number}", NEW) for number in range(40)]
    assert answers[0] == GRANTED * 4 + NO_ROOM * 4
    assert rig.look_up(NEW) == HIT * 8


@pytest.mark.parametrize("free", [4, 0], ids=["some are granted", "all are declined"])
def test_declined_blocks_leave_the_policy_tail_first(free: int) -> None:
    """Every eighth block of the chain and the last two leave a ghost, as after an eviction.

    If the head is removed first, the policy takes each block for the first one of its run. Then
    ghosts of all blocks remain, or of almost none.
    """
    rig = filled()
    for number in range(8):
        serve(rig, f"more-popular-{number}", keys(*range(16 - free)))
    chain = keys(*range(100, 140))
    assert serve(rig, "new", chain) == GRANTED * free + NO_ROOM * (40 - free)
    (queue,) = rig.core._cpu_tier.queues.all()
    assert isinstance(queue.policy, Forecast)
    ghosts = {key for _, key in queue.policy._ghosts}  # type: ignore[misc]
    places = [place for place, key in enumerate(chain) if key in ghosts]
    assert places == [place for place in (0, 8, 16, 24, 32, 38, 39) if place >= free]


@pytest.mark.parametrize("capacity", [500, 5000], ids=["the tier is full", "its tenant is at its limit"])
def test_refused_stores_do_not_walk_over_queued_blocks(capacity: int) -> None:
    """B3.7: a store of many blocks without room ends fast, also with a long queue."""
    looked = 0

    class CountingLRU(LRU[CatalogEntry]):
        def victims(self) -> Iterator[CatalogEntry]:
            nonlocal looked
            for entry in super().victims():
                looked += 1
                yield entry

    space = NamespaceId(b"t" * 32)
    tenant = Tenant("t", space[:TENANT_TAG_BYTES], {}, {"disk": 500})
    catalog = Catalog(capacity, EvictionQueues(Quotas("disk", capacity, [tenant]), CountingLRU), EvictionHistory())
    for number in range(500):
        assert catalog.begin_store(space, b"%d" % number, 1) == []
    entries = [entry for number in range(500) if (entry := catalog.get(space, b"%d" % number))]
    catalog.use(entries, "request")
    assert [catalog.begin_store(space, b"new %d" % number, 1) for number in range(500)] == [None] * 500
    assert catalog.make_room(space, 1) == []
    assert looked == 0
    entries[7].state = EntryState.HELD
    catalog.recount([entries[7]])
    assert catalog.begin_store(space, b"new", 1) == [entries[7]], "the only one that may go"
    assert catalog.begin_store(space, b"newer", 1) is None
    assert 0 < looked <= 500
