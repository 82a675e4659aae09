"""Eviction policies: their common contract, and the behaviour of each."""

import gc
import random
from collections.abc import Hashable, Iterator
from functools import partial
from typing import Any

import pytest
from harness.function_counts import functions_of
from simulation import EXTENT, ModelTier

from kvtier.tiers.core.catalog import Catalog, CatalogEntry
from kvtier.tiers.core.manager import TierManager
from kvtier.tiers.core.settings import CPU_TIER, TierSettings
from kvtier.tiers.eviction import ARC, DEFAULT_POLICY, LRU, MQ, POLICIES, EvictionPolicy, Forecast
from kvtier.tiers.eviction.open_requests import MAX_OPEN, LastRequest, OpenRequests
from kvtier.tiers.eviction.queues import EvictionQueues
from kvtier.tiers.eviction.quotas import Quotas
from kvtier.tiers.eviction.request_chains import BlockRun, UseClock
from kvtier.tiers.eviction.reuse_model import BINS, Kind, ReuseModel
from kvtier.tiers.secondary_tier import Entry, NamespaceId
from kvtier.tiers.stats.eviction_history import EvictionHistory

SPACE = NamespaceId(bytes(32))


class Item:
    """A block with a name; a new object every time it comes."""

    def __init__(self, name: Hashable) -> None:
        self.name = name
        self.policy_node: object = None

    def __repr__(self) -> str:
        return f"<{self.name}>"


def run_of(item: Item) -> BlockRun[Item]:
    """Returns the run that the forecast policy has put an item into."""
    assert isinstance(item.policy_node, BlockRun)
    return item.policy_node


class Cache:
    """A tier with a fixed number of items around a policy; serves requests as the core does."""

    def __init__(self, policy: EvictionPolicy[Item], capacity: int) -> None:
        self.policy = policy
        self.capacity = capacity
        self.items: dict[Hashable, Item] = {}
        self.requests = 0
        self.finishes = True

    def serve(self, *names: Hashable) -> int:
        """Returns the hits of the unbroken prefix; afterwards all items are cached."""
        self.requests += 1
        hits = next((place for place, name in enumerate(names) if name not in self.items), len(names))
        self.policy.use([self.items[name] for name in names[:hits]], self.requests)
        missing = [name for name in names if name not in self.items]
        self.make_room(len(missing), names)
        self.items.update((name, Item(name)) for name in missing)
        self.policy.use([self.items[name] for name in names[hits:]], self.requests)
        if self.finishes:
            self.policy.finish(self.requests)
        return hits

    def make_room(self, count: int, pinned: tuple[Hashable, ...]) -> None:
        excess = len(self.items) + count - self.capacity
        victims = (item for item in self.policy.victims() if item.name not in pinned)
        for item in [item for item, _ in zip(victims, range(excess), strict=False)]:
            self.policy.remove(item)
            del self.items[item.name]


@pytest.fixture(params=POLICIES)
def policy(request: pytest.FixtureRequest) -> EvictionPolicy[Item]:
    return POLICIES[request.param]()


def names(items: list[Item]) -> list[Hashable]:
    return [item.name for item in items]


def chain(conversation: int, length: int) -> list[tuple[int, int]]:
    """Returns the names of a conversation's first blocks."""
    return [(conversation, place) for place in range(length)]


def test_victims_are_all_items_once(policy: EvictionPolicy[Item]) -> None:
    """After any uses and removals every item is a victim exactly once."""
    rng = random.Random(7)
    held: dict[Hashable, Item] = {}
    for step in range(3000):
        conversation = rng.randrange(40)
        wanted = chain(conversation, rng.randint(1, 30))[rng.choice((0, 0, 5)) :]
        for name in wanted:
            held.setdefault(name, Item(name))
        policy.use([held[name] for name in wanted], rng.choice((None, step, rng.randrange(10))))
        if rng.random() < 0.1:
            policy.finish(rng.randrange(10))
        for name in rng.sample(list(held), min(len(held), rng.choice((0, 3, 20)))):
            policy.remove(held.pop(name))
        queue = list(policy.victims())
        assert len(policy) == len(queue) == len(held)
        assert set(queue) == set(held.values())
        assert (policy.oldest() in queue) == bool(queue)


def test_an_unknown_item_may_be_removed(policy: EvictionPolicy[Item]) -> None:
    """An item that found no room was never added."""
    policy.remove(Item("stranger"))
    assert len(policy) == 0
    assert policy.oldest() is None
    assert list(policy.victims()) == []


def test_the_tail_of_a_request_goes_first(policy: EvictionPolicy[Item]) -> None:
    """Without its head the rest of a prefix is useless."""
    items = [Item(number) for number in range(12)]
    policy.use(items, "r")
    assert names(list(policy.victims())) == list(range(11, -1, -1))


def test_oldest_is_the_least_recently_used_item(policy: EvictionPolicy[Item]) -> None:
    """Size classes compare their idle times, independent of the order of victims."""
    for number in range(20):
        policy.use([Item((number, place)) for place in range(3)], number)
    for item in list(policy.victims()):
        if item.name[0] < 5:  # type: ignore[index]
            policy.use([item], "again")
    oldest = policy.oldest()
    assert oldest.name[0] == 5  # type: ignore[index]


def test_memory_is_bounded(policy: EvictionPolicy[Item]) -> None:
    """Ghosts and open requests are limited, even if no request ever finishes."""
    cache = Cache(policy, 100)
    for number in range(4000):
        policy.use([], ("never finished", number))
        cache.serve(*chain(number, 5))
    for value in vars(policy).values():
        if hasattr(value, "__len__"):
            assert len(value) <= 1200, value
        if isinstance(value, LastRequest):
            assert len(value._last) == len(policy)
            assert len(value._open._open) <= MAX_OPEN


def test_frequently_used_items_survive(policy: EvictionPolicy[Item]) -> None:
    """A system prompt stays while requests come and go."""
    cache = Cache(policy, 60)
    hits = [cache.serve(*chain(0, 4), *chain(number, 10)) for number in range(1, 200)]
    assert hits[1:] == [4] * 198


def test_the_same_trace_gives_the_same_order() -> None:
    """No policy depends on addresses or hashes."""
    rng = random.Random(3)
    requests = [chain(rng.randrange(60), rng.randint(1, 20)) for _ in range(500)]
    for new in POLICIES.values():
        orders = []
        for _ in range(2):
            cache = Cache(new(), 200)
            for request in requests:
                cache.serve(*request)
            orders.append(names(list(cache.policy.victims())))
        assert orders[0] == orders[1]


def test_lru_keeps_a_chain_together() -> None:
    """B4.9: hits and stores of a request are one chain: its head does not go before its tail."""
    lru = LRU[Item]()
    head, tail = [Item(0), Item(1)], [Item(2), Item(3)]
    lru.use(head, "r")
    lru.use([Item("other")], "s")
    lru.use(tail, "r")
    assert names(list(lru.victims())) == ["other", 3, 2, 1, 0]


def test_lru_separates_finished_requests_of_one_name() -> None:
    """Engines reuse request ids."""
    lru = LRU[Item]()
    lru.use([Item(0)], "r")
    lru.finish("r")
    lru.use([Item(1)], "r")
    assert names(list(lru.victims())) == [0, 1]


def test_arc_enlarges_the_queue_whose_ghost_returns() -> None:
    """A ghost that returns means that its queue was too short."""
    arc = ARC[Item]()
    cache = Cache(arc, 4)
    for name in "abcd":
        cache.serve(name)
    assert cache.serve("a") == 1
    cache.serve("e")
    assert "b" not in cache.items, "of the items used once, the oldest goes"
    assert (arc._target, len(arc._recent), len(arc._frequent)) == (0, 3, 1)
    cache.serve("b")
    assert (arc._target, len(arc._frequent)) == (1, 2), "more room for items used once"


def test_arc_survives_a_scan() -> None:
    """Items that were used twice survive any number of items that are used once."""
    cache = Cache(ARC[Item](), 20)
    for _ in range(2):
        for name in "abcde":
            cache.serve(name)
    for number in range(500):
        cache.serve(number)
    assert [cache.serve(name) for name in "abcde"] == [1] * 5


def test_mq_ranks_by_frequency() -> None:
    """Four uses outrank two, also if the item was evicted in between."""
    mq = MQ[Item]()
    a, b, c = Item("a"), Item("b"), Item("c")
    for number in range(4):
        mq.use([a], number)
    mq.use([b], 4)
    mq.use([b], 5)
    mq.use([c], 6)
    assert names(list(mq.victims())) == ["c", "b", "a"]
    mq.remove(a)
    a = Item("a")
    mq.use([a], 7)
    assert names(list(mq.victims())) == ["c", "b", "a"]


def test_mq_demotes_formerly_popular_items() -> None:
    """An item that is unused for a lifetime moves down queue by queue."""
    cache = Cache(MQ[Item](), 20)
    for _ in range(64):
        cache.serve("star")
    for number in range(2000):
        cache.serve(number % 25 if number % 2 else -number)
    assert "star" not in cache.items


def test_a_request_counts_as_one_use() -> None:
    """Its lookups and stores use one id until it is finished."""
    last = LastRequest[Item]()
    item = Item("a")
    assert last.fresh([item], "r") == [item]
    assert last.fresh([item], "r") == []
    last.finish("r")
    assert last.fresh([item], "r") == [item], "another request of that name"
    assert last.fresh([item], None) == last.fresh([item], None) == [item]


def test_open_requests_are_bounded() -> None:
    """The oldest request counts as finished, and policies are told."""
    over: list[list[int]] = []
    open_requests = OpenRequests[list[int]](list, over.append)
    first = open_requests.of(0)
    assert open_requests.of(0) is first
    assert open_requests.of(None) is not open_requests.of(None)
    for number in range(1, MAX_OPEN + 1):
        open_requests.of(number)
    assert len(open_requests._open) == MAX_OPEN
    assert open_requests.of(0) is not first
    assert over[0] is first
    last = open_requests.of(MAX_OPEN)
    for _ in range(2):
        open_requests.finish(MAX_OPEN)
    assert over[-1] is last
    assert len(over) == 3


@pytest.mark.slow
def test_unfinished_requests_are_forgotten() -> None:
    """The forecast frees their state without the garbage collector, also if their engine died."""
    rng = random.Random(1)
    cache = Cache(Forecast(), 100)
    cache.finishes = False

    def kept_after(requests: int) -> int:
        for _ in range(requests):
            cache.serve(*chain(rng.randrange(30), rng.randint(1, 20)))
        # `isinstance` would query modules for `__class__`
        return sum(type(item) is BlockRun for item in gc.get_objects())

    gc.disable()
    try:
        first = kept_after(4 * MAX_OPEN)
        assert kept_after(8 * MAX_OPEN) < 1.5 * first
    finally:
        gc.enable()


def conversations(cache: Cache, turns: int, seed: int, count: int = 3000) -> int:
    """Serves half one-off requests and half conversations with pauses; returns the hits."""
    rng = random.Random(seed)
    waiting: list[tuple[int, int, int]] = []
    hits = 0
    for now in range(count):
        if waiting and waiting[0][0] <= now:
            _, number, turn = waiting.pop(0)
        else:
            number, turn = now, 1
        hits += cache.serve(*chain(number, 4 * turn), ("end of", number, turn))
        if turn < turns and (turn > 1 or rng.random() < 0.2):
            waiting.append((now + 60, number, turn + 1))
            waiting.sort()
    return hits


def test_forecast_learns_which_conversations_return() -> None:
    """Conversations with a second turn are kept at the expense of new ones."""
    forecast, lru = Cache(Forecast(), 150), Cache(LRU[Item](), 150)
    assert conversations(forecast, 8, seed=1) > 2 * conversations(lru, 8, seed=1)
    factors = forecast.policy._model._factors  # type: ignore[attr-defined]
    assert factors["turn", 2] > 1.5 * factors["turn", 0]
    assert factors["end", 0] < 0.2, "a last block is never requested again"


def test_forecast_keeps_a_part_of_a_loop() -> None:
    """If a loop does not fit, a part of it is kept.

    A policy that keeps the youngest hits nothing.
    """
    forecast, lru = Cache(Forecast(), 200), Cache(LRU[Item](), 200)
    hits = {cache: sum(cache.serve(*chain(number % 40, 10)) for number in range(2000)) for cache in (forecast, lru)}
    assert hits[lru] == 0
    assert hits[forecast] > 0.3 * 20_000, "the best possible is half of them"


def test_forecast_recognises_an_evicted_conversation() -> None:
    """Ghosts of its chain give its turn and its reuse."""
    forecast = Forecast[Item]()
    cache = Cache(forecast, 30)
    cache.serve(*chain(0, 20))
    for number in range(1, 10):
        cache.serve(*chain(number, 20))
    assert (0, 0) not in cache.items
    cache.serve(*chain(0, 24))
    run = run_of(cache.items[0, 0])
    assert (run.chain.turn, run.pause) == (1, 204.0), "the requests between and its own new blocks"
    assert run_of(cache.items[0, 22]).pause == run.pause, "new blocks inherit the pause of the conversation"


def test_forecast_separates_a_shared_prompt_from_a_conversation() -> None:
    """Requests that differ after a common prompt are not turns of one conversation."""
    forecast = Forecast[Item]()
    cache = Cache(forecast, 500)
    for number in range(1, 10):
        cache.serve(*chain(0, 8), *chain(number, 8))
    run = run_of(cache.items[0, 0])
    assert run.chain.turn == 0
    assert 8 <= run.pause <= 16, "each request uses the prompt"
    assert run_of(cache.items[9, 0]).pause == 0, "unknown"


def test_forecast_evicts_no_block_before_the_blocks_that_follow_it() -> None:
    """The parts of a prompt have different values, but a part is useless without its beginning."""
    rng = random.Random(5)
    cache = Cache(Forecast(), 300)
    before: dict[Hashable, Hashable] = {}
    for _ in range(1500):
        root, branch = rng.randrange(8), 10 + min(int(rng.expovariate(1 / 20)), 99)
        prompt = [*chain(root, 6), *chain(branch * 10 + root, rng.randint(1, 30))]
        before.update(zip(prompt[1:], prompt, strict=False))
        cache.serve(*prompt)
        assert all(before.get(name, name) in cache.items for name in cache.items)


@pytest.mark.parametrize("seconds", [0.0, 1e-3, 1.0, 100.0])
def test_the_unit_of_time_does_not_matter(seconds: float) -> None:
    """A trace that is compressed or stretched gives the same order of eviction."""
    clock = UseClock()
    ages = []
    for number in range(4000):
        before = clock.now
        clock.advance(8, number * seconds)
        ages.append(clock.now - before)
    assert ages[-1] == pytest.approx(8, rel=0.01)


def test_the_clock_follows_time_and_not_the_load() -> None:
    """If half as many requests come, a pause of the same length has nearly the same age."""
    clock, now = UseClock(), 0.0
    for step in [1.0] * 2000 + [2.0] * 2000:
        before, now = clock.now, now + step
        clock.advance(8, now)
    assert clock.now - before == pytest.approx(0.9 * 16 + 0.1 * 8, rel=0.01)


def test_the_clock_counts_uses_within_one_tick_of_the_caller() -> None:
    """If the caller's clock is coarse, an earlier use still has a higher age."""
    clock = UseClock()
    for number in range(4000):
        before = clock.now
        clock.advance(8, number // 100 * 60.0)
        assert clock.now > before


def test_the_clock_recalibrates_after_a_large_change_of_the_load() -> None:
    clock, now = UseClock(), 0.0
    for step in [1.0] * 2000 + [1e-3] * 200_000:
        before, now = clock.now, now + step
        clock.advance(8, now)
    assert 8 / 20 < clock.now - before < 8 * 20


@pytest.mark.slow
def test_forecast_keeps_consistent_counts() -> None:
    """Every run with items is in the cell of its kind and bin; every ghost counts for its run."""
    rng = random.Random(11)
    forecast = Forecast[Item]()
    cache = Cache(forecast, 300)
    for _ in range(1500):
        cache.finishes = rng.random() < 0.9
        cache.serve(*chain(rng.randrange(80), rng.randint(1, 40)))
        standing = [(run, bucket) for _, bucket in forecast._ranked for run in bucket.runs]
        assert {run for run, _ in standing} == set(map(run_of, cache.items.values()))
        for run, bucket in standing:
            assert run.bucket is bucket
            assert (bucket.kind, bucket.bin) == (run.kind, run.bin)
            assert all(run_of(item) is run for item in run.items)
            assert run.at_risk >= len(run.items) > 0
            assert run.parent is None or (run.parent.items and run in run.parent.children)
            assert all(child.items and child.parent is run for child in run.children)
        ghosts = list(forecast._ghosts.values())
        assert all(run.ghosts == ghosts.count(run) for run in set(ghosts))
        assert forecast._ranked == sorted(forecast._ranked, key=lambda entry: entry[0])
        waiting = [(run, schedule) for schedule in forecast._schedules.values() for run in schedule]
        assert all(run.schedule is schedule and (run.items or run.ghosts) for run, schedule in waiting)
        assert len(waiting) == len({run for run, _ in waiting})
        known = {run for open_chain in forecast._requests._open.values() for run in open_chain.runs}
        assert all((run.items or run.ghosts) and run in run.chain.runs for run in known)
        assert len(forecast) == len(cache.items)


class Watched(Item):
    """An item that counts accesses to all items."""

    looked = 0

    def __hash__(self) -> int:
        Watched.looked += 1
        return id(self)


class WatchedList(list[Item]):
    """A list that counts each item that is read."""

    def __iter__(self) -> Iterator[Item]:
        for item in super().__iter__():
            Watched.looked += 1
            yield item

    def __getitem__(self, place: Any) -> Any:
        Watched.looked += len(range(*place.indices(len(self)))) if isinstance(place, slice) else 1
        return super().__getitem__(place)


@pytest.mark.parametrize("step", [1, -1], ids=["head first", "tail first"])
def test_forecast_is_fast_for_alternating_runs(step: int) -> None:
    """Alternating lookups of two requests access each block a few times only."""
    forecast = Forecast[Item]()
    one, other = ([Watched((name, number)) for number in range(1000)] for name in ("one", "other"))
    for name, items in (("one", one), ("other", other)):
        forecast.use(items, name)
    Watched.looked = 0
    forecast.use(WatchedList([item for pair in zip(one, other, strict=True) for item in pair][::step]), "by turns")
    assert Watched.looked < 20 * 2000, "a search from the beginning would need a million"
    assert {*forecast.victims()} == {*one, *other}
    assert len(list(forecast.victims())) == len(forecast) == 2000


class Compared(Item):
    """An item that counts its comparisons with others."""

    compared = 0

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        Compared.compared += 1
        return self is other


@pytest.mark.parametrize("step", [1, -1, 2, -7])
@pytest.mark.parametrize("is_used", [False, True], ids=["removed", "used by another request"])
def test_forecast_finds_blocks_inside_a_long_prompt(*, is_used: bool, step: int) -> None:
    """A block that leaves a run of 4,096 blocks is not compared with the others."""
    forecast = Forecast[Item]()
    items: list[Item] = [Compared(number) for number in range(4096)]
    forecast.use(items[:4000], "store")
    forecast.use(items[4000:], "store")
    forecast.finish("store")
    leaving = items[1000:3000][::step]
    parts = [leaving[start : start + 100] for start in range(0, len(leaving), 100)]
    Compared.compared = 0
    for number, part in enumerate(parts):
        if is_used:
            forecast.use(part, f"lookup {number // 4}")
        else:
            for item in part:
                forecast.remove(item)
    assert Compared.compared < 20 * len(leaving), "a search from the beginning would need a million"
    left = set(items) if is_used else set(items) - set(leaving)
    assert set(forecast.victims()) == left
    assert len(list(forecast.victims())) == len(forecast) == len(left)
    stored = [item for item in reversed(list(forecast.victims())) if item not in set(leaving)]
    assert names(stored) == sorted(names(stored), key=int), "the others keep their order"
    for item in items:
        forecast.remove(item)
    assert not len(forecast)


def test_forecast_joins_the_slices_of_a_lookup() -> None:
    """A lookup in slices leaves the same runs and the same order of victims as one in one piece."""
    orders = []
    for size in (100, 1000, 7):
        forecast = Forecast[Item]()
        items, later = ([Item((name, number)) for number in range(1000)] for name in ("first", "later"))
        forecast.use(items, "store")
        forecast.finish("store")
        forecast.use(later, "another store")
        for start in range(0, 500, size):
            forecast.use(items[start : min(start + size, 500)], "lookup")
        for start in range(500, 1000, size):
            forecast.use(items[start : start + size], "lookup")
        forecast.finish("lookup")
        assert len({run_of(item) for item in items}) == 2, "all blocks, and the last block of the store"
        orders.append(names(list(forecast.victims())))
    assert orders[0] == orders[1] == orders[2]


def test_the_time_of_a_use_does_not_grow_with_the_request(policy: EvictionPolicy[Item]) -> None:
    """A request uses many blocks that single requests have stored, 64 with each call."""
    items = [Item(number) for number in range(8192)]
    for item in items:
        policy.use([item], now=item.name)
    slices = [items[start : start + 64] for start in range(0, len(items), 64)]
    costs = [functions_of(partial(policy.use, part, "lookup", 9000 + n)) for n, part in enumerate(slices)]
    assert max(costs[-32:]) < 2 * max(costs[4:36]) + 100
    later = [functions_of(partial(policy.use, items[:1], f"later {n}", 9200 + n)) for n in range(512)]
    assert max(later) <= max(costs)
    policy.finish("lookup")
    assert {*policy.victims()} == {*items}


def test_forecast_refreshes_long_requests_in_parts() -> None:
    """After further uses all runs have the kind and the age of the request's last use."""
    forecast = Forecast[Item]()
    items = [Item(number) for number in range(600)]
    for item in items:
        forecast.use([item])
    forecast.use(items, "first")
    forecast.finish("first")
    for start in range(0, 600, 50):
        forecast.use(items[start : start + 50], "second")
    new = [Item(("new", number)) for number in range(8)]
    forecast.use(new, "second")
    runs = [run_of(item) for item in (*items, *new)]
    chained, last = runs[0].chain, runs[-1]
    assert last.kind.factors == (("end", 0),)
    assert any(run.kind is not forecast._classify(run) for run in runs), "the turn is known at the end only"
    kinds = {run: forecast._classify(run) for run in runs}
    forecast.finish("second")
    other = Item("other")
    for number in range(60):
        forecast.use([other], number)
    assert all(run.kind is kinds[run] for run in runs)
    assert all(run.bin == 0 and run.used_at == chained.last_use for run in runs)


def test_forecast_counts_a_miss_once_if_a_run_is_refreshed_late() -> None:
    """A run of a long request passes an age bin before the request's pass comes to it."""
    forecast = Forecast[Item]()
    items = [Item(number) for number in range(400)]
    for item in items:
        forecast.use([item], now=0.0)
    for start in range(0, 400, 20):
        forecast.use(items[start : start + 20], "long")
    forecast.finish("long")
    kinds = {kind for kind, _ in forecast._buckets}
    before = sum(sum(kind.misses) for kind in kinds)
    others = [Item(("other", number)) for number in range(2000)]
    for number in range(0, 2000, 10):
        forecast.use(others[number : number + 10], number)
    kinds = {kind for kind, _ in forecast._buckets}
    bins = sum(run_of(item).bin for item in (*items, *others))
    assert sum(sum(kind.misses) for kind in kinds) - before == bins


def feed(kind: Kind, rows: dict[int, tuple[int, int]]) -> None:
    """Adds (hits, misses) per bin to the observations of a kind."""
    for number, (hits, misses) in rows.items():
        kind.hits[number] += hits
        kind.misses[number] += misses


def test_value_rises_until_the_expected_reuse() -> None:
    """All blocks return in bin 12 or never: their value rises until then, and falls afterwards."""
    model = ReuseModel()
    kind = model.kind(("turn", 0), ("growth", 3))
    for _ in range(5):
        feed(kind, dict.fromkeys(range(BINS), (0, 20000)) | {12: (10000, 10000)})
        list(model.fit())
    assert kind.values[0] < kind.values[6] < kind.values[12]
    assert kind.values[13] < kind.values[0] / 10


def test_a_factor_is_learned_across_kinds() -> None:
    """A learned factor of a feature applies to kinds that were never seen."""
    model = ReuseModel()
    kinds = {(turn, growth): model.kind(("turn", turn), ("growth", growth)) for turn in (0, 1) for growth in (1, 5)}
    for _ in range(5):
        for turn, growth in ((0, 1), (0, 5), (1, 5)):
            hits = 1000 * (1 + turn) * (3 if growth == 1 else 1)
            feed(kinds[turn, growth], dict.fromkeys(range(8, 16), (hits, 10000 - hits)))
        list(model.fit())
    assert kinds[1, 1].values[10] > kinds[0, 1].values[10] > kinds[0, 5].values[10]


def test_every_tier_has_its_configured_policy() -> None:
    """Without a name it has the default."""
    tiers = (ModelTier("near", 1 << 20), ModelTier("far", 1 << 20))
    core = TierManager(EXTENT, EXTENT, tiers, settings=TierSettings(eviction={CPU_TIER: "lru", "far": "arc"}))
    queues = [core._cpu_tier.queues, *(secondary.catalog.queues for secondary in core._tier_jobs.secondaries)]
    assert [type(queue.queue_for(SPACE).policy) for queue in queues] == [LRU, POLICIES[DEFAULT_POLICY], ARC]  # type: ignore[attr-defined]


@pytest.mark.parametrize("eviction", [{CPU_TIER: "fifo"}, {"near": ""}, {"nowhere": "lru"}])
def test_unknown_names_are_refused(eviction: dict[str, str]) -> None:
    """The error lists the valid names."""
    with pytest.raises(ValueError, match=r"there is no (policy|tier).*there are .*"):
        TierManager(EXTENT, EXTENT, [ModelTier("near", 1 << 20)], settings=TierSettings(eviction=eviction))


def test_a_backlog_is_skipped_once_per_search() -> None:
    """Queued blocks may be first in the queue and cannot go.

    They are not skipped again per block.
    """
    looked = 0

    class ReversedLRU(LRU[CatalogEntry]):
        def victims(self) -> Iterator[CatalogEntry]:
            nonlocal looked
            for entry in reversed(list(super().victims())):
                looked += 1
                yield entry

    catalog = Catalog(1000, EvictionQueues(Quotas("disk", 1000), ReversedLRU), EvictionHistory())
    catalog.recover(Entry(SPACE, b"old %d" % number, 1) for number in range(1000))
    for start in range(0, 400, 100):
        for number in range(start, start + 100):
            removed = catalog.begin_store(SPACE, b"new %d" % number, 1)
            assert removed is not None
            assert [entry.key[:3] for entry in removed] == [b"old"]
        catalog.use(
            [entry for number in range(start, start + 100) if (entry := catalog.get(SPACE, b"new %d" % number))],
            start,
        )
    assert catalog.used_bytes == 1000
    assert looked < 2500, "a search per block would look at tens of thousands"
