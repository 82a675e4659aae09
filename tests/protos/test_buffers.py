"""Addresses of buffers: contiguous memory only, and only of the permission that is asked for."""

from __future__ import annotations

import ctypes

import pytest

from kvtier.protos.buffers import address_of, copy_from, extent_of

DATA = bytes(range(200))


@pytest.mark.parametrize("buffer", [DATA, bytearray(DATA), memoryview(DATA), memoryview(bytearray(DATA)).cast("I")])
def test_the_bytes_are_at_the_address(buffer: bytes) -> None:
    """Of read-only and of writable memory, in items of any size."""
    assert ctypes.string_at(*extent_of(buffer)) == DATA


def test_a_slice_begins_within_its_buffer() -> None:
    memory = bytearray(DATA)
    view = memoryview(memory)
    assert address_of(view[7:]) == address_of(view) + 7 == address_of(view[7:], writable=True)
    copy_from(address_of(view[7:], writable=True), memoryview(DATA)[:3])
    assert memory == DATA[:7] + DATA[:3] + DATA[10:]
    view.release()
    memory.clear()  # fails while a buffer is exported


@pytest.mark.parametrize(
    ("buffer", "writable"), [(DATA, True), (memoryview(DATA)[::2], False), (memoryview(bytearray(4))[::-1], True)]
)
def test_memory_that_a_copy_would_corrupt_is_refused(buffer: object, writable: bool) -> None:  # noqa: FBT001
    """Read-only memory for a writer, and memory with gaps."""
    with pytest.raises(BufferError):
        extent_of(buffer, writable=writable)


def test_an_object_without_a_buffer_is_refused() -> None:
    with pytest.raises(TypeError):
        extent_of([1, 2])
