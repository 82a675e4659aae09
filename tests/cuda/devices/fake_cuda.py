"""Loads the fake libcuda (`fake_cuda.c`) before cuda-bindings are imported."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
from pathlib import Path

from kvtier.cuda.device.cuda_library import import_bindings
from kvtier.cuda.device.device_errors import Cause, DeviceError

__all__ = ["is_loaded", "load"]

_SOURCE = Path(__file__).with_suffix(".c")
_NAME = f"fake_cuda.{hashlib.sha256(_SOURCE.read_bytes()).hexdigest()[:16]}.so"


def is_loaded() -> bool:
    """Whether this process has loaded it; then it cannot load a real driver."""
    return _NAME in Path("/proc/self/maps").read_text()


def load() -> None:
    """Raises DeviceError without cuda-bindings or a compiler, or if a real driver is loaded."""
    import_bindings("driver")
    library = _compiled()
    if not is_loaded() and _has_real_driver():
        raise DeviceError(Cause.NO_DRIVER, "there is a real one")
    ctypes.CDLL(str(library))


def _has_real_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def _compiled() -> Path:
    compiler = shutil.which("cc")
    if compiler is None:
        raise DeviceError(Cause.NO_DRIVER, "nothing compiles the stand-in here")
    library = _SOURCE.parent / "__pycache__" / _NAME
    library.parent.mkdir(exist_ok=True)
    if not library.exists():
        made = library.with_suffix(f".{os.getpid()}")
        flags = ["-shared", "-fPIC", "-O1", "-Wl,-soname,libcuda.so.1", "-lpthread", "-ldl"]
        subprocess.run([compiler, "-o", str(made), str(_SOURCE), *flags], check=True, timeout=60)
        made.rename(library)  # several processes may build it
    return library
