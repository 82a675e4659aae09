"""Claims in slices: a claim in slices is equal to one in one piece, and leaves nothing."""

from collections.abc import Callable, Hashable, Sequence

import pytest
from core_rig import keys
from harness.operations import Steps, run_to_end
from hold_rig import NO_STATUS, HoldRig

from kvtier.tiers.core.block import Block
from kvtier.tiers.core.call_specs import StoreSpec
from kvtier.tiers.core.holds import HoldClaim
from kvtier.tiers.errors import HoldNotFound
from kvtier.tiers.stats.request_log import LookupRecord
from kvtier.tiers.types import KeyStatus

NAMES = keys(*range(4), *range(20, 24), *range(4, 8), *range(4))
FAR = 1e9


def new_rig() -> HoldRig:
    """Returns a rig with a hold: blocks 0 to 7 are ready, of which two occur twice or are given up.

    Blocks 20 to 23 are unknown, and 22 and 23 are misses, because their engine has ended.
    """
    rig = HoldRig(extents=4)
    rig.store(keys(*range(8)))
    rig.publish(NAMES)
    store = run_to_end(rig.core.prepare_store(rig.session, keys(20, 21), StoreSpec(lease_seconds=FAR), now=0)).store_id
    rig.core.close_session(rig.session.id)
    rig.session = rig.open("engine")
    assert store is not None
    return rig


def begin(rig: HoldRig, most: int = 3, *, first: list[int] | None = None, request_id: str = "mine") -> Steps[HoldClaim]:
    claim = rig.core.claim(
        rig.reader,
        rig.name(),
        first_positions=first or [],
        request_id=request_id,
        lease_seconds=600,
        now=0.0,
        slice_keys=most,
    )
    return Steps(claim, "claim")


def pins(rig: HoldRig) -> list[int]:
    return [block.pins for block in rig.core._cpu_tier._index]


def record(rig: HoldRig) -> LookupRecord:
    [found] = rig.core.explain("mine")
    return found.lookups[-1]


@pytest.mark.parametrize("first", [[], [6], [100]])
@pytest.mark.parametrize("most", [1, 3, 5, 7, 16])
def test_slices_claim_the_same_blocks(most: int, first: list[int]) -> None:
    """Statuses, lease, pins, counters and explanation are equal."""
    whole, sliced = new_rig(), new_rig()
    expected = whole.claim(first=first)
    steps = begin(sliced, most, first=first)
    slices = 1
    while steps.step():
        slices += 1
    claim, is_long = steps.answer, len(NAMES) > most
    assert slices == -(-len(NAMES) // most) + is_long
    assert claim.statuses == expected.statuses
    assert pins(sliced) == pins(whole)
    assert sliced.stats() == whole.stats()
    assert (claim.hold.claims, claim.hold.record) == (expected.hold.claims, claim.hold.record)
    assert (claim.hold.record.claims, claim.hold.record.hits) == (1, expected.hold.record.hits)
    mine, theirs = record(sliced), record(whole)
    assert (mine.found, mine.first_miss, mine.claim) == (theirs.found, theirs.first_miss, theirs.claim)
    if claim.lease is None:
        assert expected.lease is None
        assert set(claim.statuses) == set(NO_STATUS)
    else:
        assert expected.lease is not None
        assert claim.lease.statuses() == expected.lease.statuses()
        assert (
            leased(claim)
            == leased(expected)
            == [name if status == KeyStatus.HIT else None for name, status in zip(NAMES, claim.statuses, strict=True)]
        )
        assert (claim.lease.keys, claim.lease.expires_at) == (len(NAMES), 600)
        sliced.core.release(sliced.reader, claim.lease.id)
    assert not len(sliced.core.leases())


def leased(claim: HoldClaim) -> list[bytes | None]:
    """Returns per item of the hold the key of the block that the lease gives a reader."""
    assert claim.lease is not None
    return [block and block.key for block in claim.lease.blocks(range(len(NAMES)))]


@pytest.mark.parametrize("slices", range(7))
def test_an_abandoned_claim_leaves_nothing(slices: int) -> None:
    """The client disconnects between two slices."""
    rig = new_rig()
    before, stats = pins(rig), rig.stats()
    claim = begin(rig)
    hold = claim.state.hold
    for _ in range(slices):
        claim.step()
    claim.operation.close()
    assert pins(rig) == before
    assert not rig.core.leases()
    assert rig.stats() == stats, "no block was claimed"
    assert (hold.claims, hold.record.claims, hold.record.hits) == (0, 0, 0)
    if slices > 1:
        assert not any(run.outcome == 0 for run in record(rig).outcomes()), "no hits were delivered"


def release_hold(rig: HoldRig) -> None:
    assert rig.core.release_hold(rig.name(), 1.0)


def replace_hold(rig: HoldRig) -> None:
    rig.publish(keys(0))


def reset(rig: HoldRig) -> None:
    rig.core.reset(rig.session)


def expire(rig: HoldRig) -> None:
    rig.core.tick(31.0)


def finish_request(rig: HoldRig) -> None:
    rig.core.finish_request(rig.reader, "mine")


def close_session(rig: HoldRig) -> None:
    rig.core.close_session(rig.reader.id)


ENDS = [release_hold, replace_hold, reset, expire, finish_request, close_session]


@pytest.mark.parametrize("end", ENDS, ids=lambda end: end.__name__)
def test_a_claim_fails_if_its_hold_or_lease_ends_between_two_slices(end: Callable[[HoldRig], None]) -> None:
    """A lease has only blocks of a hold that is open. No pin remains (B2.17, B3.19)."""
    rig, other = new_rig(), new_rig()
    claim = begin(rig)
    assert [claim.step(), claim.step()] == [True, True]
    assert rig.core.leases()
    end(rig)
    end(other)
    with pytest.raises(HoldNotFound):
        claim.step()
    for each in (rig, other):
        while any(each.core.resetting(session) for session in (each.session, each.reader)):
            each.core.work()
    assert not rig.core.leases()
    assert pins(rig) == pins(other)


@pytest.mark.parametrize("request_id", ["", "mine"])
def test_a_claim_in_slices_is_one_use(monkeypatch: pytest.MonkeyPatch, request_id: str) -> None:
    """The eviction policy gets the same request with each slice, and its end (B4.9)."""
    rig = new_rig()
    used, finished = [], []
    tier, use = rig.core._cpu_tier, rig.core._cpu_tier.use

    def spy(blocks: Sequence[Block], request: Hashable, retain_until: float = 0.0) -> int:
        used.append(request)
        return use(blocks, request, retain_until)

    monkeypatch.setattr(tier, "use", spy)
    monkeypatch.setattr(tier, "finish", finished.append)
    claim = begin(rig, request_id=request_id).finish()
    assert len(used) > 1
    assert set(used) == {claim if not request_id else claim.owner.user}
    assert finished == ([claim] if not request_id else [])
