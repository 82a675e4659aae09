"""NVIDIA's driver API through cuda-bindings. All errors are raised as DeviceError."""

from __future__ import annotations

import ctypes
import importlib
from array import array
from collections.abc import Sequence
from typing import Any, Final

from .device_errors import Cause, DeviceError

__all__ = ["BatchCopy", "CudaLibrary", "import_bindings"]

_CONTEXT_LOST: Final = {
    "CUDA_ERROR_DEINITIALIZED",
    "CUDA_ERROR_ECC_UNCORRECTABLE",
    "CUDA_ERROR_ILLEGAL_ADDRESS",
    "CUDA_ERROR_LAUNCH_TIMEOUT",
    "CUDA_ERROR_CONTEXT_IS_DESTROYED",
    "CUDA_ERROR_ASSERT",
    "CUDA_ERROR_HARDWARE_STACK_ERROR",
    "CUDA_ERROR_ILLEGAL_INSTRUCTION",
    "CUDA_ERROR_MISALIGNED_ADDRESS",
    "CUDA_ERROR_INVALID_ADDRESS_SPACE",
    "CUDA_ERROR_INVALID_PC",
    "CUDA_ERROR_LAUNCH_FAILED",
    "CUDA_ERROR_CONTAINED",
    "CUDA_ERROR_MPS_CLIENT_TERMINATED",
    "CUDA_ERROR_UNKNOWN",
}
"""Errors after which every call in the same context fails."""

_CAPTURE_PREFIX: Final = "CUDA_ERROR_STREAM_CAPTURE"


def import_bindings(name: str) -> Any:
    """Imports a module of cuda-bindings. Raises DeviceError (NO_BINDINGS)."""
    try:
        return importlib.import_module(f"cuda.bindings.{name}")
    except ImportError as error:
        # `python -m` in this repository's root finds the repository's folder `cuda` instead of the
        # package, unless PYTHONSAFEPATH=1 is set.
        raise DeviceError(Cause.NO_BINDINGS, str(error)) from error


class CudaLibrary:
    """The driver's functions. Raises DeviceError (NO_BINDINGS, NO_DRIVER) if there is no driver."""

    def __init__(self) -> None:
        self.api = import_bindings("driver")
        try:
            self.call("cuInit", 0)
        except DeviceError as error:
            raise DeviceError(Cause.NO_DRIVER, error.detail) from error

    def call(self, name: str, *arguments: object) -> Any:
        """Calls a function; returns its result or a tuple of results. Raises DeviceError."""
        code, results = self.attempt(name, *arguments)
        if code != "CUDA_SUCCESS":
            raise self.error(name, code)
        return results[0] if len(results) == 1 else tuple(results) or None

    def attempt(self, name: str, *arguments: object) -> tuple[str, Sequence[Any]]:
        """Calls a function; returns its code name and, if the code is CUDA_SUCCESS, its results."""
        try:
            code, *results = getattr(self.api, name)(*arguments)
        except (RuntimeError, AttributeError) as error:  # libcuda or the bindings lack the function
            raise DeviceError(Cause.REFUSED, f"{name}: {error}") from error
        return code.name, results

    @staticmethod
    def error(what: str, code: str) -> DeviceError:
        if code in _CONTEXT_LOST:
            return DeviceError(Cause.BROKEN, f"{what}: {code}")
        if code.startswith(_CAPTURE_PREFIX):
            return DeviceError(Cause.CAPTURING, f"{what}: {code}")
        return DeviceError(Cause.REFUSED, f"{what}: {code}")

    def code_name(self, code: int) -> str:
        """Returns the name of a result code, for calls that do not go through the bindings."""
        try:
            return str(self.api.CUresult(code).name)
        except ValueError:
            return f"CUDA error {code}"


class _Attributes(ctypes.Structure):
    """`CUmemcpyAttributes`. A location is a type and an id."""

    _fields_ = (
        ("source_access_order", ctypes.c_int),
        ("source_location", ctypes.c_int * 2),
        ("destination_location", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    )


class BatchCopy:
    """`cuMemcpyBatchAsync`, called through ctypes with arrays of addresses.

    The bindings need one Python object per address. The class uses the function's version of
    CUDA 12.8, which returns the index of a failed copy. Newer drivers still have this version.
    Raises DeviceError (REFUSED) if the driver lacks the function.
    """

    _VERSION = 12080
    _IN_STREAM_ORDER = 1
    _OVERLAP_WITH_COMPUTE = 1
    _TYPE = ctypes.CFUNCTYPE(  # releases the GIL during the call
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.POINTER(_Attributes),
        ctypes.POINTER(ctypes.c_size_t),
        ctypes.c_size_t,
        ctypes.POINTER(ctypes.c_size_t),
        ctypes.c_void_p,
    )

    def __init__(self, library: CudaLibrary) -> None:
        self._library = library
        pointer, _ = library.call("cuGetProcAddress", b"cuMemcpyBatchAsync", self._VERSION, 0)
        if not pointer:
            raise DeviceError(Cause.REFUSED, "the driver has no cuMemcpyBatchAsync (new in CUDA 12.8)")
        self._function = self._TYPE(int(pointer))
        self._attributes = _Attributes(source_access_order=self._IN_STREAM_ORDER, flags=self._OVERLAP_WITH_COMPUTE)
        self._first = ctypes.c_size_t(0)

    def __call__(self, stream: int, destinations: array[int], sources: array[int], sizes: array[int]) -> None:
        """See `Driver.copy`. The arrays hold 64-bit integers."""
        failed = ctypes.c_size_t(0)
        (to, count), (start, _), (lengths, _) = (part.buffer_info() for part in (destinations, sources, sizes))
        code = self._function(to, start, lengths, count, self._attributes, self._first, 1, failed, stream)
        if code:
            raise self._library.error(
                f"cuMemcpyBatchAsync (copy {failed.value} of {count})", self._library.code_name(code)
            )
