"""Addresses of buffers and batched copies."""

from __future__ import annotations

import ctypes
import itertools
import os
import random
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.cuda.host import copy
from kvtier.cuda.host.copy import HostBuffer, address_of, addresses_of, copy_batch

MIB = 1 << 20


class FakeTensor:
    class Device:  # noqa: D106
        def __init__(self, type_: str) -> None:
            self.type = type_

        def __str__(self) -> str:
            return f"{self.type}:0"

    def __init__(self, array: np.ndarray, device: str = "cpu") -> None:
        self.array = array
        self.device = self.Device(device)
        self.nbytes = array.nbytes

    def data_ptr(self) -> int:
        return int(self.array.ctypes.data)

    def is_contiguous(self) -> bool:
        return bool(self.array.flags.c_contiguous)


@pytest.mark.parametrize(
    "buffer",
    [b"abcd", bytearray(b"abcd"), memoryview(b"abcd"), memoryview(b"xabcdx")[1:5], np.frombuffer(b"abcd", np.int16)],
    ids=["bytes", "bytearray", "view", "slice", "numpy"],
)
def test_address_of_buffers(buffer: bytes) -> None:
    """The address of a buffer is where its bytes are, for each type."""
    address, size = address_of(buffer)
    assert ctypes.string_at(address, size) == b"abcd"


def test_address_of_a_tensor() -> None:
    """A tensor's address is its pointer, because a bfloat16 tensor has no buffer interface."""
    array = np.arange(6, dtype=np.int32)
    assert address_of(FakeTensor(array)) == (array.ctypes.data, 24)


@pytest.mark.parametrize(
    "buffers",
    [
        [],
        [memoryview(bytearray(b"abcd")), np.arange(4, dtype=np.int16)],
        [bytearray(b"abcd"), b"ab", memoryview(b"xabcdx")[1:5]],
        [FakeTensor(np.zeros(3)), memoryview(bytearray(8))],
        [bytearray(), np.zeros((0, 3))],
    ],
    ids=["none", "arrays", "others", "tensors", "empty"],
)
def test_addresses_of_many(buffers: list[HostBuffer]) -> None:
    """They equal the single addresses."""
    addresses, sizes = addresses_of(buffers)
    assert list(zip(addresses, sizes, strict=True)) == [address_of(buffer) for buffer in buffers]


@pytest.mark.parametrize(
    ("buffer", "error"),
    [
        (b"abcd", ValueError),
        (np.zeros((4, 4))[:, :2], ValueError),
        (np.zeros((2, 3)).T, ValueError),
        (FakeTensor(np.zeros(4), device="cuda"), ValueError),
        ([1], TypeError),
    ],
    ids=["read-only", "scattered", "transposed", "device", "none"],
)
def test_one_bad_buffer_among_many_is_refused(buffer: HostBuffer, error: type[Exception]) -> None:
    """Read-only, scattered and device buffers are refused; the other buffers stay unlocked."""
    good = bytearray(8)
    with pytest.raises(error):
        addresses_of([good, buffer], writable=True)
    good.extend(b"more")


def test_address_of_nothing() -> None:
    """An empty buffer has size 0."""
    assert address_of(b"")[1] == 0
    assert address_of(bytearray(), writable=True)[1] == 0


def test_address_leaves_the_buffer_free() -> None:
    """Asking for the address exports nothing: a bytearray can still grow."""
    buffer = bytearray(8)
    address_of(buffer)
    buffer.extend(b"more")


def test_declarations_of_other_packages_have_no_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    """Declarations of other packages on `ctypes.pythonapi` have no effect here."""
    for name in ("PyObject_GetBuffer", "PyBuffer_Release"):
        monkeypatch.setattr(getattr(ctypes.pythonapi, name), "argtypes", [ctypes.c_int])
    assert address_of(b"abcd")[1] == 4


@pytest.mark.parametrize(
    "buffer", [np.zeros((4, 4))[:, :2], memoryview(b"abcd")[::2], FakeTensor(np.zeros((4, 4))[:, :2])]
)
def test_scattered_buffers_are_refused(buffer: HostBuffer) -> None:
    """A buffer with gaps has no single address."""
    with pytest.raises(ValueError, match="contiguous"):
        address_of(buffer)


@pytest.mark.parametrize("buffer", [b"abcd", np.frombuffer(b"abcd", np.uint8)])
def test_read_only_buffers_are_not_filled(buffer: bytes) -> None:
    with pytest.raises(ValueError, match="writable"):
        address_of(buffer, writable=True)


def test_device_tensors_are_refused() -> None:
    """A tensor on a GPU has no host address."""
    with pytest.raises(ValueError, match="cuda:0"):
        address_of(FakeTensor(np.zeros(4), device="cuda"))


def test_other_objects_are_a_type_error() -> None:
    with pytest.raises(TypeError):
        address_of([1, 2, 3])  # type: ignore[arg-type]


@given(seed=st.integers(0, 2**32), sizes=st.lists(st.integers(0, 40), max_size=12), adjacent=st.booleans())
def test_copies_arrive(seed: int, sizes: list[int], *, adjacent: bool) -> None:
    """Every block arrives at its address, and no other byte changes."""
    rng = random.Random(seed)
    source = bytes(rng.randbytes(600))
    destination, expected = bytearray(600), bytearray(600)
    pieces = []
    to = start = 0
    for size in sizes:
        if not adjacent:
            to += rng.randrange(3)
            start += rng.randrange(3)
        pieces.append((to, start, size))
        expected[to : to + size] = source[start : start + size]
        to, start = to + size, start + size
    rng.shuffle(pieces)
    base_to, base_start = address_of(destination, writable=True)[0], address_of(source)[0]
    copy_batch([base_to + p[0] for p in pieces], [base_start + p[1] for p in pieces], [p[2] for p in pieces])
    assert destination == expected


@pytest.mark.parametrize("cores", [1, 2])
@pytest.mark.parametrize("block_bytes", [48 << 10, 512 << 10, 5 * MIB])
def test_long_batches_arrive(block_bytes: int, cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches that are copied without the GIL arrive, by one thread or two, for all block sizes."""
    monkeypatch.setattr(copy, "usable_cores", lambda: cores)
    monkeypatch.setattr(copy, "_helper", copy.CopyHelper())
    count = 12 * MIB // block_bytes
    source = np.random.default_rng(3).integers(0, 256, (count, block_bytes), np.uint8)
    target = np.zeros_like(source)
    order = np.random.default_rng(4).permutation(count)
    rows = [target[n].ctypes.data for n in range(count)]
    copy_batch(rows, [source[n].ctypes.data for n in order], [block_bytes] * count)
    assert np.array_equal(target, source[order])


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[int, ...]]]:
    """Records the copies of one thread instead of copying; no other thread is busy."""
    calls: list[tuple[str, tuple[int, ...]]] = []
    monkeypatch.setattr(copy, "_contention", copy._GilContention())
    monkeypatch.setattr(copy, "usable_cores", lambda: 1)
    monkeypatch.setattr(copy, "_helper", copy.CopyHelper())
    monkeypatch.setattr(copy, "time", SimpleNamespace(perf_counter=lambda: 1.0))
    monkeypatch.setattr(copy, "_memmove", lambda *arguments: calls.append(("free", arguments)))
    monkeypatch.setattr(copy, "_memmove_holding_gil", lambda *arguments: calls.append(("kept", arguments)))
    return calls


def columns(blocks: list[tuple[int, int, int]]) -> list[list[int]]:
    """The arguments of `copy_batch` for blocks."""
    return [list(column) for column in zip(*blocks, strict=True)]


def scattered(count: int, size: int) -> list[tuple[int, int, int]]:
    """Blocks that are not adjacent."""
    return [((1 << 40) + n * 16 * MIB, (2 << 40) + n * 16 * MIB, size) for n in range(count)]


def test_only_short_batches_hold_the_gil(moved: list[tuple[str, tuple[int, ...]]]) -> None:
    """Batches up to 4 MiB hold the GIL; longer ones release it for each block."""
    for count, how in ((64, "kept"), (65, "free")):
        moved.clear()
        blocks = scattered(count, 64 << 10)
        copy_batch(*columns(blocks))
        assert moved == [(how, block) for block in blocks]


def test_large_blocks_are_cut(moved: list[tuple[str, tuple[int, ...]]]) -> None:
    """Large blocks are split, so that two threads can share one."""
    copy_batch([1 << 40], [1 << 41], [5 * MIB + 1])
    assert [how for how, _ in moved] == ["free"] * 6
    assert [move for _, move in moved] == [
        ((1 << 40) + n * MIB, (1 << 41) + n * MIB, MIB if n < 5 else 1) for n in range(6)
    ]


@pytest.mark.parametrize("size", [100, 64 << 10, 256 << 10, 2 * MIB])
def test_the_gil_is_held_while_another_thread_is_busy(moved: list[tuple[str, tuple[int, ...]]], size: int) -> None:
    """The whole batch holds the GIL, each block once and in order; the helper is not started."""
    copy._contention._busy_until = 60
    copy_batch(*columns(scattered(12 * MIB // size, size)))
    assert {how for how, _ in moved} == {"kept"}
    assert sum(move[2] for _, move in moved) == 12 * MIB // size * size
    assert copy._helper._available is None


@pytest.fixture
def late(moved: list[tuple[str, tuple[int, ...]]], monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Copies without the GIL that return late while `late` is set.

    `preempted` is the preemption count.
    """
    state = SimpleNamespace(moved=moved, late=True, preempted=7, now=1.0)

    def move(*arguments: int) -> None:
        moved.append(("free", arguments))
        state.now += 0.008 if state.late else 0

    monkeypatch.setattr(copy, "_memmove", move)
    monkeypatch.setattr(copy, "time", SimpleNamespace(perf_counter=lambda: state.now))
    monkeypatch.setattr(copy, "_preemptions", lambda: state.preempted)
    return state


def test_a_second_late_copy_holds_the_gil(late: SimpleNamespace) -> None:
    """The first late copy raises a suspicion; one late block afterwards confirms it."""
    blocks = scattered(100, 64 << 10)
    copy_batch(*columns(blocks))
    assert [move for _, move in late.moved] == blocks
    assert [how for how, _ in late.moved] == ["free"] * 5 + ["kept"] * 95
    assert copy._contention._busy_until > late.now


def test_after_the_busy_time_one_block_is_a_probe(late: SimpleNamespace) -> None:
    """After the busy time one block is a probe.

    If it is in time, the next piece releases the GIL again.
    """
    blocks = scattered(100, 64 << 10)
    copy_batch(*columns(blocks))
    for is_late, hows in ((True, ["free"] + ["kept"] * 99), (False, ["free"] + ["kept"] * 3 + ["free"] * 96)):
        late.moved.clear()
        late.late = is_late
        copy._contention._busy_until = 0
        copy_batch(*columns(blocks))
        assert [how for how, _ in late.moved] == hows


def test_only_a_probe_settles_a_suspicion(late: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """A late piece of another thread does not confirm a suspicion."""
    contention = copy._contention

    def move(*arguments: int) -> None:
        late.moved.append(("free", arguments))
        if len(late.moved) == 2:
            contention._suspected = True

    monkeypatch.setattr(copy, "_memmove", move)
    copy_batch(*columns(scattered(100, 64 << 10)))
    assert [how for how, _ in late.moved] == ["free"] * 5 + ["kept"] * 3 + ["free"] * 92
    assert not contention._suspected


def test_preemption_is_not_gil_contention(late: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of a preempted thread was not delayed by the GIL."""
    monkeypatch.setattr(copy, "_preemptions", itertools.count().__next__)
    copy_batch(*columns(scattered(40, 256 << 10)))
    assert [how for how, _ in late.moved] == ["free"] * 40


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="on one processor every late copy was preempted")
def test_a_busy_thread_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long copies detect another thread that runs Python code."""
    contention = copy._GilContention()
    monkeypatch.setattr(copy, "_contention", contention)
    buffers = bytearray(16 * MIB), bytearray(16 * MIB)
    to, start = (address_of(buffer, writable=True)[0] for buffer in buffers)
    over = threading.Event()
    busy = threading.Thread(target=lambda: [None for _ in iter(over.is_set, True)])
    busy.start()
    try:
        patience = time.monotonic() + 60  # on a busy machine many late copies are preempted
        while not contention._busy_until and time.monotonic() < patience:
            copy_batch(
                [to + n * 2 * MIB for n in range(8)], [start + (7 - n) * 2 * MIB for n in range(8)], [2 * MIB] * 8
            )
    finally:
        over.set()
        busy.join()
    assert contention._busy_until > 0


def test_lists_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="different lengths"):
        copy_batch([1, 2], [1, 2], [0])


def test_pieces_of_two_threads_are_all_of_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte is copied once, in pieces of at most 1 MiB, for all sizes.

    Both threads take part.
    """
    moved: list[tuple[int, int, int]] = []
    threads: set[int] = set()
    both = threading.Barrier(2)

    def move(*block: int) -> None:
        if threading.get_ident() not in threads:
            threads.add(threading.get_ident())
            both.wait(60)
        moved.append(block)  # type: ignore[arg-type]

    monkeypatch.setattr(copy, "usable_cores", lambda: 2)
    monkeypatch.setattr(copy, "_memmove", move)
    monkeypatch.setattr(copy, "_contention", copy._GilContention())
    monkeypatch.setattr(copy, "_helper", copy.CopyHelper())
    monkeypatch.setattr(copy._GilContention, "_is_late", lambda *_: False)
    for sizes in ([100] * 50_000, [64 << 10] * 100, [3 * MIB, 5, 2 * MIB, MIB + 1]):
        blocks = [((1 << 40) + n * 8 * MIB, (2 << 40) + n * 8 * MIB, size) for n, size in enumerate(sizes)]
        moved.clear()
        threads.clear()
        copy_batch(*columns(blocks))
        assert len(threads) == 2
        assert max(size for _, _, size in moved) <= MIB
        covered: list[list[int]] = []
        for to, start, size in sorted(moved):
            if covered and covered[-1][0] + covered[-1][2] == to and covered[-1][1] + covered[-1][2] == start:
                covered[-1][2] += size
            else:
                covered.append([to, start, size])
        assert covered == [list(block) for block in blocks]
