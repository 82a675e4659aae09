"""Admission filter of a tier: blocks are stored at their second use."""

import pytest
from core_rig import GRANTED, Rig, keys
from harness.operations import run_to_end
from simulation import EXTENT, ModelTier

from kvtier.tiers.core.call_specs import LookupSpec, StoreSpec
from kvtier.tiers.core.commands import StoreInTier
from kvtier.tiers.core.manager import TierManager
from kvtier.tiers.core.settings import TierSettings
from kvtier.tiers.eviction.admission import SecondUse
from kvtier.tiers.secondary_tier import NamespaceId, OffloadPolicy, RequestInfo, Vote
from kvtier.tiers.types import DurableStatus, MissReason


class FilteringRig(Rig):
    """A core whose first tier admits blocks at their second use."""

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
        answer = run_to_end(
            self.core.prepare_store(self.session, names, StoreSpec(request_id=request_id, lease_seconds=60), now=0)
        )
        assert answer.statuses == GRANTED * len(names)
        run_to_end(self.core.complete_store(self.session, answer.store_id))

    def look_up_for(self, request_id: str, names: list[bytes]) -> None:
        lease = run_to_end(
            self.core.lookup(self.session, names, LookupSpec(request_id=request_id, lease_seconds=60), now=0)
        ).lease
        if lease is not None:
            self.core.release(self.session, lease.id)

    def stored(self, tier: int = 1) -> list[bytes]:
        """Ends all jobs; returns the keys that a tier was given since the last call."""
        jobs = [job for job in self.finish_jobs() if isinstance(job, StoreInTier) and job.tier == tier]
        return [block.key for job in jobs for block in job.blocks]


def test_blocks_of_one_request_are_not_stored() -> None:
    """Repeated lookups of one request count once; the use by a second request counts."""
    rig = FilteringRig(ModelTier("ssd", 1 << 20))
    rig.store_for("r1", keys(0, 1))
    rig.look_up_for("r1", keys(0, 1))
    assert rig.stored() == []
    assert rig.core.stats().tiers[1].declined == 4
    rig.look_up_for("r2", keys(0))
    assert rig.stored() == keys(0)
    rig.look_up_for("r3", keys(0))
    assert rig.stored() == [], "it is there"


def test_a_recomputed_block_is_stored() -> None:
    """The first use may be older than the blocks that the CPU tier keeps."""
    rig = FilteringRig(ModelTier("ssd", 1 << 20))
    rig.store_for("r1", keys(0))
    for start in (100, 200):
        rig.store_for(f"s{start}", keys(*range(start, start + 16)))
    rig.stored()
    rig.store_for("r2", keys(0))
    assert rig.stored() == keys(0)


def test_tiers_without_a_filter_store_all_blocks() -> None:
    rig = FilteringRig(ModelTier("ssd", 1 << 20), ModelTier("far", 1 << 20))
    rig.store_for("r1", keys(0, 1))
    jobs = [job for job in rig.finish_jobs() if isinstance(job, StoreInTier)]
    assert [job.tier for job in jobs] == [2]


def test_request_level_and_flush_bypass_the_filter() -> None:

    class RequestLevelTier(ModelTier):
        def on_new_request(self, request: RequestInfo) -> Vote:
            self.begun.append(request.request_id)
            return Vote(OffloadPolicy.REQUEST_LEVEL, "always")

    rig = FilteringRig(RequestLevelTier("ssd", 1 << 20))
    rig.core.begin_request(rig.session, RequestInfo("r1", rig.session.namespace.id))
    rig.store_for("r1", keys(0))
    assert rig.stored() == keys(0)
    rig.store_for("r2", keys(1))
    assert rig.stored() == []
    assert run_to_end(rig.core.flush(rig.session.namespace.id, keys(1))) == bytes([DurableStatus.PENDING])
    assert rig.stored() == keys(1)


def test_the_final_flush_respects_the_filter() -> None:
    """A filtered block is not one that the tier was too busy to store."""
    rig = FilteringRig(ModelTier("ssd", 1 << 20))
    rig.store_for("r1", keys(0))
    rig.core.store_skipped()
    assert rig.stored() == []


def test_a_miss_of_a_filtered_block_is_a_policy_miss() -> None:
    rig = FilteringRig(ModelTier("ssd", 1 << 20))
    rig.store_for("r1", keys(0))
    for start in (100, 200):
        rig.store_for(f"s{start}", keys(*range(start, start + 16)))
    run_to_end(rig.core.lookup(rig.session, keys(0), LookupSpec(request_id="late", lease_seconds=60), now=0))
    [record] = rig.core.explain("late")
    assert [span.outcome for span in record.lookups[-1].outcomes()] == [MissReason.POLICY]


def test_an_admitted_block_can_be_evicted() -> None:
    """It is in the eviction queue, so a small tier does not stay full."""
    rig = FilteringRig(ModelTier("ssd", 4 * 4096))
    for start in (0, 4):
        names = keys(*range(start, start + 4))
        rig.store_for("r1", names)
        rig.look_up_for("r2", names)
        assert rig.stored() == names


def test_memory_of_the_filter_is_bounded() -> None:
    """The oldest names are forgotten and count from zero."""
    admission = SecondUse(most=100)
    names = [(NamespaceId(b"z" * 32), b"%d" % number) for number in range(1000)]
    for name in names:
        assert not admission.admits(name, "r1")
    assert sum(admission.admits(name, "r2") for name in names) <= 100
    assert not admission.admits(names[0], "r1")
    assert not admission.admits(names[0], "r1")
    assert admission.admits(names[0], None)


def test_a_tenant_with_many_names_keeps_those_of_another_one() -> None:
    """Else one tenant could keep the blocks of all others out of the tier."""
    admission = SecondUse(most=100)
    zeta, acme = (NamespaceId(tag * 32) for tag in (b"z", b"a"))
    assert not admission.admits((zeta, b"x"), "r1")
    for number in range(1000):
        assert not admission.admits((acme, b"%d" % number), "r1")
    assert admission.admits((zeta, b"x"), "r2")


@pytest.mark.parametrize("admission", [{"sdd": "second_use"}, {"ssd": "second"}, {"cpu": "second_use"}])
def test_an_unknown_filter_is_refused(admission: dict[str, str]) -> None:
    """There is no silent default."""
    with pytest.raises(ValueError, match=r"there is no|cannot have an admission filter"):
        TierManager(EXTENT, EXTENT, [ModelTier("ssd", 1 << 20)], settings=TierSettings(admission=admission))
