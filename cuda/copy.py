"""Batched copies on the host, without the GIL.

`memoryview[...] = ...` and `bytes(...)` hold the GIL while they copy, and with it every other call of the process.
`memmove` through ctypes does not; but it checks nothing: addresses, sizes and lifetimes are the caller's word. Any
thread may call.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

__all__ = ["HostBuffer", "TensorLike", "address_of", "copy_batch"]


class TensorLike(Protocol):
    """What is used of a torch tensor; torch itself is never imported here."""

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        ...

    @property
    def device(self) -> Any:
        """Where it is; has a `type`."""
        ...

    def data_ptr(self) -> int:
        """Returns its address."""
        ...

    def is_contiguous(self) -> bool:
        """Says whether its elements lie in one piece, in order."""
        ...


HostBuffer: TypeAlias = "ReadableBuffer | TensorLike"
"""Bytes in one piece on the host: memoryview, bytes, bytearray, numpy array, CPU tensor, …"""


class _PyBuffer(ctypes.Structure):
    """`Py_buffer` of CPython's C API; its layout is part of the stable ABI since 3.11."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


# Subscripts give function objects of our own; attributes are shared with, and reconfigured by, whoever else uses them.
_get_buffer = ctypes.pythonapi["PyObject_GetBuffer"]
_get_buffer.argtypes = [ctypes.py_object, ctypes.POINTER(_PyBuffer), ctypes.c_int]
_release_buffer = ctypes.pythonapi["PyBuffer_Release"]
_release_buffer.argtypes = [ctypes.POINTER(_PyBuffer)]
_release_buffer.restype = None
_WRITABLE = 1  # PyBUF_WRITABLE; without it PyBUF_SIMPLE: flat and contiguous


def address_of(buffer: HostBuffer, *, writable: bool = False) -> tuple[int, int]:
    """Returns where a buffer's bytes are and how many: (address, size in bytes).

    The address holds as long as the caller keeps the buffer and does not resize it. Pass `writable` for a buffer that
    is to be filled. Raises `ValueError` for a buffer that is not contiguous, is read-only where it is to be filled,
    or is on a device, and `TypeError` for what is no buffer.
    """
    if type(buffer) is not memoryview and hasattr(buffer, "data_ptr"):
        return _tensor_address(buffer)  # type: ignore[arg-type]
    view = _PyBuffer()
    try:
        _get_buffer(buffer, view, _WRITABLE if writable else 0)
    except (BufferError, ValueError) as error:  # numpy raises ValueError
        raise ValueError(f"a contiguous {'writable ' if writable else ''}buffer is wanted: {error}") from error
    address, size = view.buf or 0, view.len
    _release_buffer(view)
    return address, size


def _tensor_address(tensor: TensorLike) -> tuple[int, int]:
    if not tensor.is_contiguous():
        raise ValueError("a contiguous tensor is wanted: call .contiguous(), or hand over its blocks one by one")
    if tensor.device.type != "cpu":
        raise ValueError(f"a tensor on the host is wanted, not one on {tensor.device}")
    return tensor.data_ptr(), tensor.nbytes


def copy_batch(destinations: Sequence[int], sources: Sequence[int], sizes: Sequence[int]) -> None:
    """Copies `sizes[i]` bytes from address `sources[i]` to address `destinations[i]`, for all i.

    Blocks whose neighbours follow them at both ends are copied as one, so hand them over in the order of their
    addresses where that is free. Takes the three lists as they are: nothing is checked but that they are of one
    length (`ValueError`). The caller keeps the memory mapped meanwhile.
    """
    move = ctypes.memmove
    for destination, source, size in _runs(destinations, sources, sizes):
        move(destination, source, size)


def _runs(destinations: Sequence[int], sources: Sequence[int], sizes: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    to, start, length = 0, 0, 0
    for destination, source, size in zip(destinations, sources, sizes, strict=True):
        if destination == to + length and source == start + length:
            length += size
            continue
        if length:
            yield to, start, length
        to, start, length = destination, source, size
    if length:
        yield to, start, length
