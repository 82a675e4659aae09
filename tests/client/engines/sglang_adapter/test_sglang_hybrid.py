"""Pages of hybrid models: pools that need all pages of a prefix, or only the last."""

from __future__ import annotations

import pytest
from harness.server_process import ServerProcess
from rig import attach, await_links, hashes, kv_pool, latent_pool, mamba_pool, page_of, rows
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer

from kvtier.client.engines.sglang.found_pages import SEARCH_PAGES, Window, restorable_prefixes

KEYS = hashes("prompt", 6)


def state(keys: list[str], *states: int) -> PoolTransfer:
    indices = rows(*states, page=1) if states else None
    return PoolTransfer(PoolName.MAMBA, indices, keys=keys, hit_policy=PoolHitPolicy.TRAILING_PAGES)


def test_a_prefix_needs_a_state_at_its_end(server: ServerProcess) -> None:
    """The longest prefix with a state counts; the state's bytes come back."""
    ours, theirs = (kv_pool(seed=1), mamba_pool(seed=2)), (kv_pool(), mamba_pool())
    with attach(server.endpoint, *ours) as storage:
        assert storage.batch_set_v1(KEYS, rows(*range(6))) == [True] * 6
        found = storage.batch_exists_v2(KEYS, [state(["?"])])
        assert (found.kv_hit_pages, found.extra_pool_hit_pages) == (0, {PoolName.KV: 6})
        assert storage.batch_set_v2([state([KEYS[1]], 5)]) == {PoolName.MAMBA: [True]}
        assert storage.batch_set_v2([state([KEYS[3]], 6)]) == {PoolName.MAMBA: [True]}
    with attach(server.endpoint, *theirs) as other:
        found = other.batch_exists_v2(KEYS, [state(["?"])])
        assert (found.kv_hit_pages, found.restorable_prefix_pages) == (4, [2, 4])
        assert found.extra_pool_hit_pages == {PoolName.KV: 6, PoolName.MAMBA: 4}
        assert other.batch_get_v1(KEYS[:4], rows(0, 1, 2, 3)) == [True] * 4
        assert other.batch_get_v2([state([KEYS[3]], 0)]) == {PoolName.MAMBA: [True]}
        assert other.batch_get_v2([state([KEYS[2]], 1)]) == {PoolName.MAMBA: [False]}
    assert page_of(theirs[0], 3) == page_of(ours[0], 3)
    assert page_of(theirs[1], 0) == page_of(ours[1], 6)


def test_a_window_of_several_pages_needs_all_of_them(server: ServerProcess) -> None:
    """The number of keys says how many pages before the end the pool needs."""
    with attach(server.endpoint, kv_pool(seed=1), mamba_pool(seed=2)) as storage:
        storage.batch_set_v1(KEYS, rows(*range(6)))
        assert storage.batch_set_v2([state([KEYS[1], KEYS[3], KEYS[4]], 1, 3, 4)]) == {PoolName.MAMBA: [True] * 3}
        found = storage.batch_exists_v2(KEYS, [state(["?", "?"])])
        assert (found.kv_hit_pages, found.restorable_prefix_pages) == (5, [5])


def test_a_pool_of_all_pages_shortens_the_prefix(server: ServerProcess) -> None:
    """A pool that must have each page has fewer than the KV: the prefix ends there."""
    with attach(server.endpoint, kv_pool(seed=1), kv_pool(seed=2)) as storage:
        both = PoolTransfer(PoolName.MAMBA, rows(*range(3)), keys=KEYS[:3])
        storage.batch_set_v1(KEYS, rows(*range(6)))
        storage.batch_set_v2([both])
        found = storage.batch_exists_v2(KEYS, [both])
        assert (found.kv_hit_pages, found.restorable_prefix_pages) == (3, [1, 2, 3])
        other = hashes("other", 4)
        storage.batch_set_v1(other[:2], rows(6, 7))
        storage.batch_set_v2([PoolTransfer(PoolName.MAMBA, rows(*range(4)), keys=other)])
        found = storage.batch_exists_v2(other, [both])
        assert (found.kv_hit_pages, found.extra_pool_hit_pages) == (2, {PoolName.KV: 2, PoolName.MAMBA: 2})
        groups = PoolTransfer(PoolName.MAMBA, hit_policy=PoolHitPolicy.BLOCK_GROUPS)
        assert storage.batch_exists_v2(KEYS, [groups]).extra_pool_hit_pages == {PoolName.KV: 6}


def test_states_are_split_although_the_kv_is_shared(server: ServerProcess) -> None:
    """With latent attention, ranks share pages of the KV, and each has states of its own."""
    kv, states = latent_pool(seed=1), [mamba_pool(seed=2), mamba_pool(seed=3)]
    for rank, pool in enumerate(states):
        with attach(server.endpoint, kv, pool, tp_size=2, tp_rank=rank, is_mla_model=True) as storage:
            if rank == 0:
                storage.batch_set_v1(KEYS[:1], rows(0))
            storage.batch_set_v2([state(KEYS[:1], 4)])
    for rank, pool in enumerate(states):
        empty = mamba_pool()
        with attach(server.endpoint, kv, empty, tp_size=2, tp_rank=rank, is_mla_model=True) as storage:
            assert storage.batch_exists_v2(KEYS, [state(["?"])]).kv_hit_pages == 1
            assert storage.batch_get_v2([state(KEYS[:1], 0)]) == {PoolName.MAMBA: [True]}
        assert page_of(empty, 0) == page_of(pool, 4)


def test_a_pool_may_come_later(server: ServerProcess) -> None:
    """A pool that a draft model adds is used from then on, with the others."""
    with attach(server.endpoint, kv_pool(seed=1)) as storage:
        assert storage.batch_set_v2([state(KEYS[:1], 4)]) == {PoolName.MAMBA: [False]}
        storage.register_mem_host_pool_v2(mamba_pool(seed=2), PoolName.MAMBA)
        await_links(storage)
        assert storage.batch_set_v1(KEYS[:1], rows(0)) == [True]
        assert storage.batch_set_v2([state(KEYS[:1], 4)]) == {PoolName.MAMBA: [True]}
        assert storage.batch_exists_v2(KEYS, [state(["?"])]).kv_hit_pages == 1


@pytest.mark.parametrize(
    ("pages", "windows", "lengths"),
    [
        (3, [], [1, 2, 3]),
        (0, [(1, {0})], []),
        (5, [(1, {1, 3})], [2, 4]),
        (5, [(2, {0, 2, 3, 4})], [1, 4, 5]),
        (5, [(2, {1, 2, 3}), (1, {2, 4})], [3]),
        (5, [(9, {0, 1})], [1, 2]),
        (5, [(1, set())], []),
        (SEARCH_PAGES + 6, [(2, {2, 3})], [4]),
        (SEARCH_PAGES + 6, [(2, {5, 6})], [7]),
        (2 * SEARCH_PAGES, [(1, {3, SEARCH_PAGES + 3})], [SEARCH_PAGES + 4]),
    ],
)
def test_restorable_prefixes(pages: int, windows: list[tuple[int, set[int]]], lengths: list[int]) -> None:
    """All pools have their last pages at these lengths; no page is looked up twice."""
    asked: list[list[int]] = [[] for _ in windows]

    def make(number: int, needed: int, has: set[int]) -> Window:
        def ask(first: int, end: int) -> list[bool]:
            asked[number] += range(first, end)
            return [page in has for page in range(first, end)]

        return Window(needed, ask)

    made = [make(number, *window) for number, window in enumerate(windows)]
    assert restorable_prefixes(pages, made) == lengths
    assert all(len(each) == len(set(each)) for each in asked)
