"""The host driver for copy workers of tests.

Holds the first stream's copies while a file exists.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

from harness.polling import wait_until

from devices import fake_cuda
from kvtier.cuda.device.cuda_driver import CudaDriver
from kvtier.cuda.device.device_errors import Cause, DeviceError
from kvtier.cuda.testing.host_driver import HostDriver

__all__ = ["Gate", "make", "make_cuda", "make_late"]

_VARIABLE = "DEVICE_TEST_GATE"
_CLOSED_SECONDS = 3600.0


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
        wait_until(self._reached.exists, seconds, otherwise="no copy came to the gate", interval=0.002)

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
        wait_until(lambda: not self._path.exists(), _CLOSED_SECONDS, interval=0.002)
        self._held = None


def make(device: str) -> HostDriver:
    if device.startswith("missing"):
        raise DeviceError(Cause.NO_DEVICE, device)
    return HostDriver(device, pace=_Pace(Path(os.environ[_VARIABLE])))


def make_late(device: str) -> HostDriver:
    """A driver that starts only when the gate is open."""
    path = Path(os.environ[_VARIABLE])
    wait_until(lambda: not path.exists(), _CLOSED_SECONDS)
    return HostDriver(device)


def make_cuda(device: str) -> CudaDriver:
    """CUDA's driver over the fake libcuda."""
    fake_cuda.load()
    return CudaDriver(device)
