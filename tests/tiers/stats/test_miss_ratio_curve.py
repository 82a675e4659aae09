"""Estimated hit ratio of other sizes of a tier, from a sample of the keys."""

from __future__ import annotations

import hashlib
import random
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partialmethod

import pytest
from core_rig import SPEC, Rig
from harness.operations import run_to_end
from hypothesis import given
from hypothesis import strategies as st
from simulation import ModelTier

from kvtier.tiers.core.call_specs import LookupSpec, StoreSpec
from kvtier.tiers.core.manager import TierManager
from kvtier.tiers.core.settings import CPU_TIER, TierSettings
from kvtier.tiers.secondary_tier import NamespaceId, RequestInfo
from kvtier.tiers.stats.miss_ratio_curve import SCALES, MissRatioCurves, ReuseDistanceSampler
from kvtier.tiers.stats.request_log import OutcomeRun
from kvtier.tiers.types import HOLD_ONLY_KEY_PREFIX, MissReason, NamespaceSpec

BLOCK = 4096
NAMESPACE = NamespaceId(b"n" * 32)
ONE_SIZE = NamespaceSpec(NAMESPACE, world_size=1, part_bytes=(BLOCK,))
GROUP = bytes(4)
FOREVER = float("inf")


def digest(number: int) -> bytes:
    """Returns the key of a block: a hash, as in engines."""
    return hashlib.blake2b(b"%d" % number, digest_size=16).digest() + GROUP


def hash_of(key: bytes) -> int:
    """Hashes keys to the same values in every run, unlike `hash`."""
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big", signed=True)


def lru_hits(references: Sequence[tuple[int, int]], size: int) -> int:
    """Returns the hits of an LRU cache of this size; a reference is a block and its bytes."""
    held: OrderedDict[int, int] = OrderedDict()
    hits = 0
    for block, nbytes in references:
        hits += block in held
        held[block] = nbytes
        held.move_to_end(block)
        while sum(held.values()) > size:
            held.popitem(last=False)
    return hits


def refer(stack: ReuseDistanceSampler, block: int, nbytes: int) -> None:
    """Counts a reference, and stores an unknown block."""
    name = (NAMESPACE, digest(block))
    if not stack.takes(name[1]) or stack.touch(name):
        return
    stack.miss(None)
    stack.add(name, nbytes)


class TestStack:
    @given(
        st.lists(st.integers(0, 30), max_size=200),
        st.dictionaries(st.integers(0, 30), st.integers(1, 9)),
        st.lists(st.integers(0, 60), min_size=1, max_size=6).map(sorted),
    )
    def test_a_full_sample_gives_exact_hits(self, blocks: list[int], nbytes: dict[int, int], sizes: list[int]) -> None:
        """The hits are those of an LRU cache of each size, for any block sizes."""
        references = [(block, nbytes.get(block, 1)) for block in blocks]
        stack = ReuseDistanceSampler(sizes, rate=1.0)
        for block, size in references:
            refer(stack, block, size)
        assert sum(stack.hits) == len(references)
        for number, size in enumerate(sizes):
            assert sum(stack.hits[: number + 1]) == lru_hits(references, size)

    def test_new_blocks_after_a_long_time_with_the_same_blocks(self) -> None:
        """After 100,000 uses of two blocks, new ones have the same effect as at the start."""
        stack = ReuseDistanceSampler([4, 8], rate=1.0)
        for _ in range(50_000):
            refer(stack, 0, 1)
            refer(stack, 1, 1)
        assert stack.hits == [99_998, 0, 2]
        for block in range(2, 8):
            refer(stack, block, 1)
        for block in (1, 7, 0):
            refer(stack, block, 1)
        assert stack.hits == [99_999, 2, 8]
        for block in range(8, 16):
            refer(stack, block, 1)
        assert len(stack._blocks) == 8
        refer(stack, 0, 1)
        assert stack.hits == [99_999, 2, 17]

    def test_a_shrinking_sample_stays_accurate(self) -> None:
        """A repeatedly halved sample has an error of at most 0.02, within its memory limit."""
        rng = random.Random(7)
        references = [(int(10_000 * rng.random() ** 3), BLOCK) for _ in range(30_000)]
        sizes = [blocks * BLOCK for blocks in (500, 1000, 2000, 5000)]
        stack = ReuseDistanceSampler(sizes, rate=1.0, most=1000, hash_of=hash_of)
        for block, nbytes in references:
            refer(stack, block, nbytes)
        assert len(stack._blocks) <= 1000
        assert stack.rate <= 1 / 4
        expected = len(references) * stack.rate
        more = expected - sum(stack.hits)  # frequently used keys, as in `MissRatioCurves.of`
        for number, size in enumerate(sizes):
            estimate = (sum(stack.hits[: number + 1]) + more) / expected
            exact = ReuseDistanceSampler([size], rate=1.0)
            for block, nbytes in references:
                refer(exact, block, nbytes)
            assert estimate == pytest.approx(exact.hits[0] / len(references), abs=0.02)

    def test_blocks_beyond_the_largest_size_are_forgotten(self) -> None:
        """They use no memory."""
        stack = ReuseDistanceSampler([4 * BLOCK, 16 * BLOCK], rate=1.0)
        for block in range(1000):
            refer(stack, block, BLOCK)
            assert len(stack._blocks) <= 16
        assert stack.hits == [0, 0, 1000]


def curves(*capacities: int, where: int | None = None, **more: int) -> MissRatioCurves:
    """Returns the curves of tiers with these numbers of blocks, from all keys."""
    sizes = [blocks * BLOCK for blocks in capacities]
    return MissRatioCurves(sizes, lambda *_: where, **{"sampled": 256, **more})


def ask(asked: MissRatioCurves, blocks: Sequence[int], verdict: int | MissReason) -> None:
    """Looks up blocks that all have the same outcome."""
    asked.looked_up(ONE_SIZE, [digest(block) for block in blocks], (OutcomeRun(len(blocks), verdict),))


def put(asked: MissRatioCurves, blocks: Sequence[int]) -> None:
    for block in blocks:
        asked.put((NAMESPACE, digest(block)), BLOCK)


def ratios(asked: MissRatioCurves, tier: int = 0) -> list[float]:
    return [estimate.hit_ratio for estimate in asked.of(tier)]


class TestCurves:
    def test_a_loop_of_blocks(self) -> None:
        """A tier holds half of the two hundred blocks; twice its size would hold all."""
        looped = curves(150)
        put(looped, range(200))
        for _ in range(10):
            for start in range(0, 200, 10):
                ask(looped, range(start, start + 10), MissReason.EVICTED)
        assert ratios(looped) == pytest.approx([0, 0, 1, 1, 1], abs=0.01)

    def test_the_own_size_has_the_measured_ratio(self) -> None:
        """A tier may be better than LRU; the estimates of larger sizes are adjusted."""
        looped = curves(150)
        put(looped, range(200))
        for _ in range(10):
            for start in range(0, 200, 20):
                ask(looped, range(start, start + 10), 0)
                ask(looped, range(start + 10, start + 20), MissReason.EVICTED)
        [half, own, *larger] = ratios(looped)
        assert own == 0.5
        assert half <= own
        assert larger == pytest.approx([1, 1, 1], abs=0.01)

    def test_a_secondary_tier_includes_the_tiers_above(self) -> None:
        """Its curve is never below that of the tier above, at any size."""
        both = curves(200, 100)
        put(both, range(150))
        for _ in range(10):
            ask(both, range(150), 0)
        assert ratios(both, 0)[1:] == [1, 1, 1, 1]
        assert ratios(both, 1) == [1, 1, 1, 1, 1]

    def test_a_curve_needs_64_sampled_keys(self) -> None:
        few = curves(10)
        ask(few, range(63), MissReason.NEVER_STORED)
        assert few.of(0) == ()
        ask(few, [63], MissReason.NEVER_STORED)
        assert [estimate.scale for estimate in few.of(0)] == list(SCALES)
        assert ratios(few) == [0, 0, 0, 0, 0]

    def test_unstored_blocks_are_never_hits(self) -> None:
        """A repeated lookup does not store a block."""
        asked = curves(100)
        for _ in range(10):
            ask(asked, range(20), MissReason.NEVER_STORED)
        assert ratios(asked) == [0, 0, 0, 0, 0]

    def test_blocks_from_before_a_restart(self) -> None:
        """The first lookup counts as a hit of the tier's size; afterwards the block is known."""
        recovered = curves(50, 100, where=1)
        for _ in range(2):
            for start in range(0, 100, 10):
                ask(recovered, range(start, start + 10), 1)
        assert ratios(recovered, 1)[1:] == [1, 1, 1, 1]
        assert ratios(recovered, 0)[3] > 0.4, "known at the second lookup; four times the size would hold them"

    def test_old_lookups_fade(self) -> None:
        """Their weight falls with the number of later lookups."""
        changing = curves(100, window=1000)
        put(changing, range(50))
        for _ in range(100):
            ask(changing, range(50), 0)
        assert ratios(changing)[1] == 1
        for start in range(1000, 21_000, 50):
            ask(changing, range(start, start + 50), MissReason.NEVER_STORED)
        assert max(ratios(changing)) < 0.01

    def test_the_default_sample_is_one_key_in_64(self) -> None:
        thin = MissRatioCurves([100 * BLOCK], lambda *_: None)
        for start in range(0, 64 * 64, 64):
            assert thin.of(0) == ()
            ask(thin, range(start, start + 64), MissReason.NEVER_STORED)
        assert len(thin.of(0)) == len(SCALES)


def replay(capacity: int, requests: Sequence[Sequence[int]], key_of: Callable[[int], bytes] = digest) -> TierManager:
    """Serves requests from a CPU tier with this many blocks that evicts by last use."""
    region = capacity * BLOCK
    core = TierManager(region, region, (), settings=TierSettings(eviction={CPU_TIER: "lru"}))
    core.add_memory(0, region)
    session = core.open_session(b"s", "engine", 0, ONE_SIZE)
    for number, blocks in enumerate(requests):
        keys, request_id = [key_of(block) for block in blocks], f"{number}"
        core.begin_request(session, RequestInfo(request_id, NAMESPACE))
        lease = run_to_end(
            core.lookup(session, keys, LookupSpec(request_id=request_id, lease_seconds=FOREVER), now=0)
        ).lease
        hits = len(lease.items) if lease is not None else 0
        if hits < len(keys):
            answer = run_to_end(
                core.prepare_store(session, keys[hits:], StoreSpec(request_id=request_id, lease_seconds=FOREVER), now=0)
            )
            if answer.store_id is not None:
                run_to_end(core.complete_store(session, answer.store_id))
        core.finish_request(session, request_id)
        core.take_commands()
    return core


class TestInTheCore:
    def test_estimates_match_servers_of_other_sizes(self) -> None:
        """From the lookups of one server: the ratio at half, two, four and eight times its size."""
        rng = random.Random(5)
        chains = [range(1000 * number, 1000 * number + rng.randint(5, 40)) for number in range(1000)]
        requests = rng.choices(chains, [(rank + 1) ** -0.7 for rank in range(1000)], k=3000)
        cpu = replay(2000, requests).stats().tiers[0]
        for estimate in cpu.estimates:
            other = replay(int(2000 * estimate.scale), requests).stats()
            assert estimate.hit_ratio == pytest.approx(other.tiers[0].hits / other.lookup_keys, abs=0.03)

    @pytest.mark.slow
    @pytest.mark.parametrize("zeros", [0, 4], ids=["digits", "zeros"])
    def test_keys_that_are_not_hashes(self, zeros: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """For any names of blocks, the sample soon has the intended rate."""
        monkeypatch.setattr(
            MissRatioCurves, "__init__", partialmethod(MissRatioCurves.__init__, sampled=32, hash_of=hash_of)
        )
        rng = random.Random(5)
        chains = [range(1000 * number, 1000 * number + rng.randint(5, 40)) for number in range(1000)]
        requests = rng.choices(chains, [(rank + 1) ** -0.7 for rank in range(1000)], k=3000)

        def key_of(block: int) -> bytes:
            return b"%032d" % block + bytes(zeros) + GROUP

        core = replay(2000, requests, key_of)
        curves = core._miss_ratio_curves
        [stack] = curves._samplers
        sampled = sum(len(chain) for chain in chains) * 32 / 256
        assert sampled / 2 < len(stack._blocks) < sampled * 2
        estimates = core.stats().tiers[0].estimates
        assert len(estimates) == len(SCALES)
        for estimate in estimates:
            other = replay(int(2000 * estimate.scale), requests, key_of).stats()
            assert estimate.hit_ratio == pytest.approx(other.tiers[0].hits / other.lookup_keys, abs=0.05)

    def test_tiers_have_curves(self) -> None:
        """A curve needs enough samples; blocks that only a hold names do not count."""
        rig = Rig(ModelTier("near", 64 * BLOCK))
        rig.store([HOLD_ONLY_KEY_PREFIX + bytes(8) + GROUP])
        assert [tier.estimates for tier in rig.core.stats().tiers] == [(), ()]
        names = [digest(number) for number in range(8)]
        rig.store(names)
        for _ in range(600):
            found = run_to_end(
                rig.core.lookup(rig.session, names, LookupSpec(request_id="r", lease_seconds=1e9), now=0)
            )
            rig.core.release(rig.session, found.lease.id)
        for tier in rig.core.stats().tiers:
            assert [estimate.hit_ratio for estimate in tier.estimates] == [1.0] * len(SCALES)

    def test_curves_can_be_turned_off(self) -> None:
        core = TierManager(64 * BLOCK, 64 * BLOCK, (), settings=TierSettings(estimates=False))
        core.add_memory(0, 64 * BLOCK)
        session = core.open_session(b"s", "engine", 0, SPEC)
        for _ in range(100):
            run_to_end(
                core.lookup(session, [digest(number) for number in range(64)], LookupSpec(lease_seconds=1), now=0)
            )
        assert core.stats().lookup_keys == 6400
        assert core.stats().tiers[0].estimates == ()
