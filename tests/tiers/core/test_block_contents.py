"""Contents of blocks: kept while a tier has the block, within a limit, and for events only."""

from __future__ import annotations

from core_rig import EXTENT, SPEC, Rig, keys  # type: ignore[attr-defined]
from harness.operations import run_to_end
from simulation import ModelTier

from kvtier.tiers.core.block_contents import BlockContents
from kvtier.tiers.core.bulk_eviction import EvictionRequest
from kvtier.tiers.core.call_specs import StoreSpec
from kvtier.tiers.core.manager import TierManager
from kvtier.tiers.core.settings import TierSettings
from kvtier.tiers.secondary_tier import NamespaceId
from kvtier.tiers.types import TENANT_TAG_BYTES

CONTENT = (b"parent", bytes(64), "")
NAMES = [NamespaceId(bytes([number]) * 32) for number in range(3)]


class DescribingRig(Rig):
    def __init__(self, *tiers: ModelTier) -> None:
        super().__init__(*tiers)
        self.core = TierManager(EXTENT, EXTENT, tiers, settings=TierSettings(content_bytes=1 << 20))
        self.core.add_memory(0, EXTENT)
        self.session = self.open("engine")

    def describe(self, names: list[bytes]) -> None:
        for key in names:
            self.core.describe(SPEC.id, key, CONTENT)

    @property
    def described(self) -> list[bytes]:
        contents = self.core._events.contents
        return [key for key in keys(*range(100)) if contents.get(SPEC.id, key) is not None]


def test_a_content_is_kept_until_no_tier_has_the_block() -> None:
    """B6.9 The eviction from the CPU tier keeps it while a disk has the block."""
    rig = DescribingRig(ModelTier("disk", 8 * 4096))
    rig.describe(keys(*range(4)))
    rig.store_in_all_tiers(keys(*range(4)))
    rig.core.reset(rig.session)
    rig.finish_jobs()
    assert rig.described == keys(*range(4)), "the disk has the blocks"
    run_to_end(rig.core.evict(EvictionRequest((1,))).run())
    assert rig.described == []
    assert rig.core._events.contents.nbytes == 0


def test_a_reset_drops_the_contents_if_only_the_cpu_tier_had_the_blocks() -> None:
    rig = DescribingRig()
    rig.describe(keys(*range(4)))
    rig.store(keys(*range(4)))
    rig.core.reset(rig.session)
    assert rig.described == []
    assert rig.core._events.contents.nbytes == 0


def test_a_store_that_fails_leaves_no_content() -> None:
    """B6.9 The client aborts, or is lost, or gets no room."""
    rig = DescribingRig()
    rig.describe(keys(0, 1, 2))
    answer = run_to_end(rig.core.prepare_store(rig.session, keys(0, 1, 2), StoreSpec(lease_seconds=60), now=0))
    assert answer.store_id is not None
    run_to_end(rig.core.complete_store(rig.session, answer.store_id, {1}))
    assert rig.described == keys(0, 2)
    room = [*range(100)]
    rig.describe(keys(*room))
    statuses = run_to_end(rig.core.prepare_store(rig.session, keys(*room), StoreSpec(lease_seconds=60), now=0)).statuses
    refused = [number for number in room if statuses[number] == 4]
    assert refused
    assert rig.described == keys(*[number for number in room if number not in refused])


def test_the_largest_namespace_loses_its_oldest_contents() -> None:
    contents = BlockContents(100 * (340 + 64))
    for number in range(1000):
        contents.put(NAMES[0], b"%d" % number, CONTENT)
        if number < 20:
            contents.put(NAMES[1], b"%d" % number, CONTENT)
        assert contents.nbytes <= contents.limit_bytes
    assert sum(contents.get(NAMES[1], b"%d" % number) is not None for number in range(1000)) == 20
    kept = [number for number in range(1000) if contents.get(NAMES[0], b"%d" % number) is not None]
    assert kept == list(range(kept[0], 1000))
    contents.drop_all(NAMES[0])
    assert contents.nbytes == 20 * (340 + 64)
    contents.drop_all(NAMES[1])
    assert not contents


def test_many_namespaces_do_not_displace_the_contents_of_another_tenant() -> None:
    """Long keys and names of adapters count, too."""
    contents = BlockContents(200 * (340 + 64))
    victim = NamespaceId(b"v" * 16)
    for number in range(80):
        contents.put(victim, b"%d" % number, CONTENT)
    for number in range(2000):
        namespace = NamespaceId(b"a" * TENANT_TAG_BYTES + number.to_bytes(12, "big"))
        contents.put(namespace, b"k" * 256, (b"p" * 256, bytes(64), "adapter" * 70))
        assert contents.nbytes <= contents.limit_bytes
    assert all(contents.get(victim, b"%d" % number) is not None for number in range(80))
    assert len(contents) <= 80 + 120 * (340 + 64) // (340 + 440 + 64 + 490)


def test_without_a_limit_nothing_is_kept() -> None:
    contents = BlockContents()
    contents.put(NAMES[0], b"k", CONTENT)
    assert (len(contents), contents.nbytes) == (0, 0)


def test_a_replay_has_blocks_in_the_order_of_their_stores() -> None:
    """B6.1 Parents come before their children, in slices of any size."""
    rig = DescribingRig()
    rig.store(keys(*range(10)))
    replay = rig.core.replay_events(rig.core.watch_events(None))
    found = []
    while not replay.done:
        found += [key for event in replay.step(3) for key in event.keys]
    assert found == keys(*range(10))
