"""Buffer addresses, and copies that release the GIL.

An assignment `view[...] = other` in Python holds the GIL, for milliseconds if the view is large.
"""

from __future__ import annotations

import ctypes

__all__ = ["address_of", "copy_from", "writable_address_of"]


class _PyBuffer(ctypes.Structure):
    """`Py_buffer`, whose layout is part of CPython's stable ABI."""

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
# is shared, so other modules can change its argument types.
_get_buffer = ctypes.pythonapi["PyObject_GetBuffer"]
_get_buffer.argtypes = (ctypes.py_object, ctypes.POINTER(_PyBuffer), ctypes.c_int)
_release_buffer = ctypes.pythonapi["PyBuffer_Release"]
_release_buffer.argtypes = (ctypes.POINTER(_PyBuffer),)
_release_buffer.restype = None


def writable_address_of(view: memoryview) -> int:
    """Returns the address of a non-empty writable view (see `address_of`). Raises TypeError."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def address_of(view: memoryview) -> int:
    """Returns the address of a contiguous view. Keep the view alive while you use the address."""
    buffer = _PyBuffer()
    _get_buffer(view, buffer, 0)
    address = buffer.buf or 0
    _release_buffer(buffer)
    return address


def copy_from(target: int, source: memoryview) -> None:
    """Copies all of `source` to the address `target` without holding the GIL."""
    ctypes.memmove(target, address_of(source), source.nbytes)
