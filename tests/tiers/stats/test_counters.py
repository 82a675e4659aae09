"""Outcomes of lookups per namespace."""

from __future__ import annotations

from kvtier.tiers.secondary_tier import NamespaceId
from kvtier.tiers.stats.counters import MAX_NAMESPACES, HitCounters
from kvtier.tiers.stats.eviction_history import EvictionHistory
from kvtier.tiers.stats.request_log import OutcomeRun
from kvtier.tiers.types import MissReason


def namespace(number: int, tag: bytes = b"rest" * 4) -> NamespaceId:
    """Returns the id of a namespace of a tenant."""
    return NamespaceId(tag + number.to_bytes(16, "little"))


def test_every_key_counts_in_its_namespace_and_in_the_sum() -> None:
    """Hits by tier and misses by reason; an open query does not count yet."""
    tally = HitCounters(1)
    tally.count(
        namespace(1), [OutcomeRun(3, 0), OutcomeRun(2, 1), OutcomeRun(4, MissReason.EVICTED), OutcomeRun(7, None)]
    )
    tally.count(namespace(2), [OutcomeRun(1, MissReason.EVICTED)])
    tally.hit(namespace(1), 1, -1)
    tally.miss(namespace(1), MissReason.LOAD_FAILED)
    one, two = tally.all()
    assert (one.namespace, one.hits) == (namespace(1), [3, 1])
    assert one.misses == {MissReason.EVICTED: 4, MissReason.LOAD_FAILED: 1}
    assert (two.hits, two.misses) == ([0, 0], {MissReason.EVICTED: 1})
    assert (tally.hits, tally.misses.total()) == ([3, 1], 6)


def test_namespaces_beyond_the_limit_share_counters_per_tenant() -> None:
    """Memory is bounded, and the sums are exact. A tenant gets at most as many as are then free."""
    tally = HitCounters(0, {b"acme" * 4: "acme"})
    half = MAX_NAMESPACES // 2
    for number in range(1000):
        tally.hit(namespace(number), 0)
    for number in range(1000):
        tally.hit(namespace(number, b"acme" * 4), 0)
    tally.hit(namespace(0), 0)
    tally.hit(namespace(7, b"zeta" * 4), 0)
    cells = tally.all()
    assert len(cells) == half + half // 2 + 3
    others = {cell.tenant: cell.hits for cell in cells if cell.namespace is None}
    assert others == {"": [1000 - half], "acme": [1000 - half // 2]}
    assert cells[0].hits == [2]
    assert namespace(7, b"zeta" * 4) in [cell.namespace for cell in cells]
    assert tally.hits == [2002]


def test_the_eviction_history_keeps_the_latest_blocks_within_its_limit() -> None:
    history = EvictionHistory(8)
    keys = [bytes([number]) for number in range(100)]
    for key in keys:
        history.record(namespace(1), key, MissReason.EVICTED)
        assert history.reason_for(namespace(1), key) is MissReason.EVICTED
        known = [key for key in keys if history.reason_for(namespace(1), key)]
        assert len(known) <= 8
    assert known == keys[-len(known) :]
    assert len(known) >= 4


def test_a_tenant_with_many_evictions_keeps_the_history_of_another_one() -> None:
    """Its own oldest blocks are forgotten. A block that is evicted again counts as new."""
    history = EvictionHistory(64)
    first = [bytes([number]) for number in range(8)]
    history.record_all(namespace(1, b"zeta" * 4), first, MissReason.EXPIRED)
    for number in range(1000):
        history.record_all(namespace(number % 3), [b"%d" % number, b"again"], MissReason.EVICTED)
    assert history.reasons_for(namespace(1, b"zeta" * 4), [*first, b"x"], MissReason.NEVER_STORED) == [
        *[MissReason.EXPIRED] * 8,
        MissReason.NEVER_STORED,
    ]
    assert history.reason_for(namespace(0), b"0") is None
    assert history.reason_for(namespace(0), b"again") is MissReason.EVICTED
