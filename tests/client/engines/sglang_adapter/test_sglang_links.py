"""Leases of lookups: which are kept for a load, for how long, and which are released at once."""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from rig import hashes, kv_pool, rows

from kvtier.client import KeyStatus
from kvtier.client.engines.failures import RateLimitedWarnings, Unsupported
from kvtier.client.engines.sglang import deadlines, found_pages
from kvtier.client.engines.sglang.config import StorageConfig
from kvtier.client.engines.sglang.deadlines import COPY_SECONDS, Deadline
from kvtier.client.engines.sglang.found_pages import LEASE_SECONDS, FoundPages
from kvtier.client.engines.sglang.layout import KV, HostPool
from kvtier.client.engines.sglang.links import PoolLink
from kvtier.client.engines.sglang.stats import TransferStats

HASHES = hashes("prompt", 3)
HIT, MISS, PENDING, RETRY = KeyStatus.HIT, KeyStatus.MISS, KeyStatus.HIT_PENDING, KeyStatus.RETRY


class LeaseClient:
    """Answers each lookup with the next statuses in `answers`, and records leases."""

    max_keys: int | None = None

    def __init__(self, *answers: Sequence[KeyStatus]) -> None:
        self.answers = list(answers)
        self.deadline = Deadline()
        self.waits: list[float | None] = []
        self.prefixes: list[bool] = []
        self.leased: list[float] = []
        self.released: list[int] = []
        self.read_from: list[tuple[int, list[int]]] = []

    def lookup(
        self, keys: Sequence[bytes], *, lease: float, slots: bool, wait: float | None = None, prefix: bool = True
    ) -> Any:
        assert slots, "the read would need a call"
        self.waits.append(wait)
        self.prefixes.append(prefix)
        self.leased.append(lease)
        number, statuses = len(self.waits), bytes(self.answers.pop(0))[: len(keys)]
        hits = next((n for n, status in enumerate(statuses) if status != HIT), len(statuses))
        return SimpleNamespace(
            id=number,
            statuses=statuses,
            prefix_hits=hits,
            session=SimpleNamespace(ended=False),
            release=lambda: self.released.append(number),
        )

    @contextlib.contextmanager
    def read(self, lease: Any, items: Sequence[int]) -> Iterator[Any]:
        self.read_from.append((lease.id, list(items)))
        pool = kv_pool(seed=3)
        size = pool.kv_buffer.nbytes // 8
        yield SimpleNamespace(address=pool.kv_buffer.data_ptr(), offsets=[size * item for item in items])


def link_of(client: LeaseClient) -> PoolLink:
    settings, log = StorageConfig(lookup_timeout_s=2.0, load_timeout_s=3.0), RateLimitedWarnings(logging.getLogger())
    stats = TransferStats(enabled=False)
    return PoolLink(HostPool.probe(KV, kv_pool()), 0, client, settings, stats, log)  # type: ignore[arg-type]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The clock of found pages: its time is `now`."""
    clock = SimpleNamespace(now=1000.0, monotonic=lambda: clock.now)  # type: ignore[attr-defined]
    monkeypatch.setattr(found_pages, "time", clock)
    return clock


@pytest.mark.parametrize(
    ("statuses", "pages", "kept"),
    [
        ([HIT, HIT, MISS], 2, True),
        ([HIT, PENDING, MISS], 2, True),
        ([PENDING, PENDING, PENDING], 3, False),
        ([MISS, MISS, MISS], 0, False),
    ],
)
def test_a_lease_without_a_hit_is_released(statuses: list[KeyStatus], pages: int, *, kept: bool) -> None:
    """No load can use it: pages that are being promoted are looked up again by the load."""
    client = LeaseClient(statuses)
    assert link_of(client).find(HASHES) == pages
    assert client.released == ([] if kept else [1])
    assert client.leased == [LEASE_SECONDS]


def test_a_lookup_that_a_shared_tier_has_not_answered_is_repeated() -> None:
    """The first call does not wait. Its lease is released, and the second call waits for tiers."""
    client = LeaseClient([HIT, RETRY, RETRY], [HIT, HIT, MISS])
    assert link_of(client).find(HASHES) == 2
    assert client.waits == [None, 2.0]
    assert client.released == [1]


def test_a_wait_leaves_time_for_the_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """If little is left of a call, tiers get less than their setting, and at last no time."""
    monkeypatch.setattr(deadlines, "time", SimpleNamespace(monotonic=lambda: 1000.0))
    client = LeaseClient([RETRY], [HIT], [HIT], [RETRY], [HIT])
    link = link_of(client)
    with client.deadline.within(COPY_SECONDS + 0.25):
        assert link.find(HASHES[:1]) == 1
        assert link.load(HASHES[1:2], rows(0)) == 1
    with client.deadline.within(COPY_SECONDS / 2):
        assert link.find(HASHES[:1]) == 1
    assert client.waits == [None, 0.25, 0.25, None, 0.0]


def test_each_page_of_a_window_is_looked_up() -> None:
    """A lookup of a window does not end at the first page that is missing."""
    client = LeaseClient([MISS, PENDING, HIT], [HIT, MISS, MISS])
    assert link_of(client).find_each(HASHES) == [False, True, True]
    assert link_of(client).find(HASHES) == 1
    assert client.prefixes == [False, True], "a server pins no page behind a missing one"


def test_a_load_uses_the_lease_of_its_lookup_once() -> None:
    """The same pages again need another lookup, which waits for lower tiers."""
    client = LeaseClient([HIT, HIT, HIT], [HIT, HIT, MISS])
    link = link_of(client)
    assert link.find(HASHES) == 3
    assert link.load(HASHES[:2], rows(0, 1)) == 2
    assert client.released == []
    assert link.load(HASHES[:2], rows(0, 1)) == 2
    assert client.released == [2]
    assert link.load(HASHES[2:], rows(2)) == 1
    assert client.read_from == [(1, [0, 1]), (2, [0, 1]), (1, [2])]
    assert client.released == [2, 1]
    assert client.leased[1] == LEASE_SECONDS + 3.0


def test_a_load_of_pages_of_which_a_lease_has_some_looks_all_up() -> None:
    """SGLang may load more pages than the lookup found, for example those that came later."""
    client = LeaseClient([HIT, HIT, MISS], [HIT, HIT, HIT])
    link = link_of(client)
    assert link.find(HASHES) == 2
    assert link.load(HASHES, rows(0, 1, 2)) == 3
    assert link.load(HASHES[:2], rows(0, 1)) == 2
    assert client.read_from == [(2, [0, 1, 2]), (1, [0, 1])]
    assert client.released == [2, 1]


@pytest.mark.parametrize(("seconds", "uses"), [(19.0, 1), (20.5, 2)])
def test_an_old_lease_is_not_used(clock: SimpleNamespace, seconds: float, uses: int) -> None:
    """It could expire while pages are copied. The load looks the pages up again."""
    client = LeaseClient([HIT, HIT, HIT], [HIT, HIT, HIT])
    link = link_of(client)
    assert link.find(HASHES) == 3
    clock.now += seconds
    assert link.load(HASHES, rows(0, 1, 2)) == 3
    assert [lease for lease, _ in client.read_from] == [uses]


def test_old_leases_are_forgotten(clock: SimpleNamespace) -> None:
    """SGLang does not say which pages it will not load, so the list of leases must not grow."""
    found = FoundPages()
    for number in range(100):
        found.add(SimpleNamespace(id=number, session=SimpleNamespace(ended=False)), {b"key": 0})  # type: ignore[arg-type]
        clock.now += 1.0
    assert len(found._found) <= 20
    leased = found.take([b"key"])
    assert leased is not None
    assert leased.lease.id == 81, "the oldest that is not too old"


def test_no_call_has_more_keys_than_the_server_accepts() -> None:
    """A lookup names the first keys only. Loads and stores make several calls."""
    client = LeaseClient([HIT] * 3)
    link = link_of(client)
    client.max_keys = 2
    assert link.find(HASHES) == 2
    assert [*link._batches(3)] == [(0, 2), (2, 3)]
    client.max_keys = None
    assert [*link._batches(3)] == [(0, 3)]
    assert [*link._batches(0)] == []


def test_the_bandwidth_of_each_transfer() -> None:
    """In GB/s; finite also for a transfer without duration. One without pages is not counted."""
    stats = TransferStats(enabled=True)
    stats.loaded(2, 3 * 10**9, 1.5)
    stats.loaded(0, 0, 1.0)
    stats.stored(5, 10**9, 0.0)
    stats.stored(1, 10**9, 4.0)
    taken = stats.take()
    assert taken is not None
    assert (taken.prefetch_pgs, taken.prefetch_bandwidth) == ([2], [2.0])
    assert (taken.backup_pgs, taken.backup_bandwidth) == ([5, 1], [pytest.approx(1e9), 0.25])
    unread = TransferStats(enabled=False)
    unread.loaded(2, 10, 1.0)
    assert unread._metrics.prefetch_pgs == [], "it would grow for ever"


@pytest.mark.parametrize(
    "name",
    [
        *(
            "layout",
            "dtype",
            "page_size",
            "layer_num",
            "start_layer",
            "end_layer",
            "head_num",
            "head_dim",
            "v_head_dim",
        ),
        *("kv_cache_dim", "storage_format_tag", "temporal_dtype", "conv_dtype", "indexer_dtype"),
    ],
)
def test_each_property_of_a_page_is_in_its_description(name: str) -> None:
    """Pools that differ in one of them share no pages, also if the pages have the same size."""
    one, other = (HostPool(KV, SimpleNamespace(**{name: value}), (8,)).describe() for value in ("one", "other"))
    assert one != other


@pytest.mark.parametrize("found", [None, (), ([], [])])
def test_a_pool_without_pages_of_its_own_is_refused(found: object) -> None:
    """SGLang's pools answer in one of these ways if another pool has their bytes."""
    pool = SimpleNamespace(page_size=4, get_page_buffer_meta=lambda _: found)
    with pytest.raises(Unsupported, match="no bytes of its own"):
        HostPool.probe(KV, pool)


def test_pools_of_another_kind_name_or_division_share_no_pages() -> None:
    """Pages can have the same bytes in another order."""
    pools = [HostPool(KV, kv_pool(), (4, 4)), HostPool(KV, kv_pool(), (8,)), HostPool("swa", kv_pool(), (8,))]
    pools.append(HostPool(KV, SimpleNamespace(**vars(kv_pool())), (8,)))
    descriptions = [pool.describe() for pool in pools]
    assert all(one != other for one, other in itertools.combinations(descriptions, 2))
