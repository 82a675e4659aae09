"""Tensor, pipeline and data parallel engines: connectors of every rank over a real server."""

from __future__ import annotations

import contextlib
import pickle
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from connector_fakes import await_namespace
from engine_config import engine_config
from engine_timeouts import LONG_TIMEOUT_SECONDS, long_timeouts
from harness.polling import wait_until
from server_process import ServerProcess
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kvtier.client import KeyStatus, make_key
from kvtier.client.engines.failures import Unsupported
from kvtier.client.engines.vllm import KVTierConnector
from kvtier.client.engines.vllm.compat import KVConnectorRole
from kvtier.client.engines.vllm.ranks import Parts, Ranks, merge_stages, resolve_ranks
from kvtier.client.engines.vllm.step_metadata import StepMetadata
from kvtier.client.engines.vllm.worker import worker as worker_half
from kvtier.client.offload import BlockRead, LoadJob, SaveJob

TOKENS, BLOCKS = 4, 8
KEYS = [make_key(bytes([number]) * 32, 0) for number in range(2)]
FULL = FullAttentionSpec(block_size=TOKENS, num_kv_heads=1, head_size=8, dtype=torch.float32)
HEADS = {
    heads: FullAttentionSpec(block_size=TOKENS, num_kv_heads=heads, head_size=8, dtype=torch.float32)
    for heads in (1, 2, 3, 4)
}
# The bytes of two heads, but one slot has K of both heads, and the other slot has V of both.
SLOTS = FullAttentionSpec(
    block_size=TOKENS, num_kv_heads=2, head_size=8, dtype=torch.float32, num_head_slots=2, state_content_bytes=64
)
LATENT = MLAAttentionSpec(block_size=TOKENS, num_kv_heads=1, head_size=16, dtype=torch.float32, max_tp_shards=1)
WINDOW = SlidingWindowSpec(block_size=TOKENS, num_kv_heads=1, head_size=8, dtype=torch.float32, sliding_window=8)


class Engine:
    """The connectors of one engine: the scheduler's, and the workers' in rank order.

    ``stages[number]`` are the layers of a pipeline stage, per group; ``spec`` is what they all are,
    per group.
    """

    def __init__(
        self, server: ServerProcess, folder: Path, specs: list[Any], stages: list[list[list[str]]], **ranks: Any
    ) -> None:
        self.server, self.folder, self.specs = server, folder, specs
        self.tensor, self.ranks = ranks.pop("tensor", 1), ranks
        self.name, self.copies = ranks.pop("name", "engine"), ranks.pop("copies", 1)
        self.kv_parts = ranks.pop("kv_parts", 0)
        self.stages = stages
        count = self.tensor * len(stages)
        self.workers = [
            KVTierConnector(self.config(rank), KVConnectorRole.WORKER, self.cache(stages[rank // self.tensor]))
            for rank in range(count)
        ]
        # As vLLM does it: the scheduler has the layers of the first stage, and hears of the others
        # when all have registered.
        self.scheduler = KVTierConnector(self.config(0), KVConnectorRole.SCHEDULER, self.scheduler_cache())
        self.scheduler.bind_gpu_block_pool(SimpleNamespace(num_gpu_blocks=BLOCKS))
        self.caches = [self.tensors(worker) for worker in self.workers]
        told: dict[tuple[int, int], Any] = {}
        for rank, (worker, caches) in enumerate(zip(self.workers, self.caches, strict=True)):
            worker.register_kv_caches(caches)
            if (metadata := worker.get_handshake_metadata()) is not None:
                told[divmod(rank, self.tensor)] = pickle.loads(pickle.dumps(metadata))  # noqa: S301 - our own
        self.scheduler.set_xfer_handshake_metadata_pp_aware(told)
        if self.scheduler._scheduler is not None:
            await_namespace(self.scheduler)
        for worker in self.workers:
            self.step(worker, [], [])
            for client in worker._worker._clients if worker._worker is not None else ():
                client.wait_until_connected(LONG_TIMEOUT_SECONDS)

    def config(self, rank: int) -> Any:
        return engine_config(
            str(self.folder),
            {"endpoint": self.server.endpoint, "kv_parts": self.kv_parts},
            kv_transfer={"engine_id": self.name},
            parallel={
                "world_size": self.tensor * len(self.stages),
                "rank": rank,
                "tensor_parallel_size": self.tensor,
                "pipeline_parallel_size": len(self.stages),
                **self.ranks,
            },
        )

    def cache(self, layers: list[list[str]], *, merged: bool = False) -> KVCacheConfig:
        groups = []
        for names, spec in zip(layers, self.specs, strict=True):
            if isinstance(spec, dict):
                own = {name: spec[name] for name in names}
                one = next(iter(own.values())) if merged else UniformTypeKVCacheSpecs(TOKENS, own)
                groups.append(KVCacheGroupSpec(names, one))
            else:
                groups.append(KVCacheGroupSpec(names, spec))
        return KVCacheConfig(BLOCKS, [], groups, kv_tp_replicas=self.copies)

    def scheduler_cache(self) -> KVCacheConfig:
        return self.cache(self.stages[0], merged=True)

    def tensors(self, worker: KVTierConnector) -> dict[str, torch.Tensor]:
        """One tensor per layer of the worker, with distinct bytes in every block."""
        seed = torch.Generator().manual_seed(worker._vllm_config.parallel_config.rank // self.copies)
        groups = worker._geometry.groups if worker._geometry is not None else ()
        heads = next((spec.num_heads for spec in self.specs if not isinstance(spec, dict)), 1)
        return {
            name: torch.randint(
                0, 255, (BLOCKS, heads, 4, pieces * page // heads // 4), generator=seed, dtype=torch.uint8
            )
            for group, pieces in ((group, worker._own_parts.pieces) for group in groups)
            for name, page in zip(group.layers, group.page_bytes, strict=True)
        }

    # ---- what an engine does

    def step(self, worker: KVTierConnector, loads: list[LoadJob], saves: list[SaveJob]) -> None:
        side = self.scheduler._scheduler
        digest, namespace = (side._digest, side._namespace) if side is not None else ("", b"")
        step = StepMetadata(loads, saves, digest, parts=self.scheduler._all_parts, namespace=namespace)
        worker.bind_connector_metadata(pickle.loads(pickle.dumps(step)))  # noqa: S301 - our own
        worker.start_load_kv(None)
        worker.wait_for_save()

    def save(
        self, number: int, block_ids: list[int], groups: list[int] | None = None, contents: Any = ()
    ) -> Mapping[int, set[int]]:
        """Saves blocks under KEYS in a worker; returns those that it reports as not stored."""
        worker, groups = self.workers[number], groups or [0] * len(block_ids)
        keys = [make_key(key[:32], group) for key, group in zip(KEYS, groups, strict=True)]
        self.step(worker, [], [SaveJob(1, "r", keys, groups, block_ids, list(contents))])
        report = wait_until(worker.build_connector_worker_meta)
        assert report.ended_saves == {1: 1 << number}  # type: ignore[attr-defined]
        return report.not_stored  # type: ignore[attr-defined,no-any-return]

    def lookup(self, groups: tuple[int, ...] = (0, 0)) -> Any:
        """Looks KEYS up with the scheduler's client."""
        keys = [make_key(key[:32], group) for key, group in zip(KEYS, groups, strict=True)]
        return self.scheduler._scheduler._server._client.lookup(keys, request_id="r", wait=0.0, prefix=False)

    def load(self, block_ids: list[int], groups: list[int] | None = None) -> None:
        """Loads KEYS into blocks in every worker."""
        lease = self.lookup(tuple(groups or (0, 0)))
        assert list(lease.statuses) == [KeyStatus.HIT] * 2
        for worker in self.workers:
            read = BlockRead(lease.id, [0, 1], groups or [0, 0], block_ids)
            self.step(worker, [LoadJob("r", [read])], [])
            deadline = time.monotonic() + LONG_TIMEOUT_SECONDS
            while not (results := worker.get_transfer_results(set())).finished_recving:
                assert time.monotonic() < deadline
            assert not results.failed_recving
        lease.release()

    def close(self) -> None:
        for one in (self.scheduler, *self.workers):
            one.shutdown()


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One server for all tests here."""
    server = ServerProcess(tmp_path_factory.mktemp("kvtier"), long_timeout=True)
    server.start()
    yield server
    server.kill()


@pytest.fixture(autouse=True)
def _long_timeouts() -> Iterator[None]:
    """What is stored and found is counted."""
    with long_timeouts():
        yield


@pytest.fixture
def engine(running: ServerProcess, tmp_path: Path) -> Iterator[Any]:
    """Creates engines; each test has its own model."""
    (tmp_path / "config.json").write_text(f'"{time.monotonic_ns()}"')
    with contextlib.ExitStack() as stack:

        def make(specs: list[Any], stages: list[list[list[str]]], **ranks: Any) -> Engine:
            made = Engine(running, tmp_path, specs, stages, **ranks)
            stack.callback(made.close)
            return made

        yield make


def _namespaces(engine: Engine) -> set[str]:
    """The namespace digests of scheduler and workers."""
    sides = [engine.scheduler._scheduler, *(worker._worker for worker in engine.workers)]
    return {side._digest for side in sides if side is not None}


def _assert_loaded(engine: Engine, before: list[dict[str, torch.Tensor]], blocks: dict[int, int]) -> None:
    for caches, old in zip(engine.caches, before, strict=True):
        for name, cache in caches.items():
            for source, target in blocks.items():
                assert torch.equal(cache[target], old[name][source]), name


def _copy(engine: Engine) -> list[dict[str, torch.Tensor]]:
    return [{name: cache.clone() for name, cache in caches.items()} for caches in engine.caches]


def _blocks(server: ServerProcess) -> int:
    [cpu] = [tier for tier in server.status()["tiers"] if tier["name"] == "cpu"]
    return int(cpu["blocks"])


def test_ranks_with_the_same_bytes_store_one_copy(engine: Any, running: ServerProcess) -> None:
    """B4.5 With latent attention all tensor ranks hold the same: the first stores, all load."""
    two, held = engine([LATENT], [[["a", "b"]]], tensor=2, copies=2), _blocks(running)
    assert two.save(1, [2, 3]) == {}, "the second rank reports at once"
    assert list(two.lookup().statuses) == [KeyStatus.MISS] * 2, "and stores nothing"
    assert two.save(0, [2, 3]) == {}
    assert _blocks(running) == held + 2
    [namespace] = _namespaces(two)
    before = _copy(two)
    two.load([5, 6])
    _assert_loaded(two, before, {2: 5, 3: 6})
    # An engine with another number of ranks has the same bytes, so it shares blocks.
    one = engine([LATENT], [[["a", "b"]]], name="other")
    assert _namespaces(one) == {namespace}
    one.load([5, 6])
    assert torch.equal(one.caches[0]["b"][6], before[0]["b"][3])


def test_pipeline_stages_have_a_part_each(engine: Any) -> None:
    """B4.5 Stages of unequal size and groups: a block is visible when every stage has stored it."""
    stages = [[["a", "b", "c"], ["u"]], [["d"], []]]
    two = engine([FULL, WINDOW], stages)
    assert two.save(0, [2, 3], [0, 1]) == {}
    assert list(two.lookup((0, 1)).statuses) == [KeyStatus.MISS] * 2
    assert two.save(1, [2, 3], [0, 1]) == {}
    assert len(_namespaces(two)) == 1
    before = _copy(two)
    two.load([5, 6], [0, 1])
    for name in "abc":
        assert torch.equal(two.caches[0][name][5], before[0][name][2])
        assert torch.equal(two.caches[0][name][6], before[0][name][6]), "the window's block, of other layers"
    assert torch.equal(two.caches[0]["u"][6], before[0]["u"][3])
    assert torch.equal(two.caches[1]["d"][5], before[1]["d"][2])
    # Split differently, the same layers are other parts.
    other = engine([FULL, WINDOW], [[["a", "b"], ["u"]], [["c", "d"], []]], name="other")
    assert list(other.lookup((0, 1)).statuses) == [KeyStatus.MISS] * 2


def test_pipeline_stages_of_tensor_parallel_ranks(engine: Any) -> None:
    """B4.5 Four parts, and with latent attention two: the first of each stage stores."""
    four = engine([FULL], [[["a", "b"]], [["c"]]], tensor=2)
    for rank in range(4):
        assert list(four.lookup().statuses) == [KeyStatus.MISS] * 2
        assert four.save(rank, [2, 3]) == {}
    before = _copy(four)
    four.load([5, 6])
    _assert_loaded(four, before, {2: 5, 3: 6})
    latent = engine([LATENT], [[["a", "b"]], [["c"]]], tensor=2, copies=2, name="latent")
    for rank in (1, 3, 0):
        assert latent.save(rank, [2, 3]) == {}
        assert list(latent.lookup().statuses) == [KeyStatus.MISS] * 2
    assert latent.save(2, [2, 3]) == {}
    before = _copy(latent)
    latent.load([5, 6])
    _assert_loaded(latent, before, {2: 5, 3: 6})


def test_the_scheduler_learns_what_its_configuration_does_not_say(engine: Any) -> None:
    """For the scheduler, a group of layers with different page sizes looks uniform."""
    small = FullAttentionSpec(block_size=TOKENS, num_kv_heads=1, head_size=4, dtype=torch.float32)
    mixed = engine([{"a": FULL, "b": small}], [[["a", "b"]]])
    assert mixed.save(0, [2, 3]) == {}
    assert len(_namespaces(mixed)) == 1
    before = _copy(mixed)
    mixed.load([5, 6])
    _assert_loaded(mixed, before, {2: 5, 3: 6})


def test_a_worker_that_says_nothing_disables_the_connector(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a stage did not report, its part would never be stored, so requests are misses."""
    monkeypatch.setattr(KVTierConnector, "get_handshake_metadata", lambda _: None)
    made = engine([FULL], [[["a"]], [["b"]]])
    assert made.scheduler._scheduler is None
    request = SimpleNamespace(request_id="r")
    assert made.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    assert made.scheduler.build_connector_meta(SimpleNamespace()) == StepMetadata()


def test_data_parallel_engines_share_blocks(engine: Any) -> None:
    """Data parallel engines are separate, each with its own ranks, and share blocks."""
    first, second = (
        engine([FULL], [[["a", "b"]]], tensor=2, name=f"engine_dp{rank}", data_parallel_rank=rank) for rank in (0, 1)
    )
    assert _namespaces(first) == _namespaces(second)
    assert len(_namespaces(first)) == 1
    for rank in (0, 1):
        first.save(rank, [2, 3])
    before = _copy(first)
    second.load([5, 6])
    for caches, old in zip(second.caches, before, strict=True):
        assert torch.equal(caches["a"][5], old["a"][2])
        assert torch.equal(caches["b"][6], old["b"][3])


@pytest.mark.parametrize(("stores", "loads"), [(1, 2), (2, 1), (1, 4), (4, 2)])
def test_engines_of_unequal_tensor_parallelism_share_blocks(engine: Any, stores: int, loads: int) -> None:
    """Each rank stores and loads the heads that it has, if `kv_parts` divides the heads equally."""
    layers = [[["a", "b"]]]
    writer, reader = (
        engine([HEADS[4 // tensor]], layers, tensor=tensor, kv_parts=4, name=f"engine of {tensor}")
        for tensor in (stores, loads)
    )
    assert _namespaces(writer) == _namespaces(reader)
    for rank in range(stores):
        assert list(reader.lookup().statuses) == [KeyStatus.MISS] * 2
        assert writer.save(rank, [2, 3]) == {}
    reader.load([5, 6])
    for name in "ab":
        stored, loaded = (torch.cat([caches[name] for caches in made.caches], dim=1) for made in (writer, reader))
        assert torch.equal(loaded[[5, 6]], stored[[2, 3]])
    # Without `kv_parts` each tensor parallel size has its own blocks.
    assert list(engine([HEADS[4]], layers, name="plain").lookup().statuses) == [KeyStatus.MISS] * 2


def test_a_part_of_a_block_that_is_not_stored_is_reported(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker with two parts reports a block as stored only if it has stored both."""
    made = engine([HEADS[2]], [[["a"]]], kv_parts=2)
    second = made.workers[0]._worker._clients[1]
    write = type(second).write
    monkeypatch.setattr(second, "write", lambda keys, **more: write(second, keys[:1], **more), raising=False)
    assert made.save(0, [2, 3]) == {1: {1}}
    assert list(made.lookup().statuses) == [KeyStatus.HIT, KeyStatus.MISS]


@pytest.mark.parametrize(
    ("specs", "ranks", "reason"),
    [
        ([HEADS[3]], {"kv_parts": 2}, "the 3 KV heads of a rank (FullAttentionSpec) cannot be divided into 2 parts"),
        ([HEADS[1]], {"kv_parts": 3, "tensor": 2}, "kv_parts=3 is not a multiple of the 2 tensor parallel ranks"),
        ([FULL, LATENT], {"kv_parts": 2}, "the 1 KV heads of a rank (FullAttentionSpec) cannot be divided"),
        ([SLOTS], {"kv_parts": 2}, "the attention backend stores K and V in separate head slots"),
    ],
)
def test_heads_that_cannot_be_divided_disable_the_connector(
    engine: Any, caplog: pytest.LogCaptureFixture, specs: list[Any], ranks: dict[str, int], reason: str
) -> None:
    """The engine starts, each request is a miss, and the log says why."""
    made = engine(specs, [[["a"], ["b"]][: len(specs)]], **ranks)
    assert made.scheduler._scheduler is None
    assert f"the connector is disabled, every request is a miss: kv_parts={ranks['kv_parts']}" in caplog.text
    assert reason in caplog.text


def test_head_slots_need_one_part_per_rank(engine: Any) -> None:
    """Pages with head slots of K or V are transferred as a whole, and other pages differ."""
    layers = [[["a"]]]
    slots = engine([SLOTS], layers, tensor=2, kv_parts=2)
    assert _namespaces(slots).isdisjoint(_namespaces(engine([HEADS[2]], layers, tensor=2, kv_parts=2, name="plain")))
    for rank in range(2):
        assert slots.save(rank, [2, 3]) == {}
    before = _copy(slots)
    slots.load([5, 6])
    _assert_loaded(slots, before, {2: 5, 3: 6})


def test_latent_attention_ignores_kv_parts(engine: Any) -> None:
    """All its ranks have the same bytes."""
    assert _namespaces(engine([LATENT], [[["a"]]], kv_parts=4)) == _namespaces(engine([LATENT], [[["a"]]], name="o"))


def test_ranks_are_counted_within_one_engine() -> None:
    """Worker ranks may count on over data parallel engines; a scheduler per rank is refused."""
    assert [Ranks(2, 2).part(rank) for rank in (0, 3, 4, 7)] == [0, 3, 0, 3]
    assert [Ranks(4, 2, 2).part(rank) for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [Ranks(4, 2, 2, 2).part(rank, rank % 2) for rank in range(8)] == [0, 1, 2, 3, 4, 5, 6, 7]
    assert [rank for rank in range(8) if Ranks(4, 2, 2).stores(rank)] == [0, 2, 4, 6]
    parallel = SimpleNamespace(
        tensor_parallel_size=1, pipeline_parallel_size=1, distributed_executor_backend="external_launcher"
    )
    assert resolve_ranks(SimpleNamespace(parallel_config=parallel), Parts((), "")).workers == 1
    parallel.tensor_parallel_size = 2
    with pytest.raises(Unsupported, match="external launcher"):
        resolve_ranks(SimpleNamespace(parallel_config=parallel), Parts((), ""))


def test_draft_models_of_pipelines_are_refused() -> None:
    """Only the workers of the last stage would hear when a forward pass is over."""
    draft = SimpleNamespace(model="draft")
    for stages, refused in ((1, False), (2, True)):
        config = engine_config("/model", {}, parallel={"pipeline_parallel_size": stages}, speculative=draft)
        with pytest.raises(Unsupported, match="speculative decoding") if refused else contextlib.nullcontext():
            resolve_ranks(config, Parts((), ""))


def test_stages_must_have_the_same_number_of_parts() -> None:
    """Otherwise a rank of one stage would have the numbers of another one's parts."""
    with pytest.raises(Unsupported, match="different numbers of parts"):
        merge_stages({(0, 0): Parts((8,), "a", pieces=2), (1, 0): Parts((8,), "b")}, 2, 1)


def test_one_worker_tells_the_server_the_tokens_of_blocks(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """All workers get the contents of a save; the server needs them once."""
    described: list[object] = []
    monkeypatch.setattr(worker_half, "describe_blocks", lambda client, *_: described.append(client) or True)
    made = engine([FULL], [[["0", "1"]]], tensor=2)
    for number in range(2):
        made.save(number, [1, 2], contents=["first", "second"])
    assert described == [*made.workers[0]._worker._clients]


def test_ranks_of_one_stage_must_agree() -> None:
    """Reports must agree within a stage; copies count only if all stages have them."""
    a, b = Parts((8, 4), "a", 2), Parts((6, 5), "b")
    assert merge_stages({(0, 0): a, (0, 1): a}, 1, 2) == a
    assert merge_stages({(0, 0): a, (1, 0): b}, 2, 1).part_bytes == (8, 5)
    assert merge_stages({(0, 0): a, (1, 0): b}, 2, 1).copies == 1
    assert merge_stages({(0, 0): a, (1, 0): b}, 2, 1) != merge_stages({(0, 0): b, (1, 0): a}, 2, 1)
    for told in ({(0, 0): a}, {(0, 0): a, (0, 1): b}, {(0, 0): a, (0, 1): "other"}, {}):
        with pytest.raises(Unsupported):
            merge_stages(told, 1, 2)
