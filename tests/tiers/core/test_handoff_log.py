"""The records that `explain` uses: the end of a publication, and a claim block by block."""

import pytest
from core_rig import SPEC, keys
from harness.operations import run_to_end
from hold_rig import D2P, P2D, PRIVATE, HoldRig
from simulation import ModelTier

from kvtier.tiers.core.call_specs import LookupSpec
from kvtier.tiers.core.commands import LoadFromTier
from kvtier.tiers.errors import HoldExpired, HoldNotFound
from kvtier.tiers.secondary_tier import NamespaceId, Outcome
from kvtier.tiers.stats.request_log import ClaimOutcome, ClaimRecord, HoldRecord, LookupRecord, OutcomeRun
from kvtier.tiers.types import HoldEnd, MissReason, NamespaceSpec, PublishStatus

OTHER = NamespaceSpec(NamespaceId(b"n" * 16 + b"o" * 16), world_size=1, part_bytes=(4096,))
"""Another namespace of the same tenant."""
FOREIGN = NamespaceSpec(NamespaceId(b"f" * 32), world_size=1, part_bytes=(4096,))


def held(rig: HoldRig, request_id: str = "r") -> HoldRecord:
    """Returns the record of the last publication of a request."""
    [record] = rig.core.explain(request_id)
    return record.holds[-1]


def claimed(rig: HoldRig) -> LookupRecord:
    """Returns the record of the reader's last claim."""
    [record] = rig.core.explain("mine")
    return record.lookups[-1]


def test_a_hold_from_publication_to_release() -> None:
    """Publication, pending blocks, claims with their blocks, and the end."""
    rig = HoldRig()
    rig.store(keys(0, 1))
    rig.publish(keys(0, 1, 2), now=3.0, direction=D2P)
    record = held(rig)
    assert (record.at, record.direction, record.num_tokens, record.blocks) == (3.0, D2P, 48, 3)
    assert (record.status, record.pending, record.end) == (PublishStatus.PUBLISHED, 1, None)
    rig.claim(now=4.0)
    rig.claim(now=5.0, first=[1])
    assert (record.claims, record.hits) == (2, 3)
    rig.core.release_hold(rig.name(), 6.0)
    assert held(rig) is record
    assert (record.end, record.ended_at) == (HoldEnd.RELEASED, 6.0)


def test_each_way_a_hold_ends() -> None:
    """Expiry, replacement by a hold of the same name, and reset."""
    rig = HoldRig()
    rig.store(keys(0))
    for request_id in ("late", "twice", "reset"):
        rig.publish(keys(0), request_id, duration=20 if request_id == "late" else 300)
    rig.publish(keys(0), "twice", now=1.0, duration=300)
    rig.core.tick(20.0)
    rig.core.reset(rig.session)
    assert (held(rig, "late").end, held(rig, "late").ended_at) == (HoldEnd.EXPIRED, 20.0)
    assert held(rig, "reset").end is HoldEnd.RESET
    [twice] = rig.core.explain("twice")
    assert [record.end for record in twice.holds] == [HoldEnd.REPLACED, HoldEnd.RESET]


def test_a_declined_publication_has_a_reason_and_no_end() -> None:
    rig = HoldRig(part=0)
    rig.publish(keys(0))
    assert (held(rig).status, held(rig).blocks, held(rig).end) == (PublishStatus.NO_ROOM, 1, None)
    rig = HoldRig(most=0)
    rig.publish(keys(0))
    assert held(rig).status is PublishStatus.TOO_MANY


def test_a_publication_may_come_after_the_end_of_its_request() -> None:
    """Engines send both in the background, so the record of the request is kept."""
    rig = HoldRig()
    run_to_end(rig.core.lookup(rig.session, keys(0), LookupSpec(request_id="r", lease_seconds=1e9), now=0))
    rig.core.finish_request(rig.session, "r")
    rig.publish(keys(0))
    [record] = rig.core.explain("r")
    assert (record.finished, len(record.lookups), len(record.holds)) == (True, 1, 1)


def test_a_claim_block_by_block() -> None:
    """Hits, pending and unwanted blocks; a claim without a request is not recorded."""
    rig = HoldRig()
    rig.store(keys(0, 1))
    rig.publish(keys(0, 1, 2))
    rig.claim(now=4.0, first=[1])
    record = claimed(rig)
    assert record.claim == ClaimRecord("engine", "r", ClaimOutcome.HELD, unwanted=1)
    assert (record.at, record.outcomes(), record.first_miss) == (
        4.0,
        (OutcomeRun(1, 0), OutcomeRun(1, MissReason.PENDING)),
        keys(2)[0],
    )
    run_to_end(rig.core.claim(rig.reader, rig.name(), first_positions=[], request_id="", lease_seconds=600, now=5.0))
    assert [record.request_id for record in rig.core.explain("mine")] == ["mine"]
    assert rig.core.explain("") == []


def test_missing_blocks_of_a_hold_have_a_reason() -> None:
    """The publisher ended before storing the block, or a tier returned it damaged."""
    rig = HoldRig()
    rig.store(keys(0))
    rig.publish([*keys(0, 1), PRIVATE])
    rig.core.close_session(rig.session.id)
    rig.claim()
    assert claimed(rig).outcomes() == (OutcomeRun(1, 0), OutcomeRun(2, MissReason.NEVER_STORED))
    assert claimed(rig).first_miss == keys(1)[0]

    rig = HoldRig(ModelTier("near", 1 << 20))
    rig.store_in_all_tiers(keys(0))
    rig.core.reset(rig.session)
    rig.publish(keys(0))
    rig.core.close_session(rig.session.id)
    assert any(isinstance(command, LoadFromTier) for command in rig.finish_jobs(Outcome.CORRUPT))
    rig.claim()
    assert claimed(rig).outcomes() == (OutcomeRun(1, MissReason.LOAD_FAILED),)


def test_a_hold_of_another_tenant_is_no_reason() -> None:
    rig = HoldRig()
    rig.publish(keys(0), session=rig.open("engine", FOREIGN))
    assert rig.core.may_come((rig.session.namespace.id, "engine", "r"))
    with pytest.raises(HoldNotFound):
        rig.claim()
    assert rig.core.stats().claims_missed == {ClaimOutcome.NOT_HELD: 1}


def test_a_claim_without_a_hold_has_a_reason() -> None:
    """Never published, released, expired, or another namespace."""
    rig = HoldRig()
    with pytest.raises(HoldNotFound):
        rig.claim()
    assert claimed(rig).claim == ClaimRecord("engine", "r", ClaimOutcome.NOT_HELD)
    assert claimed(rig).outcomes() == ()
    abroad = rig.open("engine", OTHER)
    rig.publish(keys(0), session=abroad)
    assert not rig.core.may_come((rig.session.namespace.id, "engine", "r")), "a claim would wait for its whole timeout"
    with pytest.raises(HoldNotFound):
        rig.claim()
    assert claimed(rig).claim == ClaimRecord("engine", "r", ClaimOutcome.OTHER_NAMESPACE)
    rig.core.release_hold((OTHER.id, "engine", "r"), 1.0)
    assert rig.core.may_come((rig.session.namespace.id, "engine", "r"))
    with pytest.raises(HoldNotFound):
        rig.claim()
    assert claimed(rig).claim == ClaimRecord("engine", "r", ClaimOutcome.NOT_HELD)
    rig.publish(keys(0), duration=30)
    with pytest.raises(HoldExpired):
        rig.claim(now=28)
    assert claimed(rig).claim == ClaimRecord("engine", "r", ClaimOutcome.EXPIRED)
    assert [record.holds[-1].claims for record in rig.core.explain("r")] == [0, 0]


def test_only_the_last_publications_are_recorded() -> None:
    """Repeated publications do not grow memory."""
    rig = HoldRig()
    for number in range(9):
        rig.publish(keys(number), direction=P2D if number % 2 else D2P, now=float(number))
    [record] = rig.core.explain("r")
    assert [hold.at for hold in record.holds] == [7.0, 8.0]
    assert SPEC.id == record.engine[0]
