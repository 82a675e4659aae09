"""What a tier takes in, and what it leaves to be computed again."""

import pytest
from core_rig import GRANTED, Rig, keys
from simulation import EXTENT, ModelTier

from kvtier.tiers.base import OffloadPolicy, RequestInfo, Vote
from kvtier.tiers.core.commands import StoreInTier
from kvtier.tiers.core.manager import TierManager
from kvtier.tiers.core.settings import TierSettings
from kvtier.tiers.eviction.admission import SecondUse
from kvtier.tiers.types import DurableStatus, MissReason


class Choosy(Rig):
    """A core whose first tier takes in what is used a second time."""

    def __init__(self, *tiers: ModelTier) -> None:
        super().__init__()
        self.core = TierManager(
            EXTENT,
            EXTENT,
            tiers,
            max_queued_bytes=1 << 20,
            settings=TierSettings(admission={tiers[0].name: "second_use"}),
        )
        self.core.add_memory(0, EXTENT)
        self.session = self.open("engine")

    def store_for(self, request_id: str, names: list[bytes]) -> None:
        answer = self.core.prepare_store(self.session, names, request_id=request_id, expires_at=60)
        assert answer.statuses == GRANTED * len(names)
        assert answer.store_id is not None
        self.core.complete_store(self.session, answer.store_id)

    def look_up_for(self, request_id: str, names: list[bytes]) -> None:
        lease = self.core.lookup(self.session, names, prefix=True, request_id=request_id, expires_at=60).lease
        if lease is not None:
            self.core.release(self.session, lease.id)

    def stored(self, tier: int = 1) -> list[bytes]:
        """Ends all jobs; returns what a tier was given since."""
        jobs = [job for job in self.finish_jobs() if isinstance(job, StoreInTier) and job.tier == tier]
        return [block.key for job in jobs for block in job.blocks]


def test_what_one_request_uses_is_not_written() -> None:
    """However often that request looks again; the second request's use is what counts."""
    rig = Choosy(ModelTier("ssd", 1 << 20))
    rig.store_for("r1", keys(0, 1))
    rig.look_up_for("r1", keys(0, 1))
    assert rig.stored() == []
    assert rig.core.stats().tiers[1].declined == 4
    rig.look_up_for("r2", keys(0))
    assert rig.stored() == keys(0)
    rig.look_up_for("r3", keys(0))
    assert rig.stored() == [], "it is there"


def test_what_was_computed_again_is_written() -> None:
    """The first use may lie longer back than what the CPU tier keeps."""
    rig = Choosy(ModelTier("ssd", 1 << 20))
    rig.store_for("r1", keys(0))
    for start in (100, 200):
        rig.store_for(f"s{start}", keys(*range(start, start + 16)))
    rig.stored()
    rig.store_for("r2", keys(0))
    assert rig.stored() == keys(0)


def test_other_tiers_take_everything() -> None:
    """A filter is one tier's own."""
    rig = Choosy(ModelTier("ssd", 1 << 20), ModelTier("far", 1 << 20))
    rig.store_for("r1", keys(0, 1))
    jobs = [job for job in rig.finish_jobs() if isinstance(job, StoreInTier)]
    assert [job.tier for job in jobs] == [2]


def test_who_insists_or_asks_for_durability_gets_it() -> None:
    """REQUEST_LEVEL and Flush pass the filter by."""

    class Insisting(ModelTier):
        def on_new_request(self, request: RequestInfo) -> Vote:
            self.begun.append(request.request_id)
            return Vote(OffloadPolicy.REQUEST_LEVEL, "always")

    rig = Choosy(Insisting("ssd", 1 << 20))
    rig.core.begin_request(rig.session, RequestInfo("r1", rig.session.namespace.id))
    rig.store_for("r1", keys(0))
    assert rig.stored() == keys(0)
    rig.store_for("r2", keys(1))
    assert rig.stored() == []
    assert rig.core.durability.flush(rig.session.namespace.id, keys(1)) == bytes([DurableStatus.PENDING])
    assert rig.stored() == keys(1)


def test_an_orderly_end_writes_nothing_that_was_declined() -> None:
    """What the filter kept out is not what a tier was too busy for."""
    rig = Choosy(ModelTier("ssd", 1 << 20))
    rig.store_for("r1", keys(0))
    rig.core.durability.store_skipped()
    assert rig.stored() == []


def test_a_miss_for_that_reason_is_explained() -> None:
    """It was a policy that kept it out of the tier."""
    rig = Choosy(ModelTier("ssd", 1 << 20))
    rig.store_for("r1", keys(0))
    for start in (100, 200):
        rig.store_for(f"s{start}", keys(*range(start, start + 16)))
    rig.core.lookup(rig.session, keys(0), prefix=True, request_id="late", expires_at=60)
    [record] = rig.core.explain("late")
    assert [span.outcome for span in record.lookups[-1].outcomes()] == [MissReason.POLICY]


def test_what_is_admitted_by_a_hit_can_be_evicted_again() -> None:
    """It stands in line like any other: a small tier does not fill up for ever."""
    rig = Choosy(ModelTier("ssd", 4 * 4096))
    for start in (0, 4):
        names = keys(*range(start, start + 4))
        rig.store_for("r1", names)
        rig.look_up_for("r2", names)
        assert rig.stored() == names


def test_memory_is_bounded() -> None:
    """The oldest names are forgotten, and start anew."""
    admission = SecondUse(most=100)
    for number in range(1000):
        assert not admission.admits(number, "r1")
    assert sum(admission.admits(number, "r2") for number in range(1000)) <= 100
    assert not admission.admits("x", "r1")
    assert not admission.admits("x", "r1")
    assert admission.admits("x", None)


@pytest.mark.parametrize("admission", [{"sdd": "second_use"}, {"ssd": "second"}, {"cpu": "second_use"}])
def test_a_misspelt_filter_is_refused(admission: dict[str, str]) -> None:
    """Nothing falls back in silence."""
    with pytest.raises(ValueError, match="there is no"):
        TierManager(EXTENT, EXTENT, [ModelTier("ssd", 1 << 20)], settings=TierSettings(admission=admission))
