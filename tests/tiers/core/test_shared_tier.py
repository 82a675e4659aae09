"""Tiers that do not know by heart what they hold, and lookups that leave tiers out."""

from typing import ClassVar

import pytest
from core_rig import HIT, MISS, PENDING, Rig, keys
from simulation import ModelTier

from kvtier.tiers.base import Medium, Outcome, TierFilter
from kvtier.tiers.core.commands import LoadFromTier, LookupInTier
from kvtier.tiers.errors import InvalidItem
from kvtier.tiers.types import KeyStatus

RETRY = bytes([KeyStatus.RETRY])


class Shared(ModelTier):
    """Others write to its storage as well."""

    shared: ClassVar[bool] = True
    local: ClassVar[bool] = False
    medium: ClassVar[Medium] = Medium.NETWORK


def statuses(rig: Rig, names: list[bytes], *, prefix: bool = True) -> bytes:
    """Looks up and lets go."""
    found = rig.core.lookup(rig.session, names, prefix=prefix, request_id="", expires_at=60)
    if found.lease is not None:
        rig.core.release(rig.session, found.lease.id)
    return found.statuses()


def questions(rig: Rig) -> list[LookupInTier]:
    """Takes the core's commands; returns what tiers are asked."""
    return [command for command in rig.core.take_commands() if isinstance(command, LookupInTier)]


def test_what_a_tier_does_not_know_yet_is_to_be_asked_again() -> None:
    """B3.15: RETRY until the tier has said; then HIT_PENDING or MISS. It is asked once."""
    rig = Rig(Shared("far", 1 << 20))
    assert statuses(rig, keys(0)) == RETRY
    [question] = questions(rig)
    assert statuses(rig, keys(0)) == RETRY
    assert questions(rig) == []
    rig.core.lookup_finished(question.job_id, [True])
    found = rig.core.lookup(rig.session, keys(0), prefix=True, request_id="", expires_at=60)
    assert found.statuses() == PENDING
    [load] = [command for command in rig.core.take_commands() if isinstance(command, LoadFromTier)]
    rig.core.job_finished(load.job_id, [Outcome.DONE])
    assert found.statuses() == HIT


def test_a_tier_that_has_not_got_it() -> None:
    """B3.15: a miss; asked again only when the answer may have become wrong."""
    rig = Rig(Shared("far", 1 << 20))
    statuses(rig, keys(0))
    [question] = questions(rig)
    rig.core.lookup_finished(question.job_id, [False])
    assert statuses(rig, keys(0)) == MISS
    assert questions(rig) == []
    rig.core.tick(11)
    assert statuses(rig, keys(0)) == RETRY
    assert len(questions(rig)) == 1


def test_order_of_tiers() -> None:
    """B3.15: the CPU tier first, then the tiers as configured; a tier that has it is not kept waiting by one that may."""
    near, far = ModelTier("near", 1 << 20), Shared("far", 1 << 20)
    for tiers, source in (((near, far), 1), ((far, near), 2)):
        rig = Rig(*tiers)
        rig.store(keys(0))
        rig.finish_jobs()
        assert rig.core.lookup(rig.session, keys(0), prefix=True, request_id="", expires_at=60).lease.sources == b"\0"  # type: ignore[union-attr]
        rig.core.close_session(rig.session.id)
        rig.session = rig.open("again")
        rig.core.reset(rig.session)
        lease = rig.core.lookup(rig.session, keys(0), prefix=True, request_id="", expires_at=60).lease
        assert lease is not None
        assert lease.sources[0] == 1, "both have it: the first one is asked"
        assert rig.core.stats().tiers[source].name == "near"


def test_the_prefix_scan_goes_on_past_what_is_open() -> None:
    """B3.17: all lookups are started at once; what lies behind an open question is not fetched on spec."""
    near = ModelTier("near", 1 << 20)
    rig = Rig(near, Shared("far", 1 << 20))
    rig.store(keys(0, 2))
    rig.finish_jobs()
    rig.core.reset(rig.session)
    found = rig.core.lookup(rig.session, keys(0, 1, 2, 3), prefix=True, request_id="", expires_at=60)
    assert found.statuses() == PENDING + RETRY * 3
    commands = rig.core.take_commands()
    [question] = [command for command in commands if isinstance(command, LookupInTier)]
    assert [key for _, key in question.keys] == keys(1, 3)
    [load] = [command for command in commands if isinstance(command, LoadFromTier)]
    assert [block.key for block in load.blocks] == keys(0)
    rig.core.lookup_finished(question.job_id, [True, False])
    assert statuses(rig, keys(0, 1, 2, 3)) == PENDING * 3 + MISS


def test_asking_ahead() -> None:
    """B3.17: who can wait asks first, and looks up once everything is known."""
    rig = Rig(Shared("far", 1 << 20))
    assert rig.core.query_shared_tiers(rig.session, keys(0, 1), prefix=True)
    [question] = questions(rig)
    assert len(question.keys) == 2
    rig.core.lookup_finished(question.job_id, [True])  # fewer answers than questions: the rest is not there
    assert not rig.core.query_shared_tiers(rig.session, keys(0, 1), prefix=True)
    assert statuses(rig, keys(0, 1)) == PENDING + MISS
    assert rig.core.stats().lookup_keys == 2
    assert not Rig(ModelTier("near", 1 << 20)).core.query_shared_tiers(rig.session, keys(0), prefix=True)


def test_an_open_question_counts_as_nothing() -> None:
    """B3.15: hits and misses make up what was answered for; RETRY is no answer."""
    rig = Rig(Shared("far", 1 << 20))
    statuses(rig, keys(0, 1))
    stats = rig.core.stats()
    assert (stats.lookup_keys, stats.lookup_misses) == (0, 0)


def test_what_a_tier_said_and_could_not_keep() -> None:
    """B3.18: another server removed the block meanwhile: a miss, and the next lookup asks anew."""
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
    """B3.15: by name, by medium and by locality, for one lookup."""
    rig = Rig(ModelTier("near", 1 << 20))
    rig.store(keys(0))
    rig.finish_jobs()
    rig.core.reset(rig.session)
    found = rig.core.lookup(rig.session, keys(0), prefix=True, request_id="", expires_at=60, tiers=without)
    assert found.statuses() == expected


def test_a_tier_elsewhere_can_be_left_out() -> None:
    """B3.15: by locality and by medium; what is not there otherwise is a miss at once, and nobody is asked."""
    rig = Rig(Shared("far", 1 << 20))
    for without in (TierFilter(remote=True), TierFilter(media=frozenset({Medium.NETWORK}))):
        found = rig.core.lookup(rig.session, keys(0), prefix=True, request_id="", expires_at=60, tiers=without)
        assert found.statuses() == MISS
        assert questions(rig) == []
    assert statuses(rig, keys(0)) == RETRY


def test_a_tier_that_does_not_exist_cannot_be_left_out() -> None:
    """A misspelt name is an error, not silence; and the CPU tier is where everything is read from."""
    rig = Rig(ModelTier("near", 1 << 20))
    for name in ("neer", "cpu"):
        with pytest.raises(InvalidItem, match=name):
            rig.core.lookup(
                rig.session,
                keys(0),
                prefix=True,
                request_id="",
                expires_at=60,
                tiers=TierFilter(names=frozenset({name})),
            )
