"""The vLLM connector's parts."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from connector_fakes import FULL, PAGE, WINDOW, FakeClient, make_caches, start_lookup
from harness.polling import stays, wait_until

from kvtier.client import NotConnected, make_key
from kvtier.client.engines.failures import Unsupported
from kvtier.client.engines.vllm import background
from kvtier.client.engines.vllm.background import BackgroundThreads, RateLimitedLog
from kvtier.client.engines.vllm.config import ConnectorConfig
from kvtier.client.engines.vllm.layout import build_layouts
from kvtier.client.engines.vllm.request_settings import RequestSettings
from kvtier.client.engines.vllm.scheduler.prefix_lookups import LookupService, LookupState
from kvtier.client.engines.vllm.scheduler.requests import RequestRegistration, VllmRequest
from kvtier.client.engines.vllm.worker.copies import make_copier
from kvtier.client.engines.vllm_tier.config import ManagerConfig
from kvtier.client.handoff import HandoffOptions
from kvtier.client.offload import CacheGeometry, CacheGroup

# ---- bytes


def test_evenly_spaced_layers_move_in_one_copy() -> None:
    """Layers of one allocation are one segment; layers of two allocations are two."""
    caches = make_caches(8)
    (layout,) = build_layouts([FULL], caches, 8)
    assert len(layout.segments) == 1
    caches["b"] = caches["b"].clone()
    (layout,) = build_layouts([FULL], caches, 8)
    assert [segment.slot_offset for segment in layout.segments] == [0, PAGE]


@pytest.mark.parametrize("split", [False, True])
def test_blocks_come_back_as_they_went(split: bool) -> None:  # noqa: FBT001 - a parameter of the test
    """A slot holds a block's layers in order; copying in restores exactly these pages."""
    caches = make_caches(8)
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


def test_layers_at_other_places_are_copied_in_the_groups_order() -> None:
    """Layers may be allocated in another order than that of the group, and at uneven distances."""
    whole = torch.arange(6 * 8 * PAGE).view(6, 8, PAGE).to(torch.uint8)
    for places in ((2, 0), (2, 1, 0), (0, 1, 3), (5, 3, 4), (0, 2, 4)):
        names = tuple("abc"[: len(places)])
        group = CacheGroup(0, 4, None, names, (PAGE,) * len(places))
        copier = make_copier(
            build_layouts([group], {name: whole[at] for name, at in zip(names, places, strict=True)}, 8)
        )
        memory = memoryview(bytearray(len(places) * PAGE))
        copier.copy_out(0, [3], memory, [0], copier.mark())
        assert bytes(memory) == b"".join(bytes(whole[at][3].tolist()) for at in places)


def test_blocks_must_divide_the_first_dimension_of_a_tensor() -> None:
    """A block of vLLM is a whole number of kernel blocks."""
    caches = {"a": torch.zeros(20, PAGE // 2, dtype=torch.uint8)}
    with pytest.raises(Unsupported, match="first dimension 20 of layer a is not a multiple of the 8 blocks"):
        build_layouts([CacheGroup(0, 4, None, ("a",), (PAGE,))], caches, 8)


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
    caches = make_caches(8)
    for page_bytes in (PAGE // 2, 2 * PAGE):
        with pytest.raises(Unsupported, match=f"has {PAGE} bytes, expected {page_bytes}"):
            build_layouts([CacheGroup(0, 4, None, ("a",), (page_bytes,))], caches, 8)


# ---- settings


def test_an_unknown_setting_is_a_warning_that_names_the_nearest() -> None:
    """A typo in a key is a warning with the nearest key."""
    warnings: list[str] = []
    ConnectorConfig.parse({"endpont": "unix:/x"}, warnings.append)
    assert "did you mean endpoint" in warnings[0]


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
        {"peers": 5},
        {"peers": ["10.0.0.2:7070", "x"]},
    ],
)
def test_a_wrong_setting_stops_the_start(extra: dict[str, Any]) -> None:
    """Invalid values raise at start."""
    with pytest.raises(ValueError, match="kvtier: "):
        ConnectorConfig.parse(extra, lambda _: None)


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("lookup_timeout_s", 0.0, 60.0),
        ("max_held_fraction", 0.01, 1.0),
        ("kv_parts", 0, 64),
        ("kv_recompute_threshold", 0, 1 << 31),
        ("kv_lease_duration", 15.0, 86400.0),
        ("decoder_kv_blocks_ttl", 10.0, 86400.0),
        ("claim_timeout_s", 0.0, 60.0),
    ],
)
def test_the_limits_of_numbers(name: str, low: float, high: float) -> None:
    """Both limits are accepted, and no value beyond them or of another type."""
    step = 1 if isinstance(low, int) else 0.001
    for right in (low, high):
        assert getattr(ConnectorConfig.parse({name: right}, pytest.fail), name) == right
    for wrong in (low - step, high + step, True, None, str(high), float("nan")):
        with pytest.raises(ValueError, match=f"kvtier: {name} must be"):
            ConnectorConfig.parse({name: wrong}, pytest.fail)


@pytest.mark.parametrize("config", [ConnectorConfig, ManagerConfig])
def test_the_types_of_settings(config: type[ConnectorConfig | ManagerConfig]) -> None:
    """Each text and each flag of a connector and of a tier refuses a value of another type."""
    names = [each.name for each in fields(config) if isinstance(each.default, bool | str) or each.default is None]
    assert len(names) > 8
    for name in names:
        for wrong in (1, ["text"]):
            with pytest.raises(ValueError, match=f"kvtier: {name}"):
                config.parse({name: wrong}, pytest.fail)


def test_each_thread_begins_with_its_first_call_and_ends_after_its_jobs() -> None:
    """A job that raises ends no thread. `close` waits for the jobs that are queued."""
    begun, ended, log = [], [], RateLimitedLog()
    threads = BackgroundThreads("test", log, threads=3, on_start=lambda: begun.append(threading.get_ident()))
    barrier = threading.Barrier(3, timeout=60)

    def work() -> None:
        barrier.wait()
        ended.append(threading.get_ident())
        raise ValueError("a defect")

    for _ in range(6):
        threads.submit(work)
    threads.close(60.0)
    assert len(begun) == 3
    assert sorted(ended) == sorted(begun * 2)
    assert not any(thread.is_alive() for thread in threads._threads)


def test_defaults_of_settings() -> None:
    """A lookup delays a request by at most a second, and saves hold at most half of the blocks."""
    config = ConnectorConfig.parse({}, lambda _: None)
    assert (config.transport, config.lookup_timeout_s, config.max_held_fraction) == ("auto", 1.0, 0.5)
    assert (config.tenant, config.weights_version, config.kv_parts, config.advertise) == ("", "", 0, None)
    assert (config.lazy_offload, config.publish_token_ids, config.watch_events) == (False, False, True)
    assert (config.weights_change_on_reset, list(config.peers), config.engine_address) == (True, [], None)


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
    monkeypatch.setattr(background, "_CIRCUIT_OPEN_S", 600.0)
    started, gate = threading.Event(), threading.Event()

    def hang() -> None:
        started.set()
        gate.wait(60)

    client = FakeClient({make_key(bytes(32), 0)}, before=hang)
    with _lookups(client, CacheGeometry((FULL,), 4, 4)) as service:
        lookup = start_lookup(service, RequestRegistration("r"), _hashes(1), 4)
        assert started.wait(60)
        service.abandon_lookup(lookup.number)
        # left in peace for a moment
        assert start_lookup(service, RequestRegistration("s"), _hashes(1), 4) is None
        gate.set()
        wait_until(lambda: client.released == [1])


def test_the_server_answers_before_the_engine_gives_up() -> None:
    """It waits for promotions from lower tiers for less than the timeout of a lookup."""
    client = FakeClient()
    with _lookups(client, CacheGeometry((FULL,), 4, 4), timeout_s=60.0) as service:
        lookup = start_lookup(service, RequestRegistration("r"), _hashes(1), 4)
        assert lookup is not None
        wait_until(lambda: lookup.state is LookupState.DONE)
    assert 0 < client.waits[0] <= 0.8 * 60.0


def test_a_lookup_that_only_queued_says_nothing_of_the_server() -> None:
    """After a restart many requests wait for a disk: queued lookups end as misses."""
    gate = threading.Event()
    client = FakeClient({make_key(bytes(32), 0)}, before=lambda: gate.wait(60) and None)
    with _lookups(client, CacheGeometry((FULL,), 4, 4)) as service:
        lookups = [start_lookup(service, RequestRegistration(f"r{number}"), _hashes(1), 4) for number in range(20)]
        queued = next(lookup for lookup in reversed(lookups) if lookup is not None)
        service.abandon_lookup(queued.number)
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


def test_a_request_whose_registration_failed_is_registered_by_its_next_call() -> None:
    """B3.12 Otherwise no tier would hear of the request, and its settings would be lost."""

    def fail() -> None:
        raise NotConnected("gone")

    client, request = FakeClient(before=fail), RequestRegistration("r", 5)
    with _lookups(client, CacheGeometry((FULL,), 4, 4)) as service:
        first = start_lookup(service, request, _hashes(1), 4)
        wait_until(lambda: first.state is LookupState.DONE)
        client.before, service.circuit._open_until = (lambda: None), 0.0
        client.begun.clear()
        second = start_lookup(service, request, _hashes(1), 4)
        wait_until(lambda: second.state is LookupState.DONE)
        third = start_lookup(service, request, _hashes(1), 4)
        wait_until(lambda: third.state is LookupState.DONE)
        assert client.begun == {"r": (5, None)}


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


def test_a_window_is_found_behind_a_chunk_with_a_missing_block() -> None:
    """Only a prefix ends at its first missing block; blocks of a window are looked up singly."""
    client = FakeClient({make_key(bytes([number]) * 32, 0) for number in range(6)})
    client.keys |= {make_key(bytes([number]) * 32, 1) for number in (3, 4)}
    client.max_keys = 2
    with _lookups(client, CacheGeometry((FULL, WINDOW), 4, 4)) as service:
        lookup = start_lookup(service, RequestRegistration("r"), _hashes(6, 6), 24)
        wait_until(lambda: lookup.state is LookupState.DONE)
        assert lookup.found.hit_tokens == 20


def test_a_lookup_may_begin_behind_the_engines_own_blocks() -> None:
    """B4.10 It asks for the blocks after `start`, and their positions are those in the request."""
    client = FakeClient({make_key(bytes([number]) * 32, group) for number in range(2, 5) for group in (0, 1)})
    with _lookups(client, CacheGeometry((FULL, WINDOW), 4, 4)) as service:
        lookup = start_lookup(service, RequestRegistration("r"), _hashes(6, 6), 24, start=8)
        wait_until(lambda: lookup.state is LookupState.DONE)
        assert client.looked_up[0] == [make_key(bytes([number]) * 32, 0) for number in range(2, 6)]
        assert lookup.found.hit_tokens == 20
        assert lookup.found.items == {0: {2: (1, 0), 3: (1, 1), 4: (1, 2)}, 1: {3: (2, 0), 4: (2, 1)}}
        assert lookup.found.sources == dict.fromkeys((2, 3, 4), "cpu")


def test_keys_of_a_lookup_have_the_tag_of_the_request() -> None:
    """The blocks of a LoRA adapter have other keys than those of the model."""
    client = FakeClient({make_key(bytes(32) + b"tag", 0)})
    with _lookups(client, CacheGeometry((FULL,), 4, 4)) as service:
        tagged = start_lookup(service, RequestRegistration("r"), _hashes(1), 4, tag=b"tag")
        plain = start_lookup(service, RequestRegistration("s"), _hashes(1), 4)
        wait_until(lambda: {tagged.state, plain.state} == {LookupState.DONE})
        assert (tagged.found.hit_tokens, plain.found.hit_tokens) == (4, 0)


def test_only_the_first_call_of_a_lookup_demands_a_least_number_of_hits() -> None:
    """`min_hit_tokens` counts from the start of the hit. A later call may find fewer blocks."""
    client = FakeClient({make_key(bytes([number]) * 32, 0) for number in range(3)})
    client.max_keys = 2
    request = RequestRegistration("r", settings=RequestSettings(min_hit_tokens=9))
    with _lookups(client, CacheGeometry((FULL, WINDOW), 4, 4)) as service:
        lookup = start_lookup(service, request, _hashes(5, 5), 20)
        wait_until(lambda: lookup.state is LookupState.DONE)
        assert client.asked[:2] == [2, 2]
        assert [options.get("min_hits") for options in client.options] == [2, *[None] * (len(client.options) - 1)]


@pytest.mark.parametrize("dropped", [False, True])
def test_a_lookup_without_a_hit_keeps_no_lease(*, dropped: bool) -> None:
    """B4.3 Also if its window is missing, so that the blocks of full attention are of no use."""
    client = FakeClient({make_key(bytes([number]) * 32, 0) for number in range(3)})
    with _lookups(client, CacheGeometry((FULL, WINDOW), 4, 4)) as service:
        lookup = start_lookup(service, RequestRegistration("r"), _hashes(3, 3), 12)
        wait_until(lambda: lookup.state is LookupState.DONE)
        assert lookup.found.hit_tokens == 0
        wait_until(lambda: sorted(client.released) == list(range(1, len(client.asked) + 1)))
        if dropped:
            service.drop_lookup(lookup.number)
    assert sorted(client.released) == list(range(1, len(client.asked) + 1)), "each once"


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


def test_the_key_of_a_partial_block_covers_all_that_its_kv_depends_on() -> None:
    """B2.17 Names, place, tokens, the hash before them, images, salt, and the adapter."""

    def key_of(
        engine: str = "engine", hold: str = "hold", group: CacheGroup = FULL, tag: bytes = b"", **changed: Any
    ) -> bytes | None:
        usual = {
            "request_id": "r",
            "block_hashes": [bytes([number]) * 32 for number in range(2)],
            "all_token_ids": list(range(10)),
            "mm_features": [],
            "lora_request": None,
            "prompt_embeds": None,
            "cache_salt": None,
        }
        request = SimpleNamespace(**usual | changed)
        geometry = CacheGeometry((FULL,), 4, 4)
        adapted = VllmRequest(request, RequestRegistration("r"), geometry, may_load=True, may_save=True, tag=tag)
        # A salt is part of the first block, and so of the hashes of later ones.
        place = (0, 3) if "cache_salt" in changed else (2, 10)
        return adapted.hold_key(engine, hold, group, *place)

    image = SimpleNamespace(identifier="image", mm_position=SimpleNamespace(offset=8, length=1))
    keys = [
        key_of(),
        key_of(engine="other"),
        key_of(hold="other"),
        key_of(group=WINDOW),
        key_of(tag=b"tag"),
        key_of(block_hashes=[bytes(32)] * 2),
        key_of(all_token_ids=[*range(9), 7]),
        key_of(mm_features=[image]),
        key_of(cache_salt=None),
        key_of(cache_salt="salt"),
    ]
    assert key_of() == keys[0]
    assert None not in keys
    assert len(set(keys)) == len(keys)
