"""Outcomes of lookups per namespace."""

from __future__ import annotations

from kvtier.tiers.base import NamespaceId
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
    """Memory is bounded, and the sums are exact."""
    tally = HitCounters(0, {b"acme" * 4: "acme"})
    for number in range(MAX_NAMESPACES):
        tally.hit(namespace(number), 0)
    for number in range(1000):
        tally.hit(namespace(MAX_NAMESPACES + number), 0)
        tally.hit(namespace(number, b"acme" * 4), 0)
    tally.hit(namespace(0), 0)
    cells = tally.all()
    assert len(cells) == MAX_NAMESPACES + 2
    others = {cell.tenant: cell.hits for cell in cells if cell.namespace is None}
    assert others == {"": [1000], "acme": [1000]}
    assert cells[0].hits == [2]
    assert tally.hits == [MAX_NAMESPACES + 2001]


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
