"""The vLLM connector's parts."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from connector_fakes import FULL, PAGE, WINDOW, FakeClient, FakeTransfers, close_when_idle, start_lookup
from harness.polling import stays, wait_until

from kvtier.client import NotConnected, make_key
from kvtier.client.engines.failures import Unsupported
from kvtier.client.engines.vllm.background import RateLimitedLog
from kvtier.client.engines.vllm.config import ConnectorConfig
from kvtier.client.engines.vllm.layout import build_layouts
from kvtier.client.engines.vllm.peers import Peers
from kvtier.client.engines.vllm.scheduler import server_calls
from kvtier.client.engines.vllm.scheduler.prefix_lookups import LookupService, LookupState
from kvtier.client.engines.vllm.scheduler.requests import RequestRegistration, VllmRequest
from kvtier.client.engines.vllm.worker.copies import make_copier
from kvtier.client.engines.vllm.worker.reports import SAVE_WITHIN_S, StepMetadata, WorkerReport, WorkerReports
from kvtier.client.engines.vllm.worker.worker import WorkerSide
from kvtier.client.handoff import HandoffOptions
from kvtier.client.offload import BlockRead, CacheGeometry, CacheGroup, LoadJob, SaveJob

# ---- bytes


def _caches(num_blocks: int) -> dict[str, torch.Tensor]:
    """Four layers in one allocation, like vLLM's; kernel blocks are half a block."""
    generator = torch.Generator().manual_seed(0)
    whole = torch.randint(0, 255, (4, num_blocks * 2, PAGE // 2), generator=generator, dtype=torch.uint8)
    return dict(zip("abcd", whole.unbind(0), strict=True))


def test_evenly_spaced_layers_move_in_one_copy() -> None:
    """Layers of one allocation are one segment; layers of two allocations are two."""
    caches = _caches(8)
    (layout,) = build_layouts([FULL], caches, 8)
    assert len(layout.segments) == 1
    caches["b"] = caches["b"].clone()
    (layout,) = build_layouts([FULL], caches, 8)
    assert [segment.slot_offset for segment in layout.segments] == [0, PAGE]


@pytest.mark.parametrize("split", [False, True])
def test_blocks_come_back_as_they_went(split: bool) -> None:  # noqa: FBT001 - a parameter of the test
    """A slot holds a block's layers in order; copying in restores exactly these pages."""
    caches = _caches(8)
    if split:
        caches["b"] = caches["b"].clone()
    copier = make_copier(build_layouts([FULL, WINDOW], caches, 8))
    memory = memoryview(bytearray(1024))
    copier.copy_out(0, [3, 5], memory, [512, 0], copier.mark())
    page = caches["b"].view(8, PAGE)[3]
    assert bytes(memory[512 + PAGE : 512 + 2 * PAGE]) == bytes(page.tolist())
    before = {name: cache.clone() for name, cache in caches.items()}
    copier.copy_in(0, [1, 2], memory, [512, 0], copier.mark())
    for name in "ab":
        blocks, old = caches[name].view(8, PAGE), before[name].view(8, PAGE)
        assert torch.equal(blocks[1], old[3])
        assert torch.equal(blocks[2], old[5])
        assert torch.equal(blocks[3:], old[3:])
    assert all(torch.equal(caches[name], before[name]) for name in "cd")


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3)], ids=["heads first", "tokens first"])
@pytest.mark.parametrize("kernel_blocks", [1, 2])
def test_a_piece_of_a_page_has_the_bytes_of_a_rank_with_fewer_heads(order: tuple[int, ...], kernel_blocks: int) -> None:
    """Slots of rank 1 of 2 and of the second piece of a single rank are equal."""

    def memory_order(cache: torch.Tensor) -> torch.Tensor:
        return cache.permute(order).contiguous().permute(order)  # each order is its own inverse

    generator, blocks, heads, tokens, content = torch.Generator().manual_seed(0), 8, 4, 4, 6
    whole = torch.randint(
        0, 255, (blocks * kernel_blocks, heads, tokens, content), generator=generator, dtype=torch.uint8
    )
    half_bytes = whole.numel() // blocks // 2
    group = CacheGroup(0, 4, None, ("a",), (half_bytes,))
    of_rank = make_copier(build_layouts([group], {"a": memory_order(whole[:, 2:].contiguous())}, blocks))
    engine = memory_order(whole)
    of_piece = make_copier(build_layouts([group], {"a": engine}, blocks, piece=1, pieces=2))
    slots, expected = (memoryview(bytearray(2 * half_bytes)) for _ in range(2))
    of_rank.copy_out(0, [3, 5], expected, [half_bytes, 0], of_rank.mark())
    of_piece.copy_out(0, [3, 5], slots, [half_bytes, 0], of_piece.mark())
    assert slots == expected
    assert any(slots)
    of_piece.copy_in(0, [1, 2], slots, [half_bytes, 0], of_piece.mark())
    before, after = whole.unflatten(0, (blocks, -1)), engine.unflatten(0, (blocks, -1))
    assert torch.equal(after[[1, 2], :, 2:], before[[3, 5], :, 2:])
    assert torch.equal(after[:, :, :2], before[:, :, :2]), "the other piece is unchanged"
    assert torch.equal(after[3:], before[3:])


def test_a_block_that_is_not_one_run_of_bytes_is_refused() -> None:
    """A layout with heads outside of blocks is refused, not copied wrongly."""
    heads_outside = torch.zeros(2, 8, PAGE // 2, dtype=torch.uint8).transpose(0, 1)
    with pytest.raises(Unsupported, match="not contiguous"):
        build_layouts([CacheGroup(0, 4, None, ("a",), (PAGE,))], {"a": heads_outside}, 8)


@pytest.mark.parametrize("shape", [(8, 3, 4, 16), (8, 4, 16)], ids=["three heads", "no dimension of heads"])
def test_heads_that_are_not_a_multiple_of_the_parts_are_refused(shape: tuple[int, ...]) -> None:
    """Otherwise a part would lack the bytes of a head."""
    cache = torch.zeros(shape, dtype=torch.uint8)
    group = CacheGroup(0, 4, None, ("a",), (cache.numel() // 8 // 2,))
    for piece in (0, 1):
        with pytest.raises(Unsupported, match="cannot be divided into 2 parts"):
            build_layouts([group], {"a": cache}, 8, piece, 2)


@pytest.mark.parametrize("tensors", [None, [], [None], [torch.zeros(8, PAGE, dtype=torch.uint8), None]])
def test_a_layer_without_a_tensor_is_refused(tensors: Any) -> None:
    with pytest.raises(Unsupported, match="layer a has no KV tensor"):
        build_layouts([CacheGroup(0, 4, None, ("a",), (PAGE,))], {"a": tensors}, 8)


def test_a_page_of_another_size_is_refused() -> None:
    """The tensors of a layer must have the bytes that vLLM's configuration says."""
    caches = _caches(8)
    for page_bytes in (PAGE // 2, 2 * PAGE):
        with pytest.raises(Unsupported, match=f"has {PAGE} bytes, expected {page_bytes}"):
            build_layouts([CacheGroup(0, 4, None, ("a",), (page_bytes,))], caches, 8)


# ---- settings


def test_an_unknown_setting_is_a_warning_that_names_the_nearest() -> None:
    """A typo in a key is a warning with the nearest key."""
    warnings: list[str] = []
    ConnectorConfig.parse({"endpont": "unix:/x"}, warnings.append)
    assert "did you mean 'endpoint'" in warnings[0]


@pytest.mark.parametrize(
    "extra",
    [
        {"lookup_timeout_s": "1"},
        {"lookup_timeout_s": -1},
        {"transport": "rdma"},
        {"endpoint": 5},
        {"lazy_offload": "no"},
        {"bidirectional_kv_xfer": "yes"},
        {"kv_recompute_threshold": -1},
        {"kv_lease_duration": 14.0},
        {"decoder_kv_blocks_ttl": 9.0},
        {"advertise": "nowhere"},
        {"advertise": 7070},
        {"peers": "10.0.0.2:7070"},
        {"peers": ["10.0.0.2:7070", "x"]},
    ],
)
def test_a_wrong_setting_stops_the_start(extra: dict[str, Any]) -> None:
    """Invalid values raise at start."""
    with pytest.raises(ValueError, match="kvtier: "):
        ConnectorConfig.parse(extra, lambda _: None)


def test_settings_of_requests_that_are_handed_over() -> None:
    """B2.1 vLLM's names and defaults."""
    config = ConnectorConfig.parse({}, lambda _: None)
    options = config.handoff
    assert (options.kv_recompute_threshold, options.bidirectional_kv_xfer) == (64, False)
    assert (options.kv_lease_duration, options.heartbeat_s, options.decoder_kv_blocks_ttl) == (30.0, 5.0, 480.0)
    named: dict[str, Any] = {
        "kv_recompute_threshold": 0,
        "bidirectional_kv_xfer": True,
        "kv_lease_duration": 60,
        "decoder_kv_blocks_ttl": 900,
        "claim_timeout_s": 2.5,
    }
    others = {"advertise": "10.0.0.1:7070", "peers": ["10.0.0.2:7070"]}
    config = ConnectorConfig.parse(named | others, lambda _: None)
    assert config.handoff == HandoffOptions(**named)
    assert (config.advertise, config.peers) == ("10.0.0.1:7070", ["10.0.0.2:7070"])


# ---- lookups


def _hashes(*counts: int) -> dict[int, list[bytes]]:
    return {group: [bytes([number]) * 32 for number in range(count)] for group, count in enumerate(counts)}


@contextlib.contextmanager
def _lookups(client: FakeClient, geometry: CacheGeometry, timeout_s: float = 60.0) -> Iterator[LookupService]:
    service = LookupService(client, geometry, timeout_s, RateLimitedLog())  # type: ignore[arg-type]
    yield service
    service.close()


def test_only_the_windows_at_the_end_of_the_full_hit_are_asked_for() -> None:
    """B4.10 One call for the full group, one for the last blocks of the sliding windows."""
    client = FakeClient({make_key(bytes([number]) * 32, group) for number in range(3) for group in (0, 1)})
    with _lookups(client, CacheGeometry((FULL, WINDOW), 4, 4)) as service:
        lookup = start_lookup(service, RequestRegistration("r"), _hashes(4, 4), 16)
        wait_until(lambda: lookup.state is LookupState.DONE)
        assert lookup.found.hit_tokens == 12
        assert client.asked == [4, 2]
        assert set(lookup.found.items[1]) == {1, 2}
        service.drop_lookup(lookup.number)
        wait_until(lambda: sorted(client.released) == [1, 2])


def test_a_dropped_lookup_releases_its_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    """B4.3 A lookup dropped while it runs releases what it finds."""
    monkeypatch.setattr(server_calls, "_CIRCUIT_OPEN_S", 600.0)
    started, gate = threading.Event(), threading.Event()

    def hang() -> None:
        started.set()
        gate.wait(60)

    client = FakeClient({make_key(bytes(32), 0)}, before=hang)
    with _lookups(client, CacheGeometry((FULL,), 4, 4)) as service:
        lookup = start_lookup(service, RequestRegistration("r"), _hashes(1), 4)
        assert started.wait(60)
        service.give_up_lookup(lookup.number)
        # left in peace for a moment
        assert start_lookup(service, RequestRegistration("s"), _hashes(1), 4) is None
        gate.set()
        wait_until(lambda: client.released == [1])


def test_a_lookup_that_only_queued_says_nothing_of_the_server() -> None:
    """After a restart many requests wait for a disk: queued lookups end as misses."""
    gate = threading.Event()
    client = FakeClient({make_key(bytes(32), 0)}, before=lambda: gate.wait(60) and None)
    with _lookups(client, CacheGeometry((FULL,), 4, 4)) as service:
        lookups = [start_lookup(service, RequestRegistration(f"r{number}"), _hashes(1), 4) for number in range(20)]
        queued = next(lookup for lookup in reversed(lookups) if lookup is not None)
        service.give_up_lookup(queued.number)
        assert not queued.started
        assert start_lookup(service, RequestRegistration("next"), _hashes(1), 4) is not None
        gate.set()


def test_a_server_that_is_not_there_is_a_miss_at_once() -> None:
    """No lookup starts without a connection; a failed one is a miss."""
    client = FakeClient()
    with _lookups(client, CacheGeometry((FULL,), 4, 4)) as service:
        client.connected = False
        assert start_lookup(service, RequestRegistration("r"), _hashes(1), 4) is None
        client.connected = True

        def fail() -> None:
            raise NotConnected("gone")

        client.before = fail
        lookup = start_lookup(service, RequestRegistration("r"), _hashes(1), 4)
        wait_until(lambda: lookup.state is LookupState.DONE)
        assert lookup.found.hit_tokens == 0


def test_a_long_request_is_looked_up_in_calls_that_the_server_takes() -> None:
    """A lookup may need several calls: the first begins the request, and the first miss ends it."""
    client = FakeClient({make_key(bytes([number]) * 32, 0) for number in range(5)})
    client.max_keys = 2
    with _lookups(client, CacheGeometry((FULL,), 4, 4)) as service:
        lookup = start_lookup(service, RequestRegistration("r"), _hashes(9), 36)
        wait_until(lambda: lookup.state is LookupState.DONE)
        assert lookup.found.hit_tokens == 20
        assert client.asked == [2, 2, 2]
        assert lookup.found.items[0] == {0: (1, 0), 1: (1, 1), 2: (2, 0), 3: (2, 1), 4: (3, 0)}


def test_a_request_is_finished_after_its_last_lookup() -> None:
    """B3.12 A request that ends during its lookup is finished after it was begun."""
    started, gate = threading.Event(), threading.Event()

    def hang() -> None:
        started.set()
        gate.wait(60)

    client, request = FakeClient({make_key(bytes(32), 0)}, before=hang), RequestRegistration("r", 5, {"peer": object()})
    with _lookups(client, CacheGeometry((FULL,), 4, 4)) as service:
        lookup = start_lookup(service, request, _hashes(1), 4)
        assert started.wait(60)
        service.drop_lookup(lookup.number)
        service.finish_request(request)
        stays(lambda: not client.finished, 0.05)
        gate.set()
        wait_until(lambda: client.finished == ["r"])
        assert client.begun == {"r": (5, None)}  # parameters that are not JSON are not sent
        assert client.released == [1]


def test_a_partial_block_has_a_key_when_its_tokens_are_known() -> None:
    """B2.17 The key covers the tokens up to the end of the hold, and the hash before them."""
    request = SimpleNamespace(
        request_id="r",
        block_hashes=[bytes([number]) * 32 for number in range(2)],
        all_token_ids=list(range(10)),
        mm_features=[],
        cache_salt=None,
        lora_request=None,
        prompt_embeds=None,
    )
    geometry = CacheGeometry((FULL,), 4, 4)
    adapted = VllmRequest(request, RequestRegistration("r"), geometry, may_load=True, may_save=True)
    keys = [adapted.hold_key("engine", "hold", FULL, 2, tokens) for tokens in (9, 10)]
    assert None not in keys
    assert keys[0] != keys[1]
    assert adapted.hold_key("engine", "hold", FULL, 2, 11) is None, "the last token is not known"
    assert adapted.hold_key("engine", "hold", FULL, 3, 10) is None, "block 2 has no hash"


# ---- the worker


@pytest.mark.parametrize("error", [None, NotConnected("gone"), ValueError("a defect")])
def test_every_job_is_reported_after_a_failure(error: Exception | None) -> None:
    """Failed loads are reported as failed and failed saves as ended, so that the engine goes on."""
    client, caches = FakeTransfers(error), _caches(8)
    reports = WorkerReports()
    worker = WorkerSide(lambda *_: client, [FULL], "ns", 8, reports, RateLimitedLog())  # type: ignore[arg-type,return-value]
    worker.register(caches)
    step = StepMetadata(
        loads=[LoadJob("good", [BlockRead(1, [0], [0], [2])]), LoadJob("impossible")],
        saves=[SaveJob(1, "r", [b"k0", b"k1"], [0, 0], [4, 5])],
        namespace_digest="ns",
    )
    worker.start_loads(step)
    worker.start_saves(step)
    loaded: set[str] = set()
    failed: set[str] = set()
    ended: dict[int, int] = {}

    def all_reported() -> bool:
        results, report = reports.take_results(idle=True), reports.take_report()
        loaded.update(results.finished_recving)
        failed.update(results.failed_recving)
        ended.update(report.ended_saves if report else {})
        return loaded == {"good", "impossible"} and ended == {1: 1}

    wait_until(all_reported)
    assert failed == ({"good", "impossible"} if error else {"impossible"})
    if error is None:
        assert bytes(client.memory[:PAGE]) == bytes(caches["a"].view(8, PAGE)[5].tolist())
    close_when_idle(worker)


def test_a_worker_of_another_namespace_moves_nothing() -> None:
    """If scheduler and worker disagree about the namespace, all is a miss."""
    reports = WorkerReports()
    worker = WorkerSide(lambda *_: FakeTransfers(), [FULL], "ns", 8, reports, RateLimitedLog())  # type: ignore[arg-type]
    worker.register(_caches(8))
    step = StepMetadata(
        [LoadJob("r", [BlockRead(1, [0], [0], [2])])], [SaveJob(1, "r", [b"k"], [0], [3])], namespace_digest="other"
    )
    worker.start_loads(step)
    worker.start_saves(step)
    assert reports.take_results(idle=False).failed_recving == {"r"}
    assert reports.take_report() == WorkerReport({1: 1}, {1: {0}})
    close_when_idle(worker)


def test_a_worker_whose_bytes_another_rank_stores_reports_saves() -> None:
    """B4.5 It stores nothing, but the scheduler waits for the report of each worker."""
    client, reports = FakeTransfers(), WorkerReports()
    worker = WorkerSide(lambda *_: client, [FULL], "ns", 8, reports, RateLimitedLog(), stores=False)  # type: ignore[arg-type,return-value]
    worker.register(_caches(8))
    worker.start_saves(StepMetadata([], [SaveJob(1, "r", [b"k"], [0], [3])], "ns"))
    close_when_idle(worker)
    assert client.written == []
    assert reports.take_report() == WorkerReport({1: 1})


def test_a_worker_says_what_it_did_not_store() -> None:
    """B3.5 Blocks without room, or of another writer, do not count as stored."""
    client, reports = FakeTransfers(max_keys=4), WorkerReports()
    worker = WorkerSide(lambda *_: client, [FULL], "ns", 8, reports, RateLimitedLog())  # type: ignore[arg-type,return-value]
    worker.register(_caches(8))
    keys = [bytes([number]) * 8 for number in range(6)]
    job = SaveJob(1, "r", keys, [0] * 6, [1, 2, 3, 4, 5, 6])
    worker.start_saves(StepMetadata(saves=[job], namespace_digest="ns"))
    close_when_idle(worker)
    assert client.written == [keys[:4], keys[4:]]
    assert reports.take_report() == WorkerReport({1: 1}, {1: {2, 3}})


def test_one_event_per_step_and_kind_taken_when_the_compute_was_submitted() -> None:
    """B4.4, B4.11 A step's loads wait for one event, and its saves for another."""
    client, reports, copied = FakeTransfers(), WorkerReports(), []
    worker = WorkerSide(lambda *_: client, [FULL], "ns", 8, reports, RateLimitedLog())  # type: ignore[arg-type,return-value]
    worker.register(_caches(8))
    marks = iter(("loads 1", "saves 1", "saves 2"))
    worker._copiers = (
        SimpleNamespace(  # type: ignore[assignment]
            mark=lambda: next(marks),
            copy_in=lambda _group, ids, _memory, _offsets, after: copied.append((ids, after)),
            copy_out=lambda _group, ids, _memory, _offsets, after: copied.append((ids, after)),
        ),
    )
    loads = [LoadJob(name, [BlockRead(1, [0], [0], [block])]) for name, block in (("r", 2), ("s", 3))]
    saves = [SaveJob(number, "t", [b"k0", b"k1"], [0, 0], [4, 4 + number]) for number in (1, 2)]
    worker.start_loads(StepMetadata(loads, [], "ns"))
    worker.start_saves(StepMetadata([], saves, "ns"))
    worker.start_saves(StepMetadata([], [SaveJob(3, "t", [b"k0", b"k1"], [0, 0], [4, 7])], "ns"))
    close_when_idle(worker)
    expected = [([2], "loads 1"), ([3], "loads 1"), ([5], "saves 1"), ([6], "saves 1"), ([7], "saves 2")]
    assert sorted(copied) == expected


def test_memory_of_every_client_of_a_gpu_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """B4.16 The server's region and the staging buffers for all servers are pinned."""
    pin, given = object(), list[object]()

    def connect(_piece: int, pin: object) -> FakeTransfers:
        given.append(pin)
        return FakeTransfers()

    def peers_of(_piece: int, own: Any, pin: object) -> Peers:
        given.append(pin)
        return Peers(own)

    monkeypatch.setattr(WorkerSide, "_pin_for", lambda *_: pin)
    worker = WorkerSide(connect, [FULL], "ns", 8, WorkerReports(), RateLimitedLog(), peers_of=peers_of)  # type: ignore[arg-type]
    worker.register(_caches(8))
    close_when_idle(worker)
    assert given == [pin, pin]


@pytest.mark.parametrize("late", [False, True])
def test_a_save_that_is_old_is_not_begun(*, late: bool) -> None:
    """B5.6 A worker that was stopped for long reads no block that its scheduler has released."""
    client, reports = FakeTransfers(), WorkerReports()
    worker = WorkerSide(lambda *_: client, [FULL], "ns", 8, reports, RateLimitedLog())  # type: ignore[arg-type,return-value]
    worker.register(_caches(8))
    sent_at = time.time() - (SAVE_WITHIN_S if late else 0)
    worker.start_saves(StepMetadata([], [SaveJob(1, "r", [b"k0", b"k1"], [0, 0], [4, 5])], "ns", sent_at=sent_at))
    close_when_idle(worker)
    assert client.written == ([] if late else [[b"k0", b"k1"]])
    assert reports.take_report() == WorkerReport({1: 1}, {1: {0, 1}} if late else {})
