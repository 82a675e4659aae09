"""Addresses of buffers, and copies that release the GIL.

An assignment `view[...] = other` in Python holds the GIL, for milliseconds if the view is large.
"""

from __future__ import annotations

import ctypes

__all__ = ["address_of", "copy_from", "extent_of"]


class _PyBuffer(ctypes.Structure):
    """`Py_buffer` of CPython's C API; its layout is part of the stable ABI since 3.11."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.c_void_p),
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


# `pythonapi[...]` returns a private function object. The attribute `pythonapi.PyObject_GetBuffer`
# is shared, so other libraries can change its argument types.
_get_buffer = ctypes.pythonapi["PyObject_GetBuffer"]
_get_buffer.argtypes = (ctypes.py_object, ctypes.POINTER(_PyBuffer), ctypes.c_int)
_release_buffer = ctypes.pythonapi["PyBuffer_Release"]
_release_buffer.argtypes = (ctypes.POINTER(_PyBuffer),)
_release_buffer.restype = None
_a_byte_of = ctypes.c_char.from_buffer
_WRITABLE = 1  # PyBUF_WRITABLE; without it PyBUF_SIMPLE: flat and contiguous


def extent_of(buffer: object, *, writable: bool = False) -> tuple[int, int]:
    """Returns the address and the size in bytes of a contiguous buffer.

    Raises as the buffer does: TypeError if it is no buffer, otherwise BufferError or ValueError.
    """
    view = _PyBuffer()
    _get_buffer(buffer, view, _WRITABLE if writable else 0)
    address, nbytes = view.buf or 0, view.len
    _release_buffer(view)
    return address, nbytes


def address_of(view: memoryview, *, writable: bool = False) -> int:
    """Returns the address of a contiguous view. Keep the view alive while you use the address."""
    try:
        return ctypes.addressof(_a_byte_of(view))
    except (TypeError, ValueError):  # read-only or empty, or the error that `extent_of` raises
        return extent_of(view, writable=writable)[0]


def copy_from(target: int, source: memoryview) -> None:
    """Copies all of `source` to the address `target` without holding the GIL."""
    ctypes.memmove(target, address_of(source), source.nbytes)
