"""Which process exported memory, and why another one cannot open it.

The driver says "invalid argument" or "invalid device context" for half a dozen reasons. What it goes by is known from the field:
memory handles need the same kernel, the same device and two different pids (numbers, even in different PID namespaces); event
handles also need one /dev/shm, through which the driver passes them (LMCache #4551, UCX #11514, vLLM #55906).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from .device_errors import Cause, DeviceError

__all__ = ["Origin", "explain", "obstacle", "other_host"]

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Origin:
    """A process, as far as it decides what can be shared with it: kernel, pid, namespaces and /dev/shm (device numbers)."""

    boot: str
    pid: int
    pid_namespace: int
    shm_device: int

    @classmethod
    def here(cls) -> Origin:
        """The process that calls. What cannot be read (no /proc) is empty or 0, and then equal nowhere but here."""
        return cls(_boot(), os.getpid(), _number("/proc/self/ns/pid", "st_ino"), _number("/dev/shm", "st_dev"))  # noqa: S108

    def shares_events_with(self, other: Origin) -> bool:
        """Whether events of one process can be opened by the other: the driver passes them through files in /dev/shm."""
        return self.boot == other.boot and self.shm_device == other.shm_device != 0

    def is_gone(self, observer: Origin) -> bool:
        """Whether the process has ended, as far as the observer, which is this process, can tell."""
        if self.pid_namespace != observer.pid_namespace:
            return False
        try:
            state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return True
        return state[0] in {"Z", "X"}


def other_host(exporter: Origin, opener: Origin) -> DeviceError | None:
    """Why no process of the opener's kernel can open what was exported; None: one may."""
    if exporter.boot == opener.boot:
        return None
    detail = f"exported under boot {exporter.boot or 'unknown'}, this is {opener.boot or 'unknown'}"
    return DeviceError(Cause.OTHER_HOST, detail)


def obstacle(exporter: Origin, opener: Origin) -> DeviceError | None:
    """What is certain to fail, before anything is tried; None: it may work."""
    if (elsewhere := other_host(exporter, opener)) is not None:
        return elsewhere
    if exporter.pid == opener.pid:
        same = exporter.pid_namespace == opener.pid_namespace
        return DeviceError(Cause.SAME_PROCESS if same else Cause.SAME_PID, f"pid {exporter.pid}")
    return None


def explain(error: DeviceError, exporter: Origin, opener: Origin) -> DeviceError:
    """The error to report where the driver would not open something: the likely cause, if there is one, in place of none."""
    if error.cause is not Cause.CANNOT_OPEN:
        return error
    if exporter.is_gone(opener):
        return DeviceError(Cause.EXPORTER_GONE, f"pid {exporter.pid}: {error.detail}")
    if exporter.pid_namespace != opener.pid_namespace:
        return DeviceError(Cause.OTHER_NAMESPACE, error.detail)
    return error


def _boot() -> str:
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


def _number(path: str, field: str) -> int:
    try:
        return int(getattr(Path(path).stat(), field))
    except OSError:
        return 0
