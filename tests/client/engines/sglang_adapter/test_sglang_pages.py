"""Pages of the KV between HiCache's host pool and a real server."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness.polling import wait_until
from harness.server_process import ServerProcess
from rig import LAYOUTS, PAGE, attach, await_links, hashes, kv_pool, latent_pool, page_of, rows

from kvtier.client.engines.sglang import KVTierStorage, links
from kvtier.client.engines.sglang.deadlines import DeadlineClient

KEYS = hashes("prompt", 6)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_another_engine_loads_what_one_stored(server: ServerProcess, layout: str) -> None:
    """The pages get the same bytes at other places of the other pool; no other page changes."""
    ours, theirs = kv_pool(layout, seed=1), kv_pool(layout)
    with attach(server.endpoint, ours) as first:
        assert first.batch_exists(KEYS) == 0
        assert first.batch_set_v1(KEYS[:3], rows(5, 1, 2)) == [True] * 3
        assert first.batch_set_v1(KEYS[:4], rows(5, 1, 2, 0)) == [True] * 4, "three of them are stored already"
    with attach(server.endpoint, theirs) as second:
        assert second.batch_exists(KEYS) == 4
        assert second.batch_get_v1(KEYS[:4], rows(0, 7, 3, 4)) == [True] * 4
    assert [page_of(theirs, page) for page in (0, 7, 3, 4)] == [page_of(ours, page) for page in (5, 1, 2, 0)]
    assert not any(map(any, (page_of(theirs, page) for page in (1, 2, 5, 6))))


def test_pages_in_several_calls(server: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many bytes are copied in several calls, of which each has its own pages."""
    monkeypatch.setattr(links, "_BATCH_BYTES", 1)
    ours, theirs = kv_pool(seed=1), kv_pool()
    with attach(server.endpoint, ours) as storage, attach(server.endpoint, theirs) as other:
        assert all(storage.batch_set_v1(KEYS, rows(*range(6))))
        assert other.batch_exists(KEYS) == 6
        assert all(other.batch_get_v1(KEYS, rows(*range(6))))
    assert [page_of(theirs, page) for page in range(6)] == [page_of(ours, page) for page in range(6)]


def test_a_full_server_stores_no_more(tmp_path: Path) -> None:
    """Pages for which there is no room do not count as stored."""
    pages = 700
    keys, pool = hashes("long", pages), kv_pool(pages=pages, heads=64)
    with ServerProcess(tmp_path, region=16 << 20).start() as server, attach(server.endpoint, pool) as storage:
        assert storage.batch_exists(keys) == 0
        stored = storage.batch_set_v1(keys, rows(*range(pages)))
        assert not all(stored)
        assert storage.batch_exists(keys) < pages


def test_pages_after_a_miss_are_not_loaded(server: ServerProcess) -> None:
    """Hits end at the first page that is missing, for lookups and for loads without a lookup."""
    pool = kv_pool(seed=1)
    with attach(server.endpoint, pool) as storage:
        storage.batch_set_v1([KEYS[0], KEYS[2]], rows(0, 2))
        assert storage.batch_exists(KEYS) == 1
        assert storage.batch_get_v1(KEYS[:3], rows(5, 6, 7)) == [True, False, False]
        assert page_of(pool, 5) == page_of(pool, 0)


def test_a_lease_protects_what_was_found(server: ServerProcess) -> None:
    """Between lookup and load the server evicts no page; the last load releases the lease."""
    with attach(server.endpoint, kv_pool(seed=1)) as storage:
        storage.batch_set_v1(KEYS, rows(*range(6)))
        assert storage.batch_exists(KEYS) == 6
        assert server.status().leases == 1
        assert storage.batch_get_v1(KEYS[:2], rows(6, 7)) == [True, True]
        assert server.status().leases == 1, "a load of the rest may follow"
        assert storage.batch_get_v1(KEYS[2:], rows(4, 5, 6, 7)) == [True] * 4
        assert server.status().leases == 0
        assert storage.batch_get_v1(KEYS, rows(*range(6))) == [True] * 6, "a load looks up what no lookup leased"
        assert server.status().leases == 0


def test_engines_wait_for_pages_on_disk(server: ServerProcess) -> None:
    """After a restart of the server a lookup counts pages on disk, and the load waits for them."""
    ours, theirs = kv_pool(seed=1), kv_pool()
    with attach(server.endpoint, ours) as storage:
        storage.batch_set_v1(KEYS, rows(*range(6)))
        server.wait_for_stored(6)
        server.restart()
        with attach(server.endpoint, theirs) as other:
            assert other.batch_exists(KEYS) == 6
            assert other.batch_get_v1(KEYS, rows(*range(6))) == [True] * 6
    assert [page_of(theirs, page) for page in range(6)] == [page_of(ours, page) for page in range(6)]


def test_other_formats_are_other_blocks(server: ServerProcess) -> None:
    """Equal keys miss with another layout, shape, model, tenant, argument or pipeline stage."""
    with attach(server.endpoint, kv_pool(seed=1)) as storage:
        storage.batch_set_v1(KEYS, rows(*range(6)))
    reshaped = kv_pool()
    reshaped.head_num, reshaped.head_dim = reshaped.head_num // 2, reshaped.head_dim * 2
    for pool, options in (
        (kv_pool("page_first"), {}),
        (reshaped, {}),
        (kv_pool(heads=4), {}),
        (kv_pool(), {"model_name": "other"}),
        (kv_pool(), {"extra": {"tenant": "other"}}),
        (kv_pool(), {"extra": {"weights_version": "2"}}),
        (kv_pool(), {"arguments": {"model": {"kv_cache_dtype": "fp8_e4m3"}}}),
        (kv_pool(), {"arguments": {"model": {"revision": "b" * 40}}}),
        (kv_pool(), {"pp_size": 2, "pp_rank": 1}),
    ):
        with attach(server.endpoint, pool, **options) as other:
            assert other.batch_exists(KEYS) == 0, options
    with attach(server.endpoint, kv_pool(), model_name="/another/path", extra={"model_name": "tiny"}) as same:
        assert same.batch_exists(KEYS) == 6


def test_each_rank_has_a_part(server: ServerProcess) -> None:
    """A page exists when all ranks have stored it, and each rank loads its own bytes."""
    pools = [kv_pool(seed=1), kv_pool(seed=2)]
    for rank, pool in enumerate(pools):
        with attach(server.endpoint, pool, tp_rank=rank, tp_size=2) as storage:
            assert storage.batch_exists(KEYS) == 0
            assert storage.batch_set_v1(KEYS, rows(*range(6))) == [True] * 6
    for rank, pool in enumerate(pools):
        empty = kv_pool()
        with attach(server.endpoint, empty, tp_rank=rank, tp_size=2) as storage:
            assert storage.batch_exists(KEYS) == 6
            assert all(storage.batch_get_v1(KEYS, rows(*range(6))))
        assert page_of(empty, 3) == page_of(pool, 3)


def test_ranks_with_the_same_bytes_share_a_part(server: ServerProcess) -> None:
    """With latent attention the first rank stores for all."""
    pool, other = latent_pool(seed=1), latent_pool()
    with attach(server.endpoint, pool, tp_size=2, is_mla_model=True) as first:
        first.batch_set_v1(KEYS, rows(*range(6)))
    with attach(server.endpoint, other, tp_size=2, tp_rank=1, is_mla_model=True) as second:
        assert second.batch_exists(KEYS) == 6
        assert all(second.batch_get_v1(KEYS, rows(*range(6))))
    assert page_of(other, 3) == page_of(pool, 3)


def test_clearing_hides_all_tiers(server: ServerProcess) -> None:
    """After a clear the engine finds nothing from before, and other engines still do."""
    pool = kv_pool(seed=1)
    with attach(server.endpoint, pool) as storage, attach(server.endpoint, kv_pool()) as other:
        storage.batch_set_v1(KEYS, rows(*range(6)))
        server.wait_for_stored(6)
        assert storage.batch_exists(KEYS) == 6
        for _ in range(2):
            storage.clear()
            assert storage.batch_exists(KEYS) == 0
            assert storage.batch_get_v1(KEYS, rows(*range(6))) == [False] * 6
            await_links(storage)
            assert storage.batch_exists(KEYS) == 0
            assert all(storage.batch_set_v1(KEYS, rows(*range(6))))
            assert storage.batch_exists(KEYS) == 6
        assert other.batch_exists(KEYS) == 6
        wait_until(lambda: len(server.status().sessions) == 2)


def test_a_clear_retires_only_namespaces_of_this_engine(server: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other engines may use the namespace in which the engine started."""
    retired: list[DeadlineClient] = []

    def reset(client: DeadlineClient, **options: bool) -> None:
        assert options == {"retire": True}
        retired.append(client)

    monkeypatch.setattr(DeadlineClient, "reset", reset)
    with attach(server.endpoint, kv_pool(seed=1)) as storage:
        storage.clear()
        await_links(storage)
        assert retired == []
        storage.clear()
        await_links(storage)
        storage.clear()
        await_links(storage)
    assert len(retired) == 2


def test_an_attach_after_a_clear_is_private(server: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has cleared never again uses the namespace of the model's files."""
    with attach(server.endpoint, kv_pool(seed=1)) as storage:
        storage.batch_set_v1(KEYS, rows(*range(6)))
        storage.clear()
        storage.batch_set_v1(KEYS, rows(*range(6)))
    for _ in range(2):
        with attach(server.endpoint, kv_pool(seed=1)) as attached:
            assert attached.batch_exists(KEYS) == 0
            assert all(attached.batch_set_v1(KEYS, rows(*range(6))))
            assert attached.batch_exists(KEYS) == 6
    monkeypatch.setattr(KVTierStorage, "_clears", 0)
    with attach(server.endpoint, kv_pool()) as restarted:
        assert restarted.batch_exists(KEYS) == 6


def test_sglang_gets_its_statistics(server: ServerProcess) -> None:
    """Pages and bandwidth of each transfer, once; nothing is collected if SGLang takes none."""
    with attach(server.endpoint, kv_pool(seed=1)) as storage:
        storage.batch_set_v1(KEYS, rows(*range(6)))
        storage.batch_set_v1(KEYS, rows(*range(6)))
        storage.batch_get_v1(KEYS[:2], rows(0, 1))
        metrics = storage.get_stats()
        assert (metrics.backup_pgs, metrics.prefetch_pgs) == ([6], [2])
        assert metrics.backup_bandwidth[0] > 0 < metrics.prefetch_bandwidth[0]
        assert storage.get_stats().backup_pgs == []
    with attach(server.endpoint, kv_pool(seed=1), enable_storage_metrics=False) as storage:
        storage.batch_get_v1(KEYS[:2], rows(0, 1))
        assert storage.get_stats() is None


def test_rows_must_fit_the_keys(server: ServerProcess) -> None:
    """If SGLang passes other rows than those of the pages, no byte is copied."""
    pool = kv_pool()
    with attach(server.endpoint, kv_pool(seed=1)) as storage, attach(server.endpoint, pool) as other:
        storage.batch_set_v1(KEYS, rows(*range(6)))
        assert other.batch_get_v1(KEYS, rows(0, 1)) == [False] * 6
        assert other.batch_get_v1(KEYS[:2], rows(0, 1)[:-1]) == [False] * 2, "the last page has a row too few"
        assert other.batch_set_v1(KEYS, rows(0)[: PAGE - 1]) == [False] * 6
        assert not any(page_of(pool, 0))


def test_pages_must_keep_their_size(server: ServerProcess) -> None:
    """If a host pool gives pages of another size than at the start, no byte is copied."""
    ours, theirs = kv_pool(seed=1), kv_pool()
    with attach(server.endpoint, ours) as storage, attach(server.endpoint, theirs) as other:
        storage.batch_set_v1(KEYS[:2], rows(0, 1))
        ours.head_num = theirs.head_num = 1  # half of the bytes
        assert other.batch_get_v1(KEYS[:2], rows(0, 1)) == [False] * 2
        assert storage.batch_set_v1(KEYS[2:], rows(2, 3, 4, 5)) == [False] * 4
        assert other.batch_exists(KEYS) == 2
    assert not theirs.kv_buffer.any()
