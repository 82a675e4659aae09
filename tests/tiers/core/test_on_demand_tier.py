"""A tier that loads only blocks which the server has located there for a request."""

from __future__ import annotations

from typing import ClassVar

from core_rig import GRANTED, HIT, MISS, PENDING, Rig, keys
from simulation import ModelTier

from kvtier.tiers.core.commands import LoadFromTier, LookupInTier, StoreInTier
from kvtier.tiers.secondary_tier import Medium, Outcome, TierFilter

KEYS = keys(0, 1, 2)


class OnDemand(ModelTier):
    durable: ClassVar[bool] = False
    on_demand: ClassVar[bool] = True
    local: ClassVar[bool] = False
    medium: ClassVar[Medium] = Medium.NETWORK


def _rig(*others: ModelTier) -> Rig:
    return Rig(*others, OnDemand("peers", 1 << 20))


def _locate(rig: Rig, names: list[bytes], tier: int = 1) -> None:
    rig.core.locate(tier, rig.session, names, now=0.0)


def _loads(rig: Rig) -> list[LoadFromTier]:
    return [command for command in rig.core.take_commands() if isinstance(command, LoadFromTier)]


def test_blocks_that_are_not_located_are_misses() -> None:
    """The tier is not asked, and they do not count as misses of it."""
    rig = _rig()
    assert rig.look_up(KEYS) == rig.look_up(KEYS, prefix=False) == MISS * 3
    assert not any(isinstance(command, LookupInTier) for command in rig.core.take_commands())
    assert [tier.misses for tier in rig.core.stats().tiers[1:]] == [0]


def test_located_blocks_are_loaded_once() -> None:
    """Two lookups share the load. A block is located for one load only."""
    rig = _rig()
    _locate(rig, KEYS[:2])
    assert rig.look_up(KEYS) == PENDING * 2 + MISS
    [load] = _loads(rig)
    assert rig.look_up(KEYS[:2]) == PENDING * 2
    assert _loads(rig) == []
    rig.core.job_finished(load.job_id, [Outcome.DONE, Outcome.FAILED])
    assert rig.look_up(KEYS) == HIT + MISS * 2
    rig.core.reset(rig.session)
    assert rig.look_up(KEYS) == MISS * 3


def test_located_blocks_are_forgotten_after_ten_seconds() -> None:
    rig = _rig()
    _locate(rig, KEYS)
    rig.core.tick(11.0)
    assert rig.look_up(KEYS) == MISS * 3


def test_nothing_is_stored_in_the_tier() -> None:
    rig = _rig()
    assert rig.store(KEYS) == GRANTED * 3
    assert not any(isinstance(command, StoreInTier) for command in rig.core.take_commands())


def test_what_is_lacking_leaves_out_other_tiers() -> None:
    rig = _rig(ModelTier("near", 1 << 20))
    rig.store_in_all_tiers(KEYS[:1])
    assert rig.core.lacking(rig.session, KEYS, TierFilter()) == KEYS[1:]


def test_blocks_that_are_not_loaded_can_be_withdrawn() -> None:
    """A block that is being loaded stays."""
    rig = _rig()
    _locate(rig, KEYS)
    assert rig.look_up(KEYS[:1]) == PENDING
    assert rig.core.withdraw(1, rig.session, KEYS) == KEYS[1:]
    assert rig.look_up(KEYS) == PENDING + MISS * 2
