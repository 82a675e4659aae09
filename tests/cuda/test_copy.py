"""Addresses of buffers and batched copies."""

from __future__ import annotations

import ctypes
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.cuda.copy import HostBuffer, address_of, copy_batch


class FakeTensor:
    """As much of a torch tensor as counts here."""

    class Device:
        """As much of a torch device."""

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
    """The address is where the bytes are, whatever holds them."""
    address, size = address_of(buffer)
    assert ctypes.string_at(address, size) == b"abcd"


def test_address_of_a_tensor() -> None:
    """Tensors are taken by their pointer: a bfloat16 tensor offers no buffer."""
    array = np.arange(6, dtype=np.int32)
    assert address_of(FakeTensor(array)) == (array.ctypes.data, 24)


def test_address_of_nothing() -> None:
    """An empty buffer is a buffer."""
    assert address_of(b"")[1] == 0
    assert address_of(bytearray(), writable=True)[1] == 0


def test_address_leaves_the_buffer_free() -> None:
    """Asking for the address exports nothing: a bytearray can still grow."""
    buffer = bytearray(8)
    address_of(buffer)
    buffer.extend(b"more")


def test_others_may_use_the_same_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another package's declarations on `ctypes.pythonapi` are not ours."""
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
    """Nobody gets the address of immutable bytes to write to."""
    with pytest.raises(ValueError, match="writable"):
        address_of(buffer, writable=True)


def test_device_tensors_are_refused() -> None:
    """An address on a GPU is not one on the host."""
    with pytest.raises(ValueError, match="cuda:0"):
        address_of(FakeTensor(np.zeros(4), device="cuda"))


def test_what_is_no_buffer_is_a_type_error() -> None:
    """A list of numbers is no buffer."""
    with pytest.raises(TypeError):
        address_of([1, 2, 3])  # type: ignore[arg-type]


@given(seed=st.integers(0, 2**32), sizes=st.lists(st.integers(0, 40), max_size=12), adjacent=st.booleans())
def test_copies_arrive(seed: int, sizes: list[int], *, adjacent: bool) -> None:
    """Every block arrives where it should and nothing else changes, merged or not."""
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


def test_neighbours_are_copied_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs that are adjacent at both ends become one call; a gap at either end starts a new one."""
    calls = []
    monkeypatch.setattr(ctypes, "memmove", lambda *arguments: calls.append(arguments))
    copy_batch([100, 110, 120, 140], [500, 510, 530, 540], [10, 10, 10, 10])
    assert calls == [(100, 500, 20), (120, 530, 10), (140, 540, 10)]


def test_lists_of_different_lengths_are_refused() -> None:
    """A missing size is an error, not a copy of less."""
    with pytest.raises(ValueError, match="shorter"):
        copy_batch([1, 2], [1, 2], [0])
