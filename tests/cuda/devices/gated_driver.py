"""The host driver for copy workers of tests.

Holds the first stream's copies while a file exists.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

from devices import fake_cuda
from kvtier.cuda.device.cuda_driver import CudaDriver
from kvtier.cuda.device.device_errors import Cause, DeviceError
from kvtier.cuda.testing.host_driver import HostDriver

__all__ = ["Gate", "make", "make_cuda", "make_late"]

_VARIABLE = "DEVICE_TEST_GATE"


class Gate:
    """The test's side of the gate."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._reached = path.with_name(path.name + ".reached")
        self.environment = {_VARIABLE: str(path)}

    def close(self) -> None:
        """Holds the next copy."""
        self._reached.unlink(missing_ok=True)
        self._path.touch()

    def wait_reached(self, seconds: float = 60.0) -> None:
        """Returns when a copy is held."""
        deadline = time.monotonic() + seconds
        while not self._reached.exists():
            assert time.monotonic() < deadline, "no copy came to the gate"
            time.sleep(0.002)

    def open(self) -> None:
        """Releases the copies."""
        self._path.unlink(missing_ok=True)


class _Pace:
    """The copy worker's side."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._held: threading.Thread | None = None

    def __call__(self) -> None:
        """Called before each copy, on its stream's thread."""
        if not self._path.exists():
            return
        with self._lock:
            if self._held is not None and self._held is not threading.current_thread():
                return
            self._held = threading.current_thread()
        self._path.with_name(self._path.name + ".reached").touch()
        while self._path.exists():
            time.sleep(0.002)
        self._held = None


def make(device: str) -> HostDriver:
    """The callable in `devices.driver`."""
    if device.startswith("missing"):
        raise DeviceError(Cause.NO_DEVICE, device)
    return HostDriver(device, pace=_Pace(Path(os.environ[_VARIABLE])))


def make_late(device: str) -> HostDriver:
    """A driver that starts only when the gate is open."""
    while Path(os.environ[_VARIABLE]).exists():
        time.sleep(0.01)
    return HostDriver(device)


def make_cuda(device: str) -> CudaDriver:
    """CUDA's driver over the fake libcuda."""
    fake_cuda.load()
    return CudaDriver(device)
