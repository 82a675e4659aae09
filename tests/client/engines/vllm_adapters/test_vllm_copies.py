"""Copies between KV tensors and slots: bytes, number of calls, and order behind the compute."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from connector_fakes import FULL, PAGE, WINDOW

from kvtier.client.engines.failures import Unsupported
from kvtier.client.engines.vllm.layout import build_layouts
from kvtier.client.engines.vllm.worker import copies
from kvtier.client.engines.vllm.worker.copies import CpuCopier, CudaCopier
from kvtier.client.offload import CacheGroup
from kvtier.cuda.host import pinning

BLOCKS = 16
SLOT = 2 * PAGE


class Event:
    """A CUDA event: ``compute`` was submitted before it, and runs when something waits for it."""

    def __init__(self, compute: Callable[[], None] = lambda: None) -> None:
        self.compute = compute

    def record(self, stream: object) -> None:
        pass


class Stream:
    """A CUDA stream that runs everything at once."""

    def __init__(self, *_: object, **__: object) -> None:
        self.synchronized = 0

    def wait_event(self, event: Event) -> None:
        event.compute()

    def synchronize(self) -> None:
        self.synchronized += 1


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """No GPU is needed: streams and events are fakes, and memory is the host's."""
    for name, fake in {
        "Stream": Stream,
        "Event": Event,
        "device": lambda _: contextlib.nullcontext(),
        "stream": lambda _: contextlib.nullcontext(),
        "current_stream": lambda _: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)


def _caches() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    layers = torch.randint(0, 255, (4, BLOCKS, PAGE), generator=generator, dtype=torch.uint8).unbind(0)
    # The first group's layers are in two allocations, so in two segments. Their offsets are those
    # of adjacent layers.
    other = torch.cat([layers[0].clone(), layers[1]])[BLOCKS:]
    return {"a": layers[0], "b": other, "c": layers[2], "d": layers[3]}


def _make(kind: type[CpuCopier | CudaCopier], caches: dict[str, Any]) -> Any:
    layouts = build_layouts([FULL, WINDOW], caches, BLOCKS)
    return CpuCopier(layouts) if kind is CpuCopier else CudaCopier(layouts, torch.device("cpu"))


def _batches() -> Iterator[tuple[list[int], list[int]]]:
    yield [], []
    yield list(range(3, 11)), [SLOT * number for number in range(8)]
    yield list(range(3, 11)), [2 * SLOT * number for number in range(8)]
    for seed in range(20):
        rng = random.Random(seed)
        count = rng.randrange(1, BLOCKS)
        offsets = [SLOT * number for number in rng.sample(range(BLOCKS), count)]
        yield rng.sample(range(BLOCKS), count), (sorted(offsets) if seed % 2 else offsets)


@pytest.mark.parametrize("kind", [CpuCopier, CudaCopier])
@pytest.mark.parametrize("group", [FULL, WINDOW], ids=["apart", "even"])
@pytest.mark.usefixtures("cuda")
def test_every_block_goes_to_its_slot_and_back(kind: type[CpuCopier | CudaCopier], group: CacheGroup) -> None:
    """Blocks and slots in any order: consecutive, scattered, backwards; nothing else changes."""
    for block_ids, offsets in _batches():
        caches = _caches()
        copier, memory = _make(kind, caches), memoryview(bytearray(b"\x07" * SLOT * 2 * BLOCKS))
        copier.copy_out(group.index, block_ids, memory, offsets, copier.mark())
        expected = bytearray(b"\x07" * len(memory))
        for block_id, offset in zip(block_ids, offsets, strict=True):
            expected[offset : offset + SLOT] = b"".join(bytes(caches[name][block_id].tolist()) for name in group.layers)
        assert bytes(memory) == expected
        before = {name: cache.clone() for name, cache in caches.items()}
        targets = [(block_id + 1) % BLOCKS for block_id in block_ids]
        copier.copy_in(group.index, targets, memory, offsets, copier.mark())
        for name in group.layers:
            for block_id, target in zip(block_ids, targets, strict=True):
                before[name][target] = torch.frombuffer(memory, dtype=torch.uint8)[
                    offsets[block_ids.index(block_id)] + PAGE * group.layers.index(name) :
                ][:PAGE]
        assert all(torch.equal(caches[name], before[name]) for name in caches)


def test_blocks_in_a_row_are_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Consecutive blocks with consecutive slots are one call."""
    copied: list[tuple[int, ...]] = []
    caches = _caches()
    copier = _make(CpuCopier, caches)
    monkeypatch.setattr(
        copies,
        "np",
        SimpleNamespace(**{**vars(copies.np), "copyto": lambda to, _: copied.append(to.shape)}),  # type: ignore[attr-defined]
    )
    memory = memoryview(bytearray(SLOT * BLOCKS))
    copier.copy_out(1, [3, 4, 5, 9], memory, [0, SLOT, 2 * SLOT, 3 * SLOT], None)
    assert copied == [(3, 2, PAGE), (1, 2, PAGE)]


def test_blocks_in_a_row_may_have_slots_at_uneven_distances() -> None:
    """Consecutive blocks are copied together only as far as their slots are evenly spaced."""
    caches = _caches()
    memory = memoryview(bytearray(SLOT * BLOCKS))
    offsets = [0, SLOT, 3 * SLOT, 5 * SLOT]
    _make(CpuCopier, caches).copy_out(1, [3, 4, 5, 6], memory, offsets, None)
    for block, offset in zip([3, 4, 5, 6], offsets, strict=True):
        assert bytes(memory[offset : offset + PAGE]) == bytes(caches["c"][block].tolist())
    assert not any(memory[2 * SLOT : 3 * SLOT])


def test_adjacent_slots_are_one_transfer() -> None:
    """Adjacent slots are one transfer, because each transfer costs microseconds."""
    staging, flat = torch.zeros((5, 8), dtype=torch.uint8), torch.zeros(100, dtype=torch.uint8)
    sizes = [(len(rows), len(slots)) for rows, slots in copies._transfers(staging, flat, [0, 8, 16, 32, 40])]
    assert sizes == [(24, 24), (16, 16)]


def test_no_transfer_crosses_pinned_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """B4.16 A region is pinned in chunks, and each transfer lies in one chunk."""
    monkeypatch.setattr(pinning, "PIN_CHUNK_BYTES", 32)
    staging = torch.arange(40, dtype=torch.uint8).view(5, 8)
    flat = torch.zeros(100, dtype=torch.uint8)
    sizes = []
    for rows, slots in copies._transfers(staging, flat, [20, 28, 36, 60, 68]):
        sizes.append((slots.storage_offset(), len(slots)))
        slots.copy_(rows)
    assert sizes == [(20, 12), (32, 12), (60, 4), (64, 12)]
    assert flat[20:44].tolist() + flat[60:76].tolist() == list(range(40))


@pytest.mark.parametrize("way", ["copy_out", "copy_in"])
@pytest.mark.usefixtures("cuda")
def test_nothing_goes_on_behind_a_copy_that_failed(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """B4.11 After a failure no queued copy may run: its blocks are used for something else."""
    copier = _make(CudaCopier, _caches())
    monkeypatch.setattr(copies, "_transfers", lambda *_: iter([(None, None)]))
    with pytest.raises(AttributeError):
        getattr(copier, way)(1, [3], memoryview(bytearray(SLOT)), [0], copier.mark())
    assert (copier._out_stream.synchronized, copier._in_stream.synchronized) == (
        (1, 0) if way == "copy_out" else (0, 1)
    )


@pytest.mark.usefixtures("cuda")
def test_a_copy_waits_for_the_compute_before_it() -> None:
    """B4.11 A store reads KV after its compute; a load overwrites blocks after it."""
    caches = _caches()
    copier, memory = _make(CudaCopier, caches), memoryview(bytearray(SLOT))
    copier.copy_out(1, [3], memory, [0], Event(lambda: caches["c"][3].fill_(9)))
    assert bytes(memory[:PAGE]) == b"\x09" * PAGE, "what the step wrote"
    seen: list[torch.Tensor] = []
    copier.copy_in(1, [5], memory, [0], Event(lambda: seen.append(caches["c"][5].clone())))
    assert torch.equal(seen[0], _caches()["c"][5]), "the step still saw the block's last content"
    assert bytes(caches["c"][5].tolist()) == b"\x09" * PAGE
    assert copier._out_stream.synchronized == copier._in_stream.synchronized == 1, (
        "both return when the bytes are there"
    )


# ---- states


def _state_group(page_bytes: int) -> CacheGroup:
    return CacheGroup(0, 4, None, ("a", "b"), (page_bytes, page_bytes), is_state=True)


def test_states_of_several_tensors_follow_each_other_in_a_slot() -> None:
    """A state-space layer may have several state tensors, in pages with padding between them."""
    raw = torch.randint(0, 255, (2, BLOCKS, PAGE), dtype=torch.uint8)
    states = {name: [raw[number, :, :24], raw[number, :, 24:40]] for number, name in enumerate("ab")}
    copier = CpuCopier(build_layouts([_state_group(40)], states, BLOCKS))
    memory = memoryview(bytearray(80))
    copier.copy_out(0, [3], memory, [0], None)
    assert bytes(memory) == bytes(raw[0, 3, :40].tolist() + raw[1, 3, :40].tolist())
    copier.copy_in(0, [7], memory, [0], None)
    assert torch.equal(raw[1, 7, :40], raw[1, 3, :40])
    with pytest.raises(Unsupported, match="40 bytes, expected 48"):
        build_layouts([_state_group(48)], states, BLOCKS)
    with pytest.raises(Unsupported, match="no KV tensor"):
        build_layouts([_state_group(40)], {"a": [], "b": []}, BLOCKS)
