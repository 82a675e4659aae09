"""Audits: blocks that the engine computes again are compared with those in the server."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from connector_fakes import FULL, PAGE, close_when_idle
from handoff_engine import BLOCK, NAMESPACE, ToyEngine
from harness.polling import wait_until
from harness.server_process import ServerProcess

from kvtier.client import Client, NotConnected
from kvtier.client.engines.vllm.background import RateLimitedLog
from kvtier.client.engines.vllm.config import ConnectorConfig
from kvtier.client.engines.vllm.stats import METRICS, TransferCounters
from kvtier.client.engines.vllm.step_metadata import StepMetadata
from kvtier.client.engines.vllm.worker.audit import BlockAudit
from kvtier.client.engines.vllm.worker.reports import WorkerReport, WorkerReports
from kvtier.client.engines.vllm.worker.worker import WorkerSide
from kvtier.client.offload import CacheGroup, SaveJob

BLOCKS, TOKENS, HEADS, SIZE = 4, 16, 4, 32
KEY = b"k" * 32 + bytes(4)


def cache_of(dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """KV of one layer, with the dimensions of vLLM: blocks, K and V, heads, tokens, values."""
    values = torch.randn(BLOCKS, 2, HEADS, TOKENS, SIZE, generator=torch.Generator().manual_seed(seed))
    return values.to(dtype)


def bytes_of(*layers: torch.Tensor) -> memoryview:
    """The bytes of block 0 in the slot."""
    return memoryview(b"".join(layer[0].contiguous().view(torch.uint8).numpy().tobytes() for layer in layers))


def audit_of(*layers: torch.Tensor, pieces: int = 1) -> BlockAudit:
    caches = {f"layer {number}": layer for number, layer in enumerate(layers)}
    page = layers[0][0].numel() * layers[0].element_size() // pieces
    return BlockAudit([CacheGroup(0, TOKENS, None, tuple(caches), (page,) * len(caches))], caches, BLOCKS, pieces)


NUMBERS = [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize("dtype", NUMBERS)
def test_rounding_is_no_difference(dtype: torch.dtype) -> None:
    """The same values with one rounding more are close."""
    layer = cache_of(dtype)
    again = (layer.float() * (1 + torch.finfo(dtype).eps * (torch.rand(layer.shape) - 0.5))).to(dtype)
    audit = audit_of(layer)
    assert audit.nbytes(0) == len(bytes_of(layer))
    assert audit.compare(0, bytes_of(layer), bytes_of(layer)).outcome == "equal"
    found = audit.compare(0, bytes_of(layer), bytes_of(again))
    assert (found.outcome, found.layer) == ("close", "layer 0")
    assert 0 < found.relative < found.limit


WRONG = {
    "other weights": lambda a, b: (a + 0.3 * torch.randn(a.shape), b),
    "shifted by a token": lambda a, b: (a.roll(1, 3), b.roll(1, 3)),
    "swapped heads": lambda a, b: (a[:, :, [1, 0, 2, 3]], b),
    "swapped layers": lambda a, b: (b, a),
    "another RoPE base": lambda a, b: (torch.cat([a[:, :1].roll(1, -1), a[:, 1:]], 1), b),
    "another block": lambda a, b: (a.roll(1, 0), b.roll(1, 0)),
    "not a number": lambda a, b: (a, torch.full_like(b, float("nan"))),
    "empty": lambda a, b: (a, torch.zeros_like(b)),
}


@pytest.mark.parametrize("what", WRONG)
@pytest.mark.parametrize("dtype", NUMBERS)
def test_wrong_kv_is_found(dtype: torch.dtype, what: str) -> None:
    """In the stored bytes or in the computed ones."""
    layers = cache_of(dtype), cache_of(dtype, 1)
    wrong = [layer.to(dtype) for layer in WRONG[what](*(layer.float() for layer in layers))]
    audit = audit_of(*layers)
    found = audit.compare(0, bytes_of(*layers), bytes_of(*wrong))
    assert (found.outcome, found.relative > found.limit) == ("different", True)
    assert audit.compare(0, bytes_of(*wrong), bytes_of(*layers)).outcome == "different"


def test_other_bytes_that_are_no_numbers_are_unknown() -> None:
    """Quantized bytes whose scales are not known cannot be compared, unless they are equal."""
    numbers, quantized = cache_of(torch.float16), torch.zeros(BLOCKS, 2, HEADS, TOKENS, SIZE, dtype=torch.uint8)
    audit = BlockAudit([CacheGroup(0, TOKENS, None, ("a", "b"), (1, 1))], {"a": numbers, "b": quantized}, BLOCKS)
    other = quantized + 1
    assert audit.compare(0, bytes_of(numbers, quantized), bytes_of(numbers, other)).outcome == "unknown"
    assert audit.compare(0, bytes_of(numbers, quantized), bytes_of(numbers, quantized)).outcome == "equal"
    assert audit.compare(0, bytes_of(numbers, quantized), bytes_of(-numbers, other)).outcome == "different"


def test_a_layer_may_have_several_tensors() -> None:
    """A state-space layer has two states, of other types."""
    conv, ssm = torch.randn(BLOCKS, 8).half(), torch.randn(BLOCKS, 16)
    audit = BlockAudit([CacheGroup(0, TOKENS, None, ("m",), (80,), is_state=True)], {"m": [conv, ssm]}, BLOCKS)
    assert audit.nbytes(0) == 80
    assert audit.compare(0, bytes_of(conv, ssm), bytes_of(conv, ssm + 1)).outcome == "different"
    assert audit.compare(0, bytes_of(conv, ssm), bytes_of(conv, ssm * 1.001)).outcome == "close"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("s")).start() as running:
        yield running


def test_an_engine_audits_its_hits(server: ServerProcess) -> None:
    """It computes the last block of the hit, and its answers stay the same."""
    prompt = list(range(100, 100 + 4 * BLOCK + 1))
    engine = ToyEngine(server.endpoint, "a", ConnectorConfig(audit_fraction=0.5))
    try:
        computed = [engine.run(prompt).computed for _ in range(5)]
        assert computed == [4 * BLOCK + 1, 1, BLOCK + 1, 1, BLOCK + 1]
        counts = engine.counts()
        assert {name: counts[name] for name in counts if name.startswith("audits")} == {"audits:equal": 2}
        assert counts["load_blocks:loaded"] == 2 * 4 + 2 * 3
        assert counts["save_blocks:stored"] == 4 + 2
    finally:
        engine.close()


class _Worker:
    """A worker with one block of KV, and one part of a server's block."""

    def __init__(self, server: ServerProcess, cache: torch.Tensor) -> None:
        self.client = Client(server.endpoint, namespace=NAMESPACE, engine_id="audit")
        self.client.wait_until_connected()
        self.counters, self.reports, self.log = TransferCounters(), WorkerReports(), RateLimitedLog()
        connect: Any = lambda *_: self.client  # noqa: E731
        self.side = WorkerSide(connect, [FULL], "ns", BLOCKS, self.reports, self.log, self.counters)
        self.side.register({"a": cache, "b": cache.clone()})

    def save(self, key: bytes, *, audited: bool) -> dict[str, int]:
        """Stores block 2, or compares it. Returns the counts."""
        job = SaveJob(1, "r", [key], [0], [2], audits=[0] if audited else [])
        self.side.start_saves(StepMetadata([], [job], "ns"))
        reports: list[WorkerReport | None] = []
        wait_until(lambda: reports.append(self.reports.take_report()) or reports[-1] is not None)
        assert reports[-1] == WorkerReport({1: 1}), "the job is reported as stored"
        stats = self.counters.take()
        counts: dict[str, Any] = stats.data if stats else {}
        return {name: value for name, value in counts.items() if name.startswith("audits")}


def _page_cache(seed: int) -> torch.Tensor:
    values = torch.randn(BLOCKS, PAGE // 2, generator=torch.Generator().manual_seed(seed))
    return values.half()


@pytest.mark.parametrize("kind", ["equal", "close", "different", "unknown"])
def test_workers_count_what_they_find(server: ServerProcess, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    key = kind.encode().ljust(32, b".") + bytes(4)
    first = _Worker(server, _page_cache(1))
    assert first.save(key, audited=False) == {}
    cache = {
        "equal": _page_cache(1),
        "close": _page_cache(1) * 1.001,
        "different": _page_cache(2),
        "unknown": _page_cache(2).view(torch.uint8),
    }[kind]
    second = _Worker(server, cache)
    texts: list[str] = []
    monkeypatch.setattr(second.log, "warn", lambda _, text, **__: texts.append(text))
    assert second.save(key, audited=True) == {f"audits:{kind}": 1}
    assert [key.hex() in text and "layer a differs by" in text for text in texts] == [True] * (kind == "different")
    for worker in (first, second):
        close_when_idle(worker.side)


def test_a_block_that_the_server_does_not_have_is_stored(server: ServerProcess) -> None:
    """It has been evicted since the lookup. There is nothing to compare."""
    worker = _Worker(server, _page_cache(1))
    assert worker.save(b"new".ljust(32, b".") + bytes(4), audited=True) == {}
    close_when_idle(worker.side)


def test_an_audit_that_fails_is_no_failed_save(server: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    key = b"fails".ljust(32, b".") + bytes(4)
    worker = _Worker(server, _page_cache(1))
    worker.save(key, audited=False)

    def fail(*_: Any, **__: Any) -> int:
        raise NotConnected("gone")

    monkeypatch.setattr(worker.client, "load", fail)
    assert worker.save(key, audited=True) == {}
    monkeypatch.setattr(worker.client, "load", lambda *_, **__: 0)
    assert worker.save(key, audited=True) == {"audits:gone": 1}
    close_when_idle(worker.side)


@pytest.mark.parametrize(("fraction", "every"), [(0, 0), (1e-12, 0), (1 / 256, 256), (0.3, 3), (1, 1)])
def test_the_fraction_of_audited_hits(fraction: float, every: int) -> None:
    assert ConnectorConfig(audit_fraction=fraction).audit_every == every


@pytest.mark.parametrize("fraction", [-0.1, 1.1, True, "1", None, float("nan")])
def test_a_wrong_fraction_is_refused(fraction: Any) -> None:
    with pytest.raises(ValueError, match="audit_fraction must be a number from 0 to 1"):
        ConnectorConfig.parse({"audit_fraction": fraction}, SimpleNamespace().__class__)


def test_each_outcome_has_a_series() -> None:
    assert METRICS["audits"].outcomes == ("equal", "close", "different", "unknown", "gone")
